"""Policy augmentation: AutoAugment, RandAugment and TrivialAugment for a whole batch at once, on its device.

An image passes one or two slots. In a slot it has one operation and its strength, both drawn on the CPU with the other
draws of the epoch. All operations together are four steps of fixed shape: a gather of pixels (geometry), a blend with
another image (brightness, contrast, colour, sharpness), a histogram, and a table of 256 values per channel (the rest).
No step depends on a value on the device, so the host never waits.

The operations are those of Pillow and of torchvision's uint8 tensors. Pixels from outside an image are mid-grey, as in
AutoAugment's code.
"""

from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from pearl.settings.sections import Policy

FILL = 128  # of pixels from outside an image
GREY = (0.2989, 0.587, 0.114)  # weights of red, green and blue
SMOOTH = ((1, 1, 1), (1, 5, 1), (1, 1, 1))  # Pillow's filter, divided by its sum


class Operation(IntEnum):
    """An operation on images, with the unit of its strength."""

    IDENTITY = 0
    SHEAR_X = 1  # pixels to the side per pixel down
    SHEAR_Y = 2
    TRANSLATE_X = 3  # whole pixels
    TRANSLATE_Y = 4
    ROTATE = 5  # degrees, counter-clockwise
    BRIGHTNESS = 6  # this and the next three: factor
    CONTRAST = 7
    COLOR = 8
    SHARPNESS = 9
    POSTERIZE = 10  # kept bits
    SOLARIZE = 11  # threshold from which values are inverted
    AUTOCONTRAST = 12  # this and the next two have no strength
    EQUALIZE = 13
    INVERT = 14


O = Operation  # noqa: E741 - short for the tables below
SIGNED = (O.SHEAR_X, O.SHEAR_Y, O.TRANSLATE_X, O.TRANSLATE_Y, O.ROTATE, O.BRIGHTNESS, O.CONTRAST, O.COLOR, O.SHARPNESS)
FACTORS = (O.BRIGHTNESS, O.CONTRAST, O.COLOR, O.SHARPNESS)


class Most(NamedTuple):
    """The greatest strengths of a policy. A translation is in pixels or, below 1, a share of the image's side."""

    shear: float
    translate: float
    rotate: float
    factor: float  # difference from 1
    bits: int  # removed by posterize
    levels: int  # steps from strength 0 to these


AUTO = Most(0.3, 150 / 331, 30, 0.9, 4, 10)
RANDOM = Most(0.3, 150 / 331, 30, 0.9, 4, 31)
WIDE = Most(0.99, 32, 135, 0.99, 6, 31)

# AutoAugment's policy for CIFAR-10 (Cubuk et al., CVPR 2019, table 7): operation, probability, level from 0 to 9
Step = tuple[Operation, float, int]
CIFAR: tuple[tuple[Step, Step], ...] = (
    ((O.INVERT, 0.1, 0), (O.CONTRAST, 0.2, 6)),
    ((O.ROTATE, 0.7, 2), (O.TRANSLATE_X, 0.3, 9)),
    ((O.SHARPNESS, 0.8, 1), (O.SHARPNESS, 0.9, 3)),
    ((O.SHEAR_Y, 0.5, 8), (O.TRANSLATE_Y, 0.7, 9)),
    ((O.AUTOCONTRAST, 0.5, 0), (O.EQUALIZE, 0.9, 0)),
    ((O.SHEAR_Y, 0.2, 7), (O.POSTERIZE, 0.3, 7)),
    ((O.COLOR, 0.4, 3), (O.BRIGHTNESS, 0.6, 7)),
    ((O.SHARPNESS, 0.3, 9), (O.BRIGHTNESS, 0.7, 9)),
    ((O.EQUALIZE, 0.6, 0), (O.EQUALIZE, 0.5, 0)),
    ((O.CONTRAST, 0.6, 7), (O.SHARPNESS, 0.6, 5)),
    ((O.COLOR, 0.7, 7), (O.TRANSLATE_X, 0.5, 8)),
    ((O.EQUALIZE, 0.3, 0), (O.AUTOCONTRAST, 0.4, 0)),
    ((O.TRANSLATE_Y, 0.4, 3), (O.SHARPNESS, 0.2, 6)),
    ((O.BRIGHTNESS, 0.9, 6), (O.COLOR, 0.2, 8)),
    ((O.SOLARIZE, 0.5, 2), (O.INVERT, 0.0, 0)),
    ((O.EQUALIZE, 0.2, 0), (O.AUTOCONTRAST, 0.6, 0)),
    ((O.EQUALIZE, 0.2, 0), (O.EQUALIZE, 0.6, 0)),
    ((O.COLOR, 0.9, 9), (O.EQUALIZE, 0.6, 0)),
    ((O.AUTOCONTRAST, 0.8, 0), (O.SOLARIZE, 0.2, 8)),
    ((O.BRIGHTNESS, 0.1, 3), (O.COLOR, 0.7, 0)),
    ((O.SOLARIZE, 0.4, 5), (O.AUTOCONTRAST, 0.9, 0)),
    ((O.TRANSLATE_Y, 0.9, 9), (O.TRANSLATE_Y, 0.7, 9)),
    ((O.AUTOCONTRAST, 0.9, 0), (O.SOLARIZE, 0.8, 3)),
    ((O.EQUALIZE, 0.8, 0), (O.INVERT, 0.1, 0)),
    ((O.TRANSLATE_Y, 0.7, 9), (O.AUTOCONTRAST, 0.9, 0)),
)
# Those of RandAugment (Cubuk et al., 2020) and of TrivialAugment, wide (Müller and Hutter, ICCV 2021).
USUAL = torch.tensor([each for each in Operation if each != O.INVERT])
SLOTS, LEVEL = 2, 9  # of RandAugment: operations per image, and their level of 30


