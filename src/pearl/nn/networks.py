"""ResNet-18, its blueprint-separable form and a plain network, in PyTorch only.

ReLUs and sums overwrite their input, which no gradient needs: the bits are the same, and no new memory is touched.
Exports include this file.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut: the identity, or a 1x1 convolution with BatchNorm if the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.stride = stride
        self.downsample = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.downsample.append(nn.Conv2d(inputs, outputs, 1, bias=False))
            self.downsample.append(nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, inputs, H, W) to (B, outputs, H/stride, W/stride)."""
        out = F.relu(self.bn1(self.conv1(x)), inplace=True)
        # the pixels that a 1x1 convolution with this stride reads; oneDNN's gradient of that convolution writes out of
        # bounds with fewer channels than fit a register
        seen = x[:, :, :: self.stride, :: self.stride]
        out = self.bn2(self.conv2(out))
        out += self.downsample(seen)
        return F.relu(out, inplace=True)


class ResNet(nn.Module):
    """Four stages of two blocks with torchvision's layer names, so that its weight files fit."""

    def __init__(self, width: int, stem: Literal["cifar", "imagenet"]) -> None:
        super().__init__()
        self.dim = 8 * width
        self.pretrained = False
        if stem == "cifar":
            self.conv1 = nn.Conv2d(3, width, 3, padding=1, bias=False)
            self.maxpool: nn.Module = nn.Identity()
        else:
            self.conv1 = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
            self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.bn1 = nn.BatchNorm2d(width)
        self.layer1 = _stage(BasicBlock, width, width, stride=1)
        self.layer2 = _stage(BasicBlock, width, 2 * width, stride=2)
        self.layer3 = _stage(BasicBlock, 2 * width, 4 * width, stride=2)
        self.layer4 = _stage(BasicBlock, 4 * width, 8 * width, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (B, 3, H, W) to features (B, dim)."""
        x = self.maxpool(F.relu(self.bn1(self.conv1(x)), inplace=True))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return x.mean((2, 3))


class SeparableConv(nn.Sequential):
    """A pointwise 1x1 convolution, then a depthwise 3x3 one."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.pointwise = nn.Conv2d(inputs, outputs, 1, bias=False)
        self.depthwise = nn.Conv2d(outputs, outputs, 3, stride, padding=1, groups=outputs, bias=False)


class ChannelsTwice(nn.Module):
    """Repeats each input channel twice, without parameters."""

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, C, H, W) to (B, 2 C, H, W)."""
        return torch.cat((x, x), 1)


class SeparableBlock(nn.Module):
    """Two separable convolutions and a shortcut.

    The shortcut is the identity if `outputs == inputs`. If the channels double, it is a 1x1 convolution with a bias;
    with a stride as well, the strided pixels with each channel repeated, then BatchNorm.
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = SeparableConv(inputs, outputs, stride)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = SeparableConv(outputs, outputs)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.stride = stride
        self.downsample = nn.Sequential()
        if stride != 1:
            self.downsample.append(ChannelsTwice())
            self.downsample.append(nn.BatchNorm2d(outputs))
        elif inputs != outputs:
            self.downsample.append(nn.Conv2d(inputs, outputs, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, inputs, H, W) to (B, outputs, H/stride, W/stride)."""
        out = F.relu(self.bn1(self.conv1(x)), inplace=True)
        shortcut = self.downsample(x[:, :, :: self.stride, :: self.stride])
        out = self.bn2(self.conv2(out))
        out += shortcut
        return F.relu(out, inplace=True)


class SeparableResNet(nn.Module):
    """Three stages of two separable blocks."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.dim = 8 * width
        self.pretrained = False
        self.conv1 = SeparableConv(3, width)
        self.bn1 = nn.BatchNorm2d(width)
        self.layer1 = _stage(SeparableBlock, width, 2 * width, stride=1)
        self.layer2 = _stage(SeparableBlock, 2 * width, 4 * width, stride=2)
        self.layer3 = _stage(SeparableBlock, 4 * width, 8 * width, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (B, 3, H, W) to features (B, dim)."""
        x = F.relu(self.bn1(self.conv1(x)), inplace=True)
        return self.layer3(self.layer2(self.layer1(x))).mean((2, 3))


class ConvNet(nn.Module):
    """Two blocks of two 3x3 convolutions and a pooling, then a linear layer; no norm layers."""

    def __init__(self, width: int, image_size: int) -> None:
        super().__init__()
        self.dim = 16 * width
        self.pretrained = False
        self.conv1 = nn.Conv2d(3, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)
        self.conv3 = nn.Conv2d(width, 2 * width, 3, padding=1)
        self.conv4 = nn.Conv2d(2 * width, 2 * width, 3, padding=1)
        side = (image_size + 3) // 4
        self.linear = nn.Linear(2 * width * side**2, self.dim)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (B, 3, image_size, image_size) to features (B, dim)."""
        x = F.relu(self.conv1(x), inplace=True)
        x = F.relu(self.conv2(x), inplace=True)
        x = F.max_pool2d(x, 2, ceil_mode=True)
        x = F.relu(self.conv3(x), inplace=True)
        x = F.relu(self.conv4(x), inplace=True)
        x = F.max_pool2d(x, 2, ceil_mode=True)
        return F.relu(self.linear(x.flatten(1)), inplace=True)


def _stage(block: type[BasicBlock | SeparableBlock], inputs: int, outputs: int, stride: int) -> nn.Sequential:
    return nn.Sequential(block(inputs, outputs, stride), block(outputs, outputs, 1))
