"""Where autocast's bfloat16 is not enough."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def full(x: Tensor) -> Tensor:
    """At least float32, for sums, comparisons and choices; float32 and float64 stay as they are."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def outside_autocast(x: Tensor) -> AbstractContextManager[object]:
    """A context that computes in the types its tensors have, on the device of `x`.

    None is entered where autocast is off: a program that is traced for an export would hold it.
    """
    device = x.device.type
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()
