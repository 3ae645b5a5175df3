"""Gradients of 3x3 filters with two to four times fewer multiplications: Winograd's minimal filtering.

F(m x m, 3 x 3) of Lavin and Gray, Fast Algorithms for Convolutional Neural Networks, CVPR 2016: maps are cut into
tiles, m x m outputs from (m + 2) x (m + 2) inputs. The convolution of a tile is a product in each of (m + 2)^2 points:
Y = A'[(G w G') * (B' d B)] A. Its gradient by w is G' [(A dY A') * (B' d B)] G, summed over tiles: a matrix product for
each point.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pearl.nn.precision import outside_autocast

LITTLE = 2**18  # floats that fit a core's cache beside other data
ENOUGH = 128  # tiles: enough to repay the work done once for all of them
# B', G and A' in one dimension; (m + 2, m + 2), (m + 2, 3), (m, m + 2)
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


class Convolution(torch.autograd.Function):
    """A convolution with 3x3 filters, stride and padding 1, whose weight gradient is Winograd's; all else is oneDNN's.

    Second derivatives use PyTorch's own gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, filters: Tensor) -> Tensor:
        """Map x (B, C, H, W) and filters (O, C, 3, 3) of one floating dtype to (B, O, H, W)."""
        ctx.save_for_backward(x, filters)
        return torch.conv2d(x, filters, None, 1, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients of x and the filters that are needed."""
        x, filters = ctx.saved_tensors
        of_x, of_filters = ctx.needs_input_grad
        ours = of_filters and not torch.is_grad_enabled()
        rest = [of_x, of_filters and not ours, False]
        gradients: list[Tensor | None] = [None, None]
        with outside_autocast(grad):
            if any(rest):
                arguments = [1, 1], [1, 1], [1, 1], False, [0, 0], 1, rest
                gradients = list(torch.ops.aten.convolution_backward(grad, x, filters, None, *arguments)[:2])
            if ours:
                gradients[1] = weight_gradient(grad, x, filters.shape)
        return gradients[0], gradients[1]


def is_faster(shape: Sequence[int], filters: Sequence[int], stride: int, padding: int) -> bool:
    """Return True if `Convolution` is faster for an input (B, C, H, W) and filters (O, C, k, k) in float32.

    On an AMD EPYC (Zen 3), a training step of a ResNet-18 at 32 pixels takes 0.80 of PyTorch's CPU time, one of half
    the width 0.98 (docs/performance.md). oneDNN's weight gradient takes 1.4 to 2.5 times as long as its forward pass
    there, as on other CPUs with AVX2. With AVX-512 it does not, so the rule checks the CPU. Output and input gradient
    gain nothing.
    """
    images, _, height, width = shape
    if torch.backends.cpu.get_cpu_capability() != "AVX2" or tuple(filters[2:]) != (3, 3) or (stride, padding) != (1, 1):
        return False
    m = tile(images, height, width)
    tiles = _tiles(height, m) * _tiles(width, m)
    share = (m + 2) ** 2 * tiles / (9 * height * width)  # multiplications of the direct sum
    transforms = 64 / min(filters[:2])  # the transforms' cost, in products
    return images * tiles >= ENOUGH and share * (1 + transforms) <= 0.7


def weight_gradient(grad: Tensor, x: Tensor, shape: Sequence[int]) -> Tensor:
    """Return the gradient of filters (O, C, 3, 3) with stride and padding 1, in channels_last; grad (B, O, H, W), x (B,
    C, H, W).

    In float32 it differs from a direct sum by 1e-6 to 1e-5 of the largest value.
    """
    into, height, width = x.shape[1:]
    out, m = shape[0], tile(len(x), height, width)
    down, across, side = _tiles(height, m), _tiles(width, m), m + 2
    of_inputs, of_filters, of_outputs = transforms(m, x.dtype)
    more = (0, 0, 0, across * m - width, 0, down * m - height)  # padding of the last tiles
    border = (0, 0, 1, 1 + more[3], 1, 1 + more[5])
    sums = x.new_zeros(side * side, out, into)
    # as many images at once as fit the cache, or as take as much memory as the sums
    together = max(LITTLE, sums.numel()) // (side * side * down * across * max(into, out)) or 1
    for inputs, outputs in zip(x.split(together), grad.split(together), strict=True):
        padded = F.pad(inputs.permute(0, 2, 3, 1), border)
        overlapping = padded.unfold(1, side, m).unfold(2, side, m).permute(4, 5, 0, 1, 2, 3)
        whole = outputs.permute(0, 2, 3, 1)
        if any(more):
            whole = F.pad(whole, more)
        apart = whole.reshape(-1, down, m, across, m, out).permute(2, 4, 0, 1, 3, 5)
        d = (of_inputs @ overlapping.reshape(side * side, -1)).view(side * side, -1, into)
        y = (of_outputs.T @ apart.reshape(m * m, -1)).view(side * side, -1, out)
        sums = torch.baddbmm(sums, y.transpose(1, 2), d)
    gradient = (of_filters.T @ sums.view(side * side, -1)).view(3, 3, out, into)
    return gradient.permute(2, 0, 1, 3).contiguous().permute(0, 3, 1, 2)


def tile(images: int, height: int, width: int) -> int:
    """Return the outputs per side of a tile: 4 if this takes fewer products and there are enough tiles."""
    small, large = (_tiles(height, m) * _tiles(width, m) for m in (2, 4))
    return 4 if images * large >= ENOUGH and 36 * large < 0.8 * 16 * small else 2


def _tiles(side: int, m: int) -> int:
    return -(-side // m)


@cache
def transforms(m: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return B' x B', G x G and A' x A': both dimensions at once, for a flattened tile."""
    b, g, a = (torch.tensor(rows, dtype=torch.float64) for rows in ONE_DIMENSION[m])
    return torch.kron(b, b).to(dtype), torch.kron(g, g).to(dtype), torch.kron(a, a).to(dtype)
