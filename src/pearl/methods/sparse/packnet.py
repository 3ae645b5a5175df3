"""PackNet: Adding Multiple Tasks to a Single Network by Iterative Pruning (Mallya & Lazebnik, CVPR 2018).

For each task: train the weights that are free, prune the smallest of them, train those that are left again, freeze
them. The pruned ones serve the next task, which computes with all weights of earlier tasks but cannot change them.
"""

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.func import functional_call

from pearl.data.batches import Task
from pearl.methods.base import Expert, Method, Phase, own_loss
from pearl.methods.sparse.masks import Owners, weight_names
from pearl.settings.follow import Follows, pretrained

Part = Annotated[float, Field(ge=0, lt=1)]


def _part(has_weights: bool) -> float:
    return 0.25 if has_weights else 0.75


class PackNet(Method):
    """One network whose weights belong to tasks, and a head per task; biases and norm layers are task 1's.

    The paper starts from ImageNet, whose weights are its first task; here the first task is the stream's own. The
    owners (an integer per weight) come beside the parameters of `size`.

    Options:
        prune: share of a task's weights in each layer that it gives up. Task t keeps (1 - prune) prune^(t-1) of a
            layer. `auto` is the paper's 0.75 for a network that learns all it knows from the stream, and 0.25 for one
            that comes with weights, whose own images are not there to train what is left again, as the paper does: of
            DeiT-Tiny's features, class means know 41 % of 40 classes of CIFAR-100 as they came, 42 % with 0.25, 29 %
            with 0.5 and 17 % with 0.75. Later tasks get little, but compute with what the first one has kept.
    """

    task_identity = True
    own_classes = True
    phases = ("packnet", "packnet_retrain")

    def __init__(
        self,
        backbone: nn.Module,
        *,
        prune: Annotated[Part | Literal["auto"], Follows(lambda config: _part(pretrained(config)))] = "auto",
    ) -> None:
        super().__init__(backbone)
        self.prune = _part(bool(backbone.pretrained)) if prune == "auto" else prune
        named = dict(backbone.named_parameters())
        self.owners = Owners({name: named[name] for name in weight_names(backbone)})

    def train(self, mode: bool = True) -> "PackNet":
        """Running statistics are task 1's, like all that norm layers have."""
        super().train(mode)
        if len(self.heads) > 1:
            for module in self.backbone.modules():
                if hasattr(module, "running_mean"):
                    module.eval()
        return self

    @property
    def weights(self) -> dict[str, nn.Parameter]:
        """The parameters that have owners, by name."""
        named = dict(self.backbone.named_parameters())
        return {name: named[name] for name in self.owners.names}

    def learn(self, task: Task) -> Iterator[Phase]:
        """Train, prune, train again."""
        self.requires_grad_(False)
        head = self.heads.grow(len(task.classes)).to(self.device)
        trained = [*(self.backbone.parameters() if task.id == 0 else self.weights.values()), *head.parameters()]
        loss = own_loss(self.backbone, head, task)  # what is not the task's own or older is 0
        for parameter in trained:
            parameter.requires_grad_(True)

        self.owners.claim(task.id)
        yield Phase("packnet", trained, loss, **self.owners.held(self.weights, task.id))
        self.owners.prune(self.weights, task.id, self.prune)
        yield Phase("packnet_retrain", trained, loss, **self.owners.held(self.weights, task.id))
        self.requires_grad_(False)

    def forward(self, x: Tensor, task: int | None = None) -> Tensor:
        """Every task's raw logits side by side; with `task`, that task's alone."""
        tasks = range(len(self.heads)) if task is None else [task]
        return torch.cat([self._expert(t, partial(self._masked, t), x) for t in tasks], dim=1)

    def experts(self) -> Iterator[Expert]:
        """One per task; its weights are masked once."""
        for t in range(len(self.heads)):
            yield Expert(f"task {t}", partial(self._expert, t, cache(partial(self._masked, t))), frozen=True)

    def _masked(self, t: int) -> dict[str, Tensor]:
        return self.owners.masked(self.weights, t)

    def _expert(self, t: int, masked: Callable[[], dict[str, Tensor]], x: Tensor) -> Tensor:
        return self.heads[t](functional_call(self.backbone, masked(), (x,)))
