"""Gradients of 3x3 filters with two to four times fewer multiplications: Winograd's minimal filtering.

F(m x m, 3 x 3) of Lavin and Gray, Fast Algorithms for Convolutional Neural Networks, CVPR 2016: of a map in tiles,
m x m outputs from (m + 2) x (m + 2) inputs. What is a convolution of a tile there, is a product in each of (m + 2)^2
points: Y = A'[(G w G') * (B' d B)] A. Its gradient by w is G' [(A dY A') * (B' d B)] G, summed over tiles: a matrix
product for each point.
"""

from collections.abc import Sequence
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from pearl.nn.fast.ways import Ways

LITTLE = 2**18  # floats that a core's cache holds beside others
# B', G and A' of one dimension; (m + 2, m + 2), (m + 2, 3), (m, m + 2)
ONE_DIMENSION: dict[int, tuple[list[list[float]], ...]] = {
    2: (
        [[1, 0, -1, 0], [0, 1, 1, 0], [0, -1, 1, 0], [0, 1, 0, -1]],
        [[1, 0, 0], [1 / 2, 1 / 2, 1 / 2], [1 / 2, -1 / 2, 1 / 2], [0, 0, 1]],
        [[1, 1, 1, 0], [0, 1, -1, -1]],
    ),
    4: (
        [
            [4, 0, -5, 0, 1, 0],
            [0, -4, -4, 1, 1, 0],
            [0, 4, -4, -1, 1, 0],
            [0, -2, -1, 2, 1, 0],
            [0, 2, -1, -2, 1, 0],
            [0, 4, 0, -5, 0, 1],
        ],
        [
            [1 / 4, 0, 0],
            [-1 / 6, -1 / 6, -1 / 6],
            [-1 / 6, 1 / 6, -1 / 6],
            [1 / 24, 1 / 12, 1 / 6],
            [1 / 24, -1 / 12, 1 / 6],
            [0, 0, 1],
        ],
        [[1, 1, 1, 1, 1, 0], [0, 1, -1, 2, -2, 0], [0, 1, 1, 4, 4, 0], [0, 1, -1, 8, -8, 1]],
    ),
}


def ways(shape: Sequence[int], filters: Sequence[int], stride: int, padding: int) -> Ways | None:
    """For an input (B, C, H, W) and filters (O, C, k, k) in float32 on a CPU with AVX2: where this is the faster.

    A static rule, measured on such a CPU (docs/performance.md): oneDNN's weight gradient takes up to three times as
    long as its forward pass there. With AVX-512 it does not, and output and input gradient gain nothing.
    """
    if torch.backends.cpu.get_cpu_capability() != "AVX2":
        return None
    images, _, height, width = shape
    tiles = images * _tiles(height, tile(height, width)) * _tiles(width, tile(height, width))
    fits = tuple(filters[2:]) == (3, 3) and (stride, padding) == (1, 1)
    return Ways(weight_gradient=weight_gradient) if fits and min(filters[:2]) >= 64 and tiles >= 128 else None


def weight_gradient(grad: Tensor, x: Tensor, shape: Sequence[int], stride: int = 1, padding: int = 1) -> Tensor:
    """Of filters (O, C, 3, 3) with stride and padding 1, in channels_last; grad (B, O, H, W), x (B, C, H, W).

    In float32 it differs from a direct sum by some 1e-6 of the largest value, with the larger tiles 1e-5.
    """
    into, height, width = x.shape[1:]
    out, m = shape[0], tile(height, width)
    down, across, side = _tiles(height, m), _tiles(width, m), m + 2
    of_inputs, of_filters, of_outputs = transforms(m, x.dtype)
    more = down * m - height, across * m - width
    inputs = F.pad(x.permute(0, 2, 3, 1), (0, 0, 1, 1 + more[1], 1, 1 + more[0]))
    outputs = F.pad(grad.permute(0, 2, 3, 1), (0, 0, 0, more[1], 0, more[0]))
    sums = x.new_zeros(side * side, out, into)
    # as many images at once as fit the cache, or need as much room as the sums do
    together = max(LITTLE, sums.numel()) // (side * side * down * across * max(into, out)) or 1
    for some, theirs in zip(inputs.split(together), outputs.split(together), strict=True):
        overlapping = some.unfold(1, side, m).unfold(2, side, m).permute(4, 5, 0, 1, 2, 3)
        apart = theirs.reshape(-1, down, m, across, m, out).permute(2, 4, 0, 1, 3, 5)
        d = (of_inputs @ overlapping.reshape(side * side, -1)).view(side * side, -1, into)
        y = (of_outputs.T @ apart.reshape(m * m, -1)).view(side * side, -1, out)
        sums.baddbmm_(y.transpose(1, 2), d)
    found = (of_filters.T @ sums.view(side * side, -1)).view(3, 3, out, into)
    return found.permute(2, 3, 0, 1).contiguous(memory_format=torch.channels_last)


def tile(height: int, width: int) -> int:
    """How many outputs a side of a tile has: with more there are fewer products, but each with fewer terms."""
    return 4 if max(height, width) > 4 else 2


def _tiles(side: int, m: int) -> int:
    return -(-side // m)


@cache
def transforms(m: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """B' x B', G x G and A' x A': both dimensions at once, of a tile laid out in a row."""
    b, g, a = (torch.tensor(rows, dtype=torch.float64) for rows in ONE_DIMENSION[m])
    both = [torch.kron(one, one).to(dtype) for one in (b, g, a)]
    return both[0], both[1], both[2]
