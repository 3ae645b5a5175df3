"""Prefixes: additional keys and values of a ViT block, before those of its tokens; one set per task."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from pearl.errors import ConfigError
from pearl.methods.prompts.pool import TaskPrompts
from pearl.nn.vit import Prefix


class TaskPrefixes(TaskPrompts):
    """Prefixes per task, of equal length in the same blocks (blocks, 2, length, dim): keys, then values."""

    def __init__(self, blocks: Sequence[int], length: int, dim: int) -> None:
        super().__init__()
        self.blocks, self.shape = blocks, (len(blocks), 2, length, dim)

    def start(self, device: torch.device) -> nn.Parameter:
        """Add the prefixes of a new task, initialised with those of the task before."""
        before = self[len(self) - 1] if len(self) else torch.empty(self.shape, device=device).uniform_(-1, 1)
        return self.grow(before)

    def by_block(self, tasks: Tensor) -> dict[int, Prefix]:
        """Return, for each image, the prefixes of its task (B,), by block."""
        return by_block(self.of(tasks), self.blocks)


def by_block(prefixes: Tensor, blocks: Sequence[int]) -> dict[int, Prefix]:
    """Return prefixes (B or 1, blocks, 2, length, dim) in the form that `nn.vit` takes."""
    return {block: (prefixes[:, i, 0], prefixes[:, i, 1]) for i, block in enumerate(blocks)}


def check_blocks(backbone: nn.Module, blocks: Sequence[int], option: str) -> None:
    """Check that the backbone has these blocks, and that each is listed once.

    Raises:
        ConfigError: a block is missing or repeated.
    """
    depth = len(backbone.blocks)  # type: ignore[arg-type]
    if strange := [block for block in blocks if block >= depth]:
        raise ConfigError(
            f"method.{option}: {strange[0]} is not a block of this backbone, which has {depth}; give numbers below that"
        )
    if len({*blocks}) < len(blocks):
        raise ConfigError(f"method.{option}: {list(blocks)} lists a block twice; list each once")
