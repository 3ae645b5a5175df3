"""Prompts, of a pool or of a task each, in a frozen ViT that asks itself for a query."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pearl.methods.common.frozen_vit import FrozenVit
from pearl.nn.growing import TaskTensors
from pearl.nn.precision import full


class PromptMethod(FrozenVit):
    """A frozen ViT that is asked with prompts."""


class PromptPool(nn.Module):
    """Prompts (size, length, dim) with a key each; an image takes those whose keys are nearest to its query."""

    def __init__(self, size: int, length: int, dim: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.prompts = nn.Parameter(torch.empty(size, length, dim).uniform_(-1, 1))
        self.keys = nn.Parameter(torch.empty(size, dim).uniform_(-1, 1))

    def choose(self, query: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines (B, top_k) of the nearest keys, best first, and their numbers (B, top_k)."""
        with torch.autocast(query.device.type, enabled=False):  # a choice must not hang on bfloat16's last digits
            cosines = F.normalize(full(query), dim=1) @ F.normalize(self.keys, dim=1).T
            best = cosines.topk(self.top_k, dim=1)
        return best.values, best.indices

    def forward(self, query: Tensor) -> tuple[Tensor, Tensor]:
        """Prompt tokens (B, top_k * length, dim), and the cosines (B, top_k) of their keys."""
        cosines, chosen = self.choose(query)
        return self.prompts[chosen].flatten(1, 2), cosines


class TaskPrompts(nn.Module):
    """One parameter per task, all of the same shape."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors = TaskTensors()  # "t"

    def __len__(self) -> int:
        """Number of tasks."""
        return len(self.tensors)

    def __getitem__(self, task: int) -> nn.Parameter:
        return self.tensors[f"{task}"]  # type: ignore[return-value]

    def grow(self, start: Tensor) -> nn.Parameter:
        """That of a new task, a copy of `start`."""
        self.tensors.add(f"{len(self)}", start)
        return self[len(self) - 1]

    def of(self, tasks: Tensor) -> Tensor:
        """For each image that of its task (B,)."""
        return torch.stack([self[t] for t in range(len(self))])[tasks]
