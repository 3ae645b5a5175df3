"""A moving average of a network, in the state_dict, that can be asked as the network itself can."""

from collections.abc import Callable
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from pearl.nn.functional import shallow_copy
from pearl.nn.growing import TaskTensors

Statistics = Literal["averaged", "own"]
N = TypeVar("N", bound=nn.Module)


class Average(nn.Module):
    """Moving average of a network's weights across tasks, with normalisation statistics.

    It is in the state_dict as buffers: no optimizer sees it, it does not count as parameters, and grows as the network
    does. The network itself only lends its structure.

    Statistics are `averaged` like the weights, and the average is always in evaluation mode: what it says of an image
    depends on nothing else. Or they are its `own`: it is in the network's mode, so that in training it normalises by
    the batch, and its running statistics come from what it was asked then. Averaged weights have smaller outputs than
    each of those they are made of, which averaged statistics do not know (Izmailov et al., UAI 2018).
    """

    def __init__(self, statistics: Statistics = "averaged") -> None:
        super().__init__()
        self.statistics = statistics
        self.tensors = TaskTensors(buffers=True)

    @torch.no_grad()
    def update(self, network: nn.Module, decay: float) -> None:
        """average = decay * average + (1 - decay) * network; what the network has new is taken as it is."""
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
        """What the network gives with the averaged weights."""
        return self.asked(network, lambda averaged: averaged(*inputs))

    @torch.no_grad()
    def asked(self, network: N, question: Callable[[N], Tensor]) -> Tensor:
        """Return what `question` makes of a copy of the network, or of what holds it, with the averaged weights.

        The network itself stays as it is: other threads may use it meanwhile.
        """
        tensors = {name: self.tensors[name] for name in _tensors(network) if name in self.tensors}
        averaged = shallow_copy(network, tensors)
        return question(averaged.eval() if self.statistics == "averaged" else averaged)


def _tensors(network: nn.Module) -> dict[str, Tensor]:
    return dict(network.named_parameters()) | dict(network.named_buffers())
