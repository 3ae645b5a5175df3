"""How good a model is once it has learnt a task: estimated from what its manifests say, or measured on images.

Of a task's images that were left out of the statistics they met, or of training, the manifest keeps what was said. Of
old classes, whose images are gone, that is what was known when they were learnt; what is left of it, `Method.remaining`
estimates.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from pearl.data.batches import Task
from pearl.errors import RunError, counted
from pearl.evaluation import sureness
from pearl.evaluation.evaluate import Evaluator, TestSet
from pearl.lifecycle.evaluation import Evaluation, percent
from pearl.methods.base import Answers, Method
from pearl.storage.stored_task import StoredTask

OLD = 10  # tasks, at most, whose state is estimated
Entry = dict[str, Any]  # what a manifest says under "estimate"; see `shapes.Estimate`


@dataclass(frozen=True, repr=False)
class Outcome:
    """How good a model is on the classes of its newest task and on older ones, in percent; None where nobody knows.

    `how`: the task's images were "left out" of the statistics that they met, or "held out" of training, or others were
    "measured". `first`: it is the first task, whose own network learnt from the images that were left out.
    """

    how: str
    images: int
    new: float | None  # class-IL
    new_in_task: float | None  # task-IL
    old_then: float | None  # class-IL, each class when it was learnt
    old_now: float | None
    mistakes: tuple[tuple[str, str, int], ...]  # the most frequent: true class, answer, how often
    sure: float  # mean probability of the answers
    right: float  # how many of them are right
    calibration_error: float
    first: bool = False

    def __repr__(self) -> str:
        parts = {"new": self.new, "old": self.old_then if self.old_now is None else self.old_now}
        told = ", ".join(f"{name} classes {value:.1f} %" for name, value in parts.items() if value is not None)
        kind = "estimated" if self.how == "left out" else "measured"
        return f"Outcome({told}; {kind} on {counted(self.images, 'image')})"


# ------------------------------------------------------------------------------------------- what a manifest keeps


def left_out(method: Method) -> dict[str, Entry]:
    """What to keep of the task that a method has just learnt; nothing of one that cannot leave images out."""
    answers = method.left_out()
    return {} if answers is None else {"estimate": _entry(answers, "left out")}


def held_out(images: Task) -> Callable[[Method], dict[str, Entry]]:
    """The same, by images of the task that were kept out of training."""
    return partial(_held_out, images)


@torch.no_grad()
def _held_out(images: Task, method: Method) -> dict[str, Entry]:
    how: dict[str, Any] = {"device": method.device, "batch_size": 256, "autocast": torch.no_grad}
    test = TestSet(images.images, images.labels)
    (logits,) = Evaluator(images.view, **how).logits(method.eval(), [test])
    own = torch.zeros(logits.shape, dtype=torch.bool, device=method.device)
    own[:, method.columns(images.id)] = True
    return {"estimate": _entry(Answers.of(logits, images.labels.cpu(), own.cpu()), "held out")}


def _entry(answers: Answers, how: str) -> Entry:
    classes, place = np.unique(answers.true, return_inverse=True)
    right = answers.best == answers.true
    wrong, counts = np.unique(np.stack([answers.true[~right], answers.best[~right]]), axis=1, return_counts=True)
    rows = {"total": True, "class_il": right, "task_il": answers.best_own == answers.true}
    return {
        "how": how,
        "classes": classes.tolist(),
        **{
            name: np.bincount(place, np.broadcast_to(row, len(place))).astype(int).tolist()
            for name, row in rows.items()
        },
        "mistakes": [*map(list, zip(*wrong.tolist(), counts.tolist(), strict=True))],
        "reliability": sureness.reliability(answers.sure, right).tolist(),
    }


# ------------------------------------------------------------------------------------------------ what is told of it


def estimated(tasks: Sequence[StoredTask], method: Method) -> Outcome | None:
    """After the newest of these tasks, which a method has learnt; None if its manifest keeps no answers.

    Of very many old tasks, some are asked about.

    Raises:
        RunError: a manifest is damaged.
    """
    names = [name for task in tasks for name in task.classes]
    newest = _read(tasks[-1], len(names))
    if newest is None:
        return None
    some = {round(t) for t in np.linspace(0, len(tasks) - 2, OLD)} if len(tasks) > 1 else set()
    old = [(t, entry) for t in sorted(some) if (entry := _read(tasks[t], len(names)))]
    images = sum(sum(entry["total"]) for _, entry in old)
    right = sum(sum(entry["class_il"]) for _, entry in old)
    shares = [method.remaining(t, sum(entry["class_il"]), sum(entry["total"])) for t, entry in old]
    left = [share and share * sum(entry["class_il"]) for share, (_, entry) in zip(shares, old, strict=True)]
    total = sum(newest["total"])
    mistakes = sorted(newest["mistakes"], key=lambda mistake: -mistake[2])[:3]
    return Outcome(
        newest["how"],
        total,
        percent(sum(newest["class_il"]), total),
        percent(sum(newest["task_il"]), total),
        percent(right, images) if old else None,
        percent(sum(filter(None, left)), images) if old and None not in left else None,
        tuple((names[true], names[said], times) for true, said, times in mistakes),
        *_how_sure(np.array(newest["reliability"])),
        first=len(tasks) == 1 and newest["how"] == "left out",
    )


def measured(evaluation: Evaluation) -> Outcome:
    """On images whose classes are known."""
    classes, newest = evaluation.classes, evaluation.tasks[-1]
    new = np.isin(classes, newest.names)
    total, right, in_task = evaluation.total, evaluation.class_il, evaluation.task_il

    def share(of: np.ndarray, rows: np.ndarray) -> float | None:
        return percent(of[rows].sum(), total[rows].sum()) if total[rows].any() else None

    accuracies = share(right, new), share(in_task, new), None, share(right, ~new)
    return Outcome(
        "measured", int(total.sum()), *accuracies, tuple(evaluation.mistakes(3)), *_how_sure(evaluation.reliability)
    )


def _how_sure(reliability: np.ndarray) -> tuple[float, float, float]:
    images, sure, right = reliability.sum(0)
    return percent(sure, images), percent(right, images), sureness.calibration_error(reliability)


def _read(task: StoredTask, classes: int) -> Entry | None:
    """What a manifest keeps, if it does."""
    entry: Entry | None = task.manifest.get("estimate")
    if entry is None:
        return None
    known = {*entry["classes"]}
    whole = len({len(entry[key]) for key in ("classes", "total", "class_il", "task_il")}) == 1 and all(entry["total"])
    whole &= all(
        part <= of for key in ("class_il", "task_il") for part, of in zip(entry[key], entry["total"], strict=False)
    )
    pairs = [pair for *pair, _ in entry["mistakes"]]
    if not whole or not known or max(known) >= classes or any(a not in known or b >= classes for a, b in pairs):
        raise RunError(f"{task.file}: its estimate is not of the task's classes; restore it from a copy")
    return entry
