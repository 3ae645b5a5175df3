"""What grows with the tasks: heads that see more than autocast does."""

import pytest
import torch
from torch import Tensor

from pearl.methods.pearl import Pearl
from pearl.nn.task_modules import TaskHeads
from pearl.testing.tiny import images, small_vit
from zoo import taught

WAYS = {
    "forward": lambda method, x: method(x),
    "tasks": lambda method, x: torch.cat([method(x, task) for task in range(len(method.heads))], dim=1),
    "experts": lambda method, x: torch.cat([expert.forward(x) for expert in method.experts()], dim=1),
    "at once": lambda method, x: method.at_once()[0](x),
}


@pytest.mark.parametrize("way", WAYS)
@torch.no_grad()
def test_near_logits_are_told_apart_in_bfloat16(way: str) -> None:
    method = taught(Pearl(small_vit())).eval()
    for head in method.heads:
        head.weight.mul_(0.01)
        head.bias.fill_(64.0)
    with torch.autocast("cpu", torch.bfloat16):
        logits: Tensor = WAYS[way](method, images()[:2])
    assert logits.dtype == torch.float32
    assert (logits.bfloat16() == 64.0).all(), "bfloat16 would call them all the same"
    assert (logits[0] != logits[1]).all()
    assert len(logits.unique()) == logits.numel()


def test_a_head_learns_from_features_in_bfloat16_as_in_float32() -> None:
    torch.manual_seed(0)
    heads = TaskHeads(4)
    heads.grow(3)
    features = torch.randn(5, 4).bfloat16().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        logits = heads(features)
    logits.exp().sum().backward()
    found = heads[0].weight.grad.clone()
    heads.zero_grad()
    heads(features.detach().float()).exp().sum().backward()
    assert torch.equal(found, heads[0].weight.grad)
    assert features.grad.dtype == torch.bfloat16
