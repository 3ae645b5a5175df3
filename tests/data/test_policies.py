"""Policy augmentation, against torchvision's operations on uint8 images, one image at a time."""

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torchvision.transforms import AutoAugment, AutoAugmentPolicy, InterpolationMode, RandAugment, TrivialAugmentWide
from torchvision.transforms import functional as transforms

from pearl.data.augment import View
from pearl.data.batches import Task
from pearl.data.policies import CIFAR, FILL, USUAL, Operation, augmented, blended, draw_policy, moved, tabulated
from pearl.settings.sections import ImagesConfig, TrainConfig
from pearl.testing.fake_device import CROSSED, FAKE_DEVICE, fake_device

O = Operation  # noqa: E741
NAMED = {each.name.title().replace("_", ""): each for each in Operation if each != O.AUTOCONTRAST}
NAMED["AutoContrast"] = O.AUTOCONTRAST
POLICIES = ("autoaugment", "randaugment", "trivialaugment")


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def photos(count: int, height: int = 32, width: int = 32, seed: int = 0) -> Tensor:
    """Images (B, H, W, 3) uint8: noise over a gradient of few values, so that no two channels have the same range."""
    slope = torch.linspace(20, 190, width)[:, None] * torch.tensor([1.0, 0.7, 0.4])
    noise = 30 * torch.rand(count, height, width, 3, generator=generator(seed))
    return (slope + noise).to(torch.uint8)


def expected(image: Tensor, kind: Operation, value: float) -> Tensor:
    """One image (H, W, 3) by torchvision."""
    x = image.permute(2, 0, 1)
    still: dict[str, Any] = {"angle": 0.0, "translate": [0, 0], "scale": 1.0, "shear": [0.0, 0.0]}
    around = {"fill": [FILL] * 3, "interpolation": InterpolationMode.NEAREST}
    degrees = math.degrees(math.atan(value))
    made = {
        O.IDENTITY: lambda: x,
        O.SHEAR_X: lambda: transforms.affine(x, **still | {"shear": [degrees, 0.0]}, center=[0, 0], **around),
        O.SHEAR_Y: lambda: transforms.affine(x, **still | {"shear": [0.0, degrees]}, center=[0, 0], **around),
        O.TRANSLATE_X: lambda: transforms.affine(x, **still | {"translate": [int(value), 0]}, **around),
        O.TRANSLATE_Y: lambda: transforms.affine(x, **still | {"translate": [0, int(value)]}, **around),
        O.ROTATE: lambda: transforms.rotate(x, value, **around),
        O.BRIGHTNESS: lambda: transforms.adjust_brightness(x, value),
        O.CONTRAST: lambda: transforms.adjust_contrast(x, value),
        O.COLOR: lambda: transforms.adjust_saturation(x, value),
        O.SHARPNESS: lambda: transforms.adjust_sharpness(x, value),
        O.POSTERIZE: lambda: transforms.posterize(x, int(value)),
        O.SOLARIZE: lambda: transforms.solarize(x, value),
        O.AUTOCONTRAST: lambda: transforms.autocontrast(x),
        O.EQUALIZE: lambda: transforms.equalize(x),
        O.INVERT: lambda: transforms.invert(x),
    }[kind]()
    return made.permute(1, 2, 0)


VALUES = {
    **dict.fromkeys([O.IDENTITY, O.AUTOCONTRAST, O.EQUALIZE, O.INVERT], (0.0,)),
    **dict.fromkeys([O.SHEAR_X, O.SHEAR_Y], (-0.3, -0.07, 0.0, 0.13, 0.99)),
    **dict.fromkeys([O.TRANSLATE_X, O.TRANSLATE_Y], (-14.0, -1.0, 0.0, 5.0, 32.0)),
    O.ROTATE: (-135.0, -30.0, 0.0, 6.7, 89.0),
    **dict.fromkeys([O.BRIGHTNESS, O.CONTRAST, O.COLOR, O.SHARPNESS], (0.01, 0.1, 0.7, 1.0, 1.27, 1.99)),
    O.POSTERIZE: (2.0, 4.0, 7.0, 8.0),
    O.SOLARIZE: (0.0, 28.33, 113.0, 255.0),
}


