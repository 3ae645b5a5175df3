"""Adapters: two thin linear layers parallel to the MLP, or to attention, in blocks of a frozen ViT.

AdaptFormer (Chen et al., NeurIPS 2022). `nn.vit.features` inserts them and documents their inputs.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from pearl.nn.task_modules import Grown

Count = Annotated[int, Field(ge=1)]
Dropout = Annotated[float, Field(ge=0, lt=1)]
Activation = Literal["relu", "gelu"]
_FUNCTIONS: Mapping[Activation, Callable[[Tensor], Tensor]] = {"relu": torch.relu, "gelu": nn.functional.gelu}


class Bottleneck(nn.Module):
    """scale * Up(Dropout(activation(Down(x)))): 0 at first, since Up is zero; Down is initialised as `nn.Linear`."""

    def __init__(
        self,
        dim: int,
        width: int,
        *,
        scale: float = 1.0,
        learnable: bool = False,
        dropout: float = 0.0,
        activation: Activation = "relu",
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(dim, width, bias=bias), nn.Linear(width, dim, bias=bias)
        self.scale = nn.Parameter(torch.tensor(scale)) if learnable else scale
        self.activation, self.dropout = activation, nn.Dropout(dropout)
        nn.init.zeros_(self.up.weight)
        if bias:
            nn.init.zeros_(self.up.bias)
            nn.init.zeros_(self.down.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens (B, n, dim) to the term that is added (B, n, dim)."""
        return self.scale * self.up(self.dropout(_FUNCTIONS[self.activation](self.down(tokens))))


class Adapters(nn.ModuleDict):
    """An adapter in each of some blocks."""

    def __init__(self, blocks: Iterable[int], make: Callable[[], nn.Module]) -> None:
        super().__init__({f"{block}": make() for block in blocks})

    def by_block(self) -> dict[int, nn.Module]:
        """Return the adapters in the form that `nn.vit` takes."""
        return {int(block): adapter for block, adapter in self.items()}


class TaskAdapters(Grown):
    """For each task an adapter in each of some blocks."""

    def __init__(self, blocks: Iterable[int], make: Callable[[], nn.Module]) -> None:
        super().__init__(partial(Adapters, tuple(blocks), make))

    def by_block(self, task: int) -> dict[int, nn.Module]:
        """Return a task's adapters in the form that `nn.vit` takes."""
        return self[task].by_block()  # type: ignore[operator]


def mixed(adapters: Sequence[Bottleneck], tokens: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum of several adapters' outputs (B, n, dim) in a single pass: concatenated they are a wider
    one.

    All have the same structure. Tokens (B, n, dim); weights (B, n, adapters), or (B, 1, adapters) of whole images.
    """
    first, *_ = adapters
    down = torch.cat([adapter.down.weight for adapter in adapters])
    up = torch.cat([adapter.scale * adapter.up.weight for adapter in adapters], dim=1)
    bias = None if first.down.bias is None else torch.cat([adapter.down.bias for adapter in adapters])
    hidden = first.dropout(_FUNCTIONS[first.activation](F.linear(tokens, down, bias)))
    parts = hidden.unflatten(2, (len(adapters), -1)) * weights.to(hidden.dtype)[..., None]
    out = F.linear(parts.flatten(2), up)
    if first.up.bias is None:
        return out
    return out + weights.to(out) @ torch.stack([adapter.scale * adapter.up.bias for adapter in adapters]).to(out)
