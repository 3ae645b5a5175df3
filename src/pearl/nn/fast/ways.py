"""A convolution whose output and gradients are each computed by the faster algorithm."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pearl.nn.precision import outside_autocast


class Ways(NamedTuple):
    """Alternatives to oneDNN for parts of a convolution; None keeps oneDNN."""

    output: Callable[[Tensor, Tensor, int, int], Tensor] | None = None
    """Maps an input (B, C, H, W), filters (O, C, k, k), stride and padding: (B, O, H', W')."""
    input_gradient: Callable[[Tensor, Tensor, torch.Size, int, int], Tensor] | None = None
    """Maps a gradient (B, O, H', W'), filters, the input's shape, stride and padding: (B, C, H, W)."""
    weight_gradient: Callable[[Tensor, Tensor, torch.Size, int, int], Tensor] | None = None
    """Maps a gradient, an input, the filters' shape, stride and padding: (O, C, k, k)."""


class Convolution(torch.autograd.Function):
    """A square convolution without bias and groups; x (B, C, H, W) and filters (O, C, k, k) have one floating dtype.

    Second derivatives use PyTorch's own gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, filters: Tensor, stride: int, padding: int, ways: Ways) -> Tensor:
        """Return the convolution (B, O, H', W')."""
        ctx.save_for_backward(x, filters)
        ctx.geometry = stride, padding, ways
        if ways.output:
            return ways.output(x, filters, stride, padding)
        return torch.conv2d(x, filters, None, stride, padding)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        """Return the gradients of x and the filters that are needed."""
        (x, filters), (stride, padding, ways) = ctx.saved_tensors, ctx.geometry
        of_x, of_filters = ctx.needs_input_grad[:2]
        if torch.is_grad_enabled():
            ways = Ways()
        rest = [of_x and not ways.input_gradient, of_filters and not ways.weight_gradient, False]
        gradients: list[Tensor | None] = [None, None]
        with outside_autocast(grad):
            if any(rest):
                arguments = [stride] * 2, [padding] * 2, [1, 1], False, [0, 0], 1, rest
                gradients = list(torch.ops.aten.convolution_backward(grad, x, filters, None, *arguments)[:2])
            if of_x and ways.input_gradient:
                gradients[0] = ways.input_gradient(grad, filters, x.shape, stride, padding)
            if of_filters and ways.weight_gradient:
                gradients[1] = ways.weight_gradient(grad, x, filters.shape, stride, padding)
        return gradients[0], gradients[1], None, None, None
