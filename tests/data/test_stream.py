import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from pearl.data.sources import Source, Split
from pearl.data.stream import Stream, class_order, make_stream, task_sizes
from pearl.errors import DataError
from pearl.settings.sections import StreamConfig

Count = int | Sequence[int]  # per class, or the same for all


def split(classes: int, count: Count, seed: int) -> Split:
    """That many images per class, in no order."""
    labels = np.repeat(np.arange(classes), [count] * classes if isinstance(count, int) else list(count))
    return Split(np.zeros((len(labels), 1, 1, 3), np.uint8), np.random.default_rng(seed).permutation(labels))


def source(classes: int = 10, train: Count = 8, test: Count = 3, validation: Count | None = None) -> Source:
    held = None if validation is None else split(classes, validation, 2)
    names = tuple(f"kind {label}" for label in range(classes))
    return Source("toy", names, split(classes, train, 0), split(classes, test, 1), held)


def stream(data: Source | None = None, *, seed: int = 0, **settings: Any) -> Stream:
    return make_stream(data or source(), StreamConfig(**{"tasks": 5, **settings}), seed)


def train_rows(made: Stream) -> list[int]:
    return [row for task in made.tasks for row in task.train.tolist()]


def test_rows(made: Stream) -> list[int]:
    return [row for task in made.tasks for row in task.test.tolist()]


test_rows.__test__ = False  # type: ignore[attr-defined]


def names(data: Source, labels: Sequence[int]) -> tuple[str, ...]:
    return tuple(data.classes[label] for label in labels)


# Order of the classes


@pytest.mark.parametrize(("count", "start"), [(100, [68, 56, 78, 8, 23]), (200, [168, 136, 51, 9, 183])])
def test_seed_1993_gives_the_published_order(count: int, start: list[int]) -> None:
    data = source(count, train=1, test=1)
    made = stream(data, tasks=10, order=1993)
    assert made.classes[:5] == names(data, start)
    assert set(made.classes) == set(data.classes)


@pytest.mark.parametrize("seed", [0, 1, 1993, 2**32 - 1])
def test_seeded_order_is_that_of_the_global_generator(seed: int) -> None:
    state = np.random.get_state()  # noqa: NPY002
    try:
        np.random.seed(seed)  # noqa: NPY002
        theirs = np.random.permutation(50)  # noqa: NPY002
    finally:
        np.random.set_state(state)  # noqa: NPY002
    assert class_order(50, seed).tolist() == theirs.tolist()


def test_order_leaves_the_global_generator_alone() -> None:
    before = np.random.get_state()[1].tolist()  # noqa: NPY002
    class_order(50, 1993)
    assert np.random.get_state()[1].tolist() == before  # noqa: NPY002


def test_natural_order_is_the_default() -> None:
    data = source()
    assert stream(data).classes == stream(data, order="natural").classes == data.classes


def test_listed_order_may_leave_classes_out() -> None:
    data = source()
    made = stream(data, tasks=2, order=[7, 2, 9, 0])
    assert made.classes == names(data, [7, 2, 9, 0])
    assert set(data.train.labels[train_rows(made)]) == {7, 2, 9, 0}


@pytest.mark.parametrize(("label", "shown"), [(10, "10"), (-1, "-1")])
def test_unknown_label_in_order(label: int, shown: str) -> None:
    with pytest.raises(DataError, match=rf"stream\.order: no class {shown} in a source of 10; list labels 0 to 9"):
        stream(tasks=3, order=[1, label, 2])


# Sizes of the tasks


def test_equal_sizes() -> None:
    assert [len(task.classes) for task in stream(tasks=5).tasks] == [2] * 5


def test_listed_sizes_and_where_each_task_begins() -> None:
    made = stream(tasks=[4, 1, 3, 2])
    assert [len(task.classes) for task in made.tasks] == [4, 1, 3, 2]
    assert [task.first_class for task in made.tasks] == [0, 4, 5, 8]
    assert [task.name for task in made.tasks] == ["task1", "task2", "task3", "task4"]


