"""Convolutions of small maps as matrix products of all windows with the filters (im2col)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from pearl.nn.fast.ways import Ways


def ways(shape: Sequence[int], filters: Sequence[int], stride: int, padding: int) -> Ways | None:
    """Return how to compute an input (B, C, H, W) and filters (O, C, k, k) in bfloat16 on a CPU: by product where
    faster.

    The rule depends on shape and precision only, so that every machine computes a step in the same way. Measured for
    3x3 filters with AVX-512 BF16, and in a trial with AMX (docs/performance.md): with few pixels and many channels,
    oneDNN's direct convolution is slow, mostly its weight gradient.
    """
    out, into, height, width = *filters[:2], *filters[2:]
    largest = (max(shape[2:]) + 2 * padding - height) // stride + 1
    if height != 3 or width != 3 or out < 512 or into < 256 or largest > 8:
        return None
    return EVERY_PART if largest <= 4 else Ways(weight_gradient=weight_gradient)


def output(x: Tensor, filters: Tensor, stride: int, padding: int) -> Tensor:
    """Return the convolution (B, O, H', W') in channels_last."""
    rows, height, width = windows(x, filters.shape[2], stride, padding)
    return (rows @ as_matrix(filters).T).view(len(x), height, width, len(filters)).permute(0, 3, 1, 2)


def input_gradient(grad: Tensor, filters: Tensor, shape: Sequence[int], stride: int, padding: int) -> Tensor:
    """Return the gradient of an input of this shape (B, C, H, W), in channels_last."""
    rows = as_rows(grad) @ as_matrix(filters)
    return gathered(rows, shape, grad.shape[2:], filters.shape[2], stride, padding)


def weight_gradient(grad: Tensor, x: Tensor, shape: Sequence[int], stride: int, padding: int) -> Tensor:
    """Return the gradient of filters of this shape (O, C, k, k), in channels_last."""
    out, into, k, _ = shape
    product = as_rows(grad).T @ windows(x, k, stride, padding)[0]
    return product.view(out, k, k, into).permute(0, 3, 1, 2)


EVERY_PART = Ways(output, input_gradient, weight_gradient)


def as_rows(grad: Tensor) -> Tensor:
    """Reshape (B, O, H', W') to a row per pixel: (B * H' * W', O)."""
    return grad.permute(0, 2, 3, 1).reshape(-1, grad.shape[1])


def as_matrix(filters: Tensor) -> Tensor:
    """Reshape filters to (O, k * k * C), channels last as in a window."""
    return filters.permute(0, 2, 3, 1).reshape(len(filters), -1)


def windows(x: Tensor, k: int, stride: int, padding: int) -> tuple[Tensor, int, int]:
    """Return every window of x (B, C, H, W) as a row: (B * H' * W', k * k * C), and H', W'."""
    images, channels = x.shape[:2]
    padded = torch.nn.functional.pad(x.permute(0, 2, 3, 1), (0, 0, *[padding] * 4)).contiguous()
    height, width = ((side - k) // stride + 1 for side in padded.shape[1:3])
    image, row, pixel, channel = padded.stride()
    shape = images, height, width, k, k, channels
    view = padded.as_strided(shape, (image, row * stride, pixel * stride, row, pixel, channel))
    return view.reshape(images * height * width, -1), height, width


def gathered(rows: Tensor, shape: Sequence[int], size: Sequence[int], k: int, stride: int, padding: int) -> Tensor:
    """Add the windows (B * H' * W', k * k * C) to the pixels of an input (B, C, H, W); the adjoint of `windows`."""
    images, channels, height, width = shape
    each = rows.view(images, *size, k, k, channels)
    padded = rows.new_zeros(images, height + 2 * padding, width + 2 * padding, channels)
    for i in range(k):
        for j in range(k):
            padded[:, i : i + stride * size[0] : stride, j : j + stride * size[1] : stride] += each[:, :, :, i, j]
    return padded[:, padding : padding + height, padding : padding + width].permute(0, 3, 1, 2)
