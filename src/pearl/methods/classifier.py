"""The classifier of a method over the classes of all tasks, as prediction, calibration and storage see it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from pearl.data.batches import Task
from pearl.methods.common.optimism import TrainedOn

Scored = tuple[Tensor, Tensor]  # logits (B, classes) and in-distribution scores (B,)


@dataclass(frozen=True, eq=False)
class Predictions:
    """Predictions for N images, ready to be counted: arrays (N,).

    `true` are logit indices, `best` the predictions among all classes, `best_own` those among the classes of the
    image's task; `sure` is the probability of `best`, from 0 to 1.
    """

    true: np.ndarray
    best: np.ndarray
    best_own: np.ndarray
    sure: np.ndarray

    @classmethod
    def of(cls, logits: Tensor, true: Tensor, in_task: Tensor) -> "Predictions":
        """Build from logits (N, classes), logit indices (N,), and a mask (N, classes) of the classes of each image's
        task.
        """
        sure, best = logits.double().softmax(1).max(1)
        best_own = logits.masked_fill(~in_task, -torch.inf).argmax(1)
        return cls(*(part.cpu().numpy() for part in (true, best, best_own, sure)))

    @classmethod
    def joined(cls, parts: Sequence["Predictions"]) -> "Predictions":
        """Concatenate the predictions of several batches."""
        return cls(*(np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(cls)))

    def __getitem__(self, rows: np.ndarray) -> "Predictions":
        """Return the predictions for some images."""
        return Predictions(*(getattr(self, f.name)[rows] for f in fields(self)))


class TaskClassifier:
    """A classifier without in-distribution scores: that of every method that does not define its own.

    Predictions themselves come from the method's experts. A classifier adds what depends on its statistics.
    """

    def ood_scorer(self) -> Callable[[Tensor], Scored] | None:
        """Return a function from images (B, 3, H, W) to logits (B, classes) and in-distribution scores (B,).

        None without such scores.
        """
        return None

    def describing(self) -> Callable[[Tensor], tuple[Tensor, Tensor, Tensor]] | None:
        """Return a function from images to what `ood_scorer` returns and features (B, p), or None without scores.

        The features are for grouping unknown images: whitened by the covariance within classes, and of length 1.
        """
        return None

    def threshold(self, rate: float) -> float:
        """Return the in-distribution score below which images are unknown, at a false-rejection rate `rate`."""
        raise NotImplementedError

    def shares(self, scores: Tensor) -> Tensor:
        """Return, for in-distribution scores (B,), the share of images of known classes that score no higher (B,)."""
        raise NotImplementedError

    def expected_rejections(self, rate: float) -> tuple[float, float] | None:
        """Return the range, 0 to 1, of the false-rejection rate in nine of ten cases; None without scores."""
        return None

    def cross_validated(self) -> Predictions | None:
        """Return cross-validated predictions for the images of the last task, each left out of the statistics.

        None if images cannot be left out, or if the method has only been loaded.
        """
        return None

    def trained_on(self) -> TrainedOn | None:
        """Return which of the images of `cross_validated` a sub-network was trained on; None: it was on none."""
        return None

    def fitted(self) -> Predictions | None:
        """Return predictions for some images of the last task, which the method has learnt.

        None if they would need another pass through a network, or if the method has only been loaded.
        """
        return None

    def retained_accuracy(self, task: int, right: int, images: int) -> float | None:
        """Return the share, 0 to 1, of a task's once correct images that are still correct among all classes.

        When the task was learnt, `right` of its `images` were correct. Returns None without an estimate.
        """
        return None

    def learns_at_once(self, task: Task) -> bool:
        """Return True if a task that will be trained can also be learnt at once, without training."""
        return False

    def features_of_images(self) -> dict[str, Tensor]:
        """Return tensors about the images of the task learnt last, to be stored beside the state; empty by default.

        Only `pearl forget` reads them.
        """
        return {}

    def needed(self, statistics: Mapping[str, Tensor]) -> int | None:
        """Return how many tasks' weights, from the first, predictions need; None: all."""
        return None
