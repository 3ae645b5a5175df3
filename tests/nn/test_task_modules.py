"""What grows with the tasks: heads that see more than autocast does."""

import pytest
import torch
from torch import Tensor

from pearl.methods.pearl import Pearl
from pearl.nn.task_modules import TaskHeads, TaskTensors
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
    actual = heads[0].weight.grad.clone()
    heads.zero_grad()
    heads(features.detach().float()).exp().sum().backward()
    assert torch.equal(actual, heads[0].weight.grad)
    assert features.grad.dtype == torch.bfloat16


def test_tensors_of_tasks_are_loaded_strictly_and_copied() -> None:
    made, other = TaskTensors(), TaskTensors()
    made.add("0.a", torch.ones(2))
    made.add("1.b", torch.ones(3, dtype=torch.float64))
    state = made.state_dict()
    other.add("0.a", torch.zeros(2))
    other.add("1.b", torch.zeros(1))
    kept = other["0.a"]
    other.load_state_dict(state, strict=True)
    assert other["0.a"] is kept and other["1.b"].dtype == torch.float64 and (other["1.b"] == 1).all()
    made["1.b"].data.add_(1)
    assert (other["1.b"] == 1).all()  # a copy
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "1/b"'):
        other.load_state_dict({"0/a": state["0/a"]}, strict=True)
