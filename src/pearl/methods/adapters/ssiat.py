"""SSIAT: Semantically-Shifted Incremental Adapter-Tuning is a Continual ViTransformer (Tan et al., CVPR 2024).

One set of adapters is trained through all tasks, without any constraint. So the features of old classes move; how far
is judged by how far new images did. Heads of all tasks are then aligned on features that are drawn around the means.
"""

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field
from torch import Tensor, nn

from pearl.data.batches import Task
from pearl.methods.adapters.bottleneck import Adapters, Bottleneck, Count, Dropout
from pearl.methods.base import Phase, own_loss
from pearl.methods.common.alignment import Aligned, alignment, draws_of_classes
from pearl.methods.common.frozen_vit import FrozenVit
from pearl.methods.common.gaussians import GaussianDraws, drift
from pearl.nn import vit
from pearl.nn.growing import CosineHeads
from pearl.settings.declared import PhaseSpec

FLOOR = 1e-3  # added to variances


class Ssiat(Aligned, FrozenVit):
    """A frozen ViT with one set of adapters for all tasks, and heads of cosines.

    Defaults are the authors' for ImageNet-R and CIFAR-100: SGD at 0.01 with a cosine, decay 5e-4; the first task 20
    epochs in batches of 48, later ones 10; alignment 5 epochs of 256 features a class in batches of as many. A mean is
    drawn from as (0.9 + 0.1 (its task + 1) / tasks) of itself, by number of tasks, so that they may have any sizes. As
    in the paper, moves are those of an image: the authors' code takes the features before from one shuffled, augmented
    pass and those after from another, so that it subtracts features of different images. Covariances do not move.
    Their triangles are kept, dim (dim + 1) / 2 numbers a class.

    Options:
        ffn_num: width of the adapters.
        dropout: of their hidden units, in training.
        scale: of the cosines in a loss and as logits.
        sigma: distance at which an image's move counts for a mean.
        draws: features that an epoch of the alignment draws for each class.
    """

    phases = (
        PhaseSpec("ssiat_first", "first"),
        PhaseSpec("ssiat", "later"),
        PhaseSpec("ssiat_align", "later", draws_of_classes, features_only=True),
    )
    heads: CosineHeads

    def __init__(
        self,
        backbone: nn.Module,
        *,
        ffn_num: Count = 64,
        dropout: Dropout = 0.1,
        scale: Annotated[float, Field(gt=0)] = 20.0,
        sigma: Annotated[float, Field(gt=0)] = 4.0,
        draws: Count = 256,
    ) -> None:
        super().__init__(backbone)
        depth = len(backbone.blocks)  # type: ignore[arg-type]
        self.adapters = Adapters(range(depth), lambda: Bottleneck(self.dim, ffn_num, scale=0.1, dropout=dropout))
        self.heads = CosineHeads(self.dim, scale)
        self.sigma, self.draws = sigma, draws

    def learn(self, task: Task) -> Iterator[Phase]:
        """Train adapters and head, see how far features moved, align all heads."""
        head = self.heads.grow(len(task.classes)).to(self.device)
        nn.init.trunc_normal_(head.weight, std=0.02)
        before = self.of_images(task, self.features) if task.id else None
        params = self.only([*self.adapters.parameters(), *head.parameters()])
        yield Phase("ssiat" if task.id else "ssiat_first", params, own_loss(self.features, head, task), steady=True)
        yield from self.settle(task, before, "ssiat_align")

    def settle(self, task: Task, before: Tensor | None, name: str) -> Iterator[Phase]:
        """Move old means as the task's features moved from `before` (N, dim), remember the task, align all heads."""
        self.requires_grad_(False)
        after = self.of_images(task, self.features)
        if before is not None:
            self.statistics.move(drift(before, after, self.statistics.means(), self.sigma))
        self.remember(task, after)
        if task.id:
            yield alignment(name, self.heads, self.draws_of_all())
            self.requires_grad_(False)

    def draws_of_all(self) -> GaussianDraws:
        """Return what features of all classes are drawn from; means of earlier tasks are shortened."""
        return self.gaussians(self.draws, FLOOR, shrink=True)

    def features(self, x: Tensor) -> Tensor:
        """Features (B, dim) with the adapters."""
        return vit.features(self.backbone, x, adapters=self.adapters.by_block())
