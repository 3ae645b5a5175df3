"""What prompt methods share: a frozen ViT that asks itself for a query, and prompts, of a pool or of a task each."""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pearl.data.batches import Task
from pearl.methods.base import Method, Network
from pearl.nn import vit
from pearl.nn.growing import TaskTensors
from pearl.nn.precision import full

IMAGES = 256  # that pass through the network at once between two phases


class PromptMethod(Method):
    """A frozen ViT and heads. A subclass defines `features`; a query belongs to one image, never to a batch."""

    backbones = "vit"

    def __init__(self, backbone: nn.Module) -> None:
        vit.require_plain(backbone)
        super().__init__(backbone.requires_grad_(False))

    @property
    def dim(self) -> int:
        """Width of the tokens."""
        return self.heads.dim

    def train(self, mode: bool = True) -> "PromptMethod":
        """The frozen ViT drops nothing."""
        super().train(mode)
        self.backbone.eval()
        return self

    def query(self, x: Tensor) -> Tensor:
        """Features (B, dim) of the ViT as it came."""
        with torch.no_grad():
            return self.backbone(x)

    def features(self, x: Tensor) -> Tensor:
        """Features (B, dim) of the prompted ViT."""
        raise NotImplementedError

    def only(self, params: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """These parameters, which alone are trained from now on."""
        params = list(params)
        self.requires_grad_(False)
        for parameter in params:
            parameter.requires_grad_(True)
        return params

    @torch.no_grad()
    def of_images(self, task: Task, network: Network) -> Tensor:
        """What a network gives (N, dim) of a task's images as they are tested, in float32."""
        self.eval()
        return torch.cat([full(network(task.view.test(raw.to(self.device)))) for raw in task.images.split(IMAGES)])


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
