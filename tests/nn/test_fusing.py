"""Sums and ReLUs inside the convolutions of copies that are evaluated, held against PyTorch's own steps."""

import platform
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from test_folding import images, net
from torch import Tensor, nn

from pearl.methods.common import subnetworks
from pearl.methods.common.by_statistics import Statistics
from pearl.methods.pearl import Pearl
from pearl.nn.convnet import convnet
from pearl.nn.fast import fusing
from pearl.nn.fast.folding import folded, norms_after_convs, with_weights
from pearl.nn.fast.fusing import FusedConv, fuse, fusible
from pearl.nn.intermediate_features import WithInner, inner_layers
from zoo import needs_bf16, same, taught

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available() or platform.machine() not in ("x86_64", "AMD64"),
    reason="convolutions are fused by oneDNN on x86 alone",
)


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def last(module: nn.Module) -> nn.Module:
    return module.to(memory_format=torch.channels_last)


def pixels(name: str, count: int = 3) -> Tensor:
    return images(name, count).contiguous(memory_format=torch.channels_last)


def two_copies(name: str) -> tuple[nn.Module, nn.Module]:
    """A folded network, and one in which everything is fused that can be."""
    if name == "convnet":
        torch.manual_seed(0)
        plain = last(convnet(32, width=4)).eval()
    else:
        plain = last(net(name))
    norms = norms_after_convs(plain)
    copy = folded(plain, {}, norms)
    return folded(plain, {}, norms), fuse(copy, fusible(copy))


def laid_out(conv: FusedConv, dtype: torch.dtype = torch.float32) -> bool:
    return conv.tensors[dtype][0].is_mkldnn


def fused_in(module: nn.Module) -> list[FusedConv]:
    return [each for each in module.modules() if isinstance(each, FusedConv)]


@pytest.mark.parametrize(
    ("name", "convs", "relus"), [("resnet", 20, 17), ("bsc", 27, 13), ("resnet10t", 14, 11), ("convnet", 4, 4)]
)
@pytest.mark.parametrize("count", [1, 3, 40])
def test_a_fused_network_is_the_network(name: str, convs: int, relus: int, count: int) -> None:
    plain, quick = two_copies(name)
    assert [len(fused_in(quick)), sum(conv.relu for conv in fused_in(quick))] == [convs, relus]
    first = quick(pixels(name, count))
    assert all(laid_out(conv) for conv in fused_in(quick))
    for batch in (count, 2):  # weights are laid out for so many images
        same(quick(pixels(name, batch)), plain(pixels(name, batch)))
    assert torch.equal(quick(pixels(name, count)), first)


@torch.no_grad()
def test_the_first_answer_has_the_bits_of_all_others() -> None:
    """Of a map of one pixel, a weight in order gives others than one that is laid out."""
    torch.manual_seed(0)
    conv = nn.Conv2d(32, 32, 3, padding=1)
    x = torch.randn(6, 32, 1, 1).contiguous(memory_format=torch.channels_last)
    fused = FusedConv(conv, relu=True)
    assert torch.equal(fused(x), fused(x))


@pytest.mark.parametrize("name", ["resnet", "bsc", "resnet10t"])
def test_inner_layers_are_those_of_the_network(name: str) -> None:
    both = [WithInner(network, inner_layers(network)) for network in (folded_copy(name), folded_copy(name))]
    parts = fusible(both[1])
    assert [part.name for part in parts] == ["network", *(f"network.{name}" for name in inner_layers(both[1].network))]
    fuse(both[1], parts)
    assert not any(type(module) is nn.Conv2d for module in both[1].modules())
    same(both[1](pixels(name)), both[0](pixels(name)))


def folded_copy(name: str) -> nn.Module:
    plain = last(net(name))
    return folded(plain, {}, norms_after_convs(plain))


