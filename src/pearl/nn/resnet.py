"""ResNet-18 (He et al., CVPR 2016), with the stem for small images or that for ImageNet."""

from typing import Annotated, Literal

from pydantic import Field

from pearl.nn.networks import BasicBlock, ResNet
from pearl.nn.weights import load_weights

__all__ = ["BasicBlock", "ResNet", "resnet18"]


def resnet18(
    image_size: int,
    *,
    width: Annotated[int, Field(ge=1, le=1024)] = 64,
    stem: Literal["cifar", "imagenet"] = "cifar",
    weights: str | None = None,
) -> ResNet:
    """Build ResNet-18 without a head; 11,168,832 parameters at width 64 with the CIFAR stem.

    The CIFAR stem is a 3x3 convolution without max-pooling, as in the continual-learning literature since Mammoth
    (Buzzega et al., NeurIPS 2020); shortcuts are 1x1 convolutions, as the PEARL paper's parameter counts imply.

    `weights` is a weight file with torchvision's names, or a run directory, whose reference network is used.
    """
    net = ResNet(width, stem)
    if weights is not None:
        load_weights(net, weights)
    return net
