"""C-LoRA: Continual Diffusion (Smith et al., TMLR 2024), as a classifier.

Each task adds its own update to the weights. The penalty on an entry of the new update grows with the sum of earlier
updates there, which protects their changes.
"""

from collections.abc import Callable, Sequence
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from pearl.data.batches import Batch, Task
from pearl.methods.adapters.seqlora import SeqLora
from pearl.nn.lowrank import Fold, Target
from pearl.settings.declared import PhaseSpec


class CLora(SeqLora):
    """One network; its weights include the sum of all tasks' updates, with a penalty for entries that earlier tasks
    use.

    The paper is about image generation, no code is published, and the settings of its classifier are unknown. Here
    everything but the penalty is SeqLoRA's, with which it is compared: rank 10 on keys and values; Adam 5e-4, cosine,
    50 epochs, batch 128; in a convolutional network depthwise filters and norm layers continue to train, without a
    penalty. The factors of every task are stored, which up to about forty tasks are smaller than their sum.

    Options:
        targets: layers to adapt, see `lowrank.select_targets`; `auto` is keys and values where there is attention.
        rank: rank of a task's update.
        scale: the update is scale * B A.
        penalty: weight of the squared entries of the new update, each times that of the sum before it (lambda in the
            paper). Entries are about 1e-3 and enter to the fourth power, so it is large; the default is ours, the
            best of 1e4, 1e6 and 1e8 with DeiT-Tiny on images held out of two tasks.
        fold: 2-D view of a convolution, see `lowrank.to_matrix`.
        reference: as PEARL's: `given` - the backbone comes with weights; `first_task` - task 1 trains it; `auto` - the
            first if it was pretrained.
    """

    phases = (PhaseSpec("reference", "reference"), PhaseSpec("clora", "adapted"))

    def __init__(
        self,
        backbone: nn.Module,
        *,
        targets: str | list[str] = "auto",
        rank: Annotated[int, Field(ge=1)] = 10,
        scale: Annotated[float, Field(gt=0)] = 1.0,
        penalty: Annotated[float, Field(ge=0)] = 1e4,
        fold: Fold = "spatial",
        reference: Literal["auto", "given", "first_task"] = "auto",
    ) -> None:
        super().__init__(backbone, targets=targets, rank=rank, scale=scale, fold=fold, reference=reference)
        self.penalty = penalty

    @property
    def tasks(self) -> range:
        """Return the tasks that have an update."""
        return range(self.first_adapted, len(self.heads))

    def start(self, task: Task) -> list[nn.Parameter]:
        """Create new factors; earlier tasks' are unchanged."""
        self.add(f"{task.id}.")
        return self.update.in_order(f"{task.id}.")

    def loss(self, head: nn.Module, task: Task) -> Callable[[Batch], Tensor]:
        """Return cross-entropy among the task's own classes, plus the penalty."""
        task_loss = super().loss(head, task)
        earlier = self.tasks[:-1]
        before = {target: self.summed(target, earlier).detach() for target in self.low_rank if earlier}
        if not before:
            return task_loss

        def loss(batch: Batch) -> Tensor:
            with torch.autocast(self.device.type, enabled=False):  # the product of two small numbers needs float32
                overlap = [(sum_ * self.summed(target, [task.id])).square().sum() for target, sum_ in before.items()]
                penalty = self.penalty * torch.stack(overlap).sum()
            return task_loss(batch) + penalty

        return loss

    def product(self, target: Target) -> Tensor:
        """Return the sum of all tasks' updates."""
        return self.summed(target, self.tasks)

    def summed(self, target: Target, tasks: Sequence[int]) -> Tensor:
        """Return the sum of some tasks' updates as a matrix (rows, columns)."""
        A = torch.cat([self.update[f"{t}.A.{target.label}"] for t in tasks])
        B = torch.cat([self.update[f"{t}.B.{target.label}"] for t in tasks], dim=1)
        return self.scale * (B @ A)
