"""Convolutions computed in another way in training: which, and that they are the same convolutions."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pearl.methods.bounds.finetune import Finetune
from pearl.nn.bsconv import bsc
from pearl.nn.fast import winograd
from pearl.nn.fast.convolutions import FastConvolutions
from pearl.nn.resnet import resnet18
from pearl.testing.tiny import SIZE, config, make_task
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
        (partial(resnet18, width=4), "fp32", False),
        pytest.param(partial(resnet18, width=4), "bf16", False, marks=needs_bf16),
    ],
)
def test_the_engine_trains_so_where_it_is_faster(network, precision, used, monkeypatch):
    met = []
    monkeypatch.setattr(FastConvolutions, "__enter__", lambda self: met.append(self) or self)
    monkeypatch.setattr(FastConvolutions, "__exit__", lambda self, *_: None)
    engine = Engine(config(train={"epochs": 1}, engine={"max_steps": 1}), device="cpu", precision=precision)
    engine.learn(Finetune(network(SIZE)), make_task(0))
    assert bool(met) == used


@pytest.mark.parametrize("side", [4, 7])
def test_the_whole_convolution_with_its_gradients(side):
    torch.manual_seed(0)
    x = torch.randn(3, 4, side, side + 2, dtype=torch.float64, requires_grad=True)
    filters = torch.randn(6, 4, 3, 3, dtype=torch.float64, requires_grad=True)
    expected = F.conv2d(x, filters, None, 1, 1)
    computed = winograd.Convolution.apply(x, filters)
    torch.testing.assert_close(computed, expected)
    towards = torch.randn_like(expected)
    gradients = torch.autograd.grad(expected, (x, filters), towards)
    torch.testing.assert_close(torch.autograd.grad(computed, (x, filters), towards, retain_graph=True), gradients)
    for i, one in enumerate((x, filters)):  # a gradient that is not needed is not computed
        torch.testing.assert_close(torch.autograd.grad(computed, one, towards, retain_graph=True)[0], gradients[i])


@pytest.fixture
def applied(monkeypatch):
    """The arguments of convolutions that are computed by Winograd's algorithm."""
    met = []
    monkeypatch.setattr(winograd.Convolution, "apply", lambda *args: met.append(args) or F.conv2d(*args, None, 1, 1))
    return met


