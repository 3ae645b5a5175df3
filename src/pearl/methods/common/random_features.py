"""Random features, and the singular value decomposition of a matrix whose rows arrive in batches."""

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pearl.errors import RunError
from pearl.methods.common.feature_spaces import digest_of
from pearl.nn.task_modules import TaskTensors

DROPPED = 1e-6  # smaller singular values, relative to the largest, are rounding errors and not inverted


class RandomFeatures(nn.Module):
    """Random features relu(x R) (B, count) of features x (B, dim), with standard normal R (dim, count).

    R is not stored but drawn again from its seed and compared with a checksum.
    """

    seed: Tensor
    checksum: Tensor
    matrix: Tensor

    def __init__(self, dim: int, count: int) -> None:
        super().__init__()
        self.shape = dim, count
        self.register_buffer("seed", torch.tensor(0))
        self.register_buffer("checksum", torch.zeros(32, dtype=torch.uint8))
        self.register_buffer("matrix", torch.zeros(dim, 0), persistent=False)

    def draw(self) -> None:
        """Draw R with torch's global generator, which the engine seeds."""
        self.seed.fill_(int(torch.randint(1, 2**62, ())))
        self._make()
        self.checksum.copy_(digest_of(self.matrix))

    def _make(self) -> None:
        generator = torch.Generator().manual_seed(int(self.seed))
        self.matrix = torch.randn(self.shape, generator=generator, dtype=torch.float32).to(self.seed.device)

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        return F.relu(x @ self.matrix.to(x))

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        """See `nn.Module`.

        Raises:
            RunError: this version of torch draws other random numbers than the one that drew R.
        """
        super()._load_from_state_dict(state_dict, prefix, *args)
        if self.seed:
            self._make()
            if not torch.equal(digest_of(self.matrix), self.checksum.cpu()):
                raise RunError(
                    f"torch {torch.__version__} cannot reproduce the random features: it draws other numbers; use "
                    f"the version in environment.json"
                )


class FourierFeatures(RandomFeatures):
    """sqrt(2 / count) cos(sqrt(2 sigma) x R + b) of features x (B, dim), b (count,) uniform in [0, 2 pi).

    Inner products of random features z approximate a Gaussian kernel: E z(x)'z(y) = exp(-sigma |x - y|^2) (Rahimi and
    Recht, NeurIPS 2007).
    """

    sigma: Tensor
    offsets: Tensor

    def __init__(self, dim: int, count: int) -> None:
        super().__init__(dim, count)
        self.register_buffer("sigma", torch.zeros((), dtype=torch.float64))
        self.register_buffer("offsets", torch.zeros(0), persistent=False)

    def _make(self) -> None:
        super()._make()
        generator = torch.Generator().manual_seed(int(self.seed) + 1)
        self.offsets = (2 * math.pi * torch.rand(self.shape[1], generator=generator)).to(self.seed.device)

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        angles = (2 * self.sigma).sqrt().to(x) * (x @ self.matrix.to(x)) + self.offsets.to(x)
        return math.sqrt(2 / self.shape[1]) * angles.cos()


class TruncatedSvd(nn.Module):
    """The largest singular values of a matrix (n, dim) and their right singular vectors, updated row by row.

    New rows are added to the truncated decomposition (Brand, 2002), which is exact until it is truncated. Singular
    values are float64, vectors have the rows' dtype.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.tensors = TaskTensors(buffers=True)  # "vectors" (dim, r), "values" (r,)

    @property
    def vectors(self) -> Tensor:
        """Return orthonormal columns (dim, r)."""
        return self.tensors["vectors"]

    @property
    def values(self) -> Tensor:
        """Return the singular values (r,), descending."""
        return self.tensors["values"]

    @torch.no_grad()
    def update(self, rows: Tensor, rank: int) -> None:
        """Add rows (m, dim) and keep at most `rank` singular values."""
        columns = rows.T
        kept, values = columns[:, :0], rows.new_zeros(0, dtype=torch.float64)
        if "values" in self.tensors:
            kept, values = self.vectors.to(rows), self.values
        inside = kept.T @ columns
        outside = columns - kept @ inside
        again = kept.T @ outside  # removes rounding errors; two rounds suffice
        inside, outside = inside + again, outside - kept @ again
        new, triangle = torch.linalg.qr(outside)
        upper = torch.cat([values.diag(), inside.double()], dim=1)
        lower = torch.cat([values.new_zeros(len(triangle), len(values)), triangle.double()], dim=1)
        turn, values, _ = torch.linalg.svd(torch.cat([upper, lower]), full_matrices=False)
        count = min(rank, int((values > DROPPED * values.amax()).sum()))
        vectors = torch.cat([kept, new], dim=1) @ turn[:, :count].to(rows)
        vectors, signs = torch.linalg.qr(vectors)  # orthonormal again, up to signs
        # contiguous, as they are when loaded: products with another layout round differently
        self.tensors.add("vectors", (vectors * signs.diagonal().sign()).contiguous())
        self.tensors.add("values", values[:count])

    def least_squares(self, cross: Tensor, ridge: float = 0.0) -> Tensor:
        """Return weights W (dim, targets) of least norm that minimise |Z W - Y|^2 + ridge |W|^2 in the kept subspace of
        Z.

        `cross` is Z'Y (dim, targets).
        """
        inside = self.vectors.T @ cross.to(self.vectors)
        return self.vectors @ (inside.double() / (self.values.square() + ridge)[:, None]).to(inside)