@pytest.mark.parametrize("shape", [(32, 32), (20, 33)])
@pytest.mark.parametrize("kind", Operation)
def test_operations_are_torchvisions(kind: Operation, shape: tuple[int, int]) -> None:
    values = VALUES[kind]
    raw = photos(len(values), *shape)
    draws = torch.tensor([[[float(kind), value]] for value in values])
    actual = augmented(raw, draws)
    assert actual.dtype == torch.uint8 and actual.shape == raw.shape
    for image, value, result in zip(raw, values, actual, strict=True):
        apart = (result.int() - expected(image, kind, value).int()).abs()
        if kind <= O.ROTATE:  # a pixel halfway between two may be either
            assert (apart > 0).any(-1).float().mean() < 0.02, value
        else:
            assert apart.max() <= 1 and (apart > 0).float().mean() < 0.05, value  # whole before rounding: either


def test_images_of_one_value_are_kept_by_autocontrast_and_equalize() -> None:
    raw = torch.full((2, 8, 8, 3), 77, dtype=torch.uint8)
    draws = torch.tensor([[[float(O.AUTOCONTRAST), 0.0]], [[float(O.EQUALIZE), 0.0]]])
    assert torch.equal(augmented(raw, draws), raw)


def test_images_below_three_pixels_are_not_smoothed() -> None:
    raw = photos(1, 2, 2)
    assert torch.equal(augmented(raw, torch.tensor([[[float(O.SHARPNESS), 0.1]]])), raw)


def test_slots_follow_one_another_and_images_do_not_depend_on_each_other() -> None:
    raw, draws = photos(60), draw_policy("autoaugment", 60, (32, 32), generator())
    together = augmented(raw, draws)
    for row in range(60):
        alone = augmented(raw[row : row + 1], draws[row : row + 1])
        steps = augmented(augmented(raw[row : row + 1], draws[row : row + 1, :1]), draws[row : row + 1, 1:])
        assert torch.equal(alone[0], together[row]) and torch.equal(steps, alone)


# Draws


def test_the_policy_is_the_published_one() -> None:
    """As torchvision has it; its operations without strength have None for a level."""
    theirs = AutoAugment(AutoAugmentPolicy.CIFAR10).policies
    names = {kind: name for name, kind in NAMED.items()}
    level = lambda step: step[2] if step[0] in STRENGTH else None  # noqa: E731
    assert [tuple((names[s[0]], s[1], level(s)) for s in two) for two in CIFAR] == theirs


STRENGTH = [each for each in Operation if each not in (O.IDENTITY, O.AUTOCONTRAST, O.EQUALIZE, O.INVERT)]
THEIRS = {
    "autoaugment": lambda: AutoAugment(AutoAugmentPolicy.CIFAR10)._augmentation_space(10, (32, 32)),
    "randaugment": lambda: RandAugment()._augmentation_space(31, (32, 32)),
    "trivialaugment": lambda: TrivialAugmentWide()._augmentation_space(31),
}


@pytest.mark.parametrize("policy", POLICIES)
def test_strengths_are_torchvisions(policy: Any) -> None:
    draws = draw_policy(policy, 20_000, (32, 32), generator()).flatten(0, 1)
    for name, (levels, signed) in THEIRS[policy]().items():
        kind = NAMED[name]
        actual = {round(float(value), 4) for value in draws[draws[:, 0] == kind, 1].unique()}
        every = {float(each) for each in levels.flatten()} if levels.numel() else {0.0}
        if policy == "randaugment":
            every = {float(levels.flatten()[9])} if levels.ndim else every
        if name.startswith("Translate"):
            every = {float(int(each + 1e-3)) for each in every}  # theirs has 15.999999 for 16
        every |= {-each for each in every} if signed else set()
        if name in ("Brightness", "Color", "Contrast", "Sharpness"):
            every = {1 + each for each in every}
        if policy == "autoaugment":  # of the levels, those that the policy has
            assert actual <= {round(each, 4) for each in every}, name
        else:
            assert actual == {round(each, 4) for each in every}, name


def test_shares_of_operations() -> None:
    count = 50_000
    for policy, kinds in (("randaugment", USUAL), ("trivialaugment", USUAL)):
        drawn = draw_policy(policy, count, (32, 32), generator())[..., 0]
        shares = Counter(drawn.flatten().long().tolist())
        assert set(shares) == set(kinds.tolist())
        assert all(abs(n / drawn.numel() - 1 / len(kinds)) < 0.005 for n in shares.values())
    drawn = draw_policy("autoaugment", count, (32, 32), generator())[..., 0]
    for slot in range(2):
        expected = Counter[int]()
        for two in CIFAR:
            kind, share, _ = two[slot]
            expected[int(kind)] += share / len(CIFAR)
            expected[int(O.IDENTITY)] += (1 - share) / len(CIFAR)
        actual = Counter(drawn[:, slot].long().tolist())
        assert all(abs(actual[kind] / count - share) < 0.01 for kind, share in expected.items())


