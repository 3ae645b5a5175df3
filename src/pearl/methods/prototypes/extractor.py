"""Base of methods with a frozen feature extractor: pretrained, or trained on the first task."""

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor, nn

from pearl.data.batches import Task
from pearl.methods.base import Phase, whole
from pearl.methods.prototypes.prototype import PrototypeMethod
from pearl.nn.precision import full
from pearl.settings.declared import Phases, PhaseSpec


class FrozenExtractor(PrototypeMethod):
    """A backbone that is frozen after the first task, and statistics of each class's features.

    Options:
        extractor: `given` - the backbone is pretrained and stays frozen; `first_task` - task 1 trains it, with a linear
            head; `auto` - the first if it was pretrained.
    """

    phases: Phases = (PhaseSpec("extractor", "reference"),)

    def __init__(self, backbone: nn.Module, *, extractor: Literal["auto", "given", "first_task"] = "auto") -> None:
        super().__init__(backbone.requires_grad_(False))
        if extractor == "auto":
            extractor = "given" if backbone.pretrained else "first_task"
        self.extractor = extractor

    def trains_on(self, task: Task) -> bool:
        """Return True if the extractor is trained on this task."""
        return task.id == 0 and self.extractor == "first_task"

    def train_extractor(self, task: Task, head: nn.Module | None = None) -> Iterator[Phase]:
        """Return the phase of the first task, none in later ones; a method without a head gets a temporary one."""
        self.requires_grad_(False)
        if not self.trains_on(task):
            return
        head = head or self.heads.block(len(task.classes)).to(self.device)
        yield whole("extractor", self.backbone, head, task, extra=head)
        self.requires_grad_(False)

    def score(self, features: Tensor) -> Tensor:
        """Return logits (B, classes seen) of float32 features in the form of `seen`."""
        raise NotImplementedError

    def forward(self, x: Tensor, task: int | None = None) -> Tensor:
        """See `Method.forward`. The extractor runs in the recipe's precision, distances in float32."""
        features = self.extract(x)
        with torch.autocast(self.device.type, enabled=False):
            logits = self.score(self.seen(full(features)))
        return logits if task is None else logits[:, self.columns(task)]

    def columns(self, task: int) -> slice:
        """See `Method.columns`."""
        return self.statistics.columns(task)
