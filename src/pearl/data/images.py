"""Conversion of pictures (files, Pillow images, arrays, tensors) to the pixels for training."""

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
    """Read one image file: upright, RGB, shorter side resized to `size`, centre cropped; uint8 (size, size, 3).

    Transparent pixels are blended with white; 16-bit grey keeps the upper 8 of `decoding.bits` bits. Resizing is
    bicubic with antialiasing, as by torchvision's Resize and CenterCrop in the protocols of vision transformers.

    Raises:
        DataError: "PATH: reason", for any unreadable file.
    """
    try:
        file = open_regular(path)
    except OSError as error:
        raise DataError(f"{path}: {reason(error)}") from error
    with file:
        return read_opened(file, str(path), size, decoding)


def read_opened(file: BinaryIO, name: str, size: int, decoding: Decoding = PLAIN) -> np.ndarray:
    """Return an opened image file, or its bytes in memory, as `read_image` returns it: uint8 (size, size, 3).

    Raises:
        DataError: "NAME: reason", whatever the reason is that it cannot be read.
    """
    try:
        with Image.open(file, formats=image_formats()) as image:
            if image.width * image.height > MAX_PIXELS:
                raise ValueError(f"{image.width} x {image.height} pixels are more than {MAX_PIXELS:,}")
            return np.asarray(upright_square(image, size, decoding, in_place=True))
    except UnidentifiedImageError:
        raise DataError(f"{name}: not an image, or of a kind that Pillow cannot read") from None
    except Exception as error:  # a damaged file can raise nearly any exception
        raise DataError(f"{name}: {reason(error)}") from error


def read_all(files: Sequence[Path], size: int, decoding: Decoding = PLAIN) -> tuple[list[Path], np.ndarray, list[str]]:
    """Decode files in parallel, in memory.

    The readable files, their pixels uint8 (N, size, size, 3), and a line for each other file.
    """

    def attempt(file: Path) -> np.ndarray | DataError:
        try:
            return read_image(file, size, decoding)
        except DataError as error:
            return error

    ignore_oddities()
    with ThreadPoolExecutor(threads()) as pool:
        results = [*zip(files, pool.map(attempt, files), strict=True)]
    good = [(file, image) for file, image in results if isinstance(image, np.ndarray)]
    pixels = np.stack([image for _, image in good]) if good else np.empty((0, size, size, 3), np.uint8)
    return [file for file, _ in good], pixels, [str(image) for _, image in results if isinstance(image, DataError)]


def unreadable(problems: Sequence[str], total: int) -> DataError:
    """Return the error that lists all unreadable images, so that they can be fixed at once."""
    return DataError(
        "\n".join([f"{len(problems)} of {total:,} images cannot be read: remove or replace them", *problems])
    )


def to_pixels(picture: Picture, size: int, decoding: Decoding = PLAIN) -> np.ndarray:
    """Convert any picture to the pixels for training: upright, RGB, shorter side `size`, centre crop; uint8 (size,
    size, 3).

    Raises:
        DataError: it is unreadable or not a picture.
    """
    if isinstance(picture, str | Path):
        return read_image(Path(picture), size, decoding)
    if isinstance(picture, np.ndarray | Tensor):
        picture = Image.fromarray(_bytes(picture))
    elif not isinstance(picture, Image.Image):
        raise DataError(
            f"a {type(picture).__name__} is not a picture; give a file, a Pillow image, an array (height, width, 3) "
            f"or a "
            f"tensor (3, height, width)"
        )
    try:
        return np.asarray(upright_square(picture, size, decoding))
    except Exception as error:  # a damaged image can raise nearly any exception
        raise DataError(f"an image cannot be used ({error}); give a file, a Pillow image or a uint8 array") from None


def _bytes(given: np.ndarray | Tensor) -> np.ndarray:
    """Convert numbers to bytes (H, W) or (H, W, 3 or 4).

    Floats range from 0 to 1. Other ranges are refused, since white is undefined in them, and so are other integer
    types.

    Raises:
        DataError: unsupported shape, type or range.
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
        low, high = array.min(), array.max()  # NaN if any value is
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
    """Return True for a single picture rather than several."""
    if isinstance(pictures, np.ndarray | Tensor):
        return pictures.ndim < 4
    return isinstance(pictures, str | Path | Image.Image)


def in_batches(pictures: Iterable[Picture], size: int, batch: int, decoding: Decoding = PLAIN) -> Iterator[np.ndarray]:
    """Yield pictures converted by `to_pixels` in batches (n, size, size, 3) uint8 with n up to `batch`.

    Raises:
        DataError: a picture is unusable; has its name, or its number from 0.
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
    """Return some of many pictures, (len(rows), size, size, 3) uint8, read one by one for libraries without threads.

    Raises:
        DataError: a picture is unusable; has its name, or its number from 0.
    """
    ignore_oddities()
    pixels = np.empty((len(rows), size, size, 3), np.uint8)
    for done, row in enumerate(rows.tolist()):
        pixels[done] = one_of(row, pictures[row], size, decoding)
        if on_progress:
            on_progress(done + 1, len(rows))
    return pixels


def one_of(index: int, picture: Picture, size: int, decoding: Decoding = PLAIN) -> np.ndarray:
    """Convert one of many pictures with `to_pixels`.

    Raises:
        DataError: it is unusable; has its name, or its number from 0.
    """
    try:
        return to_pixels(picture, size, decoding)
    except DataError as error:
        if isinstance(picture, str | Path):
            raise  # the error has the file's name
        raise DataError(f"image {index}: {error}") from None
