"""EASE: Expandable Subspace Ensemble for Pre-Trained Model-Based Class-Incremental Learning (Zhou et al., CVPR 2024).

Each task trains its own adapters, which define a feature space. A class has a prototype in every space; in later ones
it is combined from prototypes of that space's classes, weighted by similarity in the class's own space.
"""

from collections.abc import Iterator
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from pearl.data.batches import Task
from pearl.methods.adapters.bottleneck import Bottleneck, Count, Dropout, TaskAdapters
from pearl.methods.base import Phase, own_loss
from pearl.methods.common.class_moments import ClassMoments, cosines
from pearl.methods.common.frozen_vit import FrozenVit
from pearl.nn import vit
from pearl.nn.precision import full, outside_autocast
from pearl.nn.task_modules import CosineHeads


class Ease(FrozenVit):
    """A frozen ViT with a set of adapters per task, all of which are evaluated.

    Defaults are the authors' for ImageNet-R: SGD at 0.05 with a cosine, 20 epochs, batches of 16, decay 5e-3
    (CIFAR-100: 0.025, batches of 48, decay 5e-4), with a cosine classifier of the task's classes that is then
    discarded. An image passes through the first block once, and through the others once per task, since adapters change
    the inputs of later layers.

    Options:
        ffn_num: width of the adapters.
        dropout: dropout of their hidden units in training.
        alpha: total weight of all spaces except a class's own, whose weight is 1.
    """

    task_local_loss = True
    phases = ("ease",)

    def __init__(
        self,
        backbone: nn.Module,
        *,
        ffn_num: Count = 64,
        dropout: Dropout = 0.1,
        alpha: Annotated[float, Field(ge=0)] = 0.1,
    ) -> None:
        super().__init__(backbone)
        depth, dim = len(backbone.blocks), self.dim  # type: ignore[arg-type]
        self.adapters = TaskAdapters(range(depth), lambda: Bottleneck(dim, ffn_num, scale=0.1, dropout=dropout))
        self.alpha = alpha
        self.statistics = ClassMoments(dim)  # of a task's classes in the existing spaces, concatenated

    def learn(self, task: Task) -> Iterator[Phase]:
        """Train the adapters of a new space; then compute the prototypes of the new classes in all spaces."""
        t = task.id
        adapters = self.adapters.grow().to(self.device)
        head = CosineHeads(self.dim, 1.0, learnable=True)
        head.grow(len(task.classes))
        params = [*self.only(adapters.parameters()), *head.to(self.device).parameters()]

        def features(x: Tensor) -> Tensor:
            return vit.features(self.backbone, x, adapters=self.adapters.by_block(t))

        yield Phase("ease", params, own_loss(features, head, task), extra=head, capturable=True)
        self.requires_grad_(False)
        rows = self.of_images(task, lambda x: torch.cat(self.spaces(x), dim=1))
        self.statistics.grow(len(task.classes), self.device, rows.shape[1])
        self.statistics.update(rows, task.labels - task.first_class)

    def spaces(self, x: Tensor) -> list[Tensor]:
        """Return features (B, dim) in the space of each task."""
        tasks = range(len(self.adapters))
        return vit.features_of_each(self.backbone, x, [self.adapters.by_block(t) for t in tasks])

    def prototypes(self, t: int, s: int) -> Tensor:
        """Return the prototypes (k, dim) of a task's classes in the space of task s; combined from others if s is
        later.
        """
        if s <= t:
            return self.statistics.means(t).split(self.dim, dim=1)[s]
        later = range(s, len(self.adapters))  # tasks whose classes have prototypes in both spaces
        here, there = (torch.cat([self.prototypes(u, space) for u in later]) for space in (t, s))
        return cosines(self.prototypes(t, t), here).softmax(1) @ there

    def score(self, features: list[Tensor], t: int) -> Tensor:
        """Return logits (B, k) of a task's classes for features in every space."""
        others = self.alpha / max(len(features) - 1, 1)
        return torch.stack(
            [
                (1 if s == t else others) * cosines(in_space, self.prototypes(t, s))
                for s, in_space in enumerate(features)
            ]
        ).sum(0)

    def forward(self, x: Tensor, task: int | None = None) -> Tensor:
        """See `Method.forward`. The network runs in the recipe's precision, cosines in float32."""
        features = [full(in_space) for in_space in self.spaces(x)]
        with outside_autocast(x):
            return torch.cat(
                [self.score(features, t) for t in ([task] if task is not None else range(len(features)))], dim=1
            )

    def columns(self, task: int) -> slice:
        """See `Method.columns`."""
        return self.statistics.columns(task)

    def forward_passes(self) -> int:
        """Return the number of tasks: each has a forward pass."""
        return len(self.adapters)
