"""TAMiL: Task-Aware Information Routing from Common Representation Space in Lifelong Learning (Bhat et al., ICLR 2023).

Each task has a small network that gates the shared features and is also trained to reproduce them. An image uses the
gate that reproduces its features best, in rehearsal and prediction, without its task being given.
"""

from collections.abc import Iterator
from functools import partial
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from pearl.data.batches import Batch, Task
from pearl.methods.base import Phase
from pearl.methods.common.average import Statistics
from pearl.methods.common.memory import Policy, Shown
from pearl.methods.rehearsal.derpp import beta_of
from pearl.methods.rehearsal.er import Images
from pearl.methods.rehearsal.gates import repulsion
from pearl.methods.rehearsal.mean_teacher import Chance, Decay, MeanTeacher, Rehearsing, Tasks, Weight, on_short_tasks
from pearl.nn.precision import full, outside_autocast
from pearl.nn.task_modules import Grown
from pearl.settings.derived_defaults import DerivedDefault

Count = Annotated[int, Field(ge=1, strict=True)]


class Tamil(Rehearsing):
    """Cross-entropy through the task's own gate - pairwise_weight * distance of gates + rehearsal through chosen gates.

    The teacher uses the gate of a remembered image's task, the network chooses. Every weight continues to train,
    earlier gates through the memory. Logits, in task-IL too, are those of the chosen gate. The authors' network has all
    gates and logits from the start; here future ones do not exist.

    Options:
        code_dim: width of a gate's hidden layer.
        pairwise_weight: weight of the distance of gates.
        reg_weight: weight of the squared distance to the teacher's logits.
        beta: weight of remembered labels; `auto` is the authors' for 200 images, 1.0 for TinyImageNet and 0.5
            otherwise.
        ema_update_freq: probability per step that the teacher is updated, see `MeanTeacher`.
        ema_alpha: its decay.
        ema_tasks: maximum length of its average in tasks (ours, for short tasks); null keeps the given rates. `auto` is
            null on a published benchmark with all its images and elsewhere 1.3, about theirs on CIFAR-100 in 5 tasks.
        ema_norms: running statistics of the teacher, see `Average`; the authors have its `own`.
        buffer_size: stored images; 200 and 500 are usual.
        minibatch_size: rehearsed images per step, for either term.
        policy: rule for storing images, see `Memory`.
    """

    phases = ("tamil",)
    averaged = ("backbone", "heads", "gates")

    def __init__(
        self,
        backbone: nn.Module,
        *,
        code_dim: Count = 64,
        pairwise_weight: Weight = 0.1,
        reg_weight: Weight = 0.1,
        beta: Annotated[Weight | Literal["auto"], DerivedDefault(beta_of)] = "auto",
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
        self.pairwise_weight, self.reg_weight = pairwise_weight, reg_weight
        self.beta = 0.5 if beta == "auto" else beta
        dim = self.heads.dim
        self.gates = Grown(
            lambda: nn.Sequential(nn.Linear(dim, code_dim), nn.ReLU(), nn.Linear(code_dim, dim), nn.Sigmoid())
        )

    def learn(self, task: Task) -> Iterator[Phase]:
        """Train all parameters on the new task and the memory."""
        self.begin(task)
        self.gates.grow().to(self.device)
        yield self.phase("tamil", task, partial(self.loss, task))

    def loss(self, task: Task, batch: Batch) -> Tensor:
        """Return the loss: new images through their own gate, the distance of gates, and the memory."""
        features = self.backbone(batch.x)
        newest, *others = (gate for gate in reversed(self.opened(features).unbind(1)))
        loss = F.cross_entropy(self.heads(features * newest), batch.y)
        loss = loss + self.pairwise_weight * repulsion(newest, others)
        return loss + self.rehearsed(task, self.reg_weight, self.beta)

    def opened(self, features: Tensor) -> Tensor:
        """Return all tasks' gates (B, tasks, dim) for features (B, dim), in float32, since a choice depends on them."""
        with outside_autocast(features):
            return torch.stack([gate(full(features)) for gate in self.gates], dim=1)

    def features(self, x: Tensor) -> Tensor:
        """Return gated features (B, dim), each image's by the gate nearest to its features."""
        features = self.backbone(x)
        gates = self.opened(features)
        return features * of(gates, (gates - full(features)[:, None]).square().mean(2).argmin(1))

    def taught(self, old: Shown) -> Tensor:
        """Return the teacher's logits for remembered images, each through the gate of its task."""

        def told(averaged: "Tamil") -> Tensor:
            features = averaged.backbone(old.x)
            return averaged.heads(features * of(averaged.opened(features), old.tasks))

        return self.teacher.evaluated(self, told)


def of(gates: Tensor, tasks: Tensor) -> Tensor:
    """Return each image's gate (B, dim), that of its task (B,), from all (B, tasks, dim)."""
    return gates.gather(1, tasks[:, None, None].expand(-1, 1, gates.shape[2]))[:, 0]
