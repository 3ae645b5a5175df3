"""In-distribution scores of images in streaming feature spaces, to find images of unknown classes.

As for models of tasks (`methods.common.calibration`), the fit of an image to a class is a relative Mahalanobis distance
(Ren et al., 2021): how much nearer the image is to the class than to all images, averaged over the spaces that know the
class. The score is the best fit. The scores of learnt images, each left out of the statistics, set the threshold.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from pearl.methods.common.calibration import Known, LeftOut
from pearl.methods.common.scatter import inverse, root, shrunk
from pearl.online.streaming_statistics import StreamingStatistics


class Fits:
    """The covariances of every feature space, for images that have not been learnt."""

    def __init__(self, spaces: Sequence[StreamingStatistics]) -> None:
        self.spaces = spaces
        self.roots = [root(shrunk(each.scatter / each.freedom, each.shrinkage)) for each in spaces]
        known = [_known(each) for each in spaces]
        self.around = [inverse(shrunk(each.of_all(), each.share)) for each in known]

    def scores(self, features: Sequence[Tensor], known: Sequence[Tensor]) -> Tensor:
        """Return in-distribution scores (N,), float64, of features (N, p) in every space.

        `known` are the classes (classes,) that each space knows.
        """
        fits = []
        for each, factor, around, x in zip(self.spaces, self.roots, self.around, features, strict=True):
            white, means = _white(factor, x), _white(factor, each.means)
            away = x.double() - each.centre
            inside = torch.cdist(white, means).square()
            fits.append(0.5 * (((away @ around) * away).sum(1, keepdim=True) - inside))
        return _best(fits, known)

    def whitened(self, features: Sequence[Tensor]) -> Tensor:
        """Return features (N, p) float32 of length 1 for grouping images, see `whitening.Whitening`."""
        made = zip(self.spaces, self.roots, features, strict=True)
        parts = [F.normalize(_white(factor, x - each.centre)) for each, factor, x in made]
        return F.normalize(torch.cat(parts, dim=1)).float()


def left_out_fits(
    spaces: Sequence[StreamingStatistics], features: Sequence[Tensor], labels: Tensor, known: Sequence[Tensor]
) -> Tensor:
    """Return in-distribution scores (n,) of images that are in the statistics, each as if it were not.

    Args:
        spaces: the statistics of every space.
        features: (N, p) in every space.
        labels: (N,); images that are the only ones of their class in a space are left out of the result.
        known: the classes (classes,) that each space knows.
    """
    if not spaces or not len(labels):
        return torch.zeros(0, dtype=torch.float64)
    again = torch.stack([each.counts[labels] > 1 for each in spaces]).all(0)
    fits, class_index = [], labels[again]
    for each, x in zip(spaces, features, strict=True):
        inside, away = LeftOut(_known(each)).distances(
            x[again, None], class_index, each.means, each.counts, counted=True
        )
        n = each.counts[class_index].double()
        nearer = (1 - 1 / n.square())[:, None]  # a new image is compared with a mean of one image more
        mine = inside.gather(1, class_index[:, None]) * nearer
        fits.append(0.5 * (away[:, None] - inside.scatter(1, class_index[:, None], mine)))
    return _best(fits, known)


def _known(statistics: StreamingStatistics) -> Known:
    counts = int(statistics.counts.sum())
    return Known(statistics.scatter, statistics.total, statistics.centre, statistics.freedom, counts, 1.0)


def _white(factor: Tensor, rows: Tensor) -> Tensor:
    return torch.linalg.solve_triangular(factor, rows.double().T, upper=False).T


def _best(fits: Sequence[Tensor], known: Sequence[Tensor]) -> Tensor:
    """Return the best (N,) of the fits (N, some) to the classes, each a mean over the spaces that know it."""
    classes = len(known[0])
    values = torch.stack([F.pad(each, (0, classes - each.shape[1])) for each in fits])
    there = torch.stack([*known]).to(values)[:, None]
    mean = (values * there).sum(0) / there.sum(0).clamp(min=1)
    return mean.masked_fill(there.sum(0) == 0, -torch.inf).max(1).values
