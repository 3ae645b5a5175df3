"""Means and covariances of classes, from which class statistics compute their discriminants."""

import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from pearl.errors import RunError

MANY = 8192  # with more prototypes, products are computed in chunks of this size


def drawn(rows: Tensor, most: int) -> Tensor:
    """Return a random sample of `most` rows, in their order; all if there are fewer."""
    if len(rows) <= most:
        return rows
    chosen = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))[:most]
    return rows[chosen.sort().values.to(rows.device)]


def shrinkage(p: int, freedom: int, views: float = 1.0) -> float:
    """Return the share a of the identity in a covariance (p, p): (p / (n + p))^3, at least 1e-4.

    n is the number of degrees of freedom times the root of the mean number of views of an image: views of one image are
    more alike than images.

    The lower limit makes the inverse safe in float32. On held-out images of two development streams (ResNet-18 with 400
    images a class, DeiT-Tiny with 40) a = p / (2 (n + p)) is 2.6 and 0.5 points worse.
    """
    return max((p / (freedom * math.sqrt(views) + p)) ** 3, 1e-4)


def pieces(parts: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the tasks' rows, one per prototype, stacked in float64: about MANY rows at a time."""
    piece: list[Tensor] = []
    rows = 0
    for part in parts:
        if rows >= MANY:
            yield torch.cat(piece)
            piece, rows = [], 0
        piece.append(part.double())
        rows += len(part)
    yield torch.cat(piece)


def statistics(rows: Tensor, class_index: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Return means (classes, p) and pooled within-class scatter (p, p), float64, of features (N, views, p).

    The views of an image together weigh as much as one image.
    """
    rows = rows.double()
    counts = class_index.bincount(minlength=classes).clamp(min=1)[:, None]
    means = rows.new_zeros(classes, rows.shape[2]).index_add_(0, class_index, rows.mean(1)) / counts
    return means, moment(rows - means[class_index, None])


def moment(rows: Tensor) -> Tensor:
    """Return the sum over images of the mean outer product (p, p) of their views (N, views, p)."""
    flat = rows.flatten(0, 1)
    return flat.T @ flat / rows.shape[1]


def shrunk(matrix: Tensor, share: float, trace: float | None = None) -> Tensor:
    """Return (1 - share) matrix + share (trace / p) I, by default with the matrix's own trace."""
    made = (1 - share) * matrix
    trace = float(matrix.trace()) if trace is None else trace
    made.diagonal().add_(share * max(trace / len(matrix), 1e-12))
    return made


def root(matrix: Tensor) -> Tensor:
    """Return the Cholesky factor of a covariance (p, p).

    Raises:
        RunError: it is not a covariance.
    """
    try:
        return torch.linalg.cholesky(matrix)
    except torch.linalg.LinAlgError:
        raise RunError(
            "class statistics: a covariance matrix is not positive definite; restore the model from a copy"
        ) from None


def inverse(matrix: Tensor) -> Tensor:
    """Return the inverse of a covariance (p, p) from its Cholesky factor."""
    return torch.cholesky_inverse(root(matrix))


def pack(matrix: Tensor) -> Tensor:
    """Return the triangle of a symmetric matrix as a vector."""
    return matrix[torch.triu_indices(*matrix.shape, device=matrix.device).unbind()]


def unpack(triangle: Tensor, p: int) -> Tensor:
    """Return the matrix (p, p) of a packed triangle."""
    matrix = triangle.new_zeros(p, p)
    rows, columns = torch.triu_indices(p, p, device=triangle.device).unbind()
    matrix[rows, columns] = triangle
    matrix[columns, rows] = triangle
    return matrix
