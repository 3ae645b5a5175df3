"""Optimal transport between a few weighted points."""

import numpy as np
import torch
from torch import Tensor


def transport(cost: Tensor, source: Tensor, target: Tensor) -> Tensor:
    """The plan (n, m) >= 0 of least total cost (n, m), with row sums `source` (n,) and column sums `target` (m,).

    Exact, as a linear program, in float64; source and target have to have the same sum. Meant for tens of points.
    """
    from scipy.optimize import linprog  # slow to import

    n, m = cost.shape
    sums = np.concatenate([np.kron(np.eye(n), np.ones(m)), np.kron(np.ones(n), np.eye(m))])
    wanted = torch.cat([source, target]).double().cpu().numpy()
    found = linprog(cost.double().cpu().numpy().ravel(), A_eq=sums, b_eq=wanted, method="highs")
    return torch.from_numpy(found.x).reshape(n, m).to(cost)
