"""SSIAT: Semantically-Shifted Incremental Adapter-Tuning is a Continual ViTransformer (Tan et al., CVPR 2024).

One set of adapters is trained through all tasks without any constraint, so that features of old classes drift. The
drift is estimated from new images. Heads of all tasks are then aligned on features sampled around the means.
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
from pearl.nn.task_modules import CosineHeads
from pearl.settings.declared import PhaseSpec

FLOOR = 1e-3  # added to variances


class Ssiat(Aligned, FrozenVit):
    """A frozen ViT with one set of adapters for all tasks, and heads of cosines.

    Defaults are the authors' for ImageNet-R and CIFAR-100: SGD at 0.01 with a cosine, decay 5e-4; the first task 20
    epochs in batches of 48, later ones 10; alignment 5 epochs of 256 features a class in batches of as many. Means are
    multiplied by 0.9 + 0.1 (task + 1) / tasks for sampling; by number of tasks, so that tasks may have any sizes. As in
    the paper, moves are those of the same image: the authors' code takes features before and after from different
    shuffled, augmented passes, so that it subtracts features of different images. Covariances do not change. Their
    triangles are stored, dim (dim + 1) / 2 numbers per class.

    Options:
        ffn_num: width of the adapters.
        dropout: dropout of their hidden units in training.
        scale: factor of the cosines in the loss and as logits.
        sigma: width of the Gaussian that weights images' moves by distance to a mean.
        draws: features per class in an epoch of the alignment.
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
        """Train adapters and head, estimate the drift of features, align all heads."""
        head = self.heads.grow(len(task.classes)).to(self.device)
        nn.init.trunc_normal_(head.weight, std=0.02)
        before = self.of_images(task, self.features) if task.id else None
        params = self.only([*self.adapters.parameters(), *head.parameters()])
        yield Phase("ssiat" if task.id else "ssiat_first", params, own_loss(self.features, head, task), capturable=True)
        yield from self.settle(task, before, "ssiat_align")

    def settle(self, task: Task, before: Tensor | None, name: str) -> Iterator[Phase]:
        """Move old means as the task's features moved from `before` (N, dim), add the task's distributions, align all
        heads.
        """
        self.requires_grad_(False)
        after = self.of_images(task, self.features)
        if before is not None:
            self.statistics.move(drift(before, after, self.statistics.means(), self.sigma))
        self.remember(task, after)
        if task.id:
            yield alignment(name, self.heads, self.draws_of_all())
            self.requires_grad_(False)

    def draws_of_all(self) -> GaussianDraws:
        """Return the distributions to sample features of all classes from; means of earlier tasks are shortened."""
        return self.gaussians(self.draws, FLOOR, shrink=True)

    def features(self, x: Tensor) -> Tensor:
        """Return features (B, dim) with the adapters."""
        return vit.features(self.backbone, x, adapters=self.adapters.by_block())