@pytest.mark.parametrize(
    ("classes", "tasks", "nearest"), [(10, 3, 2), (10, 7, 5), (10, 11, 10), (100, 30, 25), (97, 60, 97), (97, 20, 1)]
)
def test_tasks_that_do_not_divide(classes: int, tasks: int, nearest: int) -> None:
    with pytest.raises(DataError, match=rf"stream\.tasks={tasks} does not divide {classes} classes; use {nearest},"):
        stream(source(classes, train=1, test=1), tasks=tasks)


@pytest.mark.parametrize("sizes", [[3, 3, 3], [5, 6]])
def test_sizes_that_do_not_sum(sizes: list[int]) -> None:
    with pytest.raises(DataError, match=rf"stream\.tasks: the sizes sum to {sum(sizes)}, the stream has 10 classes"):
        stream(tasks=sizes)


def test_sizes_sum_to_the_classes_kept() -> None:
    assert task_sizes(9, [3, 3, 3]) == [3, 3, 3]
    assert [len(task.classes) for task in stream(tasks=[2, 1], classes=3).tasks] == [2, 1]


# What an image's label means


def check_labels(made: Stream, data: Source, evaluated: Split) -> None:
    """Every row carries the logit index under which its class arrived."""
    for task in made.tasks:
        assert task.classes == made.classes[task.first_class : task.first_class + len(task.classes)]
        for rows, labels, part in (
            (task.train, task.train_labels, data.train),
            (task.test, task.test_labels, evaluated),
        ):
            assert rows.dtype == labels.dtype == np.int64
            assert [made.classes[label] for label in labels] == [data.classes[label] for label in part.labels[rows]]
            assert set(labels.tolist()) == set(range(task.first_class, task.first_class + len(task.classes)))


@pytest.mark.parametrize("order", ["natural", 1993, [3, 1, 8, 5, 0, 9, 2, 7, 4, 6]])
def test_logit_index_is_the_order_of_arrival(order: Any) -> None:
    data = source()
    check_labels(stream(data, order=order), data, data.test)


