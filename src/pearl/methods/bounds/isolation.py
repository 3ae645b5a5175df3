"""Complete parameter isolation: a full network per task. It bounds PEARL's accuracy and size from above."""

import copy
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from torch import Tensor, nn

from pearl.data.batches import Task
from pearl.methods.base import Phase, whole
from pearl.methods.common.subnetworks import HEADS, ClassifierOptions, SubNetworks
from pearl.settings.parts import CLASSIFIERS


class Isolation(SubNetworks):
    """Each task trains its own copy of the initial network; class-IL concatenates the raw logits."""

    phases = ("isolation",)
    isolated = True

    def __init__(
        self,
        backbone: nn.Module,
        *,
        classifier: Annotated[ClassifierOptions, CLASSIFIERS] = HEADS,
    ) -> None:
        super().__init__(backbone.requires_grad_(False), classifier)  # the initial weights of every copy, never trained
        self.networks = nn.ModuleDict()  # by task number

    def learn_own(self, task: Task) -> Iterator[Phase]:
        """Train a new copy and its head; earlier ones are unchanged."""
        self.requires_grad_(False)
        network, head = self._grow(task.id), self.heads.grow(len(task.classes)).to(self.device)
        yield whole("isolation", network, head, task)

    def _grow(self, t: int) -> nn.Module:
        network = copy.deepcopy(self.backbone).requires_grad_(True)
        self.networks[f"{t}"] = network
        return network

    def network(self, t: int) -> nn.Module:
        """Return task t's network; the initial one if the task was not trained."""
        key = f"{t}"
        return self.networks[key] if key in self.networks else self.backbone  # noqa: SIM401 - ModuleDict has no get

    def task_features(self, x: Tensor, t: int) -> Tensor:
        """See `SubNetworks.task_features`."""
        return self.network(t)(x)

    def sub_network(self, t: int) -> tuple[nn.Module, dict[str, Tensor]]:
        """See `SubNetworks.sub_network`."""
        return self.network(t), {}

    def size(self) -> int:
        """Count networks and heads; the initial network is stored for later tasks only."""
        return super().size() - sum(parameter.numel() for parameter in self.backbone.parameters())

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        start = f"{prefix}networks."
        for t in sorted({int(key.removeprefix(start).split(".")[0]) for key in state_dict if key.startswith(start)}):
            if f"{t}" not in self.networks:
                self._grow(t)
        super()._load_from_state_dict(state_dict, prefix, *args)
