"""A moving average of a network, in the state_dict, with the network's own interface."""

from collections.abc import Callable
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from pearl.nn.functional import shallow_copy
from pearl.nn.task_modules import TaskTensors

Statistics = Literal["averaged", "own"]
N = TypeVar("N", bound=nn.Module)


class Average(nn.Module):
    """Moving average of a network's weights across tasks, with normalisation statistics.

    Its tensors are buffers: they are not optimized, do not count as parameters, and grow with the network. Only the
    structure is the network's.

    If statistics are `averaged` like the weights, the average is always in evaluation mode, and its output for an image
    depends only on that image. If they are its `own`, it has the network's mode: in training it normalises by the batch
    and updates its own running statistics. Averaged weights have smaller outputs than their components, which averaged
    statistics do not reflect (Izmailov et al., UAI 2018).
    """

    def __init__(self, statistics: Statistics = "averaged") -> None:
        super().__init__()
        self.statistics = statistics
        self.tensors = TaskTensors(buffers=True)

    @torch.no_grad()
    def update(self, network: nn.Module, decay: float) -> None:
        """Set average = decay * average + (1 - decay) * network; new tensors of the network are copied."""
        statistics = dict(network.named_buffers())
        for name, value in _tensors(network).items():
            if name not in self.tensors:
                self.tensors.add(name, value)
            elif name in statistics and self.statistics == "own":
                continue
            elif value.is_floating_point():
                self.tensors[name].lerp_(value, 1 - decay)
            else:
                self.tensors[name].copy_(value)

    def forward(self, network: nn.Module, *inputs: Any) -> Tensor:
        """Return the network's output with the averaged weights."""
        return self.evaluated(network, lambda averaged: averaged(*inputs))

    @torch.no_grad()
    def evaluated(self, network: N, function: Callable[[N], Tensor]) -> Tensor:
        """Return the result of `question` for a copy of the network, or of its owner, with the averaged weights.

        The network itself is unchanged, so that other threads may use it.
        """
        tensors = {name: self.tensors[name] for name in _tensors(network) if name in self.tensors}
        averaged = shallow_copy(network, tensors)
        return function(averaged.eval() if self.statistics == "averaged" else averaged)


def _tensors(network: nn.Module) -> dict[str, Tensor]:
    return dict(network.named_parameters()) | dict(network.named_buffers())
