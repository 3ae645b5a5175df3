"""Low-rank updates trained as parallel branches of their convolutions instead of inside the weights, on a CPU.

A merged update gets its gradient from that of the whole weight, which takes a third of a convolution's step and is then
discarded. Two thin convolutions of the same input are the same update without it.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from pearl.nn.fast.folding import with_weights
from pearl.nn.lowrank import Fold, matrix_shape

THIN = 8  # a rank this many times below the full rank gains on every layer (docs/performance.md)


@dataclass(frozen=True)
class ParallelLora:
    """An update scale * B A of a convolution, as its forward hook; A (r, n), B (m, r)."""

    layer: str  # its name
    a: Tensor
    b: Tensor
    scale: float
    fold: Fold

    def __call__(self, layer: nn.Conv2d, inputs: tuple[Tensor], output: Tensor) -> Tensor:
        """Return the layer's output plus the update's."""
        (x,), b = inputs, self.scale * self.b
        out, into, kh, kw = layer.weight.shape
        stride, padding, dilation = layer.stride, layer.padding, layer.dilation
        if self.fold == "spatial":  # columns of A are (in, kw), rows of B are (out, kh): 1 x kw, then kh x 1
            a, b = self.a.reshape(-1, into, 1, kw), b.reshape(out, kh, -1).transpose(1, 2)[..., None]
            x = F.conv2d(x, a, None, (1, stride[1]), (0, int(padding[1])), (1, dilation[1]))
            return output + F.conv2d(x, b, None, (stride[0], 1), (int(padding[0]), 0), (dilation[0], 1))
        x = F.conv2d(x, self.a.reshape(-1, into, kh, kw), None, stride, padding, dilation)
        return output + F.conv2d(x, b[..., None, None])


def fits_beside(layer: nn.Module, rank: int, fold: Fold) -> bool:
    """Return True if an update of this rank is a pair of convolutions that is faster than its merged weight.

    1 x 1 convolutions are not: they are matrix products already. Subclasses of `nn.Conv2d` may transform the weight, as
    timm's standardised one does.
    """
    if type(layer) is not nn.Conv2d or layer.groups > 1 or layer.kernel_size == (1, 1) or fold == "view":
        return False
    if layer.weight.device.type != "cpu":  # on an H100 a step took 1.5 times as long with few channels
        return False
    plain = layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
    return plain and 0 < THIN * rank <= min(matrix_shape(layer.weight.shape, fold))


def with_beside(net: nn.Module, updates: Iterable[ParallelLora]) -> nn.Module:
    """Return a copy of `net` in training mode with the updates that `fits_beside` allows; it shares its tensors."""
    network = with_weights(net, {}).train()
    for update in updates:
        network.get_submodule(update.layer).register_forward_hook(update)
    return network
