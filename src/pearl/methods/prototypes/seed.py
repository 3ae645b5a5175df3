"""SEED: Divide and not Forget, an Ensemble of Selectively Trained Experts (Rypesc et al., ICLR 2024).

The first tasks train an expert each. A later task fine-tunes the expert in whose features the new classes overlap
least. Every expert stores a normal distribution of each class since its creation; predictions average all experts.
"""

import copy
import math
from collections.abc import Iterator
from functools import partial
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from pearl.data.batches import Batch, Task
from pearl.methods.base import Method, Phase
from pearl.methods.common.class_moments import ClassMoments
from pearl.methods.common.teacher import frozen
from pearl.nn.precision import full
from pearl.nn.task_modules import Grown, TaskTensors
from pearl.settings.declared import PhaseSpec

LEAST = 1e-8  # initial addition to variances; increased tenfold until a covariance is positive definite
CHUNK = 128  # images per pass
UNKNOWN = -1e8  # log-density of a class that is unknown to an expert

Count = Annotated[int, Field(ge=1)]


class Seed(Method):
    """Experts of the backbone's structure, each with a linear layer to few features, and normal distributions.

    Defaults are the authors' for CIFAR-100 in 10 tasks (grypesc/SEED 538dcc1): 5 experts; SGD 0.05, batches of 128,
    gradients clipped at norm 1; a new expert 200 epochs, decay 5e-4, a tenth of the rate after 60, 120 and 160;
    fine-tuning 100 epochs without decay, a tenth after 30, 60 and 80. They have a ResNet-32 on CIFAR-100. A new expert
    is initialised with the first one's current weights. Their 1x1 convolution to 64 channels before pooling is
    equivalent to a linear layer after it. Distributions include mirrored images, and do not change when their expert is
    fine-tuned.

    Options:
        experts: maximum experts.
        features: dimension of an expert's distributions.
        alpha: share of the squared distance to the features before fine-tuning in its loss.
        temperature: temperature of an expert's probabilities.
    """

    task_local_loss = True
    phases = (
        PhaseSpec("seed", lambda task: task.id < task.options["experts"]),
        PhaseSpec("seed_finetune", lambda task: task.id >= task.options["experts"]),
    )

    def __init__(
        self,
        backbone: nn.Module,
        *,
        experts: Count = 5,
        features: Count = 64,
        alpha: Annotated[float, Field(ge=0, le=1)] = 0.99,
        temperature: Annotated[float, Field(gt=0)] = 3.0,
    ) -> None:
        super().__init__(backbone)
        self.most, self.width, self.alpha, self.temperature = experts, features, alpha, temperature
        self.copies = Grown(lambda: copy.deepcopy(self.backbone))  # the second expert and later ones
        self.bottlenecks = Grown(lambda: nn.Linear(self.heads.dim, features))
        self.statistics = ClassMoments(features)  # of the first expert
        self.gaussians = TaskTensors(buffers=True)  # "t.j.mean" (k, features), "t.j.root" (k, features, features)

    def train(self, mode: bool = True) -> "Seed":
        """Set the mode; fine-tuning keeps running statistics."""
        super().train(mode and len(self.statistics) < self.most)
        return self

    def learn(self, task: Task) -> Iterator[Phase]:
        """Train a new expert, or fine-tune the chosen one; then compute distributions in the features of all."""
        self.requires_grad_(False)
        head = nn.Linear(self.width, len(task.classes)).to(self.device)
        if task.id < self.most:
            if task.id:
                self.copies.grow()
            self.bottlenecks.grow().to(self.device)
            if task.id:
                self.bottlenecks[-1].load_state_dict(self.bottlenecks[0].state_dict())
            params = [*self.of_expert(task.id), *head.parameters()]
            yield Phase("seed", params, partial(self.loss, task, task.id, head), extra=head, capturable=True)
        else:
            chosen = self.least_overlap(task)
            teacher = frozen(nn.ModuleList([self.network(chosen), self.bottlenecks[chosen]]))
            params = [*self.of_expert(chosen), *head.parameters()]
            loss = partial(self.finetuning_loss, task, chosen, head, teacher)
            yield Phase("seed_finetune", params, loss, extra=head, capturable=True)
        self.requires_grad_(False)
        self.statistics.grow(len(task.classes), self.device)
        for j in range(len(self.bottlenecks)):
            features = self.features_of(task, j)
            if not j:
                self.statistics.update(features[:, 0], task.labels - task.first_class)
            mean, root = distributions(features, task.labels - task.first_class, len(task.classes))
            self.gaussians.add(f"{task.id}.{j}.mean", mean)
            self.gaussians.add(f"{task.id}.{j}.root", root)

    def network(self, j: int) -> nn.Module:
        """Return the network of an expert, without its linear layer."""
        return self.copies[j - 1] if j else self.backbone

    def of_expert(self, j: int) -> list[nn.Parameter]:
        """Make the parameters of an expert trainable, and return them."""
        both = (self.network(j), self.bottlenecks[j])
        return [parameter for module in both for parameter in module.requires_grad_(True).parameters()]

    def read(self, j: int, x: Tensor) -> Tensor:
        """Return features (B, features) of an expert."""
        return self.bottlenecks[j](self.network(j)(x))

    def loss(self, task: Task, j: int, head: nn.Module, batch: Batch) -> Tensor:
        """Return the cross-entropy among the task's own classes."""
        return F.cross_entropy(full(head(self.read(j, batch.x))), batch.y - task.first_class)

    def finetuning_loss(self, task: Task, j: int, head: nn.Module, teacher: Any, batch: Batch) -> Tensor:
        """Return the cross-entropy plus the distance to the features before."""
        features = self.read(j, batch.x)
        with torch.no_grad():
            before = full(teacher[1](teacher[0](batch.x)))
        task_loss = F.cross_entropy(full(head(features)), batch.y - task.first_class)
        return (1 - self.alpha) * task_loss + self.alpha * F.mse_loss(full(features), before)

    @torch.no_grad()
    def features_of(self, task: Task, j: int) -> Tensor:
        """Return features (N, 2, features) of a task's images and their mirror images, by an expert."""
        self.eval()
        rows = [torch.stack([self.read(j, x), self.read(j, x.flip(3))], 1) for x, _, _ in task.in_order(CHUNK)]
        return full(torch.cat(rows))

    def least_overlap(self, task: Task) -> int:
        """Return the expert with the largest mean divergence between new classes, in its features before the task."""
        apart = []
        for j in range(len(self.bottlenecks)):
            class_index = task.labels - task.first_class
            apart.append(divergences(*distributions(self.features_of(task, j), class_index, len(task.classes))).mean())
        return int(torch.stack(apart).argmax())

    def forward(self, x: Tensor, task: int | None = None) -> Tensor:
        """See `Method.forward`: the logarithm of the mean probability over the experts with a distribution of the
        class.
        """
        known = len(self.statistics)
        sizes = [len(self.gaussians[f"{t}.0.mean"]) for t in range(known)]
        votes, voters = [], torch.zeros(sum(sizes), device=x.device)
        for j in range(len(self.bottlenecks)):
            features, seen = full(self.read(j, x)).double(), sum(sizes[:j])
            parts = [
                log_density(features, self.gaussians[f"{t}.{j}.mean"], self.gaussians[f"{t}.{j}.root"])
                for t in range(j, known)
            ]
            densities = torch.cat([features.new_full((len(x), seen), UNKNOWN), *parts], dim=1)
            votes.append((densities / self.temperature).log_softmax(1))
            voters[seen:] += 1
        logits = (torch.stack(votes).logsumexp(0) - voters.log()).float()
        return logits if task is None else logits[:, self.columns(task)]

    def columns(self, task: int) -> slice:
        """See `Method.columns`."""
        return self.statistics.columns(task)

    def forward_passes(self) -> int:
        """Return the number of experts: each has a forward pass."""
        return len(self.bottlenecks)


