"""Random integers per image, for use in a loss."""

import torch
from torch import Tensor

from pearl.data.batches import Task, derive_seed


class ImageDraws:
    """Random integers for the images of a task, different in each step.

    If a loss drew them itself, they would differ between processes. These are a function of task, step and image, so
    that several processes train as one does. Create it before the phase that uses it.
    """

    def __init__(self, task: Task) -> None:
        self.count, self.seed = len(task), int(torch.randint(2**62, ()))

    def below(self, high: int, step: int, rows: Tensor) -> Tensor:
        """Return integers (B,) from 0 to high - 1 for the images of these rows (B,) of the task."""
        generator = torch.Generator().manual_seed(derive_seed(self.seed, step, high))
        return torch.randint(high, (self.count,), generator=generator).to(rows.device)[rows]
