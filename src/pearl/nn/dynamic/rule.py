"""Base class of rules that find ranks by training.

AdaLoRA, DoRA (dynamic rank distribution), CoDyRA and DyLoRA were designed for other learners than one update per task
over a frozen reference; each class documents its interpretation. A layer may end with rank 0. PEARL's probe is needed
only if the budget is that of the paper's rule.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from pearl.nn.dynamic.gated import Factors, GatedUpdates, Scale
from pearl.nn.lowrank import kaiming_factors
from pearl.nn.rank_rules import Choice, FixedRule, PaperRule, RankRule, cost

Layers = Mapping[str, tuple[Tensor, Tensor]]  # by label: weights before and after fine-tuning, 2-D views
Budget = Annotated[int, Field(ge=1)] | Literal["r", "paper"] | None


@dataclass(frozen=True, kw_only=True)
class DynamicRule(RankRule):
    """Base of these rules.

    A step is: loss and `penalty`, `observe`, the optimizer's step, `shrink`; at the end `finish`.

    `start`: the initial rank of updates, at most full rank. `budget`: the maximum parameters of a task's updates: a
    number; `r`: those of a fixed rank `r`; `paper`: those that the paper's rule chooses for the same task, the only
    case that trains a probe; null: no limit. `then`: `continue` with the remaining components, in one phase `adapt` (as
    published), or `restart`: a phase `allocate` finds ranks, and PEARL's own adaptation starts again with them.
    """

    start: Annotated[int, Field(ge=1)] = 12
    r: Annotated[int, Field(ge=1)] = 8
    budget: Budget = "r"
    then: Literal["continue", "restart"] = "continue"

    @property
    def needs_probe(self) -> bool:
        """See `RankRule.needs_probe`: only for its budget."""
        return self.budget == "paper"

    @property
    def learnt(self) -> bool:
        """See `RankRule.learnt`."""
        return True

    @property
    def holds_out(self) -> float:
        """Return the share of a task's images that is held out to choose a rank."""
        return 0.0

    def choose(self, reference: Tensor, tuned: Tensor) -> Choice:
        """Return the initial rank; weights are not used."""
        return FixedRule(r=self.start).choose(reference, tuned)

    def parameters(self, layers: Layers) -> int:
        """Return the budget in parameters. Raises as `RankRule.choose` if it is that of the paper's rule."""
        if isinstance(self.budget, int):
            return self.budget
        rules = {"r": FixedRule(r=self.r), "paper": PaperRule(), None: self}
        return cost(rules[self.budget].choose_all(layers), layers)

    def updates(self, layers: Layers) -> GatedUpdates:
        """Return updates of the initial rank, on the reference's device; they add 0 unless a rule differs."""
        shapes = {label: (reference.shape[0], reference.shape[1]) for label, (reference, _) in layers.items()}
        ranks = [choice.rank for choice in self.choose_all(layers).values()]
        updates = GatedUpdates(shapes, ranks)  # on the CPU, so that initial values are equal on every device
        with torch.no_grad():
            for a in updates.a:
                a.copy_(kaiming_factors((1, a.shape[1]), len(a), like=a)[0])
            self.begin(updates)
        return updates.to(next(iter(layers.values()))[0].device)

    def begin(self, updates: GatedUpdates) -> None:
        """Initialise the updates, if not with A kaiming-uniform, B zero and gates 1."""

    def factors(self, updates: GatedUpdates, scale: Scale, step: int | None) -> Factors:
        """Return A and B of each update in a step; with None, the final ones."""
        return updates.factors(scale)

    def penalty(self, updates: GatedUpdates, done: int, planned: int) -> Tensor | float:
        """Return the term added to the loss of the step after `done` of `planned` steps."""
        return 0.0

    def observe(self, updates: GatedUpdates, done: int, planned: int) -> None:
        """Use the gradients of that step."""

    def shrink(self, updates: GatedUpdates, done: int, planned: int, budget: int) -> None:
        """Remove components after `done` of `planned` steps."""

    def finish(self, updates: GatedUpdates, budget: int, loss: Callable[[], float]) -> None:
        """Choose the final components after all steps. `loss` returns that of held-out images with the kept ones."""

    def left(self, updates: GatedUpdates, scale: Scale) -> Factors:
        """Return what is kept of each update: A (k, n) and B (m, k), with gates and scale; k may be 0."""
        factors: Factors = {}
        with torch.no_grad():
            every = self.factors(updates, scale, None).items()
            for (label, (a, b)), keep in zip(every, updates.each(updates.kept), strict=True):
                keep = keep[: len(a)]
                factors[label] = (a[keep].clone(), b[:, keep].clone())
        return factors
