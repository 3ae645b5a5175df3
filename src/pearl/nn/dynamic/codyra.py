"""CoDyRA: gates shrink towards 0, and components whose gate reaches 0 are removed."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Annotated

import torch
from pydantic import Field

from pearl.nn.dynamic.gated import Factors, GatedUpdates, Scale
from pearl.nn.dynamic.rule import Budget, DynamicRule


@dataclass(frozen=True, kw_only=True)
class CodyraRule(DynamicRule):
    """CoDyRA (Lu et al., 2024): gates from N(0, 1) shrink in the second half, and those that reach 0 are removed.

    Each of these steps applies a soft threshold kappa, which rises in 49 stages: sign(g) max(|g| - kappa, 0). The
    authors' code zeroes gates up to twice the threshold. By default there is no budget; with one, the largest gates are
    kept. The scale is 1, whatever PEARL's alpha. The authors merge the updates into the weights, PEARL stores them
    separately.

    Options:
        start: the initial rank of updates.
        r: the fixed rank whose parameters are the budget `r`.
        budget: most parameters of a task's updates; `r`, `paper` (with its probe), or null, see `DynamicRule`.
        then: `continue` with what is left (as published), or `restart` PEARL's adaptation with these ranks.
        shrinkage: the sum of all thresholds, by which an unused gate shrinks: that of the authors' 500 steps up to
            .005. About half of N(0, 1) lies below. A threshold per step would depend on the number of steps.
    """

    start: Annotated[int, Field(ge=1)] = 16
    budget: Budget = None
    shrinkage: Annotated[float, Field(ge=0)] = 0.65

    def begin(self, updates: GatedUpdates) -> None:
        """Initialise A kaiming-uniform, B to 0, gates from N(0, 1)."""
        updates.gates.normal_()

    def factors(self, updates: GatedUpdates, scale: Scale, step: int | None) -> Factors:
        """See `DynamicRule.factors`; the scale is 1."""
        return updates.factors(lambda rank: 1.0)

    @torch.no_grad()
    def shrink(self, updates: GatedUpdates, done: int, planned: int, budget: int) -> None:
        """Apply the soft threshold to the gates."""
        stages = codyra_stages(planned)
        if stage := stages[done - 1]:
            gates, kappa = updates.gates, self.shrinkage * stage / sum(stages)
            gates.copy_(gates.sign() * (gates.abs() - kappa).clamp(min=0))

    def finish(self, updates: GatedUpdates, budget: int, loss: Callable[[], float]) -> None:
        """Keep components whose gate is not 0, the largest gates first."""
        sizes = updates.gates.detach().abs()
        updates.kept.copy_(updates.within(budget, sizes) & (sizes > 0))


@cache
def codyra_stages(planned: int) -> tuple[int, ...]:
    """Return the stage of the threshold, 0 to 49, after each step: 0 in the first half, 49 in the last steps."""
    half = planned / 2
    return tuple(min(int((k - half) * 50 / half) + 1, 49) if k > half else 0 for k in range(planned))
