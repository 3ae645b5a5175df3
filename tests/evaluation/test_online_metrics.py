import math

import numpy as np
import pytest

from pearl.evaluation.online_metrics import Point, a_auc, a_last, class_forgetting, evaluation_points, forgetting


def points(*rights: list[int], total: int = 10) -> list[Point]:
    """Evaluations every 100 images, with this many correct test images of each class."""
    return [Point(100 * (i + 1), np.full(len(right), total), np.array(right)) for i, right in enumerate(rights)]


def test_of_a_constant_accuracy_everything_is_that_accuracy() -> None:
    actual = points([7], [7, 7], [7, 7, 7])
    assert a_auc(actual) == pytest.approx(70)
    assert a_last(actual) == pytest.approx(70)
    assert forgetting(actual) == pytest.approx(0)


def test_a_predictor_that_always_names_the_first_class() -> None:
    """Its area is the mean of 1 / classes seen."""
    actual = points([10], [10, 0], [10, 0, 0], [10, 0, 0, 0])
    assert a_auc(actual) == pytest.approx(100 * np.mean([1, 1 / 2, 1 / 3, 1 / 4]))
    assert a_last(actual) == 25


def test_only_regular_evaluations_count_for_the_area() -> None:
    early = Point(2, np.array([10]), np.array([0]), regular=False)
    actual = points([8], [6])
    assert a_auc([early, *actual]) == pytest.approx(70)


def test_every_test_image_counts_the_same() -> None:
    assert Point(1, np.array([30, 10]), np.array([30, 0])).accuracy == 75


def test_forgetting_is_from_the_best_earlier_accuracy() -> None:
    """Class 0 was best at the second evaluation, class 1 gained, class 2 was never right, class 3 is new."""
    actual = points([5, 2], [9, 4, 0], [7, 6, 0, 10])
    per_class = class_forgetting(actual)
    assert per_class[:2].tolist() == pytest.approx([20, -20])
    assert np.isnan(per_class[2:]).all()
    assert forgetting(actual) == pytest.approx(0)


def test_forgetting_of_a_single_evaluation_is_undefined() -> None:
    assert math.isnan(forgetting(points([5])))


def test_json_keeps_a_point() -> None:
    point = Point(64, np.array([3, 4]), np.array([1, 2]), regular=False)
    assert Point.from_json(point.to_json()).to_json() == point.to_json()
    assert Point.from_json(point.to_json()).accuracy == point.accuracy


# When to evaluate: five stages of 10,000 images in batches of 64, each with a last batch of 16


STAGES = [*([64] * 156), 16] * 5


@pytest.mark.parametrize(("rule", "count"), [("passed", 49), ("ahead", 50), ("reached", 50)])
def test_the_published_numbers_of_evaluations(rule: str, count: int) -> None:
    actual = [*evaluation_points(STAGES, 1000, rule)]  # type: ignore[arg-type]
    assert len(actual) == count
    assert (actual[-1] == 50_000) == (rule == "reached")


def test_evaluation_is_after_the_batch_that_reaches_the_interval_and_at_the_end() -> None:
    assert [*evaluation_points([64] * 5, 100)] == [128, 256, 320]
    assert [*evaluation_points([50] * 5, 100)] == [100, 200, 250]
    assert [*evaluation_points([250, 250], 100)] == [250, 500]
