"""A moving average of a network, in the state_dict, that can be asked as the network itself can."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from pearl.nn.growing import TaskTensors


class Average(nn.Module):
    """Moving average of a network's weights and normalisation statistics, across tasks.

    It is in the state_dict as buffers: no optimizer sees it, it does not count as parameters, and grows as the network
    does. The network itself only lends its structure.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tensors = TaskTensors(buffers=True)

    @torch.no_grad()
    def update(self, network: nn.Module, decay: float) -> None:
        """average = decay * average + (1 - decay) * network; what the network has new is taken as it is."""
        for name, value in _tensors(network).items():
            if name not in self.tensors:
                self.tensors.add(name, value)
            elif value.is_floating_point():
                self.tensors[name].lerp_(value, 1 - decay)
            else:
                self.tensors[name].copy_(value)

    @torch.no_grad()
    def forward(self, network: nn.Module, *inputs: Any) -> Tensor:
        """What the network gives in evaluation mode with the averaged weights."""
        training = {module: module.training for module in network.modules()}
        network.eval()
        try:
            return functional_call(network, {name: self.tensors[name] for name in _tensors(network)}, inputs)
        finally:
            for module, mode in training.items():
                module.training = mode


def _tensors(network: nn.Module) -> dict[str, Tensor]:
    return dict(network.named_parameters()) | dict(network.named_buffers())
