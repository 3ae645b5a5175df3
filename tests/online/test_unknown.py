"""In-distribution scores of streams, against covariances by NumPy."""

import numpy as np
import pytest
import torch

from pearl.methods.common.scatter import shrinkage
from pearl.online.streaming_statistics import StreamingStatistics
from pearl.online.unknown import Fits, left_out_fits

P = 5


def images(seed: int = 0, count: int = 150) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.arange(count) % 3)
    return rng.normal(0, 1, (count, P)) @ np.diag([1, 2, 0.5, 1, 1]) + 8 * rng.permutation(np.eye(P))[labels], labels


def statistics(x: np.ndarray, labels: np.ndarray) -> StreamingStatistics:
    made = StreamingStatistics(P)
    for part in np.array_split(np.arange(len(x)), 4):
        made.update(torch.from_numpy(x[part]), torch.from_numpy(labels[part]))
    return made


def fits(x: np.ndarray, labels: np.ndarray, new: np.ndarray, nearer: float = 1) -> np.ndarray:
    """(N, classes): half the squared distance to all images minus that to the class, times `nearer`."""
    means = np.array([x[labels == c].mean(0) for c in range(3)])
    inside = (x - means[labels]).T @ (x - means[labels]) / (len(x) - 3)
    share = shrinkage(P, len(x) - 3)

    def square(away: np.ndarray, covariance: np.ndarray) -> np.ndarray:
        shrunk = (1 - share) * covariance + share * np.trace(covariance) / P * np.eye(P)
        return (away @ np.linalg.inv(shrunk) * away).sum(-1)

    to_centre = square(new - x.mean(0), np.cov(x.T))
    return 0.5 * (to_centre[:, None] - nearer * square(new[:, None] - means, inside))


def test_scores_are_the_best_fit_over_the_spaces_that_know_a_class() -> None:
    (x, labels), (y, _) = images(), images(1)
    spaces, known = [statistics(x, labels), statistics(y, labels)], [[True, True, True], [False, True, False]]
    new = images(2, 9)[0] * 1.5
    one, two = fits(x, labels, new), fits(y, labels, new)
    expected = np.stack([one[:, 0], (one[:, 1] + two[:, 1]) / 2, one[:, 2]], 1).max(1)
    ours = Fits(spaces).scores([torch.from_numpy(new)] * 2, [*map(torch.tensor, known)])
    assert ours.numpy() == pytest.approx(expected, rel=1e-6)


def test_known_images_are_scored_as_if_they_had_not_been_learnt() -> None:
    """Apart from the trace, which is the mean one. A new image is compared with the mean of one image more."""
    x, labels = images(count=30)
    ours = left_out_fits([statistics(x, labels)], [torch.from_numpy(x)], torch.from_numpy(labels), [torch.ones(3) > 0])
    learnt, unseen = fits(x, labels, x).max(1), np.zeros(30)
    for i in range(30):
        rest = np.arange(30) != i
        own = fits(x[rest], labels[rest], x[[i]], nearer=1 - 1 / 10**2)[0]
        assert own.argmax() == labels[i]
        unseen[i] = own.max()
    assert np.abs(learnt - unseen).mean() > 0.3  # what learning an image makes of its score
    assert ours.numpy() == pytest.approx(unseen, abs=0.01)


def test_an_only_image_of_a_class_has_no_score() -> None:
    x, labels = images(count=31)
    labels[:] = np.arange(31) // 15
    every = torch.ones(3) > 0
    assert len(left_out_fits([statistics(x, labels)], [torch.from_numpy(x)], torch.from_numpy(labels), [every])) == 30
    assert len(left_out_fits([], [], torch.zeros(0, dtype=torch.int64), [])) == 0


def test_whitened_features_have_length_one() -> None:
    x, labels = images()
    made = Fits([statistics(x, labels)] * 2).whitened([torch.from_numpy(x)] * 2)
    assert made.shape == (150, 2 * P) and made.norm(dim=1).numpy() == pytest.approx(1, abs=1e-6)
    assert made[:, :P].norm(dim=1).numpy() == pytest.approx(0.5**0.5, abs=1e-6)
