"""ADA: Memory Efficient Continual Learning with Transformers (Ermis et al., NeurIPS 2022).

A pool of few adapters serves all tasks. Each task trains an adapter and a head. Once the pool is full, the new adapter
and the most transferable one of the pool are distilled into one, which replaces the latter.
"""

from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from pearl.data.batches import Batch, Task
from pearl.methods.adapters.bottleneck import Bottleneck, TaskAdapters
from pearl.methods.base import Phase, own_loss
from pearl.methods.common.frozen_vit import FrozenVit
from pearl.methods.common.teacher import frozen
from pearl.nn import vit
from pearl.nn.task_modules import TaskTensors
from pearl.settings.declared import PhaseSpec

DISTORTION = 1e-4  # epsilon of TransRate, as in its authors' code

Count = Annotated[int, Field(ge=1)]


class Ada(FrozenVit):
    """A frozen ViT, a pool of adapters parallel to its MLPs, and a head per task on the features of the task's adapter.

    No code is published, and the paper's settings are for other data. The settings here are those of a comparison on
    ImageNet-R (Tan et al., CVPR 2024): width 64, SGD at 0.01 with a cosine, momentum 0.9 and weight decay 5e-4, 20
    epochs, batches of 48. Not stated, and chosen here: adapters are parallel to the MLP; distillation uses the current
    task's images without labels, for as many epochs; the merged adapter is initialised with the pooled one; four
    adapters. Class-IL concatenates the heads' raw logits, and an image needs a forward pass per adapter.

    Options:
        pool: maximum adapters (K in the paper); with one per task, none is ever changed.
        width: width of an adapter.
        score: transferability of an adapter to a task: `leep`, how well its heads' outputs predict the task's labels,
            or `transrate`, how well its features separate the classes.
        train_heads: distil the heads as well; the paper keeps them unchanged.
    """

    task_local_loss = True
    may_rest = ("ada",)  # a new adapter's ReLUs may all be inactive
    phases = ("ada", PhaseSpec("ada_consolidate", lambda task: task.id >= task.options["pool"]))

    def __init__(
        self,
        backbone: nn.Module,
        *,
        pool: Count = 4,
        width: Count = 64,
        score: Literal["leep", "transrate"] = "leep",
        train_heads: bool = False,
    ) -> None:
        super().__init__(backbone)
        self.pool = TaskAdapters(range(len(backbone.blocks)), lambda: Bottleneck(self.dim, width))  # type: ignore[arg-type]
        # "t": a tensor whose length is the index of the task's adapter in the pool. Shapes need no synchronisation with
        # "t": a tensor whose length is the index of the task's adapter in the pool. Shapes need no synchronisation with
        # the device, and are constants in traced programs.
        self.places = TaskTensors(buffers=True)
        self.most, self.kind, self.train_heads = pool, score, train_heads

    def learn(self, task: Task) -> Iterator[Phase]:
        """Train a new adapter and its head; if the pool is full, merge it with the most suitable adapter."""
        head = self.heads.grow(len(task.classes)).to(self.device)
        full = len(self.pool) == self.most
        new = (self.pool.make() if full else self.pool.grow()).to(self.device)
        params = [*new.parameters(), *self.only(head.parameters())]
        new.requires_grad_(True)
        loss = own_loss(lambda x: self.read(x, new), head, task)
        yield Phase("ada", params, loss, extra=new if full else None, capturable=True)
        self.requires_grad_(False)
        slot = max(range(len(self.pool)), key=lambda j: self.score(task, j)) if full else len(self.pool) - 1
        earlier = self.tasks_of(slot)
        self.places.add(f"{task.id}", torch.zeros(slot, dtype=torch.uint8, device=self.device))
        if full:
            heads = [*self.heads] if self.train_heads else []
            params = [p for t in (*earlier, task.id) if heads for p in heads[t].parameters()]
            params = self.only([*self.pool[slot].parameters(), *params])
            yield Phase("ada_consolidate", params, self.distilled(slot, earlier, new, task.id), capturable=True)
            self.requires_grad_(False)

    def score(self, task: Task, slot: int) -> float:
        """Return the transferability of a pooled adapter to a task, on its images with the test transform."""
        features = self.of_images(task, lambda x: self.read(x, self.pool[slot]))
        if self.kind == "transrate":
            return float(transrate(features, task.labels))
        with torch.no_grad():
            answers = torch.cat([self.heads[t](features) for t in self.tasks_of(slot)], dim=1).softmax(1)
        return float(leep(answers, task.labels))

    def distilled(self, slot: int, earlier: list[int], new: nn.Module, task: int) -> Callable[[Batch], Tensor]:
        """Return the consolidation loss: the heads' outputs with the merged adapter should be those with both."""
        old, new, heads = frozen(self.pool[slot]), frozen(new), frozen(self.heads)

        def loss(batch: Batch) -> Tensor:
            with torch.no_grad():
                before, now = self.read(batch.x, old), self.read(batch.x, new)
                said = [torch.cat([heads[t](before) for t in earlier], dim=1), heads[task](now)]
            features = self.read(batch.x, self.pool[slot])
            return consolidation(torch.cat([self.heads[t](features) for t in (*earlier, task)], dim=1), said)

        return loss

    def tasks_of(self, slot: int) -> list[int]:
        """Return the tasks that use this adapter."""
        return [t for t in range(len(self.places)) if self.slot_of(t) == slot]

    def slot_of(self, task: int) -> int:
        """Return the index of a task's adapter in the pool."""
        return len(self.places[f"{task}"])

    def read(self, x: Tensor, adapters: nn.Module) -> Tensor:
        """Return features (B, dim) with these adapters."""
        return vit.features(self.backbone, x, adapters=adapters.by_block())  # type: ignore[operator]

    def forward(self, x: Tensor, task: int | None = None) -> Tensor:
        """Return the logits of each task's head on its adapter's features; each adapter is used once."""
        tasks = range(len(self.heads)) if task is None else [task]
        slots = [self.slot_of(t) for t in tasks]
        features = {slot: self.read(x, self.pool[slot]) for slot in dict.fromkeys(slots)}
        return torch.cat([self.heads[t](features[slot]) for t, slot in zip(tasks, slots, strict=True)], dim=1)

    def forward_passes(self) -> int:
        """See `Method.forward_passes`."""
        return len(self.pool)

    def facts(self, task: int) -> dict[str, Any]:
        """Return the index of the task's adapter in the pool."""
        return {"adapter": self.slot_of(task)}


