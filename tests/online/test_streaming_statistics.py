from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pearl.online.spaces import StreamingSpace, joint_log_probabilities, left_out_scores
from pearl.online.streaming_statistics import StreamingStatistics, discriminants
from pearl.online.window import Window, confused_classes

pytestmark = pytest.mark.slow


def images(seed: int, count: int = 40, classes: int = 4, dim: int = 5) -> tuple[np.ndarray, np.ndarray]:
    """Features around class means, and labels of which each class has some."""
    rng = np.random.default_rng(seed)
    labels = np.append(np.arange(classes), rng.integers(classes, size=count - classes))
    return rng.normal(size=(classes, dim))[labels] * 3 + rng.normal(size=(count, dim)), labels


def learnt(x: np.ndarray, y: np.ndarray, cuts: Sequence[int] = ()) -> StreamingStatistics:
    made = StreamingStatistics(x.shape[1])
    for part, own in zip(np.split(x, cuts), np.split(y, cuts), strict=True):
        if len(own):
            made.update(torch.from_numpy(part), torch.from_numpy(own))
    return made


def by_numpy(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Means, and the scatter within classes."""
    means = np.stack([x[y == c].mean(0) for c in range(y.max() + 1)])
    return means, (x - means[y]).T @ (x - means[y])


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 99), st.lists(st.integers(1, 39), max_size=6))
def test_statistics_do_not_depend_on_the_batches(seed: int, cuts: list[int]) -> None:
    x, y = images(seed)
    made, (means, scatter) = learnt(x, y, sorted(cuts)), by_numpy(x, y)
    assert made.counts.tolist() == np.bincount(y).tolist()
    np.testing.assert_allclose(made.means, means, atol=1e-10)
    np.testing.assert_allclose(made.scatter, scatter, atol=1e-9)


def test_one_by_one_and_a_class_whose_number_is_skipped() -> None:
    x, y = images(1)
    made = learnt(x[y != 1], y[y != 1], range(1, int((y != 1).sum())))
    assert made.known.tolist() == [True, False, True, True]
    np.testing.assert_allclose(made.means[[0, 2, 3]], by_numpy(x, y)[0][[0, 2, 3]], atol=1e-10)


def test_precision_inverts_the_shrunk_covariance() -> None:
    x, y = images(2, count=60)
    _, scatter = by_numpy(x, y)
    share = max((5 / (56 + 5)) ** 3, 1e-4)
    covariance = (1 - share) * scatter / 56 + share * np.trace(scatter) / 56 / 5 * np.eye(5)
    np.testing.assert_allclose(learnt(x, y).precision(), np.linalg.inv(covariance), rtol=1e-8)


def test_discriminants_are_linear_in_the_images() -> None:
    x, y = images(3)
    means, matrix = torch.from_numpy(by_numpy(x, y)[0]), torch.eye(5, dtype=torch.float64)
    distances = ((x[:, None] - means.numpy()) ** 2).sum(2)
    assert discriminants(torch.from_numpy(x), means, matrix).argmax(1).tolist() == distances.argmin(1).tolist()


@pytest.mark.parametrize("i", [0, 7, 23])
def test_an_image_is_left_out(i: int) -> None:
    """As if it had not been there, at the same shrinkage and degrees of freedom."""
    x, y = images(4, count=30)
    made = learnt(x, y)
    actual = left_out_scores(made, torch.from_numpy(x), torch.from_numpy(y))[i]
    rest = np.arange(30) != i
    means, scatter = by_numpy(x[rest], y[rest])
    trace = np.trace(by_numpy(x, y)[1])
    share, freedom = made.shrinkage, made.freedom
    precision = np.linalg.inv((1 - share) * scatter / freedom + share * trace / freedom / 5 * np.eye(5))
    expected = x[i] @ precision @ means.T - 0.5 * np.einsum("cp,pq,cq->c", means, precision, means)
    np.testing.assert_allclose(actual - actual[y[i] - 1], expected - expected[y[i] - 1], rtol=1e-6)


def test_an_only_image_cannot_be_left_out() -> None:
    x, y = images(5)
    y = np.where(np.arange(len(y)) == 0, 4, y)
    actual = left_out_scores(learnt(x, y), torch.from_numpy(x), torch.from_numpy(y))
    assert actual[0, 4] == -torch.inf
    assert actual[1:].isfinite().all()


def test_classes_are_compared_where_they_are_known() -> None:
    """Class 1 is known in both spaces, 0 and 2 in the first alone, 3 in none."""
    first, second = torch.tensor([[1.0, 2.0, 0.5, 9.0]]).double(), torch.tensor([[7.0, 4.0]]).double()
    known = [torch.tensor([True, True, True, False]), torch.tensor([False, True])]
    logp = joint_log_probabilities([first, second], known, 4, temperature=0.5)
    p = np.exp(0.5 * np.array([1.0, 2.0, 0.5]))
    np.testing.assert_allclose(logp[0, :3], np.log(p / p.sum()), rtol=1e-9)  # alone in its space: probability 1 there
    assert logp[0, 3] == -torch.inf


def test_classes_known_in_both_spaces_are_compared_by_the_mean() -> None:
    first, second = torch.tensor([[1.0, 2.0, 0.5]]).double(), torch.tensor([[0.0, 3.0, 4.0]]).double()
    known = [torch.ones(3, dtype=torch.bool), torch.tensor([False, True, True])]
    logp = joint_log_probabilities([first, second], known, 3, temperature=1.0)[0].exp().numpy()
    p, q = np.exp([1.0, 2.0, 0.5]), np.exp([2.5, 2.25])
    assert logp[0] == pytest.approx(p[0] / p.sum())
    np.testing.assert_allclose(logp[1:], (1 - p[0] / p.sum()) * q / q.sum())
    assert logp.sum() == pytest.approx(1)


def test_a_space_standardises_projects_and_is_reproduced_from_its_file() -> None:
    raw = torch.randn(50, 12, generator=torch.Generator().manual_seed(0)) * 7 + 3
    space = StreamingSpace(1, 0, raw, dim=8)
    actual = space(raw)
    rows = (raw - raw.mean(0)) / (raw.std(0, unbiased=False) + 1e-6)
    rows = rows / rows.norm(dim=1, keepdim=True) * 12**0.5
    matrix = torch.randn(12, 8, generator=torch.Generator().manual_seed(20_262)) / 12**0.5
    torch.testing.assert_close(actual, rows @ matrix, rtol=1e-4, atol=1e-5)
    space.statistics.update(actual, torch.zeros(50, dtype=torch.long))
    other = StreamingSpace(1)
    other.load_state_dict(space.state_dict())
    assert torch.equal(other(raw), actual)
    assert StreamingSpace(0, 0, raw, dim=None)(raw).shape == StreamingSpace(0, 0, raw, dim=20)(raw).shape == (50, 12)


def test_another_projection_is_refused() -> None:
    from pearl.errors import RunError

    space = StreamingSpace(1, 0, torch.randn(9, 12), dim=8)
    space.checksum += 1
    with pytest.raises(RunError, match="random projection of feature space 2"):
        space(torch.randn(1, 12))


# The window and what is confused in it


def test_a_window_has_the_newest_images() -> None:
    window = Window(5)
    for start in (0, 3, 6):
        own = torch.arange(start, start + 3)
        pixels = own.to(torch.uint8)[:, None, None, None].expand(3, 2, 2, 3)
        window.add(pixels, own, own[:, None].float())
    assert window.labels.tolist() == window.images[:, 0, 0, 0].tolist() == window.features[:, 0].tolist()
    assert window.labels.tolist() == [4, 5, 6, 7, 8]
    assert window.bytes() == 5 * (2 * 2 * 3 + 8 + 4)


def scores(predicted: list[int]) -> torch.Tensor:
    return torch.eye(6)[predicted]


@pytest.mark.parametrize(
    ("predicted", "share", "expected"),
    [
        ([0, 0, 2, 2, 4, 4], 0.0, []),
        ([2, 0, 2, 2, 4, 4], 0.1, [0, 2]),  # class 0 loses an image, class 2 gets it
        ([2, 0, 2, 2, 4, 4], 0.2, []),  # one of six
        ([2, 4, 2, 2, 0, 0], 0.1, [0, 2, 4]),
    ],
)
def test_confused_classes(predicted: list[int], share: float, expected: list[int]) -> None:
    assert confused_classes(scores(predicted), torch.tensor([0, 0, 2, 2, 4, 4]), share).tolist() == expected


def test_only_classes_of_the_window_are_compared() -> None:
    made = scores([5, 5, 2, 2])
    made[:2, 0] = 0.5  # among the classes 0 and 2, class 0
    assert confused_classes(made, torch.tensor([0, 0, 2, 2]), 0.0).tolist() == []


def test_a_single_class_is_never_confused() -> None:
    assert confused_classes(scores([1, 2, 3]), torch.tensor([4, 4, 4]), 0.0).tolist() == []
