"""What a classifier over a method's sub-networks defines. A new one is a file beside `by_heads` and `by_statistics`."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from pearl.data.batches import Task
from pearl.methods.base import Expert
from pearl.methods.classifier import TaskClassifier
from pearl.settings.declared import UpcomingTask
from pearl.storage.checkpoint import WEIGHTS

if TYPE_CHECKING:
    from pearl.methods.common.subnetworks import SubNetworks


class Classifier:
    """Base class of the options of a classifier, a frozen dataclass that is registered in `settings.parts`."""

    def prepare(self, method: "SubNetworks") -> None:
        """Add the modules that the classifier keeps in the method, and set its flags; called once."""

    def of(self, method: "SubNetworks") -> "SubNetworkClassifier":
        """Return the classifier of a prepared method."""
        raise NotImplementedError

    def trains_on(self, task: UpcomingTask) -> bool:
        """Return True if a task gets a trained sub-network, from what is known before learning."""
        return True


class SubNetworkClassifier(TaskClassifier):
    """A classifier over the frozen sub-networks of a method. It holds no state: that is in the method's modules."""

    def __init__(self, method: "SubNetworks") -> None:
        self.method = method

    def untrained(self, task: Task) -> str | None:
        """Return the reason why a task gets no trained sub-network; None if it gets one."""
        return None

    def check(self, task: Task) -> None:
        """Check before a task is trained that what is stored fits together."""

    def fit(self, task: Task) -> None:
        """Fit the classifier to a task whose sub-network is trained."""

    def notes(self, task: Task) -> list[str]:
        """Return warnings for the user before a task is learnt."""
        return []

    def sub_networks(self) -> Sequence[int]:
        """Return the tasks whose sub-networks every image passes through."""
        return range(len(self.method.heads))

    def network(self, network: nn.Module) -> nn.Module:
        """Return a sub-network with the outputs that `logits` uses."""
        return network

    def logits(self, outputs: Sequence[Tensor]) -> Tensor:
        """Return logits (B, classes seen) from the outputs of all `sub_networks`."""
        raise NotImplementedError

    def forward(self, x: Tensor, task: int | None = None) -> Tensor:
        """See `Method.forward`."""
        raise NotImplementedError

    def experts(self) -> Iterable[Expert]:
        """See `Method.experts`."""
        raise NotImplementedError

    def columns(self, task: int) -> slice | Tensor:
        """See `Method.columns`."""
        return self.method.heads.columns(task)

    def file_of(self, name: str) -> str:
        """See `Method.file_of`."""
        return WEIGHTS

    def facts(self, task: int) -> dict[str, Any]:
        """See `Method.facts`."""
        return {}
