"""What methods with a frozen sub-network per task share: how the classes of all tasks are told apart."""

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
from pearl.nn.fast.fusing import Part, fuse, fusible
from pearl.nn.growing import CosineHeads
from pearl.nn.inner import WithInner, inner_layers
from pearl.nn.once import once
from pearl.nn.precision import outside_autocast
from pearl.settings.declared import UpcomingTask
from pearl.settings.parts import CLASSIFIERS
from pearl.storage.checkpoint import RUNNING, STATISTICS, WEIGHTS

Spaces = Callable[[Tensor], Sequence[Tensor]]  # images -> the raw features of every space's sub-network

HEADS = Heads()
USUAL_RATE = 0.05  # of images of known classes that are refused, at which the expected range is noted
COSINES = 4.0  # what cosines are multiplied by while a sub-network is trained with them


class SubNetworks(Method):
    """A sub-network and a head per task, never changed again.

    A subclass trains a task's in `learn_own`, and gives it back in `sub_network`. With `classifier: chain` it is
    class statistics in the first sub-networks that answer, in the place of the heads.
    """

    own_classes = True
    separable = True  # False: a sub-network is none by itself, and `sub_network` not to be asked

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
        """Features (B, dim) of task t's sub-network."""
        raise NotImplementedError

    def sub_network(self, t: int) -> tuple[nn.Module, Mapping[str, Tensor]]:
        """Task t's sub-network: a network, and the tensors, by name, that it has in the place of its own."""
        raise NotImplementedError

    def merged(self, t: int) -> nn.Module:
        """Task t's sub-network as a network of its own: in evaluation mode, nobody else's hooks."""
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
        """Train the task's sub-network, if it will be asked; then note its classes in all spaces."""
        if self.trains_on(task):
            if self.chain is not None and self.chain.births:
                self._check(self.chain, task)
            yield from self._learn_anew(task) if task.shows_known_classes else self.learn_own(task)
        else:
            self._untrained_head(task)
        if self.chain is not None:
            self.observe(self.chain, task)

    def _learn_anew(self, task: Task) -> Iterator[Phase]:
        """Train a sub-network for classes of which some are known, with a head that nobody needs after it."""
        as_new = task.as_new()
        for phase in self.learn_own(as_new):
            phase.data = phase.data or as_new
            yield phase
        del self.heads.blocks[-1]
        self._untrained_head(task)

    def _untrained_head(self, task: Task) -> None:
        self.heads.grow(len(task.classes)).to(self.device).requires_grad_(False)

    def trains_on(self, task: Task) -> bool:
        """Return True if the task gets a sub-network: with the chain, later ones not for one class or after the last
        space.
        """
        return self._untrained(task) is None

    def _untrained(self, task: Task) -> str | None:
        """Why a task gets no sub-network; None if it gets one."""
        if self.chain is None or task.id == 0:
            return None
        options = self.chain.options
        if not task.train:
            return "as was asked"
        if len(task.shown) < 2:
            return "since a single class has nothing to be compared with"
        if options.train == "spaces" and not self.chain.wants_space():
            return f"since the first {options.spaces} sub-networks answer for all tasks (method.classifier.spaces)"
        return None

    def notes(self, task: Task) -> list[str]:
        """Return True if nothing is trained, and why; at first, whether nothing can be learnt of a single class."""
        if self.chain is not None and task.id == 0 and len(task.shown) < 2 and not self.backbone.pretrained:
            return [
                "a single class teaches a network nothing: this one's stays as it was drawn, and tasks to come are "
                "compared in it; begin with two classes or more, or with a network that brings weights"
            ]
        reason = self._untrained(task)
        return [f"learnt by the statistics of its classes alone, without training, {reason}"] if reason else []

    @torch.no_grad()
    def _check(self, chain: ChainStatistics, task: Task) -> None:
        """Before anything is trained, see that statistics fit their sub-networks; one image says it."""
        self.eval()
        chain.check(self.spaces(chain.births)(next(task.in_order(1))[0]))

    @torch.no_grad()
    def observe(self, chain: ChainStatistics, task: Task, batch: int = 256) -> None:
        """One pass of a task's images, not augmented, through every space; its own sub-network first becomes one."""
        self.eval()
        new = [task.id] if chain.wants_space() and self.trains_on(task) else []
        raws = self._raw(self.spaces([*chain.births, *new]), task, batch)
        if not all(bool(raw.isfinite().all()) for raw in raws):
            raise TrainingError(
                f"task {task.id + 1} ({task.name}): a sub-network makes no numbers of its images; tasks before it are "
                f"kept; lower train.lr, or look at the images"
            )
        if new:
            chain.add_space(task.id, raws[-1])
        chain.observe([space(raw) for space, raw in zip(chain.spaces(), raws, strict=True)], task.labels)

    def _raw(self, spaces: Spaces, task: Task, batch: int) -> list[Tensor]:
        parts = [spaces(x) for x, _, _ in task.in_order(batch)]
        return [torch.cat(of_space) for of_space in zip(*parts, strict=True)]

    # --------------------------------------------------------------------------------------------------- answering

    def spaces(self, tasks: Iterable[int]) -> Spaces:
        """The sub-networks of some tasks with their inner layers, merged when they are first asked."""
        networks = once(lambda: [self._asked(t) for t in tasks])
        return lambda x: [network(x) for network in networks()]

    def _asked(self, t: int) -> nn.Module:
        """Task t's sub-network in its fastest form; with the chain, with its inner layers."""
        network = self.merged(t)
        if self.chain is not None:
            network = WithInner(network, self.layers)
        if not self.fast:
            return network
        if self._fusible is None:
            self._fusible = fusible(network)
        return fuse(network, self._fusible)

    def judging(self) -> Callable[[Tensor], tuple[Tensor, Tensor]] | None:
        """See `Method.judging`: by the chain's log P."""
        if (chain := self.chain) is None:
            return None
        spaces = self.spaces(chain.births)
        return lambda x: chain.judge(spaces(x))

    def threshold(self, rate: float) -> float:
        """See `Method.threshold`: by images of the newest tasks, each left out of the statistics."""
        return super().threshold(rate) if self.chain is None else self.chain.scores().threshold(rate)

    def shares(self, scores: Tensor) -> Tensor:
        """See `Method.shares`: among the same images."""
        return super().shares(scores) if self.chain is None else self.chain.scores().shares(scores)

    def left_out(self) -> Answers | None:
        """See `Method.left_out`: while the temperature was measured."""
        return None if self.chain is None else self.chain.left_out

    def remaining(self, task: int, right: int, images: int) -> float | None:
        """See `Method.remaining`: by images drawn from the statistics."""
        return None if self.chain is None else retained(self.chain, task, right, images)

    def _chained(self, chain: ChainStatistics, spaces: Spaces, x: Tensor) -> Tensor:
        raw = spaces(x)
        with outside_autocast(x):
            return chain.head()(raw)

    def forward(self, x: Tensor, task: int | None = None) -> Tensor:
        """Every sub-network's raw logits side by side, or the chain's log P; with `task`, of its classes alone."""
        if self.chain is not None:
            logits = self._chained(self.chain, self.spaces(self.chain.head().births), x)
            return logits if task is None else logits[:, self.columns(task)]
        tasks = range(len(self.heads)) if task is None else [task]
        return torch.cat([self.heads[t](self.task_features(x, t)) for t in tasks], dim=1)

    def experts(self) -> Iterable[Expert]:
        """One per task; with the chain a single one, which asks all spaces."""
        if self.chain is not None:
            return [Expert("chain", partial(self._chained, self.chain, self.spaces(self.chain.births)))]
        return [self.expert(t, partial(self._asked, t)) for t in range(len(self.heads))]

    def columns(self, task: int) -> slice | Tensor:
        """See `Method.columns`: with the chain, also of known classes that the task has shown again."""
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
        """See `Method.needed`. Sub-networks never change: those of all spaces are whole with the last one's task."""
        births = [int(value) for name, value in statistics.items() if name.endswith("/birth")]
        return max(births) + 1 if births else None

    def facts(self, task: int) -> dict[str, Any]:
        """What the chain keeps, beside the parameters."""
        if self.chain is None:
            return {}
        numbers = sum(buffer.numel() for buffer in self.chain.buffers())
        return {
            "spaces": self.chain.births,
            "statistics": numbers,
            "temperature": self.chain.temperature,
            "refused": list(self.chain.scores().expected(USUAL_RATE)),
        }
