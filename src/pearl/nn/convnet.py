"""A plain convolutional network without norm layers, for methods that assign units to tasks."""

from typing import Annotated

from pydantic import Field

from pearl.nn.networks import ConvNet
from pearl.nn.weights import load_weights

__all__ = ["ConvNet", "convnet"]


def convnet(
    image_size: int, *, width: Annotated[int, Field(ge=1, le=1024)] = 64, weights: str | None = None
) -> ConvNet:
    """Four 3x3 convolutions and a linear layer, without a head; 8,649,792 parameters at width 64 for 32 x 32 pixels.

    The network of CLNP (Golkar et al., 2019) and NISPA (Gurbuz & Dovrolis, ICML 2022): 64, 64, 128 and 128 channels,
    two poolings, 1,024 features; every layer has biases. Its size depends on the image size.

    `weights` is a weight file with this network's names, or a run directory, whose reference network is used.
    """
    net = ConvNet(width, image_size)
    if weights is not None:
        load_weights(net, weights)
    return net
