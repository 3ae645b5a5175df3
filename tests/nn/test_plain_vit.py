"""pearl's form of timm's plain ViTs: the same names, tensors and bits, in prediction and in training."""

from typing import Any

import pytest
import timm
import torch
from timm.models import VisionTransformer
from torch import Tensor, nn

from pearl.errors import ConfigError
from pearl.nn import vit
from pearl.nn.fast.stacking import stackable, worthwhile
from pearl.nn.intermediate_features import inner_layers
from pearl.nn.plain_vit import PlainViT, plain_vit

SIZE = 32


@pytest.fixture(scope="module")
def pair() -> tuple[nn.Module, PlainViT]:
    torch.manual_seed(0)
    theirs = timm.create_model("deit_tiny_patch16_224", num_classes=0, img_size=SIZE)
    ours = plain_vit("deit_tiny_patch16_224", SIZE)
    assert ours is not None
    ours.load_state_dict(theirs.state_dict(), strict=True)
    return theirs, ours


def small_pair() -> tuple[nn.Module, PlainViT]:
    torch.manual_seed(0)
    theirs = VisionTransformer(img_size=8, patch_size=4, embed_dim=16, depth=3, num_heads=2, num_classes=0)
    ours = PlainViT(8, 4, 16, 3, 2)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    return theirs.eval(), ours.eval()


def known() -> list[str]:
    sizes = [f"{kind}_{width}_patch" for kind in ("vit", "deit") for width in ("tiny", "small", "base", "large")]
    plain = [name for name in timm.list_models() if name.startswith(tuple(sizes))]
    return [name for name in plain if name.rpartition("patch")[2].replace("_", "").isdigit()]


def test_twenty_networks_are_known() -> None:
    assert len(known()) >= 20


@pytest.mark.parametrize("name", known())
def test_each_has_the_tensors_of_timm(name: str) -> None:
    with torch.device("meta"):
        theirs: Any = timm.create_model(name, num_classes=0, img_size=224)
        ours = plain_vit(name, 224)
    assert type(theirs) is VisionTransformer and ours is not None
    assert {k: v.shape for k, v in ours.state_dict().items()} == {k: v.shape for k, v in theirs.state_dict().items()}
    assert ours.blocks[0].attn.num_heads == theirs.blocks[0].attn.num_heads  # not visible in shapes


@pytest.mark.parametrize(
    "name", ["deit3_small_patch16_224", "deit_tiny_distilled_patch16_224", "vit_base_patch16_224_miil", "resnet18"]
)
def test_others_are_left_to_timm(name: str) -> None:
    assert plain_vit(name, 224) is None


def test_an_image_size_that_is_not_made_of_patches_is_left_to_timm() -> None:
    assert plain_vit("deit_tiny_patch16_224", 40) is None


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 3])
def test_features_have_the_bits_of_timm(pair: tuple[nn.Module, PlainViT], count: int, precision: torch.dtype) -> None:
    x = torch.randn(count, 3, SIZE, SIZE)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=precision == torch.bfloat16):
        theirs, ours = (network.eval()(x) for network in pair)
    assert torch.equal(theirs, ours)


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_gradients_have_the_bits_of_timm(pair: tuple[nn.Module, PlainViT], precision: torch.dtype) -> None:
    x, actual = torch.randn(3, 3, SIZE, SIZE), []
    for network in pair:
        network.train().zero_grad()
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == torch.bfloat16):
            network(x).float().square().sum().backward()
        actual.append({name: parameter.grad for name, parameter in network.named_parameters()})
        torch.testing.assert_close(torch.rand(1), torch.rand(1, generator=torch.Generator().manual_seed(1)))
    theirs, ours = actual
    assert theirs.keys() == ours.keys() and all(torch.equal(theirs[name], ours[name]) for name in theirs)


def parts() -> dict[str, dict[str, Any]]:
    generator = torch.Generator().manual_seed(2)
    more = torch.randn(1, 2, 16, generator=generator)
    keys = torch.randn(1, 2, 16, generator=generator), torch.randn(1, 2, 16, generator=generator)
    return {
        "none": {},
        "prompts": {"prompts": {1: more}},
        "prefixes": {"prefixes": {0: keys, 2: vit.Compensated(*keys)}},
        "adapters": {"adapters": {1: torch.sin}, "attention_adapters": {0: torch.cos}},
    }


@pytest.mark.parametrize("name", parts())
@torch.no_grad()
def test_additional_parts_work_as_in_timm(name: str) -> None:
    x = torch.randn(2, 3, 8, 8)
    theirs, ours = (vit.features(network, x, **parts()[name]) for network in small_pair())
    assert torch.equal(theirs, ours)
    theirs, ours = (vit.unnormalised(network, x) for network in small_pair())
    assert torch.equal(theirs, ours)


@torch.no_grad()
def test_a_prefix_of_tokens_and_several_sets_of_adapters_work_as_in_timm() -> None:
    x, tokens = torch.randn(2, 3, 8, 8), torch.randn(1, 2, 16)
    theirs, ours = (vit.prefix_of(network.blocks[1], tokens) for network in small_pair())
    assert all(map(torch.equal, theirs, ours))
    sets = [{1: torch.sin}, {2: torch.cos}]
    theirs, ours = (vit.features_of_each(network, x, sets) for network in small_pair())
    assert all(map(torch.equal, theirs, ours))


def test_it_counts_as_plain_and_stackable_with_the_same_layers() -> None:
    theirs, ours = small_pair()
    vit.require_plain(ours)
    assert inner_layers(ours) == inner_layers(theirs) != ()
    layers = ["blocks.0.attn.qkv", "blocks.2.mlp.fc1"]
    assert stackable(ours, layers) and stackable(theirs, layers) and not stackable(ours, ["patch_embed.proj"])
    assert worthwhile(ours, 3, torch.device("cpu")) == worthwhile(theirs, 3, torch.device("cpu"))
    assert not stackable(nn.Sequential(nn.Linear(2, 2)), ["0"])


def test_a_subclass_may_do_anything() -> None:
    class Other(PlainViT):
        def forward(self, x: Tensor) -> Tensor:
            return x.mean((2, 3))

    other = Other(8, 4, 16, 3, 2)
    assert not stackable(other, ["blocks.0.attn.qkv"])
    with pytest.raises(ConfigError, match="here is a Other"):
        vit.require_plain(other)
