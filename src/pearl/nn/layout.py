"""Where tensors lie: the device, and the order of a convolution's channels."""

from typing import TypeVar

import torch
from torch import nn

M = TypeVar("M", bound=nn.Module)


def placed(module: M, device: torch.device | str, *, channels_last: bool) -> M:
    """A module on a device, the weights of its convolutions in channels_last or in order.

    `Module.to(memory_format=...)` refuses a module that holds tensors of five dimensions.
    """
    layout = torch.channels_last if channels_last else torch.contiguous_format
    module.to(device=device)
    return module._apply(lambda tensor: tensor.contiguous(memory_format=layout) if tensor.ndim == 4 else tensor)
