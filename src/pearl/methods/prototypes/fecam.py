"""FeCAM: Exploiting the Heterogeneity of Class Distributions in Exemplar-Free CIL (Goswami et al., NeurIPS 2023).

The extractor is frozen after the first task. Each class is the mean and the covariance of its features; an image
belongs to the class of the smallest Mahalanobis distance.
"""

from collections.abc import Iterator
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from pearl.data.batches import Task
from pearl.methods.base import Phase
from pearl.methods.common.statistics import ClassStatistics
from pearl.methods.prototypes.closed_form import correlation, mahalanobis, shrink
from pearl.methods.prototypes.extractor import FrozenExtractor
from pearl.nn.growing import TaskTensors
from pearl.nn.lowrank import has_attention


class FeCam(FrozenExtractor):
    """Mahalanobis distance with a covariance for each class: Tukey's transform, shrinkage, correlation normalisation.

    Defaults are those of the authors' configuration for CIFAR-100. Here the distance classifies at the first stage,
    too, where their code uses the weights of the head it was trained with.

    Options:
        extractor: `given` - the backbone comes with weights, which stay; `first_task` - task 1 trains it, with a linear
            head; `auto` - the first if it was pretrained.
        tukey: exponent of the power transform (beta); 1 does nothing; `auto` is 0.5, and 1 of a transformer, whose
            features may be negative, as in the authors' ViT experiments.
        alpha1: share of the mean variance added to the diagonal of each covariance.
        alpha2: share of the mean covariance added off the diagonal.
        shrinkages: how often that is done; twice in the authors' code.
        normalise: divide covariances by the standard deviations.
    """

    def __init__(
        self,
        backbone: nn.Module,
        *,
        extractor: Literal["auto", "given", "first_task"] = "auto",
        tukey: Annotated[float, Field(gt=0, le=1)] | Literal["auto"] = "auto",
        alpha1: Annotated[float, Field(ge=0)] = 1.0,
        alpha2: Annotated[float, Field(ge=0)] = 1.0,
        shrinkages: Annotated[int, Field(ge=0)] = 2,
        normalise: bool = True,
    ) -> None:
        super().__init__(backbone, extractor=extractor)
        if tukey == "auto":
            tukey = 1.0 if has_attention(backbone) else 0.5
        self.tukey, self.alpha1, self.alpha2 = tukey, alpha1, alpha2
        self.shrinkages, self.normalise = shrinkages, normalise
        self.precisions = TaskTensors(buffers=True)  # "t": (k, dim, dim), inverse covariances

    def learn(self, task: Task) -> Iterator[Phase]:
        """Train the extractor if this is its task; then means of the features and covariances of the transformed."""
        yield from self.train_extractor(task)
        features = self.observe(task)
        spread = ClassStatistics(self.heads.dim, covariance=True)
        spread.grow(len(task.classes), self.device)
        for rows in torch.arange(len(task), device=self.device).split(1024):
            spread.update(self.transform(features[rows].double()), task.labels[rows] - task.first_class)
        self.precisions.add(f"{task.id}", self.precision(spread.covariances(0)).to(features))

    def transform(self, features: Tensor) -> Tensor:
        """Tukey's ladder of powers, which makes skewed features more normal; odd, for features below zero."""
        return features.sign() * features.abs() ** self.tukey

    def precision(self, covariances: Tensor) -> Tensor:
        """The inverses of covariances (k, dim, dim), after shrinkage and normalisation."""
        for _ in range(self.shrinkages):
            covariances = shrink(covariances, self.alpha1, self.alpha2)
        return torch.linalg.pinv(correlation(covariances) if self.normalise else covariances, hermitian=True)

    def score(self, features: Tensor) -> Tensor:
        """Minus the squared distance to each class, between directions of transformed features."""
        means = F.normalize(self.transform(self.statistics.means())).to(features)
        features = F.normalize(self.transform(features))
        parts = [
            mahalanobis(features, means[self.statistics.columns(t)], self.precisions[f"{t}"])
            for t in range(len(self.statistics))
        ]
        return torch.cat(parts, dim=1)
