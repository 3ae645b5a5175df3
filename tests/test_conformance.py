import pytest
import torch

from conformance import SIZE, checks
from pearl.methods.derpp import DerPlusPlus
from pearl.methods.er import Er
from pearl.methods.er_ace import ErAce
from pearl.methods.ewc import OnlineEwc
from pearl.methods.finetune import Finetune
from pearl.methods.isolation import Isolation
from pearl.methods.joint import Joint
from pearl.methods.lwf import Lwf
from pearl.methods.pearl import Pearl
from pearl.nn.bsconv import bsc
from pearl.nn.ranks import EnergyRule, FixedRule
from pearl.nn.resnet import resnet18
from pearl.nn.timm import timm_backbone


def resnet():
    torch.manual_seed(1)
    return resnet18(SIZE, width=4)


def separable():
    torch.manual_seed(1)
    return bsc(SIZE, width=4)


def vit():
    torch.manual_seed(1)
    net = timm_backbone("test_vit", 16)
    net.pretrained = True
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
    "pearl, fixed rank, unfold": lambda: Pearl(resnet(), rank=FixedRule(r=2), fold="unfold"),
    "pearl, from the SVD": lambda: Pearl(resnet(), init="svd"),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("check", [pytest.param(check, id=name) for name, check in checks()])
def test_contract(method, check):
    check(METHODS[method])
