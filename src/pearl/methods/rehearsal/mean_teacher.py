"""What methods share that rehearse and have a moving average of themselves as a teacher.

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
from pearl.settings.follow import Follows, whole_benchmark

Weight = Annotated[float, Field(ge=0)]
Chance = Annotated[float, Field(gt=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Tasks = Annotated[float, Field(gt=0)] | Literal["auto"] | None


def on_short_tasks(tasks: float) -> Follows:
    """The limit of an average's length in tasks; none on published benchmarks, whose rates are the authors'."""
    return Follows(lambda config: None if whole_benchmark(config) else tasks)


class MeanTeacher(Average):
    """A moving average that follows its network at random steps, counted over all tasks.

    At a step it is updated with probability `chance`, with the decay min(1 - 1 / (step + 1), `decay`). So it is about
    1 / (chance * (1 - decay)) steps long, 10,000 to 20,000 with the authors' settings, whose tasks have 4,000 to
    16,000. In tasks of a few hundred steps it would still be the initial network: given `tasks`, it is no longer than
    so many tasks. Without, the rates are as given.
    """

    def __init__(self, chance: float, decay: float, tasks: float | None, statistics: Statistics) -> None:
        super().__init__(statistics)
        self.chance, self.decay, self.tasks = chance, decay, tasks
        self.steps = 0

    def pace(self, planned: float) -> tuple[float, float]:
        """Chance and decay in tasks of so many steps: more often first, then faster."""
        if self.tasks is None:
            return self.chance, self.decay
        longest = self.tasks * planned
        chance = min(1.0, max(self.chance, 1 / (longest * (1 - self.decay))))
        return chance, min(self.decay, max(0.0, 1 - 1 / (longest * chance)))

    def follow(self, network: nn.Module, planned: float) -> None:
        """One step of the network, in a task of so many."""
        self.steps += 1
        chance, decay = self.pace(planned)
        if torch.rand(()) < chance:
            self.update(network, min(1 - 1 / (self.steps + 1), decay))

    def get_extra_state(self) -> Tensor:
        """The steps, for the state_dict."""
        return torch.tensor(self.steps)

    def set_extra_state(self, state: Tensor) -> None:
        """The reverse."""
        self.steps = int(state)


class Rehearsing(Method):
    """A network, a memory of images, and a mean teacher of the network.

    A subclass makes its phases with `phase`; its loss may have `rehearsed`.
    """

    rehearsal = True
    averaged: tuple[str, ...] = ("backbone", "heads")  # what the teacher is an average of

    def __init__(
        self, backbone: nn.Module, teacher: MeanTeacher, *, buffer_size: int, minibatch_size: int, policy: Policy
    ) -> None:
        super().__init__(backbone)
        self.teacher, self.minibatch_size = teacher, minibatch_size
        self.memory = Memory(buffer_size, policy)

    @property
    def network(self) -> nn.ModuleDict:
        """The parts that the teacher is an average of."""
        return nn.ModuleDict({name: getattr(self, name) for name in self.averaged})

    def begin(self, task: Task) -> None:
        """Make room for a task; the teacher takes what is new as it is."""
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
        """A phase, a `share` of the task. After a step its images are offered to the memory and the teacher follows."""
        self.teacher.update(self.network, 1.0)
        phase = Phase(name, params or [p for p in self.parameters() if p.requires_grad], loss, **hooks)

        def follow(batch: Batch) -> None:
            self.memory.offer(task, batch)
            self.teacher.follow(self.network, phase.planned / share)

        phase.then(follow)
        return phase

    def shown(self, task: Task) -> Shown | None:
        """Images of the memory, drawn and augmented anew."""
        return self.memory.draw(self.minibatch_size, task.view)

    def rehearsed(self, task: Task, reg_weight: float, beta: float, ask: Network | None = None) -> Tensor:
        """reg_weight * squared distance to the teacher + beta * cross-entropy, each on remembered images of its own.

        A term of weight 0 is left out, its images too. `ask` gives logits in the place of the forward pass.
        """
        ask = ask or self
        loss = torch.zeros((), device=self.device)
        if reg_weight and (old := self.shown(task)) is not None:
            loss = loss + reg_weight * F.mse_loss(ask(old.x), self.taught(old))
        if beta and (old := self.shown(task)) is not None:
            loss = loss + beta * F.cross_entropy(ask(old.x), old.y)
        return loss

    def taught(self, old: Shown) -> Tensor:
        """What the teacher says of remembered images (B, classes seen)."""
        return self.teacher.asked(self, lambda averaged: averaged(old.x))

    def facts(self, task: int) -> dict[str, Any]:
        """What the memory holds."""
        return {"memory": self.memory.facts()}
