"""Accuracy of a model after a task: estimated from its manifests, or measured on images.

The manifest of a task stores predictions for its images, cross-validated or held out of training. For old classes,
whose images are gone, they date from the time of learning; `TaskClassifier.retained_accuracy` estimates it.
"""

from collections.abc import Callable, Mapping, Sequence
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
from pearl.methods.base import Method
from pearl.methods.classifier import Predictions
from pearl.methods.common.optimism import TrainedOn
from pearl.storage.stored_task import StoredTask

OLD = 10  # maximum number of old tasks to estimate
Entry = dict[str, Any]  # key of manifests; see `shapes.Estimate`


@dataclass(frozen=True, repr=False)
class Outcome:
    """Accuracy on the classes of the newest task and on older ones, in percent; None if unknown.

    `how`: the task's images were "left out" of the statistics (cross-validation) or "held out" of training, or others
    were "measured". `spared`: of the left-out images, those that were spared from the training of their network, by
    which the accuracy on the others is corrected (see `methods.common.optimism`); None if it was trained on none.
    """

    how: str
    images: int
    new: float | None  # class-IL
    new_in_task: float | None  # task-IL
    old_then: float | None  # class-IL, each class at the time of learning
    old_now: float | None
    mistakes: tuple[tuple[str, str, int], ...]  # the most frequent mistakes: true class, prediction, count
    sure: float  # mean probability of the predictions
    right: float  # percentage of them that are correct
    calibration_error: float
    spared: int | None = None

    def __repr__(self) -> str:
        parts = {"new": self.new, "old": self.old_then if self.old_now is None else self.old_now}
        told = ", ".join(f"{name} classes {value:.1f} %" for name, value in parts.items() if value is not None)
        kind = "estimated" if self.how == "left out" else "measured"
        return f"Outcome({told}; {kind} on {counted(self.images, 'image')})"


# ----------------------------------------------------------------------------------------- records in a manifest


def cross_validated(method: Method) -> dict[str, Entry]:
    """Return the record of the last task, cross-validated; empty for a method without cross-validated predictions."""
    return left_out(method.classifier.cross_validated(), method.classifier.trained_on())


def left_out(answers: Predictions | None, trained_on: TrainedOn | None) -> dict[str, Entry]:
    """Return the record of cross-validated predictions, for images of which some were trained on; empty without any."""
    if answers is None:
        return {}
    entry = _entry(answers, "left out")
    if trained_on is not None:
        rows = {"class_il": answers.best == answers.true, "task_il": answers.best_own == answers.true}
        shares = {name: round(trained_on.expected(right), 4) for name, right in rows.items()}
        shares["task_il"] = max(shares.values())  # an image that is right among all classes is so among fewer
        entry["expected"] = {**shares, "spared": trained_on.spared}
    return {"estimate": entry}


def held_out(images: Task) -> Callable[[Method], dict[str, Entry]]:
    """Return the same from images of the task that were held out of training."""
    return partial(_held_out, images)


@torch.no_grad()
def _held_out(images: Task, method: Method) -> dict[str, Entry]:
    settings: dict[str, Any] = {"device": method.device, "batch_size": 256, "autocast": torch.no_grad}
    test = TestSet(images.images, images.labels)
    (logits,) = Evaluator(images.view, **settings).logits(method.eval(), [test])
    of_task = torch.zeros(logits.shape, dtype=torch.bool, device=method.device)
    of_task[:, method.columns(images.id)] = True
    return {"estimate": _entry(Predictions.of(logits, images.labels.cpu(), of_task.cpu()), "held out")}


def _entry(answers: Predictions, source: str) -> Entry:
    classes, class_index = np.unique(answers.true, return_inverse=True)
    right = answers.best == answers.true
    wrong, counts = np.unique(np.stack([answers.true[~right], answers.best[~right]]), axis=1, return_counts=True)
    rows = {"total": True, "class_il": right, "task_il": answers.best_own == answers.true}
    return {
        "how": source,
        "classes": classes.tolist(),
        **{
            name: np.bincount(class_index, np.broadcast_to(row, len(class_index))).astype(int).tolist()
            for name, row in rows.items()
        },
        "mistakes": [*map(list, zip(*wrong.tolist(), counts.tolist(), strict=True))],
        "reliability": sureness.reliability(answers.sure, right).tolist(),
    }


