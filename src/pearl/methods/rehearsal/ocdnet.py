"""OCD-Net: Learning from Students: Online Contrastive Distillation Network for General Continual Learning (IJCAI 2022).

Li et al. A student trains on new and remembered images, with contrast between them and rotation prediction. Its moving
average is the teacher: the student distils its logits and embeddings of remembered images, weighted by its confidence.
Predictions are the teacher's.
"""

from collections.abc import Iterator
from functools import partial
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pearl.data.augment import draw_boxes, resized_crop
from pearl.data.batches import Batch, Task
from pearl.methods.base import Phase
from pearl.methods.common.average import Statistics
from pearl.methods.common.memory import Policy, Shown
from pearl.methods.rehearsal.contrast import contrast_across, supervised_contrast
from pearl.methods.rehearsal.er import Images
from pearl.methods.rehearsal.mean_teacher import Chance, Decay, MeanTeacher, Rehearsing, Tasks, Weight, on_short_tasks
from pearl.methods.rehearsal.tamil import Count
from pearl.nn.precision import full
from pearl.nn.task_modules import LinearHead, TaskHeads

TEMPERATURE = 0.07
DIM = 64  # dimension of the embeddings
DISTILLED, COLLABORATIVE = 0.1, 0.3  # weights of the distillation, and of contrast and rotations


class Unbiased(TaskHeads):
    """One linear classifier per task, without bias."""

    def block(self, classes: int) -> nn.Linear:
        """Return a classifier for one task."""
        return LinearHead(self.dim, classes, bias=False)


class OcdNet(Rehearsing):
    """Rehearsal + 0.1 * distillation of logits and embeddings + 0.3 * contrast and rotations, with the authors'
    weights.

    Their crop of rotated images always has 32 pixels, and on a CPU it overwrites the batch; here it is a copy with the
    images' size.

    Options:
        er_weight: weight of remembered labels; the authors have 0.5 for CIFAR-100, and 1.0 with 5,120 images.
        bernoulli_probability: probability per step that the teacher is updated, see `MeanTeacher`; theirs for CIFAR-100
            with 200 and 500 images, 0.2 with 2,000 and 0.7 with 5,120.
        ema_alpha: its decay.
        ema_tasks: maximum length of its average in tasks (ours, for short tasks); null keeps the given rates. `auto` is
            null on a published benchmark with all its images and elsewhere 0.65, about theirs on CIFAR-100 in 5 tasks.
        ema_norms: running statistics of the teacher, see `Average`; the authors have its `own`.
        buffer_size: stored images; 200 and 500 are usual.
        minibatch_size: rehearsed images per step.
        policy: rule for storing images, see `Memory`.
    """

    batch_coupled = True
    phases = ("ocdnet",)
    averaged = ("backbone", "heads", "embedding")

    def __init__(
        self,
        backbone: nn.Module,
        *,
        er_weight: Weight = 0.5,
        bernoulli_probability: Chance = 0.1,
        ema_alpha: Decay = 0.999,
        ema_tasks: Annotated[Tasks, on_short_tasks(0.65)] = "auto",
        ema_norms: Statistics = "own",
        buffer_size: Images = 200,
        minibatch_size: Count = 32,
        policy: Policy = "reservoir",
    ) -> None:
        teacher = MeanTeacher(bernoulli_probability, ema_alpha, 0.65 if ema_tasks == "auto" else ema_tasks, ema_norms)
        super().__init__(backbone, teacher, buffer_size=buffer_size, minibatch_size=minibatch_size, policy=policy)
        self.er_weight = er_weight
        dim = self.heads.dim
        self.heads = Unbiased(dim)
        self.turns = _head(dim, 4)
        self.embedding = _head(dim, DIM)

    def learn(self, task: Task) -> Iterator[Phase]:
        """Train all parameters on the new task and the memory."""
        self.begin(task)
        yield self.phase("ocdnet", task, partial(self.loss, task))

    def loss(self, task: Task, batch: Batch) -> Tensor:
        """Return the sum of cross-entropy, distillation, contrast and rotations."""
        features = self.backbone(batch.x)
        x, y, z = batch.x, batch.y, self.embedded(features)
        loss = F.cross_entropy(self.heads(features), y)
        if (old := self.shown(task)) is not None:
            features = self.backbone(old.x)
            logits, embedded = self.heads(features), self.embedded(features)
            loss = loss + self.er_weight * F.cross_entropy(logits, old.y)
            loss = loss + DISTILLED * self.distilled(old, logits, embedded)
            x, y, z = torch.cat([x, old.x]), torch.cat([y, old.y]), torch.cat([z, embedded])
        turned, turns = turned_copies(x)
        features = self.backbone(turned)
        alike = supervised_contrast(torch.cat([z, self.embedded(features)]), y.repeat(2), TEMPERATURE)
        return loss + COLLABORATIVE * (alike + F.cross_entropy(self.turns(features), turns))

    def distilled(self, old: Shown, logits: Tensor, embedded: Tensor) -> Tensor:
        """Return the distillation loss of remembered images for the student's logits (B, classes) and embeddings (B,
        64).

        Squared distances are weighted by the teacher's probability of the image's class.
        """
        of_teacher = self.taught(old)
        teachers, target = of_teacher[:, :DIM], of_teacher[:, DIM:]
        sure = target.softmax(1).gather(1, old.y[:, None])[:, 0]
        apart = (sure * (logits - target).square().mean(1)).mean()
        return apart + contrast_across(teachers, embedded, old.y, TEMPERATURE)

    def taught(self, old: Shown) -> Tensor:
        """Return the teacher's embeddings of remembered images followed by its logits (B, 64 + classes seen)."""

        def both(averaged: "OcdNet") -> Tensor:
            features = averaged.backbone(old.x)
            return torch.cat([averaged.embedded(features), averaged.heads(features)], dim=1)

        return self.teacher.evaluated(self, both)

    def embedded(self, features: Tensor) -> Tensor:
        """Return embeddings (B, 64) of features (B, dim), with length 1."""
        return F.normalize(full(self.embedding(features)), dim=1)

    def forward(self, x: Tensor, task: int | None = None) -> Tensor:
        """Return the teacher's logits, see `Method.forward`."""
        return self.teacher.evaluated(self, lambda averaged: Rehearsing.forward(averaged, x, task))

    def size(self) -> int:
        """Count all but the parts that only the loss uses."""
        return sum(p.numel() for part in (self.backbone, self.heads) for p in part.parameters())


def _head(inputs: int, outputs: int) -> nn.Sequential:
    """Return two hidden layers of the features' width, and a linear one."""
    hidden = [[nn.Linear(inputs, inputs), nn.BatchNorm1d(inputs), nn.ReLU()] for _ in range(2)]
    return nn.Sequential(*hidden[0], *hidden[1], nn.Linear(inputs, outputs))


def turned_copies(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return a rotated crop of two thirds of each image's area (B, C, size, size), and its quarter turns (B,).

    The four rotations are equally frequent, up to one.
    """
    count, size = len(x), x.shape[-1]
    turns = (torch.arange(count) % 4)[torch.randperm(count)].to(x.device)
    boxes = draw_boxes(count, (size, size), (0.66, 0.67), torch.default_generator, ratio=(0.99, 1.0)).to(x.device)
    never = torch.zeros(count, dtype=torch.bool, device=x.device)
    parts = resized_crop(x.permute(0, 2, 3, 1), boxes, never, size)
    every = torch.stack([torch.rot90(parts, quarters, (2, 3)) for quarters in range(4)])
    return every[turns, torch.arange(count, device=x.device)], turns
