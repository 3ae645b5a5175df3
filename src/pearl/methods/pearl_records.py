"""Records of PEARL about a task: how much of the network it adapts, and each layer's threshold and rank."""

import math
from typing import Any

from torch import nn

from pearl.methods.pearl_updates import LowRankNetworks
from pearl.nn import lowrank


def adapted_share(method: LowRankNetworks) -> str:
    """Return how much of the network a task adapts, in a line."""
    layers = [m for m in method.backbone.modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    adapted = sum(math.prod(target.shape) for target in method.targets)
    share = 100 * adapted / sum(layer.weight.numel() for layer in layers)
    norms = f", and has its own {len(method.norms)} parameters of norm layers" if method.norms else ""
    return (
        f"a task adapts {len(method.targets)} of {len(layers)} layers, which hold {share:.0f} % of the weights{norms}"
    )


def layer_facts(method: LowRankNetworks, task: int) -> dict[str, Any]:
    """Return threshold, rank and full rank of every low-rank target of a task."""
    if not method.is_adapted(task):
        return {"layers": []}
    return {
        "fold": method.fold,
        "layers": [
            {
                "layer": target.label,
                "threshold": threshold,
                "rank": method.tensors[f"{task}.A.{target.label}"].shape[0],
                "full_rank": min(lowrank.matrix_shape(target.shape, method.fold)),
                "rows_and_columns": sum(lowrank.matrix_shape(target.shape, method.fold)),
            }
            for target, threshold in zip(method.low_rank, method.statistics[f"{task}.threshold"].tolist(), strict=True)
        ],
    }
