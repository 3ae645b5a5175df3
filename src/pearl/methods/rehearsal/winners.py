"""k-winners: only the channels of a block with the largest responses to an image are active (TriRE).

Weights important to a task are found by the wins of their channels and by gradients of the loss.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from pearl.errors import ConfigError
from pearl.nn.networks import BasicBlock, SeparableBlock

Blocks = Mapping[str, nn.Module]


def blocks_of(backbone: nn.Module) -> Blocks:
    """Return the residual blocks of a network, by name.

    Raises:
        ConfigError: it has no known residual blocks.
    """
    kinds = BasicBlock, SeparableBlock
    blocks = {name: module for name, module in backbone.named_modules() if isinstance(module, kinds)}
    if not blocks:
        raise ConfigError("method=trire ranks the channels of residual blocks; use backbone=resnet18 or backbone=bsc")
    return blocks


def k_winners(x: Tensor, share: float) -> Tensor:
    """Keep floor(share * C) channels of each image in maps (B, C, H, W), those with the largest maxima; at least 1.

    The others are 0.
    """
    count = max(1, math.floor(share * x.shape[1] + 1e-6))
    best = x.amax((2, 3)).topk(count, dim=1).indices
    return x * torch.zeros_like(x[:, :, 0, 0]).scatter(1, best, 1.0)[:, :, None, None]


def compete(block: nn.Module, share: float) -> None:
    """Make the channels of a block compete before both of its ReLUs.

    The second competition is after the ReLU: a channel whose maximum is below 0 is 0 in any case.
    """
    for layer in (block.bn1, block):
        layer.register_forward_hook(lambda module, inputs, out: k_winners(out, share))  # type: ignore[union-attr]


@contextmanager
def counting(blocks: Blocks) -> Iterator[dict[str, Tensor]]:
    """Count each channel's wins within the context, by the name of the block's half: "layer2.0.1" and "layer2.0.2"."""
    counts: dict[str, Tensor] = {}

    def count(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: object, out: Tensor) -> None:
            counts[name] = counts.get(name, 0) + (out.detach().amax((2, 3)) > 0).sum(0)

        return hook

    hooks = [
        layer.register_forward_hook(count(f"{name}.{half}"))  # type: ignore[union-attr]
        for name, block in blocks.items()
        for half, layer in ((1, block.bn1), (2, block))
    ]
    try:
        yield counts
    finally:
        for hook in hooks:
            hook.remove()


def chosen(importance: Tensor, counts: Tensor, channels: float, weights: float) -> Tensor:
    """Return a mask of the important entries of a weight (C, ...), in the channels with most wins.

    There are floor(channels * C) channels, and floor(weights * n) of their n entries.
    """
    winners = counts.topk(math.floor(channels * len(counts) + 1e-6)).indices
    there = torch.zeros_like(importance, dtype=torch.bool)
    there[winners] = True
    count = math.floor(weights * int(there.sum()) + 1e-6)
    best = importance.masked_fill(~there, -torch.inf).flatten().topk(count).indices
    # contiguous, whatever the memory format of weights
    flat = torch.zeros(there.numel(), dtype=torch.bool, device=there.device)
    return flat.index_fill(0, best, True).view(there.shape)
