"""Image files in a folder per class: search, random splits, labels."""

import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from itertools import chain
from pathlib import Path
from typing import TypeVar

import numpy as np

from pearl.data.sources.source import Split, reason, some
from pearl.errors import DataError, counted
from pearl.names import class_name
from pearl.storage.files import read_regular
from pearl.storage.run_directory import RunDirectory

Files = dict[str, list[Path]]  # class -> its images; both sorted
Image = TypeVar("Image")

# Lower-case names that operating systems and network storage create beside a user's files.
_SYSTEM = {
    "__macosx",
    "@eadir",
    "#recycle",
    "$recycle.bin",
    "lost+found",
    "system volume information",
    "thumbs.db",
    "desktop.ini",
}


def is_users(name: str) -> bool:
    """Return whether a file or folder of this name is the user's: not hidden, and not an operating system's."""
    return not name.startswith(".") and name.casefold() not in _SYSTEM


def files_below(root: Path) -> Iterator[Path]:
    """Return every file of the user in a folder and its subfolders, following links; each folder once."""
    seen: set[str] = set()
    for folder, folders, names in os.walk(root, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(filter(is_users, folders))
        yield from (Path(folder, name) for name in names if is_users(name))


def is_image(name: str) -> bool:
    """Return True if a file's suffix is that of an image."""
    return Path(name).suffix.lower() in suffixes()


def image_files(folder: Path) -> list[Path]:
    """Return every image file in a folder and its subfolders, following links, sorted."""
    return sorted(file for file in files_below(folder) if is_image(file.name) and file.is_file())


def tree(root: Path, *, nested: bool = False) -> Files:
    """Return the images of ROOT/CLASS/* by class, sorted; for `nested` see `class_folders`.

    Raises:
        DataError: no folder, no class in it, or a class without images.
    """
    return class_images(class_folders(root, nested=nested))


def class_folders(root: Path, *, nested: bool = False) -> dict[str, Path]:
    """Return the folder of each class, sorted by name.

    Classes are the folders in ROOT, or, if `nested`, the innermost ones, at any depth, named by their path: a/b.

    Raises:
        DataError: no folder, no class in it, two folders of one name, or, if `nested`, images beside folders of images.
    """
    if not root.is_dir():
        raise DataError(f"{root} is not a folder: give one that holds a folder of images per class")
    if RunDirectory(root).config_file.is_file():  # its folders would be taken for classes without images
        raise DataError(f"{root} is a model or run: give a folder that holds a folder of images per class")
    classes: dict[str, Path] = {}
    waiting: list[tuple[Path, tuple[Path, ...]]] = [
        (current, (root.resolve(), current.resolve())) for current in _folders(root)
    ]
    if not waiting:
        raise DataError(f"{root} has no class folders: put the images of each class into a folder of its own")
    while waiting:
        current, above = waiting.pop()
        inner = [folder for folder in _folders(current) if folder.resolve() not in above] if nested else []
        if inner and images_in(current):
            inner = [folder for folder in inner if image_files(folder)]
            if inner:
                raise DataError(f"{current} has images beside folders of classes: move them into a folder of their own")
        if not inner:
            name = "/".join(map(class_name, current.relative_to(root).parts))
            if name in classes:  # two Unicode forms of one name, as in an archive packed on another system
                raise DataError(f"{classes[name]!s} and {current!s}: both are class {name!r}; put them into one folder")
            classes[name] = current
        waiting += [(folder, (*above, folder.resolve())) for folder in inner]
    return dict(sorted(classes.items()))


def _folders(parent: Path) -> list[Path]:
    return [folder for folder in parent.iterdir() if folder.is_dir() and is_users(folder.name)]


def class_images(folders: dict[str, Path]) -> Files:
    """Return the images directly in the folder of each class.

    Raises:
        DataError: a class without images, or without a folder.
    """
    files = {name: images_in(folder) for name, folder in folders.items()}
    if empty := [folders[name] for name, images in files.items() if not images]:
        contents = [_contents(folder) for folder in empty]
        named = [
            f"{folder} ({words})" if words else str(folder) for folder, (words, _) in zip(empty, contents, strict=True)
        ]
        fixes = dict.fromkeys(fix for _, fixes in contents for fix in fixes)
        raise DataError(f"no image in {some(named)}: {'; '.join(fixes)}")
    return files


def _contents(folder: Path) -> tuple[str, list[str]]:
    """Describe the contents of a folder without readable images, and how to fix that."""
    kinds = _kinds(folder.iterdir())
    below = len(image_files(folder))
    words = [*_counts(kinds), *([f"{counted(below, 'image')} in folders"] if below else [])]
    fixes = [*_fixes(kinds), *(["convert images of other kinds to JPEG or PNG"] if kinds.keys() - _NAMED else [])]
    fixes += ["--nested makes classes of the innermost folders"] if below else []
    return ", ".join(words), fixes or ["add images, or remove the class"]


def images_in(folder: Path) -> list[Path]:
    """Return the image files directly in a folder, sorted by name."""
    if not folder.is_dir():
        raise DataError(f"the folder {folder} is missing: unpack the data set again, or give the right path")
    images = (file for file in folder.iterdir() if is_image(file.name) and is_users(file.name))
    return sorted(images, key=lambda file: file.name)


def left_out(root: Path, *, nested: bool = False) -> list[str]:
    """Describe the files in class folders that are not read, with counts."""
    folders = class_folders(root, nested=nested).values()
    inside = [file for folder in folders for file in folder.iterdir() if is_users(file.name)]
    lines = no_images(root, inside)
    deeper = {folder: sum(len(image_files(inner)) for inner in _folders(folder)) for folder in folders}
    if (below := sum(deeper.values())) and not nested:
        mixed = any(count and images_in(folder) for folder, count in deeper.items())
        fix = "move them up into these" if mixed else "--nested makes classes of their folders"
        lines.append(f"{root}: {counted(below, 'image')} deeper than class folders left out; {fix}")
    return lines


def no_images(root: Path, files: Iterable[Path]) -> list[str]:
    """Return a line that counts the files that are not images by suffix; empty if there are none."""
    kinds = _kinds(files)
    if not kinds:
        return []
    what = f"files that are not images ({', '.join(_counts(kinds))}) are left out"
    return ["; ".join([f"{root}: {what}", *_fixes(kinds)])]


_NONE = "no suffix"
_NAMED = {".heic", ".heif", _NONE}  # see `_fixes`


def _kinds(files: Iterable[Path]) -> Counter[str]:
    """Count the unreadable files by suffix."""
    return Counter(
        file.suffix.lower() or _NONE
        for file in files
        if not is_image(file.name) and is_users(file.name) and file.is_file()
    )


def _counts(kinds: Counter[str]) -> list[str]:
    first = kinds.most_common(5)
    named = [f"{count} {kind}" for kind, count in first]
    return named + (
        [counted(kinds.total() - sum(count for _, count in first), "other")] if len(kinds) > len(first) else []
    )


def _fixes(kinds: Counter[str]) -> list[str]:
    """Return what makes unreadable files readable, for known suffixes."""
    fixes = ["HEIC needs pip install 'pearl[heic]'"] if kinds.keys() & _NAMED - {_NONE} else []
    return fixes + (["give images without a suffix one, as .jpg"] if _NONE in kinds else [])


@cache
def suffixes() -> frozenset[str]:
    """Return the suffixes of images that may be opened, in lower case."""
    from PIL import Image

    kinds = image_formats()
    return frozenset(suffix for suffix, kind in Image.registered_extensions().items() if kind in kinds)


@cache
def image_formats() -> tuple[str, ...]:
    """Return Pillow's formats except those that start another program (EPS starts Ghostscript, whatever the suffix)."""
    from PIL import Image

    Image.init()
    with suppress(ImportError):  # an extra: the photo format of phones
        import pillow_heif

        pillow_heif.register_heif_opener()
    return tuple(kind for kind in [*Image.OPEN] if kind not in {"EPS", "WMF"})


def draw(
    files: Mapping[str, Sequence[Image]], share: float, rng: np.random.Generator, what: str
) -> tuple[dict[str, list[Image]], dict[str, list[Image]]]:
    """Draw a random share of each class, at least one image and never all; return (rest, drawn)."""
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
    """Return the files in class order, each with the index of its class."""
    parts = [files.get(name, []) for name in classes]
    labels = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    return Split(tuple(image for part in parts for image in part), labels.astype(np.int64))


def copies_among(train: Files, test: Files) -> list[Path]:
    """Return the test images whose bytes equal a training image's, whatever their names and classes."""

    def size(file: Path) -> int | None:
        with suppress(OSError):  # a later read reports the image
            return file.stat().st_size
        return None

    def digest(file: Path) -> bytes | None:
        with suppress(OSError):
            return hashlib.sha256(read_regular(file)).digest()
        return None

    sizes: dict[int | None, list[Path]] = {}
    for file in chain.from_iterable(train.values()):
        sizes.setdefault(size(file), []).append(file)
    learnt = cache(lambda bytes_: {digest(file) for file in sizes.get(bytes_, [])} - {None})
    tested = chain.from_iterable(test.values())
    return [file for file in tested if (same := learnt(size(file))) and digest(file) in same]


def split_hash(root: Path, test: Files) -> str:
    """Return the sha256 of the sorted relative paths of the test images, one per line: equal splits on any machine are
    equal.
    """
    paths = sorted(image.relative_to(root).as_posix() for images in test.values() for image in images)
    return hashlib.sha256(os.fsencode("\n".join(paths))).hexdigest()


def read_text(path: Path) -> str:
    """Read a text file of a data set.

    Raises:
        DataError: it cannot be read.
    """
    try:
        return read_regular(path).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read ({reason(error)}): unpack the data set again") from None
