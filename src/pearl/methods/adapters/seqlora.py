"""SeqLoRA: one low-rank update, trained on all tasks in turn. The baseline of InfLoRA (Liang and Li, CVPR 2024)."""

from collections.abc import Callable, Iterator
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from pearl.data.batches import Batch, Task
from pearl.methods.base import Method, Phase, own_loss, whole
from pearl.nn import lowrank
from pearl.nn.functional import functional_call
from pearl.nn.lowrank import Fold, Target
from pearl.nn.task_modules import TaskTensors
from pearl.settings.declared import Phases, PhaseSpec, declared


class SeqLora(Method):
    """One network: reference weights and one update that each task trains further; a head per task.

    Defaults are those of InfLoRA's comparison: rank 10 on keys and values, B A without a factor; Adam 5e-4, cosine, 50
    epochs, batch 128. In a convolutional network, depthwise filters and norm layers continue to train directly. With
    one task it is PEARL with a fixed rank and no probe; PEARL's alpha = 2r is `scale: 2`.

    Options:
        targets: layers to adapt, see `lowrank.select_targets`; `auto` is keys and values where there is attention.
        rank: rank of the update.
        scale: the update is scale * B A.
        fold: 2-D view of a convolution, see `lowrank.to_matrix`.
        reference: as PEARL's: `given` - the backbone comes with weights; `first_task` - task 1 trains it; `auto` - the
            first if it was pretrained.
    """

    task_local_loss = True
    phases: Phases = (PhaseSpec("reference", "reference"), PhaseSpec("seqlora", "adapted"))

    def __init__(
        self,
        backbone: nn.Module,
        *,
        targets: str | list[str] = "auto",
        rank: Annotated[int, Field(ge=1)] = 10,
        scale: Annotated[float, Field(gt=0)] = 1.0,
        fold: Fold = "spatial",
        reference: Literal["auto", "given", "first_task"] = "auto",
    ) -> None:
        super().__init__(backbone)
        if targets == "auto" and lowrank.has_attention(backbone):
            targets = ["key", "value"]
        self.targets = lowrank.select_targets(backbone, targets)
        self.low_rank = [target for target in self.targets if not target.dense]
        self.further = [target.parameter for target in self.targets if target.dense] + lowrank.task_norms(backbone)[0]
        self.rank, self.scale, self.fold = rank, scale, fold
        if reference == "auto":
            reference = "given" if backbone.pretrained else "first_task"
        self.first_adapted = 0 if reference == "given" else 1
        self.update = TaskTensors()  # "A.target", "B.target"

    def learn(self, task: Task) -> Iterator[Phase]:
        """Train the update and the new head; earlier heads are unchanged."""
        self.requires_grad_(False)
        head = self.heads.grow(len(task.classes)).to(self.device)
        if task.id < self.first_adapted:
            yield whole("reference", self.backbone, head, task)
            self.requires_grad_(False)
            return

        params = [*self.start(task), *map(self.backbone.get_parameter, self.further), *head.parameters()]
        for parameter in params:
            parameter.requires_grad_(True)
        yield Phase(list(declared(self))[-1], params, self.loss(head, task), capturable=True)
        self.requires_grad_(False)

    def start(self, task: Task) -> list[nn.Parameter]:
        """Return the factors that a task trains: the existing ones."""
        if not len(self.update):
            self.add("")
        return self.update.in_order()

    def add(self, prefix: str) -> None:
        """Add factors of each target, with this name prefix; B A is zero at first."""
        for target in self.low_rank:
            rows, columns = lowrank.matrix_shape(target.shape, self.fold)
            rank, like = min(self.rank, rows, columns), self.backbone.get_parameter(target.parameter)
            a, b = lowrank.kaiming_factors((rows, columns), rank, like)
            self.update.add(f"{prefix}A.{target.label}", a)
            self.update.add(f"{prefix}B.{target.label}", b)

    def loss(self, head: nn.Module, task: Task) -> Callable[[Batch], Tensor]:
        """Return the loss that a task minimises together with its head."""
        return own_loss(self.features, head, task)

    def product(self, target: Target) -> Tensor:
        """Return the update of a target, scale * B A, as a matrix (rows, columns)."""
        return self.scale * (self.update[f"B.{target.label}"] @ self.update[f"A.{target.label}"])

    def weights(self) -> dict[str, Tensor]:
        """Return the adapted weights, by the backbone's names."""
        changed: dict[str, Tensor] = {}
        with torch.autocast(self.device.type, enabled=False):  # updates are merged in float32, then cast once
            for target in self.low_rank if len(self.update) else ():
                weight = changed.get(target.parameter, self.backbone.get_parameter(target.parameter))
                update = lowrank.from_matrix(self.product(target), target.shape, self.fold)
                changed[target.parameter] = target.add(weight, update)
        return changed

    def features(self, x: Tensor) -> Tensor:
        """Return features (B, dim) with the update."""
        return functional_call(self.backbone, self.weights(), (x,))

    def size(self) -> int:
        """Count backbone and heads: the update is merged into the weights."""
        return sum(p.numel() for module in (self.backbone, self.heads) for p in module.parameters())
