"""KLDA: Continual Learning Using a Kernel-Based Method Over Foundation Models (Momeni et al., AAAI 2025).

Linear discriminant analysis on random Fourier features, which approximate a Gaussian kernel: one mean per class and a
common covariance. Both are sums over images, so that the order of tasks does not matter.
"""

from collections.abc import Iterator
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from pearl.data.batches import Task
from pearl.methods.base import Phase
from pearl.methods.common.class_moments import ClassMoments
from pearl.methods.common.random_features import FourierFeatures
from pearl.methods.common.scatter import root, shrunk
from pearl.methods.prototypes.extractor import FrozenExtractor
from pearl.nn.task_modules import TaskTensors
from pearl.storage.checkpoint import RUNNING, in_weights

ROWS = 1024  # random features computed at once
COMPARED = 1000  # maximum images of the first task whose distances determine sigma

Positive = Annotated[float, Field(gt=0)]


class Discriminant(nn.Module):
    """Linear discriminant analysis on one sample of random features."""

    def __init__(self, dim: int, count: int) -> None:
        super().__init__()
        self.lift = FourierFeatures(dim, count)
        self.statistics = ClassMoments(count)
        self.kept = TaskTensors(buffers=True)  # "scatter" (count, count), "weight" (count, classes), "bias" (classes,)

    @torch.no_grad()
    def add(self, features: Tensor, class_index: Tensor, classes: int, shrinkage: float) -> None:
        """Add a new task of this many classes: features (N, dim) with labels (N,) from 0."""
        self.statistics.grow(classes, features.device)
        parts = [*zip(features.split(ROWS), class_index.split(ROWS), strict=True)]
        for rows, labels in parts:
            self.statistics.update(self.lift(rows), labels)
        means = self.statistics.means(len(self.statistics) - 1)
        count = self.lift.shape[1]
        scatter = self.kept["scatter"] if "scatter" in self.kept else features.new_zeros(count, count)
        for rows, labels in parts:
            centred = self.lift(rows) - means[labels].to(rows)
            scatter = scatter + centred.T @ centred
        self.kept.add("scatter", scatter)
        images = sum(int(self.statistics.tensors[f"{t}.count"].sum()) for t in range(len(self.statistics)))
        means = self.statistics.means()
        covariance = shrunk(scatter.double() / max(images - len(means), 1), shrinkage)
        weight = torch.cholesky_solve(means.T, root(covariance))
        self.kept.add("weight", weight.to(features).contiguous())
        self.kept.add("bias", (-(means * weight.T).sum(1) / 2).to(features))

    def forward(self, features: Tensor) -> Tensor:
        """Map features (B, dim) to log-posteriors (B, classes) with equal priors, up to a constant per image."""
        return self.lift(features) @ self.kept["weight"].to(features) + self.kept["bias"].to(features)


class Klda(FrozenExtractor):
    """The class with the smallest Mahalanobis distance in the space of random Fourier features.

    The official code (SalehMomeni/KLDA ee5f05b) is for texts; it has sigma by network, but not for ViTs. Departures:
    batches are centred on the mean of the whole class, not on the running mean, which depends on their order. The
    covariance is divided by the number of images minus classes; otherwise members of an ensemble give almost uniform
    posteriors. It is shrunk instead of pseudo-inverted. Each member stores D^2 numbers.

    Options:
        D: number of random features.
        sigma: parameter of the kernel exp(-sigma |x - y|^2); null is 1 / (2 median |x - y|^2) of the first task's
            images.
        shrinkage: share of the mean variance in the covariance.
        members: samples of random features, whose posteriors are averaged (KLDA-E has 5).
        extractor: `given` - the backbone is pretrained and stays frozen; `first_task` - task 1 trains it, with a linear
            head; `auto` - the first if it was pretrained.
    """

    def __init__(
        self,
        backbone: nn.Module,
        *,
        D: Annotated[int, Field(ge=1)] = 5000,
        sigma: Positive | None = None,
        shrinkage: Annotated[float, Field(gt=0, lt=1)] = 1e-3,
        members: Annotated[int, Field(ge=1)] = 1,
        extractor: Literal["auto", "given", "first_task"] = "auto",
    ) -> None:
        super().__init__(backbone, extractor=extractor)
        self.sigma, self.shrinkage = sigma, shrinkage
        self.members = nn.ModuleList(Discriminant(self.heads.dim, D) for _ in range(members))

    def learn(self, task: Task) -> Iterator[Phase]:
        """Train the extractor in its task; then run two passes over the images' features."""
        yield from self.train_extractor(task)
        features = self.observe(task)
        for member in self.members:
            if not task.id:
                member.lift.sigma.fill_(self.sigma or bandwidth(features))  # type: ignore[operator,union-attr]
                member.lift.draw()  # type: ignore[operator,union-attr]
            class_index = task.labels - task.first_class
            member.add(features, class_index, len(task.classes), self.shrinkage)  # type: ignore[operator]

    def score(self, features: Tensor) -> Tensor:
        """Return log-posteriors; with several members the logarithm of the mean posterior."""
        scores = torch.stack([member(features) for member in self.members])
        return scores[0] if len(scores) == 1 else scores.log_softmax(2).logsumexp(0)

    def file_of(self, name: str) -> str:
        """Scatter and head are computed anew in each task."""
        return RUNNING if ".kept." in name else in_weights(name)


def bandwidth(features: Tensor) -> float:
    """Return 1 / (2 median squared distance) of a sample of the features (N, dim)."""
    some = features[torch.randperm(len(features))[:COMPARED].to(features.device)].double()
    apart = torch.pdist(some).square() if len(some) > 1 else some.new_ones(1)
    return 1 / (2 * max(float(apart.median()), 1e-12))
