"""1x1 convolutions beside wider ones, and BatchNorms: both become part of the convolution, exactly.

A network can so be trained in another form than it is kept in (Ding et al., RepVGG, CVPR 2021).
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_weights

from pearl.nn.fast.folding import norms_after_convs
from pearl.nn.growing import TaskTensors


def wide_convs(net: nn.Module) -> dict[str, nn.Conv2d]:
    """Convolutions of an odd size above 1x1 whose centre sees what a 1x1 one would; all but the first, the stem."""
    convs = [
        (name, conv) for name, conv in net.named_modules() if type(conv) is nn.Conv2d and max(conv.kernel_size) > 1
    ]
    return {name: conv for name, conv in convs[1:] if _centred(conv)}


def _centred(conv: nn.Conv2d) -> bool:
    sizes = zip(conv.kernel_size, conv.dilation, strict=True)
    return all(size % 2 for size in conv.kernel_size) and conv.padding == tuple(d * (size // 2) for size, d in sizes)


class SideBranches(TaskTensors):
    """For each of some convolutions a 1x1 one beside it: of the same input, stride and groups, without bias, zero."""

    def __init__(self, convs: Mapping[str, nn.Conv2d]) -> None:
        super().__init__()
        for name, conv in convs.items():
            self.add(f"{name}.weight", torch.zeros_like(conv.weight[:, :, :1, :1]))

    def merged(self, net: nn.Module) -> dict[str, Tensor]:
        """The weights of these convolutions in `net`, by name, each with its branch added where the kernel's centre is.

        A convolution is linear in its weight, and a 1x1 one is a wider one whose other entries are 0.
        """
        found = {}
        for key, branch in self.named_parameters():
            name = key.replace("/", ".")
            weight = net.get_parameter(name)
            rows, columns = (size // 2 for size in weight.shape[2:])
            found[name] = weight + F.pad(branch, (columns, columns, rows, rows))
        return found

    @torch.no_grad()
    def merge(self, net: nn.Module) -> None:
        """Make them part of the convolutions of `net`."""
        for name, weight in self.merged(net).items():
            net.get_parameter(name).copy_(weight)


@torch.no_grad()
def absorb_norms(net: nn.Module) -> None:
    """Put the scale that BatchNorms have in evaluation into the convolutions before them; what they keep is a shift.

    The network keeps its structure and, in evaluation mode, its function. Norms that do not follow a convolution, or
    that `norms_after_convs` cannot see, stay as they are.
    """
    for name, before in norms_after_convs(net).items():
        norm: Any = net.get_submodule(name)
        conv: Any = net.get_submodule(before)
        statistics = norm.running_mean, norm.running_var, norm.eps
        weight, shift = fuse_conv_bn_weights(conv.weight, conv.bias, *statistics, norm.weight, norm.bias)
        conv.weight.copy_(weight)
        norm.running_mean.copy_(-shift)
        norm.running_var.fill_(1 - norm.eps)  # so that what it divides by is 1
        for parameter, value in ((norm.weight, 1.0), (norm.bias, 0.0), (conv.bias, 0.0)):
            if parameter is not None:
                parameter.fill_(value)
