"""Alternative computations of convolutions that are slow on a CPU."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pearl.nn.fast import winograd
from pearl.nn.precision import outside_autocast


class FastConvolutions(TorchFunctionMode):
    """Context in which two kinds of convolutions do not use oneDNN's default kernels.

    Grouped convolutions with strides or several filters per group run outside autocast. oneDNN has no fast bfloat16
    kernel for their gradients: with AVX-512 BF16 a depthwise 3x3 of 512 channels, stride 2, takes 125 ms forward and
    backward, in float32 9 ms (docs/performance.md). In float32 on a CPU with AVX2, gradients of 3x3 filters take fewer
    multiplications (see `winograd.is_faster`).
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call the function, with another computation for these convolutions."""
        if func is torch.conv2d and len(args) == 7:  # the call of nn.Conv2d
            x, weight, bias, stride, padding, dilation, groups = args
            bf16 = torch.is_autocast_enabled(x.device.type)
            if bf16 and is_slow(stride, groups, len(weight)):
                return _in_float32(x, weight, bias, (stride, padding, dilation, groups))
            plain = bias is None and groups == 1 and dilation == (1, 1) and _square(stride, padding) and not bf16
            if plain and torch.is_grad_enabled() and not _transformed() and _by_winograd(x, weight, stride, padding):
                return winograd.Convolution.apply(x, weight)
        return func(*args, **(kwargs or {}))


def is_slow(stride: Sequence[int], groups: int, filters: int) -> bool:
    """Return True if oneDNN has no fast bfloat16 kernel for the gradients of such a convolution."""
    return groups > 1 and (max(stride) > 1 or filters > groups)


def has_slow(module: nn.Module | None, *, bf16: bool) -> bool:
    """Return True if a module may contain such convolutions, so that `FastConvolutions` makes its steps faster."""
    convs = (m for m in module.modules() if isinstance(m, nn.Conv2d)) if module is not None else ()
    if bf16:
        return any(is_slow(conv.stride, conv.groups, conv.out_channels) for conv in convs)
    plain = (conv for conv in convs if conv.bias is None and conv.groups == 1 and _square(conv.stride, conv.padding))
    best = (1024, 1, 16, 16)  # many images with a size that fits tiles
    return any(winograd.is_faster(best, conv.weight.shape, conv.stride[0], int(conv.padding[0])) for conv in plain)


def _square(stride: Sequence[int], padding: Sequence[int] | str) -> bool:
    return stride[0] == stride[1] and not isinstance(padding, str) and padding[0] == padding[1]


def _transformed() -> bool:
    """Return True under `torch.func`'s grad, vmap and similar, which accept only PyTorch's own functions."""
    return torch._C._are_functorch_transforms_active()


def _by_winograd(x: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int]) -> bool:
    """Return True for a trained float32 weight in channels_last whose gradient is faster by Winograd's algorithm."""
    alike = x.dtype == weight.dtype == torch.float32 and x.is_contiguous(memory_format=torch.channels_last)
    return alike and weight.requires_grad and winograd.is_faster(x.shape, weight.shape, stride[0], padding[0])


def _in_float32(x: Tensor, weight: Tensor, bias: Tensor | None, arguments: tuple[Any, ...]) -> Tensor:
    with outside_autocast(x):
        result = torch.conv2d(x.float(), weight.float(), None if bias is None else bias.float(), *arguments)
    return result.to(torch.get_autocast_dtype(x.device.type))  # in the layout of the other kernel, for later layers
