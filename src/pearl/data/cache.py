"""Decoded images on disk: each file is decoded, turned upright and cropped once, then memory-mapped.

A cache is a folder ROOT/KEY/{images.npy, meta.json}; KEY is a hash of its inputs. A damaged cache is built again, in a
folder ROOT/KEY.*.tmp that is renamed when it is complete. Other processes therefore never read an incomplete one.
"""

import errno
import hashlib
import io
import json
import math
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from pearl.data.decoding import PLAIN, Decoding, ignore_oddities
from pearl.data.images import pixels_of, read_image, unreadable
from pearl.data.resources import threads
from pearl.data.sources import Split, reason
from pearl.errors import DataError
from pearl.storage.inside import sync_folder
from pearl.storage.paths import data_root

FORMAT = 1  # version of the folder and its pixels: increase it when either changes
_ASIDE = re.compile(r"[0-9a-f]{64}\.[0-9a-f]{32}\.tmp")  # folders that are built or deleted
_STALE_SECONDS = 24 * 3600
_BATCH = 512  # images decoded ahead of the writer, to bound memory


@dataclass(frozen=True)
class Images:
    """Images of a split, or of some of its rows, indexed by row in the split."""

    rows: np.ndarray  # (n,) int64, ascending
    pixels: np.ndarray  # uint8 (n, H, W, 3)

    def __getitem__(self, rows: np.ndarray) -> np.ndarray:
        """Return the images of these rows, (len(rows), H, W, 3)."""
        if not np.isin(rows, self.rows).all():  # searchsorted alone would return other images
            raise IndexError("rows that were not decoded")
        return self.pixels[np.searchsorted(self.rows, rows)]

    def sha256(self, rows: np.ndarray) -> str:
        """Return the digest of the shape and pixels of these rows, read in batches to keep a memory map on disk."""
        digest = hashlib.sha256(repr(self.pixels.shape[1:]).encode())
        for start in range(0, len(rows), _BATCH):
            digest.update(self[rows[start : start + _BATCH]].tobytes())
        return digest.hexdigest()


def decode_rows(
    split: Split,
    rows: np.ndarray,
    size: int,
    decoding: Decoding = PLAIN,
    *,
    on_progress: Callable[[int, int], None] | None = None,
) -> Images:
    """Decode some rows of a split (ascending, without repetition); only the files of these rows are opened.

    Arrays are in memory already and are returned whole, without a copy. Images that another library reads are decoded
    into memory: they have no file time by which an outdated cache could be detected.

    Raises:
        DataError: see `decode`.
    """
    if isinstance(split.images, np.ndarray):
        return Images(np.arange(len(split.labels)), split.images)
    if not isinstance(split.images, tuple):
        return Images(rows, pixels_of(split.images, rows, size, decoding, on_progress=on_progress))
    files = tuple(split.images[row] for row in rows)
    return Images(rows, decode(Split(files, split.labels[rows]), size, decoding, on_progress=on_progress))


def decode(
    split: Split,
    size: int,
    decoding: Decoding = PLAIN,
    *,
    root: Path | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> np.ndarray:
    """Decode the images of a split, uint8 (N, H, W, 3).

    Arrays are returned unchanged. Files become a read-only memory map of shape (N, size, size, 3), each decoded by
    `read_image`, from the cache under `root` (default: cache/ in the data folder). The cache is built if it is missing
    or fails its checksum; `on_progress` is then called with (images done, images in total).

    Raises:
        DataError: lists every unreadable image, or has the reason why the cache cannot be written.
    """
    if isinstance(split.images, np.ndarray):
        return split.images
    files = split.images
    root = data_root() / "cache" if root is None else root
    key = _key(files, size, decoding)
    cached = _open(root / key, key, len(files), size, decoding)
    if cached is not None:
        return cached

    aside = _aside(root / key)
    needed = len(files) * size * size * 3
    try:
        root.mkdir(parents=True, exist_ok=True)
        _remove_stale(root)
        if shutil.disk_usage(root).free < needed:  # fail now rather than after an hour of decoding
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        aside.mkdir()
        fresh = Decoding(decoding.bits, decoding.reduced)  # counts the 16-bit images of this split alone
        _build(aside, key, files, size, fresh, on_progress)
        decoding.meet(*fresh.met)
        return _publish(aside, root / key, key, len(files), size)
    except OSError as error:
        raise DataError(
            f"the cache of decoded images cannot be written to {root} ({reason(error)}): "
            f"set PEARL_DATA to a folder you may write to, with at least {math.ceil(needed / 1e8) / 10} GB free"
        ) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _key(files: Sequence[Path], size: int, decoding: Decoding) -> str:
    """Return the sha256 of all that a cache depends on: decoding settings, and path, length and time of every file."""
    facts: list[object] = [FORMAT, size]
    if decoding != PLAIN:
        facts.append([decoding.bits, decoding.reduced])
    for file in files:
        try:
            status = file.stat()
            facts.append((os.path.realpath(file), status.st_size, status.st_mtime_ns))
        except OSError:
            facts.append(str(file))  # reading it reports the problem, together with those of other files
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _aside(target: Path) -> Path:
    """Return a new name beside a cache for one that is being built or deleted."""
    return target.with_name(f"{target.name}.{uuid.uuid4().hex}.tmp")


def _remove_stale(root: Path) -> None:
    """Remove the leftovers of builds that were killed long ago."""
    for folder in (folder for folder in root.iterdir() if _ASIDE.fullmatch(folder.name)):
        with suppress(FileNotFoundError):  # its builder is running or has just finished
            newest = max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
            if time.time() - newest > _STALE_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)


