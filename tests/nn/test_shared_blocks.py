"""Networks that share their first blocks: the same bits, with one pass through what is shared."""

import copy

import pytest
import torch
from torch import Tensor, nn

from pearl.nn.intermediate_features import WithInner, inner_layers
from pearl.nn.plain_vit import PlainViT
from pearl.nn.shared_blocks import features_of_all, shared_blocks
from pearl.testing.tiny import SIZE, small_resnet
from vits import small


def plain() -> nn.Module:
    torch.manual_seed(0)
    network = PlainViT(SIZE, 4, 16, 3, 2).eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.normal_(0, 0.2)
    return network


def changed(network: nn.Module, *names: str) -> nn.Module:
    """A copy with other values of these parameters."""
    other = copy.deepcopy(network)
    with torch.no_grad():
        for name in names:
            other.get_parameter(name).add_(1.0)
    return other


def test_how_many_blocks_are_shared() -> None:
    first = small()
    assert shared_blocks([first, changed(first, "blocks.2.attn.qkv.weight")]) == 2
    for order in ((2, 1), (1, 2)):
        assert shared_blocks([first, *(changed(first, f"blocks.{i}.mlp.fc1.bias") for i in order)]) == 1
    assert shared_blocks([first, changed(first, "norm.weight")]) == 3
    assert shared_blocks([first, copy.deepcopy(first)]) == 3
    for name in ("blocks.0.norm1.weight", "pos_embed", "cls_token", "patch_embed.proj.weight"):
        assert shared_blocks([first, changed(first, name)]) == 0
    assert shared_blocks([first]) == 0
    assert shared_blocks([small_resnet(), small_resnet()]) == 0


@pytest.mark.parametrize("make", [small, plain])
@pytest.mark.parametrize("layers", ["auto", "final"])
def test_features_have_the_bits_of_separate_passes(make: object, layers: str) -> None:
    first = make()  # type: ignore[operator]
    bare = [first, changed(first, "blocks.2.attn.qkv.weight"), changed(first, "blocks.1.mlp.fc2.weight")]
    networks = [WithInner(each, inner_layers(each, layers)) for each in bare]  # type: ignore[arg-type]
    x = torch.randn(5, 3, SIZE, SIZE)
    runs = []
    for each in bare:
        each.blocks[0].register_forward_hook(lambda *call: runs.append(1))
    with torch.no_grad():
        expected: list[Tensor] = [network(x) for network in networks]
        assert len(runs) == 3
        found = features_of_all(networks, x, shared_blocks(bare))
    assert len(runs) == 4
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    assert not torch.equal(expected[0], expected[1])