@pytest.fixture
def avx2(monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")


@pytest.mark.parametrize(("height", "width"), [(4, 4), (3, 2), (8, 8), (9, 6), (13, 16), (1, 5)])
@pytest.mark.parametrize("images", [1, 5])
@pytest.mark.parametrize("enough", [1, 1000])  # tiles of 4 where they fit, and of 2
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_fewer_multiplications_give_the_same_weight_gradient(height, width, images, enough, layout, monkeypatch):
    monkeypatch.setattr(winograd, "ENOUGH", enough)
    monkeypatch.setattr(winograd, "LITTLE", 3 * 36 * 4 * 6)  # a few tiles: images come in several parts, a rest last
    torch.manual_seed(0)
    x = torch.randn(images, 5, height, width, dtype=torch.float64).to(memory_format=layout)
    filters = torch.randn(6, 5, 3, 3, dtype=torch.float64, requires_grad=True)
    wanted = F.conv2d(x, filters, None, 1, 1)
    for towards in (torch.randn_like(wanted), torch.ones((), dtype=torch.float64).expand_as(wanted)):
        actual = winograd.weight_gradient(towards, x, filters.shape)
        torch.testing.assert_close(actual, torch.autograd.grad(wanted, filters, towards, retain_graph=True)[0])
        assert actual.is_contiguous(memory_format=torch.channels_last)


def test_tiles_of_4_are_for_maps_that_they_fit():
    assert [winograd.tile(32, side, side) for side in (4, 6, 7, 8, 9, 16)] == [2, 2, 4, 4, 2, 4]
    assert winograd.tile(31, 8, 8) == 2  # too few of them
    assert winograd.tile(128, 1, 16) == 2


@pytest.mark.parametrize("side", [4, 32])
def test_in_float32_it_differs_by_rounding(side):
    torch.manual_seed(0)
    x, towards = (torch.randn(16, 64, side, side) for _ in range(2))
    exact = winograd.weight_gradient(towards.double(), x.double(), (64, 64, 3, 3))
    actual = winograd.weight_gradient(towards, x, (64, 64, 3, 3))
    assert (actual - exact).abs().max() < 3e-5 * exact.abs().max()


@pytest.mark.parametrize(
    ("shape", "filters", "stride", "padding", "so"),
    [
        ((32, 64, 32, 32), (64, 64, 3, 3), 1, 1, True),
        ((32, 512, 4, 4), (512, 512, 3, 3), 1, 1, True),
        ((31, 512, 4, 4), (512, 512, 3, 3), 1, 1, False),  # few tiles
        ((32, 64, 32, 32), (128, 64, 3, 3), 2, 1, False),
        ((32, 64, 32, 32), (64, 64, 3, 3), 1, 0, False),
        ((32, 64, 32, 32), (64, 64, 5, 5), 1, 1, False),
        ((32, 32, 32, 32), (64, 32, 3, 3), 1, 1, False),
        ((64, 64, 5, 5), (64, 64, 3, 3), 1, 1, False),  # tiles that hang over
        ((64, 256, 1, 100), (256, 256, 3, 3), 1, 1, False),
    ],
)
def test_which_filters_need_fewer_multiplications(shape, filters, stride, padding, so, avx2):
    assert winograd.is_faster(shape, filters, stride, padding) == so


def test_with_wider_registers_none_does(monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    assert not winograd.is_faster((32, 64, 32, 32), (64, 64, 3, 3), 1, 1)


def test_only_training_in_float32_and_channels_last_computes_so(applied, avx2):
    conv = nn.Conv2d(64, 64, 3, padding=1, bias=False)
    x = torch.randn(32, 64, 8, 8).to(memory_format=torch.channels_last)
    frozen = nn.Conv2d(64, 64, 3, padding=1, bias=False).requires_grad_(False)
    with FastConvolutions():
        with torch.no_grad():
            conv(x)
        conv(x.contiguous())
        conv.double()(x.double())
        with torch.autocast("cpu", torch.bfloat16):
            conv.float()(x)
        frozen(x)  # has no gradient that could be had sooner
        assert not applied
        conv(x)
    assert len(applied) == 1


def test_gradients_that_are_differentiated_or_mapped_over_are_those_of_pytorch(avx2, monkeypatch):
    monkeypatch.setattr(winograd, "weight_gradient", lambda grad, x, shape: torch.full(shape, 7.0))  # to be recognised
    conv = nn.Conv2d(64, 64, 3, padding=1, bias=False)
    x = torch.randn(32, 64, 8, 8).to(memory_format=torch.channels_last)

    def loss(weights, x):
        return torch.func.functional_call(conv, weights, (x,)).square().mean()

    plain = torch.func.grad(loss)({"weight": conv.weight.detach()}, x)["weight"]
    with FastConvolutions():
        assert torch.equal(torch.func.grad(loss)({"weight": conv.weight.detach()}, x)["weight"], plain)
        torch.func.vmap(conv)(x[None])
        actual = conv(x).square().mean()
        assert torch.autograd.grad(actual, conv.weight, retain_graph=True)[0].unique().tolist() == [7.0]
        (first,) = torch.autograd.grad(actual, conv.weight, create_graph=True)
        torch.testing.assert_close(first, plain)
        assert torch.autograd.grad(first.square().sum(), conv.weight)[0].abs().sum() > 0


def test_gradients_of_several_vectors_at_once(avx2):
    conv = nn.Conv2d(64, 64, 3, padding=1, bias=False)
    with FastConvolutions():
        out = conv(torch.randn(32, 64, 8, 8).to(memory_format=torch.channels_last))
    several = torch.randn(2, *out.shape)
    (each,) = torch.autograd.grad(out, conv.weight, several, retain_graph=True, is_grads_batched=True)
    for actual, towards in zip(each, several, strict=True):
        torch.testing.assert_close(actual, torch.autograd.grad(out, conv.weight, towards, retain_graph=True)[0])


def test_a_backward_pass_under_autocast_has_the_type_of_the_forward_pass(avx2):
    conv = nn.Conv2d(64, 64, 3, padding=1, bias=False)
    x = torch.randn(32, 64, 8, 8).to(memory_format=torch.channels_last)
    with FastConvolutions():
        out = conv(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.autograd.grad(out, conv.weight, torch.ones_like(out))[0].dtype == torch.float32


def test_a_method_that_is_not_fast_has_none_of_it(avx2):
    engine, method = Engine(config(), device="cpu", precision="fp32"), Finetune(resnet18(SIZE, width=64))
    assert engine.kernels(method, None) is FastConvolutions
    method.fast = False
    assert engine.kernels(method, None) is not FastConvolutions


def test_the_engine_trains_the_same_with_fewer_multiplications(monkeypatch):
    met = []
    original = winograd.weight_gradient
    monkeypatch.setattr(winograd, "weight_gradient", lambda *args: met.append(args) or original(*args))
    trained = {}
    for capability in ("AVX512", "AVX2"):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda capability=capability: capability)
        torch.manual_seed(0)
        settings = config(train={"epochs": 1, "batch_size": 32, "optimizer": "sgd"}, engine={"max_steps": 2})
        engine = Engine(settings, device="cpu", precision="fp32")
        method = engine.to_device(Finetune(resnet18(SIZE, width=64)))
        assert not met
        engine.learn(method, make_task(0, per_class=32))
        trained[capability] = method.state_dict()
    assert len(met) == 2 * 7  # both steps, four layers of 8 x 8 pixels and three of 4 x 4
    for name, tensor in trained["AVX512"].items():
        torch.testing.assert_close(trained["AVX2"][name], tensor, rtol=1e-3, atol=1e-4)
