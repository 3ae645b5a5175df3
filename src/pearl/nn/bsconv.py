"""A ResNet-like network of blueprint-separable convolutions (Haase & Amthor, CVPR 2020), as PEARL (BSC) uses it.

The paper gives three stages of two blocks and a total near 1.25 M parameters, not the exact layout. This one has a
separable stem 3 -> 64, stages of 128, 256 and 512 channels, and grouped 3x3 shortcuts (one group per input channel):
1,254,400 parameters, which reproduces every parameter count the paper prints for BSC to 0.05 M. Other layouts may too.
"""

from typing import Annotated

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from pearl.nn.weights import load_weights


class SeparableConv(nn.Sequential):
    """Pointwise 1x1, then depthwise 3x3."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.pointwise = nn.Conv2d(inputs, outputs, 1, bias=False)
        self.depthwise = nn.Conv2d(outputs, outputs, 3, stride, padding=1, groups=outputs, bias=False)


class SeparableBlock(nn.Module):
    """Two separable convolutions and a shortcut: the identity, or a grouped 3x3 where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = SeparableConv(inputs, outputs, stride)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = SeparableConv(outputs, outputs)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.downsample.append(nn.Conv2d(inputs, outputs, 3, stride, padding=1, groups=inputs, bias=False))
            self.downsample.append(nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """(B, inputs, H, W) -> (B, outputs, H/stride, W/stride)."""
        out = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(out)) + self.downsample(x))


class SeparableResNet(nn.Module):
    """Three stages of two separable blocks."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.dim = 8 * width
        self.pretrained = False
        self.conv1 = SeparableConv(3, width)
        self.bn1 = nn.BatchNorm2d(width)
        self.layer1 = _stage(width, 2 * width, stride=1)
        self.layer2 = _stage(2 * width, 4 * width, stride=2)
        self.layer3 = _stage(4 * width, 8 * width, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        """Images (B, 3, H, W) -> features (B, dim)."""
        x = F.relu(self.bn1(self.conv1(x)))
        return self.layer3(self.layer2(self.layer1(x))).mean((2, 3))


def _stage(inputs: int, outputs: int, stride: int) -> nn.Sequential:
    return nn.Sequential(SeparableBlock(inputs, outputs, stride), SeparableBlock(outputs, outputs, 1))


def bsc(
    image_size: int, *, width: Annotated[int, Field(ge=1, le=1024)] = 64, weights: str | None = None
) -> SeparableResNet:
    """The blueprint-separable ResNet without a head; 1,254,400 parameters at width 64.

    `weights` is a weight file with this network's names, or a run directory whose reference is to be used again.
    """
    net = SeparableResNet(width)
    if weights is not None:
        load_weights(net, weights)
    return net
