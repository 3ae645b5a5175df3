from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from pearl.data.protocols import arrival_order, arrival_stages, gaussian, in_class_order, in_tasks, si_blurry
from pearl.settings.online import OnlineStreamConfig


class Given:
    """Draws written out by hand: cut points in turn; permutations are the identity, but the second is reversed."""

    def __init__(self, *cuts: Sequence[int]) -> None:
        self.cuts, self.permutations = [*cuts], 0

    def permutation(self, count: int) -> np.ndarray:
        self.permutations += 1
        return np.arange(count)[::-1] if self.permutations == 2 else np.arange(count)

    def integers(self, high: int, size: int) -> np.ndarray:
        actual = self.cuts.pop(0)
        assert len(actual) == size and all(0 <= cut < high for cut in actual)
        return np.array(actual)


def made(classes: int, each: int) -> np.ndarray:
    return np.repeat(np.arange(classes), each)


# Si-Blurry


@pytest.mark.parametrize(
    ("cut", "first", "second"), [(4, {0, 5, 6, 7, 8}, {1, 2, 3, 4, 9}), (0, {0, 4}, {1, 2, 3, 5, 6, 7, 8, 9})]
)
def test_a_stream_that_was_drawn_by_hand(cut: int, first: set[int], second: set[int]) -> None:
    """Ten classes of 4 images, 40 % disjoint, half of the other images move, the pool reversed instead of mixed."""
    labels = made(10, 4)
    draws: Any = Given([1], [cut], [8])
    stages = si_blurry(labels, 10, draws, stages=2, disjoint=40, blurry=50)
    assert [np.bincount(labels[rows], minlength=10).tolist() for rows in stages] == [
        [4 * (label in own) for label in range(10)] for own in (first, second)
    ]
    assert draws.cuts == []


@pytest.mark.parametrize(("classes", "stages", "never"), [(10, 3, 1), (100, 5, 0)])
def test_stages_share_out_the_images_of_all_classes_that_are_shown(classes: int, stages: int, never: int) -> None:
    labels = made(classes, 20)
    for seed in range(20):
        actual = si_blurry(labels, classes, np.random.default_rng(seed), stages=stages)
        rows = np.concatenate(actual)
        assert len(actual) == stages
        assert len(rows) == len(set(rows.tolist())) == (classes - never) * 20
        assert len(set(labels[rows].tolist())) == classes - never


def test_disjoint_classes_are_in_one_stage() -> None:
    labels = np.random.default_rng(0).permutation(made(100, 20))
    actual = si_blurry(labels, 100, np.random.default_rng(3))
    stages_of = np.zeros(100, dtype=int)
    for rows in actual:
        stages_of[np.unique(labels[rows])] += 1
    assert (stages_of == 1).sum() >= 50  # and the blurry ones of which no image moved
    assert (stages_of > 1).sum() > 10


def test_the_published_fixed_rule_of_i_blurry() -> None:
    """As in the authors' list of CIFAR-10: 1 disjoint and 1 home class, the 4 others about 100 images each."""
    labels = made(10, 5000)
    for rows in si_blurry(labels, 10, np.random.default_rng(1), varying=False):
        counts = np.sort(np.bincount(labels[rows], minlength=10))
        assert len(rows) == 10_000
        assert (counts > 0).sum() == 6
        assert counts[-1] == 5000 and 4500 <= counts[-2] <= 4700 and 60 < counts[4] <= counts[7] < 140


def test_disjoint_classes_alone_are_tasks() -> None:
    labels = made(10, 6)
    stages = si_blurry(labels, 10, np.random.default_rng(0), disjoint=100, blurry=0, varying=False)
    assert [len(set(labels[rows].tolist())) for rows in stages] == [2] * 5
    assert sorted(np.concatenate(stages).tolist()) == [*range(60)]


def test_mean_number_of_disjoint_classes_of_each_stage() -> None:
    """Expected 9.5067, 9.9933, 10, 9.9933 and 10.5067 of 50; the last stage is never without."""
    labels = made(100, 1)
    sizes = np.array(
        [
            [len(rows) for rows in si_blurry(labels, 50, np.random.default_rng(seed), disjoint=100, blurry=0)]
            for seed in range(2000)
        ]
    )
    spread = sizes.std(0) / np.sqrt(len(sizes))
    assert (abs(sizes.mean(0) - [9.5067, 9.9933, 10.0, 9.9933, 10.5067]) < 4 * spread).all()
    assert sizes[:, -1].min() > 0
    assert (sizes > 0).all(1).mean() == pytest.approx(0.8136, abs=0.04)


# Gaussian


def test_classes_peak_one_after_the_other() -> None:
    labels = made(10, 5000)
    order = gaussian(labels, 10, np.random.default_rng(0))
    assert sorted(order.tolist()) == [*range(50_000)]
    first_seen = np.random.default_rng(0).permutation(10)
    position = np.empty(50_000, dtype=int)
    position[order] = np.arange(50_000)
    medians = [np.median(position[labels == label]) for label in first_seen]
    assert medians == sorted(medians)
    # half of the first class is before time 0, when of class i a share of Phi(-i/10 / 0.1) has arrived
    phi = [0.5, 0.1587, 0.0228, 0.0013, 0.0]
    assert medians[0] / 5000 == pytest.approx(sum(phi), abs=0.03)


