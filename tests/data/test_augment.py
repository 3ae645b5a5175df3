import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torchvision.transforms import RandomResizedCrop, v2
from torchvision.transforms.v2 import functional as transforms

from pearl.data.augment import View, resized_crop, shift_and_flip
from pearl.data.batches import Task
from pearl.settings.sections import ImagesConfig

MEAN, STD = (0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)
AUGMENTS = ("none", "crop", "resized_crop")


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def images(*shape: int, seed: int = 0) -> Tensor:
    """Raw images (B, H, W, 3)."""
    return torch.randint(0, 256, (*shape, 3), generator=generator(seed), dtype=torch.uint8)


def view(size: int = 16, **config: Any) -> View:
    return View(ImagesConfig(size=size, **config))


def distinct(batch: Tensor) -> int:
    return len({image.numpy().tobytes() for image in batch})


def channels_first(raw: Tensor) -> Tensor:
    return raw.permute(0, 3, 1, 2).float()


# Crop and flip


def pad_crop_flip(image: np.ndarray, shift: tuple[int, int], flip: bool, pad: int) -> np.ndarray:
    """One image: zeros around it, the window of the old size that lies at (pad, pad) + shift, its mirror image."""
    height, width, _ = image.shape
    padded = np.zeros((height + 2 * pad, width + 2 * pad, 3), np.uint8)
    padded[pad : pad + height, pad : pad + width] = image
    top, left = pad + shift[0], pad + shift[1]
    window = padded[top : top + height, left : left + width]
    return window[:, ::-1] if flip else window


@pytest.mark.parametrize(("shape", "pad"), [((32, 32), 4), ((7, 12), 3), ((5, 4), 6), ((8, 8), 0)])
def test_crop_is_pad_crop_and_flip_of_each_image(shape: tuple[int, int], pad: int) -> None:
    raw = images(48, *shape)
    shift, flip = view(augment="crop", pad=pad).draw(48, shape, generator())
    moved = shift_and_flip(raw, shift, flip)
    assert moved.dtype == torch.uint8 and moved.shape == raw.shape
    for image, move, mirror, result in zip(raw, shift.tolist(), flip.tolist(), moved, strict=True):
        assert np.array_equal(result, pad_crop_flip(image.numpy(), move, mirror, pad))


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 6), st.integers(1, 6), st.integers(-8, 8), st.integers(-8, 8), st.booleans())
def test_any_shift_and_flip(height: int, width: int, down: int, right: int, flip: bool) -> None:
    raw = images(1, height, width) | 1  # no zero among them
    moved = shift_and_flip(raw, torch.tensor([[down, right]]), torch.tensor([flip]))
    assert np.array_equal(moved[0], pad_crop_flip(raw[0].numpy(), (down, right), flip, 8))


def test_training_batch_is_cropped_then_normalised() -> None:
    raw = images(8, 16, 16)
    see = view(augment="crop", pad=2, mean=MEAN, std=STD)
    draws = see.draw(8, (16, 16), generator())
    cropped = [
        pad_crop_flip(image.numpy(), shift, flip, 2)
        for image, shift, flip in zip(raw, draws[0].tolist(), draws[1].tolist(), strict=True)
    ]
    expected = (np.stack(cropped).astype(np.float64) / 255 - MEAN) / STD
    np.testing.assert_allclose(see.train(raw, draws).permute(0, 2, 3, 1), expected, atol=1e-5)


# Draws


@pytest.mark.parametrize("augment", ["crop", "resized_crop"])
def test_every_image_has_its_own_draw(augment: str) -> None:
    raw = images(1, 16, 16).expand(64, -1, -1, -1)
    see = view(augment=augment)
    assert distinct(see.train(raw, see.draw(64, (16, 16), generator()))) >= 40


def test_shifts_and_flips_are_uniform() -> None:
    shift, flip = view(augment="crop", pad=4).draw(8100, (32, 32), generator())
    counts = Counter(map(tuple, shift.tolist()))
    assert set(counts) == {(down, right) for down in range(-4, 5) for right in range(-4, 5)}
    assert min(counts.values()) >= 60 and max(counts.values()) <= 150  # 100 each, give or take 10
    assert 0.47 < flip.float().mean() < 0.53
    assert 0.45 < flip[shift[:, 1] > 0].float().mean() < 0.55  # whatever the shift


