"""Classes as normal distributions of features: sampled when images are gone, moved when features move."""

import math
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from pearl.data.batches import Batch, batch_bounds

FAR = 1e-5  # the least weight of an image, so that a mean without images nearby moves with all of them


class GaussianDraws:
    """Batches of features from a normal distribution per class, equally many of each; see `data.Batches`.

    Means (classes, dim) in order of the logits, and factors (classes, dim, dim) S of covariances S S'. `scale` maps
    uniform random numbers (classes, each) to a factor for every feature vector. With `once`, all epochs have the same
    feature vectors, by this seed, in different order.
    """

    def __init__(
        self,
        means: Tensor,
        factors: Tensor,
        each: int,
        *,
        scale: Callable[[Tensor], Tensor] | None = None,
        once: int | None = None,
    ) -> None:
        self.means, self.factors, self.each = means, factors, each
        self.scale, self.once = scale, once

    def __len__(self) -> int:
        return self.each * len(self.means)

    def batches(self, size: int, seed: int, *, skip: int = 0) -> Iterator[Batch]:
        """Yield one epoch, sampled and shuffled by `seed`, without its first `skip` batches."""
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(self), generator=generator).to(self.means.device)
        if self.once is not None:
            generator = torch.Generator().manual_seed(self.once)
        noise = torch.randn(len(self.means), self.each, self.means.shape[1], generator=generator).to(self.means)
        x = self.means[:, None] + noise @ self.factors.mT
        if self.scale is not None:
            x = x * self.scale(torch.rand(x.shape[:2], generator=generator).to(x))[..., None]
        x = x.flatten(0, 1)
        for start, stop in batch_bounds(len(self), size)[skip:]:
            rows = order[start:stop]
            yield Batch(x[rows], rows // self.each, rows)


class Pairs:
    """Batches of features of the same images before and after a task, in place of images and labels."""

    def __init__(self, before: Tensor, after: Tensor) -> None:
        self.before, self.after = before, after

    def __len__(self) -> int:
        return len(self.before)

    def batches(self, size: int, seed: int, *, skip: int = 0) -> Iterator[Batch]:
        """See `Batches.batches`."""
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(seed)).to(self.before.device)
        for start, stop in batch_bounds(len(self), size)[skip:]:
            rows = order[start:stop]
            yield Batch(self.before[rows], self.after[rows], rows)


def drift(before: Tensor, after: Tensor, means: Tensor, sigma: float) -> Tensor:
    """Return how far means (classes, dim) have moved, from the same images' features (N, dim) before and after.

    It is the mean of the images' moves, weighted by exp(-d^2 / 2 sigma^2) of the distance d of features before to a
    mean (semantic drift compensation, Yu et al., CVPR 2020).
    """
    before, moves = before.to(means), after.to(means) - before.to(means)
    apart = torch.cdist(means, before, compute_mode="donot_use_mm_for_euclid_dist")
    weights = torch.exp(-apart.square() / (2 * sigma**2)) + FAR
    return weights @ moves / weights.sum(1, keepdim=True)


def linear_map(before: Tensor, after: Tensor, *, ridge: float, unit: bool, blend: bool) -> Tensor:
    """Return the linear map W (dim, dim), float64, that minimises |before @ W - after| for features (N, dim) of N
    images.

    It is ridge regression, on features of length 1 if `unit`. With `blend` the result is (1 - w) W + w I with w =
    exp(-N / dim), so that few images give a map near the identity (SLDC, Rao et al., AAAI 2026).
    """
    x, y = before.double(), after.double()
    if unit:
        x, y = F.normalize(x), F.normalize(y)
    eye = torch.eye(x.shape[1], dtype=x.dtype, device=x.device)
    solved = torch.linalg.solve(x.T @ x + ridge * eye, x.T @ y)
    weight = math.exp(-len(x) / x.shape[1]) if blend else 0.0
    return (1 - weight) * solved + weight * eye
