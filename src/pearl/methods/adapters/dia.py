"""DIA: Dynamic Integration of Task-Specific Adapters for Class Incremental Learning (Li et al., CVPR 2025).

Each task has an adapter and a signature in every block. Each token mixes the adapters by the similarity to their
signatures. During training, the features of background patches are kept by distillation; afterwards the heads are
trained on prototypes of old classes, corrected by similar patches of new images.
"""

import math
from collections.abc import Iterator
from functools import partial
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from pearl.data.batches import Batch, Task
from pearl.methods.adapters.bottleneck import Adapters, Bottleneck, mixed
from pearl.methods.base import Phase
from pearl.methods.common.class_moments import ClassMoments
from pearl.methods.common.frozen_vit import FrozenVit
from pearl.nn import vit
from pearl.nn.precision import full, outside_autocast
from pearl.nn.task_modules import Grown
from pearl.settings.declared import PhaseSpec

TINY = 1e-6

Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, le=1)]
Single = Literal["cosine", "softmax"]


class SignedAdapter(nn.Module):
    """An adapter without biases, and the signature: the direction of its tokens."""

    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self.adapter = Bottleneck(dim, width, bias=False)
        self.signature = nn.Parameter(torch.empty(dim).uniform_(-1, 1))


class Integration(nn.Module):
    """The adapters of all tasks in one block, mixed token by token."""

    def __init__(self, dim: int, width: int, single: Single) -> None:
        super().__init__()
        self.tasks, self.single = Grown(lambda: SignedAdapter(dim, width)), single

    def first(self, tasks: int) -> list[SignedAdapter]:
        """Return the adapters of the first tasks."""
        return [*self.tasks][:tasks]

    def weights(self, tokens: Tensor, tasks: int) -> Tensor:
        """Return the weights (B, n, tasks) of the first tasks' adapters for tokens (B, n, dim)."""
        with outside_autocast(tokens):
            signatures = torch.stack([unit.signature for unit in self.first(tasks)])
            cosines = F.normalize(full(tokens), dim=2) @ F.normalize(signatures, dim=1).T
        return cosines if tasks == 1 and self.single == "cosine" else cosines.softmax(2)

    def forward(self, tokens: Tensor, tasks: int) -> Tensor:
        """Map tokens (B, n, dim) to the sum that the first tasks' adapters add (B, n, dim)."""
        return mixed([unit.adapter for unit in self.first(tasks)], tokens, self.weights(tokens, tasks))


