"""Several ViTs whose first blocks have equal weights: these blocks run once for all of them.

PEARL's sub-networks differ from the backbone only in the layers that `method.targets` names. With targets in the last
blocks alone, most of a forward pass is the same in all of them.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pearl.nn import vit
from pearl.nn.intermediate_features import WithInner, pooling
from pearl.nn.precision import full


def shared_blocks(networks: Sequence[nn.Module]) -> int:
    """Return how many of the first blocks have equal weights in all networks, and the same input.

    It is 0 if a network is not a plain ViT, or for a single network.
    """
    if len(networks) < 2 or not all(map(vit.is_plain, networks)):
        return 0
    first: Any = networks[0]
    first_state, shared = first.state_dict(), len(first.blocks)
    for other in networks[1:]:
        theirs = other.state_dict()
        if theirs.keys() != first_state.keys():
            return 0
        for name, value in theirs.items():
            if not torch.equal(value, first_state[name]):
                part, _, rest = name.partition(".")
                if part not in ("blocks", "norm", "fc_norm"):  # before the blocks
                    return 0
                shared = min(shared, int(rest.partition(".")[0])) if part == "blocks" else shared
    return shared


def features_of_all(networks: Sequence[WithInner], x: Tensor, shared: int) -> list[Tensor]:
    """Return what each network returns for images (B, 3, H, W); the first `shared` blocks run once.

    All networks must have the same layers; see `shared_blocks`.
    """
    first: Any = networks[0].network
    pool, layers = pooling(first), networks[0].layers
    tokens, inner = vit.embedded(first, x), dict[str, Tensor]()
    for i, block in enumerate(first.blocks[:shared]):
        tokens = block(tokens)
        if f"blocks.{i}" in layers:
            inner[f"blocks.{i}"] = pool(tokens)
    features = []
    for network in networks:
        net: Any = network.network
        deeper, parts = tokens, dict(inner)
        for i, block in enumerate(net.blocks[shared:], shared):
            deeper = block(deeper)
            if f"blocks.{i}" in layers:
                parts[f"blocks.{i}"] = pool(deeper)
        features.append(torch.cat([*(parts[name] for name in layers), full(vit.pool(net, net.norm(deeper)))], dim=1))
    return features