def test_a_small_sigma_gives_the_stream_class_by_class() -> None:
    labels = made(10, 50)
    order = gaussian(labels, 10, np.random.default_rng(5), sigma=1e-6)
    assert labels[order].tolist() == np.repeat(np.random.default_rng(5).permutation(10), 50).tolist()


def test_a_large_sigma_gives_a_random_stream() -> None:
    labels = made(10, 500)
    order = gaussian(labels, 10, np.random.default_rng(0), sigma=1e3)
    halves = np.bincount(labels[order[:2500]], minlength=10)
    assert (abs(halves - 250) < 5 * np.sqrt(500 * 0.25)).all()


def test_periods_repeat_classes_and_not_images() -> None:
    labels = made(10, 5000)
    order = gaussian(labels, 10, np.random.default_rng(0), sigma=1e-3, periods=5)
    assert sorted(order.tolist()) == [*range(50_000)]
    runs = np.flatnonzero(np.diff(labels[order])) + 1
    lengths = np.diff([0, *runs, 50_000])
    assert len(lengths) == 50
    assert (abs(lengths - 1000) < 5 * 28.3).all()


def test_classes_that_begin_later_lose_the_images_of_earlier_periods() -> None:
    labels = made(10, 1000)
    order = gaussian(labels, 10, np.random.default_rng(1), periods=5, at_start=0.5)
    counts = np.sort(np.bincount(labels[order], minlength=10))
    expected = [200, 400, 600, 800, 800]  # round(10 (0.5 + 0.1 (r + 1))) = 6, 7, 8, 9, 10 classes by period r
    assert (abs(counts[:4] - expected[:4]) < 70).all()
    assert (counts[4:] == 1000).all()


# The extremes, and all of them


def test_class_by_class() -> None:
    labels = np.random.default_rng(0).permutation(made(5, 9))
    order = in_class_order(labels, 5, np.random.default_rng(1))
    assert (np.diff(labels[order]) != 0).sum() == 4
    assert sorted(order.tolist()) == [*range(45)]
    assert order[:9].tolist() != sorted(order[:9].tolist())
    assert labels[order][::9].tolist() != labels[in_class_order(labels, 5, np.random.default_rng(2))][::9].tolist()


@pytest.mark.parametrize("protocol", ["si_blurry", "gaussian", "sorted", "random"])
def test_an_order_is_a_function_of_its_seed(protocol: Any) -> None:
    labels = np.random.default_rng(0).permutation(made(10, 30))
    config = OnlineStreamConfig(protocol=protocol)
    first, again, other = (arrival_order(labels, 10, config, seed) for seed in (1, 1, 2))
    assert first.tolist() == again.tolist() != other.tolist()
    assert len(set(first.tolist())) == len(first) == 300


@pytest.mark.parametrize(
    ("protocol", "option"),
    [
        ("si_blurry", {"stages": 2}),
        ("si_blurry", {"disjoint": 20}),
        ("si_blurry", {"blurry": 90}),
        ("si_blurry", {"varying": False}),
        ("gaussian", {"sigma": 0.3}),
        ("gaussian", {"periods": 3}),
        ("gaussian", {"periods": 3, "at_start": 0.4}),
    ],
)
def test_every_option_has_an_effect(protocol: Any, option: dict[str, Any]) -> None:
    labels = made(10, 30)
    before = {"periods": option.get("periods", 1)} if "at_start" in option else {}
    plain, changed = (
        arrival_order(labels, 10, OnlineStreamConfig(protocol=protocol, **how), 1) for how in (before, option)
    )
    assert plain.tolist() != changed.tolist()


# Known tasks


def test_tasks_have_equally_many_classes_by_number() -> None:
    labels = np.random.default_rng(0).permutation(made(6, 5))
    stages = in_tasks(labels, 6, np.random.default_rng(1), stages=3)
    assert [sorted({*labels[rows].tolist()}) for rows in stages] == [[0, 1], [2, 3], [4, 5]]
    assert sorted(np.concatenate(stages).tolist()) == [*range(30)]
    assert any((np.diff(rows) < 0).any() for rows in stages)  # in random order


@pytest.mark.parametrize("protocol", ["si_blurry", "tasks"])
def test_the_stages_make_up_the_order(protocol: Any) -> None:
    config, labels = OnlineStreamConfig(protocol=protocol, stages=4), made(20, 6)
    stages = arrival_stages(labels, 20, config, seed=3)
    assert len(stages) == 4
    assert np.array_equal(np.concatenate(stages), arrival_order(labels, 20, config, seed=3))


@pytest.mark.parametrize("protocol", ["gaussian", "sorted", "random"])
def test_other_streams_have_no_boundaries_to_give(protocol: Any) -> None:
    assert len(arrival_stages(made(5, 4), 5, OnlineStreamConfig(protocol=protocol), seed=0)) == 1
    with pytest.raises(ValueError, match=f"protocol={protocol} has no stages"):
        OnlineStreamConfig(protocol=protocol, boundaries="given")
