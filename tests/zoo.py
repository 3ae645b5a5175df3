"""All methods, on networks of a few thousand parameters: functions that make one by what it is called here."""

import torch

from pearl.conformance import SIZE, small_resnet, small_vit
from pearl.methods.coda_prompt import CodaPrompt
from pearl.methods.derpp import DerPlusPlus
from pearl.methods.er import Er
from pearl.methods.er_ace import ErAce
from pearl.methods.ewc import OnlineEwc
from pearl.methods.fecam import FeCam
from pearl.methods.fetril import FeTril
from pearl.methods.finetune import Finetune
from pearl.methods.inflora import InfLoRA
from pearl.methods.isolation import Isolation
from pearl.methods.joint import Joint
from pearl.methods.l2p import L2P
from pearl.methods.lwf import Lwf
from pearl.methods.ncm import NearestMean
from pearl.methods.packnet import PackNet
from pearl.methods.pearl import Pearl
from pearl.methods.pnn import Progressive
from pearl.methods.seqlora import SeqLora
from pearl.nn.bsconv import bsc
from pearl.nn.ranks import EnergyRule, FixedRule, RandomRule


def separable():
    torch.manual_seed(1)
    return bsc(SIZE, width=4)


ZOO = {
    "finetune": lambda: Finetune(small_resnet()),
    "joint": lambda: Joint(small_resnet()),
    "isolation": lambda: Isolation(small_resnet()),
    # memories smaller than the images of one task, so that they are full
    "er": lambda: Er(small_resnet(), buffer_size=20, minibatch_size=8),
    "er, balanced": lambda: Er(small_resnet(), buffer_size=19, minibatch_size=8, policy="balanced"),
    "er_ace": lambda: ErAce(small_resnet(), buffer_size=20, minibatch_size=8),
    "er_ace, cosine": lambda: ErAce(small_resnet(), buffer_size=20, minibatch_size=8, head="cosine"),
    "derpp": lambda: DerPlusPlus(small_resnet(), buffer_size=20, minibatch_size=8),
    "lwf": lambda: Lwf(small_resnet()),
    "ewc": lambda: OnlineEwc(small_resnet()),
    "pearl": lambda: Pearl(small_resnet()),
    "pearl with given weights": lambda: Pearl(small_resnet(), reference="given"),
    "pearl on BSC": lambda: Pearl(separable()),
    "pearl, energy rule, view": lambda: Pearl(small_resnet(), rank=EnergyRule(keep=0.8), fold="view"),
    "pearl, random ranks": lambda: Pearl(small_resnet(), rank=RandomRule()),
    "pearl, fixed rank, unfold": lambda: Pearl(small_resnet(), rank=FixedRule(r=2), fold="unfold"),
    "pearl, from the SVD": lambda: Pearl(small_resnet(), init="svd"),
    "seqlora": lambda: SeqLora(small_vit()),
    "seqlora on a ResNet": lambda: SeqLora(small_resnet()),
    "seqlora on BSC, given weights": lambda: SeqLora(separable(), rank=2, reference="given"),
    "inflora": lambda: InfLoRA(small_vit(), rank=2, energy=0.9, tasks=3),
    "l2p": lambda: L2P(small_vit(), pool=4, length=2, top_k=2),
    "coda-prompt": lambda: CodaPrompt(small_vit(), per_task=2, length=4, blocks=2, ortho=0.1),
    "pnn": lambda: Progressive(small_resnet()),
    "packnet": lambda: PackNet(small_resnet()),
    "packnet on BSC": lambda: PackNet(separable(), prune=0.5),
    "ncm": lambda: NearestMean(small_resnet()),
    "ncm with given weights": lambda: NearestMean(small_resnet(), extractor="given", distance="cosine"),
    "fetril": lambda: FeTril(small_resnet()),
    "fetril with given weights": lambda: FeTril(small_resnet(), extractor="given"),
    "fecam": lambda: FeCam(small_resnet()),
}
