"""CLNP: Continual Learning via Neural Pruning (Golkar, Kagan & Cho, arXiv 2019).

Each task trains the free weights under a penalty that makes many units inactive; active units are frozen, the others
are free for the next task.
"""

from collections.abc import Iterator
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from pearl.data.batches import Task
from pearl.methods.base import Phase
from pearl.methods.sparse.held_out import held_out
from pearl.methods.sparse.stable_units import HoldOut, StableUnits
from pearl.settings.declared import PhaseSpec

NotNegative = Annotated[float, Field(ge=0)]


class Clnp(StableUnits):
    """Units whose mean activation exceeds the highest threshold without loss of accuracy belong to the task from then
    on.

    The authors' code is not published. Differences to other implementations (with NISPA's code): a task's logits are
    compared among its own classes only, without zeros for all others, and activations of convolutions are means over
    positions, so that one threshold fits all layers. If no threshold is good enough, all units belong to the task. The
    penalty covers the parameters that the task trains. A threshold that needs no new unit is accepted only if it costs
    no accuracy, like any other; NISPA's code always accepts it.

    Options:
        l1: weight of the sum of sizes of all parameters.
        theta_step: thresholds are 0 and multiples of it.
        m_perc: percent points of held-out accuracy that a threshold may cost.
        hold_out: share of a task's training images held out to choose the best epoch and the threshold.
    """

    phases = (PhaseSpec("clnp", images=lambda task: task.kept(task.options["hold_out"])),)

    def __init__(
        self,
        backbone: nn.Module,
        *,
        l1: NotNegative = 1e-5,
        theta_step: Annotated[float, Field(gt=0)] = 0.02,
        m_perc: NotNegative = 1.0,
        hold_out: HoldOut = 0.1,
    ) -> None:
        super().__init__(backbone, hold_out)
        self.l1, self.theta_step, self.m_perc = l1, theta_step, m_perc

    def learn(self, task: Task) -> Iterator[Phase]:
        """Train, then freeze active units."""
        kept, held = held_out(task, self.hold_out)
        head = self.begin(task)
        phase, best = self.phase("clnp", kept, held, head, l1=self.l1)
        yield phase
        floor = best.restore() - self.m_perc
        self.settle(self.important(self.look(kept), held, floor))

    def important(self, activations: Tensor, held: Task, floor: float) -> Tensor:
        """Return the fewest units, including stable ones, that keep the held-out accuracy at `floor`."""
        chosen = torch.ones_like(self.stable)
        for step in range(int(activations.max() / self.theta_step) + 1):
            candidate = self.stable | (activations > step * self.theta_step)
            if self.accuracy(held, candidate) < floor:
                break
            chosen = candidate
            if torch.equal(candidate, self.stable):
                break
        return chosen
