"""Base of methods with a frozen sub-network per task: task inference by heads or class statistics."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pearl.data.batches import Task
from pearl.errors import TrainingError
from pearl.methods.base import Expert, Method, Phase, Predictions
from pearl.methods.common.class_statistics import ClassStatistics
from pearl.methods.common.classifiers import Classifier, Heads, Statistics
from pearl.methods.common.retained import retained
from pearl.methods.common.scatter import drawn
from pearl.methods.common.whitening import Whitening
from pearl.nn.fast.fusing import Part, fuse, fusible
from pearl.nn.intermediate_features import WithInner, inner_layers
from pearl.nn.once import once
from pearl.nn.precision import computing, outside_autocast
from pearl.nn.task_modules import CosineHeads
from pearl.settings.declared import UpcomingTask
from pearl.settings.parts import CLASSIFIERS
from pearl.storage.checkpoint import RUNNING, STATISTICS, WEIGHTS

Spaces = Callable[[Tensor], Sequence[Tensor]]  # maps images to the raw features of every feature space's sub-network

HEADS = Heads()
# names of the tensors of one task: of an isolated sub-network, and of class statistics
TASK_TENSOR = re.compile(r"(?P<before>(?:heads\.blocks|tensors|statistics|networks)\.)(?P<task>\d+)(?P<after>[./].+)")
_TASK_STATISTICS = re.compile(r"class_statistics\.tensors\.task/(?P<task>\d+)/")
FITTED = 64  # images of a task whose features are kept until the next one, see `fitted`
USUAL_RATE = 0.05  # false-rejection rates at which the expected range is recorded
COSINES = 4.0  # factor of cosines in training with a cosine head


class SubNetworks(Method):
    """A sub-network and a head per task, frozen after the task.

    A subclass trains a sub-network in `learn_own` and returns it in `sub_network`. With `classifier: statistics`, class
    statistics in the feature spaces of the first sub-networks replace the heads.
    """

    task_local_loss = True
    separable = True  # False: sub-networks depend on others, and `sub_network` is not available
    isolated = False  # True: no tensor of a task depends on other tasks, see `lifecycle.forget`; not inherited

    def __init__(self, backbone: nn.Module, classifier: Classifier = HEADS) -> None:
        super().__init__(backbone)
        self.class_statistics: ClassStatistics | None = None
        # raw features of some images of the task observed last, in every space, and their labels; not part of the state
        self._observed: tuple[list[Tensor], Tensor] | None = None
        self._fusible: list[Part] | None = None
        if isinstance(classifier, Statistics):
            self.class_statistics = ClassStatistics(classifier)
            self.layers = inner_layers(backbone, classifier.layers)
            if classifier.head == "cosine":
                self.heads = CosineHeads(self.heads.dim, COSINES)
            self.task_local_loss, self.allows_repeated_classes = False, True

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
        """See `Method.has_phases` and `trains_on`."""
        class_statistics = task.options.get("classifier")
        class_statistics = (
            CLASSIFIERS.build(dict(class_statistics)) if isinstance(class_statistics, Mapping) else class_statistics
        )
        if not isinstance(class_statistics, Statistics) or not task.id:
            return True
        spaces = 1 + sum(len(classes) > 1 for classes in task.counts[1:-1])
        return task.classes > 1 and (
            class_statistics.train != "spaces" or class_statistics.spaces == "all" or spaces < class_statistics.spaces
        )

    def learn(self, task: Task) -> Iterator[Phase]:
        """Train the task's sub-network if it will be used; then add its class statistics in all feature spaces."""
        if self.trains_on(task):
            if self.class_statistics is not None and self.class_statistics.created_at:
                self._check(self.class_statistics, task)
            yield from self._learn_anew(task) if task.shows_known_classes else self.learn_own(task)
        else:
            self._untrained_head(task)
        if self.class_statistics is not None:
            self.observe(self.class_statistics, task)

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

    def trains_on(self, task: Task) -> bool:
        """Return True if the task gets a sub-network.

        With class statistics, tasks after the first need several classes.
        """
        return self._untrained(task) is None

    def _untrained(self, task: Task) -> str | None:
        """Return the reason why a task gets no sub-network; None if it gets one."""
        if self.class_statistics is None or task.id == 0:
            return None
        options = self.class_statistics.options
        if not task.train:
            return "as was asked"
        if len(task.shown) < 2:
            return "since a single class gives no gradient"
        if options.train == "spaces" and not self.class_statistics.wants_space():
            return f"since the first {options.spaces} sub-networks serve all tasks (method.classifier.spaces)"
        return None

    def notes(self, task: Task) -> list[str]:
        """Return notes: that nothing is trained, with the reason; for the first task, that a single class trains
        nothing.
        """
        if self.class_statistics is not None and task.id == 0 and len(task.shown) < 2 and not self.backbone.pretrained:
            return [
                "a single class cannot train a network: this one keeps its random weights, and later tasks use its "
                "features; begin with two classes or more, or with a pretrained network"
            ]
        reason = self._untrained(task)
        return [f"learnt by class statistics alone, without training, {reason}"] if reason else []

    @torch.no_grad()
    def _check(self, class_statistics: ClassStatistics, task: Task) -> None:
        """Check before training that statistics fit their sub-networks, with one image."""
        self.eval()
        class_statistics.check(self.spaces(class_statistics.created_at)(next(task.in_order(1))[0]))

    @torch.no_grad()
    def observe(self, class_statistics: ClassStatistics, task: Task, batch: int = 32) -> None:
        """Compute class statistics of a task's images, not augmented, in every space; first add its own sub-network's
        space.
        """
        self.eval()
        new = [task.id] if class_statistics.wants_space() and self.trains_on(task) else []
        raws = self._raw(self.spaces([*class_statistics.created_at, *new]), task, batch)
        if not all(bool(raw.isfinite().all()) for raw in raws):
            raise TrainingError(
                f"task {task.id + 1} ({task.name}): a sub-network's features of its images are not finite; earlier "
                f"tasks are stored; lower train.lr, or check the images"
            )
        if new:
            class_statistics.add_space(task.id, raws[-1])
        class_statistics.observe(
            [space(raw) for space, raw in zip(class_statistics.spaces(), raws, strict=True)], task.labels
        )
        some = drawn(torch.arange(len(task), device=task.labels.device), FITTED)
        self._observed = [raw[some] for raw in raws], task.labels[some]

    def _raw(self, spaces: Spaces, task: Task, batch: int) -> list[Tensor]:
        parts = [spaces(x) for x, _, _ in task.in_order(batch)]
        return [torch.cat(of_space) for of_space in zip(*parts, strict=True)]

    # --------------------------------------------------------------------------------------------------- answering

    def spaces(self, tasks: Iterable[int]) -> Spaces:
        """Return the sub-networks of some tasks with intermediate features, merged on first use.

        They compute in the classifier's precision, so that statistics fit the features they are used with.
        """
        networks = once(lambda: [self._asked(t) for t in tasks])
        bf16 = self.class_statistics is not None and self.class_statistics.options.precision == "bfloat16"

        def raw(x: Tensor) -> list[Tensor]:
            with computing(x, bf16=bf16):
                return [network(x) for network in networks()]

        return raw

    def _asked(self, t: int) -> nn.Module:
        """Return task t's sub-network in its fastest form; for class statistics, with intermediate features."""
        network = self.merged(t)
        if self.class_statistics is not None:
            network = WithInner(network, self.layers)
        if not self.fast:
            return network
        if self._fusible is None:
            self._fusible = fusible(network)
        return fuse(network, self._fusible)

    def ood_scorer(self) -> Callable[[Tensor], tuple[Tensor, Tensor]] | None:
        """See `Method.ood_scorer`: by the log P of class statistics."""
        if (class_statistics := self.class_statistics) is None:
            return None
        spaces = self.spaces(class_statistics.created_at)

        def scored(x: Tensor) -> tuple[Tensor, Tensor]:
            raw = spaces(x)
            with outside_autocast(x):
                return class_statistics.logits_and_scores(raw)

        return scored

    def describing(self) -> Callable[[Tensor], tuple[Tensor, Tensor, Tensor]] | None:
        """See `Method.describing`: features of all feature spaces, side by side."""
        if (class_statistics := self.class_statistics) is None:
            return None
        spaces, white = self.spaces(class_statistics.created_at), Whitening(class_statistics)

        def describe(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            raw = spaces(x)
            return *class_statistics.logits_and_scores(raw), white(raw)

        return describe

    def threshold(self, rate: float) -> float:
        """See `Method.threshold`: by images of the newest tasks, each left out of the statistics."""
        return (
            super().threshold(rate) if self.class_statistics is None else self.class_statistics.scores().threshold(rate)
        )

    def shares(self, scores: Tensor) -> Tensor:
        """See `Method.shares`: by the same images."""
        return (
            super().shares(scores) if self.class_statistics is None else self.class_statistics.scores().shares(scores)
        )

    def cross_validated(self) -> Predictions | None:
        """See `Method.left_out`: from the calibration of the temperature."""
        return None if self.class_statistics is None else self.class_statistics.cross_validated

    @torch.no_grad()
    def fitted(self) -> Predictions | None:
        """See `Method.fitted`: from the features that the statistics were computed of."""
        if self.class_statistics is None or self._observed is None:
            return None
        raws, labels = self._observed
        logits = self.class_statistics.head()(raws)
        own = torch.zeros(logits.shape[1], dtype=torch.bool, device=labels.device)
        own[self.columns(len(self.class_statistics) - 1)] = True
        return Predictions.of(logits, labels, own.expand_as(logits))

    def retained_accuracy(self, task: int, right: int, images: int) -> float | None:
        """See `Method.retained_accuracy`: by images sampled from the statistics."""
        return None if self.class_statistics is None else retained(self.class_statistics, task, right, images)

    def _chained(self, class_statistics: ClassStatistics, spaces: Spaces, x: Tensor) -> Tensor:
        raw = spaces(x)
        with outside_autocast(x):
            return class_statistics.head()(raw)

    def forward(self, x: Tensor, task: int | None = None) -> Tensor:
        """Return every sub-network's raw logits, or the log P of class statistics; with `task`, those of its classes
        only.
        """
        if self.class_statistics is not None:
            logits = self._chained(self.class_statistics, self.spaces(self.class_statistics.head().created_at), x)
            return logits if task is None else logits[:, self.columns(task)]
        tasks = range(len(self.heads)) if task is None else [task]
        return torch.cat([self.heads[t](self.task_features(x, t)) for t in tasks], dim=1)

    def experts(self) -> Iterable[Expert]:
        """Yield an expert per task; with class statistics a single one, which uses all feature spaces."""
        if self.class_statistics is not None:
            return [
                Expert(
                    "statistics",
                    partial(self._chained, self.class_statistics, self.spaces(self.class_statistics.created_at)),
                )
            ]
        return [self.expert(t, partial(self._asked, t)) for t in range(len(self.heads))]

    def columns(self, task: int) -> slice | Tensor:
        """See `Method.columns`: with class statistics, including the task's known classes."""
        return (
            super().columns(task)
            if self.class_statistics is None
            else self.class_statistics.tensors[f"task.{task}.classes"]
        )

    def forward_passes(self) -> int:
        """See `Method.asked`."""
        return super().forward_passes() if self.class_statistics is None else len(self.class_statistics.created_at)

    def file_of(self, name: str) -> str:
        """See `Method.file_of`."""
        if self.class_statistics is None or not name.startswith("class_statistics."):
            return WEIGHTS
        return RUNNING if name.endswith(ClassStatistics.running) else STATISTICS

    def is_fixed(self, name: str, task: int) -> bool:
        """See `Method.is_fixed`: tensors of isolated sub-networks, and statistics of earlier tasks."""
        own = TASK_TENSOR.fullmatch(name) if vars(type(self)).get("isolated") else None
        own = own or _TASK_STATISTICS.match(name)
        return own is not None and int(own["task"]) < task

    def needed(self, statistics: Mapping[str, Tensor]) -> int | None:
        """See `Method.needed`. Sub-networks never change; those of all spaces exist after the last space's task."""
        created_at = [int(value) for name, value in statistics.items() if name.endswith("/created_at")]
        return max(created_at) + 1 if created_at else None

    def facts(self, task: int) -> dict[str, Any]:
        """Return records of the class statistics, in addition to the parameters."""
        if self.class_statistics is None:
            return {}
        numbers = sum(buffer.numel() for buffer in self.class_statistics.buffers())
        return {
            "spaces": self.class_statistics.created_at,
            "statistics": numbers,
            "temperature": self.class_statistics.temperature,
            "refused": list(self.class_statistics.scores().expected(USUAL_RATE)),
        }
