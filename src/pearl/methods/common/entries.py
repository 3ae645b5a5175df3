"""Masks of the parameter entries that a phase trains."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn


def within(params: Sequence[nn.Parameter], masks: Sequence[Tensor | None]) -> Callable[[list[Tensor]], None]:
    """Return a `Phase.project` that keeps entries outside a parameter's mask unchanged, also under momentum.

    A mask may be modified in place during the phase; a parameter without one trains as a whole.
    """

    def project(before: list[Tensor]) -> None:
        for parameter, mask, was in zip(params, masks, before, strict=True):
            if mask is not None:
                parameter.copy_(torch.where(mask, parameter, was))

    return project
