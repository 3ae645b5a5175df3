"""How sure a model is beside how often it is right, and how well it tells what it does not know."""

import math
from collections.abc import Sequence

import numpy as np

from pearl.evaluation.metrics import Floats

BINS = 15  # of equal width, as is usual


def reliability(confidence: np.ndarray, right: np.ndarray, bins: int = BINS) -> np.ndarray:
    """A reliability diagram as sums (bins, 3): images, their confidence, how many are right.

    `confidence` (N,) is the probability of the best class, from 0 to 1; `right` (N,) whether it is the image's.
    """
    place = np.minimum((confidence * bins).astype(int), bins - 1)
    columns = (np.ones_like(confidence), confidence, right)
    return np.stack([np.bincount(place, column, minlength=bins) for column in columns], axis=1)


def calibration_error(diagram: np.ndarray) -> float:
    """Expected calibration error in percent (Naeini et al., 2015): |accuracy - confidence|, averaged over images."""
    return float(100 * np.abs(diagram[:, 2] - diagram[:, 1]).sum() / max(diagram[:, 0].sum(), 1))


COVERAGES = (100, 90, 80, 70, 60, 50)


def auroc(known: np.ndarray, strange: np.ndarray) -> float:
    """How well a score tells known images (N,) from strange ones (M,), in percent: 50 by chance, NaN without either.

    The share of pairs of a known and a strange image of which the known one has the higher score; a tie is half a pair
    (Mann and Whitney, 1947).
    """
    ordered = np.sort(strange)
    pairs = np.searchsorted(ordered, known, "left") + np.searchsorted(ordered, known, "right")
    return float(100 * pairs.mean() / (2 * len(strange))) if len(known) and len(strange) else math.nan


def coverage_accuracy(familiar: np.ndarray, right: np.ndarray, coverages: Sequence[float] = COVERAGES) -> Floats:
    """Accuracy, in percent, where only the most familiar images are answered: for each share of them, in percent.

    `familiar` (N,) is the higher, the sooner an image is answered; `right` (N,) whether the answer is. NaN if N = 0.
    """
    ordered = np.asarray(right, dtype=float)[np.argsort(-familiar, kind="stable")]
    counts = [math.ceil(share * len(ordered) / 100) for share in coverages]
    return np.array([100 * ordered[:count].mean() if count else math.nan for count in counts])
