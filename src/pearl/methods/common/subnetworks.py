"""Base of methods with a frozen sub-network per task, and of classifiers over them; the paper's concatenates heads.

A classifier infers the task of an image. Another one is a file like `by_statistics`, and a line in `settings.parts`.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from pearl.data.batches import Task
from pearl.methods.base import Expert, Method, Phase
from pearl.methods.classifier import TaskClassifier
from pearl.nn.fast.folding import folded, norms_after_convs
from pearl.nn.fast.fusing import FusedModule, fuse, fusible
from pearl.nn.once import once
from pearl.settings.declared import UpcomingTask
from pearl.settings.parts import CLASSIFIERS
from pearl.storage.checkpoint import WEIGHTS

Spaces = Callable[[Tensor], Sequence[Tensor]]  # maps images to the raw features of every feature space's sub-network


class ClassifierOptions:
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

    bf16 = False  # True: sub-networks compute in bfloat16, where updates that are not merged give other features

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

    def computing(self, x: Tensor) -> AbstractContextManager[object]:
        """Return the context in which sub-networks compute the outputs for images `x`."""
        return nullcontext()

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


@dataclass(frozen=True, kw_only=True)
class Heads(ClassifierOptions):
    """The concatenated raw logits of the heads, as in the PEARL paper."""

    def of(self, method: "SubNetworks") -> SubNetworkClassifier:
        """See `ClassifierOptions.of`."""
        return HeadsClassifier(method)


class HeadsClassifier(SubNetworkClassifier):
    """Concatenated logits. Heads are trained apart, so their scales need not agree."""

    def logits(self, outputs: Sequence[Tensor]) -> Tensor:
        """See `SubNetworkClassifier.logits`; outputs are features (B, dim)."""
        return torch.cat([head(of_task) for head, of_task in zip(self.method.heads, outputs, strict=True)], dim=1)

    def forward(self, x: Tensor, task: int | None = None) -> Tensor:
        """See `Method.forward`."""
        method = self.method
        tasks = range(len(method.heads)) if task is None else [task]
        return torch.cat([method.heads[t](method.task_features(x, t)) for t in tasks], dim=1)

    def experts(self) -> Iterable[Expert]:
        """Return an expert per task."""
        return [self._expert(t) for t in range(len(self.method.heads))]

    def _expert(self, t: int) -> Expert:
        """Return the frozen expert of task t: its head on its sub-network, which is merged once, on first use."""
        method, network = self.method, once(partial(self.method.evaluated_network, t))
        return Expert(f"task {t}", lambda x: method.heads[t](network()(x)), frozen=True, task=t)


HEADS = Heads()
# names of the tensors of one task: of an isolated sub-network, and of class statistics
TASK_TENSOR = re.compile(r"(?P<before>(?:heads\.blocks|tensors|statistics|networks)\.)(?P<task>\d+)(?P<after>[./].+)")
_TASK_STATISTICS = re.compile(r"class_statistics\.tensors\.task/(?P<task>\d+)/")


class SubNetworks(Method):
    """A sub-network and a head per task, frozen after the task.

    A subclass trains a sub-network in `learn_own` and returns it in `sub_network`. With `classifier: statistics`, class
    statistics in the feature spaces of the first sub-networks replace the heads.
    """

    task_local_loss = True
    separable = True  # False: sub-networks depend on others, and `sub_network` is not available
    isolated = False  # True: no tensor of a task depends on other tasks, see `lifecycle.forget`; not inherited
    layers: Sequence[str] = ()  # layers whose outputs the classifier uses, besides the features

    def __init__(self, backbone: nn.Module, classifier: ClassifierOptions = HEADS) -> None:
        super().__init__(backbone)
        self._fusible: list[FusedModule] | None = None
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
        return folded(*self.sub_network(t), self._norms_to_fold if self.fast else {})

    @cached_property
    def _norms_to_fold(self) -> dict[str, str]:
        return norms_after_convs(self.backbone)

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
            part = task.to_train_on()
            for phase in self._learn_anew(part) if task.shows_known_classes else self.learn_own(part):
                if part is not task:
                    phase.data = phase.data or part
                yield phase
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

        def raw(x: Tensor) -> list[Tensor]:
            with self.classifier.computing(x):
                return [network(x) for network in networks()]

        return raw

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

    def is_fixed(self, name: str, task: int) -> bool:
        """See `Method.is_fixed`: tensors of isolated sub-networks, and statistics of earlier tasks."""
        owner = TASK_TENSOR.fullmatch(name) if vars(type(self)).get("isolated") else None
        owner = owner or _TASK_STATISTICS.match(name)
        return owner is not None and int(owner["task"]) < task

    def facts(self, task: int) -> dict[str, Any]:
        """See `Method.facts`."""
        return self.classifier.facts(task)
