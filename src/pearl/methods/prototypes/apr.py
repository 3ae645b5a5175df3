"""APR: Adversarial Pseudo-replay for Exemplar-free Class-incremental Learning (Honda, WACV 2026).

New images near an old class are perturbed until the previous network maps them to that class's mean feature. They
replace its images during the task, and afterwards give the drift of old means and covariances.
"""

from collections.abc import Iterator
from functools import partial
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from pearl.data.augment import Draws
from pearl.data.batches import Batch, Task
from pearl.methods.base import Phase
from pearl.methods.common.alignment import Aligned
from pearl.methods.common.class_moments import cosines
from pearl.methods.common.gaussians import Pairs
from pearl.methods.common.scatter import pack, unpack
from pearl.methods.common.teacher import distillation, frozen
from pearl.methods.prototypes.closed_form import correlation, mahalanobis, shrink
from pearl.nn.precision import full
from pearl.nn.task_modules import CosineHeads, TaskTensors
from pearl.settings.declared import PhaseSpec, UpcomingTask
from pearl.storage.checkpoint import RUNNING, in_weights

CHUNK = 64  # images perturbed at once after a task
MOST = 100  # steps after which the remaining images are used as they are

Count = Annotated[int, Field(ge=1)]
NotNegative = Annotated[float, Field(ge=0)]


class Replayed:
    """Batches of a task's images, each followed by `each` others that represent old classes.

    These are rows (n,) of the task's images, always augmented by the same draws, with labels (n,) of old classes.
    """

    def __init__(self, task: Task, rows: Tensor, labels: Tensor, draws: Draws, each: int) -> None:
        self.task, self.rows, self.labels, self.draws, self.each = task, rows, labels, draws, each

    def __len__(self) -> int:
        return len(self.task)

    def batches(self, size: int, seed: int, *, skip: int = 0) -> Iterator[Batch]:
        """See `Batches.batches`."""
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(self.rows), generator=generator).to(self.rows.device)
        for i, batch in enumerate(self.task.batches(size, seed, skip=skip), skip):
            picks = order[torch.arange(i * self.each, (i + 1) * self.each, device=order.device) % len(order)]
            rows = self.rows[picks]
            other = self.task.batch(rows, tuple(draw[rows] for draw in self.draws))
            y = torch.cat([batch.y, self.labels[picks]])
            yield Batch(torch.cat([batch.x, other.x]), y, torch.cat([batch.rows, rows]))


def _transfers(task: UpcomingTask) -> list[int]:
    return [min(task.options["drift_images"], task.images)] * task.earlier_classes


