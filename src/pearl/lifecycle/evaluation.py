"""What a model says of images whose classes are known: counted, and for people and notebooks."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from pearl.data.cache import read_all
from pearl.data.sources import class_folders, left_out
from pearl.errors import DataError, printable
from pearl.evaluation import metrics
from pearl.lifecycle.saved import TaskInfo
from pearl.methods.base import Answers
from pearl.settings.registry import near
from pearl.storage.sheets import aligned, rows_as_html

if TYPE_CHECKING:
    from pearl.lifecycle.model import Model

UNKNOWN_RATE = 0.05
Data = str | Path | Iterable[str | Path]  # a folder, or several


@dataclass(frozen=True, eq=False, repr=False)
class Evaluation:
    """What a model said of the images of some folders, N in all; what is counted, is counted from this.

    Images are of the model's classes or, with `true` from their number on, of `strangers`: folders of classes that it
    does not know. `familiarity` (N,) is None where the model cannot judge; then there are no strangers. Those whose
    familiarity is below `threshold` are unknown to it. `notes`: what was not looked at. Accuracies are in percent.
    """

    tasks: tuple[TaskInfo, ...]
    strangers: tuple[str, ...]
    files: tuple[Path, ...]
    answers: Answers
    familiarity: np.ndarray | None
    unknown_rate: float
    threshold: float
    notes: tuple[str, ...] = ()

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the rows."""
        return tuple(name for task in self.tasks for name in task.classes)

    @cached_property
    def is_known(self) -> np.ndarray:
        """Which images (N,) are of the model's classes."""
        return self.answers.true < len(self.classes)

    @cached_property
    def known(self) -> Answers:
        """What was said of these."""
        return self.answers[self.is_known]

    # ---------------------------------------------------------------------------------------------------- accuracy

    @cached_property
    def confusion(self) -> np.ndarray:
        """Images of known classes (C, C), true class by predicted class, among all classes."""
        counts = np.zeros((len(self.classes), len(self.classes)), dtype=np.int64)
        np.add.at(counts, (self.known.true, self.known.best), 1)
        return counts

    @property
    def total(self) -> np.ndarray:
        """Images per class (C,)."""
        return self.confusion.sum(1)

    @property
    def class_il(self) -> np.ndarray:
        """Images per class (C,) that are right among all classes."""
        return self.confusion.diagonal()

    @cached_property
    def task_il(self) -> np.ndarray:
        """Images per class (C,) that are right among the classes of their own task."""
        right = self.known.true[self.known.best_own == self.known.true]
        return np.bincount(right, minlength=len(self.classes))

    @property
    def accuracy(self) -> float:
        """Percent of images that are right among all classes (class-IL); every image weighs the same."""
        return percent(self.class_il.sum(), self.total.sum())

    @property
    def task_accuracy(self) -> float:
        """Percent of images that are right among the classes of their own task (task-IL)."""
        return percent(self.task_il.sum(), self.total.sum())

    def mistakes(self, most: int = 10) -> list[tuple[str, str, int]]:
        """The most frequent ones: true class, predicted class, and how often."""
        wrong = self.confusion.copy()
        np.fill_diagonal(wrong, 0)
        order = wrong.ravel().argsort(kind="stable")[::-1][:most].tolist()
        pairs = [divmod(place, len(wrong)) for place in order]
        return [(self.classes[a], self.classes[b], int(wrong[a, b])) for a, b in pairs if wrong[a, b]]

    # ------------------------------------------------------------------------------------------------- how sure it is

    @cached_property
    def reliability(self) -> np.ndarray:
        """See `metrics.reliability`, of images of known classes."""
        return metrics.reliability(self.known.sure, self.known.best == self.known.true)

    @property
    def calibration_error(self) -> float:
        """How far the probability of the best class is from how often it is right, in percent."""
        return metrics.calibration_error(self.reliability)

    @property
    def coverage(self) -> dict[int, float]:
        """Accuracy among the most familiar images alone, by the percentage that is answered; {} if it cannot judge."""
        if self.familiarity is None:
            return {}
        right = self.known.best == self.known.true
        values = metrics.coverage_accuracy(self.familiarity[self.is_known], right)
        return dict(zip(metrics.COVERAGES, values.tolist(), strict=True))

    @property
    def auroc(self) -> float:
        """How well familiarity tells known images from strangers, in percent; NaN where there are none."""
        if self.familiarity is None:
            return math.nan
        return metrics.auroc(self.familiarity[self.is_known], self.familiarity[~self.is_known])

    @property
    def refused(self) -> np.ndarray:
        """Which images (N,) are unknown to it, at its threshold for `unknown_rate`."""
        if self.familiarity is None:
            return np.zeros(len(self.files), dtype=bool)
        return self.familiarity < self.threshold

    # ----------------------------------------------------------------------------------------------------- for people

    def rows(self) -> list[list[str]]:
        """Accuracy of each task and its classes, and of all, as texts; the first row is the head."""
        total, found = self.total, [["", "images", "class-IL", "task-IL"]]

        def row(name: str, part: slice) -> list[str]:
            count = total[part].sum()
            right = [percent(of[part].sum(), count) for of in (self.class_il, self.task_il)]
            return [printable(name), f"{count}", *(f"{value:.2f}%" if count else "-" for value in right)]

        for task in self.tasks:
            part = slice(task.first_class, task.first_class + len(task.classes))
            found.append(row(f"task {task.name}", part))
            found += [
                row(f"  {name}", slice(c, c + 1)) for c, name in enumerate(task.classes, task.first_class) if total[c]
            ]
        return [*found, row("all", slice(None))]

    def __repr__(self) -> str:
        return aligned(self.rows(), numbers=True)

    def _repr_html_(self) -> str:
        return rows_as_html(self.rows())


