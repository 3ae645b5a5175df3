"""Base of methods with a frozen sub-network per task: task inference by heads or class statistics."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pearl.data.batches import Task
from pearl.errors import TrainingError
from pearl.methods.base import Answers, Expert, Method, Phase
from pearl.methods.common.chain import ChainStatistics
from pearl.methods.common.classifiers import Chain, Classifier, Heads
from pearl.methods.common.retained import retained
from pearl.methods.common.whitening import Whitening
from pearl.nn.fast.fusing import Part, fuse, fusible
from pearl.nn.growing import CosineHeads
from pearl.nn.inner import WithInner, inner_layers
from pearl.nn.once import once
from pearl.nn.precision import outside_autocast
from pearl.settings.declared import UpcomingTask
from pearl.settings.parts import CLASSIFIERS
from pearl.storage.checkpoint import RUNNING, STATISTICS, WEIGHTS

Spaces = Callable[[Tensor], Sequence[Tensor]]  # maps images to the raw features of every feature space's sub-network

HEADS = Heads()
USUAL_RATE = 0.05  # false-rejection rates at which the expected range is recorded
COSINES = 4.0  # factor of cosines in training with a cosine head


class SubNetworks(Method):
    """A sub-network and a head per task, frozen after the task.

    A subclass trains a sub-network in `learn_own` and returns it in `sub_network`. With `classifier: chain`, class
    statistics in the feature spaces of the first sub-networks replace the heads.
    """

    own_classes = True
    separable = True  # False: sub-networks depend on others, and `sub_network` is not available
    isolated = False  # True: no tensor of a task depends on other tasks, see `lifecycle.forget`; not inherited

    def __init__(self, backbone: nn.Module, classifier: Classifier = HEADS) -> None:
        super().__init__(backbone)
        self.chain: ChainStatistics | None = None
        self._fusible: list[Part] | None = None
        if isinstance(classifier, Chain):
            self.chain = ChainStatistics(classifier)
            self.layers = inner_layers(backbone, classifier.layers)
            if classifier.head == "cosine":
                self.heads = CosineHeads(self.heads.dim, COSINES)
            self.own_classes, self.shown_again = False, True

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
        chain = task.options.get("classifier")
        chain = CLASSIFIERS.build(dict(chain)) if isinstance(chain, Mapping) else chain
        if not isinstance(chain, Chain) or not task.id:
            return True
        spaces = 1 + sum(len(classes) > 1 for classes in task.counts[1:-1])
        return task.classes > 1 and (chain.train != "spaces" or chain.spaces == "all" or spaces < chain.spaces)

    def learn(self, task: Task) -> Iterator[Phase]:
        """Train the task's sub-network if it will be used; then add its class statistics in all feature spaces."""
        if self.trains_on(task):
            if self.chain is not None and self.chain.births:
                self._check(self.chain, task)
            yield from self._learn_anew(task) if task.shows_known_classes else self.learn_own(task)
        else:
            self._untrained_head(task)
        if self.chain is not None:
            self.observe(self.chain, task)

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
        if self.chain is None or task.id == 0:
            return None
        options = self.chain.options
        if not task.train:
            return "as was asked"
        if len(task.shown) < 2:
            return "since a single class gives no gradient"
        if options.train == "spaces" and not self.chain.wants_space():
            return f"since the first {options.spaces} sub-networks serve all tasks (method.classifier.spaces)"
        return None

    def notes(self, task: Task) -> list[str]:
        """Return notes: that nothing is trained, with the reason; for the first task, that a single class trains
        nothing.
        """
        if self.chain is not None and task.id == 0 and len(task.shown) < 2 and not self.backbone.pretrained:
            return [
                "a single class cannot train a network: this one keeps its random weights, and later tasks use its "
                "features; begin with two classes or more, or with a pretrained network"
            ]
        reason = self._untrained(task)
        return [f"learnt by class statistics alone, without training, {reason}"] if reason else []

    @torch.no_grad()
    def _check(self, chain: ChainStatistics, task: Task) -> None:
        """Check before training that statistics fit their sub-networks, with one image."""
        self.eval()
        chain.check(self.spaces(chain.births)(next(task.in_order(1))[0]))

    @torch.no_grad()
    def observe(self, chain: ChainStatistics, task: Task, batch: int = 256) -> None:
        """Compute class statistics of a task's images, not augmented, in every space; first add its own sub-network's
        space.
        """
        self.eval()
        new = [task.id] if chain.wants_space() and self.trains_on(task) else []
        raws = self._raw(self.spaces([*chain.births, *new]), task, batch)
        if not all(bool(raw.isfinite().all()) for raw in raws):
            raise TrainingError(
                f"task {task.id + 1} ({task.name}): a sub-network's features of its images are not finite; earlier "
                f"tasks are stored; lower train.lr, or check the images"
            )
        if new:
            chain.add_space(task.id, raws[-1])
        chain.observe([space(raw) for space, raw in zip(chain.spaces(), raws, strict=True)], task.labels)

    def _raw(self, spaces: Spaces, task: Task, batch: int) -> list[Tensor]:
        parts = [spaces(x) for x, _, _ in task.in_order(batch)]
        return [torch.cat(of_space) for of_space in zip(*parts, strict=True)]

    # --------------------------------------------------------------------------------------------------- answering

    def spaces(self, tasks: Iterable[int]) -> Spaces:
        """Return the sub-networks of some tasks with intermediate features, merged on first use."""
        networks = once(lambda: [self._asked(t) for t in tasks])
        return lambda x: [network(x) for network in networks()]

    def _asked(self, t: int) -> nn.Module:
        """Return task t's sub-network in its fastest form; for class statistics, with intermediate features."""
        network = self.merged(t)
        if self.chain is not None:
            network = WithInner(network, self.layers)
        if not self.fast:
            return network
        if self._fusible is None:
            self._fusible = fusible(network)
        return fuse(network, self._fusible)

    def judging(self) -> Callable[[Tensor], tuple[Tensor, Tensor]] | None:
        """See `Method.judging`: by the log P of class statistics."""
        if (chain := self.chain) is None:
            return None
        spaces = self.spaces(chain.births)
        return lambda x: chain.judge(spaces(x))

    def describing(self) -> Callable[[Tensor], tuple[Tensor, Tensor, Tensor]] | None:
        """See `Method.describing`: features of all feature spaces, side by side."""
        if (chain := self.chain) is None:
            return None
        spaces, white = self.spaces(chain.births), Whitening(chain)

        def describe(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            raw = spaces(x)
            return *chain.judge(raw), white(raw)

        return describe

    def threshold(self, rate: float) -> float:
        """See `Method.threshold`: by images of the newest tasks, each left out of the statistics."""
        return super().threshold(rate) if self.chain is None else self.chain.scores().threshold(rate)

    def shares(self, scores: Tensor) -> Tensor:
        """See `Method.shares`: by the same images."""
        return super().shares(scores) if self.chain is None else self.chain.scores().shares(scores)

    def left_out(self) -> Answers | None:
        """See `Method.left_out`: from the calibration of the temperature."""
        return None if self.chain is None else self.chain.left_out

    def remaining(self, task: int, right: int, images: int) -> float | None:
        """See `Method.remaining`: by images sampled from the statistics."""
        return None if self.chain is None else retained(self.chain, task, right, images)

    def _chained(self, chain: ChainStatistics, spaces: Spaces, x: Tensor) -> Tensor:
        raw = spaces(x)
        with outside_autocast(x):
            return chain.head()(raw)

    def forward(self, x: Tensor, task: int | None = None) -> Tensor:
        """Return every sub-network's raw logits, or the log P of class statistics; with `task`, those of its classes
        only.
        """
        if self.chain is not None:
            logits = self._chained(self.chain, self.spaces(self.chain.head().births), x)
            return logits if task is None else logits[:, self.columns(task)]
        tasks = range(len(self.heads)) if task is None else [task]
        return torch.cat([self.heads[t](self.task_features(x, t)) for t in tasks], dim=1)

    def experts(self) -> Iterable[Expert]:
        """Yield an expert per task; with class statistics a single one, which uses all feature spaces."""
        if self.chain is not None:
            return [Expert("chain", partial(self._chained, self.chain, self.spaces(self.chain.births)))]
        return [self.expert(t, partial(self._asked, t)) for t in range(len(self.heads))]

    def columns(self, task: int) -> slice | Tensor:
        """See `Method.columns`: with class statistics, including the task's known classes."""
        return super().columns(task) if self.chain is None else self.chain.tensors[f"task.{task}.classes"]

    def asked(self) -> int:
        """See `Method.asked`."""
        return super().asked() if self.chain is None else len(self.chain.births)

    def file_of(self, name: str) -> str:
        """See `Method.file_of`."""
        if self.chain is None or not name.startswith("chain."):
            return WEIGHTS
        return RUNNING if name.endswith(ChainStatistics.running) else STATISTICS

    def needed(self, statistics: Mapping[str, Tensor]) -> int | None:
        """See `Method.needed`. Sub-networks never change; those of all spaces exist after the last space's task."""
        births = [int(value) for name, value in statistics.items() if name.endswith("/birth")]
        return max(births) + 1 if births else None

    def facts(self, task: int) -> dict[str, Any]:
        """Return records of the class statistics, in addition to the parameters."""
        if self.chain is None:
            return {}
        numbers = sum(buffer.numel() for buffer in self.chain.buffers())
        return {
            "spaces": self.chain.births,
            "statistics": numbers,
            "temperature": self.chain.temperature,
            "refused": list(self.chain.scores().expected(USUAL_RATE)),
        }
