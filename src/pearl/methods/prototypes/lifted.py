"""Base of RanPAC and LoRanPAC: a head in closed form on random features of a frozen network."""

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor, nn

from pearl.data.batches import Task
from pearl.methods.base import Phase
from pearl.methods.common.class_moments import ClassMoments
from pearl.methods.common.random_features import RandomFeatures
from pearl.methods.prototypes.first_session import FirstSession, Form
from pearl.nn.task_modules import CosineHeads, TaskTensors
from pearl.storage.checkpoint import RUNNING, in_weights

ROWS = 1024  # random features computed at once by default


class Lifted(FirstSession):
    """Features mapped to many random ones, with sums per class; `keep` accumulates statistics of images."""

    rows = ROWS  # images per chunk
    lifted_head = False  # the classifier of the first session is on random features

    def __init__(
        self,
        backbone: nn.Module,
        form: Form | None,
        phase: str,
        *,
        lifted: int,
        width: int,
        length: int,
        extractor: Literal["auto", "given", "first_task"],
    ) -> None:
        super().__init__(backbone, form, phase, width=width, length=length, extractor=extractor)
        self.lift = RandomFeatures(self.heads.dim, lifted)
        self.statistics = ClassMoments(lifted)
        self.kept = TaskTensors(buffers=True)  # "head" (lifted, classes); further tensors of a subclass

    def learn(self, task: Task) -> Iterator[Phase]:
        """Train or adapt the network in its task; then run one pass over the images, and compute the head."""
        if not task.id:
            self.lift.draw()
        yield from self.train_extractor(task)
        head = CosineHeads(self.lift.shape[1 if self.lifted_head else 0], 1.0, learnable=True)
        head.grow(len(task.classes))
        yield from self.tune(task, head.to(self.device), self.lifted if self.lifted_head else self.adapted)
        features = self.features_of(task)
        self.statistics.grow(len(task.classes), self.device)
        for rows in torch.arange(len(features), device=self.device).split(self.rows):
            lifted = self.lift(features[rows])
            self.statistics.update(lifted, task.labels[rows] - task.first_class)
            self.keep(lifted)
        self.kept.add("head", self.solve(task, features).to(features).contiguous())

    def keep(self, lifted: Tensor) -> None:
        """Accumulate random features (m, lifted) of a task's images."""
        raise NotImplementedError

    def solve(self, task: Task, features: Tensor) -> Tensor:
        """Return the head (lifted, classes), after a task's images; `features` (N, dim) are theirs."""
        raise NotImplementedError

    def cross(self) -> Tensor:
        """Return the sum of each class's random features (lifted, classes), float64: Z'Y of one-hot Y."""
        tasks = range(len(self.statistics))
        counts = torch.cat([self.statistics.tensors[f"{t}.count"] for t in tasks])
        return (self.statistics.means() * counts[:, None]).T

    def lifted(self, x: Tensor) -> Tensor:
        """Return random features (B, lifted) of images."""
        return self.lift(self.adapted(x))

    def extract(self, x: Tensor) -> Tensor:
        """Return features (B, dim) with the first task's added parts."""
        return self.adapted(x)

    def score(self, features: Tensor) -> Tensor:
        """Return the linear head's logits."""
        return self.lift(features) @ self.kept["head"].to(features)

    def columns(self, task: int) -> slice:
        """See `Method.columns`."""
        return self.statistics.columns(task)

    def file_of(self, name: str) -> str:
        """Statistics of all images and the head are computed anew in each task."""
        return RUNNING if name.startswith(("kept.", "svd.")) else in_weights(name)
