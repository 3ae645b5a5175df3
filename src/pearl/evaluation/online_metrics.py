"""Metrics of streams without task boundaries: accuracy over images seen, on test images of the classes seen so far."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Point:
    """One evaluation, after `seen` images: test images, and correct ones, of each of the classes seen by then.

    `regular` evaluations are those at the fixed interval and at the end; others show the curve's beginning.
    """

    seen: int
    total: NDArray[np.int64]  # (classes seen,)
    right: NDArray[np.int64]
    regular: bool = True

    @property
    def accuracy(self) -> float:
        """Return the share of correct test images, in percent; every image counts the same."""
        return 100 * float(self.right.sum() / self.total.sum())

    @property
    def accuracies(self) -> Floats:
        """Return the share of correct test images of each class (classes seen,), in percent."""
        return 100 * self.right / self.total

    def to_json(self) -> dict[str, Any]:
        """Return it as plain values."""
        counts = {"total": self.total.tolist(), "right": self.right.tolist()}
        return {"seen": self.seen, "regular": self.regular, **counts}

    @classmethod
    def from_json(cls, point: Mapping[str, Any]) -> "Point":
        """Read what `to_json` returned."""
        total, right = (np.array(point[name], dtype=np.int64) for name in ("total", "right"))
        return cls(point["seen"], total, right, point["regular"])


def a_auc(points: Sequence[Point]) -> float:
    """Return the area under the accuracy curve, in percent: the mean of the regular evaluations, as published."""
    return float(np.mean([point.accuracy for point in points if point.regular]))


def a_last(points: Sequence[Point]) -> float:
    """Return the accuracy after the whole stream, in percent."""
    return points[-1].accuracy


def class_forgetting(points: Sequence[Point]) -> Floats:
    """Return, per class, its best accuracy at an earlier regular evaluation minus its last one, in percentage points.

    It is NaN for a class that no earlier evaluation found correct. The published F_last is the mean of the others, with
    evaluations at the ends of the stages.
    """
    regular = [point for point in points if point.regular]
    last = 100 * regular[-1].right / regular[-1].total
    best = np.full(len(last), np.nan)
    for point in regular[:-1]:
        known = len(point.total)
        best[:known] = np.fmax(best[:known], 100 * point.right / point.total)
    return np.where(best > 0, best - last, np.nan)


def forgetting(points: Sequence[Point]) -> float:
    """Return the mean of `class_forgetting` over the classes that have one; NaN if none has."""
    per_class = class_forgetting(points)
    return float(np.nanmean(per_class)) if np.isfinite(per_class).any() else float("nan")


def summary(results: Mapping[str, Any]) -> dict[str, float]:
    """Return every metric by name, and the numbers among the facts, of the section `online` of results.json."""
    points = [Point.from_json(point) for point in results["curve"]]
    facts = results["facts"]
    numbers = {name: value for name, value in facts.items() if isinstance(value, int | float)}
    grown = {"sub_networks": len(facts["grown_at"])} if "grown_at" in facts else {}
    return {"a_auc": a_auc(points), "a_last": a_last(points), "forgetting": forgetting(points), **numbers, **grown}


Rule = Literal["reached", "passed", "ahead"]


def evaluation_points(sizes: Sequence[int], every: int, rule: Rule = "reached") -> Iterator[int]:
    """Yield the number of images seen at each regular evaluation of a stream with batches of these sizes.

    `reached`: after the batch that reaches a multiple of `every`, and at the end; pearl's. `passed`: only after a batch
    that passes it (the authors of Si-Blurry). `ahead`: one batch earlier (MISA, FlyPrompt).
    """
    seen, due = 0, every
    for number, size in enumerate(sizes):
        seen += size
        ahead = size if rule == "ahead" else 0
        if seen + ahead > due or (rule == "reached" and (seen == due or number == len(sizes) - 1)):
            yield seen
            due = due + every if rule != "reached" else (seen // every + 1) * every
