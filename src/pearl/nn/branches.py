"""1x1 convolutions parallel to wider ones, and BatchNorms: both can be merged into the convolution exactly.

A network can thus be trained in one form and stored in another (Ding et al., RepVGG, CVPR 2021).
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_weights

from pearl.nn.fast.folding import norms_after_convs
from pearl.nn.task_modules import TaskTensors


def wide_convs(net: nn.Module) -> dict[str, nn.Conv2d]:
    """Return the convolutions of an odd size above 1x1 that a 1x1 branch fits, except the first, the stem."""
    convs = [
        (name, conv) for name, conv in net.named_modules() if type(conv) is nn.Conv2d and max(conv.kernel_size) > 1
    ]
    return {name: conv for name, conv in convs[1:] if _centred(conv)}


def _centred(conv: nn.Conv2d) -> bool:
    sizes = zip(conv.kernel_size, conv.dilation, strict=True)
    return all(size % 2 for size in conv.kernel_size) and conv.padding == tuple(d * (size // 2) for size, d in sizes)


class SideBranches(TaskTensors):
    """A zero 1x1 branch for each of some convolutions, with the same input, stride and groups, without bias."""

    def __init__(self, convs: Mapping[str, nn.Conv2d]) -> None:
        super().__init__()
        for name, conv in convs.items():
            self.add(f"{name}.weight", torch.zeros_like(conv.weight[:, :, :1, :1]))

    def merged(self, net: nn.Module) -> dict[str, Tensor]:
        """Return the weights of these convolutions in `net`, by name, with each branch added at the kernel's centre.

        This is exact: convolutions are linear in the weight, and a 1x1 kernel is a wider one with zeros around its
        centre.
        """
        weights = {}
        for key, branch in self.named_parameters():
            name = key.replace("/", ".")
            weight = net.get_parameter(name)
            rows, columns = (size // 2 for size in weight.shape[2:])
            weights[name] = weight + F.pad(branch, (columns, columns, rows, rows))
        return weights

    @torch.no_grad()
    def merge(self, net: nn.Module) -> None:
        """Merge the branches into the convolutions of `net`."""
        for name, weight in self.merged(net).items():
            net.get_parameter(name).copy_(weight)


@torch.no_grad()
def absorb_norms(net: nn.Module) -> None:
    """Move the scale of BatchNorms in evaluation mode into the convolutions before them; the norms keep a shift.

    The network keeps its structure and, in evaluation mode, its function. Norms that do not follow a convolution, or
    that `norms_after_convs` cannot see, are unchanged.
    """
    for name, before in norms_after_convs(net).items():
        norm: Any = net.get_submodule(name)
        conv: Any = net.get_submodule(before)
        statistics = norm.running_mean, norm.running_var, norm.eps
        weight, shift = fuse_conv_bn_weights(conv.weight, conv.bias, *statistics, norm.weight, norm.bias)
        conv.weight.copy_(weight)
        norm.running_mean.copy_(-shift)
        norm.running_var.fill_(1 - norm.eps)  # makes the norm's divisor 1
        for parameter, value in ((norm.weight, 1.0), (norm.bias, 0.0), (conv.bias, 0.0)):
            if parameter is not None:
                parameter.fill_(value)
