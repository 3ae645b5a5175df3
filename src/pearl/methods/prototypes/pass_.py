"""PASS: Prototype Augmentation and Self-Supervision for Incremental Learning (Zhu et al., CVPR 2021).

Rotations of images make four classes of each, which gives features that generalise to later tasks. In later tasks, the
head trains on each old class's mean feature with noise, and features are distilled from the previous network.
"""

from collections.abc import Iterator
from functools import partial
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from pearl.data.batches import Batch, Task
from pearl.methods.base import Phase
from pearl.methods.common.class_moments import class_covariances
from pearl.methods.common.rotations import TURNS, turned, turned_labels
from pearl.methods.common.teacher import frozen
from pearl.methods.prototypes.non_exemplar import NonExemplar, old_classes
from pearl.nn.precision import full
from pearl.nn.task_modules import TaskHeads


class PASS(NonExemplar):
    """Cross-entropy over 4 x classes + protoAug_weight * that of noisy prototypes + kd_weight * |F(X) - F_old(X)|.

    The last is one norm over all features of a batch, as in the authors' code, so that one process trains. Prototypes
    are means over all images of a class without augmentation, where the code uses an augmented pass without its last
    batch; its unused attention modules are left out. The recipes augment by brightness, as the code does
    (`train.phases.pass.images.brightness`).

    Options:
        temp: temperature that divides all logits.
        protoAug_weight: weight of the cross-entropy of as many random prototypes as a batch has images.
        kd_weight: weight of the distance to the features of the network before the task.
    """

    phases = ("pass",)
    radius: Tensor

    def __init__(
        self,
        backbone: nn.Module,
        *,
        temp: Annotated[float, Field(gt=0)] = 0.1,
        protoAug_weight: Annotated[float, Field(ge=0)] = 10.0,
        kd_weight: Annotated[float, Field(ge=0)] = 10.0,
    ) -> None:
        super().__init__(backbone, temp=temp)
        self.protoAug_weight, self.kd_weight = protoAug_weight, kd_weight
        self.turned_heads = nn.ModuleList(TaskHeads(self.heads.dim) for _ in range(1, TURNS))
        self.register_buffer("radius", torch.zeros(()))

    def learn(self, task: Task) -> Iterator[Phase]:
        """Train all parameters on the new task, with the previous network as teacher; then compute the prototypes."""
        teacher = frozen(self.backbone) if task.id else None
        for heads in (self.heads, *self.turned_heads):
            heads.grow(len(task.classes)).to(self.device)
        yield Phase("pass", self.parameters(), partial(self.loss, teacher), capturable=True)
        features = self.observe(task)
        if teacher is None:  # the noise in all later tasks: r^2 = mean over classes of trace(covariance) / dim
            spread = class_covariances(features, task.labels, len(task.classes))
            self.radius.copy_(spread.diagonal(dim1=1, dim2=2).mean().sqrt())

    def loss(self, teacher: nn.Module | None, batch: Batch) -> Tensor:
        """Return the loss; the first task has no teacher and no older classes."""
        x = turned(batch.x)
        features = full(self.backbone(x))
        logits = self.logits(features)
        loss = self.cross_entropy(logits, turned_labels(batch.y, logits.shape[1] // TURNS))
        if teacher is not None:
            means = self.statistics.means().to(features)
            old = old_classes(batch.y, len(means))
            noise = self.radius * torch.randn(len(old), means.shape[1], dtype=means.dtype, device=means.device)
            with torch.no_grad():
                before = full(teacher(x))
            loss = loss + self.protoAug_weight * self.cross_entropy(self.logits(means[old] + noise), old)
            loss = loss + self.kd_weight * torch.linalg.vector_norm(features - before)
        return loss

    def logits(self, features: Tensor) -> Tensor:
        """Return logits of features (B, dim): those of all classes unrotated, then rotated once, twice, three times."""
        return torch.cat([heads(features) for heads in (self.heads, *self.turned_heads)], dim=1)

    def size(self) -> int:
        """Count all but the heads of rotated classes, which are used only in training."""
        return super().size() - sum(parameter.numel() for parameter in self.turned_heads.parameters())
