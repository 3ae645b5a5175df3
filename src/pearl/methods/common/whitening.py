"""Whitened features of class statistics, in which images of unknown classes can be compared."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from pearl.methods.common.class_statistics import ClassStatistics
from pearl.methods.common.scatter import root, shrunk


class Whitening:
    """Maps raw features (B, p_raw) of every feature space's sub-network to features (B, p) of length 1.

    In each space they are centred on all learnt images and divided by the root of the covariance within classes:
    directions in which images of one class differ count little. The spaces have equal weights.
    """

    def __init__(self, class_statistics: ClassStatistics) -> None:
        self.spaces = class_statistics.spaces()
        self.centres = [class_statistics.known(v).centre for v in range(len(self.spaces))]
        self.roots = [root(shrunk(*class_statistics.covariance(v))) for v in range(len(self.spaces))]

    def __call__(self, raw: Sequence[Tensor]) -> Tensor:
        """See the class."""
        parts = []
        for space, rows, centre, factor in zip(self.spaces, raw, self.centres, self.roots, strict=True):
            away = space(rows).double() - centre
            parts.append(F.normalize(torch.linalg.solve_triangular(factor, away.T, upper=False).T))
        return F.normalize(torch.cat(parts, dim=1)).to(raw[0])
