"""Rank rules: choose the rank of each layer's low-rank update from its weights before and after fine-tuning."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal, Protocol

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from pearl.errors import TrainingError

ROUNDING = 1e-12  # share of a matrix's energy below float64's resolution


@dataclass(frozen=True)
class Choice:
    """A rule's choice for one layer: a rank up to `full`, and the share of energy kept, 1 if not computed."""

    rank: int
    full: int
    threshold: float


class RankRule(Protocol):
    """Base class: chooses the rank of each layer separately from 2-D views of its weights."""

    @property
    def needs_probe(self) -> bool:
        """Return True if the rule reads the task's fine-tuned weights; otherwise they need not be trained."""
        ...

    @property
    def learnt(self) -> bool:
        """Return True if ranks depend on training."""
        return self.needs_probe

    def choose(self, reference: Tensor, tuned: Tensor) -> Choice:
        """Choose from both views (m, n), of any floating dtype.

        Raises TrainingError if a weight it reads is not finite.
        """
        ...

    def choose_all(self, layers: Mapping[str, tuple[Tensor, Tensor]]) -> dict[str, Choice]:
        """Choose for all layers; rules that share a budget override this. Raises as `choose`."""
        return {name: self.choose(reference, tuned) for name, (reference, tuned) in layers.items()}


def energies(matrix: Tensor) -> Tensor:
    """Return squared singular values (min(m, n),) float64, descending, relative to the largest entry squared.

    They are the eigenvalues of the smaller Gram matrix, several times cheaper than an SVD. Their error is about 1e-16
    of the total, the resolution of a sum of them. They are always computed on the CPU: NumPy multiplies a matrix by its
    own transpose in half the time, and its LAPACK is as fast as PyTorch's (docs/performance.md).
    """
    rows = matrix.detach().cpu().double().numpy()
    largest = np.abs(rows).max()
    if largest > 0:
        rows = rows / largest  # so that squares of huge and tiny entries stay in range
    gram = rows @ rows.T if rows.shape[0] <= rows.shape[1] else rows.T @ rows
    return torch.from_numpy(np.linalg.eigvalsh(gram).clip(min=0)[::-1].copy())


def explained_rank(energy: Tensor, share: float) -> int:
    """Return the smallest k whose first k squared singular values make up at least `share` of their sum (PEARL, eq. 4).

    The result is at least 1. A share of 1 is reached up to rounding errors, and a zero matrix has rank 1.
    """
    total = energy.sum()
    if total == 0:
        return 1
    explained = energy.cumsum(0) / total
    below = int((explained < share - ROUNDING).sum())
    return min(below + 1, len(energy))


def distance(reference: Tensor, tuned: Tensor) -> float:
    """Return T = sum((W^t - W^r)^2) / (sum(W^t^2) + sum(W^r^2)), within [0, 1] (PEARL, eq. 3); 0 if both are zero."""
    return _distance(*_in_range(reference, tuned))


def _distance(reference: Tensor, tuned: Tensor) -> float:
    size = tuned.square().sum() + reference.square().sum()
    return min(1.0, float((tuned - reference).square().sum() / size)) if size > 0 else 0.0


def _in_range(reference: Tensor, tuned: Tensor) -> tuple[Tensor, Tensor]:
    """Return both in float64, divided by their common largest entry, so that differences and squares stay in range."""
    reference, tuned = reference.detach().double(), tuned.detach().double()
    if not bool(reference.isfinite().all() & tuned.isfinite().all()):
        raise TrainingError("weights are no longer finite after fine-tuning; lower the learning rate of the probe")
    largest = torch.maximum(reference.abs().max(), tuned.abs().max())
    return (reference / largest, tuned / largest) if largest > 0 else (reference, tuned)


