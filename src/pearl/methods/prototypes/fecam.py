"""FeCAM: Exploiting the Heterogeneity of Class Distributions in Exemplar-Free CIL (Goswami et al., NeurIPS 2023).

The extractor is frozen after the first task. A class is the mean and covariance of its features; the prediction is the
class with the smallest Mahalanobis distance.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from pearl.data.batches import Task
from pearl.methods.base import Phase
from pearl.methods.common.class_moments import class_covariances
from pearl.methods.prototypes.closed_form import correlation, mahalanobis, shrink
from pearl.methods.prototypes.extractor import FrozenExtractor
from pearl.nn.lowrank import has_attention
from pearl.nn.task_modules import TaskTensors
from pearl.settings.derived_defaults import AUTO, DerivedDefault, convolutional, data_of

Alpha = Annotated[float, Field(ge=0)]
Auto = Literal["auto"]


def _on_convolutions(value: Any) -> DerivedDefault:
    """Return True for pearl's own convolutional backbones; for others it depends on the network."""
    return DerivedDefault(lambda config: value if convolutional(config) else AUTO)


def _alpha1(config: Any) -> float:
    return 10.0 if _on_imagenet_r(config) else 1.0


def _alpha2(config: Any) -> float | str:
    if convolutional(config):
        return 1.0
    return 10.0 if _on_imagenet_r(config) else AUTO


def _on_imagenet_r(config: Any) -> bool:
    return not convolutional(config) and data_of(config) == "imagenet_r"


class FeCam(FrozenExtractor):
    """Mahalanobis distance with a covariance per class: Tukey's transform, shrinkage, correlation normalisation.

    `auto` uses the settings of the authors' code. For convolutional networks (exps/FeCAM_cifar100.json) features are
    raised to the power 0.5 and then normalised to length 1, and covariances are shrunk twice, by 1 and 1. For
    transformers (FeCAM_vit_cifar100.py) features are first normalised and not raised to a power, and covariances are
    shrunk once, by 1 and 0; on ImageNet-R by 10 and 10.

    Here the distance classifies after the first task, too, where their code for convolutional networks uses the trained
    head.

    Options:
        extractor: `given` - the backbone is pretrained and stays frozen; `first_task` - task 1 trains it, with a linear
            head; `auto` - the first if it was pretrained.
        tukey: exponent of the power transform (beta); 1 disables it; `auto` is 0.5, and 1 for transformers, whose
            features may be negative.
        alpha1: share of the mean variance added to the diagonal of each covariance; `auto` is 1, and 10 on ImageNet-R
            with a backbone of another library.
        alpha2: share of the mean covariance added off the diagonal; `auto` is 1, and 0 for transformers, or alpha1's
            value on ImageNet-R.
        shrinkages: number of shrinkages; `auto` is 2, and 1 for transformers.
        normalise: divide covariances by the standard deviations.
        unit: normalise features first, but not their means; otherwise both are normalised after the power transform,
            and covariances are of unnormalised features. `auto` is true for transformers.
    """

    def __init__(
        self,
        backbone: nn.Module,
        *,
        extractor: Literal["auto", "given", "first_task"] = "auto",
        tukey: Annotated[float, Field(gt=0, le=1)] | Literal["auto"] = "auto",
        alpha1: Annotated[Alpha | Auto, DerivedDefault(_alpha1)] = "auto",
        alpha2: Annotated[Alpha | Auto, DerivedDefault(_alpha2)] = "auto",
        shrinkages: Annotated[Annotated[int, Field(ge=0)] | Auto, _on_convolutions(2)] = "auto",
        normalise: bool = True,
        unit: Annotated[bool | Auto, _on_convolutions(False)] = "auto",
    ) -> None:
        super().__init__(backbone, extractor=extractor)
        transformer = has_attention(backbone)
        self.tukey = (1.0 if transformer else 0.5) if tukey == "auto" else tukey
        self.alpha1 = 1.0 if alpha1 == "auto" else alpha1
        self.alpha2 = (0.0 if transformer else 1.0) if alpha2 == "auto" else alpha2
        self.shrinkages = (1 if transformer else 2) if shrinkages == "auto" else shrinkages
        self.unit = transformer if unit == "auto" else unit
        self.normalise = normalise
        self.precisions = TaskTensors(buffers=True)  # "t": (k, dim, dim), inverse covariances

    def learn(self, task: Task) -> Iterator[Phase]:
        """Train the extractor in its task; then compute means of features and covariances of transformed ones."""
        yield from self.train_extractor(task)
        features = self.observe(task)
        spread = class_covariances(self.transform(features.double()), task.labels - task.first_class, len(task.classes))
        self.precisions.add(f"{task.id}", self.precision(spread).to(features))

    def seen(self, features: Tensor) -> Tensor:
        """Return the features, normalised to length 1 if `unit`."""
        return F.normalize(features) if self.unit else features

    def transform(self, features: Tensor) -> Tensor:
        """Apply Tukey's ladder of powers, which makes skewed features more normal; an odd function for negative
        features.
        """
        return features.sign() * features.abs() ** self.tukey

    def precision(self, covariances: Tensor) -> Tensor:
        """Return the inverses of covariances (k, dim, dim), after shrinkage and normalisation."""
        for _ in range(self.shrinkages):
            covariances = shrink(covariances, self.alpha1, self.alpha2)
        return torch.linalg.pinv(correlation(covariances) if self.normalise else covariances, hermitian=True)

    def score(self, features: Tensor) -> Tensor:
        """Return minus the squared distance to each class, of transformed features or their directions."""
        means, features = self.transform(self.statistics.means()), self.transform(features)
        if not self.unit:
            means, features = F.normalize(means), F.normalize(features)
        means = means.to(features)
        parts = [
            mahalanobis(features, means[self.statistics.columns(t)], self.precisions[f"{t}"])
            for t in range(len(self.statistics))
        ]
        return torch.cat(parts, dim=1)