def consolidation(logits: Tensor, teachers: list[Tensor]) -> Tensor:
    """Return the mean squared distance of logits (B, classes) from those of teachers, each centred over its own
    classes.

    Deep model consolidation (Zhang et al., WACV 2020).
    """
    return F.mse_loss(logits, torch.cat([said - said.mean(1, keepdim=True) for said in teachers], dim=1))


def leep(answers: Tensor, labels: Tensor) -> Tensor:
    """Return LEEP (Nguyen et al., ICML 2020) of probabilities (N, old classes) for labels (N,); at most 0, the best.

    It is the mean log-likelihood of labels if an old class is drawn by an image's probabilities and a label by the old
    class.
    """
    answers = answers.double()
    one_hot = F.one_hot(labels.unique(return_inverse=True)[1]).to(answers)  # (N, new classes)
    joint = one_hot.T @ answers / len(labels)
    given = joint / joint.sum(0).clamp(min=torch.finfo(joint.dtype).tiny)
    return (answers @ given.T * one_hot).sum(1).log().mean()


def transrate(features: Tensor, labels: Tensor) -> Tensor:
    """Return TransRate (Huang et al., ICML 2022) of features (N, dim): their coding rate minus that within classes."""
    centred = features.double() - features.double().mean(0)
    within = [rate(centred[labels == label]) * (labels == label).sum() / len(labels) for label in labels.unique()]
    return rate(centred) - torch.stack(within).sum()


def rate(centred: Tensor) -> Tensor:
    """Return half the log-determinant of I + Z^T Z / (n epsilon)."""
    small = centred @ centred.T if len(centred) < centred.shape[1] else centred.T @ centred  # the same determinant
    return torch.linalg.slogdet(torch.eye(len(small)).to(small) + small / (len(centred) * DISTORTION)).logabsdet / 2
