import pytest
import torch

from conformance import SIZE, checks
from pearl.methods.fecam import FeCam
from pearl.methods.fetril import FeTril
from pearl.methods.finetune import Finetune
from pearl.methods.isolation import Isolation
from pearl.methods.joint import Joint
from pearl.methods.ncm import NearestMean
from pearl.methods.packnet import PackNet
from pearl.methods.pearl import Pearl
from pearl.methods.pnn import Progressive
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
    "pearl": lambda: Pearl(resnet()),
    "pearl with given weights": lambda: Pearl(resnet(), reference="given"),
    "pearl on BSC": lambda: Pearl(separable()),
    "pearl, energy rule, view": lambda: Pearl(resnet(), rank=EnergyRule(keep=0.8), fold="view"),
    "pearl, fixed rank, unfold": lambda: Pearl(resnet(), rank=FixedRule(r=2), fold="unfold"),
    "pearl, from the SVD": lambda: Pearl(resnet(), init="svd"),
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
