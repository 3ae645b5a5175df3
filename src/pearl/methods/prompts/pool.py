"""What prompt methods share: a frozen ViT that asks itself for a query, and a pool of prompts with keys."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pearl.methods.base import Method
from pearl.nn import vit
from pearl.nn.precision import full


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
