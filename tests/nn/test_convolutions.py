"""Convolutions computed in another way under autocast: which, and that they are the same convolutions."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pearl.lifecycle.small import SIZE, config, make_task
from pearl.methods.bounds.finetune import Finetune
from pearl.nn.bsconv import bsc
from pearl.nn.fast.convolutions import FastConvolutions
from pearl.nn.fast.products import Parts, Product, parts
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
    out = through(conv, x, FastConvolutions)
    assert out.dtype == torch.bfloat16
    whole = F.conv2d(x, conv.weight, conv.bias, conv.stride, conv.padding, groups=conv.groups)
    assert torch.equal(out, whole.bfloat16()) == exact
    assert conv.weight.grad.dtype == torch.float32
    torch.testing.assert_close(out.float(), whole, rtol=0.02, atol=0.02)


def test_nothing_changes_without_autocast():
    conv, x = layer(stride=2), torch.randn(2, 4, 9, 9)
    with FastConvolutions():
        assert torch.equal(conv(x), F.conv2d(x, conv.weight, conv.bias, 2, 1, groups=4))
        assert conv(x).dtype == torch.float32


@pytest.mark.parametrize(
    ("network", "precision", "used"),
    [
        pytest.param(partial(bsc, width=4), "bf16", True, marks=needs_bf16),
        (partial(bsc, width=4), "fp32", False),
        pytest.param(partial(resnet18, width=4), "bf16", False, marks=needs_bf16),
        pytest.param(partial(resnet18, width=64), "bf16", True, marks=needs_bf16),
    ],
)
def test_the_engine_trains_so_where_it_is_faster(network, precision, used, monkeypatch):
    met = []
    monkeypatch.setattr(FastConvolutions, "__enter__", lambda self: met.append(self) or self)
    monkeypatch.setattr(FastConvolutions, "__exit__", lambda self, *_: None)
    engine = Engine(config(train={"epochs": 1}, engine={"max_steps": 1}), device="cpu", precision=precision)
    engine.learn(Finetune(network(SIZE)), make_task(0))
    assert bool(met) == used


@pytest.mark.parametrize("which", [Parts(True, True, True), Parts(False, False, True), Parts(True, False, False)])
@pytest.mark.parametrize(("side", "stride", "padding", "k"), [(4, 1, 1, 3), (7, 2, 1, 3), (6, 2, 0, 3), (5, 1, 2, 5)])
def test_a_product_is_the_convolution_with_its_gradients(side, stride, padding, k, which):
    torch.manual_seed(0)
    x = torch.randn(3, 4, side, side + 2, dtype=torch.float64, requires_grad=True)
    filters = torch.randn(6, 4, k, k, dtype=torch.float64, requires_grad=True)
    wanted = F.conv2d(x, filters, None, stride, padding)
    found = Product.apply(x, filters, stride, padding, which)
    torch.testing.assert_close(found, wanted)
    towards = torch.randn_like(wanted)
    of_wanted = torch.autograd.grad(wanted, (x, filters), towards)
    torch.testing.assert_close(torch.autograd.grad(found, (x, filters), towards, retain_graph=True), of_wanted)
    for i, one in enumerate((x, filters)):  # what is not asked for is not computed
        torch.testing.assert_close(torch.autograd.grad(found, one, towards, retain_graph=True)[0], of_wanted[i])


@pytest.mark.parametrize(
    ("side", "filters", "stride", "which"),
    [
        (4, (512, 512, 3, 3), 1, Parts(True, True, True)),
        (8, (512, 256, 3, 3), 2, Parts(True, True, True)),
        (8, (512, 512, 3, 3), 1, Parts(False, False, True)),
        (9, (512, 512, 3, 3), 1, None),
        (4, (256, 256, 3, 3), 1, None),
        (4, (512, 512, 1, 1), 1, None),
    ],
)
def test_wide_filters_of_small_maps_are_products(side, filters, stride, which):
    assert parts((2, filters[1], side, side), filters, stride, 1) == which


def test_only_training_in_bfloat16_computes_them(monkeypatch):
    met = []
    monkeypatch.setattr(Product, "apply", lambda *args: met.append(args) or F.conv2d(*args[:2], None, *args[2:4]))
    conv = nn.Conv2d(256, 512, 3, padding=1, bias=False)
    x = torch.randn(1, 256, 2, 2)
    with FastConvolutions():
        conv(x)
        with torch.autocast("cpu", torch.bfloat16):
            with torch.no_grad():
                conv(x)
            nn.Conv2d(256, 512, 3, padding=1)(x)  # a bias
            nn.Conv2d(256, 512, 3, padding=2, dilation=2, bias=False)(x)
            nn.Conv2d(256, 512, 3, padding="same", bias=False)(x)
            assert not met
            assert conv(x).dtype == torch.bfloat16
    assert [args[0].dtype for args in met] == [torch.bfloat16]
