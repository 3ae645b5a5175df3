"""Task inference from an image's query: by nearest key, nearest class or nearest centroid.

Only tasks and classes seen so far have keys and centroids.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pearl.methods.common.clusters import kmeans
from pearl.nn.precision import full, outside_autocast
from pearl.nn.task_modules import CosineHeads, TaskTensors


class TaskKeys(CosineHeads):
    """A key per task: maps queries (B, dim) to cosines (B, tasks)."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim, scale=1.0)

    def grow(self, classes: int = 1) -> nn.Linear:
        """Add the key of a new task, drawn from U(-1, 1)."""
        key = super().grow(classes)
        nn.init.uniform_(key.weight, -1, 1)
        return key

    def nearest(self, query: Tensor) -> Tensor:
        """Return the task (B,) of the key with the largest cosine."""
        return self(query).argmax(1)


class TaskCentroids(nn.Module):
    """A few centroids of each task's unit queries; the nearest one by L1 distance determines the task."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors = TaskTensors(buffers=True)  # "t" (k, dim)

    def grow(self, queries: Tensor, count: int) -> None:
        """Add a task's centroids, computed from its images' queries (N, dim)."""
        centroids, _ = kmeans(F.normalize(queries, dim=1), count)
        self.tensors.add(f"{len(self.tensors)}", centroids.to(queries))

    def nearest(self, query: Tensor) -> Tensor:
        """Return the task (B,) of the nearest centroid."""
        with outside_autocast(query):
            query = F.normalize(full(query), dim=1)
            tasks = [self.tensors[f"{t}"] for t in range(len(self.tensors))]
            return torch.stack([torch.cdist(query, centroids, p=1).amin(1) for centroids in tasks], dim=1).argmin(1)


def tasks_of_classes(sizes: Sequence[int], like: Tensor) -> Tensor:
    """Return the task of each class (classes,), from the number of classes per task; on the device of `like`."""
    return torch.tensor([t for t, size in enumerate(sizes) for _ in range(size)], device=like.device)
