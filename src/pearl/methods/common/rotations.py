"""Rotations as a task of their own: an image turned by 0, 90, 180 and 270 degrees is four, and a class four classes."""

import torch
from torch import Tensor

TURNS = 4


def turned(x: Tensor) -> Tensor:
    """Square images (B, C, S, S) -> (4 B, C, S, S): all as they are, then all turned by 90 degrees, and so on."""
    last = x.is_contiguous(memory_format=torch.channels_last)
    x = torch.cat([x.rot90(turn, (2, 3)) for turn in range(TURNS)])
    return x.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)


def turned_labels(y: Tensor, classes: int) -> Tensor:
    """Labels (B,) below `classes` -> (4 B,) of `turned` images: class y turned k times is class k * classes + y."""
    return torch.cat([y + turn * classes for turn in range(TURNS)])
