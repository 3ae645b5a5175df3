"""EFC++: Elastic Feature Consolidation with Prototype Re-balancing (Magistri et al., ICLR 2024 and arXiv 2503.10439).

Features may change in directions that do not affect predictions, which the empirical feature matrix E measures: E
weights the penalty on the drift of features, and the distances of images to old class means, whose drift is that of the
near images. Heads are re-balanced on new features and on features sampled from a normal distribution per old class.
"""

from collections.abc import Iterator
from functools import partial
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from pearl.data.batches import Batch, Task, batch_bounds
from pearl.methods.base import Network, Phase
from pearl.methods.common.alignment import Aligned
from pearl.methods.common.gaussians import GaussianDraws
from pearl.methods.common.rotations import TURNS, turned, turned_labels
from pearl.methods.common.teacher import frozen
from pearl.nn import lowrank
from pearl.nn.precision import full
from pearl.nn.task_modules import LinearHead, TaskHeads
from pearl.settings.declared import PhaseSpec, UpcomingTask

FLOOR = 1e-5  # added to variances
CHUNK = 256  # images per pass

NotNegative = Annotated[float, Field(ge=0)]


def _with_draws(task: UpcomingTask) -> int:
    each = max(round(task.earlier_images / task.earlier_classes), 1)
    return task.images + each * task.earlier_classes


class PlainHeads(TaskHeads):
    """Heads without bias."""

    def block(self, classes: int) -> nn.Linear:
        """Return a classifier for one task."""
        return LinearHead(self.dim, classes, bias=False)


class FeaturesAndDraws:
    """Batches of a task's images, augmented in each epoch, as features, and of features from normal distributions."""

    def __init__(self, task: Task, network: Network, draws: GaussianDraws) -> None:
        self.task, self.network, self.draws = task, network, draws

    def __len__(self) -> int:
        return len(self.task) + len(self.draws)

    def batches(self, size: int, seed: int, *, skip: int = 0) -> Iterator[Batch]:
        """See `Batches.batches`."""
        with torch.no_grad():
            parts = [(full(self.network(batch.x)), batch.y) for batch in self.task.batches(CHUNK, seed)]
        drawn = next(self.draws.batches(len(self.draws), seed))
        x, y = torch.cat([*(x for x, _ in parts), drawn.x]), torch.cat([*(y for _, y in parts), drawn.y])
        order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed)).to(y.device)
        for start, stop in batch_bounds(len(y), size)[skip:]:
            rows = order[start:stop]
            yield Batch(x[rows], y[rows], rows)


