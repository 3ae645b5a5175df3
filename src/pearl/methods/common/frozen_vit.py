"""What methods share that put prompts or adapters into a ViT, which stays as it came."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from pearl.data.batches import Task
from pearl.methods.base import Method, Network
from pearl.nn import vit
from pearl.nn.precision import full

IMAGES = 256  # that pass through the network at once between two phases


class FrozenVit(Method):
    """A frozen ViT and heads. A subclass defines `features`; a query belongs to one image, never to a batch."""

    backbones = "vit"

    def __init__(self, backbone: nn.Module) -> None:
        vit.require_plain(backbone)
        super().__init__(backbone.requires_grad_(False))

    @property
    def dim(self) -> int:
        """Width of the tokens."""
        return self.heads.dim

    def train(self, mode: bool = True) -> "FrozenVit":
        """The frozen ViT drops nothing."""
        super().train(mode)
        self.backbone.eval()
        return self

    def query(self, x: Tensor) -> Tensor:
        """Features (B, dim) of the ViT as it came."""
        with torch.no_grad():
            return self.backbone(x)

    def features(self, x: Tensor) -> Tensor:
        """Features (B, dim) with what is put into the ViT."""
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
        return torch.cat([full(network(x)) for x, _, _ in task.in_order(IMAGES)])