def percent(part: float, whole: float) -> float:
    """A share; NaN of nothing."""
    return 100 * float(part) / float(whole) if whole else math.nan


def evaluate(
    model: "Model", data: Data, *, unknown_rate: float = UNKNOWN_RATE, aliases: Mapping[str, str] | None = None
) -> Evaluation:
    """See `Model.evaluate`."""
    from pearl.lifecycle.model import BATCH

    names, files, true, notes = _images(model, data, aliases or {})
    threshold = model.threshold(unknown_rate) if model.can_judge else math.nan
    task_of = torch.repeat_interleave(torch.tensor([len(task.classes) for task in model.tasks]))
    answers: list[Answers] = []
    familiarity: list[np.ndarray] = []
    problems: list[str] = []
    for start in range(0, len(files), BATCH):
        good, pixels, wrong = read_all(files[start : start + BATCH], model.config.images.stored)
        problems += wrong
        if problems:
            continue  # all of them are named, no more is computed
        logits, familiar = model.judge(pixels) if model.can_judge else (model.logits(pixels), None)
        here = torch.from_numpy(true[start : start + len(good)])
        own = task_of == task_of[here.clamp(max=len(task_of) - 1)][:, None]
        answers.append(Answers.of(logits, here, own))
        familiarity += [] if familiar is None else [familiar.numpy()]
    if problems:
        raise DataError("\n".join([f"{len(problems)} images cannot be read: remove or replace them", *problems]))
    return Evaluation(
        tuple(model.tasks),
        tuple(names),
        tuple(files),
        Answers.joined(answers),
        np.concatenate(familiarity) if familiarity else None,
        unknown_rate,
        threshold,
        tuple(notes),
    )


def _images(
    model: "Model", data: Data, aliases: Mapping[str, str]
) -> tuple[list[str], list[Path], np.ndarray, list[str]]:
    """Strange classes, files, their labels (N,) (see `Evaluation`), and notes on what is strange or left out."""
    roots = [Path(data)] if isinstance(data, str | Path) else [Path(root) for root in data]
    files: list[Path] = []
    named: list[str] = []
    notes: list[str] = []
    for root in roots:
        folder = root / "test" if (root / "test").is_dir() else root
        names, found, labels = class_folders(folder)
        files += found
        named += [aliases.get(names[label], names[label]) for label in labels]
        notes += left_out(folder)
    strange = sorted({*named} - {*model.classes})
    if strange and {*named} == {*strange}:
        raise DataError(
            f"{', '.join(map(str, roots))}: only classes that the model does not know: "
            f"{_some(strange, model.classes)}; give a folder with known ones, which `pearl inspect` lists"
        )
    if strange:
        what = "scored as unknown" if model.can_judge else "left out, as without class statistics nothing is unknown"
        notes.append(f"classes that the model does not know, {what}: {_some(strange, model.classes)}")
    if not model.can_judge:
        kept = [(file, name) for file, name in zip(files, named, strict=True) if name in model.classes]
        files, named, strange = [file for file, _ in kept], [name for _, name in kept], []
    place = {name: index for index, name in enumerate([*model.classes, *strange])}
    return strange, files, np.array([place[name] for name in named]), notes


def _some(names: Sequence[str], choices: Sequence[str]) -> str:
    """Names in words, the first of them with a hint at what each may have meant."""
    hints = [(name, near(name, choices, 0.65)) for name in names[:5]]
    told = [f"{name!r} ({hint})" if hint else repr(name) for name, hint in hints]
    return ", ".join([*told, *([f"{len(names) - 5} more"] if len(names) > 5 else [])])
