"""Prefixes: keys and values that stand before those which a block of the ViT makes of its tokens; one set a task."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from pearl.errors import ConfigError
from pearl.methods.prompts.pool import TaskPrompts
from pearl.nn.vit import Prefix


class TaskPrefixes(TaskPrompts):
    """For each task prefixes of the same length in the same blocks (blocks, 2, length, dim): keys, then values."""

    def __init__(self, blocks: Sequence[int], length: int, dim: int) -> None:
        super().__init__()
        self.blocks, self.shape = blocks, (len(blocks), 2, length, dim)

    def start(self, device: torch.device) -> nn.Parameter:
        """The prefixes of a new task, which start as those of the task before."""
        before = self[len(self) - 1] if len(self) else torch.empty(self.shape, device=device).uniform_(-1, 1)
        return self.grow(before)

    def by_block(self, tasks: Tensor) -> dict[int, Prefix]:
        """For each image those of its task (B,), by block."""
        return by_block(self.of(tasks), self.blocks)


def by_block(prefixes: Tensor, blocks: Sequence[int]) -> dict[int, Prefix]:
    """Prefixes (B or 1, blocks, 2, length, dim) as `nn.vit` takes them."""
    return {block: (prefixes[:, i, 0], prefixes[:, i, 1]) for i, block in enumerate(blocks)}


def check_blocks(backbone: nn.Module, blocks: Sequence[int], option: str) -> None:
    """See that the backbone has these blocks, and that each is named once.

    Raises:
        ConfigError: it is not so.
    """
    depth = len(backbone.blocks)  # type: ignore[arg-type]
    if strange := [block for block in blocks if block >= depth]:
        raise ConfigError(
            f"method.{option}: {strange[0]} is no block of this backbone, which has {depth}; give numbers below that"
        )
    if len({*blocks}) < len(blocks):
        raise ConfigError(f"method.{option}: {list(blocks)} names a block twice; name each once")