def test_half_of_the_signed_strengths_are_negative() -> None:
    draws = draw_policy("trivialaugment", 20_000, (32, 32), generator())[:, 0]
    for kind in (O.ROTATE, O.TRANSLATE_X, O.SHEAR_Y):
        values = draws[draws[:, 0] == kind, 1]
        assert 0.4 < (values[values != 0] < 0).float().mean() < 0.6
    factors = draws[draws[:, 0] == O.COLOR, 1]
    assert 0.4 < (factors[factors != 1] < 1).float().mean() < 0.6


@pytest.mark.parametrize("policy", POLICIES)
def test_a_gpu_does_the_same_without_choosing_rows(policy: Any) -> None:
    """There every step runs on all images; on a CPU on those that it changes."""
    raw, draws = photos(100), draw_policy(policy, 100, (32, 32), generator())
    plain = raw
    for slot in range(draws.shape[1]):
        for step in (moved, blended, tabulated):
            plain = step(plain, *draws[:, slot].unbind(1))
    assert torch.equal(augmented(raw, draws), plain) and not torch.equal(plain, raw)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_gpu_never_waits(policy: Any) -> None:
    see, raw = view(augment="crop", policy=policy), photos(20)
    draws = see.draw(20, (32, 32), generator())
    with fake_device():
        there = raw.to(FAKE_DEVICE), tuple(each.to(FAKE_DEVICE) for each in draws)
        see.train(*there)  # the first call copies the constants of normalisation
        CROSSED.clear()
        actual = see.train(*there)
        assert not CROSSED
        actual = actual.cpu()
    torch.testing.assert_close(actual, see.train(raw, draws))


# In a view and in batches


def view(**config: Any) -> View:
    return View(ImagesConfig(size=32, **config))


@pytest.mark.parametrize("augment", ["none", "crop", "resized_crop"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_follows_crop_and_flip_and_precedes_brightness(policy: Any, augment: Any) -> None:
    raw, plain = photos(40), view(augment=augment)
    see = view(augment=augment, policy=policy, brightness=0.3)
    *positions, drawn, factor = draws = see.draw(40, (32, 32), generator())
    assert all(torch.equal(a, b) for a, b in zip(positions, plain.draw(40, (32, 32), generator()), strict=True))
    placed = (plain.train(raw, tuple(positions)) * 255).round().to(torch.uint8).permute(0, 2, 3, 1)
    pixels = factor[:, None, None, None] * augmented(placed, drawn).permute(0, 3, 1, 2)
    apart = (see.train(raw, draws) - pixels.clamp(max=255) / 255).abs()
    assert (apart > 1e-5).float().mean() < 0.01  # a resized value halfway between two may be rounded to either
    assert torch.equal(see.test(raw), plain.test(raw))


def task(policy: str) -> Task:
    names = tuple(map(str, range(5)))
    labels = np.repeat(np.arange(5), 6)
    return Task(
        0, "all", names, 0, photos(30).numpy(), labels, view(augment="crop", policy=policy), torch.device("cpu")
    )


@pytest.mark.parametrize("policy", POLICIES)
def test_pixels_depend_on_image_and_epoch_alone(policy: str) -> None:
    """Whatever the size of the batches, and when an epoch is resumed."""
    of = task(policy)
    at_once = {int(row): x for batch in of.batches(30, seed=4) for x, row in zip(batch.x, batch.rows, strict=True)}
    in_parts = [(int(row), x) for batch in of.batches(8, seed=4) for x, row in zip(batch.x, batch.rows, strict=True)]
    assert all(torch.equal(x, at_once[row]) for row, x in in_parts) and len(in_parts) == 30
    resumed = [*of.batches(8, seed=4, skip=2)]
    assert torch.equal(torch.cat([batch.x for batch in resumed]), torch.stack([x for _, x in in_parts[16:]]))
    (other,) = of.batches(30, seed=5)
    assert not any(torch.equal(x, at_once[int(row)]) for x, row in zip(other.x, other.rows, strict=True))


def test_a_phase_may_have_its_own_policy() -> None:
    settings = TrainConfig(phases={"probe": {"images": {"policy": "randaugment"}}})
    changes = settings.phase("probe").images.model_dump(exclude_unset=True)
    assert view(policy="autoaugment").with_changes(changes).images.policy == "randaugment"
