import pytest
import timm
import torch

from conformance import SIZE, checks
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
from pearl.nn.resnet import resnet18


def resnet():
    torch.manual_seed(1)
    return resnet18(SIZE, width=4)


def separable():
    torch.manual_seed(1)
    return bsc(SIZE, width=4)


def vit():
    torch.manual_seed(1)
    shape = {"img_size": SIZE, "patch_size": 4, "embed_dim": 16, "depth": 3, "num_heads": 2}
    net = timm.create_model("test_vit", num_classes=0, **shape)
    net.dim, net.pretrained = 16, True
    return net


METHODS = {
    "finetune": lambda: Finetune(resnet()),
    "joint": lambda: Joint(resnet()),
    "isolation": lambda: Isolation(resnet()),
    # memories smaller than the images of one task, so that they are full
    "er": lambda: Er(resnet(), buffer_size=20, minibatch_size=8),
    "er, balanced": lambda: Er(resnet(), buffer_size=19, minibatch_size=8, policy="balanced"),
    "er_ace": lambda: ErAce(resnet(), buffer_size=20, minibatch_size=8),
    "derpp": lambda: DerPlusPlus(resnet(), buffer_size=20, minibatch_size=8),
    "lwf": lambda: Lwf(resnet()),
    "ewc": lambda: OnlineEwc(resnet()),
    "pearl": lambda: Pearl(resnet()),
    "pearl with given weights": lambda: Pearl(resnet(), reference="given"),
    "pearl on BSC": lambda: Pearl(separable()),
    "pearl, energy rule, view": lambda: Pearl(resnet(), rank=EnergyRule(keep=0.8), fold="view"),
    "pearl, random ranks": lambda: Pearl(resnet(), rank=RandomRule()),
    "pearl, fixed rank, unfold": lambda: Pearl(resnet(), rank=FixedRule(r=2), fold="unfold"),
    "pearl, from the SVD": lambda: Pearl(resnet(), init="svd"),
    "seqlora": lambda: SeqLora(vit()),
    "seqlora on a ResNet": lambda: SeqLora(resnet()),
    "seqlora on BSC, given weights": lambda: SeqLora(separable(), rank=2, reference="given"),
    "inflora": lambda: InfLoRA(vit(), rank=2, energy=0.9, tasks=3),
    "l2p": lambda: L2P(vit(), pool=4, length=2, top_k=2),
    "coda-prompt": lambda: CodaPrompt(vit(), per_task=2, length=4, blocks=2, ortho=0.1),
    "pnn": lambda: Progressive(resnet()),
    "packnet": lambda: PackNet(resnet()),
    "packnet on BSC": lambda: PackNet(separable(), prune=0.5),
    "ncm": lambda: NearestMean(resnet()),
    "ncm with given weights": lambda: NearestMean(resnet(), extractor="given", distance="cosine"),
    "fetril": lambda: FeTril(resnet()),
    "fetril with given weights": lambda: FeTril(resnet(), extractor="given"),
    "fecam": lambda: FeCam(resnet()),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("check", [pytest.param(check, id=name) for name, check in checks()])
def test_contract(method, check):
    check(METHODS[method])
