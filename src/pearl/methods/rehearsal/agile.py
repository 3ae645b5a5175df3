"""AGILE: Attention-Guided Incremental Learning (Bhat, Renjith et al., CoLLAs 2024).

A shared autoencoder makes gates of the features; a vector per task, by which the code is multiplied, makes them the
task's own. An image passes through the gates and heads of all tasks, side by side. A classifier of tasks sees to it
that codes differ.
"""

from collections.abc import Iterator
from functools import partial
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pearl.data.batches import Batch, Task
from pearl.methods.base import Phase
from pearl.methods.common.average import Statistics
from pearl.methods.common.memory import Policy, Shown
from pearl.methods.rehearsal.er import Images
from pearl.methods.rehearsal.gates import repulsion
from pearl.methods.rehearsal.mean_teacher import Chance, Decay, MeanTeacher, Rehearsing, Tasks, Weight, on_short_tasks
from pearl.methods.rehearsal.tamil import Count, of
from pearl.nn.growing import TaskHeads, TaskTensors
from pearl.nn.precision import full, outside_autocast
from pearl.settings.born import Born
from pearl.settings.follow import Follows, stream_length


class Agile(Rehearsing):
    """Cross-entropy + task_loss_weight * cross-entropy of tasks - pairwise_weight * distance of gates + rehearsal.

    A task's vector and the weights of its head stay as the task left them; biases of heads go on training, as in the
    authors' code (`old_biases=false` freezes them). The classifier of tasks sees new images alone, whose task is always
    the same, so that its bias is enough; `task_of_memory` gives it remembered ones too. Both defaults are the authors'.
    It has the tasks to come from the start: among one alone there is nothing to tell, and the first task's vector would
    stay as it was drawn. New and remembered images pass the network separately, so that BatchNorm normalises each kind
    by its own statistics; compare with ER run so, `passes=separate`, which costs ER 2 to 20 points on digits.

    Options:
        code_dim: width of the autoencoder's code.
        tasks: how many the classifier of tasks begins with. `auto` is the stream's length; in a model, which never
            knows, always one more than there are.
        task_loss_weight: weight of the classifier of tasks.
        task_of_memory: tell the tasks of remembered images apart, too.
        pairwise_weight: weight of the distance of gates; the authors have 0.5 for TinyImageNet with 500 images.
        reg_weight: weight of the squared distance to the teacher's logits; 0.15 is theirs for CIFAR-100 with 500.
        old_biases: train the biases of earlier tasks' heads.
        ema_update_freq: probability of a step that the teacher follows it, see `MeanTeacher`; 0.08 is theirs for
            CIFAR-100 with 500.
        ema_alpha: its decay.
        ema_tasks: it is at most so many tasks long (ours, for short tasks); null leaves the rates as given. `auto` is
            null on a published benchmark with all its images and elsewhere 1.3, about theirs on CIFAR-100 in 5 tasks.
        ema_norms: running statistics of the teacher, see `Average`; the authors have its `own`.
        buffer_size: images kept; 200 and 500 are usual.
        minibatch_size: images shown again in each step, for either term.
        policy: which images are kept, see `Memory`.
    """

    phases = ("agile",)
    averaged = ("backbone", "heads", "encoder", "decoder", "vectors")

    def __init__(
        self,
        backbone: nn.Module,
        *,
        code_dim: Count = 256,
        tasks: Annotated[Count | Literal["auto"], Follows(stream_length), Born(1)] = "auto",
        task_loss_weight: Weight = 1.0,
        task_of_memory: bool = False,
        pairwise_weight: Weight = 0.1,
        reg_weight: Weight = 0.1,
        old_biases: bool = True,
        ema_update_freq: Chance = 0.05,
        ema_alpha: Decay = 0.999,
        ema_tasks: Annotated[Tasks, on_short_tasks(1.3)] = "auto",
        ema_norms: Statistics = "own",
        buffer_size: Images = 200,
        minibatch_size: Count = 32,
        policy: Policy = "reservoir",
    ) -> None:
        teacher = MeanTeacher(ema_update_freq, ema_alpha, 1.3 if ema_tasks == "auto" else ema_tasks, ema_norms)
        super().__init__(backbone, teacher, buffer_size=buffer_size, minibatch_size=minibatch_size, policy=policy)
        self.planned, self.task_loss_weight, self.task_of_memory = tasks, task_loss_weight, task_of_memory
        self.pairwise_weight, self.reg_weight, self.old_biases = pairwise_weight, reg_weight, old_biases
        self.encoder = nn.Sequential(nn.Linear(self.heads.dim, code_dim), nn.Sigmoid())
        self.decoder = nn.Sequential(nn.Linear(code_dim, self.heads.dim), nn.Sigmoid())
        self.vectors = TaskTensors()  # "t" (code_dim,)
        self.tasks = TaskHeads(code_dim)  # rows in blocks, as they were added

    def learn(self, task: Task) -> Iterator[Phase]:
        """Train all but what belongs to earlier tasks."""
        self.begin(task)
        start = nn.init.trunc_normal_(torch.empty(self.tasks.dim), std=0.02)
        self.vectors.add(f"{task.id}", start.to(self.device))
        rows = task.id + 2 if self.planned == "auto" else max(self.planned, task.id + 1)
        if new := rows - sum(self.tasks.sizes()):
            self.tasks.grow(new).to(self.device)
        self.requires_grad_(True)
        for t in range(task.id):
            self.vectors[f"{t}"].requires_grad_(False)
            self.heads[t].requires_grad_(False)
            self.heads[t].bias.requires_grad_(self.old_biases)
        yield self.phase("agile", task, partial(self.loss, task))

    def loss(self, task: Task, batch: Batch) -> Tensor:
        """New images among all classes, their tasks, the distance of gates, and the memory."""
        features = self.backbone(batch.x)
        codes, gates = self.coded(features)
        own, *others = (gate for gate in reversed(gates.unbind(1)))
        loss = F.cross_entropy(self.told_apart(features, gates), batch.y)
        loss = loss + self.pairwise_weight * repulsion(own, others)
        if self.task_loss_weight:
            loss = loss + self.task_loss(codes, torch.full_like(batch.y, task.id))
        loss = loss + self.rehearsed(task, self.reg_weight, beta=0.0)
        return loss if (old := self.shown(task)) is None else loss + self.told(old)

    def coded(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """For features (B, dim) all tasks' codes (B, tasks, code_dim) and gates (B, tasks, dim).

        In full precision: at first the gates of two tasks differ by less than bfloat16 can say.
        """
        vectors = torch.stack([self.vectors[f"{t}"] for t in range(len(self.heads))])
        with outside_autocast(features):
            codes = self.encoder(full(features))[:, None] * vectors
            return codes, self.decoder(codes)

    def told_apart(self, features: Tensor, gates: Tensor) -> Tensor:
        """Logits (B, classes seen), those of a task from the features through its gate."""
        return torch.cat([head(features * gates[:, t]) for t, head in enumerate(self.heads)], dim=1)

    def task_loss(self, codes: Tensor, tasks: Tensor) -> Tensor:
        """Cross-entropy of images' tasks (B,), told from the codes of these tasks."""
        return self.task_loss_weight * F.cross_entropy(self.tasks(of(codes, tasks)), tasks)

    def forward(self, x: Tensor, task: int | None = None) -> Tensor:
        """See `Method.forward`."""
        features = self.backbone(x)
        logits = self.told_apart(features, self.coded(features)[1])
        return logits if task is None else logits[:, self.columns(task)]

    def told(self, old: Shown) -> Tensor:
        """The loss of remembered images by their labels and tasks."""
        features = self.backbone(old.x)
        codes, gates = self.coded(features)
        loss = F.cross_entropy(self.told_apart(features, gates), old.y)
        return loss + self.task_loss(codes, old.tasks) if self.task_loss_weight and self.task_of_memory else loss

    def size(self) -> int:
        """Without the classifier of tasks, which is not asked."""
        return super().size() - sum(p.numel() for p in self.tasks.parameters())
