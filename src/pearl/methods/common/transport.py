"""Optimal transport between weighted points."""

import numpy as np
import torch
from torch import Tensor

NEAR = 16  # routes per point in the first linear program, and most routes added per point to later ones
ROUNDING = 1e-9  # of the largest cost: routes with a smaller reduced cost are not added


def transport(cost: Tensor, source: Tensor, target: Tensor) -> Tensor:
    """Return the plan (n, m) >= 0 of least total cost (n, m), with row sums `source` (n,) and column sums `target`
    (m,).

    It is exact up to float64 rounding; source and target must have the same sum. Column generation: a linear program
    with a few routes per point is solved, routes with a negative reduced cost are added, until there are none. Tens of
    points are one small program; thousands take seconds to minutes.
    """
    n, m = cost.shape
    costs, supply, demand = (values.double().cpu().numpy() for values in (cost, source, target))
    routes = _first(costs, supply, demand)
    while True:
        rows, columns = routes.nonzero()
        amounts, reduced = _solved(costs, rows, columns, supply, demand)
        reduced[routes] = 0
        new = np.zeros_like(routes)
        best = np.argpartition(reduced, min(NEAR, m) - 1, axis=1)[:, : min(NEAR, m)]
        np.put_along_axis(new, best, values=True, axis=1)
        new &= reduced < -ROUNDING * costs.max()
        if not new.any():
            break
        routes |= new
    plan = np.zeros((n, m))
    plan[rows, columns] = amounts
    return torch.from_numpy(plan).to(cost)


def _first(costs: np.ndarray, supply: np.ndarray, demand: np.ndarray) -> np.ndarray:
    """Return the nearest routes of each point, and those of a feasible plan (by the north-west corner rule)."""
    n, m = costs.shape
    routes = np.zeros((n, m), dtype=bool)
    for axis in (0, 1):
        count = min(NEAR, costs.shape[axis])
        nearest = np.argpartition(costs, count - 1, axis=axis)
        np.put_along_axis(routes, nearest.take(range(count), axis=axis), values=True, axis=axis)
    starts, ends = np.cumsum(supply), np.cumsum(demand)
    i = j = 0
    while i < n and j < m:
        routes[i, j] = True
        if starts[i] < ends[j]:
            i += 1
        else:
            j += 1
    routes[min(i, n - 1) :, m - 1] = routes[n - 1, min(j, m - 1) :] = True
    return routes


def _solved(
    costs: np.ndarray, rows: np.ndarray, columns: np.ndarray, supply: np.ndarray, demand: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the optimal amounts on these routes, and the reduced cost of all routes (n, m)."""
    from scipy.optimize import linprog  # slow to import
    from scipy.sparse import csr_array

    n, m = costs.shape
    ones, arcs = np.ones(len(rows)), np.arange(len(rows))
    ends = np.concatenate([rows, n + columns])
    sums = csr_array((np.concatenate([ones, ones]), (ends, np.concatenate([arcs, arcs]))), shape=(n + m, len(rows)))
    solution = linprog(costs[rows, columns], A_eq=sums, b_eq=np.concatenate([supply, demand]), method="highs")
    prices = solution.eqlin.marginals
    return solution.x, costs - prices[:n, None] - prices[None, n:]
