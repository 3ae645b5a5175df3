"""What RanPAC and LoRanPAC share: a head in closed form on random features of a frozen network."""

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor, nn

from pearl.data.batches import Task
from pearl.methods.base import Phase
from pearl.methods.common.random_features import RandomFeatures
from pearl.methods.common.statistics import ClassStatistics
from pearl.methods.prototypes.first_session import FirstSession, Form
from pearl.nn.growing import CosineHeads, TaskTensors
from pearl.storage.checkpoint import RUNNING, in_weights

ROWS = 1024  # random features that are made at once, where no method says


class Lifted(FirstSession):
    """Features, lifted to many random ones; classes are known by their sums, images by what `keep` makes of them."""

    rows = ROWS  # lifted at a time
    lifted_head = False  # the classifier of the first session sees random features

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
        self.statistics = ClassStatistics(lifted)
        self.kept = TaskTensors(buffers=True)  # "head" (lifted, classes); of a subclass's

    def learn(self, task: Task) -> Iterator[Phase]:
        """Train or adapt the network if this is its task; then one pass over the images, and the head."""
        if not task.id:
            self.lift.draw()
        yield from self.train_extractor(task)
        head = CosineHeads(self.lift.shape[1 if self.lifted_head else 0], 1.0, learnable=True)
        head.grow(len(task.classes))
        yield from self.tune(task, head.to(self.device), self.lifted if self.lifted_head else self.adapted)
        features = self.features_of(task)
        self.statistics.grow(len(task.classes), self.device)
        for own in torch.arange(len(features), device=self.device).split(self.rows):
            lifted = self.lift(features[own])
            self.statistics.update(lifted, task.labels[own] - task.first_class)
            self.keep(lifted)
        self.kept.add("head", self.solve(task, features).to(features).contiguous())

    def keep(self, lifted: Tensor) -> None:
        """Take in random features (m, lifted) of a task's images."""
        raise NotImplementedError

    def solve(self, task: Task, features: Tensor) -> Tensor:
        """The head (lifted, classes), once a task's images have been taken in; `features` (N, dim) are theirs."""
        raise NotImplementedError

    def cross(self) -> Tensor:
        """The sum of each class's random features (lifted, classes), float64: Z'Y of one-hot Y."""
        tasks = range(len(self.statistics))
        counts = torch.cat([self.statistics.tensors[f"{t}.count"] for t in tasks])
        return (self.statistics.means() * counts[:, None]).T

    def lifted(self, x: Tensor) -> Tensor:
        """Random features (B, lifted) of images."""
        return self.lift(self.adapted(x))

    def extract(self, x: Tensor) -> Tensor:
        """Features (B, dim) with what the first task added."""
        return self.adapted(x)

    def score(self, features: Tensor) -> Tensor:
        """The linear head's logits."""
        return self.lift(features) @ self.kept["head"].to(features)

    def columns(self, task: int) -> slice:
        """See `Method.columns`."""
        return self.statistics.columns(task)

    def file_of(self, name: str) -> str:
        """What is kept of all images and the head are made anew with each task."""
        return RUNNING if name.startswith(("kept.", "svd.")) else in_weights(name)
