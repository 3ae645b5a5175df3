"""Classifier alignment: all heads are trained again, on features sampled from a normal distribution per class.

Heads of different tasks are trained separately, so their logits are not comparable. The images of old classes are gone;
features are sampled from their means and covariances instead (SLCA, Zhang et al., ICCV 2023). Methods differ in the
sampled features, in the loss, and in whether the next task starts with the aligned heads.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pearl.data.batches import Batch, Batches, Task
from pearl.methods.base import Method, Network, Phase
from pearl.methods.common.class_moments import ClassMoments, class_covariances
from pearl.methods.common.gaussians import GaussianDraws
from pearl.methods.common.scatter import pack, unpack
from pearl.nn.precision import full
from pearl.nn.task_modules import TaskHeads, TaskTensors
from pearl.settings.declared import UpcomingTask

Loss = Callable[[Tensor, Tensor], Tensor]  # maps logits (B, classes) and labels (B,) to a scalar


def alignment(
    name: str, heads: TaskHeads, draws: Batches, *, loss: Loss = F.cross_entropy, norm: float | None = None
) -> Phase:
    """Return the phase that trains all heads on sampled features; with `norm`, on normalised logits."""

    def aligned(batch: Batch) -> Tensor:
        logits = heads(batch.x)
        return loss(logits if norm is None else normalised(logits, heads.sizes(), norm), batch.y)

    return Phase(name, heads.requires_grad_(True).parameters(), aligned, data=draws)


def normalised(logits: Tensor, sizes: Sequence[int], temperature: float) -> Tensor:
    """Divide logits (B, classes) by `temperature` and their mean norm over tasks of `sizes` classes (SLCA).

    The scale of a task's logits has no effect: a positive factor of all of them changes nothing.
    """
    lengths = [part.norm(dim=1) + 1e-7 for part in logits.split(list(sizes), dim=1)]
    return logits / (torch.stack(lengths).mean(0)[:, None] * temperature)


def symmetric_cross_entropy(logits: Tensor, y: Tensor, ce: float, rce: float, least: float = 1e-4) -> Tensor:
    """Return ce * cross-entropy + rce * reverse cross-entropy (Wang et al., ICCV 2019).

    `logits` are (B, classes), labels (B,).

    The reverse one exchanges label and prediction, with probability `least` instead of 0. It is therefore -ln(least) *
    (1 - p) for the label's probability p, which is bounded.
    """
    missed = 1 - logits.softmax(1).gather(1, y[:, None])
    return ce * F.cross_entropy(logits, y) - rce * math.log(least) * missed.mean()


def draws_of_classes(task: UpcomingTask) -> int:
    """Return the number of features in an epoch with `draws` per class; for `PhaseSpec.images`."""
    return (task.earlier_classes + task.classes) * task.options["draws"]


class Aligned(Method):
    """A method that stores mean and covariance of each class's features to align its heads."""

    def __init__(self, backbone: nn.Module, **options: Any) -> None:
        super().__init__(backbone, **options)
        self.statistics = ClassMoments(self.heads.dim)
        self.covariances = TaskTensors(buffers=True)  # "t" (k, dim (dim + 1) / 2)

    @torch.no_grad()
    def features_of(self, task: Task, batch: int = 256) -> Tensor:
        """Return the features (N, dim), in float32, of a task's images without augmentation."""
        self.eval()
        return torch.cat([full(self.features(x)) for x, _, _ in task.in_order(batch)])

    def remember(self, task: Task, features: Tensor) -> None:
        """Add means and covariances of a task's classes, computed from its features (N, dim)."""
        index, classes = task.labels - task.first_class, len(task.classes)
        self.statistics.grow(classes, self.device)
        self.statistics.update(features, index)
        triangles = torch.stack([pack(covariance) for covariance in class_covariances(features, index, classes)])
        self.covariances.add(f"{task.id}", triangles.to(features))

    def carry(self, linear: Tensor) -> None:
        """Map all classes' distributions by W (dim, dim): features f become f @ W."""
        linear = linear.double()
        means = self.statistics.means()
        self.statistics.move(means @ linear - means)
        for t in range(len(self.statistics)):
            kept = self.covariances[f"{t}"]
            moved = [pack(linear.T @ unpack(triangle.double(), self.heads.dim) @ linear) for triangle in kept]
            self.covariances.add(f"{t}", torch.stack(moved).to(kept))

    @torch.no_grad()
    def carry_draws(self, network: Network, each: int, floor: float) -> None:
        """Map all classes' distributions by a network (B, dim) -> (B, dim): estimates from `each` sampled features."""
        drawn, means, c = self.gaussians(each, floor), self.statistics.means(), 0
        for t in range(len(self.statistics)):
            kept = self.covariances[f"{t}"].clone()
            for triangle in kept:
                noise = torch.randn(each, self.heads.dim).to(drawn.means)
                rows = network(drawn.means[c] + noise @ drawn.factors[c].T).double()
                triangle.copy_(pack(rows.T.cov()))
                means[c], c = rows.mean(0), c + 1
            self.covariances.add(f"{t}", kept)
        self.statistics.move(means - self.statistics.means())

    def gaussians(
        self,
        each: int,
        floor: float,
        *,
        shrink: bool = False,
        scale: Callable[[Tensor], Tensor] | None = None,
        once: int | None = None,
    ) -> GaussianDraws:
        """Return the distributions that features of all classes are sampled from, `each` per class; `floor` is added to
        variances.

        With `shrink`, a mean of task t of T (t from 0) is multiplied by 0.9 + 0.1 (t + 1) / T (SSIAT); by number of
        tasks, so that tasks may have any sizes. For `scale` and `once` see `GaussianDraws`.
        """
        tasks, weight = range(len(self.statistics)), self.heads[0].weight
        shares = [0.9 + 0.1 * (t + 1) / len(tasks) if shrink else 1.0 for t in tasks]
        means = torch.cat([share * self.statistics.means(t) for t, share in zip(tasks, shares, strict=True)])
        least = floor * torch.eye(self.heads.dim, dtype=torch.float64, device=self.device)
        triangles = [triangle for t in tasks for triangle in self.covariances[f"{t}"].double()]
        factors = [torch.linalg.cholesky(unpack(triangle, self.heads.dim) + least) for triangle in triangles]
        return GaussianDraws(means.to(weight), torch.stack(factors).to(weight), each, scale=scale, once=once)
