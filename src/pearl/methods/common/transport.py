"""Optimal transport between a few weighted points."""

import numpy as np
import torch
from torch import Tensor


def transport(cost: Tensor, source: Tensor, target: Tensor) -> Tensor:
    """The plan (n, m) >= 0 of least total cost (n, m), with row sums `source` (n,) and column sums `target` (m,).

    Exact, as a linear program, in float64; sums of source and target have to be the same. Meant for tens of points.
    """
    from scipy.optimize import linprog  # slow to import
    from scipy.sparse import eye_array, kron

    n, m = cost.shape
    ones_n, ones_m = np.ones((1, n)), np.ones((1, m))
    rows, columns = kron(eye_array(n), ones_m), kron(ones_n, eye_array(m))
    both = np.concatenate([part.double().cpu().numpy() for part in (source, target)])
    from scipy.sparse import vstack

    found = linprog(cost.double().cpu().numpy().ravel(), A_eq=vstack([rows, columns]), b_eq=both, method="highs")
    return torch.from_numpy(found.x).reshape(n, m).to(cost)
