"""From an opened image to the pixels that training sees: upright, RGB, a square."""

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
BYTES = 8  # of memory per pixel while an image is decoded, at most: itself, and itself turned or in RGB
_BUDGET = Budget(budget())
_STRIP = 2**20  # pixels that are converted at a time, where that takes several copies


@dataclass(frozen=True)
class Decoding:
    """How images are decoded, see `ImagesConfig`; and what was met of images with 16 bits.

    Threads may share one.
    """

    bits: int = 16
    reduced: bool = False
    _met: list[int] = field(default_factory=lambda: [0, 0], init=False, repr=False, compare=False)
    _lock: Any = field(default_factory=threading.Lock, init=False, repr=False, compare=False)

    @classmethod
    def of(cls, images: ImagesConfig) -> "Decoding":
        """As a configuration has it."""
        return cls(images.bits, images.reduced)

    @property
    def met(self) -> tuple[int, int]:
        """How many images of 16 bits were decoded, and the largest value in them."""
        count, largest = self._met
        return count, largest

    def meet(self, count: int, largest: int) -> None:
        """Count images of 16 bits, whose values go up to `largest`."""
        with self._lock:
            self._met[:] = [self._met[0] + count, max(self._met[1], largest)]

    def notes(self) -> list[str]:
        """Return a note for the user if most of the range of 16 bits was not used."""
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


def upright_square(image: Image.Image, size: int, decoding: Decoding = PLAIN, *, own: bool = False) -> Image.Image:
    """Return an opened image as `pictures.read_image` gives it. One of our `own` is changed, and needs less memory.

    Raises:
        ValueError: pixels of a kind or number that cannot be used.
        OSError: damaged.
    """
    if not own:
        return _square(_rgb(ImageOps.exif_transpose(image), decoding), size)
    if decoding.reduced:  # to no less than twice the size, from which it is resized as ever
        image.draft(None, (2 * size * image.width // min(image.size), 2 * size * image.height // min(image.size)))
    with _BUDGET.taken(BYTES * image.width * image.height):
        ImageOps.exif_transpose(image, in_place=True)
        return _square(_rgb(image, decoding), size)


def ignore_oddities() -> None:
    """Have Python ignore what Pillow warns of: oddities of files that do no harm.

    From now on: `warnings.catch_warnings` for the time of a call is not for threads. Of two that overlap, the one that
    ends last puts back what the other had set.
    """
    warnings.filterwarnings("ignore", module=r"PIL\.|pearl\.data\.")


def _hush_libtiff() -> None:
    """Have libtiff print nothing: it writes what is wrong with a file to standard error, and Pillow raises it."""
    with suppress(AttributeError, OSError):  # Pillow has no libtiff, or has it inside
        library = ctypes.CDLL(Image.core.__file__)
        for name in ("TIFFSetErrorHandler", "TIFFSetWarningHandler"):
            setter: Callable[..., object] = getattr(library, name)
            setter(None)


_hush_libtiff()


def _rgb(image: Image.Image, decoding: Decoding) -> Image.Image:
    if image.mode == "F":
        raise ValueError("floating-point pixels have no fixed range; save it with 8 or 16 bits")
    if image.mode.startswith("I"):  # Pillow's own conversion would cut off at 255
        return _by_strips(image, _GreyStrips(decoding))
    if image.has_transparency_data:
        return _by_strips(image, _on_white)
    return image if image.mode == "RGB" else image.convert("RGB")


def _by_strips(image: Image.Image, convert: Callable[[Image.Image], Image.Image]) -> Image.Image:
    """An image in RGB, converted some rows at a time."""
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
    """Keep the upper 8 bits of an image with more, strip by strip."""

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
