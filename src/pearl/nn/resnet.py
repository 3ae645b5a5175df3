"""ResNet-18 (He et al., CVPR 2016), with the stem used on small images or the one of ImageNet."""

from typing import Annotated, Literal

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from pearl.nn.weights import load_weights


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut: the identity, or 1x1 with BatchNorm where the shape changes."""

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
        """(B, inputs, H, W) -> (B, outputs, H/stride, W/stride)."""
        out = F.relu(self.bn1(self.conv1(x)))
        # the pixels that a 1x1 convolution with this stride would see; oneDNN's gradient of that one writes where it
        # must not if there are fewer channels than fit a register
        seen = x[:, :, :: self.stride, :: self.stride]
        return F.relu(self.bn2(self.conv2(out)) + self.downsample(seen))


class ResNet(nn.Module):
    """Four stages of two blocks; layer names are torchvision's, so its weight files fit."""

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
        self.layer1 = _stage(width, width, stride=1)
        self.layer2 = _stage(width, 2 * width, stride=2)
        self.layer3 = _stage(2 * width, 4 * width, stride=2)
        self.layer4 = _stage(4 * width, 8 * width, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        """Images (B, 3, H, W) -> features (B, dim)."""
        x = self.maxpool(F.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return x.mean((2, 3))


def _stage(inputs: int, outputs: int, stride: int) -> nn.Sequential:
    return nn.Sequential(BasicBlock(inputs, outputs, stride), BasicBlock(outputs, outputs, 1))


def resnet18(
    image_size: int,
    *,
    width: Annotated[int, Field(ge=1, le=1024)] = 64,
    stem: Literal["cifar", "imagenet"] = "cifar",
    weights: str | None = None,
) -> ResNet:
    """ResNet-18 without a head; 11,168,832 parameters at width 64 with the CIFAR stem.

    The CIFAR stem is a 3x3 convolution without max-pooling, as in the continual-learning literature since Mammoth
    (Buzzega et al., NeurIPS 2020); shortcuts are 1x1 (what the PEARL paper's parameter counts imply).

    `weights` is a weight file with torchvision's names, or a run directory whose reference is to be used again.
    """
    net = ResNet(width, stem)
    if weights is not None:
        load_weights(net, weights)
    return net
