"""Rotation as an auxiliary task: an image rotated by 0, 90, 180 and 270 degrees is four images of four classes."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pearl.data.batches import Batch, Task

TURNS = 4


def turned(x: Tensor) -> Tensor:
    """Map square images (B, C, S, S) to (4 B, C, S, S): all unchanged, then all rotated by 90 degrees, and so on."""
    last = x.is_contiguous(memory_format=torch.channels_last)
    x = torch.cat([x.rot90(turn, (2, 3)) for turn in range(TURNS)])
    return x.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)


def turned_labels(y: Tensor, classes: int) -> Tensor:
    """Map labels (B,) below `classes` to those (4 B,) of `turned` images: y rotated k times is k * classes + y."""
    return torch.cat([y + turn * classes for turn in range(TURNS)])


def turned_loss(
    features: Callable[[Tensor], Tensor], head: nn.Module, others: nn.Module, task: Task
) -> Callable[[Batch], Tensor]:
    """Return the loss of a sub-network whose rotated images are classes of their own: `others` has their logits."""

    def loss(batch: Batch) -> Tensor:
        turned_features = features(turned(batch.x))
        logits = torch.cat([head(turned_features), others(turned_features)], dim=1)
        return F.cross_entropy(logits, turned_labels(batch.y - task.first_class, logits.shape[1] // TURNS))

    return loss
