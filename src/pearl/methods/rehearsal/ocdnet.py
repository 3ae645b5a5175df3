"""OCD-Net: Learning from Students: Online Contrastive Distillation Network for General Continual Learning (IJCAI 2022).

Li et al. A student learns from new and remembered images, from contrast between them, and from which way they were
turned. Its moving average is the teacher, whose logits and embeddings of remembered images it keeps to, the more the
surer the teacher is; and which is asked in the end.
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
from pearl.nn.growing import Classifier, TaskHeads

TEMPERATURE = 0.07
DIM = 64  # of the embeddings
DISTILLED, COLLABORATIVE = 0.1, 0.3  # weights of what the teacher says, and of contrast and turns


class Unbiased(TaskHeads):
    """One linear classifier per task, without bias."""

    def block(self, classes: int) -> nn.Linear:
        """A classifier of one task."""
        return Classifier(self.dim, classes, bias=False)


class OcdNet(Rehearsing):
    """Rehearsal + 0.1 * distillation of logits and of embeddings + 0.3 * contrast and turns, the authors' weights.

    Their crop of turned images has 32 pixels whatever the images have, and on a CPU it overwrites the batch; here it
    is a copy of the images' size.

    Options:
        er_weight: weight of remembered labels; the authors have 0.5 for CIFAR-100, and 1.0 with 5,120 images.
        bernoulli_probability: that the teacher follows a step, see `MeanTeacher`; theirs for CIFAR-100 with 200 and 500
            images, 0.2 with 2,000 and 0.7 with 5,120.
        ema_alpha: its decay.
        ema_tasks: it is at most so many tasks long (ours, for short tasks); null leaves the rates as given. `auto` is
            null on a published benchmark with all its images and elsewhere 0.65, about theirs on CIFAR-100 in 5 tasks.
        ema_norms: running statistics of the teacher, see `Average`; the authors have its `own`.
        buffer_size: images kept; 200 and 500 are usual.
        minibatch_size: images shown again in each step.
        policy: which images are kept, see `Memory`.
    """

    couples = True
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
        """Train everything on the new task and the memory."""
        self.begin(task)
        yield self.phase("ocdnet", task, partial(self.loss, task))

    def loss(self, task: Task, batch: Batch) -> Tensor:
        """The sum of cross-entropy, what the teacher says, contrast and turns."""
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
        """What the teacher says of remembered images, against the student's logits (B, classes) and embeddings (B, 64).

        A squared distance counts by how probable the image's own class is to the teacher.
        """
        of_teacher = self.taught(old)
        teachers, target = of_teacher[:, :DIM], of_teacher[:, DIM:]
        sure = target.softmax(1).gather(1, old.y[:, None])[:, 0]
        apart = (sure * (logits - target).square().mean(1)).mean()
        return apart + contrast_across(teachers, embedded, old.y, TEMPERATURE)

    def taught(self, old: Shown) -> Tensor:
        """The teacher's embeddings of remembered images and behind them its logits (B, 64 + classes seen)."""

        def both(averaged: "OcdNet") -> Tensor:
            features = averaged.backbone(old.x)
            return torch.cat([averaged.embedded(features), averaged.heads(features)], dim=1)

        return self.teacher.asked(self, both)

    def embedded(self, features: Tensor) -> Tensor:
        """Embeddings (B, 64) of features (B, dim), of length 1."""
        return F.normalize(self.embedding(features).float(), dim=1)

    def forward(self, x: Tensor, task: int | None = None) -> Tensor:
        """What the teacher says, see `Method.forward`."""
        return self.teacher.asked(self, lambda averaged: Rehearsing.forward(averaged, x, task))

    def size(self) -> int:
        """Without what only the loss needs."""
        return sum(p.numel() for part in (self.backbone, self.heads) for p in part.parameters())


def _head(inputs: int, outputs: int) -> nn.Sequential:
    """Two hidden layers as wide as the features, and a linear one."""
    hidden = [[nn.Linear(inputs, inputs), nn.BatchNorm1d(inputs), nn.ReLU()] for _ in range(2)]
    return nn.Sequential(*hidden[0], *hidden[1], nn.Linear(inputs, outputs))


def turned_copies(x: Tensor) -> tuple[Tensor, Tensor]:
    """A part of each image (B, C, size, size), two thirds of its area, turned; and by how many quarters (B,).

    Each of the four turns comes as often as the others, to within one.
    """
    count, size = len(x), x.shape[-1]
    turns = (torch.arange(count) % 4)[torch.randperm(count)].to(x.device)
    boxes = draw_boxes(count, (size, size), (0.66, 0.67), torch.default_generator, ratio=(0.99, 1.0)).to(x.device)
    never = torch.zeros(count, dtype=torch.bool, device=x.device)
    parts = resized_crop(x.permute(0, 2, 3, 1), boxes, never, size)
    every = torch.stack([torch.rot90(parts, quarters, (2, 3)) for quarters in range(4)])
    return every[turns, torch.arange(count, device=x.device)], turns
