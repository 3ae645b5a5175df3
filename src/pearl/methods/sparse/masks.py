"""Owners of weights: methods that give every task its own weights in one network."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pearl.data.batches import Batch
from pearl.nn.task_modules import TaskTensors

FREE = torch.iinfo(torch.int16).max
HIDDEN = FREE - 1  # does not exist yet: in a channel that the network has not grown to


def weight_names(backbone: nn.Module) -> list[str]:
    """Return the weights of all convolutions and linear layers, without biases, norm layers and embeddings."""
    return [f"{name}.weight" for name, m in backbone.named_modules() if isinstance(m, nn.Conv2d | nn.Linear)]


def inner_weights(backbone: nn.Module) -> list[str]:
    """Return those without the first layer's and shortcuts', such as the 16 of a ResNet-18's blocks."""
    return [name for name in weight_names(backbone)[1:] if "downsample" not in name]


def nonzero(method: nn.Module) -> int:
    """Return how many of a method's parameters are not 0."""
    return sum(int(parameter.count_nonzero()) for parameter in method.parameters())


def cubic(progress: float, start: float, end: float) -> float:
    """Return a share that grows from `start` to `end`, fast at first (Zhu & Gupta, 2017); `progress` is from 0 to 1."""
    return end + (start - end) * (1 - progress) ** 3


class Owners(TaskTensors):
    """The task that owns each weight, as an integer tensor in the weight's shape; `FREE` or `HIDDEN` without an owner.

    Task t uses the weights with owner <= t.
    """

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        super().__init__(buffers=True)
        self.names = list(weights)
        for name, weight in weights.items():
            self.add(name, torch.full_like(weight, FREE, dtype=torch.int16))

    def claim(self, task: int) -> None:
        """Give all free weights to a task."""
        for name in self.names:
            self[name][self[name] == FREE] = task

    def mask(self, name: str, task: int) -> Tensor:
        """Return a mask of the weights of a layer that a task uses: its own and those of earlier tasks."""
        return self[name] <= task

    def masked(self, weights: Mapping[str, Tensor], task: int) -> dict[str, Tensor]:
        """Return the weights that a task uses; all others are 0."""
        return {name: weights[name] * self.mask(name, task) for name in self.names}

    @torch.no_grad()
    def prune(self, weights: Mapping[str, Tensor], task: int, share: float) -> None:
        """Set each layer's smallest weights of a task to 0 and free them: exactly round(share * its weights)."""
        for name in self.names:
            owner, weight = self[name], weights[name]
            of_task = (owner == task).nonzero(as_tuple=True)
            order = weight[of_task].abs().argsort(stable=True)[: round(share * len(of_task[0]))]
            smallest = tuple(index[order] for index in of_task)
            weight[smallest], owner[smallest] = 0.0, FREE

    @torch.no_grad()
    def prune_to(self, weights: Mapping[str, Tensor], task: int, share: float) -> None:
        """Free a task's smallest weights until a `share` of its own and free weights in each layer is free.

        Layers with a larger free share are unchanged.
        """
        for name in self.names:
            owner, weight = self[name], weights[name]
            of_task, free = (owner == task).flatten(), int((owner == FREE).sum())
            more = round(share * (free + int(of_task.sum()))) - free
            if more > 0:
                sizes = weight.abs().flatten().masked_fill(~of_task, torch.inf)
                smallest = torch.zeros_like(of_task)
                smallest[sizes.argsort(stable=True)[:more]] = True
                owner.masked_fill_(smallest.view(owner.shape), FREE)

    @torch.no_grad()
    def clear(self, weights: Mapping[str, Tensor]) -> None:
        """Set free weights to 0."""
        for name in self.names:
            weights[name].masked_fill_(self[name] == FREE, 0.0)

    def held(self, weights: Mapping[str, nn.Parameter], task: int) -> dict[str, Any]:
        """Return hooks for a phase that keep all but a task's weights constant, see `held`."""
        return held(weights, {name: self[name] != task for name in self.names})


def held(parameters: Mapping[str, nn.Parameter], fixed: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return hooks for a phase that keep entries of parameters constant where `fixed` is true.

    After the backward pass, their gradients are set to 0, for momentum and norms; after a step, their weight decay is
    undone.
    """
    now = {name: parameters[name].detach().clone() for name in fixed}

    def after_backward() -> None:
        for name, mask in fixed.items():
            if (gradient := parameters[name].grad) is not None:
                gradient.masked_fill_(mask, 0.0)

    @torch.no_grad()
    def after_step(_: Batch) -> None:
        for name, mask in fixed.items():
            parameters[name].copy_(torch.where(mask, now[name], parameters[name]))

    return {"after_backward": after_backward, "after_step": after_step}
