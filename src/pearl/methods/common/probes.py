"""Cheaper ways to the weights by which a rank rule chooses than to fine-tune the whole network."""

import copy
from collections.abc import Mapping, Sequence
from math import sqrt

import torch
from torch import Tensor, nn

from pearl.data.batches import Task
from pearl.methods.base import own_loss
from pearl.nn.functional import functional_call
from pearl.nn.growing import TaskTensors
from pearl.nn.lowrank import Target

IMAGES = 64  # that pass at once


def with_tensors(network: nn.Module, tensors: Mapping[str, Tensor]) -> nn.Module:
    """A copy of a network with some tensors, by name, in the place of its own."""
    made = copy.deepcopy(network).requires_grad_(False)
    own = made.state_dict()
    for name, tensor in tensors.items():
        own[name].copy_(tensor.detach())
    return made


class TargetProbe(nn.Module):
    """A copy of a network of which only the targets train, each as a parameter of its own.

    Of a fused projection these are the target's rows alone: the optimizer has no state of the other rows, so that
    neither momentum nor weight decay moves them.
    """

    def __init__(self, network: nn.Module, targets: Sequence[Target]) -> None:
        super().__init__()
        self.network = copy.deepcopy(network).requires_grad_(False)
        self.targets = targets
        self.trained = TaskTensors()  # by the target's label
        own = dict(network.named_parameters())
        for target in targets:
            self.trained.add(target.label, target.read(own))

    def weights(self) -> dict[str, Tensor]:
        """The weights that have targets, by the network's own names."""
        changed: dict[str, Tensor] = {}
        for target in self.targets:
            weight = changed.get(target.parameter, self.network.get_parameter(target.parameter))
            changed[target.parameter] = target.replace(weight, self.trained[target.label])
        return changed

    def forward(self, x: Tensor) -> Tensor:
        """Features (B, dim)."""
        return functional_call(self.network, self.weights(), (x,))


def step_down(
    probe: nn.Module, head: nn.Module, task: Task, targets: Sequence[Target], share: float, *, as_adam: bool = False
) -> None:
    """Move the targets of a network against the gradient of the task's loss, once and all by one factor.

    The factor is that which moves them, taken together, as far as `share` says in terms of the paper's threshold:
    |W - W^r|^2 = share (|W|^2 + |W^r|^2). What each layer's threshold is, its part of the gradient decides. With
    `as_adam` each entry of the gradient is divided by its root mean square over batches, as where Adam would go.
    """
    names = [*dict.fromkeys(target.parameter for target in targets)]
    weights = [probe.get_parameter(name).requires_grad_(True) for name in names]
    gradients = [torch.zeros_like(weight) for weight in weights]
    squares = [torch.zeros_like(weight) for weight in weights]
    loss = own_loss(probe.eval(), head, task)
    for batch in task.in_order(IMAGES):
        part = torch.autograd.grad(loss(batch), weights)
        for total, square, gradient in zip(gradients, squares, part, strict=True):
            total.add_(gradient, alpha=len(batch.y) / len(task))
            square.addcmul_(gradient, gradient, value=len(batch.y) / len(task))
    if as_adam:
        gradients = [total / (square.sqrt() + 1e-12) for total, square in zip(gradients, squares, strict=True)]
    moved = dict(zip(names, gradients, strict=True))
    known = dict(zip(names, weights, strict=True))
    w = torch.cat([target.read(known).detach().flatten().double() for target in targets])
    g = torch.cat([target.read(moved).flatten().double() for target in targets])
    factor = distance_to(float(w @ w), float(w @ g), float(g @ g), share)
    with torch.no_grad():
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.sub_(factor * gradient).requires_grad_(False)


def distance_to(ww: float, wg: float, gg: float, share: float) -> float:
    """The factor e > 0 at which |e g|^2 = share (|w - e g|^2 + |w|^2), from inner products; 0 if g is."""
    if gg == 0:
        return 0.0
    return (sqrt((share * wg) ** 2 + 2 * share * (1 - share) * gg * ww) - share * wg) / ((1 - share) * gg)
