"""Online learners on the features of the frozen backbone: nearest mean, streaming LDA, and RanPAC.

None of them trains a network. Their result does not depend on the order of the images, so that a stream with hidden
boundaries costs them nothing: they are what every other learner has to beat.
"""

import copy
from collections.abc import Sequence
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from pearl.methods.common.random_features import RandomFeatures
from pearl.methods.common.scatter import inverse
from pearl.methods.prototypes.closed_form import nearest_mean, ridge
from pearl.nn.intermediate_features import Layers, WithInner, inner_layers
from pearl.online.learner import Learner, Network, OnImages, Setup
from pearl.online.streaming_statistics import StreamingStatistics, discriminants
from pearl.settings.sections import Count


def frozen_network(setup: Setup, layers: Layers) -> OnImages:
    """Return the frozen backbone as a function from raw images to features (B, p), with intermediate ones if `auto`."""
    return OnImages(WithInner(copy.deepcopy(setup.backbone).eval(), inner_layers(setup.backbone, layers)), setup)


class Frozen(Learner):
    """Base: one pass of the frozen backbone per image, for learning and for prediction.

    Options:
        layers: `final` uses the network's features; `auto` adds intermediate ones, see
            `nn.intermediate_features.inner_layers`.
    """

    def __init__(self, setup: Setup, *, layers: Layers = "final") -> None:
        super().__init__(setup)
        self.network = frozen_network(setup, layers)
        self.width = self.network(torch.zeros(1, *[setup.config.images.stored] * 2, 3, dtype=torch.uint8)).shape[1]

    def networks(self) -> dict[str, Network]:
        """Return the backbone."""
        return {"backbone": self.network}

    @torch.no_grad()
    def observe(self, images: Tensor, labels: Tensor) -> None:
        """See `Learner.observe`."""
        labels = labels.to(self.setup.device)
        self.count(labels)
        self.learn(self.network(images), labels)

    def learn(self, features: Tensor, labels: Tensor) -> None:
        """Add features (B, p) with labels (B,)."""
        raise NotImplementedError


class OnlineNearestMean(Frozen):
    """Nearest class mean: the prediction is the class with the nearest mean of features."""

    def __init__(self, setup: Setup, *, layers: Layers = "final") -> None:
        super().__init__(setup, layers=layers)
        self.register_buffer("counts", torch.zeros(0, dtype=torch.int64))
        self.register_buffer("sums", torch.zeros(0, self.width, dtype=torch.float64))

    counts: Tensor
    sums: Tensor

    def learn(self, features: Tensor, labels: Tensor) -> None:
        """See `Frozen.learn`."""
        new = int(self.classes) - len(self.counts)
        self.counts = F.pad(self.counts, (0, new)).index_add_(0, labels, torch.ones_like(labels))
        self.sums = F.pad(self.sums, (0, 0, 0, new)).index_add_(0, labels, features.double())

    def scores(self, features: Sequence[Tensor]) -> Tensor:
        """Return minus the squared distances to the means."""
        return nearest_mean(features[0].double(), self.sums / self.counts[:, None])


class Slda(Frozen):
    """Deep SLDA, streaming linear discriminant analysis (Hayes & Kanan, CVPR-W 2020): class means, one covariance.

    The covariance within classes is exact, where the authors' code updates it with the count of all images instead of
    the class's. Classes that were never seen do not exist, where theirs have score 0.

    Options:
        layers: `final` uses the network's features; `auto` adds intermediate ones.
        shrinkage: the share e of the identity in (1 - e) S + e I, which is inverted.
    """

    def __init__(
        self, setup: Setup, *, layers: Layers = "final", shrinkage: Annotated[float, Field(gt=0, le=1)] = 1e-4
    ) -> None:
        super().__init__(setup, layers=layers)
        self.statistics, self.shrinkage = StreamingStatistics(self.width), shrinkage

    def learn(self, features: Tensor, labels: Tensor) -> None:
        """See `Frozen.learn`."""
        self.statistics.update(features, labels)

    def scores(self, features: Sequence[Tensor]) -> Tensor:
        """Return x' P m - m' P m / 2 for each mean m, where P inverts the shrunk covariance."""
        covariance = (1 - self.shrinkage) * self.statistics.scatter / int(self.statistics.counts.sum())
        covariance.diagonal().add_(self.shrinkage)
        return discriminants(features[0], self.statistics.means, inverse(covariance))


class OnlineRanPac(Frozen):
    """RanPAC (McDonnell et al., NeurIPS 2023), updated online: ridge regression on random features relu(x R).

    The offline method adapts the network on the first task, and chooses the ridge on held-out images of each task. A
    stream has no tasks: the network stays frozen and the ridge is fixed, as in FlyGCL's port.

    Options:
        layers: `final` uses the network's features; `auto` adds intermediate ones.
        M: number of random features; M^2 numbers are stored.
        ridge: the weight of the squared norm.
    """

    def __init__(
        self,
        setup: Setup,
        *,
        layers: Layers = "final",
        M: Count = 10_000,
        ridge: Annotated[float, Field(gt=0)] = 1e5,
    ) -> None:
        super().__init__(setup, layers=layers)
        self.features, self.ridge = RandomFeatures(self.width, M), ridge
        self.features.draw()
        self.register_buffer("gram", torch.zeros(M, M))
        self.register_buffer("cross", torch.zeros(M, 0))

    gram: Tensor
    cross: Tensor

    def learn(self, features: Tensor, labels: Tensor) -> None:
        """See `Frozen.learn`."""
        lifted = self.features(features)
        self.gram += lifted.T @ lifted
        self.cross = F.pad(self.cross, (0, int(self.classes) - self.cross.shape[1]))
        self.cross.index_add_(1, labels, lifted.T)

    def scores(self, features: Sequence[Tensor]) -> Tensor:
        """Return the regression's outputs."""
        return self.features(features[0]) @ ridge(self.gram, self.cross.double(), self.ridge).T.to(self.gram)
