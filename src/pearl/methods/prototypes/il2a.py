"""IL2A: Class-Incremental Learning via Dual Augmentation (Zhu et al., NeurIPS 2021).

During a task, mixtures of images of two new classes are additional classes. Old classes are augmented in feature space
without sampling: by an upper bound of the expected loss for features around each old mean, from its covariance.
"""

from collections.abc import Iterator
from functools import partial
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from pearl.data.batches import Batch, Task
from pearl.methods.base import Phase
from pearl.methods.common.class_moments import class_covariances
from pearl.methods.common.teacher import frozen
from pearl.methods.prototypes.non_exemplar import NonExemplar, old_classes, raised_logits
from pearl.nn.precision import full
from pearl.nn.task_modules import TaskTensors

Weight = Annotated[float, Field(ge=0)]


class IL2A(NonExemplar):
    """Cross-entropy with mixed classes + seman_weight * the bound for old ones + kd_weight * |F(X) - F_old(X)|.

    The last is one norm over all features of a batch, including mixed images, as in the authors' code, so that one
    process trains. Prototypes and covariances are from all images of a class without augmentation, where the code uses
    an augmented pass without its last batch; its unused attention modules are left out. The recipes augment by
    brightness, as the code does. For logits divided by `temp` the bound would need ratio / temp; the code divides the
    bound together with the logits, and ratio's default is for that form.

    Options:
        temp: temperature that divides all logits.
        seman_weight: weight of the bound's cross-entropy, for as many random prototypes as a batch has images.
        kd_weight: weight of the distance to the features of the network before the task.
        ratio: factor of the covariances (the paper's lambda).
        mix_times: number of random permutations that a batch is mixed with.
        alpha: parameter of the Beta distribution of an image's share in a mixture; shares outside [0.4, 0.6] become
            0.5.
        covariances: `own` - each old class has its own, as in the paper; `released` - as in the authors' code, where
            the order of tasks is reversed, so that from the third task on classes have covariances of others.
    """

    phases = ("il2a",)

    def __init__(
        self,
        backbone: nn.Module,
        *,
        temp: Annotated[float, Field(gt=0)] = 0.1,
        seman_weight: Weight = 10.0,
        kd_weight: Weight = 10.0,
        ratio: Weight = 2.5,
        mix_times: Annotated[int, Field(ge=0, strict=True)] = 4,
        alpha: Annotated[float, Field(gt=0)] = 20.0,
        covariances: Literal["own", "released"] = "own",
    ) -> None:
        super().__init__(backbone, temp=temp)
        self.seman_weight, self.kd_weight, self.ratio = seman_weight, kd_weight, ratio
        self.mix_times, self.alpha, self.order = mix_times, alpha, covariances
        self.covariances = TaskTensors(buffers=True)  # "t": (k, dim, dim)

    def learn(self, task: Task) -> Iterator[Phase]:
        """Train all parameters on the new task and mixtures of its classes; then compute means and covariances."""
        teacher = frozen(self.backbone) if task.id else None
        self.heads.grow(len(task.classes)).to(self.device)
        count = len(task.classes) * (len(task.classes) - 1) // 2
        pairs = self.heads.block(count).to(self.device) if count else None  # unused after the task
        params = [*self.parameters(), *(pairs.parameters() if pairs else ())]
        old = torch.cat([self.covariances[f"{t}"] for t in self.tasks_in_order()]) if task.id else None
        yield Phase("il2a", params, partial(self.loss, task, teacher, pairs, old), extra=pairs)
        features = self.observe(task)
        spread = class_covariances(features, task.labels - task.first_class, len(task.classes))
        self.covariances.add(f"{task.id}", spread.to(features))

    def tasks_in_order(self) -> list[int]:
        """Return the order of tasks in which covariances are numbered."""
        tasks = range(len(self.covariances))
        return [*tasks] if self.order == "own" else [*reversed(tasks)]

    def loss(
        self, task: Task, teacher: nn.Module | None, pairs: nn.Module | None, old: Tensor | None, batch: Batch
    ) -> Tensor:
        """Return the loss; `pairs` is the head of mixed classes, `old` the covariances of old ones; the first task has
        no teacher.
        """
        x, y = batch.x, batch.y
        if pairs is not None:
            mixture, mixed_labels = mixed(x, y - task.first_class, len(task.classes), self.mix_times, self.alpha)
            x, y = torch.cat([x, mixture]), torch.cat([y, sum(self.heads.sizes()) + mixed_labels])
        features = full(self.backbone(x))
        logits = self.heads(features)
        loss = self.cross_entropy(logits if pairs is None else torch.cat([logits, pairs(features)], dim=1), y)
        if teacher is not None and old is not None:
            with torch.no_grad():
                before = full(teacher(x))
            loss = loss + self.seman_weight * self.old_loss(old_classes(batch.y, len(old)), old)
            loss = loss + self.kd_weight * torch.linalg.vector_norm(features - before)
        return loss

    def old_loss(self, y: Tensor, covariances: Tensor) -> Tensor:
        """Return the bound's cross-entropy of old classes y (B,) among all classes seen."""
        weight = torch.cat([head.weight for head in self.heads])
        logits = self.heads(self.statistics.means().to(weight)[y])
        return self.cross_entropy(raised_logits(logits, weight, y, covariances, self.ratio), y)


def mixed(x: Tensor, y: Tensor, classes: int, times: int, alpha: float) -> tuple[Tensor, Tensor]:
    """Mix images (B, ...) with those of other classes, at most `times` each; return them with labels of their class
    pairs.

    Labels y (B,) are from 0 to `classes` - 1, pairs (a, b) with a < b from 0: (0, 1), (0, 2), ..., (1, 2), ...
    """
    one = torch.arange(len(y), device=y.device).repeat(times)
    other = torch.cat([torch.randperm(len(y), device=y.device) for _ in range(times)]) if times else one
    differ = y[one] != y[other]
    one, other = one[differ], other[differ]
    share = torch.distributions.Beta(alpha, alpha).sample((len(one),)).to(x)
    share = torch.where((share < 0.4) | (share > 0.6), 0.5, share).view(-1, *[1] * (x.ndim - 1))
    a, b = torch.minimum(y[one], y[other]), torch.maximum(y[one], y[other])
    return share * x[one] + (1 - share) * x[other], (2 * classes - a - 1) * a // 2 + b - a - 1
