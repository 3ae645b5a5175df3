"""From stored uint8 images to network input: a whole batch at once, with random draws per image.

The draws of an epoch are made together on the CPU before it starts. The pixels of image i in epoch e therefore depend
only on the seed, and no step waits for the host.
"""

import copy
import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pearl.data.policies import augmented, draw_policy
from pearl.settings.sections import ImagesConfig

Draws = tuple[Tensor, ...]  # one row per image


class View:
    """Converts raw batches (B, H, W, 3) uint8 into network input (B, 3, size, size) float32, normalised."""

    def __init__(self, images: ImagesConfig, *, channels_last: bool = True) -> None:
        self.images = images
        self.channels_last = channels_last

    def with_changes(self, changes: Mapping[str, Any]) -> "View":
        """Return a view with other augmentation settings of `images`."""
        view = copy.copy(self)
        view.images = self.images.model_copy(update=dict(changes))
        return view

    def draw(self, count: int, shape: tuple[int, int], generator: torch.Generator) -> Draws:
        """Draw the random numbers of one epoch: `count` rows for images of `shape` (H, W)."""
        images = self.images
        draws = self._draw_positions(count, shape, generator)
        if images.policy != "none":
            draws = *draws, draw_policy(images.policy, count, shape, generator)
        if images.brightness:
            draws = *draws, 1 + images.brightness * (2 * torch.rand(count, generator=generator) - 1)
        return draws

    def _draw_positions(self, count: int, shape: tuple[int, int], generator: torch.Generator) -> Draws:
        images = self.images
        if images.augment == "none":
            return ()
        flip = torch.rand(count, generator=generator) < (0.5 if images.flip else 0.0)
        if images.augment == "crop":
            shift = torch.randint(2 * images.pad + 1, (count, 2), generator=generator) - images.pad
            return shift, flip
        return draw_boxes(count, shape, images.scale, generator), flip

    def train(self, raw: Tensor, draws: Draws) -> Tensor:
        """Augment images; `draws` are the rows that belong to them."""
        images, left = self.images, list(draws)
        factor = left.pop() if images.brightness else None
        policy = left.pop() if images.policy != "none" else None
        if images.augment == "resized_crop":
            boxes, flip = left
            x = resized_crop(raw, boxes, flip, images.size)
            if policy is not None:  # its operations are for whole values
                x = augmented(x.round().to(torch.uint8).permute(0, 2, 3, 1), policy).permute(0, 3, 1, 2).float()
            return self._normalise(x, factor)
        if images.augment == "crop":
            raw = shift_and_flip(raw, *left)
        return self._finish(raw if policy is None else augmented(raw, policy), factor)

    def test(self, raw: Tensor) -> Tensor:
        """Resize the shorter side to `resize` and crop the centre of `size`."""
        return self._finish(raw)

    def _finish(self, raw: Tensor, factor: Tensor | None = None) -> Tensor:
        """Resize and centre-crop if the stored size differs, then normalise."""
        size, resize = self.images.size, self.images.stored
        x = raw.permute(0, 3, 1, 2).float()
        shorter = min(x.shape[2:])
        if shorter != resize:
            shape = [resize * side // shorter for side in x.shape[2:]]
            x = F.interpolate(x, shape, mode="bilinear", antialias=True)
        top, left = (round((side - size) / 2) for side in x.shape[2:])
        return self._normalise(x[:, :, top : top + size, left : left + size], factor)

    def _normalise(self, x: Tensor, factor: Tensor | None = None) -> Tensor:
        if factor is not None:
            x = (factor[:, None, None, None] * x).clamp(0, 255)
        scale, shift = _scale_and_shift(self.images.mean, self.images.std, x.device, torch.get_default_dtype())
        x = torch.addcmul(shift, x, scale)
        return x.contiguous(memory_format=torch.channels_last if self.channels_last else torch.contiguous_format)


@cache  # copying them at every step would make the GPU wait for its queue
def _scale_and_shift(
    mean: tuple[float, ...], std: tuple[float, ...], device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the factor and the offset (3, 1, 1) that normalise pixels in [0, 255]."""
    scale = torch.tensor([1 / (255 * s) for s in std], device=device, dtype=dtype)
    shift = torch.tensor([-m / s for m, s in zip(mean, std, strict=True)], device=device, dtype=dtype)
    return scale[:, None, None], shift[:, None, None]


def shift_and_flip(raw: Tensor, shift: Tensor, flip: Tensor) -> Tensor:
    """Move each image (B, H, W, C) by its own (dy, dx) in pixels, zeros coming in, then mirror where `flip`.

    Equal to zero padding, a random crop back to the old size and a left-right flip, in a single gather.
    """
    count, height, width, _ = raw.shape
    rows = torch.arange(height, device=raw.device) + shift[:, :1]
    columns = torch.arange(width, device=raw.device) + shift[:, 1:]
    columns = torch.where(flip[:, None], columns.flip(1), columns)
    inside = ((rows >= 0) & (rows < height))[:, :, None] & ((columns >= 0) & (columns < width))[:, None, :]
    first = torch.arange(0, count * height, height, device=raw.device)[:, None]  # row of each image
    pixels = (first + rows.clamp(0, height - 1))[:, :, None] * width + columns.clamp(0, width - 1)[:, None, :]
    moved = (
        raw.flatten(0, 2).index_select(0, pixels.flatten()).view_as(raw)
    )  # twice as fast as indexing three dimensions
    return moved * inside[..., None]


def resized_crop(raw: Tensor, boxes: Tensor, flip: Tensor, size: int) -> Tensor:
    """Crop each image's box (top, left, height, width), resize it to (size, size), and mirror it where `flip`.

    Bilinear without antialiasing; raw (B, H, W, C) uint8 -> (B, C, size, size) float32 with values in [0, 255].
    """
    height, width = raw.shape[1:3]
    steps = (torch.arange(size, device=raw.device) + 0.5) / size
    across = torch.where(flip[:, None], 1 - steps, steps)
    top, left, tall, wide = boxes[..., None].unbind(1)
    half = torch.full((), 0.5, device=raw.device)  # distance of the first and last pixel's centres in a box
    y = (top + torch.clamp(tall * steps, half, tall - half)) * (2 / height) - 1
    x = (left + torch.clamp(wide * across, half, wide - half)) * (2 / width) - 1
    grid = torch.stack([x[:, None, :].expand(-1, size, -1), y[:, :, None].expand(-1, -1, size)], dim=-1)
    return F.grid_sample(raw.permute(0, 3, 1, 2).float(), grid, padding_mode="border", align_corners=False)


def draw_boxes(
    count: int,
    shape: tuple[int, int],
    scale: tuple[float, float],
    generator: torch.Generator,
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
    tries: int = 10,
) -> Tensor:
    """Draw boxes (count, 4) of random area and aspect ratio, as torchvision's RandomResizedCrop does.

    The first of ten candidates that fits is used; if none does, the whole image (at most 4/3 long).
    """
    height, width = shape
    uniform: Callable[..., Tensor] = lambda *size: torch.rand(*size, generator=generator)  # noqa: E731
    area = height * width * (scale[0] + (scale[1] - scale[0]) * uniform(count, tries))
    low, high = map(math.log, ratio)
    aspect = torch.exp(low + (high - low) * uniform(count, tries))
    wide, tall = (area * aspect).sqrt().round(), (area / aspect).sqrt().round()
    fits = (wide >= 1) & (wide <= width) & (tall >= 1) & (tall <= height)
    first = fits.int().argmax(dim=1, keepdim=True)
    some = fits.any(dim=1)
    wide = torch.where(some, wide.gather(1, first)[:, 0], torch.tensor(float(min(width, round(height * 4 / 3)))))
    tall = torch.where(some, tall.gather(1, first)[:, 0], torch.tensor(float(min(height, round(width * 4 / 3)))))
    position = uniform(count, 2)
    top = torch.where(some, (position[:, 0] * (height - tall + 1)).floor(), (height - tall) // 2)
    left = torch.where(some, (position[:, 1] * (width - wide + 1)).floor(), (width - wide) // 2)
    return torch.stack([top, left, tall, wide], dim=1)
