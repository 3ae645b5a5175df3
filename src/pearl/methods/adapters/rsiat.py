"""RSIAT: Representation-Steered Incremental Adapter-Tuning (Zhao et al., CVPR 2026).

SSIAT with steered features. The first task makes classes compact and separates them; later tasks keep features close to
a small projector's output for the features before the task, and that output away from old class means.
"""

from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from pearl.data.batches import Batch, Task
from pearl.methods.adapters.bottleneck import Adapters, Count, Dropout
from pearl.methods.adapters.ssiat import Ssiat
from pearl.methods.base import Phase
from pearl.methods.common.alignment import draws_of_classes
from pearl.methods.common.teacher import frozen
from pearl.nn import vit
from pearl.nn.precision import full
from pearl.settings.declared import PhaseSpec

Weight = Annotated[float, Field(ge=0)]
HIDDEN = 64  # of the projector's outer layers


class Projector(nn.Module):
    """z + output(W4 gelu(W3 gelu(W2 gelu(W1 z)))): predicts current features (B, dim) from old ones (B, dim)."""

    def __init__(self, dim: int, code: int, output: Literal["linear", "sigmoid"]) -> None:
        super().__init__()
        widths = dim, HIDDEN, code, HIDDEN, dim
        self.layers = nn.ModuleList(nn.Linear(*pair) for pair in pairwise(widths))
        self.output = output
        if output == "linear":  # the identity at first
            nn.init.zeros_(self.layers[-1].weight)  # type: ignore[arg-type]
            nn.init.zeros_(self.layers[-1].bias)  # type: ignore[arg-type]

    def forward(self, z: Tensor) -> Tensor:
        """See the class."""
        hidden = z
        for layer in self.layers[:-1]:
            hidden = F.gelu(layer(hidden))
        change = self.layers[-1](hidden)
        return z + (change.sigmoid() if self.output == "sigmoid" else change)