@st.composite
def cuts(draw: st.DrawFn) -> tuple[Source, dict[str, Any]]:
    """A source with classes of any size, in any order, in tasks of any sizes."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    classes = sum(sizes)
    counts = st.lists(st.integers(1, 5), min_size=classes, max_size=classes)
    data = source(classes, train=draw(counts), test=draw(counts))
    order = draw(st.one_of(st.just("natural"), st.integers(0, 2**32 - 1), st.permutations(list(range(classes)))))
    return data, {"tasks": sizes, "order": order}


@settings(deadline=None, max_examples=60)
@given(cuts(), st.integers(0, 3))
def test_any_cut_uses_every_image_once(cut: tuple[Source, dict[str, Any]], seed: int) -> None:
    data, cutting = cut
    made = stream(data, seed=seed, **cutting)
    assert sorted(train_rows(made)) == list(range(len(data.train.labels)))
    assert sorted(test_rows(made)) == list(range(len(data.test.labels)))
    assert sorted(made.classes) == sorted(data.classes)
    assert [task.first_class for task in made.tasks] == [sum(cutting["tasks"][:t]) for t in range(len(made.tasks))]
    check_labels(made, data, data.test)


@settings(deadline=None, max_examples=40)
@given(cuts(), st.floats(0.01, 0.6), st.integers(0, 3))
def test_any_share_held_out_is_disjoint(cut: tuple[Source, dict[str, Any]], share: float, seed: int) -> None:
    data, cutting = cut
    data = dataclasses.replace(
        data, train=Split(np.concatenate([data.train.images] * 3), np.tile(data.train.labels, 3))
    )
    made = stream(data, seed=seed, validation=share, evaluate_on="validation", **cutting)
    assert sorted(train_rows(made) + test_rows(made)) == list(range(len(data.train.labels)))
    check_labels(made, data, data.train)


# Fewer images, fewer classes


def per_class(made: Stream, part: str) -> list[int]:
    """Images of each class, in order of arrival."""
    labels = np.concatenate([getattr(task, f"{part}_labels") for task in made.tasks])
    return [Counter(labels.tolist())[index] for index in range(len(made.classes))]


@pytest.mark.parametrize(("limit", "kept"), [(1, [1, 1, 1, 1]), (3, [3, 2, 3, 1]), (9, [9, 2, 5, 1])])
@pytest.mark.parametrize("part", ["train", "test"])
def test_images_per_class(part: str, limit: int, kept: list[int]) -> None:
    counts = [12, 2, 5, 1]
    data = source(4, train=counts, test=counts)
    made = stream(data, tasks=2, **{"per_class" if part == "train" else "test_per_class": limit})
    other = "test" if part == "train" else "train"
    assert per_class(made, part) == kept
    assert per_class(made, other) == counts
    check_labels(made, data, data.test)


def test_images_kept_are_drawn_by_seed() -> None:
    data = source(train=50, test=50)
    draws = [stream(data, seed=seed, per_class=5, test_per_class=5) for seed in (0, 0, 1)]
    for rows in (train_rows, test_rows):
        assert rows(draws[0]) == rows(draws[1])
        assert len({*rows(draws[0])} & {*rows(draws[2])}) < 25  # 50 rows each out of 500: 5 in common by chance
        assert len({*rows(draws[0])}) == 50


def test_classes_keeps_the_first_of_the_order() -> None:
    data = source()
    made = stream(data, tasks=2, classes=4, order=1993)
    assert made.classes == stream(data, order=1993).classes[:4]
    assert len(train_rows(made)) == 4 * 8


def test_more_classes_than_there_are() -> None:
    with pytest.raises(DataError, match=r"stream\.classes=20: the order has 10; set at most that many"):
        stream(classes=20)
    with pytest.raises(DataError, match=r"stream\.classes=5: the order has 4;"):
        stream(classes=5, order=[7, 2, 9, 0])


# Validation images


@pytest.mark.parametrize("share", [0.125, 0.25, 0.5])
def test_share_is_held_out_of_every_class(share: float) -> None:
    data = source()
    made = stream(data, validation=share, evaluate_on="validation")
    assert made.test_from == "train"
    assert per_class(made, "test") == [8 * share] * 10
    assert not {*train_rows(made)} & {*test_rows(made)}
    assert sorted(train_rows(made) + test_rows(made)) == list(range(80))


def test_at_least_one_image_is_held_out() -> None:
    made = stream(source(2, train=[2, 30]), tasks=1, validation=0.01, evaluate_on="validation")
    assert per_class(made, "test") == [1, 1] and per_class(made, "train") == [1, 29]


def test_held_out_images_are_the_same_whatever_is_evaluated_on() -> None:
    data = source()
    on_test = stream(data, validation=0.25)
    on_validation = stream(data, validation=0.25, evaluate_on="validation")
    assert train_rows(on_test) == train_rows(on_validation)
    assert on_test.test_from == "test" and sorted(test_rows(on_test)) == list(range(30))


def test_held_out_images_depend_on_the_seed_alone() -> None:
    data = source(train=50)
    held = [{*test_rows(stream(data, seed=seed, validation=0.2, evaluate_on="validation"))} for seed in (0, 0, 1)]
    assert held[0] == held[1] != held[2]


def test_limits_do_not_change_what_is_held_out() -> None:
    data = source(train=50)
    few = stream(data, validation=0.2, evaluate_on="validation", per_class=3)
    all_of_them = stream(data, validation=0.2, evaluate_on="validation")
    assert test_rows(few) == test_rows(all_of_them)
    assert {*train_rows(few)} < {*train_rows(all_of_them)}


def test_the_source_s_own_validation_images() -> None:
    data = source(validation=2)
    made = stream(data, evaluate_on="validation")
    assert data.validation is not None
    assert made.test_from == "validation" and sorted(test_rows(made)) == list(range(20))
    assert len(train_rows(made)) == 80
    check_labels(made, data, data.validation)


def test_no_validation_images_anywhere() -> None:
    with pytest.raises(DataError, match=r"stream\.evaluate_on=validation: .* set stream\.validation=0\.1"):
        stream(evaluate_on="validation")


# Classes without images


@pytest.mark.parametrize("part", ["train", "test", "validation"])
def test_all_classes_without_an_image_are_named(part: str) -> None:
    counts = [1, 0, 1, 0, 1, 0]
    data = source(6, **{"train": 1, "test": 1, part: counts})
    on = {"evaluate_on": "validation"} if part == "validation" else {}
    with pytest.raises(DataError, match=rf"data toy: no {part} image of kind 1, kind 3, kind 5;"):
        stream(data, tasks=2, **on)


def test_a_class_left_out_needs_no_image() -> None:
    data = source(4, train=[1, 0, 1, 1])
    assert stream(data, tasks=3, order=[0, 2, 3]).classes == names(data, [0, 2, 3])


# Digest


VARIANTS: dict[str, dict[str, Any]] = {
    "tasks": {"tasks": 2},
    "sizes": {"tasks": [3, 1, 2, 2, 2]},
    "order": {"order": 1993},
    "two classes swapped": {"order": [1, 0, *range(2, 10)]},
    "fewer images": {"per_class": 7},
    "fewer images, other seed": {"per_class": 7, "seed": 1},
    "fewer test images": {"test_per_class": 2},
    "fewer classes": {"classes": 5},
    "held out": {"validation": 0.25},
    "held out, other seed": {"validation": 0.25, "seed": 1},
    "held out and evaluated on": {"validation": 0.25, "evaluate_on": "validation"},
}


def test_digest_changes_with_anything_else() -> None:
    data = source()
    relabelled = data.train.labels.copy()
    relabelled[[0, 1]] = 3, 4
    variants = {
        **{name: stream(data, **variant) for name, variant in VARIANTS.items()},
        "as it is": stream(data),
        "names": stream(dataclasses.replace(data, classes=(*data.classes[:9], "other"))),
        "labels": stream(dataclasses.replace(data, train=Split(data.train.images, relabelled))),
        "test labels": stream(dataclasses.replace(data, test=Split(data.test.images, data.test.labels[::-1]))),
        "test from": stream(dataclasses.replace(data, validation=data.test), evaluate_on="validation"),
        "more images": stream(source(train=9)),
    }
    assert len({made.digest for made in variants.values()}) == len(variants)


@pytest.mark.parametrize(
    "same",
    [
        {},
        {"seed": 5},  # nothing was drawn
        {"tasks": [2] * 5},
        {"order": list(range(10))},
        {"per_class": 8, "test_per_class": 100},
        {"classes": 10},
    ],
    ids=str,
)
def test_digest_of_the_same_cut_is_the_same(same: dict[str, Any]) -> None:
    assert stream(**same).digest == stream().digest
    assert len(stream().digest) == 64


def test_digest_is_of_the_cut_and_not_of_pixels_or_notes() -> None:
    data = source()
    other = Split(np.ones_like(data.train.images), data.train.labels)
    assert stream(dataclasses.replace(data, name="other", train=other, notes={"a": "b"})).digest == stream(data).digest


@pytest.mark.parametrize("part", ["train", "test"])
def test_digest_sees_where_a_class_ends(part: str) -> None:
    made = []
    for labels in ([0, 0, 1], [0, 1, 1]):  # the same rows in the same order
        parts = {part: Split(np.zeros((3, 1, 1, 3), np.uint8), np.array(labels))}
        made.append(stream(dataclasses.replace(source(2), **parts), tasks=1))
    assert made[0].digest != made[1].digest


def test_digest_keeps_names_apart() -> None:
    data = source(2)
    made = [stream(dataclasses.replace(data, classes=both), tasks=1) for both in (("a\nb", "c"), ("a", "b\nc"))]
    assert made[0].digest != made[1].digest


@pytest.mark.parametrize("order", [-1, 2**32, []], ids=str)
def test_order_that_cannot_be(order: Any) -> None:
    with pytest.raises(ValidationError, match="order"):
        stream(order=order)