def distributions(features: Tensor, class_index: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Return means (classes, d) and Cholesky factors of features (N, views, d) with labels (N,) from 0."""
    rows = [features[class_index == c].flatten(0, 1).double() for c in range(classes)]
    roots = [positive_root(part.T.cov(correction=0)) for part in rows]
    return torch.stack([part.mean(0) for part in rows]), torch.stack(roots)


def positive_root(covariance: Tensor) -> Tensor:
    """Return the Cholesky factor of a covariance (d, d) after the smallest sufficient addition to its diagonal."""
    least = LEAST
    while True:
        root, failed = torch.linalg.cholesky_ex(covariance + least * torch.eye(len(covariance)).to(covariance))
        if not failed:
            return root
        least *= 10


def log_density(x: Tensor, means: Tensor, roots: Tensor) -> Tensor:
    """Return log-densities (B, k) of x (B, d) under normal distributions with means (k, d) and Cholesky factors (k, d,
    d).
    """
    white = torch.linalg.solve_triangular(roots, (x[None] - means[:, None]).mT, upper=False)  # (k, d, B)
    logdets = 2 * roots.diagonal(dim1=1, dim2=2).log().sum(1)
    return -(white.square().sum(1) + (logdets + x.shape[1] * math.log(2 * math.pi))[:, None]).T / 2


def divergences(means: Tensor, roots: Tensor) -> Tensor:
    """Return KL divergences (k, k) of class a from b, from means (k, d) and Cholesky factors (k, d, d)."""
    logdets = 2 * roots.diagonal(dim1=1, dim2=2).log().sum(1)
    per_class = []
    for b in range(len(means)):
        spread = torch.linalg.solve_triangular(roots[b], roots, upper=False).square().sum((1, 2))
        apart = torch.linalg.solve_triangular(roots[b], (means[b] - means).T, upper=False).square().sum(0)
        per_class.append((spread + apart - means.shape[1] + logdets[b] - logdets) / 2)
    return torch.stack(per_class, dim=1)
