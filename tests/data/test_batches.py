import gc
import hashlib
import weakref
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pearl.data import batches
from pearl.data.augment import View
from pearl.data.batches import Balanced, Batch, Task, batch_bounds, derive_seed
from pearl.settings.sections import ImagesConfig
from pearl.testing.tiny import make_task


def task(count: int = 40, *, augment: Any = "none") -> Task:
    """Image i is of one colour, i; labels are 6 to 9."""
    images = np.broadcast_to(np.arange(count, dtype=np.uint8)[:, None, None, None], (count, 4, 4, 3)).copy()
    labels = 6 + np.arange(count, dtype=np.int64) % 4
    view = View(ImagesConfig(size=4, augment=augment, pad=1))
    return Task(2, "birds", ("owl", "jay", "kite", "wren"), 6, images, labels, view, torch.device("cpu"))


def epoch(of: Task, size: int = 8, seed: int = 0) -> Batch:
    """All batches of an epoch in one."""
    return Batch(*(torch.cat(parts) for parts in zip(*of.batches(size, seed), strict=True)))


# Seeds


def test_seeds_are_pinned() -> None:
    """A run begun with an older version goes on as it would have."""
    assert derive_seed(1, 2) == 7468892287103171198
    assert derive_seed(0, "backbone") == 5940898966988682445


def test_seed_is_of_the_written_parts() -> None:
    digest = hashlib.sha256(b"(3, 'probe', 0)").hexdigest()
    assert derive_seed(3, "probe", 0) == int(digest[:16], 16) // 2


def test_different_places_have_different_seeds() -> None:
    seeds = {derive_seed(*position) for position in product(range(5), range(20), range(3), range(60))}
    assert len(seeds) == 5 * 20 * 3 * 60
    assert max(seeds).bit_length() == 63 and min(seeds) >= 0


Parts = st.lists(st.integers(-3, 3) | st.sampled_from(["probe", "1", ""]), max_size=4)


@settings(deadline=None)
@given(Parts, Parts)
def test_seeds_differ_exactly_if_parts_do(some: list[int | str], others: list[int | str]) -> None:
    assert (derive_seed(*some) == derive_seed(*others)) == (some == others)
    assert torch.Generator().manual_seed(derive_seed(*some)).initial_seed() == derive_seed(*some)


# Epochs


@pytest.mark.parametrize("size", [1, 3, 8, 13, 40, 100])
@pytest.mark.parametrize("augment", ["none", "crop", "resized_crop"])
def test_every_image_once_an_epoch(size: int, augment: str) -> None:
    seen = epoch(task(augment=augment), size)
    assert sorted(seen.rows.tolist()) == list(range(40))


@pytest.mark.parametrize("size", [1, 7, 40])
def test_pixels_label_and_row_belong_together(size: int) -> None:
    of = task()
    for x, y, rows in of.batches(size, seed=3):
        assert torch.equal((x[:, 0, 0, 0] * 255).round().long(), rows)
        assert torch.equal(of.images[rows][:, 0, 0, 0].long(), rows)
        assert y.tolist() == [6 + i % 4 for i in rows.tolist()] == of.labels[rows].tolist()
        assert x.dtype == torch.float32 and y.dtype == rows.dtype == torch.int64


@pytest.mark.parametrize("size", [1, 7, 40, 100])
def test_in_order_each_image_comes_once_as_it_is_tested(size: int) -> None:
    of = task(augment="crop")
    batches = [*of.in_order(size)]
    assert [len(batch.y) for batch in batches] == [min(size, 40 - start) for start in range(0, 40, size)]
    x, y, rows = (torch.cat(parts) for parts in zip(*batches, strict=True))
    assert rows.tolist() == [*range(40)] and torch.equal(y, of.labels)
    assert torch.equal(x, of.view.test(of.images))


def test_order_is_drawn_by_seed() -> None:
    orders = [epoch(task(), seed=seed).rows.tolist() for seed in range(200)]
    assert len({tuple(order) for order in orders}) == 200
    first = [order[0] for order in orders]
    assert len(set(first)) > 30 and 15 < np.mean(first) < 24  # of 0 to 39


def test_order_does_not_depend_on_the_batch_size() -> None:
    assert torch.equal(epoch(task(), 3).rows, epoch(task(), 16).rows)


@pytest.mark.parametrize("augment", ["none", "crop", "resized_crop"])
def test_same_seed_same_pixels(augment: str) -> None:
    of = task(augment=augment)
    once, again, other = epoch(of, seed=5), epoch(of, seed=5), epoch(of, seed=6)
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))
    assert not torch.equal(once.x, other.x)


def test_an_epoch_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    epoch(task(augment="crop"))
    assert torch.equal(torch.get_rng_state(), before)


def test_augmentation_is_drawn_anew_each_epoch() -> None:
    of = task(augment="crop")
    once, other = epoch(of, seed=5), epoch(of, seed=6)
    assert not torch.equal(once.x[once.rows.argsort()], other.x[other.rows.argsort()])


# Bounds


@settings(deadline=None)
@given(st.integers(0, 400), st.integers(1, 70))
def test_batches_cover_all_images_and_none_has_one(count: int, size: int) -> None:
    bounds = batch_bounds(count, size)
    assert [i for start, stop in bounds for i in range(start, stop)] == list(range(count))
    lengths = [stop - start for start, stop in bounds]
    assert all(length == size for length in lengths[:-1])
    assert all(0 < length <= size + 1 for length in lengths)
    assert 1 not in lengths or count == 1 or size == 1


