"""Base of methods that add prompts or adapters to a frozen ViT."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from pearl.data.batches import Task
from pearl.methods.base import Method, Network
from pearl.nn import vit
from pearl.nn.precision import full

IMAGES = 256  # images per forward pass between two phases


class FrozenVit(Method):
    """A frozen ViT and heads. A subclass defines `features`; queries are per image, never per batch."""

    backbones = "vit"

    def __init__(self, backbone: nn.Module) -> None:
        vit.require_plain(backbone)
        super().__init__(backbone.requires_grad_(False))

    @property
    def dim(self) -> int:
        """Width of the tokens."""
        return self.heads.dim

    def train(self, mode: bool = True) -> "FrozenVit":
        """Set the mode; the frozen ViT stays in evaluation mode."""
        super().train(mode)
        self.backbone.eval()
        return self

    def query(self, x: Tensor) -> Tensor:
        """Return features (B, dim) of the unmodified ViT."""
        with torch.no_grad():
            return self.backbone(x)

    def features(self, x: Tensor) -> Tensor:
        """Return features (B, dim) with the additional parts."""
        raise NotImplementedError

    def only(self, params: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Freeze all parameters except these, and return them."""
        params = list(params)
        self.requires_grad_(False)
        for parameter in params:
            parameter.requires_grad_(True)
        return params

    @torch.no_grad()
    def of_images(self, task: Task, network: Network) -> Tensor:
        """Return a network's output (N, dim) for a task's images with the test transform, in float32."""
        self.eval()
        return torch.cat([full(network(x)) for x, _, _ in task.in_order(IMAGES)])
