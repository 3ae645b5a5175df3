"""Entries of parameters that a phase trains, where it does not train all of them."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn


def within(params: Sequence[nn.Parameter], masks: Sequence[Tensor | None]) -> Callable[[list[Tensor]], None]:
    """`Phase.project` for these parameters: what lies outside a parameter's mask stays, momentum or not.

    A mask may be changed in its place while the phase trains; a parameter without one trains as a whole.
    """

    def project(before: list[Tensor]) -> None:
        for parameter, mask, was in zip(params, masks, before, strict=True):
            if mask is not None:
                parameter.copy_(torch.where(mask, parameter, was))

    return project
