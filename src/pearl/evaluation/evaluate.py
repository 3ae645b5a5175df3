"""Logits of all sub-networks: for test sets, counted per class for class-IL and task-IL, and for single images."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pearl.data.augment import View
from pearl.evaluation.metrics import Stage
from pearl.methods.base import Expert, Method

KEPT = 2**30  # bytes of merged sub-networks to cache between two predictions or two stages


@dataclass(frozen=True)
class TestSet:
    """Test images of one task: raw (n, H, W, 3) uint8, and logit indices (n,) int64."""

    images: Tensor
    labels: Tensor


class Evaluator:
    """Evaluates a method stage by stage and caches the logits of frozen sub-networks, which cannot change.

    The outer loop is over sub-networks, so that each is merged once per stage, or once per run if all fit into memory;
    its logits on a test set are computed once per run.
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
        self._experts: dict[str, Expert] = {}  # of frozen sub-networks

    @torch.no_grad()
    def stage(self, method: Method, tests: Sequence[TestSet], shown: Sequence[np.ndarray]) -> Stage:
        """Count correct predictions on `tests`, one test set per task seen; `shown` are each task's logit indices."""
        method.eval()
        logits = self.logits(method, tests)
        return count(logits, [test.labels for test in tests], shown, domains=method.domains)

    def logits(self, method: Method, tests: Sequence[TestSet], experts: Iterable[Expert] | None = None) -> list[Tensor]:
        """Return logits (n, classes seen) float32 on the CPU, per test set; with `experts`, those of their classes."""
        keep = merged_size(method) <= KEPT
        columns = []
        for expert in method.experts() if experts is None else experts:
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
    """All sub-networks of a method after training, for a few images at a time.

    Merging a sub-network takes longer than one forward pass of an image, so merged ones are cached if all fit into
    memory. The logits of a frozen sub-network are bit-identical as tasks are added, except that for few images a
    method's single pass for all tasks differs by rounding (see `Method.at_once`).
    """

    def __init__(self, method: Method) -> None:
        self.method = method.eval()
        self._at_once = method.at_once() if method.fast else None
        self._kept = list(method.experts()) if merged_size(method) <= KEPT else None
        self.scorer = method.classifier.ood_scorer()

    @torch.no_grad()
    def __call__(self, x: Tensor, task: int | None = None) -> Tensor:
        """Return logits (B, classes seen) of images (B, 3, H, W); with `task`, only those of that task's classes."""
        if task is not None:
            expert_of_task = next(
                (expert for expert in self._kept or self.method.experts() if expert.task == task), None
            )
            if (
                expert_of_task is None and self._kept and len(self._kept) == 1
            ):  # a single expert for the classes of all tasks
                return self._kept[0].forward(x)[:, self.method.columns(task)]
            return expert_of_task.forward(x) if expert_of_task else self.method(x, task)
        if self._at_once is not None and len(x) <= self._at_once[1]:
            return self._at_once[0](x)
        return torch.cat([expert.forward(x) for expert in self._kept or self.method.experts()], dim=1)


def merged_size(method: Method) -> int:
    """Return the bytes of all sub-networks of a method, merged."""
    return sum(tensor.nbytes for tensor in method.backbone.parameters()) * method.forward_passes()


def count(
    logits: Sequence[Tensor], labels: Sequence[Tensor], shown: Sequence[np.ndarray], *, domains: bool = False
) -> Stage:
    """Count correct predictions from logits (n, classes seen) and labels (n,) of each task's test images.

    `shown` are the logit indices of each task's classes, ascending; a class is counted once in every task that has it.
    Class-IL: the arg-max over all classes. Task-IL: the arg-max over the classes of the image's own task. Domain-IL,
    for methods with `domains`: the position of the class-IL arg-max within its task.
    """
    first, position_in_task = (np.zeros(1 + max(of_task[-1] for of_task in shown), dtype=np.int64) for _ in range(2))
    for t, of_task in reversed([*enumerate(shown)]):
        first[of_task], position_in_task[of_task] = t, np.arange(len(of_task))  # of a class: the task that had it first
    counts: list[np.ndarray] = []
    confusion = np.zeros((len(labels),) * 2, dtype=np.int64)
    for t, (scores, target, of_task) in enumerate(zip(logits, labels, shown, strict=True)):
        values, truth = scores.numpy(), np.searchsorted(of_task, target.cpu().numpy())
        best = values.argmax(1)
        among = values[:, of_task].argmax(1)
        right = (np.full(len(truth), True), best == of_task[truth], among == truth, position_in_task[best] == truth)
        counts.append(np.stack([np.bincount(truth[rows], minlength=len(of_task)) for rows in right]))
        # a class of several tasks belongs to the image's own task if that is one of them
        confusion[t] = np.bincount(np.where(np.isin(best, of_task), t, first[best]), minlength=len(labels))
    total, class_il, task_il, domain_il = np.concatenate(counts, axis=1).astype(np.int64)
    return Stage(total, class_il, task_il, confusion, domain_il if domains else None)
