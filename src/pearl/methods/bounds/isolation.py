"""Complete parameter isolation: a full network per task. PEARL's upper bound in accuracy and in size."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pearl.data.batches import Task
from pearl.methods.base import Expert, Method, Phase, own_loss


class Isolation(Method):
    """Every task trains its own copy of the starting network; class-IL concatenates the raw logits."""

    own_classes = True
    phases = ("isolation",)

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__(backbone.requires_grad_(False))  # the starting point of every copy; never trained itself
        self.networks = nn.ModuleList()

    def learn(self, task: Task) -> Iterator[Phase]:
        """Train a fresh copy and its head; all earlier ones stay as they are."""
        self.requires_grad_(False)
        network, head = self._grow(), self.heads.grow(len(task.classes)).to(self.device)
        params = [*network.parameters(), *head.parameters()]
        yield Phase("isolation", params, own_loss(network, head, task), steady=True)

    def _grow(self) -> nn.Module:
        network = copy.deepcopy(self.backbone).requires_grad_(True)
        self.networks.append(network)
        return network

    def forward(self, x: Tensor, task: int | None = None) -> Tensor:
        """See `Method.forward`."""
        tasks = range(len(self.networks)) if task is None else [task]
        return torch.cat([self.heads[t](self.networks[t](x)) for t in tasks], dim=1)

    def experts(self) -> Sequence[Expert]:
        """One network per task."""
        return [self.expert(t, partial(self.evaluated, network, {})) for t, network in enumerate(self.networks)]

    def size(self) -> int:
        """Networks and heads; the starting point is kept for later tasks only."""
        return super().size() - sum(parameter.numel() for parameter in self.backbone.parameters())

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        while any(key.startswith(f"{prefix}networks.{len(self.networks)}.") for key in state_dict):
            self._grow()
        super()._load_from_state_dict(state_dict, prefix, *args)
