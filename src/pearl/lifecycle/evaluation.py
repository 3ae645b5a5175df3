"""Predictions of a model for images of known classes: counts, and output for users and notebooks."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from pearl.data import copies
from pearl.data.decoding import Decoding
from pearl.data.images import unreadable
from pearl.data.inputs import Inputs, check_aliases, given
from pearl.errors import DataError, counted, printable
from pearl.evaluation import sureness
from pearl.lifecycle.saved import learnt_images
from pearl.methods.classifier import Predictions
from pearl.settings.config import ModelConfig
from pearl.settings.registry import near
from pearl.storage.stored_task import StoredTask
from pearl.storage.tabular import aligned, rows_as_html

UNKNOWN_RATE = 0.05
BATCH = 64  # images decoded and predicted at a time
Data = Any  # the inputs of `given`, or a list of folders


class EvaluatedModel(Protocol):
    """The part of a model that `evaluate` uses; `Model` in model.py has it."""

    config: ModelConfig
    tasks: list[StoredTask]

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of all classes, in the order of the logits."""

    @property
    def has_ood_scores(self) -> bool:
        """Return True if the model gives in-distribution scores."""

    def threshold(self, rate: float) -> float:
        """Return the score below which an image is unknown."""

    def logits(self, pixels: np.ndarray) -> Tensor:
        """Return logits (N, classes) of pixels (N, S, S, 3) uint8."""

    def logits_and_scores(self, pixels: np.ndarray) -> tuple[Tensor, Tensor]:
        """Return logits (N, classes) and in-distribution scores (N,)."""


