"""What becomes part of a convolution: 1x1 ones beside it, and BatchNorm."""

import pytest
import torch
import torch.nn.functional as F
from test_folding import images, net
from torch import nn
from torch.func import functional_call

from pearl.nn.branches import SideBranches, absorb_norms, wide_convs
from pearl.nn.fast.folding import norms_after_convs

CONVS = [
    nn.Conv2d(4, 6, 3, padding=1, bias=False, dtype=torch.float64),
    nn.Conv2d(4, 6, 3, 2, padding=1, dtype=torch.float64),
    nn.Conv2d(4, 8, 5, 2, padding=2, groups=2, dtype=torch.float64),
    nn.Conv2d(4, 4, (1, 3), padding=(0, 2), dilation=(1, 2), dtype=torch.float64),
]


@pytest.mark.parametrize("conv", CONVS, ids=str)
@pytest.mark.parametrize("size", [8, 7])
def test_a_branch_is_a_part_of_its_convolution(conv, size):
    net, x = nn.Sequential(nn.Conv2d(4, 4, 3), conv), torch.randn(2, 4, size, size, dtype=torch.float64)
    convs = wide_convs(net)
    assert list(convs) == ["1"]
    branches, before = SideBranches(convs), conv.weight.detach().clone()
    assert torch.equal(functional_call(conv, {"weight": branches.merged(net)["1.weight"]}, (x,)), conv(x)), (
        "zero at first"
    )
    with torch.no_grad():
        branches["1.weight"].normal_()
        side = F.conv2d(x, branches["1.weight"], None, conv.stride, groups=conv.groups)
        expected = conv(x) + side
        branches.merge(net)
        assert not torch.equal(conv.weight, before)
        torch.testing.assert_close(conv(x), expected, rtol=0, atol=1e-13)
    conv.weight.data.copy_(before)


def test_branches_stand_beside_the_3x3_convolutions_of_the_blocks():
    blocks = [f"layer{stage}.{block}.conv{number}" for stage in range(1, 5) for block in range(2) for number in (1, 2)]
    assert list(wide_convs(net("resnet"))) == blocks
    wide = wide_convs(net("bsc"))
    assert len(wide) == 12 and all(conv.groups > 1 for conv in wide.values()) and "conv1.depthwise" not in wide
    odd = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 2, padding=1), nn.Conv2d(4, 4, 1))
    assert wide_convs(odd) == {}, "unpadded or of an even size, a centre sees other pixels"


@pytest.mark.parametrize("name", ["resnet", "bsc"])
def test_a_norm_keeps_a_shift_alone(name):
    made = net(name).double()
    x = images(name).double()
    with torch.no_grad():
        made.conv1.bias = nn.Parameter(torch.randn(4).double()) if name == "resnet" else None
        expected = made(x)
        absorb_norms(made)
        torch.testing.assert_close(made(x), expected, rtol=1e-12, atol=1e-12)
        followed = norms_after_convs(made)
        assert len(followed) == {"resnet": 20, "bsc": 13}[name]
        for norm in map(made.get_submodule, followed):
            probe = torch.randn(2, norm.num_features, 3, 3, dtype=torch.float64)
            shifted = probe - norm.running_mean[:, None, None]
            torch.testing.assert_close(norm(probe), shifted, rtol=1e-12, atol=1e-12)