class Dia(FrozenVit):
    """A frozen ViT with an adapter per task beside each MLP, and heads that are aligned on prototypes.

    No code is published; this implements the paper's equations. Settings are the paper's: 20 epochs at 0.015 with a
    cosine, batches of 32. Not stated, and chosen here: SGD with momentum 0.9 and weight decay 5e-4; 5 epochs of
    alignment, none after the first task; adapters without biases whose input is the tokens before the MLP's norm layer;
    random initial signatures; tokens after the last norm layer in the loss and in prototypes; angles in the network
    being trained. Negative cosines count as 0 in the correction of prototypes, since otherwise the ratio of difference
    to sum is unbounded. Alignment compares the patches of a whole batch with each prototype, so one process learns.

    The alignment uses images of the newest task only. Their cross-entropy among all classes (`align_among=all`, the
    printed equation) therefore lowers every old class on real features, which prototypes do not compensate: about half
    of all predictions fall into the newest task. The default compares an image only with the classes of its task; the
    prototypes, which all classes have, compare the tasks.

    Options:
        width: width of an adapter.
        single: weight of the adapter of a single task: `cosine` of token and signature, as in the paper, which jumps to
            about a half with the second task; or `softmax`, always 1.
        pdl: weight of the patch-level distillation, from the second task on.
        prototypes: classes drawn for each batch of the alignment.
        beta: share of an old class's prototype that is not corrected.
        align_among: classes in the alignment's cross-entropy of images: `own`, those of their task, or `all` classes
            seen. That of prototypes is among all.
    """

    batch_coupled = True
    phases = ("dia", PhaseSpec("dia_align", "later"))

    def __init__(
        self,
        backbone: nn.Module,
        *,
        width: Count = 8,
        single: Single = "cosine",
        pdl: Annotated[float, Field(ge=0)] = 0.1,
        prototypes: Count = 32,
        beta: Share = 0.7,
        align_among: Literal["own", "all"] = "own",
    ) -> None:
        super().__init__(backbone)
        depth = len(backbone.blocks)  # type: ignore[arg-type]
        self.adapters = Adapters(range(depth), lambda: Integration(self.dim, width, single))
        self.pdl, self.prototypes, self.beta, self.align_among = pdl, prototypes, beta, align_among
        self.statistics = ClassMoments(self.dim)

    def learn(self, task: Task) -> Iterator[Phase]:
        """Train adapters, signatures and the head of the new task; then all heads on images and prototypes."""
        t, known = task.id, task.first_class
        head = self.heads.grow(len(task.classes)).to(self.device)
        new = [adapter.tasks.grow().to(self.device) for adapter in self.adapters.values()]  # type: ignore[operator,union-attr]
        params = self.only(parameter for part in (*new, head) for parameter in part.parameters())

        def loss(batch: Batch) -> Tensor:
            features, patches = self.seen(batch.x, t + 1)
            adapter = F.cross_entropy(head(features), batch.y - known)
            return adapter + self.pdl * self.moved(batch.x, features, patches, t) if t and self.pdl else adapter

        yield Phase("dia", params, loss, capturable=True)
        self.requires_grad_(False)
        self.statistics.grow(len(task.classes), self.device)
        self.statistics.update(self.of_images(task, self.features), task.labels - known)
        if t:
            means, params = self.statistics.means().to(head.weight), self.only(self.heads.parameters())
            yield Phase("dia_align", params, lambda batch: self.aligned(batch, means, known))
        self.requires_grad_(False)

    def moved(self, x: Tensor, features: Tensor, patches: Tensor, tasks: int) -> Tensor:
        """Return the mean angle of patches (B, n, dim) to those of the network before the task, weighted towards the
        background.
        """
        with torch.no_grad():
            _, before = self.seen(x, tasks)
        with outside_autocast(x):
            features, patches, before = (F.normalize(full(part), dim=-1) for part in (features, patches, before))
            return (foreign(features, patches).detach() * (patches - before).norm(dim=2)).mean()

    def aligned(self, batch: Batch, means: Tensor, known: int) -> Tensor:
        """Return the cross-entropy of a batch's images, plus that of prototypes from `means` among all classes."""
        with torch.no_grad():
            features, patches = map(full, self.seen(batch.x, len(self.heads)))
            labels = torch.randint(len(means), (self.prototypes,)).to(means.device)
            drawn = means[labels]
            with outside_autocast(batch.x):
                moved = calibrated(drawn, features, patches, self.beta)
            prototypes = torch.where((labels < known)[:, None], moved, drawn)
        logits, first = (self.heads[-1](features), known) if self.align_among == "own" else (self.heads(features), 0)
        return F.cross_entropy(logits, batch.y - first) + F.cross_entropy(self.heads(prototypes), labels)

    def seen(self, x: Tensor, tasks: int) -> tuple[Tensor, Tensor]:
        """Return features (B, dim) and patches (B, n, dim) of the network after this number of tasks."""
        adapters = {block: partial(adapter, tasks=tasks) for block, adapter in self.adapters.by_block().items()}
        adapter, _ = vit.tokens(self.backbone, x, adapters=adapters)
        return vit.pool(self.backbone, adapter), adapter[:, self.backbone.num_prefix_tokens :]

    def features(self, x: Tensor) -> Tensor:
        """Return features (B, dim) with all tasks' adapters, mixed per token, in a single pass."""
        return self.seen(x, len(self.heads))[0]


def foreign(features: Tensor, patches: Tensor) -> Tensor:
    """Return angles (B, n) between unit features (B, dim) and patches (B, n, dim): 0 for equal directions, 1 for
    opposite.
    """
    cosines = (patches @ features[:, :, None])[..., 0]
    return cosines.clamp(-1, 1).arccos() / math.pi


def calibrated(means: Tensor, features: Tensor, patches: Tensor, beta: float) -> Tensor:
    """Replace a share 1 - beta of each prototype (k, dim) by similar patches (B, n, dim).

    The weight of a patch is how much nearer it is to the prototype than to its own image's feature (B, dim).
    """
    unit = F.normalize(patches, dim=2)
    near = (unit @ F.normalize(means, dim=1).T).clamp(min=0)  # (B, n, k)
    to_image = (unit @ F.normalize(features, dim=1)[:, :, None]).clamp(min=0)
    nearer = ((near - to_image) / (near + to_image + TINY)).clamp(min=0).flatten(0, 1)
    return beta * means + (1 - beta) * nearer.softmax(0).T @ patches.flatten(0, 1)
