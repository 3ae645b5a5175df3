"""Rotation as an auxiliary task: an image rotated by 0, 90, 180 and 270 degrees is four images of four classes."""

import torch
from torch import Tensor

TURNS = 4


def turned(x: Tensor) -> Tensor:
    """Map square images (B, C, S, S) to (4 B, C, S, S): all unchanged, then all rotated by 90 degrees, and so on."""
    last = x.is_contiguous(memory_format=torch.channels_last)
    x = torch.cat([x.rot90(turn, (2, 3)) for turn in range(TURNS)])
    return x.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)


def turned_labels(y: Tensor, classes: int) -> Tensor:
    """Map labels (B,) below `classes` to those (4 B,) of `turned` images: y rotated k times is k * classes + y."""
    return torch.cat([y + turn * classes for turn in range(TURNS)])
