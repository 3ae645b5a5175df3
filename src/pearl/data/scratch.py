"""Room for decoded images: memory, or a mapped file without a name if they would fill too much of the memory.

The system reads and writes the pages of the file as needed. It never has a name, so that nothing is left behind when
the process is killed or the power fails.
"""

import math
import mmap
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

import numpy as np

from pearl.data.resources import SHARE, memory
from pearl.errors import DataError, printable, reason

_CHUNK = 256  # images copied at a time
_folder: ContextVar[Path | None] = ContextVar("folder", default=None)


@contextmanager
def beside(path: Path) -> Iterator[None]:
    """Create files on the disk of `path`, which need not exist, within the context; else in the folder for temporary
    files, which may be in memory.
    """
    token = _folder.set(next(parent for parent in path.absolute().parents if parent.is_dir()))
    try:
        yield
    finally:
        _folder.reset(token)


def is_large(count: int) -> bool:
    """Return True if this many bytes of images go into a file: more than a quarter of the memory."""
    return count > memory() // SHARE


def described(shape: tuple[int, ...]) -> str:
    """Return how much `room` an array takes, and where."""
    size = math.prod(shape)
    if not is_large(size):
        return f"{size / 1e6:.1f} MB in memory"
    folder = _folder_of_files()
    free = shutil.disk_usage(folder).free / 1e9
    where = f"in a file without a name in {printable(str(folder))}, where {free:.1f} GB are free"
    return f"{size / 1e9:.1f} GB, more than a quarter of the memory: {where}"


def room(shape: tuple[int, ...]) -> np.ndarray:
    """Return a writable array uint8 of undefined values.

    Raises:
        DataError: the disk has no room for the file.
    """
    size = math.prod(shape)
    if not is_large(size):
        return np.empty(shape, np.uint8)
    folder = _folder_of_files()
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            _allocate(file.fileno(), size)
            mapped = mmap.mmap(file.fileno(), size)  # the file exists as long as the array
    except OSError as error:
        raise DataError(
            f"{folder}: no room for {size / 1e9:.1f} GB of decoded images, which do not fit into memory "
            f"({reason(error)}); free some, or learn fewer images at a time"
        ) from None
    return np.frombuffer(mapped, np.uint8).reshape(shape)


def _folder_of_files() -> Path:
    return _folder.get() or Path(tempfile.gettempdir())


def _allocate(descriptor: int, size: int) -> None:
    """Take the blocks of a file now: on a full disk, a store into a mapped page would kill the process."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
        return
    for start in range(0, size, 2**20):
        os.pwrite(descriptor, bytes(min(2**20, size - start)), start)


def taken(images: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return a copy of some images (N, H, W, 3) uint8, by row, in memory or in a file."""
    selected = room((len(rows), *images.shape[1:]))
    for start in range(0, len(rows), _CHUNK):
        selected[start : start + _CHUNK] = images[rows[start : start + _CHUNK]]
    return selected
