"""The steps of a phase by its settings: number, learning rate, optimizers."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pearl.data.batches import batch_bounds
from pearl.settings.sections import OptimizerConfig, PhaseConfig

Optimizers = list[torch.optim.Optimizer]


@dataclass(frozen=True)
class Course:
    """The length of a phase in steps."""

    per_epoch: int
    planned: int  # steps that the schedule spans
    steps: int  # trained steps: fewer if `engine.max_steps` ends it early

    @classmethod
    def of(cls, settings: PhaseConfig, items: int, max_steps: int | None) -> "Course":
        """Return the course of a phase with this many items per epoch."""
        per_epoch = len(batch_bounds(items, settings.batch_size))
        planned = settings.steps or settings.epochs * per_epoch
        return cls(per_epoch, planned, min(planned, max_steps or planned))

    @property
    def epochs(self) -> int:
        """Return the epochs that the schedule spans, the last one possibly partial."""
        return math.ceil(self.planned / self.per_epoch)


def learning_rate(settings: PhaseConfig, course: Course, done: int) -> float:
    """Return the learning rate of the step after `done` steps of a phase.

    `quarter_cosine` is that of CODA-Prompt's and InfLoRA's code (utils/schedulers.py): an epoch e of K has cos(99 pi e
    / (200 (K - 1))) of the rate, so that the last one still has 1.6 % and the mean is 64 %. Their loops call the
    scheduler once too late, so that the second epoch repeats the first one's rate; here the rate follows the formula. A
    single epoch has the full rate.
    """
    rate, progress = settings.lr, done / course.planned
    if settings.schedule == "cosine":
        rate = settings.end_lr + (settings.lr - settings.end_lr) * (1 + math.cos(math.pi * progress)) / 2
    elif settings.schedule == "quarter_cosine":
        share = 0.99 * (done // course.per_epoch) / max(1, course.epochs - 1)
        rate = settings.lr * math.cos(math.pi / 2 * share)
    elif settings.schedule == "multistep":
        rate = settings.lr * settings.gamma ** sum(progress >= milestone for milestone in settings.milestones)
    if progress < settings.warmup:
        rate = settings.warmup_lr + (rate - settings.warmup_lr) * progress / settings.warmup
    return rate


def make_optimizers(
    settings: PhaseConfig,
    groups: Mapping[str, Sequence[nn.Parameter]],
    device: torch.device,
    *,
    graphed: bool = False,
) -> Optimizers:
    """Create an optimizer for each type that groups of parameters use; with fused kernels if the device has them.

    If steps are `graphed`, the rate and Adam's step count are on the device.
    """
    of_kind: dict[str, list[dict[str, Any]]] = {}
    for name, params in groups.items():
        group_settings = settings.group(name)
        lr = torch.tensor(group_settings.lr, device=device) if graphed else group_settings.lr
        changes = {"params": list(params), "lr": lr, "share": group_settings.lr / settings.lr}
        of_kind.setdefault(group_settings.optimizer, []).append(changes | _arguments(group_settings))
    fused = device.type in {"cuda", "cpu"}
    made: Optimizers = []
    for kind, members in of_kind.items():
        if kind == "sgd":
            made.append(torch.optim.SGD(members, fused=fused))
        else:
            adam = torch.optim.Adam if kind == "adam" else torch.optim.AdamW
            made.append(adam(members, fused=fused, capturable=graphed and device.type == "cuda"))
    return made


def _arguments(settings: OptimizerConfig) -> dict[str, Any]:
    common: dict[str, Any] = {"weight_decay": settings.weight_decay}
    if settings.optimizer == "sgd":
        return common | {"momentum": settings.momentum, "nesterov": settings.nesterov}
    return common | {"betas": settings.betas}


def set_rate(optimizers: Optimizers, rate: float) -> None:
    """Set the phase's learning rate; a group has its own factor. Rates that are tensors are changed in place."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group_rate = rate * group["share"]
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(group_rate)
            else:
                group["lr"] = group_rate


def states(optimizers: Optimizers) -> dict[Tensor, dict[str, Any]]:
    """Return the optimizers' state of each parameter, such as momentum; it may be modified."""
    return {
        parameter: optimizer.state[parameter]
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    }


def take_over(optimizers: Optimizers, before: Optimizers) -> None:
    """Copy the state of other optimizers for common parameters."""
    known = states(before)
    for parameter, state in states(optimizers).items():
        state.update(known.get(parameter, {}))
    for optimizer in optimizers:
        current = states([optimizer])
        if any(
            "momentum_buffer" in state for state in current.values()
        ):  # a fused step of SGD needs the state of all parameters or none
            for parameter, state in current.items():
                state.setdefault("momentum_buffer", torch.zeros_like(parameter))
