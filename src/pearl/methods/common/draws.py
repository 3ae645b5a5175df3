"""Random whole numbers for single images, in a loss."""

import torch
from torch import Tensor

from pearl.data.batches import Task, fold


class ImageDraws:
    """Numbers for the images of a task, new ones at each step.

    A loss that drew them itself would draw others in each of several processes. These are a function of task, step and
    image, so that many processes learn what one does. To be made before the phase that asks it.
    """

    def __init__(self, task: Task) -> None:
        self.count, self.seed = len(task), int(torch.randint(2**62, ()))

    def below(self, high: int, step: int, rows: Tensor) -> Tensor:
        """Numbers (B,) from 0 to high - 1 for the images of these rows (B,) of the task."""
        generator = torch.Generator().manual_seed(fold(self.seed, step, high))
        return torch.randint(high, (self.count,), generator=generator).to(rows.device)[rows]
