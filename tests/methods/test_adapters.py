"""Methods that put adapters into a frozen ViT, and what they share, against calculations of their own."""

import pytest
import torch
import torch.nn.functional as F

from pearl.lifecycle.small import images
from pearl.methods.adapters.bottleneck import Adapters, Bottleneck, TaskAdapters
from pearl.nn import vit
from vits import WIDTH, close, drawn, small

# ------------------------------------------------------------------------------------------------------------ the block


def stirred(module, size=0.3):
    """With weights that are not those of the start."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(size * torch.randn_like(parameter))
    return module.eval()


@torch.no_grad()
def test_a_bottleneck_is_two_linear_layers_and_what_stands_between():
    tokens = drawn(2, 5, WIDTH)
    for activation, function in (("relu", torch.relu), ("gelu", F.gelu)):
        block = stirred(Bottleneck(WIDTH, 4, scale=0.1, activation=activation))
        hidden = function(tokens @ block.down.weight.T + block.down.bias)
        close(block(tokens), 0.1 * (hidden @ block.up.weight.T + block.up.bias))
    assert sum(p.numel() for p in Bottleneck(768, 64).parameters()) * 12 == 1_189_632  # as EASE and SSIAT count
    assert [*Bottleneck(WIDTH, 4, bias=False, learnable=True).state_dict()] == ["scale", "down.weight", "up.weight"]


@torch.no_grad()
def test_adapters_are_nothing_at_the_start_and_drop_out_in_training_alone():
    net, x = small(), images()
    fresh = Adapters(range(3), lambda: Bottleneck(WIDTH, 4, dropout=0.5))
    close(vit.features(net, x, adapters=fresh.by_block()), net(x), atol=1e-6)
    block = stirred(fresh)["1"]
    tokens = drawn(1, 3, WIDTH)
    assert torch.equal(block(tokens), block(tokens))
    assert not torch.equal(block.train()(tokens), block(tokens))


@pytest.mark.parametrize("place", ["adapters", "attention_adapters"])
def test_a_learnable_scale_is_trained_where_an_adapter_stands(place):
    net, x = small(), images()
    adapters = stirred(Adapters([0, 2], lambda: Bottleneck(WIDTH, 4, learnable=True)))
    vit.features(net, x, **{place: adapters.by_block()}).square().sum().backward()
    assert all(block.scale.grad.abs() > 0 and block.down.weight.grad.any() for block in adapters.values())


def test_adapters_of_tasks_grow_from_their_file():
    tasks = TaskAdapters([0, 2], lambda: Bottleneck(WIDTH, 4))
    for _ in range(11):
        stirred(tasks.grow())
    fresh = TaskAdapters([0, 2], lambda: Bottleneck(WIDTH, 4))
    fresh.load_state_dict(tasks.state_dict())
    assert len(fresh) == 11
    assert [*fresh.by_block(10)] == [0, 2]
    tokens = drawn(1, 3, WIDTH)
    assert torch.equal(fresh.by_block(10)[2](tokens), tasks.by_block(10)[2](tokens))
