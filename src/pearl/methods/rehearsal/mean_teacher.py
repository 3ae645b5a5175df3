"""Base of rehearsal methods whose teacher is their own moving average.

After CLS-ER (Arani, Sarfraz & Zonooz, ICLR 2022), which has two.
"""

from collections.abc import Callable
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from pearl.data.batches import Batch, Task
from pearl.methods.base import Method, Network, Phase
from pearl.methods.common.average import Average, Statistics
from pearl.methods.common.memory import Memory, Policy, Shown
from pearl.settings.derived_defaults import DerivedDefault, whole_benchmark

Weight = Annotated[float, Field(ge=0)]
Chance = Annotated[float, Field(gt=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Tasks = Annotated[float, Field(gt=0)] | Literal["auto"] | None


def on_short_tasks(tasks: float) -> DerivedDefault:
    """Return the maximum length of the average in tasks; null on published benchmarks, whose rates are the authors'."""
    return DerivedDefault(lambda config: None if whole_benchmark(config) else tasks)


class MeanTeacher(Average):
    """A moving average that is updated at random steps, counted over all tasks.

    At a step it is updated with probability `chance`, with the decay min(1 - 1 / (step + 1), `decay`). Its length is
    about 1 / (chance * (1 - decay)) steps: 10,000 to 20,000 with the authors' settings, whose tasks have 4,000 to
    16,000. After tasks of a few hundred steps it would still be the initial network; `tasks` limits its length in
    tasks. Without it, the rates are as given.
    """

    def __init__(self, chance: float, decay: float, tasks: float | None, statistics: Statistics) -> None:
        super().__init__(statistics)
        self.chance, self.decay, self.tasks = chance, decay, tasks
        self.steps = 0

    def pace(self, planned: float) -> tuple[float, float]:
        """Return chance and decay for tasks of this many steps: a higher chance first, then a lower decay."""
        if self.tasks is None:
            return self.chance, self.decay
        longest = self.tasks * planned
        chance = min(1.0, max(self.chance, 1 / (longest * (1 - self.decay))))
        return chance, min(self.decay, max(0.0, 1 - 1 / (longest * chance)))

    def follow(self, network: nn.Module, planned: float) -> None:
        """Follow one step of the network, in a task of this many."""
        self.steps += 1
        chance, decay = self.pace(planned)
        if torch.rand(()) < chance:
            self.update(network, min(1 - 1 / (self.steps + 1), decay))

    def get_extra_state(self) -> Tensor:
        """Return the step count, for the state_dict."""
        return torch.tensor(self.steps)

    def set_extra_state(self, state: Tensor) -> None:
        """Restore the step count."""
        self.steps = int(state)


class Rehearsing(Method):
    """A network, a memory of images, and a mean teacher of the network.

    A subclass creates its phases with `phase`; its loss may include `rehearsed`.
    """

    rehearsal = True
    averaged: tuple[str, ...] = ("backbone", "heads")  # the network that the teacher averages

    def __init__(
        self, backbone: nn.Module, teacher: MeanTeacher, *, buffer_size: int, minibatch_size: int, policy: Policy
    ) -> None:
        super().__init__(backbone)
        self.teacher, self.minibatch_size = teacher, minibatch_size
        self.memory = Memory(buffer_size, policy)

    @property
    def network(self) -> nn.ModuleDict:
        """Return the parts that the teacher averages."""
        return nn.ModuleDict({name: getattr(self, name) for name in self.averaged})

    def begin(self, task: Task) -> None:
        """Prepare for a task: allocate memory, and copy the network's new tensors to the teacher."""
        self.heads.grow(len(task.classes)).to(self.device)
        self.memory.open(task, 0)

    def phase(
        self,
        name: str,
        task: Task,
        loss: Callable[[Batch], Tensor],
        params: list[nn.Parameter] | None = None,
        share: float = 1.0,
        **hooks: Any,
    ) -> Phase:
        """Return a phase, a `share` of the task.

        After each step its images are offered to the memory and the teacher is updated.
        """
        self.teacher.update(self.network, 1.0)
        phase = Phase(name, params or [p for p in self.parameters() if p.requires_grad], loss, **hooks)

        def follow(batch: Batch) -> None:
            self.memory.offer(task, batch)
            self.teacher.follow(self.network, phase.planned / share)

        phase.add_after_step(follow)
        return phase

    def shown(self, task: Task) -> Shown | None:
        """Return images of the memory, drawn and augmented."""
        return self.memory.draw(self.minibatch_size, task.view)

    def rehearsed(self, task: Task, reg_weight: float, beta: float, ask: Network | None = None) -> Tensor:
        """Return reg_weight * squared distance to the teacher + beta * cross-entropy, each on separate remembered
        images.

        A term of weight 0 is skipped, including its images. `ask` replaces the forward pass.
        """
        ask = ask or self
        loss = torch.zeros((), device=self.device)
        if reg_weight and (old := self.shown(task)) is not None:
            loss = loss + reg_weight * F.mse_loss(ask(old.x), self.taught(old))
        if beta and (old := self.shown(task)) is not None:
            loss = loss + beta * F.cross_entropy(ask(old.x), old.y)
        return loss

    def taught(self, old: Shown) -> Tensor:
        """Return the teacher's logits for remembered images (B, classes seen)."""
        return self.teacher.evaluated(self, lambda averaged: averaged(old.x))

    def facts(self, task: int) -> dict[str, Any]:
        """Return records of the memory."""
        return {"memory": self.memory.facts()}
