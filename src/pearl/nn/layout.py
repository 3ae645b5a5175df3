"""Placement of tensors: the device, and the memory format of convolutions."""

from typing import TypeVar

import torch
from torch import nn

M = TypeVar("M", bound=nn.Module)


def placed(module: M, device: torch.device | str, *, channels_last: bool) -> M:
    """Move a module to a device, with its convolutions in channels_last or contiguous format.

    `Module.to(memory_format=...)` raises if the module has five-dimensional tensors.
    """
    layout = torch.channels_last if channels_last else torch.contiguous_format
    module.to(device=device)
    return module._apply(lambda tensor: tensor.contiguous(memory_format=layout) if tensor.ndim == 4 else tensor)