def test_what_one_copy_can_all_can() -> None:
    parts = fusible(folded_copy("resnet"))
    for seed in (1, 2):
        plain = last(net("resnet", seed))
        copy = folded(plain, {}, norms_after_convs(plain))
        same(fuse(copy, parts)(pixels("resnet")), plain(pixels("resnet")))


# ------------------------------------------------------------------------------------------- what does not fit


@needs_bf16
@pytest.mark.parametrize("name", ["resnet", "bsc", "resnet10t", "convnet"])
@pytest.mark.parametrize("count", [1, 40])
def test_bfloat16_is_no_further_from_float32_than_autocast(name: str, count: int) -> None:
    plain, quick = two_copies(name)
    x = pixels(name, count)
    exact = plain(x)
    with torch.autocast("cpu", torch.bfloat16):
        expected, actual = plain(x), quick(x)
        assert torch.equal(quick(x), actual)
    assert actual.dtype == expected.dtype == torch.bfloat16
    assert (actual - exact).norm() < 1.1 * (expected - exact).norm()  # rounded where autocast rounds
    assert (actual - expected).norm() < 0.02 * expected.norm()
    assert all(laid_out(conv, torch.bfloat16) for conv in fused_in(quick))


@needs_bf16
@pytest.mark.parametrize("asked_before", [False, True])
def test_float32_does_not_hang_on_what_is_asked_in_bfloat16(asked_before: bool) -> None:
    (_, quick), (_, other) = two_copies("resnet"), two_copies("resnet")
    x = pixels("resnet")
    exact = [quick(x), quick(x)][-1]  # laid out
    with torch.autocast("cpu", torch.bfloat16):
        half = [quick(x), quick(x)][-1]
    assert torch.equal(quick(x), exact)
    for _ in range(2 * asked_before):
        other(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal([other(x), other(x)][-1], half)
    same(other(x), exact)


@needs_bf16
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_other_precisions_are_computed_as_before(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fusing, "computes_bf16", lambda device: False)
    plain, quick = two_copies("resnet")
    for _ in range(2):  # then its weights are laid out
        with torch.autocast("cpu", dtype):
            assert torch.equal(quick(pixels("resnet")), plain(pixels("resnet")))
        quick(pixels("resnet"))
    assert all(set(conv.tensors) == {torch.float32} for conv in fused_in(quick))


def test_maps_in_order_are_computed_as_before() -> None:
    plain = folded(net("resnet"), {}, norms_after_convs(net("resnet")))
    quick = fuse(with_weights(plain, {}), fusible(plain))
    x = torch.randn(3, 3, 16, 16)  # of a single pixel, both layouts are one
    assert torch.equal(quick(x), plain(x))
    assert torch.equal(quick(x), plain(x))
    assert not any(laid_out(conv) for conv in fused_in(quick))


def test_a_gradient_of_the_images_is_computed_as_before() -> None:
    gradients = []
    for network in two_copies("resnet"):
        network(pixels("resnet"))
        network(pixels("resnet"))
        with torch.enable_grad():
            x = pixels("resnet").requires_grad_()
            network(x).square().sum().backward()
        gradients.append(x.grad)
    assert gradients[0].abs().max() > 1
    same(*gradients)


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_weights_that_are_no_numbers_give_none(value: str) -> None:
    plain = last(net("resnet"))
    plain.layer2[0].conv1.weight[0, 0, 0, 0] = float(value)
    copy = folded(plain, {}, norms_after_convs(plain))
    quick = fuse(with_weights(copy, {}), fusible(copy))
    assert not copy(pixels("resnet")).isfinite().any()
    assert not quick(pixels("resnet")).isfinite().any()


class Odd(nn.Module):
    """Convolutions, and what follows them, which differs by a word."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        mode = "reflect" if how == "padding" else "zeros"
        self.one = nn.Conv2d(3, 3, 3, padding="same" if how == "same" else 1, padding_mode=mode)
        self.two, self.relu = nn.Conv2d(3, 3, 3, padding=1), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        if self.how in ("same channel", "row", "type", "changed between"):
            other = {"row": x[:, :, :1], "type": x.double()}.get(self.how, x[:, :1] + 1)
            out = self.one(x)
            if self.how == "changed between":
                other.mul_(2)
            return F.relu(out + other)
        out = self.one(x)
        if self.how == "sum in place":
            out += x
            return out
        if self.how == "not to be traced" and x.sum() > 100:
            return out
        return {
            "sum": lambda: x + out,
            "sum, then relu": lambda: F.relu(torch.add(out, x)),
            "another": lambda: torch.relu(self.two(x) + out),
            "another, first": lambda: out + self.two(x),
            "itself": lambda: F.relu(out + out),
            "seen twice": lambda: F.relu(out) + out,
            "something between": lambda: F.relu(out * 2),
            "called twice": lambda: F.relu(self.one(out)),
            "weighted": lambda: torch.add(out, x, alpha=2),
            "a number": lambda: out + 1,
        }.get(self.how, lambda: self.relu(out))()


SUM, RELU = {"sum", "sum in place", "another, first"}, {"relu"}
BOTH = {"sum, then relu", "another", "same channel", "row", "type"}
LAID_OUT = {"another": 2, "another, first": 2, "same channel": 0, "row": 0, "type": 0}  # of the others, one
NEITHER = {"itself", "seen twice", "something between", "changed between", "called twice", "weighted", "a number"}
NEITHER |= {"hook", "padding", "same", "not to be traced", "not known"}


@pytest.mark.parametrize("how", sorted(SUM | RELU | BOTH | NEITHER))
def test_only_what_is_right_behind_is_inside(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if how != "not known":
        monkeypatch.setattr(fusing, "FOLLOWED", (__name__,))
    torch.manual_seed(0)
    plain, x = last(Odd(how)), torch.randn(2, 3, 8, 8).contiguous(memory_format=torch.channels_last)
    heard: list[Tensor] = []
    if how == "hook":
        plain.one.register_forward_hook(lambda module, inputs, out: heard.append(out.clone()))
    expected = plain(x)
    parts = fusible(plain)
    inside = [relu for part in parts for relu in part.convs.values()]
    assert bool(parts) == (how not in NEITHER)
    assert any(inside) == (how in RELU | BOTH)
    before = x.clone()
    same(fuse(plain, parts)(x), expected)
    same(plain(x), expected)
    assert torch.equal(x, before)
    assert sum(laid_out(conv) for conv in fused_in(plain)) == LAID_OUT.get(how, how not in NEITHER)
    assert all(torch.equal(heard[0], each) for each in heard[1:])
    assert len(heard) == 3 * (how == "hook")


def test_other_devices_and_types_are_left_alone() -> None:
    plain = folded_copy("resnet")
    parts = fusible(plain)
    for other in (with_weights(plain, {}).double(), with_weights(plain, {}).to("meta")):
        assert not fused_in(fuse(other, parts))


def test_other_processors_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = folded_copy("resnet")
    assert fusible(plain)
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    assert fusible(plain) == []


# --------------------------------------------------------------------------------------------- where it is used


def test_sub_networks_that_are_asked_are_fused_and_merged_ones_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[nn.Module] = []
    monkeypatch.setattr(subnetworks, "fuse", lambda network, parts: made.append(fuse(network, parts)) or made[-1])
    x, method = pixels("resnet"), taught(last(Pearl(net("resnet"), classifier=Statistics())))
    asked = [lambda: method.spaces([0, 2])(x), lambda: [expert.forward(x) for expert in heads.experts()]]
    heads = taught(last(Pearl(net("resnet"))))
    for ask, count in zip(asked, (2, 3), strict=True):
        made.clear()
        heads.fast = method.fast = False
        ask()
        assert not made
        heads.fast = method.fast = True
        ask()
        assert [len(fused_in(network)) for network in made] == [20] * count
    assert not fused_in(method.merged(2))