@dataclass(frozen=True, eq=False, repr=False)
class Evaluation:
    """Predictions for N images, with all counts computed from them.

    `files` are the images: paths, or pixels (size, size, 3) uint8 for images in memory. They belong to the model's
    classes or, with `true` from their number on, to `unknown_classes`: classes that the model has not learnt.
    `in_distribution` (N,) are in-distribution scores, None if the model has none; then there are no unknown classes.
    Images with scores below `threshold` are called unknown. `notes` list ignored images. Accuracies are in percent.
    """

    tasks: tuple[StoredTask, ...]
    unknown_classes: tuple[str, ...]
    files: tuple[Path | np.ndarray, ...]
    answers: Predictions
    in_distribution: np.ndarray | None
    unknown_rate: float
    threshold: float
    notes: tuple[str, ...] = ()

    @property
    def classes(self) -> tuple[str, ...]:
        """Return the names of the rows."""
        return tuple(name for task in self.tasks for name in task.classes)

    @cached_property
    def is_known(self) -> np.ndarray:
        """Return a mask (N,) of images of the model's classes."""
        return self.answers.true < len(self.classes)

    @cached_property
    def known(self) -> Predictions:
        """Return the predictions for these."""
        return self.answers[self.is_known]

    # ---------------------------------------------------------------------------------------------------- accuracy

    @cached_property
    def confusion(self) -> np.ndarray:
        """Return counts of images of known classes (C, C), true class by predicted class, among all classes."""
        counts = np.zeros((len(self.classes), len(self.classes)), dtype=np.int64)
        np.add.at(counts, (self.known.true, self.known.best), 1)
        return counts

    @property
    def total(self) -> np.ndarray:
        """Return images per class (C,)."""
        return self.confusion.sum(1)

    @property
    def class_il(self) -> np.ndarray:
        """Return images per class (C,) that are correct among all classes."""
        return self.confusion.diagonal()

    @cached_property
    def task_il(self) -> np.ndarray:
        """Return images per class (C,) that are correct among the classes of their own task."""
        right = self.known.true[self.known.best_own == self.known.true]
        return np.bincount(right, minlength=len(self.classes))

    @property
    def accuracy(self) -> float:
        """Return the percentage of images correct among all classes (class-IL); all images have equal weight."""
        return percent(self.class_il.sum(), self.total.sum())

    @property
    def task_accuracy(self) -> float:
        """Return the percentage of images correct among the classes of their own task (task-IL)."""
        return percent(self.task_il.sum(), self.total.sum())

    def mistakes(self, most: int = 10) -> list[tuple[str, str, int]]:
        """Return the most frequent mistakes: true class, predicted class, and count."""
        wrong = self.confusion.copy()
        np.fill_diagonal(wrong, 0)
        order = wrong.ravel().argsort(kind="stable")[::-1][:most].tolist()
        pairs = [divmod(position, len(wrong)) for position in order]
        return [(self.classes[a], self.classes[b], int(wrong[a, b])) for a, b in pairs if wrong[a, b]]

    # --------------------------------------------------------------------------------------------------- calibration

    @cached_property
    def reliability(self) -> np.ndarray:
        """Return `sureness.reliability` of images of known classes."""
        return sureness.reliability(self.known.sure, self.known.best == self.known.true)

    @property
    def calibration_error(self) -> float:
        """Return the expected calibration error in percent."""
        return sureness.calibration_error(self.reliability)

    @property
    def coverage(self) -> dict[int, float]:
        """Return accuracy on the images with the highest in-distribution scores, by percentage of images; {} without
        scores.
        """
        if self.in_distribution is None:
            return {}
        right = self.known.best == self.known.true
        values = sureness.coverage_accuracy(self.in_distribution[self.is_known], right)
        return dict(zip(sureness.COVERAGES, values.tolist(), strict=True))

    @property
    def auroc(self) -> float:
        """Return the AUROC of in-distribution scores, known against unknown classes, in percent; NaN without either."""
        if self.in_distribution is None:
            return math.nan
        return sureness.auroc(self.in_distribution[self.is_known], self.in_distribution[~self.is_known])

    @property
    def refused(self) -> np.ndarray:
        """Return a mask (N,) of images called unknown, at the threshold for `unknown_rate`."""
        if self.in_distribution is None:
            return np.zeros(len(self.files), dtype=bool)
        return self.in_distribution < self.threshold

    # ------------------------------------------------------------------------------------------------------ for users

    def rows(self) -> list[list[str]]:
        """Return the accuracy of each task and its classes, and of all, as texts; the first row is the header."""
        total, lines = self.total, [["", "images", "class-IL", "task-IL"]]

        def row(name: str, part: slice) -> list[str]:
            count = total[part].sum()
            right = [percent(of[part].sum(), count) for of in (self.class_il, self.task_il)]
            return [printable(name), f"{count}", *(f"{value:.2f}%" if count else "-" for value in right)]

        for task in self.tasks:
            if not task.classes:  # its images count for the task that had their classes first
                continue
            part = slice(task.first_class, task.first_class + len(task.classes))
            lines.append(row(f"task {task.name}", part))
            lines += [
                row(f"  {name}", slice(c, c + 1)) for c, name in enumerate(task.classes, task.first_class) if total[c]
            ]
        return [*lines, row("all", slice(None))]

    def __repr__(self) -> str:
        return aligned(self.rows(), numbers=True)

    def _repr_html_(self) -> str:
        return rows_as_html(self.rows())


def percent(part: float, whole: float) -> float:
    """Return a percentage; NaN for 0 of 0."""
    return 100 * float(part) / float(whole) if whole else math.nan


