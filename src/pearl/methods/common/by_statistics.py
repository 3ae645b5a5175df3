"""Class statistics as a classifier over all tasks; the statistics themselves are in `class_statistics`."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from pearl.data.batches import Batch, Task, derive_seed
from pearl.errors import TrainingError
from pearl.methods.base import Expert, has_frozen_features
from pearl.methods.classifier import Predictions
from pearl.methods.common.class_statistics import ClassStatistics
from pearl.methods.common.optimism import TrainedOn
from pearl.methods.common.retained import retained
from pearl.methods.common.scatter import drawn
from pearl.methods.common.statistics_options import StatisticsOptions
from pearl.methods.common.subnetworks import ClassifierOptions, Spaces, SubNetworkClassifier, SubNetworks
from pearl.methods.common.whitening import Whitening
from pearl.nn.intermediate_features import WithInner, inner_layers
from pearl.nn.precision import computing, outside_autocast
from pearl.nn.task_modules import CosineHeads
from pearl.settings.declared import UpcomingTask
from pearl.storage.checkpoint import RUNNING, STATISTICS, WEIGHTS

FITTED = 64  # images of a task whose features are kept until the next one, see `fitted`
USUAL_RATE = 0.05  # the false-rejection rate whose expected range is recorded
COSINES = 4.0  # factor of cosines in training with a cosine head


@dataclass(frozen=True, kw_only=True)
class Statistics(StatisticsOptions, ClassifierOptions):
    """Class statistics in the feature spaces of the first sub-networks; see `common.class_statistics`.

    Options:
        spaces: number of sub-networks, from the first; `all` uses every task's. Each costs a forward pass per image.
        layers: `auto` also uses intermediate features (see `nn.intermediate_features.inner_layers`), `final` only the
            final ones.
        projection: maximum dimensions of a feature space; wider features get a random projection, with null none.
        covariance: `updated` - of all images so far, so that scores of old classes change with new tasks; `frozen` - of
            the first two tasks, in a later space of the task that created it: scores of a class then never change.
        views: augmented views of each image, by `images.augment` and `flip`, in addition to the test view, in means and
            covariances; predictions still take one view. Each costs a pass per image and space while a task is learnt.
        train: `spaces` trains a sub-network only for tasks that add a feature space, since others are never used; `all`
            trains one for every task, as the method without this classifier does.
        head: the head a sub-network is trained with, unused afterwards: `linear`, as without this classifier; `cosine`,
            whose logits are 4 times the cosine between features and a class's weight.
        keep_features: stores the raw features of every image, about 5 kB per image and space, so that `pearl forget`
            can remove a task exactly. They are removed with their task or class.
        precision: of the features, for statistics and predictions alike: `float32` gives the same predictions on every
            machine; `bfloat16` is faster on some CPUs and slower on others (docs/performance.md).
    """

    def prepare(self, method: SubNetworks) -> None:
        """See `ClassifierOptions.prepare`. Classes may come again, and are compared with those of other tasks."""
        method.class_statistics = ClassStatistics(self)
        method.layers = inner_layers(method.backbone, self.layers)
        if self.head == "cosine":
            method.heads = CosineHeads(method.heads.dim, COSINES)
        method.task_local_loss, method.allows_repeated_classes = False, True

    def of(self, method: SubNetworks) -> SubNetworkClassifier:
        """See `ClassifierOptions.of`."""
        return StatisticsClassifier(method)

    def trains_on(self, task: UpcomingTask) -> bool:
        """See `ClassifierOptions.trains_on` and `StatisticsClassifier.untrained`."""
        if not task.id:
            return True
        spaces = 1 + sum(len(classes) > 1 for classes in task.counts[1:-1])
        return task.classes > 1 and (self.train != "spaces" or self.spaces == "all" or spaces < self.spaces)


class StatisticsClassifier(SubNetworkClassifier):
    """The log P of class statistics in the feature spaces of a method's first sub-networks."""

    @property
    def statistics(self) -> ClassStatistics:
        """Return the statistics, a module of the method."""
        return cast(ClassStatistics, self.method.class_statistics)

    @property
    def bf16(self) -> bool:  # type: ignore[override]
        """Return True if features are computed in bfloat16."""
        return self.statistics.options.precision == "bfloat16"

    # --------------------------------------------------------------------------------------------------- learning

    def untrained(self, task: Task) -> str | None:
        """See `SubNetworkClassifier.untrained`: tasks after the first need several classes, and a use for their
        sub-network.
        """
        if not task.train:
            return "as requested"
        if task.id == 0:
            return None
        options = self.statistics.options
        if len(task.shown) < 2:
            return "since a single class gives no gradient"
        if options.train == "spaces" and not self.statistics.wants_space():
            return f"since the first {options.spaces} sub-networks serve all tasks (method.classifier.spaces)"
        return None

    def learns_at_once(self, task: Task) -> bool:
        """See `TaskClassifier.learns_at_once`: in the frozen features that exist."""
        return self.untrained(task) is None and has_frozen_features(self.method, task.id)

    def notes(self, task: Task) -> list[str]:
        """Return notes: that nothing is trained, with the reason."""
        if task.id == 0 and len(task.shown) < 2 and not self.method.backbone.pretrained:
            return [
                "a single class cannot train a network: this one keeps its random weights, and later tasks use its "
                "features; begin with two classes or more, or with a pretrained network"
            ]
        reason = self.untrained(task)
        return [f"learnt by class statistics alone, without training, {reason}"] if reason else []

    @torch.no_grad()
    def check(self, task: Task) -> None:
        """Check with one image that the statistics fit their sub-networks."""
        if self.statistics.created_at:
            self.method.eval()
            self.statistics.check(self._spaces()(next(task.in_order(1))[0]))

    @torch.no_grad()
    def fit(self, task: Task, batch: int = 32) -> None:
        """Compute class statistics of a task's images in every space; first add its own sub-network's space.

        The first task needs a space even if its sub-network is not trained.

        Raises:
            TrainingError: features are not finite.
        """
        statistics = self.statistics
        self.method.eval()
        new = [task.id] if statistics.wants_space() and (task.id == 0 or self.untrained(task) is None) else []
        spaces = self.method.spaces([*statistics.created_at, *new])
        of_views = [self._raw(spaces, epoch) for epoch in self._epochs(task, batch)]
        raws = [torch.stack(of_space, dim=1) for of_space in zip(*of_views, strict=True)]
        if not all(bool(raw.isfinite().all()) for raw in raws):
            raise TrainingError(
                f"task {task.id + 1} ({task.name}): a sub-network's features of its images are not finite; earlier "
                f"tasks are stored; lower train.lr, or check the images"
            )
        trained = bool(new) and self.untrained(task) is None
        spared = task.spared if trained else None
        statistics.observe_raw(raws, task.labels, adds_space=bool(new), spared=spared)
        statistics.kept = (raws, task.labels, spared) if statistics.options.keep_features else None
        some = drawn(torch.arange(len(task), device=task.labels.device), FITTED)
        statistics.observed = [raw[some, 0] for raw in raws], task.labels[some]

    def _epochs(self, task: Task, batch: int) -> Iterator[Iterator[Batch]]:
        """Yield the images in the test view, then in augmented ones, which do not depend on the run's seed.

        Policies and brightness change images more than new ones differ, so they are left out.
        """
        yield task.in_order(batch)
        if task.view.images.augment != "none":
            moved = task.viewed(task.view.with_changes({"policy": "none", "brightness": 0.0}))
            for view in range(self.statistics.options.views):
                yield moved.batches(batch, derive_seed("statistics", task.seed_part, view))

    def _raw(self, spaces: Spaces, epoch: Iterable[Batch]) -> list[Tensor]:
        """Return the raw features (N, p_raw) of an epoch's images in every space, in the task's order."""
        parts = [(spaces(x), rows) for x, _, rows in epoch]
        order = torch.cat([rows for _, rows in parts]).argsort()
        return [torch.cat(of_space)[order] for of_space in zip(*(raw for raw, _ in parts), strict=True)]

    # ------------------------------------------------------------------------------------------------- predictions

    def computing(self, x: Tensor) -> AbstractContextManager[object]:
        """See `SubNetworkClassifier.computing`: the same precision for statistics, evaluation and predictions."""
        return computing(x, bf16=self.bf16)

    def network(self, network: nn.Module) -> nn.Module:
        """Return a sub-network with its intermediate features."""
        return WithInner(network, self.method.layers)

    def forward(self, x: Tensor, task: int | None = None) -> Tensor:
        """Return the log P of all classes; with `task`, of its classes only."""
        logits = self._log_p(self.method.spaces(self.statistics.head().created_at), x)
        return logits if task is None else logits[:, self.columns(task)]

    def experts(self) -> Iterable[Expert]:
        """Return a single expert, which uses all feature spaces."""
        return [Expert("statistics", partial(self._log_p, self._spaces()))]

    def columns(self, task: int) -> slice | Tensor:
        """See `Method.columns`: with the task's known classes."""
        return self.statistics.tensors[f"task.{task}.classes"]

    def sub_networks(self) -> Sequence[int]:
        """Return the tasks whose sub-networks are feature spaces."""
        return self.statistics.created_at

    def logits(self, outputs: Sequence[Tensor]) -> Tensor:
        """See `SubNetworkClassifier.logits`; outputs are raw features of the spaces."""
        with outside_autocast(outputs[0]):
            return self.statistics.head()(outputs)

    def _spaces(self) -> Spaces:
        return self.method.spaces(self.statistics.created_at)

    def _log_p(self, spaces: Spaces, x: Tensor) -> Tensor:
        return self.logits(spaces(x))

    # -------------------------------------------------------------------------- unknown images, estimates, storage

    def ood_scorer(self) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        """See `TaskClassifier.ood_scorer`."""
        spaces = self._spaces()

        def scored(x: Tensor) -> tuple[Tensor, Tensor]:
            raw = spaces(x)
            with outside_autocast(x):
                return self.statistics.logits_and_scores(raw)

        return scored

    def describing(self) -> Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]:
        """See `TaskClassifier.describing`: concatenated features of all feature spaces."""
        spaces, white = self._spaces(), Whitening(self.statistics)

        def describe(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            raw = spaces(x)
            return *self.statistics.logits_and_scores(raw), white(raw)

        return describe

    def threshold(self, rate: float) -> float:
        """See `TaskClassifier.threshold`: by images of the newest tasks, each left out of the statistics."""
        return self.statistics.scores().threshold(rate)

    def shares(self, scores: Tensor) -> Tensor:
        """See `TaskClassifier.shares`: by the same images."""
        return self.statistics.scores().shares(scores)

    def expected_rejections(self, rate: float) -> tuple[float, float]:
        """See `TaskClassifier.expected_rejections`."""
        return self.statistics.scores().expected(rate)

    def cross_validated(self) -> Predictions | None:
        """See `TaskClassifier.cross_validated`: from the calibration of the temperature."""
        return self.statistics.cross_validated

    def trained_on(self) -> TrainedOn | None:
        """See `TaskClassifier.trained_on`."""
        return self.statistics.trained_on

    @torch.no_grad()
    def fitted(self) -> Predictions | None:
        """See `TaskClassifier.fitted`: from the features that the statistics were computed of."""
        if self.statistics.observed is None:
            return None
        raws, labels = self.statistics.observed
        logits = self.logits(raws)
        in_task = torch.zeros(logits.shape[1], dtype=torch.bool, device=labels.device)
        in_task[self.columns(len(self.statistics) - 1)] = True
        return Predictions.of(logits, labels, in_task.expand_as(logits))

    def retained_accuracy(self, task: int, right: int, images: int) -> float:
        """See `TaskClassifier.retained_accuracy`: by images sampled from the statistics."""
        return retained(self.statistics, task, right, images)

    def features_of_images(self) -> dict[str, Tensor]:
        """Return raw features (N, views, p_raw) in every space, "raw.0", "raw.1" ..., and logit indices, "labels" (N,).

        After a task with a space of its own also "spared" (N,): True for images its sub-network was not trained on.
        """
        return {} if self.statistics.kept is None else named_features(*self.statistics.kept)

    def needed(self, statistics: Mapping[str, Tensor]) -> int | None:
        """See `TaskClassifier.needed`. All spaces exist after the last space's task, and never change."""
        created_at = [int(value) for name, value in statistics.items() if name.endswith("/created_at")]
        return max(created_at) + 1 if created_at else None

    def file_of(self, name: str) -> str:
        """See `Method.file_of`."""
        return file_of(name)

    def facts(self, task: int) -> dict[str, Any]:
        """Return records of the class statistics, in addition to the parameters."""
        return facts_of(self.statistics)


def file_of(name: str) -> str:
    """Return the file of a tensor of a method with class statistics; see `Method.file_of`."""
    if not name.startswith("class_statistics."):
        return WEIGHTS
    return RUNNING if name.endswith(ClassStatistics.running) else STATISTICS


def named_features(raws: Sequence[Tensor], labels: Tensor, spared: Tensor | None) -> dict[str, Tensor]:
    """Return tensors as `StatisticsClassifier.features_of_images` names them."""
    known = {} if spared is None else {"spared": spared}
    return {"labels": labels, **known, **{f"raw.{v}": raw for v, raw in enumerate(raws)}}


def facts_of(statistics: ClassStatistics) -> dict[str, Any]:
    """Return the records of class statistics in a task's manifest."""
    return {
        "spaces": statistics.created_at,
        "statistics": sum(buffer.numel() for buffer in statistics.buffers()),
        "temperature": statistics.temperature,
        "refused": list(statistics.scores().expected(USUAL_RATE)),
    }
