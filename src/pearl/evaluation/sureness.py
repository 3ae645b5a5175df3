"""Calibration and confidence of predictions, and detection of out-of-distribution images."""

import math
from collections.abc import Sequence

import numpy as np

from pearl.evaluation.metrics import Floats

BINS = 15  # of equal width, the usual choice


def reliability(confidence: np.ndarray, right: np.ndarray, bins: int = BINS) -> np.ndarray:
    """Return a reliability diagram as sums (bins, 3): images, their confidence, correct predictions.

    `confidence` (N,) is the probability of the best class, from 0 to 1; `right` (N,) is True for correct predictions.
    """
    bin_of = np.minimum((confidence * bins).astype(int), bins - 1)
    columns = (np.ones_like(confidence), confidence, right)
    return np.stack([np.bincount(bin_of, column, minlength=bins) for column in columns], axis=1)


def calibration_error(diagram: np.ndarray) -> float:
    """Return the expected calibration error in percent (Naeini et al., 2015):  |accuracy - confidence|, averaged over
    images.
    """
    return float(100 * np.abs(diagram[:, 2] - diagram[:, 1]).sum() / max(diagram[:, 0].sum(), 1))


COVERAGES = (100, 90, 80, 70, 60, 50)


def auroc(known: np.ndarray, strange: np.ndarray) -> float:
    """Return the AUROC of a score for in-distribution (N,) against out-of-distribution images (M,), in percent: 50 by
    chance.

    It is the share of pairs in which the in-distribution image has the higher score, with ties counted half (Mann and
    Whitney, 1947); NaN if either is empty.
    """
    ordered = np.sort(strange)
    pairs = np.searchsorted(ordered, known, "left") + np.searchsorted(ordered, known, "right")
    return float(100 * pairs.mean() / (2 * len(strange))) if len(known) and len(strange) else math.nan


def coverage_accuracy(
    in_distribution_scores: np.ndarray, right: np.ndarray, coverages: Sequence[float] = COVERAGES
) -> Floats:
    """Return accuracy in percent on the shares, in percent, of images with the highest in-distribution scores.

    `right` (N,) is True for correct predictions. NaN if N = 0.
    """
    ordered = np.asarray(right, dtype=float)[np.argsort(-in_distribution_scores, kind="stable")]
    counts = [math.ceil(share * len(ordered) / 100) for share in coverages]
    return np.array([100 * ordered[:count].mean() if count else math.nan for count in counts])