@pytest.mark.parametrize("augment", ["crop", "resized_crop"])
def test_no_flip_unless_wanted(augment: str) -> None:
    assert not view(augment=augment, flip=False).draw(500, (16, 16), generator())[-1].any()
    assert 200 < view(augment=augment).draw(500, (16, 16), generator())[-1].sum() < 300


def test_without_augmentation_training_sees_what_testing_sees() -> None:
    raw, see = images(4, 20, 20), view(mean=MEAN, std=STD)
    draws = see.draw(4, (20, 20), generator())
    assert draws == ()
    assert torch.equal(see.train(raw, draws), see.test(raw))


@pytest.mark.parametrize("augment", AUGMENTS)
def test_brightness_multiplies_each_image_by_a_factor_of_its_own(augment: str) -> None:
    raw, plain = images(300, 16, 16), view(augment=augment, mean=MEAN, std=STD)
    see = view(augment=augment, mean=MEAN, std=STD, brightness=0.25)
    *positions, factor = draws = see.draw(300, (16, 16), generator())
    assert all(torch.equal(a, b) for a, b in zip(positions, plain.draw(300, (16, 16), generator()), strict=True))
    assert 0.75 <= factor.min() < 0.76 and 1.24 < factor.max() <= 1.25
    mean, std = (torch.tensor(own)[:, None, None] for own in (MEAN, STD))
    pixels = plain.train(raw, tuple(positions)) * std + mean
    expected = ((factor[:, None, None, None] * pixels).clamp(max=1) - mean) / std
    torch.testing.assert_close(see.train(raw, draws), expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(see.test(raw), plain.test(raw))


@pytest.mark.parametrize("augment", ["crop", "resized_crop"])
def test_draws_depend_on_the_seed_alone(augment: str) -> None:
    see = view(augment=augment)
    before = torch.get_rng_state()
    draws = [see.draw(50, (16, 16), generator(seed)) for seed in (3, 3, 4)]
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(draws[0], draws[1], strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(draws[0], draws[2], strict=True))


@pytest.mark.parametrize("augment", AUGMENTS)
def test_pixels_do_not_depend_on_the_batch_size(augment: str) -> None:
    raw, labels = images(33, 16, 16), np.zeros(33, dtype=np.int64)

    def epoch(size: int) -> Tensor:
        task = Task(0, "task1", ("one",), 0, raw.numpy(), labels, view(augment=augment), torch.device("cpu"))
        seen = torch.full((33, 3, 16, 16), torch.nan)
        for batch in task.batches(size, seed=7):
            seen[batch.rows] = batch.x
        return seen

    assert torch.equal(epoch(5), epoch(33))
    assert torch.equal(epoch(5), epoch(8))


# Resized crop


def crop_by_torchvision(raw: Tensor, box: list[float], flip: bool, size: int) -> Tensor:
    top, left, height, width = (int(side) for side in box)
    image = transforms.resized_crop(channels_first(raw[None]), top, left, height, width, [size, size], antialias=False)
    return transforms.horizontal_flip(image)[0] if flip else image[0]


@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("size", [8, 24])
@pytest.mark.parametrize(
    "box",
    [
        [2.0, 3.0, 6.0, 5.0],
        [0.0, 0.0, 4.0, 9.0],
        [5.0, 7.0, 7.0, 8.0],
        [1.0, 1.0, 2.0, 3.0],
        [4.0, 4.0, 1.0, 1.0],
        [2.0, 1.0, 8.0, 9.0],
        [0.0, 0.0, 12.0, 15.0],
    ],
    ids=str,
)
def test_a_box_is_torchvision_s_to_the_rim(box: list[float], size: int, flip: bool) -> None:
    # Both are the same bilinear mean of four pixels in float32, so only rounding is left of values up to 255.
    raw = images(1, 12, 15)
    ours = resized_crop(raw, torch.tensor([box]), torch.tensor([flip]), size)[0]
    torch.testing.assert_close(ours, crop_by_torchvision(raw[0], box, flip, size), atol=2e-3, rtol=0)


def test_images_of_a_batch_have_their_own_boxes() -> None:
    raw, boxes = images(2, 12, 15), [[2.0, 3.0, 6.0, 5.0], [0.0, 0.0, 12.0, 15.0]]
    ours = resized_crop(raw, torch.tensor(boxes), torch.tensor([False, True]), 8)
    for i in range(2):
        torch.testing.assert_close(ours[i], crop_by_torchvision(raw[i], boxes[i], bool(i), 8), atol=2e-3, rtol=0)


def test_whole_image_at_its_own_size_is_unchanged() -> None:
    raw = images(3, 9, 9)
    boxes, flip = torch.tensor([[0.0, 0.0, 9.0, 9.0]] * 3), torch.tensor([False, True, False])
    expected = channels_first(raw)
    expected[1] = expected[1].flip(2)
    torch.testing.assert_close(resized_crop(raw, boxes, flip, 9), expected, atol=2e-3, rtol=0)


def test_resized_crop_is_normalised() -> None:
    raw, see = images(4, 20, 20), view(augment="resized_crop", mean=MEAN, std=STD)
    draws = see.draw(4, (20, 20), generator())
    expected = transforms.normalize(resized_crop(raw, *draws, size=16) / 255, list(MEAN), list(STD))
    torch.testing.assert_close(see.train(raw, draws), expected, atol=1e-5, rtol=1e-5)


def boxes_of_torchvision(count: int, shape: tuple[int, int], scale: tuple[float, float]) -> Tensor:
    image = torch.empty(3, *shape)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return torch.tensor(
            [RandomResizedCrop.get_params(image, list(scale), [3 / 4, 4 / 3]) for _ in range(count)]
        ).float()


def boxes_of_pearl(count: int, shape: tuple[int, int], scale: tuple[float, float]) -> Tensor:
    return view(augment="resized_crop", scale=scale).draw(count, shape, generator())[0]


def largest_gap(a: Tensor, b: Tensor) -> float:
    """Between the cumulative distributions of two samples (Kolmogorov and Smirnov)."""
    everywhere = torch.cat([a, b])
    shares = [torch.searchsorted(x.sort().values, everywhere, right=True) / len(x) for x in (a, b)]
    return float((shares[0] - shares[1]).abs().max())


@pytest.mark.parametrize(
    ("shape", "scale"),
    [((64, 64), (0.08, 1.0)), ((64, 64), (0.05, 0.4)), ((96, 64), (0.08, 1.0)), ((48, 64), (0.1, 0.5))],
)
def test_boxes_are_distributed_as_torchvision_s(shape: tuple[int, int], scale: tuple[float, float]) -> None:
    count, (height, width) = 3000, shape
    ours, theirs = boxes_of_pearl(count, shape, scale), boxes_of_torchvision(count, shape, scale)
    assert (ours == ours.round()).all()
    top, left, tall, wide = ours.unbind(1)
    assert (top >= 0).all() and (left >= 0).all() and (tall >= 1).all() and (wide >= 1).all()
    assert (top + tall <= height).all() and (left + wide <= width).all()
    assert (abs(tall * wide / (height * width) - sum(scale) / 2) <= (scale[1] - scale[0]) / 2 + 0.02).all()  # rounded
    assert (abs((wide / tall).log()) <= math.log(4 / 3) + 0.08).all()
    for what in (
        lambda box: box[:, 2] * box[:, 3],
        lambda box: box[:, 3] / box[:, 2],
        lambda box: box[:, 0] / (height + 1 - box[:, 2]),
        lambda box: box[:, 1] / (width + 1 - box[:, 3]),
    ):
        mine, other = what(ours), what(theirs)
        assert abs(mine.mean() - other.mean()) < 0.1 * other.std()
        # two samples of 3,000 of the same distribution lie further apart than this once in a thousand times
        assert largest_gap(mine, other) < 0.05


@pytest.mark.parametrize("shape", [(8, 40), (40, 8), (7, 30)])
def test_box_that_cannot_fit_is_the_middle_of_the_image(shape: tuple[int, int]) -> None:
    ours, theirs = boxes_of_pearl(20, shape, (1.0, 1.0)), boxes_of_torchvision(20, shape, (1.0, 1.0))
    assert torch.equal(ours[:, 2:], theirs[:, 2:])
    assert (abs(ours[:, :2] - theirs[:, :2]) <= 0.5).all()  # torchvision rounds down


# Test view


def by_torchvision(raw: Tensor, size: int, resize: int) -> Tensor:
    steps = [
        v2.ToDtype(torch.float32, scale=True),
        v2.Resize([resize], antialias=True),
        v2.CenterCrop([size, size]),
        v2.Normalize(list(MEAN), list(STD)),
    ]
    return v2.Compose(steps)(raw.permute(0, 3, 1, 2))


@pytest.mark.parametrize(
    ("shape", "size", "resize"),
    [
        ((16, 16), 16, None),
        ((16, 16), 8, 16),
        ((64, 64), 28, 32),  # smaller
        ((64, 64), 56, 64),
        ((20, 20), 28, 32),  # larger
        ((33, 33), 28, 28),
        ((30, 40), 24, 24),
        ((40, 30), 24, 28),
        ((32, 48), 24, 24),
        ((32, 48), 24, 32),
        ((35, 35), 28, 35),  # an odd margin, or a side that is not whole
        ((32, 48), 24, 26),
        ((17, 51), 9, 12),
        ((30, 20), 8, 13),
    ],
)
def test_test_view_is_resize_and_centre_crop(shape: tuple[int, int], size: int, resize: int | None) -> None:
    raw = images(3, *shape)
    seen = view(size, resize=resize, mean=MEAN, std=STD).test(raw)
    torch.testing.assert_close(seen, by_torchvision(raw, size, resize or size), atol=1e-5, rtol=1e-5)


def test_crop_of_larger_images_is_moved_before_it_is_resized() -> None:
    raw, see = images(4, 20, 20), view(augment="crop", mean=MEAN, std=STD)
    draws = see.draw(4, (20, 20), generator())
    assert torch.equal(see.train(raw, draws), see.test(shift_and_flip(raw, *draws)))


# What every view gives


@pytest.mark.parametrize("value", [0, 51, 255])
def test_numbers_of_normalisation(value: int) -> None:
    raw = torch.full((1, 16, 16, 3), value, dtype=torch.uint8)
    seen = view(mean=MEAN, std=STD).test(raw)
    for channel in range(3):
        expected = (value / 255 - MEAN[channel]) / STD[channel]
        torch.testing.assert_close(seen[0, channel], torch.full((16, 16), expected), atol=1e-6, rtol=1e-6)


def test_pixels_lie_between_0_and_1_without_mean_and_std() -> None:
    raw = torch.tensor([0, 255], dtype=torch.uint8).repeat(16, 8)[None, :, :, None].expand(-1, -1, -1, 3)
    assert set(view().test(raw).unique().tolist()) == {0.0, 1.0}


@pytest.mark.parametrize("augment", AUGMENTS)
@pytest.mark.parametrize("stored", [16, 20])
def test_shape_dtype_and_layout(augment: str, stored: int) -> None:
    raw, config = images(5, stored, stored), ImagesConfig(size=16, augment=augment, mean=MEAN, std=STD)
    made = {}
    for layout in (True, False):
        see = View(config, channels_last=layout)
        made[layout] = (see.test(raw), see.train(raw, see.draw(5, (stored, stored), generator())))
        for x in made[layout]:
            assert x.shape == (5, 3, 16, 16) and x.dtype == torch.float32
            assert x.stride() == ((768, 1, 48, 3) if layout else (768, 256, 16, 1))
    assert all(torch.equal(a, b) for a, b in zip(made[True], made[False], strict=True))
