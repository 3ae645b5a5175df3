"""Quadratic penalties on moving parameters, weighted by importance. Not a method itself."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from pearl.nn.task_modules import TaskTensors


class Anchor(nn.Module):
    """Values and importances by parameter name, as buffers in the state_dict. Other parameters have no penalty."""

    def __init__(self) -> None:
        super().__init__()
        self.values = TaskTensors(buffers=True)
        self.importances = TaskTensors(buffers=True)

    @torch.no_grad()
    def move(self, parameters: Mapping[str, Tensor], importances: Mapping[str, Tensor], gamma: float = 1.0) -> None:
        """Set the anchor to the current values; importance = gamma * old + new."""
        for name, new in importances.items():
            if name in self.importances:
                new = gamma * self.importances[name] + new
            self.importances.add(name, new)
            self.values.add(name, parameters[name])

    def forward(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """Return the sum of importance * (parameter - value)^2."""
        total = next(iter(parameters.values())).new_zeros(())
        for name, parameter in parameters.items():
            if name in self.values:
                total = total + (self.importances[name] * (parameter - self.values[name]).square()).sum()
        return total