def _open(folder: Path, key: str, count: int, size: int, decoding: Decoding = PLAIN) -> np.ndarray | None:
    """Open the images of a cache; None if it is missing or damaged."""
    try:
        with (folder / "images.npy").open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        met, deep = json.loads((folder / "meta.json").read_bytes()), (0, 0)
        if isinstance(met, dict):
            deep = met.pop("sixteen_bits", deep)
        if met != _meta(key, count, size, sha256):
            return None
        decoding.meet(*deep)
        images = np.load(folder / "images.npy", mmap_mode="r")
    except (OSError, ValueError, TypeError):
        return None
    return images if images.shape == (count, size, size, 3) and images.dtype == np.uint8 else None


def _meta(key: str, count: int, size: int, sha256: str) -> dict[str, object]:
    return {"format": FORMAT, "sources": key, "count": count, "size": size, "sha256": sha256}


def _build(
    folder: Path,
    key: str,
    files: Sequence[Path],
    size: int,
    decoding: Decoding,
    on_progress: Callable[[int, int], None] | None,
) -> None:
    """Write a cache into an empty folder, and sync it to disk."""

    def attempt(file: Path) -> bytes | DataError:
        try:
            return read_image(file, size, decoding).tobytes()
        except DataError as error:
            return error

    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": "|u1", "fortran_order": False, "shape": (len(files), size, size, 3)}
    )
    sha256 = hashlib.sha256(header.getvalue())
    problems: list[str] = []
    done = 0
    ignore_oddities()
    with (folder / "images.npy").open("wb") as out, ThreadPoolExecutor(threads()) as pool:
        out.write(header.getvalue())
        for start in range(0, len(files), _BATCH):
            for image in pool.map(attempt, files[start : start + _BATCH]):
                if isinstance(image, DataError):
                    problems.append(str(image))
                else:
                    # Plain writes: on a full disk they raise, where a store into a mapped page would kill the process.
                    out.write(image)
                    sha256.update(image)
                done += 1
                if on_progress:
                    on_progress(done, len(files))
        _sync(out)
    if problems:
        raise unreadable(problems, len(files))

    with (folder / "meta.json").open("wb") as out:
        deep = {"sixteen_bits": decoding.met} if decoding.met[0] else {}
        out.write(json.dumps(_meta(key, len(files), size, sha256.hexdigest()) | deep).encode())
        _sync(out)
    sync_folder(folder)


def _publish(aside: Path, target: Path, key: str, count: int, size: int) -> np.ndarray:
    """Rename a finished cache to its final name, or use the one that another process has put there meanwhile."""
    images = np.load(aside / "images.npy", mmap_mode="r")  # the map stays valid when the file is renamed
    while True:
        try:
            aside.rename(target)
            sync_folder(target.parent)
            return images
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
        theirs = _open(target, key, count, size)
        if theirs is not None:
            return theirs
        damaged = _aside(target)
        with suppress(FileNotFoundError):  # another process has moved it away already
            target.rename(damaged)
        shutil.rmtree(damaged, ignore_errors=True)


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
