"""Convolutions of small maps as matrix products: every window a row of a matrix, times the filters (im2col)."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class Parts(NamedTuple):
    """What of a convolution is computed as a product."""

    output: bool
    input_gradient: bool
    weight_gradient: bool


def parts(shape: Sequence[int], filters: Sequence[int], stride: int, padding: int) -> Parts | None:
    """For an input (B, C, H, W) and filters (O, C, k, k) in bfloat16 on a CPU: where the product is the faster.

    A static rule, so that a step has one result on every machine. Measured for 3x3 filters with AVX-512 BF16 and with
    AMX (docs/performance.md): few pixels and many channels make oneDNN's direct convolution slow, above all its weight
    gradient.
    """
    out, into, height, width = *filters[:2], *filters[2:]
    largest = (max(shape[2:]) + 2 * padding - height) // stride + 1
    if height != 3 or width != 3 or out < 512 or into < 256 or largest > 8:
        return None
    return Parts(True, True, True) if largest <= 4 else Parts(False, False, True)


class Product(torch.autograd.Function):
    """A square convolution without bias and groups; x (B, C, H, W), filters (O, C, k, k), both of one floating type."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, filters: Tensor, stride: int, padding: int, parts: Parts) -> Tensor:
        """The convolution (B, O, H', W'), in channels_last."""
        ctx.save_for_backward(x, filters)
        ctx.how = stride, padding, parts
        if not parts.output:
            return torch.conv2d(x, filters, None, stride, padding)
        rows, height, width = windows(x, filters.shape[2], stride, padding)
        return (rows @ as_matrix(filters).T).view(len(x), height, width, len(filters)).permute(0, 3, 1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        """Gradients of x and of the filters, where they are asked for."""
        (x, filters), (stride, padding, parts) = ctx.saved_tensors, ctx.how
        of_x, of_filters = ctx.needs_input_grad[:2]
        by_product = of_x and parts.input_gradient, of_filters and parts.weight_gradient
        rows = grad.permute(0, 2, 3, 1).reshape(-1, len(filters))
        rest = [of_x and not by_product[0], of_filters and not by_product[1], False]
        found: list[Tensor | None] = [None, None]
        if any(rest):
            how = [stride] * 2, [padding] * 2, [1, 1], False, [0, 0], 1, rest
            found = list(torch.ops.aten.convolution_backward(grad, x, filters, None, *how)[:2])
        if by_product[0]:
            found[0] = gathered(rows @ as_matrix(filters), x.shape, grad.shape[2:], filters.shape[2], stride, padding)
        if by_product[1]:
            into, k = filters.shape[1:3]
            product = rows.T @ windows(x, k, stride, padding)[0]
            found[1] = product.view(-1, k, k, into).permute(0, 3, 1, 2)
        return found[0], found[1], None, None, None


def as_matrix(filters: Tensor) -> Tensor:
    """(O, k * k * C), channels last as in a window."""
    return filters.permute(0, 2, 3, 1).reshape(len(filters), -1)


def windows(x: Tensor, k: int, stride: int, padding: int) -> tuple[Tensor, int, int]:
    """Every window of x (B, C, H, W) as a row: (B * H' * W', k * k * C), H', W'."""
    images, channels = x.shape[:2]
    padded = torch.nn.functional.pad(x.permute(0, 2, 3, 1), (0, 0, *[padding] * 4)).contiguous()
    height, width = ((side - k) // stride + 1 for side in padded.shape[1:3])
    image, row, pixel, channel = padded.stride()
    shape = images, height, width, k, k, channels
    found = padded.as_strided(shape, (image, row * stride, pixel * stride, row, pixel, channel))
    return found.reshape(images * height * width, -1), height, width


def gathered(rows: Tensor, shape: Sequence[int], size: Sequence[int], k: int, stride: int, padding: int) -> Tensor:
    """What the windows (B * H' * W', k * k * C) give to the pixels of an input (B, C, H, W), added up."""
    images, channels, height, width = shape
    each = rows.view(images, *size, k, k, channels)
    padded = rows.new_zeros(images, height + 2 * padding, width + 2 * padding, channels)
    for i in range(k):
        for j in range(k):
            padded[:, i : i + stride * size[0] : stride, j : j + stride * size[1] : stride] += each[:, :, :, i, j]
    return padded[:, padding : padding + height, padding : padding + width].permute(0, 3, 1, 2)