class EfcPlusPlus(Aligned):
    """Cross-entropy among a task's own classes + mean of (f - f_old)' (feature_weight E + damping I) (f - f_old).

    In the first task each rotation of a class's images by four angles is a separate class; the outputs for rotated
    images are discarded afterwards. Then norm layers and old heads are frozen; the new head and all other weights
    train. Heads have no bias. Defaults are the authors' (simomagi/elastic_feature_consolidation 3ef9172): Adam, decay
    2e-4, batches of 64, 100 epochs, the first task at 1e-3 with a tenth of it after 45 and 90, later ones at 1e-4;
    re-balancing by SGD, 1e-3, decay 5e-4, 50 epochs in batches of 256. Their images are random crops of 8 to 100 % of
    the area.

    Statistics, E and drift are from images without augmentation, while the code uses an augmented pass. All old classes
    are sampled equally often, by their mean number of images. Covariances do not change.

    Options:
        feature_weight: weight of E in the penalty (lambda).
        damping: weight of the squared distance in the penalty (eta).
        sigma: width of the weights of drift, exp(s / 2 sigma^2) with s from 0 for the farthest pair of a class and an
            image to 1 for the nearest.
        rotations: train rotated images as separate classes in the first task.
    """

    phases = (
        PhaseSpec("efcpp_first", "first"),
        PhaseSpec("efcpp", "later"),
        PhaseSpec("efcpp_balance", "later", _with_draws),
    )
    matrix: Tensor

    def __init__(
        self,
        backbone: nn.Module,
        *,
        feature_weight: NotNegative = 10.0,
        damping: NotNegative = 0.1,
        sigma: Annotated[float, Field(gt=0)] = 0.2,
        rotations: bool = True,
    ) -> None:
        super().__init__(backbone)
        self.heads = PlainHeads(self.heads.dim)
        self.feature_weight, self.damping, self.sigma, self.rotations = feature_weight, damping, sigma, rotations
        self.register_buffer("matrix", torch.zeros(self.heads.dim, self.heads.dim))  # E

    def train(self, mode: bool = True) -> "EfcPlusPlus":
        """Set the mode; after the first task, norm layers keep their running statistics."""
        super().train(mode)
        self.backbone.train(mode and not len(self.statistics))
        return self

    def learn(self, task: Task) -> Iterator[Phase]:
        """Train; then move old means, re-balance the heads, and compute E and statistics."""
        head = self.heads.grow(len(task.classes)).to(self.device)
        self.requires_grad_(False)
        self.backbone.requires_grad_(True)
        head.requires_grad_(True)
        if not task.id:
            turns = self.heads.block((TURNS - 1) * len(task.classes)).to(self.device) if self.rotations else None
            params = [*self.backbone.parameters(), *head.parameters(), *(turns.parameters() if turns else ())]
            yield Phase("efcpp_first", params, partial(self.first_loss, head, turns), extra=turns, capturable=True)
        else:
            for name in lowrank.task_norms(self.backbone)[0]:
                self.backbone.get_parameter(name).requires_grad_(False)
            before = self.features_of(task)
            params = [p for p in [*self.backbone.parameters(), *head.parameters()] if p.requires_grad]
            yield Phase("efcpp", params, partial(self.loss, task, head, frozen(self.backbone)), capturable=True)
            means = self.statistics.means()
            self.statistics.move(elastic_drift(before, self.features_of(task), means, self.matrix, self.sigma))
            self.requires_grad_(False)
            images = sum(int(self.statistics.tensors[f"{t}.count"].sum()) for t in range(task.id))
            draws = self.gaussians(max(round(images / task.first_class), 1), FLOOR)
            balanced = FeaturesAndDraws(task, self.features, draws)
            balance = lambda batch: F.cross_entropy(self.heads(batch.x), batch.y)  # noqa: E731
            yield Phase("efcpp_balance", self.heads.requires_grad_(True).parameters(), balance, data=balanced)
        self.requires_grad_(False)
        features = self.features_of(task)
        self.matrix.copy_(feature_matrix(features, torch.cat([head.weight for head in self.heads])))
        self.remember(task, features)

    def first_loss(self, head: nn.Module, turns: nn.Module | None, batch: Batch) -> Tensor:
        """Return the loss over classes, and over rotated classes if they have a head."""
        if turns is None:
            return F.cross_entropy(head(self.backbone(batch.x)), batch.y)
        features = self.backbone(turned(batch.x))
        logits = torch.cat([head(features), turns(features)], dim=1)
        return F.cross_entropy(logits, turned_labels(batch.y, logits.shape[1] // TURNS))

    def loss(self, task: Task, head: nn.Module, teacher: nn.Module, batch: Batch) -> Tensor:
        """Return the cross-entropy among the task's own classes plus the elastic penalty."""
        features = full(self.backbone(batch.x))
        with torch.no_grad():
            before = full(teacher(batch.x))
        moved = features - before
        strength = self.feature_weight * self.matrix + self.damping * torch.eye(len(self.matrix), device=moved.device)
        penalty = ((moved @ strength.to(moved)) * moved).sum(1).mean()
        return F.cross_entropy(head(features), batch.y - task.first_class) + penalty


def feature_matrix(features: Tensor, weight: Tensor) -> Tensor:
    """Return E (dim, dim), the mean over features (N, dim) of W' (diag(p) - p p') W, for p = softmax(W f), W (classes,
    dim).

    It is the Fisher information of the features: the sensitivity of predictions to each direction.
    """
    probabilities = (features.double() @ weight.double().T).softmax(1)
    spread = probabilities.mean(0).diag() - probabilities.T @ probabilities / len(features)
    return (weight.double().T @ spread @ weight.double()).to(features)


def elastic_drift(before: Tensor, after: Tensor, means: Tensor, matrix: Tensor, sigma: float) -> Tensor:
    """Return the drift of means (classes, dim): the mean drift of images, weighted by their nearness under E.

    Features (N, dim) are of the same images before and after. With s = -(f - m)' E (f - m), scaled to [0, 1] over all
    pairs of image and class, weights are exp(s / 2 sigma^2).
    """
    before, moves, E = before.to(means), after.to(means) - before.to(means), matrix.to(means)
    images, classes = ((rows @ E * rows).sum(1) for rows in (before, means))
    near = 2 * means @ E @ before.T - images - classes[:, None]
    near = (near - near.min()) / (near.max() - near.min()).clamp(min=torch.finfo(near.dtype).tiny)
    weights = torch.exp(near / (2 * sigma**2))
    return weights @ moves / weights.sum(1, keepdim=True)