class Rsiat(Ssiat):
    """SSIAT with CosFace, a class-separating loss in the first task, and a projector in later ones.

    Defaults are the authors' for ImageNet-R (zjrzjrz/RSIAT 9401303): SGD with a cosine, 30 epochs, the first task at
    0.01, later ones at 0.0067, batches of 48, decay 1e-6; the projector at 1.7e-4 with decay 4e-3; alignment 10 epochs
    at the rate of later tasks. On CIFAR-100 they have 10 and 30 epochs, 0.018, batches of 64, decay 1.7e-4; scale 40,
    margin 0.1, rs_weight 0.2, rs_warmup 7, rs_negative 0.5, rs_margin 0.3, align_weight 1, orthogonal_weight 0.4, code
    256. As in `ssiat`, moves are those of the same image.

    The authors' projector ends in a sigmoid: it initially adds about 0.5 to each coordinate and can only add. Here the
    default is a linear layer with zero weights. Heads of earlier tasks do not train. The first task's loss compares the
    images of a batch, so one process learns.

    Options:
        ffn_num: width of the adapters.
        dropout: dropout of their hidden units in training.
        scale: factor of the cosines in the loss and as logits (s).
        margin: subtracted from the label's cosine in training (m).
        sigma: width of the Gaussian that weights images' moves by distance to a mean.
        draws: features per class in an epoch of the alignment.
        rs_weight: weight of the separation in the first task (lambda), reached after `rs_warmup` epochs.
        rs_warmup: epochs over which it rises from 0.
        rs_negative: weight of pairs of different classes in it (alpha).
        rs_margin: cosine below which such a pair has no loss (delta).
        align_weight: weight of the squared distance to projected old features (beta).
        orthogonal_weight: weight of the cosine between projected old means and projected old features (gamma).
        code: width of the projector's middle layer.
        output: last layer of the projector: `linear`, or `sigmoid` as in the authors' code.
    """

    batch_coupled = True
    may_not_matter = ("rs_margin",)  # if no pair of images is that far apart
    phases = (
        PhaseSpec("rsiat_first", "first"),
        PhaseSpec("rsiat", "later", groups=("body", "projector")),
        PhaseSpec("rsiat_align", "later", draws_of_classes, features_only=True),
    )

    def __init__(
        self,
        backbone: nn.Module,
        *,
        ffn_num: Count = 64,
        dropout: Dropout = 0.1,
        scale: Annotated[float, Field(gt=0)] = 50.0,
        margin: Weight = 0.2,
        sigma: Annotated[float, Field(gt=0)] = 4.0,
        draws: Count = 256,
        rs_weight: Weight = 0.5,
        rs_warmup: Count = 4,
        rs_negative: Weight = 1.5,
        rs_margin: Annotated[float, Field(ge=-1, le=1)] = 0.4,
        align_weight: Weight = 3.0,
        orthogonal_weight: Weight = 1.5,
        code: Count = 384,
        output: Literal["linear", "sigmoid"] = "linear",
    ) -> None:
        super().__init__(backbone, ffn_num=ffn_num, dropout=dropout, scale=scale, sigma=sigma, draws=draws)
        self.scale, self.margin = scale, margin
        self.rs_weight, self.rs_warmup, self.rs_negative, self.rs_margin = rs_weight, rs_warmup, rs_negative, rs_margin
        self.align_weight, self.orthogonal_weight = align_weight, orthogonal_weight
        self.projector = Projector(self.dim, code, output)

    def learn(self, task: Task) -> Iterator[Phase]:
        """Train adapters and head, from the second task on with the projector; then continue as SSIAT."""
        head = self.heads.grow(len(task.classes)).to(self.device)
        nn.init.trunc_normal_(head.weight, std=0.02)
        body = [*self.adapters.parameters(), *head.parameters()]
        before = self.of_images(task, self.features) if task.id else None
        if before is None:
            self.only(body)
            phase = Phase("rsiat_first", body, lambda batch: self.first_loss(head, phase, batch))
        else:
            groups = {"body": body, "projector": [*self.projector.parameters()]}
            self.only([*body, *groups["projector"]])
            means = self.statistics.means().to(head.weight)
            phase = Phase(
                "rsiat", groups, partial(self.loss, task, head, frozen(self.adapters), means), capturable=True
            )
        yield phase
        yield from self.settle(task, before, "rsiat_align")

    def first_loss(self, head: nn.Module, phase: Phase, batch: Batch) -> Tensor:
        """Return CosFace plus the separation of classes, whose weight rises epoch by epoch."""
        features = full(self.features(batch.x))
        weight = self.rs_weight * min(1.0, phase.done // max(phase.per_epoch, 1) / self.rs_warmup)
        loss = self.cosface(head(features), batch.y)
        return loss + weight * separation(features, batch.y, self.rs_negative, self.rs_margin)

    def loss(self, task: Task, head: nn.Module, teacher: Adapters, means: Tensor, batch: Batch) -> Tensor:
        """Return CosFace plus the terms with the projector; only the projector gets gradients from the last one."""
        features = full(self.features(batch.x))
        with torch.no_grad():
            old = full(vit.features(self.backbone, batch.x, adapters=teacher.by_block()))
        projected = full(self.projector(old))
        cosines = F.normalize(full(self.projector(means))) @ F.normalize(projected).T
        loss = self.cosface(head(features), batch.y - task.first_class)
        return loss + self.align_weight * F.mse_loss(features, projected) + self.orthogonal_weight * cosines.mean()

    def cosface(self, logits: Tensor, y: Tensor) -> Tensor:
        """Return the cross-entropy with the margin subtracted from the label's cosine (Wang et al., CVPR 2018)."""
        label = torch.arange(logits.shape[1], device=y.device) == y[:, None]
        return F.cross_entropy(logits - self.scale * self.margin * label, y)

    def size(self) -> int:
        """Count all but the projector, which predictions do not use."""
        return super().size() - sum(parameter.numel() for parameter in self.projector.parameters())


def separation(features: Tensor, y: Tensor, negative: float, margin: float) -> Tensor:
    """Return the mean of 1 - cos over pairs of one class + negative * mean of relu(cos - margin) over other pairs.

    Pairs are ordered pairs of different images of a batch: features (B, dim), labels (B,).
    """
    cosines = F.normalize(features) @ F.normalize(features).T
    same = (y[:, None] == y).to(cosines) - torch.eye(len(y), dtype=cosines.dtype, device=cosines.device)
    other = (y[:, None] != y).to(cosines)
    near = (F.relu(1 - cosines) * same).sum() / (same.sum() + 1e-6)
    return near + negative * (F.relu(cosines - margin) * other).sum() / (other.sum() + 1e-6)
