"""SSRE: Self-Sustaining Representation Expansion for Non-Exemplar Class-Incremental Learning (Zhu et al., CVPR 2022).

The first task trains the network. Later ones train parallel 1x1 branches of its 3x3 convolutions, which are merged
afterwards, so that the network does not grow. Images similar to an old class are used for distillation, the others for
new classes.
"""

from collections.abc import Iterator
from functools import partial
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from pearl.data.batches import Batch, Task
from pearl.errors import ConfigError
from pearl.methods.base import Phase
from pearl.methods.prototypes.non_exemplar import NonExemplar, old_classes
from pearl.nn.branches import SideBranches, absorb_norms, wide_convs
from pearl.nn.functional import functional_call
from pearl.nn.precision import full
from pearl.settings.declared import PhaseSpec


class SSRE(NonExemplar):
    """Mean of (1 - s) * cross-entropy + kd_weight * sum of s * |F(x) - F_old(x)| + protoAug_weight * prototypes' own.

    s is the largest cosine between an image's features and an old prototype. It gets no gradient here; in the authors'
    code it does. The distances are summed over a batch, as in their code, so that one process trains. Prototypes are
    means over all images of a class without augmentation, where the code uses an augmented pass without its last batch.
    The recipes augment by brightness, as the code does.

    After the first task BatchNorms are frozen and their scales merged into the convolutions, as in the authors' code,
    which removes them; here they remain with only the shift. The training of the first task is not published; here it
    uses the same cross-entropy. Every convolution wider than 1x1 except the stem has a branch. Grouped ones have
    grouped branches, so that few weights of `bsc` train, whose 3x3 convolutions are depthwise; the paper has no such
    network.

    Options:
        temp: temperature that divides all logits.
        protoAug_weight: weight of the cross-entropy of as many random prototypes as a batch has images.
        kd_weight: weight of the distances to the features of the network before the task.
    """

    phases = (PhaseSpec("ssre_first", "first"), PhaseSpec("ssre", "later"))

    def __init__(
        self,
        backbone: nn.Module,
        *,
        temp: Annotated[float, Field(gt=0)] = 0.1,
        protoAug_weight: Annotated[float, Field(ge=0)] = 10.0,
        kd_weight: Annotated[float, Field(ge=0)] = 1.0,
    ) -> None:
        super().__init__(backbone, temp=temp)
        self.protoAug_weight, self.kd_weight = protoAug_weight, kd_weight
        if not wide_convs(backbone):
            raise ConfigError("method=ssre: the backbone has no 3x3 convolutions for branches; use resnet18")

    def learn(self, task: Task) -> Iterator[Phase]:
        """Train all parameters on the first task, branches and heads on later ones; then compute the prototypes."""
        self.heads.grow(len(task.classes)).to(self.device)
        if not task.id:
            yield Phase("ssre_first", self.parameters(), self.first_loss, capturable=True)
            absorb_norms(self.backbone)
        else:
            self.backbone.requires_grad_(False)
            branches = SideBranches(wide_convs(self.backbone))
            params = [*branches.parameters(), *self.heads.parameters()]
            yield Phase("ssre", params, partial(self.loss, branches), extra=branches, capturable=True)
            branches.merge(self.backbone)
        self.observe(task)

    def first_loss(self, batch: Batch) -> Tensor:
        """Return the loss of the first task, which has no old classes."""
        return self.cross_entropy(self.heads(self.backbone(batch.x)), batch.y)

    def loss(self, branches: SideBranches, batch: Batch) -> Tensor:
        """Return the loss; the network without its branches is the teacher."""
        features = full(functional_call(self.backbone, branches.merged(self.backbone), (batch.x,)))
        with torch.no_grad():
            before = full(self.backbone(batch.x))
        means = self.statistics.means().to(features)
        near = resemblance(features.detach(), means)
        new = F.cross_entropy(self.heads(features) / self.temp, batch.y, reduction="none")
        moved = torch.linalg.vector_norm(features - before, dim=1)
        old = old_classes(batch.y, len(means))
        return (
            ((1 - near) * new).mean()
            + self.kd_weight * (near * moved).sum()
            + self.protoAug_weight * self.cross_entropy(self.heads(means[old]), old)
        )


def resemblance(features: Tensor, means: Tensor) -> Tensor:
    """Return the largest cosine (B,) between each of features (B, dim) and the means (classes, dim)."""
    return (F.normalize(features) @ F.normalize(means).T).amax(1)