@pytest.mark.parametrize(
    ("count", "size", "bounds"),
    [
        (9, 4, [(0, 4), (4, 9)]),
        (10, 4, [(0, 4), (4, 8), (8, 10)]),
        (3, 2, [(0, 3)]),
        (3, 1, [(0, 1), (1, 2), (2, 3)]),
        (1, 4, [(0, 1)]),
        (0, 4, []),
    ],
)
def test_bounds(count: int, size: int, bounds: list[tuple[int, int]]) -> None:
    assert batch_bounds(count, size) == bounds
    if count:
        assert [len(batch.y) for batch in task(count).batches(size, 0)] == [stop - start for start, stop in bounds]


# The end of a task


def test_what_a_task_says_of_itself() -> None:
    of = task()
    assert (of.id, of.name, of.first_class, len(of)) == (2, "birds", 6, 40)
    assert of.images.shape == (40, 4, 4, 3) and of.images.dtype == torch.uint8
    assert set(of.labels.tolist()) == {of.first_class + i for i in range(len(of.classes))}


@pytest.mark.parametrize("what", ["images", "labels", "batches"])
def test_a_closed_task_cannot_be_read(what: str) -> None:
    def read(of: Task) -> Any:
        return list(of.batches(8, 0)) if what == "batches" else getattr(of, what)

    of = task()
    assert len(read(of)) == (5 if what == "batches" else 40)
    of.close()
    with pytest.raises(RuntimeError, match=r"task 2 \(birds\) is over: its \w+ cannot be read any more"):
        read(of)
    assert len(of) == 40


def test_closing_ends_an_epoch() -> None:
    of = task()
    batches = of.batches(8, 0)
    next(batches)
    of.close()
    with pytest.raises(RuntimeError, match="is over"):
        next(batches)


def test_a_closed_task_holds_no_images() -> None:
    images = np.zeros((4, 2, 2, 3), np.uint8)
    of = Task(0, "a", ("x",), 0, images, np.zeros(4, np.int64), View(ImagesConfig(size=2)), torch.device("cpu"))
    held = weakref.ref(images)
    del images
    of.close()
    gc.collect()
    assert held() is None


# With images of a memory


def test_a_task_joined_by_others_has_all_of_them_in_one_shuffle_and_ends_with_it() -> None:
    task = make_task(1)
    others, labels = torch.full((5, *task.images.shape[1:]), 7, dtype=torch.uint8), torch.tensor([0, 1, 0, 1, 0])
    joined = task.joined(others, labels)
    seen = [*joined.batches(8, seed=3)]
    rows = torch.cat([batch.rows for batch in seen])
    assert rows.sort()[0].tolist() == list(range(29))
    every = torch.cat([task.labels, labels])
    assert torch.equal(torch.cat([batch.y for batch in seen]), every[rows])
    assert torch.equal(joined.images[24:], others) and len(task) == 24
    task.close()
    with pytest.raises(RuntimeError, match="is over"):
        next(joined.batches(8, seed=3))


def test_balanced_draws_have_each_class_as_often_and_augment_an_image_anew() -> None:
    task = make_task(0).joined(make_task(1).images[:2], torch.tensor([2, 3]))  # 12 images, 12, one and one
    balanced = Balanced(task)
    assert len(balanced) == 26
    labels = torch.cat([batch.y for seed in range(60) for batch in balanced.batches(8, seed)])
    counts = labels.bincount()
    assert ((counts / counts.sum() - 0.25).abs() < 0.04).all()
    (whole,) = balanced.batches(26, seed=1)
    single = [image for image, label in zip(whole.x, whole.y.tolist(), strict=True) if label == 3]
    assert len(single) > 2 and len({image.numpy().tobytes() for image in single}) > 1
    assert torch.equal(whole.y, task.labels[whole.rows])


def test_balanced_draws_can_be_entered_again() -> None:
    balanced = Balanced(make_task(0))
    every, rest = [*balanced.batches(5, seed=9)], [*balanced.batches(5, seed=9, skip=2)]
    assert [len(batch.y) for batch in every] == [5, 5, 5, 5, 4]
    for one, other in zip(every[2:], rest, strict=True):
        assert torch.equal(one.x, other.x) and torch.equal(one.rows, other.rows)


@pytest.mark.parametrize("augment", ["none", "crop", "resized_crop"])
def test_batches_made_several_at_a_time_are_the_same(augment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: three of them at a time, at the end fewer, and a smaller one."""
    of = task(47, augment=augment)
    single = list(of.batches(5, 7))
    monkeypatch.setitem(batches.AHEAD, "cpu", 3 * 5 * 3 * 4**2)
    made: list[int] = []
    monkeypatch.setattr(of, "batch", lambda rows, draws: made.append(len(rows)) or Task.batch(of, rows, draws))
    for skip in (0, 5):
        several = list(of.batches(5, 7, skip=skip))
        assert len(several) == len(single) - skip
        for ours, its in zip(several, single[skip:], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours, its, strict=True))
            assert ours.x.stride() == its.x.stride()
    assert made == [15, 15, 15, 2, 15, 7]
