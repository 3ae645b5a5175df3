"""Strong views, change by change, against torchvision."""

import pytest
import torch
from torchvision.transforms.v2 import functional as transforms

from pearl.data.augment import View
from pearl.data.strong import StrongView, blurred, brighter, contrasted, greyscale, jittered, saturated, turned
from pearl.settings.sections import ImagesConfig


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def pictures(count=6, size=12):
    x = torch.rand(count, 3, size, size, generator=generator())
    x[0, :, 0, 0] = 0.5  # a pixel without a hue
    return x


def column(values):
    return torch.tensor(values)[:, None, None, None]


@pytest.mark.parametrize(
    ("ours", "theirs", "factors"),
    [
        (brighter, transforms.adjust_brightness, [0.6, 0.9, 1.0, 1.1, 1.3, 1.4]),
        (contrasted, transforms.adjust_contrast, [0.6, 0.9, 1.0, 1.1, 1.3, 1.4]),
        (saturated, transforms.adjust_saturation, [0.6, 0.9, 1.0, 1.1, 1.3, 1.4]),
        (turned, transforms.adjust_hue, [-0.1, -0.05, 0.0, 0.02, 0.07, 0.1]),
    ],
)
def test_a_change_of_colour_is_torchvisions_with_a_factor_for_each_image(ours, theirs, factors):
    x = pictures()
    expected = torch.stack([theirs(image, factor) for image, factor in zip(x, factors, strict=True)])
    torch.testing.assert_close(ours(x, column(factors)), expected, atol=3e-4, rtol=0)  # its grey has other last digits


def test_colours_change_in_each_images_own_order():
    x = pictures(2)
    changes = torch.tensor([[0.7, 1.3, 1.4, 0.1], [1.4, 0.6, 0.7, -0.1]])
    order = torch.tensor([[3, 0, 2, 1], [1, 2, 3, 0]])
    names = ("brightness", "contrast", "saturation", "hue")
    for i, made in enumerate(jittered(x, changes, order)):
        image = x[i]
        for kind in order[i].tolist():
            image = getattr(transforms, f"adjust_{names[kind]}")(image, float(changes[i, kind]))
        torch.testing.assert_close(made, image, atol=1e-3, rtol=0)
    other = jittered(x, changes, order.flip(1))
    assert not torch.allclose(other, jittered(x, changes, order), atol=1e-2)


@pytest.mark.parametrize("kernel", [3, 7])
def test_a_blur_is_torchvisions_with_a_sigma_for_each_image(kernel):
    x = pictures(3)
    sigma = [0.3, 1.0, 2.0]
    expected = torch.stack(
        [transforms.gaussian_blur(im, [kernel] * 2, [s] * 2) for im, s in zip(x, sigma, strict=True)]
    )
    torch.testing.assert_close(blurred(x, torch.tensor(sigma), kernel), expected, atol=1e-5, rtol=0)
    assert torch.equal(blurred(x, torch.zeros(3), kernel), x)


def test_as_many_images_are_changed_as_asked():
    view = StrongView(View(ImagesConfig(size=64)), (0.2, 1.0))
    boxes, flip, changes, order, grey, sigma = view.draw(4000, (64, 64), generator())
    area = boxes[:, 2] * boxes[:, 3] / 64**2
    assert 0.18 < float(area.min()) < 0.22 and float(area.max()) <= 1
    jitters = (changes != torch.tensor([1.0, 1.0, 1.0, 0.0])).any(1)
    for shares, expected in ((flip, 0.5), (jitters, 0.8), (grey, 0.2), (sigma > 0, 0.5)):
        assert float(shares.float().mean()) == pytest.approx(expected, abs=0.03)
    assert changes[:, :3].min() >= 0.6 and changes[:, :3].max() <= 1.4 and changes[:, 3].abs().max() <= 0.1
    assert sigma[sigma > 0].min() >= 0.1 and sigma.max() <= 2.0
    assert len({tuple(row) for row in order.tolist()}) == 24
    small = StrongView(View(ImagesConfig(size=32)), (0.2, 1.0)).draw(100, (32, 32), generator())
    assert not small[-1].any(), "images of 32 pixels are not blurred"
    digits = StrongView(View(ImagesConfig(size=32, flip=False)), (0.2, 1.0)).draw(100, (32, 32), generator())
    assert not digits[1].any()


def test_two_views_of_each_image_differ_and_depend_on_it_alone():
    raw = torch.randint(0, 256, (5, 40, 40, 3), generator=generator(), dtype=torch.uint8)
    view = StrongView(View(ImagesConfig(size=40, mean=(0.5, 0.5, 0.5), std=(0.2, 0.2, 0.2))), (0.2, 1.0), views=2)
    draws = view.draw(5, (40, 40), generator(1))
    x = view.train(raw, draws)
    assert x.shape == (10, 3, 40, 40) and not any(torch.allclose(x[i], x[5 + i], atol=0.1) for i in range(5))
    rows = torch.tensor([3, 1])
    torch.testing.assert_close(view.train(raw[rows], tuple(draw[rows] for draw in draws)), x[[3, 1, 8, 6]])
    one = StrongView(view, (0.2, 1.0)).train(raw, draws[:6])
    assert torch.equal(one, x[:5])
    assert float(x.min()) >= -2.5 - 1e-4 and float(x.max()) <= 2.5 + 1e-4  # of [0, 1], normalised


def test_grey_has_one_value_a_pixel():
    x = pictures()
    torch.testing.assert_close(greyscale(x), transforms.rgb_to_grayscale(x), atol=1e-3, rtol=0)