def evaluate(
    model: EvaluatedModel,
    data: Data,
    *,
    unknown_rate: float = UNKNOWN_RATE,
    aliases: Mapping[str, str] | None = None,
    nested: bool = False,
    some_aliases: bool = False,
) -> Evaluation:
    """See `Model.evaluate`. With `some_aliases`, aliases may refer to folders of the learnt data instead of this."""
    size = model.config.images.stored
    several = isinstance(data, list | tuple) and bool(data) and all(isinstance(one, str | Path) for one in data)
    decoding = Decoding.of(model.config.images)
    reading: dict[str, Any] = {"part": "test", "nested": nested, "decoding": decoding}
    parts = [given(one, size, **reading) for one in (data if several else [data])]
    aliases = aliases or {}
    if not some_aliases:
        check_aliases(aliases, parts)
    parts = [part.renamed(aliases) for part in parts]
    strange, notes = _strange(model, parts)
    index_of = {name: index for index, name in enumerate([*model.classes, *strange])}
    threshold = model.threshold(unknown_rate) if model.has_ood_scores else math.nan
    task_of = torch.repeat_interleave(torch.tensor([len(task.classes) for task in model.tasks]))
    learnt = learnt_images(model.tasks)
    files: list[Path | np.ndarray] = []
    hashes: list[bytes] = []
    answers: list[Predictions] = []
    in_distribution: list[np.ndarray] = []
    problems: list[str] = []
    batches = [(one, start) for one in parts for start in range(0, len(one), BATCH)]
    for part, start in batches:
        pixels, wrong = part.pixels(start, start + BATCH, size)
        problems += wrong
        if problems:
            continue  # all problems are listed, and nothing more is computed
        true = np.array([index_of.get(part.classes[label], -1) for label in part.labels[start : start + len(pixels)]])
        asked = np.flatnonzero(true >= 0)  # the others are skipped
        if not len(asked):
            continue
        pixels, here = pixels[asked], torch.from_numpy(true[asked])
        logits, in_distribution_scores = (
            model.logits_and_scores(pixels) if model.has_ood_scores else (model.logits(pixels), None)
        )
        same_task = task_of == task_of[here.clamp(max=len(task_of) - 1)][:, None]
        answers.append(Predictions.of(logits, here, same_task))
        in_distribution += [] if in_distribution_scores is None else [in_distribution_scores.numpy()]
        files += [part.images[start + row] for row in asked] if isinstance(part.images, tuple) else [*pixels]
        hashes += copies.hashes(pixels)
    if problems:
        raise unreadable(problems, sum(map(len, parts)))
    joined = Predictions.joined(answers)
    stay, copy_notes = _counted(hashes, joined.true, learnt, tuple(index_of), len(model.classes), files)
    return Evaluation(
        tuple(model.tasks),
        tuple(strange),
        tuple(files[i] for i in np.flatnonzero(stay)),
        joined[stay],
        np.concatenate(in_distribution)[stay] if in_distribution else None,
        unknown_rate,
        threshold,
        (*(note for part in parts for note in part.notes), *notes, *copy_notes, *decoding.notes()),
    )


def _counted(
    hashes: Sequence[bytes],
    true: np.ndarray,
    learnt: Mapping[bytes, str],
    names: Sequence[str],
    known: int,
    files: Sequence[Path | np.ndarray],
) -> tuple[np.ndarray, list[str]]:
    """Return a mask (N,) of images to count, and notes on the others: duplicates, and images that the model has learnt.

    If no image of its `known` classes would be left, learnt images count, with a note.
    """

    def where(index: int) -> str:
        file = files[index]
        return f"image {index}" if isinstance(file, np.ndarray) else printable(str(file))

    stay, notes = copies.without_copies(hashes, true, names, {}, where)
    seen = np.array([one in learnt for one in hashes], dtype=bool)
    count = counted(int(seen.sum()), "image")
    if not seen.any():
        return stay, notes
    if not (stay & ~seen)[true < known].any():
        return stay, [*notes, f"{count} that the model was trained on: the accuracy on new images may be lower"]
    return stay & ~seen, [
        *notes,
        f"{count} that the model was trained on, such as {where(int(seen.argmax()))}: left out",
    ]


def _strange(model: EvaluatedModel, parts: Sequence[Inputs]) -> tuple[list[str], list[str]]:
    """Return the unknown classes of the images, if the model can detect them, and notes on them.

    Raises:
        DataError: all classes are unknown.
    """
    named = {name for part in parts for name in part.classes}
    strange = sorted(named - {*model.classes})
    if not strange:
        return [], []
    if len(strange) == len(named):
        raise DataError(
            f"{', '.join(part.source or part.name for part in parts)}: only unknown classes: "
            f"{_some(strange, model.classes)}; give images of known classes, which `pearl inspect` lists"
        )
    what = (
        "scored as unknown"
        if model.has_ood_scores
        else "left out, since without class statistics no image can be called unknown"
    )
    note = f"unknown classes, {what}: {_some(strange, model.classes)}"
    return strange if model.has_ood_scores else [], [note]


def _some(names: Sequence[str], choices: Sequence[str]) -> str:
    """Return names in words, the first ones with a hint at similar known names."""
    hints = [(name, near(name, choices, 0.65)) for name in names[:5]]
    told = [f"{name!r} ({hint})" if hint else repr(name) for name, hint in hints]
    return ", ".join([*told, *([f"{len(names) - 5} more"] if len(names) > 5 else [])])