class Apr(Aligned):
    """Cross-entropy among new classes + distillation of old logits on new images and perturbed ones.

    Before a task each image is augmented once. For each old class the `replayed` images nearest to its mean are chosen,
    with their augmentation. In each step, `replay_batch` of them are perturbed: `steps` times along the gradient of the
    squared distance to the mean, with noise of the classes' mean variance, by a length `push` for the whole batch.
    After the task, the `drift_images` nearest images of an old class are perturbed until their nearest old mean is that
    of the class. The drift of these images' features is added to its mean, and a linear map between them transforms its
    covariance.

    Defaults are the authors' for CIFAR-100 in 10 tasks (hirotomusiker/APR-EFCIL 2b9d9b3): SGD with a cosine; the first
    task 200 epochs at 0.1, decay 5e-4, batches of 64; later ones 100 epochs at 0.01, decay 2e-4, batches of 32; linear
    maps Adam 1e-4, 64 epochs in batches of 16. They also augment by brightness and AutoAugment. Here perturbed images
    are shuffled in each epoch instead of iterated through all epochs. If no image reaches a class, its drift is that of
    unperturbed images; the code stops. A batch is perturbed as a whole, so one process trains.

    Options:
        kd_lambda: weight of the distillation.
        temperature: temperature of the distillation.
        replayed: images that represent an old class.
        replay_batch: number of them in each step.
        steps: perturbation steps.
        push: length of such a step, over all pixels of the batch after normalisation.
        noise: standard deviations of the noise on target means.
        drift_images: images of a new task that give the drift of an old class.
        drift_steps: perturbation steps for them.
        drift_push: length of such a step for 1000 images at once; for a chunk of 64 it is sqrt(64 / 1000) of that.
        shrinkage: shrinkage of covariances, by the same share of the mean variance and the mean covariance.
        read_out: `mahalanobis` - distance to each class, with correlations; `ncm` - the cosine to its mean; `linear` -
            the heads' logits.
    """

    batch_coupled = True
    phases = (
        PhaseSpec("apr_first", "first"),
        PhaseSpec("apr", "later"),
        PhaseSpec("apr_transfer", "later", _transfers, at_most=True, features_only=True),
    )
    heads: CosineHeads

    def __init__(
        self,
        backbone: nn.Module,
        *,
        kd_lambda: NotNegative = 10.0,
        temperature: Annotated[float, Field(gt=0)] = 2.0,
        replayed: Count = 200,
        replay_batch: Count = 64,
        steps: Annotated[int, Field(ge=0)] = 4,
        push: NotNegative = 64.0,
        noise: NotNegative = 1.0,
        drift_images: Count = 1000,
        drift_steps: Count = 9,
        drift_push: NotNegative = 25.0,
        shrinkage: NotNegative = 24.0,
        read_out: Literal["mahalanobis", "ncm", "linear"] = "mahalanobis",
    ) -> None:
        super().__init__(backbone)
        self.heads = CosineHeads(self.heads.dim, 1.0, learnable=True)
        self.kd_lambda, self.temperature, self.shrinkage, self.read_out = kd_lambda, temperature, shrinkage, read_out
        self.replayed, self.replay_batch, self.steps, self.push, self.noise = replayed, replay_batch, steps, push, noise
        self.drift_images, self.drift_steps, self.drift_push = drift_images, drift_steps, drift_push
        self.precisions = TaskTensors(buffers=True)  # "all" (classes, dim, dim)

    def learn(self, task: Task) -> Iterator[Phase]:
        """Train all parameters, with perturbed images from the second task on; move old classes and add new ones."""
        teacher = frozen(self) if task.id else None
        self.heads.grow(len(task.classes)).to(self.device)
        params = [*self.backbone.parameters(), *self.heads.parameters()]
        if teacher is None:
            yield Phase("apr_first", params, self.first_loss, capturable=True)
        else:
            rows, draws = self.nearest(task, teacher, self.replayed)
            labels = torch.arange(len(rows), device=rows.device).repeat_interleave(rows.shape[1])
            replayed = Replayed(task, rows.flatten(), labels, draws, self.replay_batch)
            means = self.statistics.means().to(self.heads[0].weight)
            radius = self.noise * float(torch.cat(self.variances()).mean().sqrt())
            yield Phase("apr", params, partial(self.loss, task, teacher, means, radius), data=replayed)
            yield from self.compensate(task, teacher)
        self.remember(task, self.features_of(task))
        self.precisions.add("all", self.inverted())

    def first_loss(self, batch: Batch) -> Tensor:
        """Return the loss of the first task, which has no old classes."""
        return F.cross_entropy(self.heads(self.backbone(batch.x)), batch.y)

    def loss(self, task: Task, teacher: Any, means: Tensor, radius: float, batch: Batch) -> Tensor:
        """Return the loss; the last `replay_batch` images of a batch are perturbed."""
        count = len(batch.y) - self.replay_batch
        targets = means[batch.y[count:]]
        targets = targets + radius * torch.randn_like(targets)
        x = torch.cat([batch.x[:count], pushed(teacher.backbone, batch.x[count:], targets, self.steps, self.push)])
        logits = self.heads(self.backbone(x))
        with torch.no_grad():
            before = teacher.heads(teacher.backbone(x))
        task_loss = F.cross_entropy(logits[:count, task.first_class :], batch.y[:count] - task.first_class)
        kept = distillation(logits[:, : task.first_class], before, self.temperature)
        return task_loss + self.kd_lambda * kept

    @torch.no_grad()
    def nearest(self, task: Task, teacher: Any, count: int) -> tuple[Tensor, Draws]:
        """Return rows (old classes, count) of the images nearest to each previous mean, and their augmentation."""
        generator = torch.Generator().manual_seed(int(torch.randint(2**62, ())))
        shape = (int(task.images.shape[1]), int(task.images.shape[2]))
        draws = tuple(draw.to(task.device) for draw in task.view.draw(len(task), shape, generator))
        parts = torch.arange(len(task), device=task.device).split(CHUNK)
        batches = (task.batch(rows, tuple(draw[rows] for draw in draws)) for rows in parts)
        features = torch.cat([full(teacher.backbone(batch.x)) for batch in batches])
        apart = torch.cdist(self.statistics.means(), features.double())
        return apart.topk(min(count, len(task)), dim=1, largest=False).indices, draws

    def compensate(self, task: Task, teacher: Any) -> Iterator[Phase]:
        """Move means and covariances of old classes by the features of images perturbed towards them."""
        self.requires_grad_(False)
        self.eval()
        chosen, draws = self.nearest(task, teacher, self.drift_images)
        means, moves, maps = self.statistics.means().to(self.heads[0].weight), [], []
        for c, rows in enumerate(chosen):
            images = [task.batch(part, tuple(draw[part] for draw in draws)).x for part in rows.split(CHUNK)]
            x = torch.cat([self.reached(teacher.backbone, part, means, c) for part in images])
            with torch.no_grad():
                before = torch.cat([full(teacher.backbone(part)) for part in x.split(CHUNK)])
                after = torch.cat([full(self.backbone(part)) for part in x.split(CHUNK)])
            moves.append((after - before).mean(0))
            linear = nn.Linear(self.heads.dim, self.heads.dim).to(before)
            nn.init.eye_(linear.weight)
            nn.init.zeros_(linear.bias)
            apart = partial(distance, linear)
            yield Phase("apr_transfer", linear.parameters(), apart, extra=linear, data=Pairs(before, after))
            maps.append(linear.weight.detach().double())
            self.eval()
        self.statistics.move(torch.stack(moves).double())
        for t in range(task.id):
            kept, maps_of_task = self.covariances[f"{t}"], maps[self.statistics.columns(t)]
            moved = [A @ unpack(S.double(), self.heads.dim) @ A.T for A, S in zip(maps_of_task, kept, strict=True)]
            self.covariances.add(f"{t}", torch.stack([pack(S) for S in moved]).to(kept))
        self.requires_grad_(True)

    def reached(self, network: nn.Module, x: Tensor, means: Tensor, c: int) -> Tensor:
        """Perturb images (B, 3, H, W) towards the mean of class c; return those with no nearer old mean."""
        least, most, pushing = x.amin(), x.amax(), x
        size = self.drift_push * (CHUNK / 1000) ** 0.5
        for _ in range(0, MOST, self.drift_steps):
            targets = means[c].expand(len(x), -1)
            pushing = pushed(network, pushing, targets, self.drift_steps, size, (least, most))
            with torch.no_grad():
                there = torch.cdist(full(network(pushing)), means).argmin(1) == c
            if there.any():
                return pushing[there]
        return x

    def variances(self) -> list[Tensor]:
        """Return the variances (k, dim) of the features of each class, task by task."""
        return [
            torch.stack([unpack(S, self.heads.dim).diagonal() for S in self.covariances[f"{t}"]])
            for t in range(len(self.statistics))
        ]

    def inverted(self) -> Tensor:
        """Return inverse correlations (classes, dim, dim) of the classes, after shrinkage."""
        inverses = []
        for t in range(len(self.statistics)):
            for triangle in self.covariances[f"{t}"].double():
                covariance = shrink(unpack(triangle, self.heads.dim), self.shrinkage, self.shrinkage)
                inverses.append(torch.linalg.pinv(correlation(covariance), hermitian=True))
        return torch.stack(inverses).to(self.heads[0].weight)

    def forward(self, x: Tensor, task: int | None = None) -> Tensor:
        """See `Method.forward`."""
        features = full(self.features(x))
        if self.read_out == "linear":
            logits = self.heads(features)
        elif self.read_out == "ncm":
            logits = cosines(features, self.statistics.means())
        else:
            means = F.normalize(self.statistics.means()).to(features)
            logits = mahalanobis(F.normalize(features), means, self.precisions["all"].to(features))
        return logits if task is None else logits[:, self.columns(task)]

    def file_of(self, name: str) -> str:
        """Inverses are computed anew in each task."""
        return RUNNING if name.startswith("precisions.") else in_weights(name)


def pushed(
    network: nn.Module,
    x: Tensor,
    targets: Tensor,
    steps: int,
    size: float,
    bounds: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Move images (B, 3, H, W) towards features `targets` (B, dim), by steps of a given length per batch."""
    for _ in range(steps):
        x = x.detach().requires_grad_(True)
        with torch.enable_grad():
            (gradient,) = torch.autograd.grad(F.mse_loss(full(network(x)), targets), x)
        x = x - size * gradient / gradient.norm().clamp(min=1e-12)
        if bounds is not None:
            x = x.clamp(*bounds)
    return x.detach()


def distance(network: nn.Module, batch: Batch) -> Tensor:
    """Return the mean distance between a network's output for a batch's x (B, dim) and its y (B, dim)."""
    return (network(batch.x) - batch.y).square().sum(1).clamp(min=1e-24).sqrt().mean()