# --------------------------------------------------------------------------------------------------- the outcome


def estimated(tasks: Sequence[StoredTask], method: Method) -> Outcome | None:
    """Return the outcome after the newest of these tasks; None if its manifest has no record.

    With very many old tasks, a sample is estimated.

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
    rights = [_right(entry, "class_il") for _, entry in old]
    shares = [
        method.classifier.retained_accuracy(t, round(right), sum(entry["total"]))
        for right, (t, entry) in zip(rights, old, strict=True)
    ]
    left = [share and share * right for share, right in zip(shares, rights, strict=True)]
    total, expected = sum(newest["total"]), newest.get("expected")
    mistakes = sorted(newest["mistakes"], key=lambda mistake: -mistake[2])[:3]
    return Outcome(
        newest["how"],
        total,
        percent(_right(newest, "class_il"), total),
        percent(_right(newest, "task_il"), total),
        percent(sum(rights), images) if old else None,
        percent(sum(filter(None, left)), images) if old and None not in left else None,
        tuple((names[true], names[said], times) for true, said, times in mistakes),
        *_how_sure(_expected_reliability(newest)),
        spared=expected and expected["spared"],
    )


def measured(evaluation: Evaluation) -> Outcome:
    """Return the outcome on images of known classes."""
    classes, newest = evaluation.classes, evaluation.tasks[-1]
    new = np.isin(classes, newest.names)
    total, right, in_task = evaluation.total, evaluation.class_il, evaluation.task_il

    def share(of: np.ndarray, rows: np.ndarray) -> float | None:
        return percent(of[rows].sum(), total[rows].sum()) if total[rows].any() else None

    accuracies = share(right, new), share(in_task, new), None, share(right, ~new)
    return Outcome(
        "measured", int(total.sum()), *accuracies, tuple(evaluation.mistakes(3)), *_how_sure(evaluation.reliability)
    )


def accuracy_of(entry: Mapping[str, Any] | None) -> float | None:
    """Return the class-IL accuracy of a manifest's record in percent; None without a record."""
    return percent(_right(entry, "class_il"), sum(entry["total"])) if entry else None


def _right(entry: Mapping[str, Any], kind: str) -> float:
    """Return how many of as many unseen images are expected to be classified correctly."""
    expected = entry.get("expected")
    return float(expected[kind] * sum(entry["total"]) if expected else sum(entry[kind]))


def _expected_reliability(entry: Mapping[str, Any]) -> np.ndarray:
    """Return a reliability diagram for unseen images: networks are about as sure of these, but right less often."""
    diagram = np.array(entry["reliability"], dtype=float)
    if right := sum(entry["class_il"]):
        diagram[:, 2] *= _right(entry, "class_il") / right
    return diagram


def _how_sure(reliability: np.ndarray) -> tuple[float, float, float]:
    images, sure, right = reliability.sum(0)
    return percent(sure, images), percent(right, images), sureness.calibration_error(reliability)


def _read(task: StoredTask, classes: int) -> Entry | None:
    """Return a manifest's record, if any."""
    entry: Entry | None = task.manifest.get("estimate")
    if entry is None:
        return None
    known = {*entry["classes"]}
    whole = len({len(entry[key]) for key in ("classes", "total", "class_il", "task_il")}) == 1 and all(entry["total"])
    whole &= all(
        part <= of for key in ("class_il", "task_il") for part, of in zip(entry[key], entry["total"], strict=False)
    )
    whole &= all(0 <= share <= 1 for key, share in (entry.get("expected") or {}).items() if key != "spared")
    pairs = [pair for *pair, _ in entry["mistakes"]]
    if not whole or not known or max(known) >= classes or any(a not in known or b >= classes for a, b in pairs):
        raise RunError(f"{task.file}: its estimate does not match the task's classes; restore it from a copy")
    return entry
