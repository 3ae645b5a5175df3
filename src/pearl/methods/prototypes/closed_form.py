"""Heads in closed form, computed from statistics of features without training steps."""

import torch
from torch import Tensor


def nearest_mean(features: Tensor, means: Tensor) -> Tensor:
    """Return minus the squared distances (B, classes) of features (B, dim) to class means (classes, dim)."""
    return 2 * features @ means.T - features.square().sum(1, keepdim=True) - means.square().sum(1)


def mahalanobis(features: Tensor, means: Tensor, precisions: Tensor) -> Tensor:
    """Return minus squared Mahalanobis distances (B, classes); `precisions` (classes, dim, dim) invert covariances."""
    apart = features[None] - means[:, None]
    return -((apart @ precisions) * apart).sum(2).T


def shrink(covariance: Tensor, alpha1: float, alpha2: float) -> Tensor:
    """Return covariances (..., dim, dim) plus alpha1 * mean variance on the diagonal, alpha2 * mean covariance off it.

    Covariances of exactly 0, such as those of dead units, are excluded from the mean (FeCAM's code).
    """
    diagonal = covariance.diagonal(dim1=-2, dim2=-1)
    others = covariance - torch.diag_embed(diagonal)
    mean = others.sum((-2, -1)) / others.count_nonzero((-2, -1)).clamp(min=1)
    eye = torch.eye(covariance.shape[-1], dtype=covariance.dtype, device=covariance.device)
    return covariance + alpha1 * diagonal.mean(-1)[..., None, None] * eye + alpha2 * mean[..., None, None] * (1 - eye)


def correlation(covariance: Tensor) -> Tensor:
    """Return covariances (..., dim, dim) divided by both standard deviations; a variance of 0 becomes 1."""
    deviations = covariance.diagonal(dim1=-2, dim2=-1).sqrt()
    deviations = torch.where(deviations > 0, deviations, 1.0)
    scaled = covariance / (deviations[..., :, None] * deviations[..., None, :])
    return scaled - torch.diag_embed(scaled.diagonal(dim1=-2, dim2=-1) - 1)


def ridge(gram: Tensor, cross: Tensor, strength: float) -> Tensor:
    """Return weights (targets, dim) that minimise |Y - X W'|^2 + strength |W|^2, from X'X (dim, dim) and X'Y (dim,
    targets).

    With centred X and Y they are those of a regression with the intercept mean(Y) - W mean(X). In float64.
    """
    regular = gram.to(torch.float64, copy=True)
    regular.diagonal().add_(strength)
    factor, failed = torch.linalg.cholesky_ex(regular)  # half the cost of `solve`, which also works without a ridge
    if failed:
        return torch.linalg.solve(regular, cross).T
    del regular  # 800 MB with 10,000 features, and the next line needs as much again
    return torch.cholesky_solve(cross, factor).T
