"""AdaLoRA and DoRA: the components with the lowest scores are pruned to a budget during training."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from pearl.nn.dynamic.gated import GatedUpdates
from pearl.nn.dynamic.rule import DynamicRule
from pearl.nn.task_modules import TaskTensors

Share = Annotated[float, Field(ge=0, le=1)]
NotNegative = Annotated[float, Field(ge=0)]


class _Pruned(DynamicRule):
    """A rule that zeroes the gates of the lowest scores every few steps; they continue to train until the choice is
    final.
    """

    def settled(self, planned: int) -> int:
        """Return the number of steps after which the kept components are final."""
        raise NotImplementedError

    def allowed(self, done: int, planned: int, whole: int, budget: int) -> int:
        """Return the number of parameters allowed before that; `whole` is the number of all."""
        raise NotImplementedError

    def every(self, planned: int) -> int:
        """Return the number of steps between two prunings."""
        raise NotImplementedError

    def scores(self, updates: GatedUpdates) -> Tensor:
        """Return the scores (N,) of all components."""
        raise NotImplementedError

    def shrink(self, updates: GatedUpdates, done: int, planned: int, budget: int) -> None:
        """See `DynamicRule.shrink`."""
        last, whole = self.settled(planned), sum(updates.costs)
        if done == last:
            updates.kept.copy_(updates.within(budget, self.scores(updates)))
        if done >= last:
            updates.close(updates.kept)
        elif done % self.every(planned) == 0:
            allowed = self.allowed(done, planned, whole, budget)
            if allowed < whole:
                updates.close(updates.within(allowed, self.scores(updates)))


@dataclass(frozen=True, kw_only=True)
class AdaLoraRule(_Pruned):
    """AdaLoRA (Zhang et al., ICLR 2023): singular triplets P lambda Q, of which the least sensitive are pruned.

    The sensitivity |w * gradient| of every entry and its variation are smoothed. A triplet's score is their product for
    its lambda plus the mean over its vectors. Scores use the weights before the step, as in the paper; the authors'
    code uses those after it. The budget counts parameters, theirs triplets, which agree if all matrices have one size;
    steps are shares of the phase. The scale is PEARL's, by default 2; theirs is alpha / R with alpha 16 or 32.

    Options:
        start: R, the initial rank of updates.
        r: the fixed rank whose parameters are the budget `r`.
        budget: most parameters of a task's updates; `r`, `paper` (with its probe), or null, see `DynamicRule`.
        then: `continue` with what is left (as published), or `restart` PEARL's adaptation with these ranks.
        gamma: weight of the penalty that keeps P and Q orthogonal.
        beta1: decay of the smoothed sensitivity.
        beta2: decay of its smoothed variation.
        tinit: share of the steps before the first pruning.
        tfinal: share of the steps after the last one.
    """

    gamma: NotNegative = 0.1
    beta1: Share = 0.85
    beta2: Share = 0.85
    tinit: Share = 0.1
    tfinal: Share = 0.4

    def begin(self, updates: GatedUpdates) -> None:
        """Initialise P and Q from N(0, .02^2), lambda to 0."""
        for factor in (*updates.a, *updates.b):
            factor.normal_(0, 0.02)
        updates.gates.zero_()
        updates.averages = TaskTensors(buffers=True)
        for i, parameter in enumerate(_all(updates)):
            updates.averages.add(f"{i}.sensitivity", torch.zeros_like(parameter))
            updates.averages.add(f"{i}.uncertainty", torch.zeros_like(parameter))

    def penalty(self, updates: GatedUpdates, done: int, planned: int) -> Tensor | float:
        """Return gamma times the mean Frobenius norm |P^T P - I| and |Q Q^T - I| over all P and Q, not squared."""
        grams = [*(b.T @ b for b in updates.b), *(a @ a.T for a in updates.a)]
        norms = [torch.linalg.matrix_norm(gram - torch.eye(len(gram), device=gram.device)) for gram in grams]
        return self.gamma * torch.stack(norms).mean()

    @torch.no_grad()
    def observe(self, updates: GatedUpdates, done: int, planned: int) -> None:
        """Smooth |w * gradient| and its deviation from the smoothed value."""
        if done >= self.settled(planned):
            return
        for i, parameter in enumerate(_all(updates)):
            mean, spread = updates.averages[f"{i}.sensitivity"], updates.averages[f"{i}.uncertainty"]  # type: ignore[index]
            now = (parameter * parameter.grad).abs()  # type: ignore[operator]
            mean.lerp_(now, 1 - self.beta1)
            spread.lerp_((now - mean).abs(), 1 - self.beta2)

    def scores(self, updates: GatedUpdates) -> Tensor:
        """See `_Pruned.scores`."""
        averages: TaskTensors = updates.averages  # type: ignore[assignment]
        of = [averages[f"{i}.sensitivity"] * averages[f"{i}.uncertainty"] for i, _ in enumerate(_all(updates))]
        layers, gates = len(updates.a), of[-1]
        rows = torch.cat([score.mean(1) for score in of[:layers]])
        columns = torch.cat([score.mean(0) for score in of[layers:-1]])
        return gates + rows + columns

    def settled(self, planned: int) -> int:
        """See `_Pruned.settled`."""
        return max(1, planned - round(self.tfinal * planned))

    def allowed(self, done: int, planned: int, whole: int, budget: int) -> int:
        """Return a budget that falls from all parameters to the final one by a cubic curve."""
        first, last = round(self.tinit * planned), self.settled(planned)
        if done <= first:
            return whole
        left = max(0.0, 1 - (done - first) / (last - first)) if done < last else 0.0
        return min(whole, int(budget + (whole - budget) * left**3))

    def every(self, planned: int) -> int:
        """At most 200 prunings per phase."""
        return max(1, planned // 200)


def _all(updates: GatedUpdates) -> list[nn.Parameter]:
    return [*updates.a, *updates.b, updates.gates]


@dataclass(frozen=True, kw_only=True)
class DoraRule(_Pruned):
    """DoRA's dynamic rank distribution (Mao et al., ACL 2024): prune components with a small part of a layer's update.

    A component's score is its share |c| |B_i| |A_i| of the norm of its layer's update, smoothed. (Not the DoRA that
    decomposes weights.) The budget counts parameters, the authors' components. Pruning follows the curve exactly; their
    code prunes at least one component each time. The scale is PEARL's, by default 2; theirs is 8 / R. Their dropout on
    the updates' input (.1) is left out.

    Options:
        start: the initial rank of updates, the authors' 1.5 r.
        r: the fixed rank whose parameters are the budget `r`.
        budget: most parameters of a task's updates; `r`, `paper` (with its probe), or null, see `DynamicRule`.
        then: `continue` with what is left (as published), or `restart` PEARL's adaptation with these ranks.
        beta: decay of the smoothed scores.
        penalty_weight: weight of the mean variance within rows of A and columns of B, until pruning ends.
        warmup: share of the steps before the first pruning.
        pruning: share of the steps in which components are pruned; the remaining steps train what is left.
    """

    beta: Share = 0.9
    penalty_weight: NotNegative = 0.1
    warmup: Share = 0.15
    pruning: Share = 0.35

    def begin(self, updates: GatedUpdates) -> None:
        """Initialise A and B kaiming-uniform with gain sqrt 2, gates to 0."""
        for factor in (*updates.a, *updates.b):
            nn.init.kaiming_uniform_(factor)
        updates.gates.zero_()
        updates.register_buffer("shares", torch.zeros_like(updates.gates))

    def penalty(self, updates: GatedUpdates, done: int, planned: int) -> Tensor | float:
        """See `DoraRule.penalty_weight`."""
        if done >= self.settled(planned):
            return 0.0
        variances = torch.cat([*(a.var(1) for a in updates.a), *(b.var(0) for b in updates.b)])
        return self.penalty_weight * variances.mean()

    @torch.no_grad()
    def shrink(self, updates: GatedUpdates, done: int, planned: int, budget: int) -> None:
        """Smooth the scores, then prune."""
        if done <= self.settled(planned):
            self.scores(updates).lerp_(torch.cat([*shares(updates)]), 1 - self.beta)
        super().shrink(updates, done, planned, budget)

    def scores(self, updates: GatedUpdates) -> Tensor:
        """See `_Pruned.scores`."""
        return updates.shares  # type: ignore[return-value]

    def settled(self, planned: int) -> int:
        """See `_Pruned.settled`."""
        return min(planned, max(1, round((self.warmup + self.pruning) * planned)))

    def allowed(self, done: int, planned: int, whole: int, budget: int) -> int:
        """Return the parameters left when a share of the components to prune is gone; the share rises cubically."""
        last, length = self.settled(planned), max(1, round(self.pruning * planned))
        gone = max(0.0, 1 - (last - done) / length) ** 3
        return int(whole - (whole - min(budget, whole)) * gone)

    def every(self, planned: int) -> int:
        """At most 100 prunings per phase."""
        return max(1, planned // 100)


def shares(updates: GatedUpdates) -> Iterator[Tensor]:
    """Return each update's component norms (R,) relative to the norm of the update; 0 for a zero update."""
    for a, b, gates in zip(updates.a, updates.b, updates.each(updates.gates), strict=True):
        gated = b * gates
        norms = gated.norm(dim=0) * a.norm(dim=1)
        whole = ((gated.T @ gated) * (a @ a.T)).sum().clamp(min=0).sqrt()  # |B diag(c) A|, without forming that product
        yield norms / (whole + 1e-8)
