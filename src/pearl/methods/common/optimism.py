"""Accuracy to expect on unseen images, from cross-validated predictions for images that a network was trained on.

An image that is left out of the statistics was still in the training of the newest feature space's sub-network, so that
too few of these predictions are wrong. By how much is estimated from images that were spared from the training alone,
and, as these are few, from experience with other data: a prior over the log of the ratio of the odds of an error.
"""

from dataclasses import dataclass

import numpy as np

SHIFTS = np.linspace(0.01, 4, 400)  # candidate values of that logarithm
# Prior: a gamma distribution of this shape, whose mean is the one below divided by the number of feature spaces, since
# only one of them was trained on these images. Chosen on development seeds, see docs/results/estimates.md.
SHAPE, MEAN = 2.0, 0.4


@dataclass(frozen=True, eq=False)
class TrainedOn:
    """Which of N images, left out of the statistics one at a time, a sub-network was trained on nevertheless.

    Args:
        trained: (N,), False for images that were spared from the training.
        spaces: number of feature spaces, of which that of this sub-network is one.
    """

    trained: np.ndarray
    spaces: int

    @property
    def spared(self) -> int:
        """Return the number of spared images."""
        return int(np.count_nonzero(~self.trained))

    def expected(self, right: np.ndarray) -> float:
        """Return the accuracy, 0 to 1, to expect on unseen images of the same kind.

        `right` (N,) is True for cross-validated predictions that are correct. The likelihood of a shift is that of the
        spared images' errors; the result is the mean over the posterior.
        """
        if not self.trained.any():
            return float(right.mean())
        trained, spared = right[self.trained], right[~self.trained]
        # half an error at least, since the logarithm of its odds is shifted
        wrong = (np.count_nonzero(~trained) + 0.5) / (len(trained) + 1)
        errors = 1 / (1 + (1 - wrong) / wrong * np.exp(-SHIFTS))
        log = (SHAPE - 1) * np.log(SHIFTS) - SHIFTS * SHAPE * self.spaces / MEAN
        log += np.count_nonzero(~spared) * np.log(errors) + np.count_nonzero(spared) * np.log1p(-errors)
        weights = np.exp(log - log.max())
        return float(1 - weights @ errors / weights.sum())
