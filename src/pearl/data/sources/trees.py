"""Image files in a folder per class: found, drawn from, labelled."""

import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TypeVar

import numpy as np

from pearl.data.sources.source import Split, reason, some
from pearl.errors import DataError, counted
from pearl.storage.files import read_regular

Files = dict[str, list[Path]]  # class -> its images; both in order
Image = TypeVar("Image")


def image_files(place: Path) -> list[Path]:
    """Every image file in a folder and the folders below it, in order."""
    return sorted(
        file
        for file in place.rglob("*")
        if file.suffix.lower() in suffixes() and not file.name.startswith(".") and file.is_file()
    )


def tree(root: Path, *, nested: bool = False) -> Files:
    """The images of ROOT/CLASS/* by class, sorted; `nested`: see `class_places`.

    Raises:
        DataError: no folder, no class in it, or a class without images.
    """
    return class_images(class_places(root, nested=nested))


def class_places(root: Path, *, nested: bool = False) -> dict[str, Path]:
    """The folder of each class, in order of their names.

    Classes are the folders in ROOT. If `nested` they are the innermost ones, at any depth, named by their path: a/b.

    Raises:
        DataError: no folder, no class in it, or, if `nested`, images beside folders.
    """
    if not root.is_dir():
        raise DataError(f"{root} is not a folder: give one that holds a folder of images per class")
    if (root / "config.yaml").is_file():  # or its folders would be taken for classes that want images
        raise DataError(f"{root} is a model or run: give a folder that holds a folder of images per class")
    classes: dict[str, Path] = {}
    waiting: list[tuple[Path, tuple[Path, ...]]] = [
        (place, (root.resolve(), place.resolve())) for place in _folders(root)
    ]
    if not waiting:
        raise DataError(f"{root} has no class folders: put the images of each class into a folder of its own")
    while waiting:
        place, above = waiting.pop()
        inner = [folder for folder in _folders(place) if folder.resolve() not in above] if nested else []
        if inner and images_in(place):
            raise DataError(f"{place} has images beside folders of classes: move them into a folder of their own")
        if not inner:
            classes[place.relative_to(root).as_posix()] = place
        waiting += [(folder, (*above, folder.resolve())) for folder in inner]
    return dict(sorted(classes.items()))


def _folders(place: Path) -> list[Path]:
    return [folder for folder in place.iterdir() if folder.is_dir() and not folder.name.startswith(".")]


def class_images(places: dict[str, Path]) -> Files:
    """The images directly in the folder of each class.

    Raises:
        DataError: a class without images, or without a folder.
    """
    files = {name: images_in(place) for name, place in places.items()}
    empty = [str(places[name]) for name, images in files.items() if not images]
    if empty:
        raise DataError(f"no image in {some(empty)}: add images, or remove the class")
    return files


def images_in(place: Path) -> list[Path]:
    """The image files directly in a folder, sorted by name."""
    if not place.is_dir():
        raise DataError(f"the folder {place} is missing: unpack the data set anew, or give the right path")
    images = (file for file in place.iterdir() if file.suffix.lower() in suffixes() and not file.name.startswith("."))
    return sorted(images, key=lambda file: file.name)


def left_out(root: Path, *, nested: bool = False) -> list[str]:
    """What lies in the folders of classes beside the images that are read, counted, in words."""
    inside = [file for place in class_places(root, nested=nested).values() for file in place.iterdir()]
    below = sum(len(image_files(file)) for file in inside if file.is_dir())
    lines = no_images(root, inside)
    if below and not nested:
        mend = "--nested makes classes of their folders"
        lines.append(f"{root}: {counted(below, 'image')} deeper than class folders left out; {mend}")
    return lines


def no_images(root: Path, files: Iterable[Path]) -> list[str]:
    """A line that counts the files that are no image by their suffix; none if all are."""
    kinds = Counter(
        file.suffix.lower() or "no suffix"
        for file in files
        if file.suffix.lower() not in suffixes() and not file.name.startswith(".") and file.is_file()
    )
    if not kinds:
        return []
    first = kinds.most_common(5)
    named = [f"{count} {kind}" for kind, count in first]
    named += [counted(kinds.total() - sum(count for _, count in first), "other")] if len(kinds) > len(first) else []
    heic = "; HEIC needs pip install 'pearl[heic]'" if kinds.keys() & {".heic", ".heif"} else ""
    return [f"{root}: files that are no image known here ({', '.join(named)}) are left out{heic}"]


@cache
def suffixes() -> frozenset[str]:
    """The file suffixes of images that may be opened, in lower case."""
    from PIL import Image

    kinds = image_formats()
    return frozenset(suffix for suffix, kind in Image.registered_extensions().items() if kind in kinds)


@cache
def image_formats() -> tuple[str, ...]:
    """Pillow's formats but those for which it starts another program (EPS: Ghostscript, whatever the file's name)."""
    from PIL import Image

    Image.init()
    with suppress(ImportError):  # an extra: what phones take photos in
        import pillow_heif

        pillow_heif.register_heif_opener()
    return tuple(kind for kind in [*Image.OPEN] if kind not in {"EPS", "WMF"})


def draw(
    files: Mapping[str, Sequence[Image]], share: float, rng: np.random.Generator, what: str
) -> tuple[dict[str, list[Image]], dict[str, list[Image]]]:
    """Draw a share of each class at random, at least one image and never all: (what stays, what is drawn)."""
    if not 0 < share < 1:
        raise DataError(f"data.{what}={share} must lie between 0 and 1")
    single = [name for name, images in files.items() if len(images) < 2]
    if single:
        raise DataError(
            f"data.{what} needs two images or more in every class, but {some(single)} has fewer: add images"
        )
    stay: dict[str, list[Image]] = {}
    drawn: dict[str, list[Image]] = {}
    for name, images in files.items():
        count = min(max(round(share * len(images)), 1), len(images) - 1)
        chosen = set(rng.permutation(len(images))[:count].tolist())
        stay[name] = [image for i, image in enumerate(images) if i not in chosen]
        drawn[name] = [image for i, image in enumerate(images) if i in chosen]
    return stay, drawn


def labelled(files: Files, classes: Iterable[str]) -> Split:
    """The files in the order of the classes, each with its class's place in that order."""
    parts = [files.get(name, []) for name in classes]
    labels = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    return Split(tuple(image for part in parts for image in part), labels.astype(np.int64))


def split_hash(root: Path, test: Files) -> str:
    """sha256 of the test images' paths below the root, sorted, one per line: equal for equal splits on any machine."""
    paths = sorted(image.relative_to(root).as_posix() for images in test.values() for image in images)
    return hashlib.sha256(os.fsencode("\n".join(paths))).hexdigest()


def read_text(place: Path) -> str:
    """A text file of a data set.

    Raises:
        DataError: it cannot be read.
    """
    try:
        return read_regular(place).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{place} cannot be read ({reason(error)}): unpack the data set anew") from None
