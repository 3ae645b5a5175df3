"""A cheaper probe than fine-tuning the whole network: the layers alone whose ranks are to be chosen."""

import copy
from collections.abc import Sequence

from torch import Tensor, nn

from pearl.nn.functional import functional_call
from pearl.nn.lowrank import Target
from pearl.nn.task_modules import TaskTensors


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
        parameters = dict(network.named_parameters())
        for target in targets:
            self.trained.add(target.label, target.read(parameters))

    def weights(self) -> dict[str, Tensor]:
        """Return the weights with targets, by the network's names."""
        changed: dict[str, Tensor] = {}
        for target in self.targets:
            weight = changed.get(target.parameter, self.network.get_parameter(target.parameter))
            changed[target.parameter] = target.replace(weight, self.trained[target.label])
        return changed

    def whole(self) -> nn.Module:
        """Return the network with its trained targets."""
        made = copy.deepcopy(self.network)
        for name, weight in self.weights().items():
            made.get_parameter(name).data.copy_(weight.detach())
        return made

    def forward(self, x: Tensor) -> Tensor:
        """Return features (B, dim)."""
        return functional_call(self.network, self.weights(), (x,))
