"""The image files of a stream: the lines of a list, or a folder per class, which may be watched for new files."""

import os
from collections.abc import Iterator
from pathlib import Path
from time import monotonic, sleep

from pearl.data.csv_list import SUFFIXES, read_pairs
from pearl.data.sources import is_image, tree
from pearl.data.sources.folder_scan import is_users
from pearl.errors import ConfigError, DataError
from pearl.names import class_name
from pearl.storage.arrivals import Arrived, stamp_of
from pearl.storage.run_directory import RunDirectory

UNLABELLED = "unlabelled"  # folder of images without a class


def listed(data: Path, unlabelled: str = UNLABELLED) -> list[Arrived]:
    """Return the files of a .csv in the order of its lines, or those of a folder, see `scan`.

    Raises:
        DataError: no such file or folder, or no image.
    """
    if data.is_file() and data.suffix.lower() in SUFFIXES:
        pairs = read_pairs(data)[0]
        return [Arrived(str(file.absolute()), name, stamp_of(file.stat())) for file, name in pairs]
    files = scan(data, unlabelled)
    if not files:
        tree(data)  # raises, and names the files that are there instead
    return files


def check_source(data: Path, every: float | None = None) -> None:
    """Check that there is a .csv or folder to learn from, or with `every` a folder to watch, before slow work begins.

    Raises:
        ConfigError: `every` is not positive.
        DataError: it is not a folder, or that of a model.
    """
    if every is not None and not every > 0:
        raise ConfigError(f"every={every}: give seconds, more than 0")
    if every is not None or data.suffix.lower() not in SUFFIXES or not data.is_file():
        check_folder(data)


def check_folder(root: Path) -> None:
    """Check that images can be read from the folder.

    Raises:
        DataError: it is not a folder, or that of a model.
    """
    if not root.is_dir():
        raise DataError(f"{root} is not a folder: give one that holds a folder of images per class")
    if RunDirectory(root).config_file.is_file():
        raise DataError(f"{root} is a model or run: give a folder that holds a folder of images per class")


def scan(root: Path, unlabelled: str = UNLABELLED) -> list[Arrived]:
    """Return the images in a folder per class, in the order of their time stamps.

    Images directly in the folder, or in the one named `unlabelled`, have no class.

    Raises:
        DataError: it is not a folder, or that of a model.
    """
    check_folder(root)
    files = [*_images(root, "")]
    for entry in _entries(root):
        if is_users(entry.name) and entry.is_dir():
            files += _images(Path(entry.path), "" if entry.name == unlabelled else class_name(entry.name))
    return sorted(files, key=lambda one: one.order)


def _images(folder: Path, name: str) -> Iterator[Arrived]:
    for entry in _entries(folder):
        if is_image(entry.name) and is_users(entry.name):
            try:
                if entry.is_file():
                    yield Arrived(os.path.abspath(entry.path), name, stamp_of(entry.stat()))  # noqa: PTH100 - many files
            except FileNotFoundError:  # it has just gone
                continue


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return [*entries]
    except FileNotFoundError:  # it has just gone
        return []


def polls(root: Path, every: float, unlabelled: str = UNLABELLED) -> Iterator[tuple[list[Arrived], list[Arrived]]]:
    """Yield the images of a folder, and those among them that are complete, at least `every` seconds apart, forever.

    A file is complete if its size and times have not changed since the last poll. The first poll comes at once.

    Raises:
        DataError: see `scan`.
    """
    before: set[Arrived] = set()
    while True:
        polled = monotonic()
        there = scan(root, unlabelled)
        yield there, [one for one in there if one in before]
        before = {*there}
        sleep(max(0.0, polled + every - monotonic()))
