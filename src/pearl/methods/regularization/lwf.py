"""LwF: learning without forgetting (Li & Hoiem, ECCV 2016).

On the images of a new task, the logits of old classes are distilled from the network before the task.
"""

from collections.abc import Iterator
from functools import partial
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from pearl.data.batches import Batch, Task
from pearl.methods.base import Method, Phase
from pearl.methods.common.teacher import distillation, frozen
from pearl.settings.declared import PhaseSpec


class Lwf(Method):
    """Cross-entropy among the new classes + kd_lambda * distillation of the old ones, as in PyCIL.

    Options:
        kd_lambda: weight of the distillation; 10 in comparisons with random initial weights (ADC), 3 in PyCIL.
        temperature: softens both probabilities. The loss is not multiplied by its square, as in PyCIL.
    """

    task_local_loss = True
    phases = (PhaseSpec("lwf_first", "first"), PhaseSpec("lwf", "later"))

    def __init__(
        self,
        backbone: nn.Module,
        *,
        kd_lambda: Annotated[float, Field(ge=0)] = 10.0,
        temperature: Annotated[float, Field(gt=0)] = 2.0,
    ) -> None:
        super().__init__(backbone)
        self.kd_lambda, self.temperature = kd_lambda, temperature

    def learn(self, task: Task) -> Iterator[Phase]:
        """Train all parameters on the new task, with the network before it as the teacher."""
        teacher = frozen(self) if task.id and self.kd_lambda else None
        self.heads.grow(len(task.classes)).to(self.device)
        name, loss = "lwf" if task.id else "lwf_first", partial(self.loss, task, teacher)
        yield Phase(name, self.parameters(), loss, capturable=True)

    def loss(self, task: Task, teacher: Method | None, batch: Batch) -> Tensor:
        """Return the loss; the first task has no teacher."""
        logits = self(batch.x)
        old, new = logits[:, : task.first_class], logits[:, task.first_class :]
        loss = F.cross_entropy(new, batch.y - task.first_class)
        if teacher is not None:
            with torch.no_grad():
                before = teacher(batch.x)
            loss = loss + self.kd_lambda * distillation(old, before, self.temperature)
        return loss
