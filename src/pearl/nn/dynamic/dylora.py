"""DyLoRA: nested ranks, one of which is chosen after training."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field

from pearl.nn.dynamic.gated import Factors, GatedUpdates, Scale
from pearl.nn.dynamic.rule import Budget, DynamicRule


@dataclass(frozen=True, kw_only=True)
class DyloraRule(DynamicRule):
    """DyLoRA (Valipour et al., EACL 2023): nested ranks; each step trains the first b components, b random for all
    layers.

    The paper chooses no b afterwards. Here it is the smallest b whose loss on held-out images is within a tolerance of
    the best, or the largest that fits the budget.

    The authors scale the update of the first b components by alpha / b. This rule does the same if alpha is a number,
    such as `method.alpha=16`; with PEARL's default alpha = 2r, the scale is 2 for every b.

    Options:
        start: R, the largest b.
        r: the fixed rank whose parameters are the budget `r`.
        budget: most parameters of a task's updates; `r`, `paper` (with its probe), or null, see `DynamicRule`.
        then: `continue` with what is left (as published), or `restart` PEARL's adaptation with these ranks.
        frozen: train the b-th component alone in each step, as the authors' script does, instead of the first b.
        tolerance: relative excess of the loss over the lowest one (ours); null for the largest b that fits.
        hold_out: the share of each class's images to measure the loss on (ours).
    """

    start: Annotated[int, Field(ge=1)] = 16
    budget: Budget = None
    frozen: bool = True
    tolerance: Annotated[float, Field(ge=0)] | None = 0.02
    hold_out: Annotated[float, Field(gt=0, lt=1)] = 0.1

    @property
    def holds_out(self) -> float:
        """See `DynamicRule.holds_out`."""
        return 0.0 if self.tolerance is None else self.hold_out

    def begin(self, updates: GatedUpdates) -> None:
        """Initialise as LoRA does; gates stay 1."""
        updates.gates.requires_grad_(False)

    def prefix(self, updates: GatedUpdates, step: int) -> int:
        """Return b of a step (1 to R): a function of the step, equal for all layers and processes."""
        draws = torch.Generator().manual_seed(updates.seed + step)
        return 1 + int(torch.randint(max(updates.ranks), (), generator=draws))

    def factors(self, updates: GatedUpdates, scale: Scale, step: int | None) -> Factors:
        """Return the first b components with the scale of an update of rank b."""
        if step is None:
            counts = [int(kept.sum()) for kept in updates.each(updates.kept)]
        else:
            b = self.prefix(updates, step)
            counts = [min(b, rank) for rank in updates.ranks]
        cut: Factors = {}
        for label, a, b_, count in zip(updates.labels, updates.a, updates.b, counts, strict=True):
            rows, columns = a[:count], b_[:, :count]
            if self.frozen and step is not None:
                rows = torch.cat([rows[:-1].detach(), rows[-1:]])
                columns = torch.cat([columns[:, :-1].detach(), columns[:, -1:]], dim=1)
            cut[label] = (rows, scale(count) * columns)
        return cut

    def finish(self, updates: GatedUpdates, budget: int, loss: Callable[[], float]) -> None:
        """Choose b; 0 if even rank 1 exceeds the budget."""
        losses: dict[int, float] = {}
        for b in range(1, max(updates.ranks, default=0) + 1):
            if self._keep(updates, b) <= budget:
                losses[b] = loss() if self.tolerance is not None else 0.0
        if self.tolerance is None:
            self._keep(updates, max(losses, default=0))
            return
        bound = (1 + self.tolerance) * min(losses.values(), default=0.0)
        self._keep(updates, min((b for b, value in losses.items() if value <= bound), default=0))

    def _keep(self, updates: GatedUpdates, b: int) -> int:
        """Keep the first b components of each update; return their number of parameters."""
        for kept in updates.each(updates.kept):
            kept.copy_(torch.arange(len(kept), device=kept.device) < b)
        return sum(cost for cost, kept in zip(updates.costs, updates.kept.tolist(), strict=True) if kept)
