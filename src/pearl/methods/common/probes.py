"""Cheaper alternatives to fine-tuning the whole network for the weights that a rank rule reads."""

import copy
from collections.abc import Mapping, Sequence
from math import sqrt

import torch
from torch import Tensor, nn

from pearl.data.batches import Task
from pearl.methods.base import own_loss
from pearl.nn.functional import functional_call
from pearl.nn.lowrank import Target
from pearl.nn.task_modules import TaskTensors

IMAGES = 64  # images per forward pass


def with_tensors(network: nn.Module, tensors: Mapping[str, Tensor]) -> nn.Module:
    """Return a copy of a network with some tensors replaced, by name."""
    made = copy.deepcopy(network).requires_grad_(False)
    own = made.state_dict()
    for name, tensor in tensors.items():
        own[name].copy_(tensor.detach())
    return made


class TargetProbe(nn.Module):
    """A copy of a network in which only the targets train, each as a separate parameter.

    For a fused projection these are only the target's rows: the optimizer has no state of the other rows, so that
    neither momentum nor weight decay moves them.
    """

    def __init__(self, network: nn.Module, targets: Sequence[Target]) -> None:
        super().__init__()
        self.network = copy.deepcopy(network).requires_grad_(False)
        self.targets = targets
        self.trained = TaskTensors()  # by target label
        own = dict(network.named_parameters())
        for target in targets:
            self.trained.add(target.label, target.read(own))

    def weights(self) -> dict[str, Tensor]:
        """Return the weights with targets, by the network's names."""
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
    """Move the targets of a network along the negative gradient of the task's loss, in one step with a common factor.

    The factor makes the paper's threshold of all targets together equal to `share`: |W - W^r|^2 = share (|W|^2 +
    |W^r|^2). Each layer's threshold then depends on its part of the gradient. With `as_adam`, each entry of the
    gradient is divided by its root mean square over batches, which is Adam's direction.
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
    """Return the factor e > 0 with |e g|^2 = share (|w - e g|^2 + |w|^2), from inner products; 0 if g is 0."""
    if gg == 0:
        return 0.0
    return (sqrt((share * wg) ** 2 + 2 * share * (1 - share) * gg * ww) - share * wg) / ((1 - share) * gg)
