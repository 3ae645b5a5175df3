"""ADA: Memory Efficient Continual Learning with Transformers (Ermis et al., NeurIPS 2022).

A few adapters serve all tasks. Each task trains an adapter and a head. Once the pool is full, the new adapter and the
one that suits the new task best are distilled into one, which takes its place.
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
from pearl.nn.growing import TaskTensors
from pearl.settings.declared import PhaseSpec

DISTORTION = 1e-4  # epsilon of TransRate, as in its authors' code

Count = Annotated[int, Field(ge=1)]


class Ada(FrozenVit):
    """A frozen ViT, a pool of adapters beside its MLPs, and a head per task on the features of the task's adapter.

    There is no code, and the paper's settings are of other data. Those here are of a comparison that ran it on
    ImageNet-R (Tan et al., CVPR 2024): width 64, SGD at 0.01 with a cosine, momentum 0.9 and weight decay 5e-4, 20
    epochs, batches of 48. Not stated, and chosen here: adapters stand beside the MLP; the images of the current task,
    without their labels, are what is distilled on, for as many epochs; the pooled adapter goes on from what it was;
    four adapters. In class-IL the heads' raw logits stand side by side, and an image passes through the network once
    for each adapter.

    Options:
        pool: most adapters that are kept (K in the paper); with one for each task none is ever changed.
        width: of an adapter.
        score: how well an adapter suits a task: `leep`, how well its heads' answers tell the task's labels, or
            `transrate`, how far apart its features set the classes.
        train_heads: whether heads are distilled as well; the paper's stay as they are.
    """

    own_classes = True
    may_rest = ("ada",)  # ReLUs of a new adapter may all be silent
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
        # "t": as long as the number of the task's adapter in the pool. Shapes need no waiting for the device, and a
        # program that is traced knows them.
        self.places = TaskTensors(buffers=True)
        self.most, self.kind, self.train_heads = pool, score, train_heads

    def learn(self, task: Task) -> Iterator[Phase]:
        """A new adapter and its head; while there is room it stays, else it is made one with the most suitable."""
        head = self.heads.grow(len(task.classes)).to(self.device)
        full = len(self.pool) == self.most
        new = (self.pool.make() if full else self.pool.grow()).to(self.device)
        params = [*new.parameters(), *self.only(head.parameters())]
        new.requires_grad_(True)
        own = own_loss(lambda x: self.read(x, new), head, task)
        yield Phase("ada", params, own, extra=new if full else None, steady=True)
        self.requires_grad_(False)
        place = max(range(len(self.pool)), key=lambda j: self.score(task, j)) if full else len(self.pool) - 1
        earlier = self.tasks_of(place)
        self.places.add(f"{task.id}", torch.zeros(place, dtype=torch.uint8, device=self.device))
        if full:
            heads = [*self.heads] if self.train_heads else []
            params = [p for t in (*earlier, task.id) if heads for p in heads[t].parameters()]
            params = self.only([*self.pool[place].parameters(), *params])
            yield Phase("ada_consolidate", params, self.distilled(place, earlier, new, task.id), steady=True)
            self.requires_grad_(False)

    def score(self, task: Task, place: int) -> float:
        """How well an adapter of the pool suits a task, by its images as they are tested."""
        features = self.of_images(task, lambda x: self.read(x, self.pool[place]))
        if self.kind == "transrate":
            return float(transrate(features, task.labels))
        with torch.no_grad():
            answers = torch.cat([self.heads[t](features) for t in self.tasks_of(place)], dim=1).softmax(1)
        return float(leep(answers, task.labels))

    def distilled(self, place: int, earlier: list[int], new: nn.Module, task: int) -> Callable[[Batch], Tensor]:
        """The loss of consolidation: the pooled adapter is to make heads say what both adapters made them say."""
        old, new, heads = frozen(self.pool[place]), frozen(new), frozen(self.heads)

        def loss(batch: Batch) -> Tensor:
            with torch.no_grad():
                before, now = self.read(batch.x, old), self.read(batch.x, new)
                said = [torch.cat([heads[t](before) for t in earlier], dim=1), heads[task](now)]
            features = self.read(batch.x, self.pool[place])
            return consolidation(torch.cat([self.heads[t](features) for t in (*earlier, task)], dim=1), said)

        return loss

    def tasks_of(self, place: int) -> list[int]:
        """The tasks whose adapter this is."""
        return [t for t in range(len(self.places)) if self.place(t) == place]

    def place(self, task: int) -> int:
        """Which adapter of the pool is a task's."""
        return len(self.places[f"{task}"])

    def read(self, x: Tensor, adapters: nn.Module) -> Tensor:
        """Features (B, dim) with these adapters."""
        return vit.features(self.backbone, x, adapters=adapters.by_block())  # type: ignore[operator]

    def forward(self, x: Tensor, task: int | None = None) -> Tensor:
        """Logits of each task's head on the features of its adapter; each adapter is asked once."""
        tasks = range(len(self.heads)) if task is None else [task]
        places = [self.place(t) for t in tasks]
        features = {place: self.read(x, self.pool[place]) for place in dict.fromkeys(places)}
        return torch.cat([self.heads[t](features[place]) for t, place in zip(tasks, places, strict=True)], dim=1)

    def asked(self) -> int:
        """See `Method.asked`."""
        return len(self.pool)

    def facts(self, task: int) -> dict[str, Any]:
        """Which adapter of the pool is the task's."""
        return {"adapter": self.place(task)}


def consolidation(logits: Tensor, teachers: list[Tensor]) -> Tensor:
    """The mean squared distance of logits (B, classes) from those of teachers, each centred over its own classes.

    Deep model consolidation (Zhang et al., WACV 2020).
    """
    return F.mse_loss(logits, torch.cat([said - said.mean(1, keepdim=True) for said in teachers], dim=1))


def leep(answers: Tensor, labels: Tensor) -> Tensor:
    """LEEP (Nguyen et al., ICML 2020) of probabilities (N, old classes) for labels (N,): 0 at most, of a sure answer.

    The mean log-likelihood of labels, when an old class is drawn by an image's answer and a label by the old class.
    """
    answers = answers.double()
    own = F.one_hot(labels.unique(return_inverse=True)[1]).to(answers)  # (N, new classes)
    joint = own.T @ answers / len(labels)
    given = joint / joint.sum(0).clamp(min=torch.finfo(joint.dtype).tiny)
    return (answers @ given.T * own).sum(1).log().mean()


def transrate(features: Tensor, labels: Tensor) -> Tensor:
    """TransRate (Huang et al., ICML 2022) of features (N, dim): their coding rate less that within classes."""
    centred = features.double() - features.double().mean(0)
    within = [rate(centred[labels == label]) * (labels == label).sum() / len(labels) for label in labels.unique()]
    return rate(centred) - torch.stack(within).sum()


def rate(centred: Tensor) -> Tensor:
    """Half the log-determinant of I + Z^T Z / (n epsilon)."""
    small = centred @ centred.T if len(centred) < centred.shape[1] else centred.T @ centred  # the same determinant
    return torch.linalg.slogdet(torch.eye(len(small)).to(small) + small / (len(centred) * DISTORTION)).logabsdet / 2
