"""Class statistics: count, mean and covariance of each class's features, from batches in any order and size."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pearl.nn.task_modules import TaskTensors


class ClassMoments(nn.Module):
    """Count, mean and (if `covariance`) scatter of each class, in float64, as buffers of each task.

    Batches are merged pairwise (Chan, Golub & LeVeque, 1983): there is no sum of squares, so digits do not cancel. A
    task's buffers do not change after it, unless means `move`; a new object reads them from the file.
    """

    def __init__(self, dim: int, *, covariance: bool = False) -> None:
        super().__init__()
        self.dim, self.keeps_scatter = dim, covariance
        self.tensors = TaskTensors(buffers=True)  # "t.count" (k,), "t.mean" (k, dim), "t.scatter" (k, dim, dim)

    def grow(self, classes: int, device: torch.device, dim: int | None = None) -> None:
        """Add buffers for the classes of a new task, whose features may have their own width."""
        dim = dim or self.dim
        shapes = {"count": (classes,), "mean": (classes, dim), "scatter": (classes, dim, dim)}
        t = len(self)
        for name in ("count", "mean", "scatter")[: 3 if self.keeps_scatter else 2]:
            self.tensors.add(f"{t}.{name}", torch.zeros(shapes[name], dtype=torch.float64, device=device))

    def __len__(self) -> int:
        """Return the number of tasks."""
        return len(self.tensors) // (3 if self.keeps_scatter else 2)

    @torch.no_grad()
    def update(self, features: Tensor, labels: Tensor) -> None:
        """Add features (B, dim) of the newest task; labels (B,) are from 0 within the task."""
        t, features = len(self) - 1, features.double()
        count, mean = self.tensors[f"{t}.count"], self.tensors[f"{t}.mean"]
        for c in labels.unique().tolist():
            of_class = features[labels == c]
            total, moved = count[c] + len(of_class), of_class.mean(0) - mean[c]
            if self.keeps_scatter:
                centred = of_class - of_class.mean(0)
                between = torch.outer(moved, moved) * (count[c] * len(of_class) / total)
                self.tensors[f"{t}.scatter"][c] += centred.T @ centred + between
            mean[c] += moved * (len(of_class) / total)
            count[c] = total

    def means(self, task: int | None = None) -> Tensor:
        """Return means (classes, dim) of all tasks in order of arrival, or of one."""
        return torch.cat([self.tensors[f"{t}.mean"] for t in (range(len(self)) if task is None else [task])])

    @torch.no_grad()
    def move(self, ways: Tensor) -> None:
        """Add `ways` (classes, dim) to the means of all tasks."""
        for t in range(len(self)):
            self.tensors[f"{t}.mean"].add_(ways[self.columns(t)])

    def covariances(self, task: int) -> Tensor:
        """Return covariances (k, dim, dim) of a task's classes, divided by count - 1; zero for a class with one
        feature.
        """
        return self.tensors[f"{task}.scatter"] / (self.tensors[f"{task}.count"] - 1).clamp(min=1)[:, None, None]

    def columns(self, task: int) -> slice:
        """Return the columns of a task's classes."""
        sizes = [len(self.tensors[f"{t}.count"]) for t in range(task + 1)]
        return slice(sum(sizes[:-1]), sum(sizes))


def class_covariances(features: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Return covariances (classes, dim, dim), float64, of features (N, dim) with labels (N,) from 0; divided by count -
    1.
    """
    spread = ClassMoments(features.shape[1], covariance=True)
    spread.grow(classes, features.device)
    for some, row_labels in zip(features.split(1024), labels.split(1024), strict=True):
        spread.update(some, row_labels)
    return spread.covariances(0)


def cosines(features: Tensor, means: Tensor) -> Tensor:
    """Return cosines (B, classes) between features (B, dim) and class means (classes, dim)."""
    return (F.normalize(features.to(means)) @ F.normalize(means).T).to(features)
