"""Fast forms of evaluation, each held against the plain one."""

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pearl.methods.base import Method
from pearl.methods.bounds.isolation import Isolation
from pearl.methods.pearl import Pearl
from pearl.nn.bsconv import bsc
from pearl.nn.fast.folding import folded, norms_after_convs, with_weights
from pearl.nn.resnet import resnet18
from pearl.nn.timm import timm_backbone
from zoo import same, taught


def net(name: str, seed: int = 0) -> nn.Module:
    """A network with norm layers that do something."""
    torch.manual_seed(seed)
    made = {"resnet": resnet18, "bsc": bsc}[name](8, width=4) if name in ("resnet", "bsc") else timm_backbone(name, 32)
    for module in made.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 2)
            nn.init.normal_(module.bias)
            module.running_mean.normal_()
            module.running_var.uniform_(0.2, 3)
    return made.eval()


def images(name: str, count: int = 3) -> Tensor:
    size = 8 if name in ("resnet", "bsc") else 32
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def both(method: Method, x: Tensor) -> tuple[Tensor, Tensor]:
    """Logits of all experts, the fast form first."""
    made = []
    for fast in (True, False):
        method.fast = fast
        made.append(torch.cat([expert.forward(x) for expert in method.experts()], dim=1))
    method.fast = True
    return made[0], made[1]


# ------------------------------------------------------------------------------------------------------- folding


# of the BSC two norms more, which follow no convolution
@pytest.mark.parametrize(("name", "norms"), [("resnet", 20), ("bsc", 13), ("resnet10t", 14), ("test_vit", 0)])
@torch.no_grad()
def test_a_folded_network_is_the_network(name: str, norms: int) -> None:
    plain, x = net(name), images(name)
    actual = norms_after_convs(plain)
    assert len(actual) == norms
    quick = folded(plain, {}, actual)
    left = 2 if name == "bsc" else 0
    assert sum(isinstance(m, nn.BatchNorm2d) for m in plain.modules()) == norms + left
    assert sum(isinstance(m, nn.BatchNorm2d) for m in quick.modules()) == left
    same(quick(x), plain(x))


@torch.no_grad()
def test_what_is_folded_leaves_the_network_as_it_was() -> None:
    plain, x = net("resnet"), images("resnet")
    before, logits = {k: v.clone() for k, v in plain.state_dict().items()}, plain(x)
    folded(plain, {}, norms_after_convs(plain))(x)
    assert torch.equal(plain(x), logits)
    assert all(torch.equal(plain.state_dict()[key], value) for key, value in before.items())


@torch.no_grad()
def test_a_copy_shares_what_it_was_not_given() -> None:
    plain, other = net("resnet"), net("resnet", seed=1)
    quick = with_weights(plain.train(), {"conv1.weight": other.conv1.weight})
    assert not quick.training
    assert plain.training
    assert quick.conv1.weight.data_ptr() == other.conv1.weight.data_ptr()
    assert quick.layer1[0].conv1.weight.data_ptr() == plain.layer1[0].conv1.weight.data_ptr()


@torch.no_grad()
def test_folding_in_bfloat16_is_as_near_as_bfloat16_is() -> None:
    plain, x = net("resnet"), images("resnet")
    exact, quick = plain(x), folded(plain, {}, norms_after_convs(plain))
    with torch.autocast("cpu", torch.bfloat16):
        errors = [(net(x).float() - exact).abs().max() for net in (plain, quick)]
    assert errors[1] < 2 * errors[0]


class Odd(nn.Module):
    """BatchNorms that must stay, for one reason each."""

    def __init__(self, why: str) -> None:
        super().__init__()
        self.why = why
        self.conv, self.norm, self.other = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.Conv2d(3, 3, 1)
        if why == "batch statistics":
            self.norm = nn.BatchNorm2d(3, track_running_stats=False)

    def forward(self, x: Tensor) -> Tensor:
        before = self.conv(x)
        after = self.norm(F.relu(before) if self.why == "something between" else before)
        if self.why == "seen by another":
            return after + before
        if self.why == "norm used twice":
            return self.norm(self.other(after))
        if self.why == "conv used twice":
            return self.conv(after)
        if self.why == "not to be traced" and x.sum() > 0:
            return after + 1
        return after


@pytest.mark.parametrize(
    "why",
    ["batch statistics", "something between", "seen by another", "norm used twice", "conv used twice"]
    + ["not to be traced"],
)
def test_norms_that_cannot_be_folded_stay(why: str) -> None:
    assert norms_after_convs(Odd(why)) == {}
    assert norms_after_convs(Odd("")) == {"norm": "conv"}


SUB_NETWORKS = [
    ("resnet", {}),
    ("resnet", {"reference": "given", "fold": "view"}),
    ("bsc", {}),
    ("test_vit", {}),
    ("test_convnext", {"targets": "linear"}),
]


@pytest.mark.parametrize(("name", "options"), SUB_NETWORKS, ids=str)
def test_sub_networks_are_the_same_folded_and_not(name: str, options: dict) -> None:
    same(*both(taught(Pearl(net(name), **options)), images(name)))


def test_copies_of_isolation_are_folded() -> None:
    method = Isolation(net("resnet"))
    for t in range(2):
        method.heads.grow(2)
        method._grow(t).load_state_dict(net("resnet", seed=t + 1).state_dict())
    method.eval()
    fast, plain = both(method, images("resnet"))
    same(fast, plain)
    same(fast, method(images("resnet")).detach())


# ------------------------------------------------------------------------------------------------------ stacking

VITS = [
    {"reference": "given"},
    {"reference": "first_task"},
    {"reference": "given", "lora_bias": True, "alpha": 1.0},
    {"reference": "given", "targets": ["query", "value"]},
    {"reference": "given", "targets": "linear", "lora_bias": True},
]


@pytest.mark.parametrize("options", VITS, ids=str)
@pytest.mark.parametrize("count", [1, 3])
@torch.no_grad()
def test_a_stack_of_sub_networks_is_each_of_them(options: dict, count: int) -> None:
    method, x = taught(Pearl(net("test_vit"), **options)), images("test_vit", count)
    actual = method.at_once()
    assert actual is not None
    at_once, images_at_a_time = actual
    assert images_at_a_time == 1000 // (3 * 5)
    same(at_once(x), both(method, x)[1])
    same(at_once(x), method(x))  # and the hooks are on the copy alone


@pytest.mark.parametrize(
    ("name", "options", "tasks"),
    [
        ("resnet", {}, 2),
        ("test_convnext", {"targets": "linear"}, 2),  # has norm layers of its own
        ("test_vit", {"targets": ["key", "conv"]}, 2),
        ("test_vit", {"reference": "first_task"}, 1),
    ],
)
def test_what_cannot_be_stacked_is_not(name: str, options: dict, tasks: int) -> None:
    assert taught(Pearl(net(name), **options), tasks).at_once() is None


def test_only_vision_transformers_are_known_to_keep_the_batch_first() -> None:
    assert not isinstance(timm.create_model("test_convnext"), timm.models.VisionTransformer)
    assert Pearl(net("test_vit")).at_once() is None  # nothing learnt
