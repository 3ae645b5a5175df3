"""The state of a phase during training, and the mean loss of an epoch."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pearl.data.batches import Batch, Batches, Task
from pearl.errors import TrainingError
from pearl.methods.base import Method, Phase
from pearl.settings.sections import PhaseConfig
from pearl.training.optimizers import Course, Optimizers
from pearl.training.resume import Progress
from pearl.training.world import World


class PhaseModule(nn.Module):
    """A phase as the module that Fabric wraps: its parameters are the phase's, its forward is the phase's loss.

    With several ranks it is the loss on this rank's share of the batch, weighted so that the mean over ranks is the
    batch's loss.
    """

    def __init__(self, phase: Phase, world: World) -> None:
        super().__init__()
        self.params = nn.ParameterList(phase.trained)
        self.loss = phase.loss
        self.world = world

    def forward(self, batch: Batch) -> Tensor:
        """Return the loss of a batch."""
        batch = Batch(*batch)
        if self.world.size == 1:
            return self.loss(batch)
        mine, weight = self.world.share(batch)
        with self.world.shared_statistics(weight):
            return weight * self.loss(mine)


@dataclass
class Training:
    """The state of a phase during training: its place in the run, its data, and the parts of a step."""

    method: Method
    task: Task
    phase: Phase
    position: int  # of the phase in its task
    data: Batches
    settings: PhaseConfig
    course: Course
    optimizers: Optimizers
    module: nn.Module  # the phase's loss, as Fabric sets it up
    wrapped: list[Any]  # the optimizers, as Fabric sets them up
    kernels: Callable[[], AbstractContextManager[object]]
    began: float = 0.0  # in the time of `time.perf_counter`, as if training had not been interrupted

    @property
    def at(self) -> tuple[int, int]:
        """Return the task, and the position of the phase in it."""
        return self.task.id, self.position


def mean_loss(progress: Progress, task: Task, phase: Phase, epoch: int, lr: float) -> float:
    """Return the mean of an epoch's losses; the host waits for the device, once per epoch.

    Raises:
        TrainingError: one of them is not finite.
    """
    values = torch.stack(progress.losses).float().tolist()
    for index, value in enumerate(values):
        if not math.isfinite(value):
            step = progress.done - len(values) + index
            raise TrainingError(
                f"loss became {value} in task {task.id + 1} ({task.name}), phase {phase.name}, epoch {epoch + 1}, "
                f"step {step + 1}, lr {lr:g}; earlier tasks are stored; lower "
                f"train.phases.{phase.name}.lr or set train.phases.{phase.name}.clip=1"
            )
    return sum(values) / len(values)
