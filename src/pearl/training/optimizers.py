"""What a phase's settings say of its steps: how many there are, at which rate, by which optimizers."""

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
    """How long a phase is, in steps."""

    per_epoch: int
    planned: int  # what the schedule spans
    steps: int  # what is trained: less where `engine.max_steps` ends it early

    @classmethod
    def of(cls, settings: PhaseConfig, items: int, max_steps: int | None) -> "Course":
        """The course of a phase with so many items an epoch."""
        per_epoch = len(batch_bounds(items, settings.batch_size))
        planned = settings.steps or settings.epochs * per_epoch
        return cls(per_epoch, planned, min(planned, max_steps or planned))

    @property
    def epochs(self) -> int:
        """Epochs that the schedule spans, the last one perhaps cut off."""
        return math.ceil(self.planned / self.per_epoch)


def learning_rate(settings: PhaseConfig, course: Course, done: int) -> float:
    """The rate of the step that comes after `done` steps of a phase.

    `quarter_cosine` is that of CODA-Prompt's and InfLoRA's code (utils/schedulers.py): an epoch e of K has
    cos(99 pi e / (200 (K - 1))) of the rate, so that the last one still has 1.6 % and the mean is 64 %. Their loops
    first call the scheduler after it has set epoch 0 itself, which gives the second epoch the first one's rate again;
    here it is as the formula says. A single epoch has the whole rate.
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
    """An optimizer for each kind that groups of parameters ask for; fused kernels where the device has them.

    Those whose steps are `graphed` keep what changes from step to step, the rate and Adam's count, on the device.
    """
    of_kind: dict[str, list[dict[str, Any]]] = {}
    for name, params in groups.items():
        own = settings.group(name)
        lr = torch.tensor(own.lr, device=device) if graphed else own.lr
        changes = {"params": list(params), "lr": lr, "share": own.lr / settings.lr}
        of_kind.setdefault(own.optimizer, []).append(changes | _arguments(own))
    fused = device.type in {"cuda", "cpu"}
    made: Optimizers = []
    for kind, members in of_kind.items():
        if kind == "sgd":
            made.append(torch.optim.SGD(members, fused=fused))
        else:
            adam = torch.optim.Adam if kind == "adam" else torch.optim.AdamW
            made.append(adam(members, fused=fused, capturable=graphed and device.type == "cuda"))
    return made


def _arguments(own: OptimizerConfig) -> dict[str, Any]:
    common: dict[str, Any] = {"weight_decay": own.weight_decay}
    if own.optimizer == "sgd":
        return common | {"momentum": own.momentum, "nesterov": own.nesterov}
    return common | {"betas": own.betas}


def set_rate(optimizers: Optimizers, rate: float) -> None:
    """Set the phase's learning rate; a group has its own share of it. One that is a tensor stays where it is."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            own = rate * group["share"]
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(own)
            else:
                group["lr"] = own


def states(optimizers: Optimizers) -> dict[Tensor, dict[str, Any]]:
    """What optimizers keep of each of their parameters, such as momentum; it may be changed and added to."""
    return {
        parameter: optimizer.state[parameter]
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    }


def take_over(optimizers: Optimizers, before: Optimizers) -> None:
    """Go on with what other optimizers know of parameters that both have."""
    known = states(before)
    for parameter, state in states(optimizers).items():
        state.update(known.get(parameter, {}))
    for optimizer in optimizers:
        own = states([optimizer])
        if any(
            "momentum_buffer" in state for state in own.values()
        ):  # a fused step of SGD needs those of all or of none
            for parameter, state in own.items():
                state.setdefault("momentum_buffer", torch.zeros_like(parameter))
