"""Base of methods with a frozen sub-network per task. A classifier infers the task (see `classifiers`)."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from pearl.data.batches import Task
from pearl.methods.base import Expert, Method, Phase
from pearl.methods.common.by_heads import Heads
from pearl.methods.common.classifiers import Classifier, SubNetworkClassifier
from pearl.nn.fast.fusing import Part, fuse, fusible
from pearl.nn.once import once
from pearl.settings.declared import UpcomingTask
from pearl.settings.parts import CLASSIFIERS

if TYPE_CHECKING:
    from pearl.methods.common.class_statistics import ClassStatistics

Spaces = Callable[[Tensor], Sequence[Tensor]]  # maps images to the raw features of every feature space's sub-network

HEADS = Heads()


class SubNetworks(Method):
    """A sub-network and a head per task, frozen after the task.

    A subclass trains a sub-network in `learn_own` and returns it in `sub_network`. With `classifier: statistics`, class
    statistics in the feature spaces of the first sub-networks replace the heads.
    """

    task_local_loss = True
    separable = True  # False: sub-networks depend on others, and `sub_network` is not available
    isolated = False  # True: no tensor of a task depends on other tasks, see `lifecycle.forget`; not inherited
    class_statistics: "ClassStatistics"  # there with this classifier, as are `layers`, those with intermediate features
    layers: Sequence[str]

    def __init__(self, backbone: nn.Module, classifier: Classifier = HEADS) -> None:
        super().__init__(backbone)
        self._fusible: list[Part] | None = None
        self._classifier = classifier
        classifier.prepare(self)

    @property
    def classifier(self) -> SubNetworkClassifier:
        """Return the classifier over the classes of all tasks."""
        return self._classifier.of(self)

    # ------------------------------------------------------------------------------------- what a subclass defines

    def learn_own(self, task: Task) -> Iterator[Phase]:
        """Train the sub-network and the head of a task."""
        raise NotImplementedError

    def task_features(self, x: Tensor, t: int) -> Tensor:
        """Return features (B, dim) of task t's sub-network."""
        raise NotImplementedError

    def sub_network(self, t: int) -> tuple[nn.Module, Mapping[str, Tensor]]:
        """Return task t's sub-network: a network, and the tensors, by name, that replace its own."""
        raise NotImplementedError

    def merged(self, t: int) -> nn.Module:
        """Return task t's sub-network as a separate network in evaluation mode, without hooks."""
        return self.evaluated(*self.sub_network(t))

    # --------------------------------------------------------------------------------------------------- learning

    @classmethod
    def has_phases(cls, task: UpcomingTask) -> bool:
        """See `Method.has_phases`: the classifier decides which tasks are trained."""
        classifier = task.options.get("classifier", HEADS)
        built = CLASSIFIERS.build(dict(classifier)) if isinstance(classifier, Mapping) else classifier
        return bool(built.trains_on(task))

    def learn(self, task: Task) -> Iterator[Phase]:
        """Train the task's sub-network if it will be used; then fit the classifier."""
        classifier = self.classifier
        if classifier.untrained(task) is None:
            classifier.check(task)
            yield from self._learn_anew(task) if task.shows_known_classes else self.learn_own(task)
        else:
            self._untrained_head(task)
        classifier.fit(task)

    def _learn_anew(self, task: Task) -> Iterator[Phase]:
        """Train a sub-network for classes of which some are known, with a head that is deleted afterwards."""
        as_new = task.as_new()
        for phase in self.learn_own(as_new):
            phase.data = phase.data or as_new
            yield phase
        del self.heads.blocks[-1]
        self._untrained_head(task)

    def _untrained_head(self, task: Task) -> None:
        self.heads.grow(len(task.classes)).to(self.device).requires_grad_(False)

    def notes(self, task: Task) -> list[str]:
        """See `Method.notes`."""
        return self.classifier.notes(task)

    # ------------------------------------------------------------------------------------------------- predictions

    def spaces(self, tasks: Iterable[int]) -> Spaces:
        """Return the sub-networks of some tasks with the outputs that the classifier uses, merged on first use."""
        networks = once(lambda: [self.evaluated_network(t) for t in tasks])
        return lambda x: [network(x) for network in networks()]

    def evaluated_network(self, t: int) -> nn.Module:
        """Return task t's sub-network in its fastest form, with the outputs that the classifier uses."""
        network = self.classifier.network(self.merged(t))
        if not self.fast:
            return network
        if self._fusible is None:
            self._fusible = fusible(network)
        return fuse(network, self._fusible)

    def forward(self, x: Tensor, task: int | None = None) -> Tensor:
        """See `Method.forward`."""
        return self.classifier.forward(x, task)

    def experts(self) -> Iterable[Expert]:
        """See `Method.experts`."""
        return self.classifier.experts()

    def columns(self, task: int) -> slice | Tensor:
        """See `Method.columns`."""
        return self.classifier.columns(task)

    def forward_passes(self) -> int:
        """See `Method.forward_passes`."""
        return len(self.classifier.sub_networks())

    def file_of(self, name: str) -> str:
        """See `Method.file_of`."""
        return self.classifier.file_of(name)

    def facts(self, task: int) -> dict[str, Any]:
        """See `Method.facts`."""
        return self.classifier.facts(task)
