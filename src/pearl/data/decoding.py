"""Conversion of an opened image to the pixels for training: upright, RGB, square."""

import ctypes
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from pearl.data.resources import Budget, budget
from pearl.errors import counted
from pearl.settings.sections import ImagesConfig

MAX_PIXELS = 100_000_000
BYTES = 8  # peak memory per pixel of a decoded image: itself, and a turned or RGB copy
_BUDGET = Budget(budget())
_STRIP = 2**20  # pixels converted at a time if that takes several copies


@dataclass(frozen=True)
class Decoding:
    """Settings for decoding images, see `ImagesConfig`, and counts of 16-bit images.

    It is thread-safe.
    """

    bits: int = 16
    reduced: bool = False
    _met: list[int] = field(default_factory=lambda: [0, 0], init=False, repr=False, compare=False)
    _lock: Any = field(default_factory=threading.Lock, init=False, repr=False, compare=False)

    @classmethod
    def of(cls, images: ImagesConfig) -> "Decoding":
        """Return the decoding that a configuration defines."""
        return cls(images.bits, images.reduced)

    @property
    def met(self) -> tuple[int, int]:
        """Return the number of decoded 16-bit images and the largest value in them."""
        count, largest = self._met
        return count, largest

    def meet(self, count: int, largest: int) -> None:
        """Count 16-bit images whose largest value is `largest`."""
        with self._lock:
            self._met[:] = [self._met[0] + count, max(self._met[1], largest)]

    def notes(self) -> list[str]:
        """Return a note for the user if 16-bit images used a small part of their range."""
        count, largest = self.met
        used = max(largest.bit_length(), 8)
        if not count or used > self.bits - 2:
            return []
        levels = counted((largest >> (self.bits - 8)) + 1, "level")
        return [
            f"{counted(count, 'image')} of 16 bits with values up to {largest:,} only, of which {levels} of grey out "
            f"of 256 are left; set images.bits={used} if that is their range"
        ]


PLAIN = Decoding()


def upright_square(image: Image.Image, size: int, decoding: Decoding = PLAIN, *, in_place: bool = False) -> Image.Image:
    """Convert an opened image as `images.read_image` does. With `in_place`, the image itself is changed, which saves
    memory.

    Raises:
        ValueError: unusable number or type of pixels.
        OSError: damaged.
    """
    if not in_place:
        return _square(_rgb(ImageOps.exif_transpose(image), decoding), size)
    if decoding.reduced:  # to no less than twice the final size, then resized as usual
        image.draft(None, (2 * size * image.width // min(image.size), 2 * size * image.height // min(image.size)))
    with _BUDGET.taken(BYTES * image.width * image.height):
        ImageOps.exif_transpose(image, in_place=True)
        return _square(_rgb(image, decoding), size)


def ignore_oddities() -> None:
    """Silence Pillow's warnings about harmless oddities of files, for the rest of the process.

    `warnings.catch_warnings` is not thread-safe: of two overlapping contexts, the one that ends last restores the
    filters of the other.
    """
    warnings.filterwarnings("ignore", module=r"PIL\.|pearl\.data\.")


def _hush_libtiff() -> None:
    """Stop libtiff from printing errors on standard error; Pillow raises them as well."""
    with suppress(AttributeError, OSError):  # Pillow has no libtiff, or it is linked statically
        library = ctypes.CDLL(Image.core.__file__)
        for name in ("TIFFSetErrorHandler", "TIFFSetWarningHandler"):
            setter: Callable[..., object] = getattr(library, name)
            setter(None)


_hush_libtiff()


def _rgb(image: Image.Image, decoding: Decoding) -> Image.Image:
    if image.mode == "F":
        raise ValueError("floating-point pixels have no fixed range; save it with 8 or 16 bits")
    if image.mode.startswith("I"):  # Pillow's own conversion would clip at 255
        return _by_strips(image, _GreyStrips(decoding))
    if image.has_transparency_data:
        return _by_strips(image, _on_white)
    return image if image.mode == "RGB" else image.convert("RGB")


def _by_strips(image: Image.Image, convert: Callable[[Image.Image], Image.Image]) -> Image.Image:
    """Convert an image to RGB in strips of rows."""
    out, rows = Image.new("RGB", image.size), max(1, _STRIP // image.width)
    for top in range(0, image.height, rows):
        box = 0, top, image.width, min(top + rows, image.height)
        out.paste(convert(image.crop(box)), box)
    if isinstance(convert, _GreyStrips):
        convert.decoding.meet(1, convert.largest)
    return out


def _on_white(image: Image.Image) -> Image.Image:
    image = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")


class _GreyStrips:
    """Reduce grey images with more than 8 bits to their upper 8, strip by strip."""

    def __init__(self, decoding: Decoding) -> None:
        self.decoding, self.largest = decoding, 0

    def __call__(self, strip: Image.Image) -> Image.Image:
        grey, bits = np.asarray(strip), self.decoding.bits
        self.largest = max(self.largest, int(grey.max()))
        if grey.min() < 0 or self.largest > 65535:
            raise ValueError("32-bit pixels lie outside 0 to 65535; save it with 8 or 16 bits")
        if self.largest >= 2**bits:
            raise ValueError(f"a value of {self.largest:,}, above the {bits} bits of images.bits; set images.bits=16")
        return Image.fromarray((grey >> (bits - 8)).astype(np.uint8)).convert("RGB")


def _square(image: Image.Image, size: int) -> Image.Image:
    shorter = min(image.size)
    width, height = (size * side // shorter for side in image.size)
    if width * height > MAX_PIXELS:
        raise ValueError(f"{image.width} x {image.height} pixels are too long and narrow")
    left, top = round((width - size) / 2), round((height - size) / 2)
    return image.resize((width, height), Image.Resampling.BICUBIC).crop((left, top, left + size, top + size))
