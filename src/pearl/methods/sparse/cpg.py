"""CPG: Compacting, Picking and Growing for Unforgetting Continual Learning (Hung et al., NeurIPS 2019).

As PAE, but a task selects which weights of earlier tasks it uses.
"""

from collections.abc import Iterator
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from pearl.data.batches import Task
from pearl.methods.base import Phase
from pearl.methods.sparse.held_out import Best
from pearl.methods.sparse.pae import Goal, Multiplier, OnGrowth, Pae, Percent, Tasks, compacting
from pearl.methods.sparse.stable_units import HoldOut
from pearl.nn.task_modules import TaskTensors

START = 0.01  # initial value of every selection mask


class Cpg(Pae):
    """A real-valued mask per weight, whose entries above a threshold select; trained with the task's weights.

    Gradients pass the threshold unchanged (straight-through). Masks have their own learning rate (`groups.picks`) and
    their phase's schedule; the authors' end earlier. They are fixed while weights are freed; a last phase trains new
    masks, whose best epoch is used if it is better than before, instead of early stopping. For everything else see
    `Pae`.

    Options:
        threshold: entries of a mask above it select.
        max_multiplier: maximum size relative to the first network.
        goal: see `Pae`; the authors' networks start from random weights.
        train_accuracy: see `Pae`.
        tasks: see `Pae`.
        hold_out: share of a task's training images held out for decisions.
        on_growth: see `Pae`.
    """

    names = ("cpg_goal", "cpg", "cpg_prune", "cpg_retrain")
    may_not_matter = ("cpg_goal", "cpg_retrain")  # of which an accuracy is all that counts
    phases = compacting(names, "weights", "picks")

    def __init__(
        self,
        backbone: nn.Module,
        *,
        threshold: Annotated[float, Field(ge=0, lt=START)] = 0.005,
        max_multiplier: Multiplier = 1.5,
        goal: Goal = "scratch",
        train_accuracy: Percent = 95.0,
        tasks: Tasks = "auto",
        hold_out: HoldOut = 0.1,
        on_growth: OnGrowth = "restart",
    ) -> None:
        super().__init__(
            backbone,
            max_multiplier=max_multiplier,
            goal=goal,
            train_accuracy=train_accuracy,
            tasks=tasks,
            hold_out=hold_out,
            on_growth=on_growth,
        )
        self.above = threshold
        self.picks = TaskTensors(buffers=True)  # "t.weight": mask of older tasks' weights that it uses
        self.live: list[TaskTensors] = []  # during a task with older ones, its masks

    def begin(self, task: Task) -> nn.Linear:
        """Create masks for a task that has older ones; see `Pae.begin`."""
        self.live = [TaskTensors()] if task.id else []
        for masks in self.live:
            for name, weight in self.weights.items():
                masks.add(name, torch.full_like(weight, START))
        return super().begin(task)

    def trained(self, name: str, t: int, head: nn.Linear) -> dict[str, list[nn.Parameter]]:
        """See `Pae.trained`: including the masks, unless weights are being freed."""
        picks = [mask for masks in self.live for mask in masks.parameters() if name != self.names[2]]
        return super().trained(name, t, head) | ({"picks": picks} if picks else {})

    def phase(self, name: str, kept: Task, head: nn.Linear, extra: nn.Module | None = None) -> Phase:
        """See `Pae.phase`."""
        for masks in self.live:
            masks.requires_grad_(name != self.names[2])
            extra = extra or masks
        return super().phase(name, kept, head, extra)

    def finish(self, kept: Task, held_back: Task, head: nn.Linear) -> Iterator[Phase]:
        """Train new masks, and store the selection."""
        for masks in self.live:
            best = Best(self.parts(head), lambda: self.score(held_back), len(kept))
            best.look()
            with torch.no_grad():
                for mask in masks.parameters():
                    mask.fill_(START)
            phase = self.phase(self.names[3], kept, head, nn.ModuleList([masks, best]))
            phase.add_after_step(best.after_step)
            yield phase
            best.restore()
            for name in self.owners.names:
                self.picks.add(f"{kept.id}.{name}", masks[name] > self.above)
        self.live = []
        yield from super().finish(kept, held_back, head)

    def score(self, part: Task) -> float:
        """See `Pae.right`; used during training."""
        right = self.right(part)
        self.train()
        return right

    def parts(self, head: nn.Linear) -> nn.ModuleList:
        """See `Pae.parts`."""
        return nn.ModuleList([*super().parts(head), *self.live])

    def weights_of(self, t: int) -> dict[str, Tensor]:
        """See `Pae.weights_of`: of older tasks' weights those that the task selects."""
        if not t:
            return super().weights_of(t)
        live = self.live[0] if self.live and t == len(self.heads) - 1 else None
        weights = {}
        for name, weight in self.weights.items():
            owner = self.owners[name]
            if live is None:
                weights[name] = weight * ((owner == t) | ((owner < t) & self.picks[f"{t}.{name}"]))
            else:
                picked = (live[name] > self.above) + (live[name] - live[name].detach())
                weights[name] = weight * (owner == t) + weight.detach() * (owner < t) * picked
        return weights
