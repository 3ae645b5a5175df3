"""Low-rank updates of several tasks in one forward pass: the batch holds every image once per task."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pearl.nn.fast.folding import with_weights
from pearl.nn.plain_vit import PlainViT

# Rows (tasks x images x tokens) up to which one pass is faster than a pass per task. On one CPU thread a DeiT-Tiny
# takes 0.3 to 0.5 of the time with 85 to 340 rows, 1.0 with 700 to 1000, and 1.1 with 4000, which exceed the cache. A
# GPU needs many more; its figure is a guess within its memory, not measured.
ROWS = {"cpu": 1000, "cuda": 2**16}


@dataclass(frozen=True)
class Updates:
    """Updates of T tasks to some rows of a linear layer, with ranks zero-padded to the largest, r.

    They are added to the layer's output instead of merged: two thin products per task instead of a weight per task.
    """

    down: Tensor  # (T, in, r)
    up: Tensor  # (T, r, rows)
    bias: Tensor  # (T, 1, rows)
    first: int  # indices of the rows


def stackable(net: nn.Module, layers: Iterable[str]) -> bool:
    """Return True if these layers are linear and their first dimension is the batch, which is verified for timm's ViTs
    only.
    """
    if not all(type(net.get_submodule(name)) is nn.Linear for name in layers):
        return False
    if type(net) is PlainViT or not type(net).__module__.startswith("timm."):
        return type(net) is PlainViT
    from timm.models import VisionTransformer  # slow to import, but loaded already

    return isinstance(net, VisionTransformer)


def worthwhile(net: nn.Module, tasks: int, device: torch.device) -> int:
    """Return the most images for which one pass for all tasks is faster; `net` is `stackable`."""
    embed: Any = net.patch_embed
    return ROWS.get(device.type, 0) // (tasks * (embed.num_patches + 1))  # plus a class token


@torch.no_grad()
def stack_updates(without: int, low_rank: Sequence[tuple[Tensor, Tensor, Tensor]], first: int) -> Updates:
    """Stack each task's A (k, in), B (rows, k) and bias (rows,), after `without` tasks that have none."""
    tasks, rank = without + len(low_rank), max(a.shape[0] for a, _, _ in low_rank)
    a, b, bias = low_rank[0]
    made = Updates(
        a.new_zeros(tasks, a.shape[1], rank), a.new_zeros(tasks, rank, b.shape[0]), a.new_zeros(tasks, 1, len(b)), first
    )
    for t, (a, b, bias) in enumerate(low_rank, without):
        made.down[t, :, : len(a)], made.up[t, : len(a)], made.bias[t] = a.T, b.T, bias
    return made


def stacked(net: nn.Module, updates: Mapping[str, list[Updates]]) -> nn.Module:
    """Return a copy of `net` that takes (T * B, ...), task by task, and adds each task's updates to these layers.

    It shares its tensors with `net` but has its own hooks: threads may use both at once.
    """
    network = with_weights(net, {})
    for name, of_layer in updates.items():
        network.get_submodule(name).register_forward_hook(partial(_add, of_layer))
    return network


def _add(of_layer: list[Updates], layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    x = inputs[0]
    for one in of_layer:
        rows = x.reshape(len(one.down), -1, x.shape[-1])
        last = one.first + one.up.shape[-1]
        output.view(len(rows), rows.shape[1], -1)[..., one.first : last] += torch.baddbmm(
            one.bias, rows @ one.down, one.up
        )
    return output
