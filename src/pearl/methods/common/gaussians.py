"""Classes as normal distributions of features: drawn from when their images are gone, moved when features move."""

from collections.abc import Iterator

import torch
from torch import Tensor

from pearl.data.batches import Batch, batch_bounds

FAR = 1e-5  # the least weight of an image, so that a mean without images near it moves with all of them


class GaussianDraws:
    """Batches of features drawn from a normal distribution of each class, equally many of each; see `data.Batches`.

    Means (classes, dim) in order of the logits, and factors (classes, dim, dim) S of covariances S S'.
    """

    def __init__(self, means: Tensor, factors: Tensor, each: int) -> None:
        self.means, self.factors, self.each = means, factors, each

    def __len__(self) -> int:
        return self.each * len(self.means)

    def batches(self, size: int, seed: int, *, skip: int = 0) -> Iterator[Batch]:
        """One epoch, drawn and shuffled by `seed`, without its first `skip` batches."""
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(self), generator=generator).to(self.means.device)
        noise = torch.randn(len(self.means), self.each, self.means.shape[1], generator=generator).to(self.means)
        x = (self.means[:, None] + noise @ self.factors.mT).flatten(0, 1)
        for start, stop in batch_bounds(len(self), size)[skip:]:
            rows = order[start:stop]
            yield Batch(x[rows], rows // self.each, rows)


def drift(before: Tensor, after: Tensor, means: Tensor, sigma: float) -> Tensor:
    """How far means (classes, dim) have moved, judged by the same images' features (N, dim) before and after.

    The mean of the images' moves, weighted by exp(-d^2 / 2 sigma^2) of the distance d of features before to a mean
    (semantic drift compensation, Yu et al., CVPR 2020).
    """
    before, moves = before.to(means), after.to(means) - before.to(means)
    apart = torch.cdist(means, before, compute_mode="donot_use_mm_for_euclid_dist")
    weights = torch.exp(-apart.square() / (2 * sigma**2)) + FAR
    return weights @ moves / weights.sum(1, keepdim=True)
