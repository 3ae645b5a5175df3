"""Grouped convolutions in float32 under autocast: which, and that they are the same convolution."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pearl.lifecycle.small import SIZE, config, make_task
from pearl.methods.bounds.finetune import Finetune
from pearl.nn.bsconv import bsc
from pearl.nn.fast.grouped import GroupedInFloat32
from pearl.nn.resnet import resnet18
from pearl.training.engine import Engine
from zoo import needs_bf16


def layer(groups=4, stride=1, filters=1):
    torch.manual_seed(0)
    return nn.Conv2d(4, 4 * filters, 3, stride, padding=1, groups=groups)


def through(conv, x, mode):
    with torch.autocast("cpu", torch.bfloat16), mode():
        out = conv(x)
    out.float().square().sum().backward()
    return out


@pytest.mark.parametrize(
    ("conv", "exact"),
    [
        (layer(stride=2), True),
        (layer(filters=2), True),
        (layer(groups=2), True),
        (layer(), False),  # plainly depthwise: bfloat16 is fast
        (layer(groups=1, stride=2), False),
    ],
)
def test_slow_ones_compute_in_float32_and_say_it_in_bfloat16(conv, exact):
    x = torch.randn(2, 4, 9, 9)
    out = through(conv, x, GroupedInFloat32)
    assert out.dtype == torch.bfloat16
    whole = F.conv2d(x, conv.weight, conv.bias, conv.stride, conv.padding, groups=conv.groups)
    assert torch.equal(out, whole.bfloat16()) == exact
    assert conv.weight.grad.dtype == torch.float32
    torch.testing.assert_close(out.float(), whole, rtol=0.02, atol=0.02)


def test_nothing_changes_without_autocast():
    conv, x = layer(stride=2), torch.randn(2, 4, 9, 9)
    with GroupedInFloat32():
        assert torch.equal(conv(x), F.conv2d(x, conv.weight, conv.bias, 2, 1, groups=4))
        assert conv(x).dtype == torch.float32


@pytest.mark.parametrize(
    ("network", "precision", "used"),
    [
        pytest.param(bsc, "bf16", True, marks=needs_bf16),
        (bsc, "fp32", False),
        pytest.param(resnet18, "bf16", False, marks=needs_bf16),
    ],
)
def test_the_engine_trains_so_where_it_is_faster(network, precision, used, monkeypatch):
    met = []
    monkeypatch.setattr(GroupedInFloat32, "__enter__", lambda self: met.append(self) or self)
    monkeypatch.setattr(GroupedInFloat32, "__exit__", lambda self, *_: None)
    engine = Engine(config(train={"epochs": 1}), device="cpu", precision=precision)
    engine.learn(Finetune(network(SIZE, width=4)), make_task(0))
    assert bool(met) == used
