"""Base of methods with class prototypes: the mean feature of each class at the end of its task."""

from typing import Any

import torch
from torch import Tensor, nn

from pearl.data.batches import Task
from pearl.methods.base import Method
from pearl.methods.common.class_moments import ClassMoments
from pearl.nn.precision import full


class PrototypeMethod(Method):
    """A method that passes over its images once more after training and stores statistics per class."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__(backbone)
        self.statistics = ClassMoments(self.heads.dim)

    def train(self, mode: bool = True) -> "PrototypeMethod":
        """Set the mode; a frozen backbone keeps its running statistics."""
        super().train(mode)
        self.backbone.train(mode and any(p.requires_grad for p in self.backbone.parameters()))
        return self

    @torch.no_grad()
    def features_of(self, task: Task, batch: int = 256) -> Tensor:
        """Return features (N, dim) of a task's images, not augmented, in the form of `seen`."""
        self.eval()
        return torch.cat([self.seen(full(self.extract(x))) for x, _, _ in task.in_order(batch)])

    def observe(self, task: Task) -> Tensor:
        """Return features (N, dim) of a task's images, not augmented, after adding counts and means of its classes."""
        features = self.features_of(task)
        self.statistics.grow(len(task.classes), self.device)
        self.statistics.update(features, task.labels - task.first_class)
        return features

    def extract(self, x: Tensor) -> Tensor:
        """Return features (B, dim) of images; by default the backbone's."""
        return self.backbone(x)

    def seen(self, features: Tensor) -> Tensor:
        """Return the form of features (B, dim) for statistics and scores; by default unchanged."""
        return features

    def facts(self, task: int) -> dict[str, Any]:
        """Return how many numbers are stored in addition to parameters: `size` does not count statistics."""
        stored = self.state_dict()
        buffers = {name: buffer for name, buffer in self.named_buffers() if name in stored and "backbone." not in name}
        return {"statistics": sum(buffer.numel() for buffer in buffers.values())}
