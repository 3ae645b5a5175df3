"""A ResNet-like network of blueprint-separable convolutions (Haase & Amthor, CVPR 2020), as PEARL (BSC) uses it.

The paper gives three stages of two blocks and parameter counts, not the layout. This one has a separable stem 3 -> 64
and stages of 128, 256 and 512 channels. The first shortcut is a 1x1 convolution 64 -> 128 with a bias: the growth by
6,865 to 6,944 parameters per rank and task in the paper's Table 4 needs one more adapted layer of that size. The other
two repeat their channels and have a BatchNorm alone. It has 1,254,400 parameters. With the rules for every network here
(low-rank convolutions, full depthwise filters and norm layers), it reproduces all nine counts that the paper prints for
isolation and fixed ranks. Other layouts do as well.
"""

from typing import Annotated

from pydantic import Field

from pearl.nn.networks import SeparableBlock, SeparableConv, SeparableResNet
from pearl.nn.weights import load_weights

__all__ = ["SeparableBlock", "SeparableConv", "SeparableResNet", "bsc"]


def bsc(
    image_size: int, *, width: Annotated[int, Field(ge=1, le=1024)] = 64, weights: str | None = None
) -> SeparableResNet:
    """Build the blueprint-separable ResNet without a head; 1,254,400 parameters at width 64.

    `weights` is a weight file with this network's names, or a run directory, whose reference network is used.
    """
    net = SeparableResNet(width)
    if weights is not None:
        load_weights(net, weights)
    return net
