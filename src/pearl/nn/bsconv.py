"""A ResNet-like network of blueprint-separable convolutions (Haase & Amthor, CVPR 2020), as PEARL (BSC) uses it.

The paper gives three stages of two blocks and a total near 1.25 M parameters, not the exact layout. This one has a
separable stem 3 -> 64, stages of 128, 256 and 512 channels, and grouped 3x3 shortcuts (one group per input channel):
1,254,400 parameters, which reproduces every parameter count the paper prints for BSC to 0.05 M. Other layouts may too.
"""

from typing import Annotated

from pydantic import Field

from pearl.nn.networks import SeparableBlock, SeparableConv, SeparableResNet
from pearl.nn.weights import load_weights

__all__ = ["SeparableBlock", "SeparableConv", "SeparableResNet", "bsc"]


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
