"""Whitened features: one scale for the distances between images, whatever the classes.

Class statistics have one covariance matrix within all classes. Divided by its root, features of a class that nobody
learnt are expected to spread as those of the learnt ones do, so that distances between images of unknown classes can be
measured in standard deviations of a class.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from pearl.methods.common.calibration import LeftOut
from pearl.methods.common.chain import ChainStatistics


class Whitening:
    """Maps raw features (B, p_raw) of every feature space's sub-network to whitened features (B, p), float64.

    The expected squared distance between an image that is not in the statistics and the mean of its class is p in
    each space. In-sample distances are shorter, so the scale is measured on images left out (see `calibration`).
    Spaces are concatenated, each divided by the root of their number.
    """

    def __init__(self, chain: ChainStatistics) -> None:
        self.spaces = chain.spaces()
        self.maps: list[tuple[Tensor, Tensor]] = []  # of each space: centre (p,) and the matrix (p, p) to multiply with
        for v in range(len(self.spaces)):
            known = chain.known(v)
            metric = LeftOut(known)
            inside = (metric.inverse * known.scatter).sum() / known.images
            per_class = known.images / max(1, known.images - known.freedom)
            spread = metric.within(inside, max(per_class, 2.0)) / len(known.centre)
            scale = (spread * len(self.spaces)).sqrt().clamp(min=1e-6)
            eye = torch.eye(len(known.centre)).to(metric.root)
            self.maps.append((known.centre, torch.linalg.solve_triangular(metric.root, eye, upper=False).T / scale))

    def __call__(self, raw: Sequence[Tensor]) -> Tensor:
        """See the class."""
        parts = zip(self.spaces, raw, self.maps, strict=True)
        return torch.cat([(space(x).double() - centre) @ matrix for space, x, (centre, matrix) in parts], dim=1)