@dataclass(frozen=True, kw_only=True)
class PaperRule(RankRule):
    """PEARL's rule: the share of the task vector's energy to keep is the layer's normalised distance from the
    reference.
    """

    needs_probe = True

    def choose(self, reference: Tensor, tuned: Tensor) -> Choice:
        """See `RankRule.choose`."""
        reference, tuned = _in_range(reference, tuned)
        threshold = _distance(reference, tuned)
        return Choice(explained_rank(energies(tuned - reference), threshold), min(reference.shape), threshold)


@dataclass(frozen=True, kw_only=True)
class FixedRule(RankRule):
    """The same rank r everywhere, or full rank in smaller layers. Uses no weights."""

    r: Annotated[int, Field(ge=1)] = 8

    needs_probe = False

    def choose(self, reference: Tensor, tuned: Tensor) -> Choice:
        """See `RankRule.choose`."""
        full = min(reference.shape)
        return Choice(min(self.r, full), full, threshold=1.0)


@dataclass(frozen=True, kw_only=True)
class EnergyRule(RankRule):
    """The same share of the task vector's energy everywhere, whatever its distance."""

    keep: Annotated[float, Field(ge=0, le=1)] = 0.5

    needs_probe = True

    def choose(self, reference: Tensor, tuned: Tensor) -> Choice:
        """See `RankRule.choose`."""
        reference, tuned = _in_range(reference, tuned)
        return Choice(explained_rank(energies(tuned - reference), self.keep), min(reference.shape), self.keep)


# ------------------------------------------------------------------------- the paper's budget, distributed differently


def cost(choices: Mapping[str, Choice], layers: Mapping[str, tuple[Tensor, Tensor]]) -> int:
    """Return the parameters of all updates: rank times (rows + columns) of each layer."""
    return sum(choice.rank * sum(layers[name][0].shape) for name, choice in choices.items())


class _SameBudget(PaperRule):
    """As many parameters per task as the paper's rule, or slightly fewer, distributed by other weights."""

    def choose_all(self, layers: Mapping[str, tuple[Tensor, Tensor]]) -> dict[str, Choice]:
        """See `RankRule.choose_all`. Thresholds are those of the paper's rule, which set the budget."""
        choices = super().choose_all(layers)
        costs = [sum(reference.shape) for reference, _ in layers.values()]  # parameters per rank
        full = [choice.full for choice in choices.values()]
        ranks = share_out(cost(choices, layers), costs, full, self.weights(costs))
        return {name: replace(choices[name], rank=rank) for name, rank in zip(choices, ranks, strict=True)}

    def weights(self, costs: Sequence[int]) -> Sequence[float]:
        """Return the ranks of each layer relative to the others."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class RandomRule(_SameBudget):
    """A random distribution over the layers of the parameters that the paper's rule chooses for a task."""

    def weights(self, costs: Sequence[int]) -> Sequence[float]:
        """Draw independent exponential weights by the run's seed: every distribution is equally likely."""
        return torch.empty(len(costs)).exponential_().tolist()


@dataclass(frozen=True, kw_only=True)
class EvenRule(_SameBudget):
    """An even distribution over the layers, by ranks or parameters, of the budget that the paper's rule chooses for a
    task.
    """

    of: Literal["ranks", "parameters"] = "ranks"

    def weights(self, costs: Sequence[int]) -> Sequence[float]:
        """See `_SameBudget.weights`."""
        return [1.0 if self.of == "ranks" else 1 / cost for cost in costs]


def share_out(budget: int, costs: Sequence[int], full: Sequence[int], weights: Sequence[float]) -> list[int]:
    """Return ranks in proportion to weights, 1 to full in each layer, with at most `budget` parameters in total.

    By the highest-averages method, the next rank goes to the layer with the fewest ranks per weight among those where
    it fits. The remainder is smaller than a rank of any layer that is not full.
    """
    ranks = [1] * len(costs)
    left = budget - sum(costs)
    while open_ := [i for i, cost in enumerate(costs) if ranks[i] < full[i] and cost <= left]:
        next_ = min(open_, key=lambda i: ranks[i] / max(weights[i], 1e-30))
        ranks[next_] += 1
        left -= costs[next_]
    return ranks
