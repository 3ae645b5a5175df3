"""Groups of images: as many as there are, no group of two, and the limit of Ward's method by hand."""

import numpy as np
import pytest

from pearl.evaluation.grouping import LIMIT, group


def classes(count: int, images: int, noise: float = 0.8, dim: int = 100) -> np.ndarray:
    """Features (count images, dim) of length 1, around orthogonal directions."""
    rows = np.repeat(np.eye(dim)[:count], images, axis=0)
    rows = rows + np.random.default_rng(0).normal(0, noise / np.sqrt(dim), rows.shape)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


@pytest.mark.parametrize("count", [1, 2, 7])
def test_it_finds_as_many_as_there_are(count: int) -> None:
    labels = group(classes(count, 12)).reshape(count, 12)
    assert (labels == labels[:, :1]).all() and sorted(labels[:, 0]) == [*range(count)]


def test_a_pair_is_no_group() -> None:
    rows = classes(3, 12)
    labels = group(np.concatenate([rows[:24], rows[24:26]]))
    assert (labels[24:] == -1).all() and {*labels[:24]} == {0, 1}
    assert [group(rows[:n]).tolist() for n in range(3)] == [[], [-1], [-1, -1]]


@pytest.mark.parametrize(("margin", "groups"), [(0.9, 1), (1.1, 2)])
def test_the_limit_is_what_a_merge_adds_to_the_squared_distances(margin: float, groups: int) -> None:
    """Two groups of three equal images at a squared distance s: merging them adds 3 * 3 / (3 + 3) * s."""
    square = margin * LIMIT / 1.5
    cosine = 1 - square / 2
    rows = np.array([[1.0, 0.0]] * 3 + [[cosine, np.sqrt(1 - cosine**2)]] * 3)
    added = ((rows - rows.mean(0)) ** 2).sum()
    assert (added > LIMIT) == (groups == 2)
    assert len({*group(rows)}) == groups
