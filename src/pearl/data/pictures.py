"""Pictures as people have them - files, Pillow images, arrays, tensors - as the pixels that training sees."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from pearl.data.decoding import MAX_PIXELS, PLAIN, Decoding, ignore_oddities, upright_square
from pearl.data.resources import threads
from pearl.data.sources import image_formats, reason
from pearl.errors import DataError
from pearl.storage.files import open_regular

CHANNELS = (1, 3, 4)  # grey, RGB, RGB with transparency

# A file; an image of Pillow; an array (H, W) or (H, W, channels); a tensor (H, W) or (channels, H, W). Numbers are
# uint8 from 0 to 255, or floats from 0 to 1.
Picture = str | Path | Image.Image | np.ndarray | Tensor


def read_image(path: Path, size: int, decoding: Decoding = PLAIN) -> np.ndarray:
    """One image file, upright, in RGB, its shorter side resized to `size`, its centre cropped: uint8 (size, size, 3).

    What is transparent is laid on white; of grey with 16 bits the upper 8 of `decoding.bits` are kept. The resizing is
    bicubic with antialiasing: torchvision's Resize and CenterCrop, as the protocols of vision transformers have them.

    Raises:
        DataError: "PATH: reason", whatever the reason is that it cannot be read.
    """
    try:
        file = open_regular(path)
    except OSError as error:
        raise DataError(f"{path}: {reason(error)}") from error
    with file:
        return read_opened(file, str(path), size, decoding)


def read_opened(file: BinaryIO, name: str, size: int, decoding: Decoding = PLAIN) -> np.ndarray:
    """An opened image file, or its bytes in memory, as `read_image` returns it: uint8 (size, size, 3).

    Raises:
        DataError: "NAME: reason", whatever the reason is that it cannot be read.
    """
    try:
        with Image.open(file, formats=image_formats()) as image:
            if image.width * image.height > MAX_PIXELS:
                raise ValueError(f"{image.width} x {image.height} pixels are more than {MAX_PIXELS:,}")
            return np.asarray(upright_square(image, size, decoding, own=True))
    except UnidentifiedImageError:
        raise DataError(f"{name}: not an image, or of a kind that Pillow cannot read") from None
    except Exception as error:  # of a damaged file a decoder raises nearly anything
        raise DataError(f"{name}: {reason(error)}") from error


def read_all(files: Sequence[Path], size: int, decoding: Decoding = PLAIN) -> tuple[list[Path], np.ndarray, list[str]]:
    """Decode files side by side, into memory alone.

    Those that can be read, their pixels uint8 (N, size, size, 3), and a line for each of the others.
    """

    def attempt(file: Path) -> np.ndarray | DataError:
        try:
            return read_image(file, size, decoding)
        except DataError as error:
            return error

    ignore_oddities()
    with ThreadPoolExecutor(threads()) as pool:
        found = [*zip(files, pool.map(attempt, files), strict=True)]
    good = [(file, image) for file, image in found if isinstance(image, np.ndarray)]
    pixels = np.stack([image for _, image in good]) if good else np.empty((0, size, size, 3), np.uint8)
    return [file for file, _ in good], pixels, [str(image) for _, image in found if isinstance(image, DataError)]


def unreadable(problems: Sequence[str], total: int) -> DataError:
    """What to raise where some of so many images cannot be read: all of them are named, to be mended at once."""
    return DataError(
        "\n".join([f"{len(problems)} of {total:,} images cannot be read: remove or replace them", *problems])
    )


def to_pixels(picture: Picture, size: int, decoding: Decoding = PLAIN) -> np.ndarray:
    """Any picture as training saw it: upright, RGB, shorter side `size`, centre crop; uint8 (size, size, 3).

    Raises:
        DataError: it cannot be read, or is no picture.
    """
    if isinstance(picture, str | Path):
        return read_image(Path(picture), size, decoding)
    if isinstance(picture, np.ndarray | Tensor):
        picture = Image.fromarray(_bytes(picture))
    elif not isinstance(picture, Image.Image):
        raise DataError(
            f"a {type(picture).__name__} is no picture; give a file, a Pillow image, an array (height, width, 3) or a "
            f"tensor (3, height, width)"
        )
    try:
        return np.asarray(upright_square(picture, size, decoding))
    except Exception as error:  # of a damaged image a decoder raises nearly anything
        raise DataError(f"an image cannot be used ({error}); give a file, a Pillow image or a uint8 array") from None


def _bytes(given: np.ndarray | Tensor) -> np.ndarray:
    """Numbers as bytes (H, W) or (H, W, 3 or 4).

    Floats count from 0 to 1. Of other ranges nobody can say which number is white, so they are refused, and so are
    whole numbers of other kinds.

    Raises:
        DataError: another shape, kind or range.
    """
    if isinstance(given, Tensor):
        what, order, other = "a tensor", "(channels, height, width)", "permute(2, 0, 1)"
        tensor = given.detach().cpu()
        axis, array = 0, (tensor.float() if tensor.is_floating_point() else tensor).numpy()
    else:
        what, order, other, axis, array = "an array", "(height, width, channels)", "transpose(1, 2, 0)", 2, given
    shape = tuple(array.shape)
    if len(shape) != 2 and not (len(shape) == 3 and shape[axis] in CHANNELS):
        turned = f"; turn it with {other}" if len(shape) == 3 and shape[2 - axis] in CHANNELS else ""
        raise DataError(
            f"{what} of an image is (height, width) or {order} with 1, 3 or 4 channels, this one is {shape}{turned}"
        )
    if 0 in shape:
        raise DataError(f"an image has no pixels, its shape is {shape}; leave it out")
    if array.dtype.kind == "f":
        low, high = array.min(), array.max()  # not a number if one of them is
        if not (low >= 0 and high <= 1):
            raise DataError(
                f"floating-point pixels must lie between 0 and 1, these go from {low:g} to {high:g}; divide by 255, "
                f"leave out what normalises them, or give uint8"
            )
        array = np.rint(array * 255).astype(np.uint8)
    if array.dtype != np.uint8:
        raise DataError(f"pixels must be uint8 (0 to 255) or floats (0 to 1), not {array.dtype}; convert them")
    if array.ndim == 3:
        array = np.moveaxis(array, axis, 2)
        array = array[..., 0] if array.shape[2] == 1 else array
    return np.ascontiguousarray(array)


def is_one(pictures: object) -> bool:
    """Whether this is a picture rather than several."""
    if isinstance(pictures, np.ndarray | Tensor):
        return pictures.ndim < 4
    return isinstance(pictures, str | Path | Image.Image)


def in_batches(pictures: Iterable[Picture], size: int, batch: int, decoding: Decoding = PLAIN) -> Iterator[np.ndarray]:
    """Pictures as `to_pixels`, (n, size, size, 3) uint8 with n up to `batch`.

    Raises:
        DataError: one cannot be used; it is named, or counted from 0.
    """
    ignore_oddities()
    waiting = enumerate(pictures)
    while part := [one_of(index, picture, size, decoding) for index, picture in islice(waiting, batch)]:
        yield np.stack(part)


def pixels_of(
    pictures: Sequence[Picture],
    rows: np.ndarray,
    size: int,
    decoding: Decoding = PLAIN,
    *,
    on_progress: Callable[[int, int], None] | None = None,
) -> np.ndarray:
    """Some of many pictures, (len(rows), size, size, 3) uint8, one after the other: who reads them may use no threads.

    Raises:
        DataError: one cannot be used; it is named, or counted from 0.
    """
    ignore_oddities()
    pixels = np.empty((len(rows), size, size, 3), np.uint8)
    for done, row in enumerate(rows.tolist()):
        pixels[done] = one_of(row, pictures[row], size, decoding)
        if on_progress:
            on_progress(done + 1, len(rows))
    return pixels


def one_of(index: int, picture: Picture, size: int, decoding: Decoding = PLAIN) -> np.ndarray:
    """One of many pictures, as `to_pixels`.

    Raises:
        DataError: it cannot be used; it is named, or counted from 0.
    """
    try:
        return to_pixels(picture, size, decoding)
    except DataError as error:
        if isinstance(picture, str | Path):
            raise  # it says which file
        raise DataError(f"image {index}: {error}") from None
