"""SD-LoRA: Scalable Decoupled Low-Rank Adaptation for Class Incremental Learning (Wu et al., ICLR 2025).

Directions and magnitudes of updates are decoupled. Directions of earlier tasks are fixed; each task learns a new
direction and the magnitudes of all directions.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from pearl.data.batches import Task
from pearl.errors import ConfigError
from pearl.methods.base import Method, Phase, own_loss
from pearl.nn import lowrank
from pearl.nn.functional import functional_call
from pearl.nn.lowrank import Target
from pearl.nn.task_modules import TaskTensors

START = 0.8  # initial value of every magnitude
REDUCED = (1.0, 0.8, 0.6)  # shares of the rank, for four tasks each


class SdLora(Method):
    """One network; a low-rank update of queries and values for each task, each times a scalar.

    With the updates B_i A_i of tasks before t, a projection in task t is W + a_t B_t A_t + sum over i < t of a_i B_i
    A_i / (|B_i| |A_i|), with Frobenius norms. A task trains A_t, B_t, its head and the scalars a_0 to a_t, which all
    layers share. Defaults are the authors' (WuYichen-97/SD-Lora-CL 8bacded): rank 10; SGD without decay, constant rate,
    20 epochs, batches of 128, 0.01 on ImageNet-R and 0.008 on CIFAR-100. Their network is pretrained on ImageNet-1k.
    Their code allows 20 earlier tasks; here the number is unlimited.

    In their code all scalars restart at 0.8 in each task, so that the last task's update changes its size, and the
    features change, when it is normalised to a direction. `carry` avoids both: a_i keeps its value and B_i A_i is not
    normalised.

    Options:
        rank: rank of a task's update.
        reduced: SD-LoRA-RR: 80 % of the rank from the fifth task, 60 % from the ninth.
        magnitude: `restart` - as in the authors' code; `carry` - the features do not change between tasks.
    """

    backbones = "vit"
    task_local_loss = True
    phases = ("sdlora",)

    def __init__(
        self,
        backbone: nn.Module,
        *,
        rank: Annotated[int, Field(ge=1)] = 10,
        reduced: bool = False,
        magnitude: Literal["restart", "carry"] = "restart",
    ) -> None:
        if not lowrank.has_attention(backbone):
            raise ConfigError(
                f"this method needs a ViT, such as backbone=timm/vit_base_patch16_224; here is a "
                f"{type(backbone).__name__}"
            )
        super().__init__(backbone.requires_grad_(False))
        self.targets = lowrank.select_targets(backbone, ["query", "value"])
        self.rank, self.reduced, self.restart = rank, reduced, magnitude == "restart"
        self.factors = TaskTensors()  # "t.A.target" (rank, inputs), "t.B.target" (outputs, rank)
        self.magnitudes = TaskTensors()  # "t" ()

    def learn(self, task: Task) -> Iterator[Phase]:
        """Train a new direction and all magnitudes."""
        self.requires_grad_(False)
        head = self.heads.grow(len(task.classes)).to(self.device)
        nn.init.kaiming_uniform_(head.weight, nonlinearity="linear")
        nn.init.zeros_(head.bias)
        rank = max(round(self.rank * REDUCED[min(task.id // 4, 2)]), 1) if self.reduced else self.rank
        for target in self.targets:
            a, b = lowrank.kaiming_factors(target.shape, rank, head.weight)  # type: ignore[arg-type]
            self.factors.add(f"{task.id}.A.{target.label}", a)
            self.factors.add(f"{task.id}.B.{target.label}", b)
        for t in range(task.id + 1) if self.restart else [task.id]:
            self.magnitudes.add(f"{t}", torch.tensor(START, device=self.device))
        self.magnitudes.requires_grad_(True)
        params = [*self.factors.in_order(f"{task.id}."), *self.magnitudes.in_order(), *head.parameters()]
        yield Phase("sdlora", params, own_loss(self.features, head, task), capturable=True)
        self.requires_grad_(False)

    def update(self, target: Target) -> Tensor:
        """Return the sum of all tasks' updates of a projection (outputs, inputs)."""
        last, rows, columns = len(self.magnitudes) - 1, [], []
        for t in range(last + 1):
            A, B = self.factors[f"{t}.A.{target.label}"], self.factors[f"{t}.B.{target.label}"]
            size = self.magnitudes[f"{t}"]
            if t < last and self.restart:
                size = size / (A.norm() * B.norm()).clamp(min=1e-12)  # the update of a task that learnt nothing is 0
            rows.append(A)
            columns.append(size * B)
        return torch.cat(columns, dim=1) @ torch.cat(rows)

    def weights(self) -> dict[str, Tensor]:
        """Return queries and values with the updates of all tasks so far, by the backbone's names."""
        with torch.autocast(self.device.type, enabled=False):  # updates are merged in float32, then cast once
            updates = {target: self.update(target) for target in self.targets if len(self.magnitudes)}
            return lowrank.merged(self.backbone, updates)

    def features(self, x: Tensor) -> Tensor:
        """Return features (B, dim) with all updates."""
        return functional_call(self.backbone, self.weights(), (x,))

    def size(self) -> int:
        """Count backbone and heads: updates are merged into the weights."""
        return sum(p.numel() for module in (self.backbone, self.heads) for p in module.parameters())

    def facts(self, task: int) -> dict[str, Any]:
        """Return the magnitudes after a task."""
        return {"magnitudes": [float(self.magnitudes[f"{t}"]) for t in range(task + 1)]}
