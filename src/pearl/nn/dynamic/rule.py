"""What rules that find ranks by training share.

AdaLoRA, DoRA (dynamic rank distribution), CoDyRA and DyLoRA were each made for other learners than one update a task
over a frozen reference; how they are read here stands with each. A layer may end with rank 0. None needs PEARL's probe,
unless its budget is to be that of the paper's rule.
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
    """What the rules share. A step is: loss and `penalty`, `observe`, the optimizer's step, `shrink`; then `finish`.

    `start`: the rank of updates before they shrink, or full rank. `budget`: the most parameters of a task's updates, a
    number; `r`: those of a fixed rank `r`; `paper`: those that the paper's rule chooses for the same task, for which
    alone the probe is trained; none if null. `then`: `continue` with what is left, in one phase `adapt` (as published),
    or `restart`: a phase `allocate` finds ranks, and PEARL's own adaptation begins afresh with them.
    """

    start: Annotated[int, Field(ge=1)] = 12
    r: Annotated[int, Field(ge=1)] = 8
    budget: Budget = "r"
    then: Literal["continue", "restart"] = "continue"

    @property
    def needs_probe(self) -> bool:
        """See `RankRule.needs_probe`: for its budget, if at all."""
        return self.budget == "paper"

    @property
    def learnt(self) -> bool:
        """See `RankRule.learnt`."""
        return True

    @property
    def holds_out(self) -> float:
        """The share of a task's images that it chooses by, and does not train on."""
        return 0.0

    def choose(self, reference: Tensor, tuned: Tensor) -> Choice:
        """The rank to start from; no weight is looked at."""
        return FixedRule(r=self.start).choose(reference, tuned)

    def parameters(self, layers: Layers) -> int:
        """The budget, in parameters. Raises as `RankRule.choose`, if it is the paper's."""
        if isinstance(self.budget, int):
            return self.budget
        rules = {"r": FixedRule(r=self.r), "paper": PaperRule(), None: self}
        return cost(rules[self.budget].choose_all(layers), layers)

    def updates(self, layers: Layers) -> GatedUpdates:
        """Updates at the start rank, on the device of the reference; what they add is 0 unless a rule says so."""
        shapes = {label: (reference.shape[0], reference.shape[1]) for label, (reference, _) in layers.items()}
        ranks = [choice.rank for choice in self.choose_all(layers).values()]
        updates = GatedUpdates(shapes, ranks)  # on the CPU, so that they begin the same on every device
        with torch.no_grad():
            for a in updates.a:
                a.copy_(kaiming_factors((1, a.shape[1]), len(a), like=a)[0])
            self.begin(updates)
        return updates.to(next(iter(layers.values()))[0].device)

    def begin(self, updates: GatedUpdates) -> None:
        """Give the updates their first values, where they differ from A kaiming-uniform, B zero and gates 1."""

    def factors(self, updates: GatedUpdates, scale: Scale, step: int | None) -> Factors:
        """A and B of each update as they train in a step; with None, in the end."""
        return updates.factors(scale)

    def penalty(self, updates: GatedUpdates, done: int, planned: int) -> Tensor | float:
        """Added to the loss of the step that comes after `done` of `planned` steps."""
        return 0.0

    def observe(self, updates: GatedUpdates, done: int, planned: int) -> None:
        """Look at the gradients of that step."""

    def shrink(self, updates: GatedUpdates, done: int, planned: int, budget: int) -> None:
        """Take components away, after `done` of `planned` steps."""

    def finish(self, updates: GatedUpdates, budget: int, loss: Callable[[], float]) -> None:
        """Decide what is kept, after all steps. `loss` is that of the images held out, with what is kept by now."""

    def left(self, updates: GatedUpdates, scale: Scale) -> Factors:
        """What is kept of each update: A (k, n) and B (m, k), with gates and scale; k may be 0."""
        found: Factors = {}
        with torch.no_grad():
            every = self.factors(updates, scale, None).items()
            for (label, (a, b)), keep in zip(every, updates.each(updates.kept), strict=True):
                keep = keep[: len(a)]
                found[label] = (a[keep].clone(), b[:, keep].clone())
        return found
