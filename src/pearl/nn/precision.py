"""Availability of bfloat16, and computations that need more than autocast's precision."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def computes_bf16(device: str) -> bool:
    """Return True if convolutions have bfloat16 gradients here: on a CPU, if oneDNN supports them."""
    return device != "cpu" or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def full(x: Tensor) -> Tensor:
    """Convert to at least float32, for sums, comparisons and choices; float32 and float64 are unchanged."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def outside_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Return a context without autocast on the device of `x`, so that tensors keep their dtypes.

    It does nothing if autocast is off, since a program traced for an export would contain it.
    """
    device = x.device.type
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


def computing(x: Tensor, *, bf16: bool) -> AbstractContextManager[object]:
    """Return a context for the device of `x` that computes in bfloat16 or float32, whatever context surrounds it."""
    return torch.autocast(x.device.type, torch.bfloat16) if bf16 else outside_autocast(x)