def draw_policy(policy: Policy, count: int, shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    """Draw operations and strengths for images of `shape` (H, W): (count, slots, 2) float32."""
    if policy == "autoaugment":
        which = torch.randint(len(CIFAR), (count,), generator=generator)
        kinds, shares, levels = (torch.tensor([[step[i] for step in two] for two in CIFAR])[which] for i in range(3))
        kinds = torch.where(torch.rand(count, 2, generator=generator) < shares, kinds, O.IDENTITY)
        most = AUTO
    elif policy == "randaugment":
        kinds = USUAL[torch.randint(len(USUAL), (count, SLOTS), generator=generator)]
        levels, most = torch.full((count, SLOTS), LEVEL), RANDOM
    else:
        kinds = USUAL[torch.randint(len(USUAL), (count, 1), generator=generator)]
        levels, most = torch.randint(WIDE.levels, (count, 1), generator=generator), WIDE
    negative = torch.randint(2, kinds.shape, generator=generator).bool()
    values = strengths(most, shape)[kinds, levels]
    values = torch.where(negative & torch.isin(kinds, torch.tensor(SIGNED)), -values, values)
    values = values + torch.isin(kinds, torch.tensor(FACTORS))  # a factor is around 1
    return torch.stack([kinds.float(), values], dim=2)


def strengths(most: Most, shape: tuple[int, int]) -> Tensor:
    """Return the strength of each operation, without sign, at each level: (operations, levels) float32."""
    rising = torch.linspace(0, 1, most.levels, dtype=torch.float64)
    tall, wide = (most.translate * (side if most.translate < 1 else 1) for side in shape)
    table = torch.zeros(len(Operation), most.levels, dtype=torch.float64)
    table[[O.SHEAR_X, O.SHEAR_Y]] = most.shear * rising
    table[O.TRANSLATE_X], table[O.TRANSLATE_Y] = (wide * rising).floor(), (tall * rising).floor()
    table[O.ROTATE] = most.rotate * rising
    table[list(FACTORS)] = most.factor * rising
    table[O.POSTERIZE] = 8 - (most.bits * rising).round()
    table[O.SOLARIZE] = 255 * (1 - rising)
    return table.float()


def augmented(raw: Tensor, draws: Tensor) -> Tensor:
    """Apply the drawn operations (B, slots, 2) to images (B, H, W, 3) uint8, slot by slot."""
    for kind, value in (slot.unbind(1) for slot in draws.unbind(1)):
        for first, last, change in (
            (O.SHEAR_X, O.ROTATE, moved),
            (O.BRIGHTNESS, O.SHARPNESS, blended),
            (O.POSTERIZE, O.INVERT, tabulated),
        ):
            if raw.device.type != "cpu":  # to know which images change would make the host wait
                raw = change(raw, kind, value)
            elif len(rows := ((kind >= first) & (kind <= last)).nonzero()[:, 0]):
                raw = raw.index_copy(0, rows, change(raw[rows], kind[rows], value[rows]))
    return raw


def moved(raw: Tensor, kind: Tensor, value: Tensor) -> Tensor:
    """Shear, translate or rotate images; the nearest pixel is taken.

    A shear is around the top left corner, a rotation around the centre. Other images are unchanged.
    """
    count, height, width, _ = raw.shape

    def amount(of: Operation) -> Tensor:
        return torch.where(kind == of, value, 0.0)[:, None, None]

    x = torch.arange(width, device=raw.device, dtype=torch.float32) + 0.5  # centres of pixels
    y = (torch.arange(height, device=raw.device, dtype=torch.float32) + 0.5)[:, None]
    angle = torch.deg2rad(amount(O.ROTATE))
    cos, sin = angle.cos(), angle.sin()
    right, down = x - width / 2, y - height / 2
    from_x = width / 2 + cos * right - sin * down + amount(O.SHEAR_X) * y - amount(O.TRANSLATE_X)
    from_y = height / 2 + sin * right + cos * down + amount(O.SHEAR_Y) * x - amount(O.TRANSLATE_Y)
    inside = (from_x >= 0) & (from_x < width) & (from_y >= 0) & (from_y < height)
    first = torch.arange(0, count * height, height, device=raw.device)[:, None, None]  # row of each image
    rows, columns = from_y.floor().long().clamp(0, height - 1), from_x.floor().long().clamp(0, width - 1)
    pixels = (first + rows) * width + columns
    gathered = raw.flatten(0, 2).index_select(0, pixels.flatten()).view_as(raw)
    return torch.where(inside[..., None], gathered, FILL)


def blended(raw: Tensor, kind: Tensor, value: Tensor) -> Tensor:
    """Change brightness, contrast, colour or sharpness: interpolate or extrapolate from another image.

    The other image is black, the mean grey, the grey image or a smoothed one. Other images are unchanged.
    """
    x = raw.float()
    kind, factor = kind[:, None, None, None], value[:, None, None, None]
    grey = (GREY[0] * x[..., :1] + GREY[1] * x[..., 1:2] + GREY[2] * x[..., 2:]).floor()
    other = torch.where(kind == O.CONTRAST, grey.mean((1, 2), keepdim=True), 0.0)
    other = torch.where(kind == O.COLOR, grey, other)
    other = torch.where(kind == O.SHARPNESS, smoothed(x), other)
    changed = (factor * x + (1 - factor) * other).clamp(0, 255).floor()
    return torch.where((kind >= O.BRIGHTNESS) & (kind <= O.SHARPNESS), changed, x).to(torch.uint8)


def smoothed(x: Tensor) -> Tensor:
    """Smooth images (B, H, W, 3) float32 by 3 x 3 pixels and round; pixels on the border are unchanged."""
    if min(x.shape[1:3]) < 3:
        return x
    result = x.clone()
    total = torch.zeros_like(x[:, 1:-1, 1:-1])
    for row, weights in enumerate(SMOOTH):
        for column, weight in enumerate(weights):
            total += weight * x[:, row : x.shape[1] - 2 + row, column : x.shape[2] - 2 + column]
    result[:, 1:-1, 1:-1] = (total / sum(map(sum, SMOOTH))).round()
    return result


def tabulated(raw: Tensor, kind: Tensor, value: Tensor) -> Tensor:
    """Posterize, solarize, autocontrast, equalize or invert: each channel by a table of 256 values of its own."""
    flat = raw.flatten(1, 2).long()  # (B, H W, 3)
    levels = torch.arange(256, device=raw.device)[None, :, None]
    kind, value = kind[:, None, None], value[:, None, None]
    histogram = torch.zeros(len(raw), 256, 3, dtype=torch.int32, device=raw.device)
    histogram.scatter_add_(1, flat, torch.ones((), dtype=torch.int32, device=raw.device).expand_as(flat))
    step = torch.where(kind == O.POSTERIZE, 2 ** (8 - value.long()).clamp(0, 8), 1)
    table = levels // step * step
    above = (kind == O.SOLARIZE) & (levels >= value)
    table = torch.where((kind == O.INVERT) | above, 255 - levels, table)
    table = torch.where(kind == O.AUTOCONTRAST, stretching(flat, levels), table)
    table = torch.where(kind == O.EQUALIZE, equalizing(histogram, levels), table)
    return table.to(torch.uint8).expand(len(raw), 256, 3).gather(1, flat).view_as(raw)


def stretching(flat: Tensor, levels: Tensor) -> Tensor:
    """Return the tables (B, 256, 3) that map a channel's darkest value to 0 and its brightest to 255."""
    low, high = flat.amin(1, keepdim=True), flat.amax(1, keepdim=True)
    scale = 255 / (high - low).clamp(min=1).float()
    stretched = ((levels - low).float() * scale).clamp(0, 255).long()
    return torch.where(high > low, stretched, levels)


def equalizing(histogram: Tensor, levels: Tensor) -> Tensor:
    """Return the tables (B, 256, 3) that make a channel's values equally frequent, as Pillow computes them."""
    pixels = histogram.sum(1, keepdim=True)
    brightest = torch.where(histogram > 0, levels, -1).amax(1, keepdim=True)
    step = (pixels - histogram.gather(1, brightest)) // 255  # without the brightest value's pixels
    below = histogram.cumsum(1) - histogram
    made = ((below + step // 2) // step.clamp(min=1)).clamp(0, 255)
    return torch.where(step > 0, made, levels)
