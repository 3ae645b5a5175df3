"""Low-rank updates whose components have gates, so that a rule can remove components during training."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

Factors = dict[str, tuple[Tensor, Tensor]]  # by label: A (k, n) and B (m, k); the update is B A
Scale = Callable[[int], float]  # of an update of this rank


class GatedUpdates(nn.Module):
    """Updates scale * B diag(g) A of several matrices (m, n), by label.

    A component is a column of B (m, R), its gate and a row of A (R, n); it costs m + n parameters. `gates` (N,) and the
    mask `kept` (N,) hold all N components, one update after the other.
    """

    kept: Tensor

    def __init__(self, shapes: Mapping[str, tuple[int, int]], ranks: Sequence[int]) -> None:
        super().__init__()
        self.labels, self.ranks = [*shapes], [*ranks]
        sizes = [*zip(shapes.values(), ranks, strict=True)]
        self.a = nn.ParameterList(torch.zeros(rank, n) for (_, n), rank in sizes)
        self.b = nn.ParameterList(torch.zeros(m, rank) for (m, _), rank in sizes)
        self.gates = nn.Parameter(torch.ones(sum(ranks)))
        self.register_buffer("kept", torch.ones(sum(ranks), dtype=torch.bool))
        self.costs = [m + n for (m, n), rank in sizes for _ in range(rank)]
        self.seed = int(torch.randint(2**62, ()))  # for random draws that are functions of the step

    def each(self, of_components: Tensor) -> Sequence[Tensor]:
        """Split a vector over all components into one (R,) per update."""
        return of_components.split(self.ranks)

    def factors(self, scale: Scale) -> Factors:
        """Return A and B of each update; B includes gates and scale."""
        parts = zip(self.labels, self.a, self.b, self.each(self.gates), strict=True)
        return {label: (a, scale(len(a)) * b * gates) for label, a, b, gates in parts}

    @torch.no_grad()
    def close(self, keep: Tensor) -> None:
        """Set the gates of all other components to 0; they continue to train."""
        self.gates.masked_fill_(~keep, 0)

    def within(self, budget: int, score: Tensor) -> Tensor:
        """Return which components (N,) fit into the budget, highest score first.

        The budget is in parameters; the remainder is too small for any other component. Ties keep the first.
        """
        keep = torch.zeros(len(score), dtype=torch.bool)
        for i in score.argsort(descending=True, stable=True).tolist():
            if self.costs[i] <= budget:
                keep[i] = True
                budget -= self.costs[i]
        return keep.to(score.device)
