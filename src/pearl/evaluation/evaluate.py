"""Logits of all sub-networks: of test sets, counted per class for class-IL and task-IL, and of single images."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pearl.data.augment import View
from pearl.evaluation.metrics import Stage
from pearl.methods.base import Expert, Method

KEPT = 2**30  # bytes of merged sub-networks that are kept between two questions, or two stages


@dataclass(frozen=True)
class TestSet:
    """Test images of one task: raw (n, H, W, 3) uint8, and logit indices (n,) int64."""

    images: Tensor
    labels: Tensor


class Evaluator:
    """Evaluates a method stage by stage and keeps what cannot change any more: the logits of frozen sub-networks.

    Sub-networks are outermost, so that each is made once a stage, or once a run if all of them fit into memory; its
    logits on a test set are computed once a run.
    """

    def __init__(
        self,
        view: View,
        *,
        device: torch.device,
        batch_size: int,
        autocast: Callable[[], AbstractContextManager[object]],
    ) -> None:
        self.view, self.device, self.batch_size, self.autocast = view, device, batch_size, autocast
        self._kept: dict[tuple[str, int], Tensor] = {}
        self._experts: dict[str, Expert] = {}  # frozen ones

    @torch.no_grad()
    def stage(self, method: Method, tests: Sequence[TestSet], shown: Sequence[np.ndarray]) -> Stage:
        """Counts on `tests`, one test set per task seen; `shown` are the logit indices of each task's classes."""
        method.eval()
        logits = self.logits(method, tests)
        return count(logits, [test.labels for test in tests], shown, domains=method.domains)

    def logits(self, method: Method, tests: Sequence[TestSet]) -> list[Tensor]:
        """Logits (n, classes seen) float32 on the CPU, per test set."""
        keep = merged_size(method) <= KEPT
        columns = []
        for expert in method.experts():
            if expert.frozen and keep:
                expert = self._experts.setdefault(expert.key, expert)
            columns.append([self._logits(expert, t, test) for t, test in enumerate(tests)])
        return [torch.cat(of_test, dim=1) for of_test in zip(*columns, strict=True)]

    def _logits(self, expert: Expert, t: int, test: TestSet) -> Tensor:
        if (kept := self._kept.get((expert.key, t))) is not None:
            return kept
        parts = []
        for raw in test.images.split(self.batch_size):
            with self.autocast():
                parts.append(expert.forward(self.view.test(raw.to(self.device))).float())
        logits = torch.cat(parts).cpu()
        if expert.frozen:
            self._kept[expert.key, t] = logits
        return logits


class Ensemble:
    """All sub-networks of a method that has stopped learning, ready for images that come a few at a time.

    To merge a sub-network takes longer than to ask it about one image; it is kept if all of them fit into memory.

    What a frozen sub-network says of a batch stays the same bit by bit as tasks are added; but where the method has a
    form for all tasks at once and the images are few, they differ by rounding (see `Method.at_once`).
    """

    def __init__(self, method: Method) -> None:
        self.method = method.eval()
        self._at_once = method.at_once() if method.fast else None
        self._kept = list(method.experts()) if merged_size(method) <= KEPT else None
        self.judge = method.judging()

    @torch.no_grad()
    def __call__(self, x: Tensor, task: int | None = None) -> Tensor:
        """Logits (B, classes seen) of images (B, 3, H, W); with `task`, those of that task's classes alone."""
        if task is not None:
            own = next((expert for expert in self._kept or self.method.experts() if expert.task == task), None)
            if own is None and self._kept and len(self._kept) == 1:  # one for the classes of all tasks
                return self._kept[0].forward(x)[:, self.method.columns(task)]
            return own.forward(x) if own else self.method(x, task)
        if self._at_once is not None and len(x) <= self._at_once[1]:
            return self._at_once[0](x)
        return torch.cat([expert.forward(x) for expert in self._kept or self.method.experts()], dim=1)


def merged_size(method: Method) -> int:
    """Bytes of all sub-networks of a method, merged."""
    return sum(tensor.nbytes for tensor in method.backbone.parameters()) * method.asked()


def count(
    logits: Sequence[Tensor], labels: Sequence[Tensor], shown: Sequence[np.ndarray], *, domains: bool = False
) -> Stage:
    """Counts from logits (n, classes seen) and labels (n,) of each task's test images.

    `shown` are the logit indices of each task's classes, rising; each class is counted once in every task that shows
    it. Class-IL: the arg-max over all classes. Task-IL: the arg-max over the classes of the image's own task.
    Domain-IL, of methods for `domains`: the place of the class-IL arg-max within its task.
    """
    first, place = (np.zeros(1 + max(own[-1] for own in shown), dtype=np.int64) for _ in range(2))
    for t, own in reversed([*enumerate(shown)]):
        first[own], place[own] = t, np.arange(len(own))  # of a class, in the task that showed it first
    counts: list[np.ndarray] = []
    confusion = np.zeros((len(labels),) * 2, dtype=np.int64)
    for t, (scores, target, own) in enumerate(zip(logits, labels, shown, strict=True)):
        values, truth = scores.numpy(), np.searchsorted(own, target.cpu().numpy())
        best = values.argmax(1)
        among = values[:, own].argmax(1)
        right = (np.full(len(truth), True), best == own[truth], among == truth, place[best] == truth)
        counts.append(np.stack([np.bincount(truth[rows], minlength=len(own)) for rows in right]))
        # a class of several tasks is the image's own task's, if that is one of them
        confusion[t] = np.bincount(np.where(np.isin(best, own), t, first[best]), minlength=len(labels))
    total, class_il, task_il, domain_il = np.concatenate(counts, axis=1).astype(np.int64)
    return Stage(total, class_il, task_il, confusion, domain_il if domains else None)
