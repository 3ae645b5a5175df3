"""Updates beside their layers: the same outputs and gradients as merged ones."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pearl.methods.pearl import Pearl
from pearl.nn.fast.parallel_lora import THIN, ParallelLora, fits_beside, with_beside
from pearl.nn.lowrank import matrix_shape, updated
from pearl.nn.rank_rules import FixedRule
from pearl.nn.resnet import resnet18
from pearl.testing.tiny import SIZE, config, logits, make_task
from pearl.training.engine import Engine

HOW: list[dict] = [{}, {"stride": 2, "padding": 1}, {"stride": (1, 2), "padding": (2, 1), "dilation": (2, 1)}]


@pytest.mark.parametrize("fold", ["spatial", "unfold"])
@pytest.mark.parametrize("kernel", [(3, 3), (1, 1), (5, 3)])
@pytest.mark.parametrize(
    "how", [{}, {"stride": 2, "padding": 1}, {"stride": (1, 2), "padding": (2, 1), "dilation": (2, 1)}]
)
def test_a_pair_of_convolutions_is_the_update(fold, kernel, how):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(6, 10, kernel, **how)).double().requires_grad_(False)
    rows, columns = matrix_shape(net[0].weight.shape, fold)
    a, b = torch.randn(3, columns).double().requires_grad_(), torch.randn(rows, 3).double().requires_grad_()
    x = torch.randn(2, 6, 12, 11).double().requires_grad_()
    ours = with_beside(net, [ParallelLora("0", a, b, 0.7, fold)])(x)
    merged = F.conv2d(x, updated(net[0].weight, a, b, 0.7, fold), net[0].bias, **how)
    torch.testing.assert_close(ours, merged)
    direction = torch.randn_like(ours)
    for mine, theirs in zip(*(torch.autograd.grad(y, (x, a, b), direction) for y in (ours, merged)), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_only_thin_updates_of_plain_convolutions():
    conv = nn.Conv2d(16, 16, 3)  # full rank 48
    assert fits_beside(conv, 48 // THIN, "spatial")
    assert not fits_beside(conv, 48 // THIN + 1, "spatial")
    assert not fits_beside(conv, 1, "view")
    assert not fits_beside(nn.Conv2d(16, 16, 1), 1, "spatial")
    assert not fits_beside(nn.Conv2d(16, 16, 3, groups=2), 1, "spatial")
    assert not fits_beside(nn.Conv2d(16, 16, 3, padding="same"), 1, "spatial")
    assert not fits_beside(nn.Conv2d(16, 16, 3, padding=1, padding_mode="reflect"), 1, "spatial")
    assert not fits_beside(nn.Linear(16, 16), 1, "spatial")
    standardised = type("Standardised", (nn.Conv2d,), {})  # what it makes of its weight is not linear
    assert not fits_beside(standardised(48, 48, 3, padding=1), 1, "spatial")
    assert not fits_beside(conv.to("meta"), 1, "spatial")  # on another device than the CPU


@pytest.mark.parametrize("fold", ["spatial", "unfold", "view"])
def test_pearl_learns_the_same_either_way(fold):
    torch.manual_seed(1)
    first = Pearl(resnet18(SIZE, width=8), rank=FixedRule(r=1), fold=fold, reference="given")
    second = copy.deepcopy(first)
    second.fast = False
    engine = Engine(config(train={"epochs": 1, "optimizer": "sgd", "lr": 0.01}), device="cpu")
    for method in (first, second):
        engine.learn(method, make_task(0))
    torch.testing.assert_close(logits(first), logits(second), rtol=1e-4, atol=1e-5)
    layers = [method.backbone.get_submodule(target.parameter.removesuffix(".weight")) for target in first.targets]
    assert any(fits_beside(layer, 1, fold) for layer in layers) == (fold != "view")


def test_the_reference_gets_no_gradient_and_statistics_are_the_task_s():
    torch.manual_seed(1)
    method = Pearl(resnet18(SIZE, width=8), rank=FixedRule(r=1), reference="given")
    phases = method.learn(make_task(0))
    phase = next(phases)  # rank 1 needs no probe
    assert phase.name == "adapt"
    before = {name: value.clone() for name, value in method.backbone.state_dict().items()}
    phase.loss(next(make_task(0).batches(8, 0))).backward()
    assert all(p.grad is None for p in method.backbone.parameters())
    assert all(torch.equal(value, before[name]) for name, value in method.backbone.state_dict().items())
    assert method.statistics["0.norm.bn1.running_mean"].abs().sum() > 0
    assert all(p.grad is not None for p in phase.trained)
