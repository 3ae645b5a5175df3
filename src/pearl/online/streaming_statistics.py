"""Counts, means and a pooled covariance of classes, from images that arrive one by one or in batches."""

import torch
from torch import Tensor

from pearl.methods.common.scatter import inverse, shrinkage, shrunk
from pearl.online.learner import Resizable


class StreamingStatistics(Resizable):
    """Per class the count and the mean, and for all classes the scatter within them, in float64.

    Batches are merged exactly (Chan, Golub & LeVeque, 1983), so that the result does not depend on their order or size.
    """

    counts: Tensor  # (classes,) images of each class
    means: Tensor  # (classes, p)
    scatter: Tensor  # (p, p), the sum over images of (x - mean of its class)(x - mean of its class)'

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.register_buffer("counts", torch.zeros(0, dtype=torch.int64))
        self.register_buffer("means", torch.zeros(0, dim, dtype=torch.float64))
        self.register_buffer("scatter", torch.zeros(dim, dim, dtype=torch.float64))

    @torch.no_grad()
    def update(self, features: Tensor, labels: Tensor) -> None:
        """Add features (B, p) with labels (B,) from 0; a new label adds a class, and all below it."""
        new, features = int(labels.max()) + 1 - len(self.counts), features.double()
        if new > 0:
            self.counts = torch.cat([self.counts, self.counts.new_zeros(new)])
            self.means = torch.cat([self.means, self.means.new_zeros(new, self.means.shape[1])])
        there, class_index = labels.unique(return_inverse=True)
        added, before = class_index.bincount().double(), self.counts[there].double()
        batch = features.new_zeros(len(there), features.shape[1]).index_add_(0, class_index, features) / added[:, None]
        centred, moved = features - batch[class_index], batch - self.means[there]
        share = (added / (before + added))[:, None]  # of the batch in the new mean
        self.scatter += centred.T @ centred + moved.T @ (before[:, None] * share * moved)
        self.means[there] += share * moved
        self.counts[there] += class_index.bincount()

    @property
    def known(self) -> Tensor:
        """Return a mask (classes,) of the classes with an image."""
        return self.counts > 0

    @property
    def freedom(self) -> int:
        """Return the degrees of freedom of the scatter, at least 1."""
        return max(1, int(self.counts.sum()) - int(self.known.sum()))

    @property
    def centre(self) -> Tensor:
        """Return the mean (p,) of all images."""
        return self.counts.double() @ self.means / self.counts.sum().clamp(min=1)

    @property
    def total(self) -> Tensor:
        """Return the scatter (p, p) of all images around their mean."""
        away = self.means - self.centre
        return self.scatter + away.T @ (self.counts[:, None] * away)

    @property
    def shrinkage(self) -> float:
        """Return the share of the identity in the covariance; see `scatter.shrinkage`."""
        return shrinkage(len(self.scatter), self.freedom)

    def precision(self) -> Tensor:
        """Return the inverse (p, p) of the shrunk covariance within classes."""
        return inverse(shrunk(self.scatter / self.freedom, self.shrinkage))


def discriminants(features: Tensor, means: Tensor, precision: Tensor) -> Tensor:
    """Return linear discriminants (B, classes), float64: log-likelihoods without the terms that classes share."""
    weights = means @ precision
    return features.double() @ weights.T - 0.5 * (weights * means).sum(1)
