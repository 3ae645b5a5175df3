"""Prompts, from a pool or per task, in a frozen ViT whose own features are the query."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pearl.methods.common.frozen_vit import FrozenVit
from pearl.nn.precision import full
from pearl.nn.task_modules import TaskTensors


class PromptMethod(FrozenVit):
    """Base of methods with prompts in a frozen ViT."""


class PromptPool(nn.Module):
    """Prompts (size, length, dim) with a key each; an image uses those whose keys are nearest to its query."""

    def __init__(self, size: int, length: int, dim: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.prompts = nn.Parameter(torch.empty(size, length, dim).uniform_(-1, 1))
        self.keys = nn.Parameter(torch.empty(size, dim).uniform_(-1, 1))

    def choose(self, query: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines (B, top_k) of the nearest keys, best first, and their indices (B, top_k)."""
        with torch.autocast(query.device.type, enabled=False):  # the choice must not depend on bfloat16 rounding
            cosines = F.normalize(full(query), dim=1) @ F.normalize(self.keys, dim=1).T
            best = cosines.topk(self.top_k, dim=1)
        return best.values, best.indices

    def forward(self, query: Tensor) -> tuple[Tensor, Tensor]:
        """Return prompt tokens (B, top_k * length, dim), and the cosines (B, top_k) of their keys."""
        cosines, chosen = self.choose(query)
        return self.prompts[chosen].flatten(1, 2), cosines


class TaskPrompts(nn.Module):
    """One parameter per task, all of the same shape."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors = TaskTensors()  # "t"

    def __len__(self) -> int:
        """Return the number of tasks."""
        return len(self.tensors)

    def __getitem__(self, task: int) -> nn.Parameter:
        return self.tensors[f"{task}"]  # type: ignore[return-value]

    def grow(self, start: Tensor) -> nn.Parameter:
        """Add that of a new task, a copy of `start`."""
        self.tensors.add(f"{len(self)}", start)
        return self[len(self) - 1]

    def of(self, tasks: Tensor) -> Tensor:
        """Return, for each image, that of its task (B,)."""
        return torch.stack([self[t] for t in range(len(self))])[tasks]
