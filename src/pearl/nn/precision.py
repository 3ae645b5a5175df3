"""Where there is bfloat16, and where autocast's is not enough."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def computes_bf16(device: str) -> bool:
    """Return True if convolutions have gradients in bfloat16 here: on a CPU, if oneDNN computes in it."""
    return device != "cpu" or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def full(x: Tensor) -> Tensor:
    """At least float32, for sums, comparisons and choices; float32 and float64 stay as they are."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def outside_autocast(x: Tensor) -> AbstractContextManager[object]:
    """A context that computes in the types its tensors have, on the device of `x`.

    None is entered where autocast is off: a program that is traced for an export would hold it.
    """
    device = x.device.type
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()
