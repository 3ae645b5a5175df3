"""Where images come from: one function per data set, each returns a `Source`."""

import hashlib
import re
import tempfile
import warnings
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from http.client import HTTPException
from pathlib import Path, PurePosixPath
from typing import Literal

import numpy as np

from pearl.errors import DataError
from pearl.paths import data_root, find


@dataclass(frozen=True)
class Split:
    """Images and their labels: `images` uint8 (N, H, W, 3), or N files still to be decoded; `labels` int64 (N,)."""

    images: np.ndarray | tuple[Path, ...]
    labels: np.ndarray


@dataclass(frozen=True)
class Source:
    """A data set. Label i means classes[i]; `notes` are facts that a run records, such as the hash of a drawn split."""

    name: str
    classes: tuple[str, ...]
    train: Split
    test: Split
    validation: Split | None = None
    notes: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Archive:
    """An official archive, and the folder it unpacks to."""

    what: str
    url: str
    md5: str
    folder: str


_TINYIMAGENET = _Archive(
    "TinyImageNet",
    "http://cs231n.stanford.edu/tiny-imagenet-200.zip",
    "90528d7ca1a48142e341f4ef8d21d0de",
    "tiny-imagenet-200",
)
_IMAGENET_R = _Archive(
    "ImageNet-R",
    "https://people.eecs.berkeley.edu/~hendrycks/imagenet-r.tar",
    "a61312130a589d0ca1a8fca1f2bd3337",
    "imagenet-r",
)

Files = dict[str, list[Path]]  # class -> its images; both in order


# ---------------------------------------------------------------------------------------------------------------------
# Arrays
# ---------------------------------------------------------------------------------------------------------------------


def digits(*, seed: int = 0, test_share: float = 0.2) -> Source:
    """scikit-learn's 1,797 handwritten digits, 8 x 8 grey in three equal channels, split by seed within each class.

    Raises:
        DataError: `test_share` leaves a class without training or test images.
    """
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    data = load_digits()
    grey = np.rint(data.images * (255 / 16)).astype(np.uint8)
    labels = data.target.astype(np.int64)
    try:
        rows = train_test_split(np.arange(len(labels)), test_size=test_share, stratify=labels, random_state=seed)
    except ValueError as error:
        raise DataError(f"digits cannot be split with test_share={test_share}: {error}") from None
    train, test = (Split(_three_channels(grey[part]), labels[part]) for part in rows)
    return _checked(Source("digits", tuple(str(digit) for digit in range(10)), train, test))


def cifar100(*, path: str | None = None, download: bool = True) -> Source:
    """CIFAR-100 (https://www.cs.toronto.edu/~kriz/cifar.html): 60,000 images of 32 x 32 in the 100 fine classes.

    `path` is an .npz in the layout of `npz`, or a folder that holds the official `cifar-100-python`. Without it, the
    data folder may have either, `cifar100.npz` first; if not, the official archive is fetched into it.

    Raises:
        DataError: nothing is there and nothing can be fetched, or a checksum is wrong.
    """
    if path is None:
        place = data_root() / "cifar100.npz"
        place = place if place.exists() else data_root()
    else:
        place = find(path, what="CIFAR-100", error=DataError)
    if place.is_file():
        return replace(npz(path=str(place)), name="cifar100")

    from torchvision.datasets import CIFAR100

    try:
        # The official files are pickles: torchvision opens them only once their checksums hold.
        # numpy 2.4.0 to 2.4.4 warns of how they spell a dtype.
        with warnings.catch_warnings(action="ignore", category=np.exceptions.VisibleDeprecationWarning):
            train = CIFAR100(place, train=True, download=download and path is None)
            test = CIFAR100(place, train=False)
    except (OSError, RuntimeError, HTTPException) as error:
        raise DataError(
            f"CIFAR-100 cannot be had from {place} ({reason(error)}): put the official {CIFAR100.filename} or a "
            f"cifar100.npz into {data_root()}, or pass data.path=FILE.npz"
        ) from None
    return _checked(
        Source(
            "cifar100",
            tuple(train.classes),
            Split(train.data, np.array(train.targets, dtype=np.int64)),
            Split(test.data, np.array(test.targets, dtype=np.int64)),
        )
    )


def npz(*, path: str) -> Source:
    """Arrays of one .npz file: train_images uint8 (N, H, W, 3) or (N, H, W), train_labels integers (N,), test_* alike.

    Optional: validation_* alike; class_names (C,) of str, without which the classes are called "0", "1", ...

    Raises:
        DataError: naming the file and the key that is missing or does not fit.
    """
    place = find(path, what="data file", error=DataError)
    arrays = _read_npz(place)
    names = _npz_names(place, arrays)
    validation = {"validation_images", "validation_labels"} & set(arrays)
    return _checked(
        Source(
            place.stem,
            names,
            train=_npz_split(place, arrays, "train", names),
            test=_npz_split(place, arrays, "test", names),
            validation=_npz_split(place, arrays, "validation", names) if validation else None,
        )
    )


def _read_npz(place: Path) -> dict[str, np.ndarray]:
    if not zipfile.is_zipfile(place):
        raise DataError(f"{place} is not an .npz archive, or is damaged: write it with numpy.savez")
    arrays = {}
    key = "the list of arrays"
    try:
        with np.load(place, allow_pickle=False) as archive:
            for key in archive.files:
                arrays[key] = np.asarray(archive[key])
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{place}: {key} cannot be read ({reason(error)}); write the file anew") from None
    return arrays


def _npz_array(place: Path, arrays: dict[str, np.ndarray], key: str) -> np.ndarray:
    if key not in arrays:
        raise DataError(f"{place}: {key} is missing; the file has {_some(arrays)}")
    return arrays[key]


def _npz_names(place: Path, arrays: dict[str, np.ndarray]) -> tuple[str, ...]:
    if "class_names" not in arrays:
        labels = [_npz_array(place, arrays, key) for key in ("train_labels", "test_labels")]
        highest = max((int(part.max()) for part in labels if part.size and part.dtype.kind in "iu"), default=0)
        return tuple(str(label) for label in range(highest + 1))
    names = arrays["class_names"]
    if names.ndim != 1 or names.dtype.kind != "U":
        raise DataError(f"{place}: class_names must be a list of str, not {names.dtype} of shape {names.shape}")
    repeated = [name for name, count in Counter(names.tolist()).items() if count > 1]
    if repeated:
        raise DataError(f"{place}: class_names repeats {_some(repeated)}; give each class a name of its own")
    return tuple(names.tolist())


def _npz_split(place: Path, arrays: dict[str, np.ndarray], part: str, names: Sequence[str]) -> Split:
    images = _npz_array(place, arrays, f"{part}_images")
    labels = _npz_array(place, arrays, f"{part}_labels")
    if images.dtype != np.uint8:
        raise DataError(f"{place}: {part}_images must be uint8 (0 to 255), not {images.dtype}")
    if images.ndim == 3:
        images = _three_channels(images)
    if images.ndim != 4 or images.shape[-1] != 3:
        raise DataError(f"{place}: {part}_images must have shape (N, H, W, 3) or (N, H, W), not {images.shape}")
    frame = arrays["train_images"].shape[1:3]
    if images.shape[1:3] != frame:
        raise DataError(f"{place}: {part}_images must be {frame} pixels as train_images, not {images.shape[1:3]}")
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise DataError(f"{place}: {part}_labels must be integers of shape (N,), not {labels.dtype} {labels.shape}")
    if len(labels) != len(images):
        raise DataError(f"{place}: {part}_labels has {len(labels)} entries for {len(images)} images in {part}_images")
    if len(labels) and (labels.min() < 0 or labels.max() >= len(names)):
        raise DataError(
            f"{place}: {part}_labels has values from {labels.min()} to {labels.max()}, which must lie in "
            f"0 to {len(names) - 1}, as there are {len(names)} classes"
        )
    return Split(images, labels.astype(np.int64))


def _three_channels(grey: np.ndarray) -> np.ndarray:
    return np.repeat(grey[..., None], 3, axis=-1)


# ---------------------------------------------------------------------------------------------------------------------
# Files
# ---------------------------------------------------------------------------------------------------------------------


def tinyimagenet(
    *, path: str = "tiny-imagenet-200", order: Literal["wnids", "sorted"] = "sorted", download: bool = True
) -> Source:
    """TinyImageNet, 64 x 64: 200 classes, 100,000 training images; the 10,000 labelled validation images are the test.

    The official folders (http://cs231n.stanford.edu/tiny-imagenet-200.zip), fetched into the data folder when absent.
    `order` is the order of the labels: that of wnids.txt, or by WordNet id as image-folder loaders have it. Classes are
    named by words.txt where it is there.

    Raises:
        DataError: a folder, file or annotation is missing or disagrees with the others.
    """
    root = _official(path, _TINYIMAGENET, download)
    wnids = _read_text(root / "wnids.txt").split()
    if order == "sorted":
        wnids.sort()
    train = _class_images({wnid: root / "train" / wnid / "images" for wnid in wnids})

    test: Files = {wnid: [] for wnid in wnids}
    place, annotations = root / "val" / "images", root / "val" / "val_annotations.txt"
    unlabelled = {image.name: image for image in _images(place)}
    for line in _read_text(annotations).splitlines():
        name, wnid, *_ = [*line.split("\t"), ""]
        if wnid not in test:
            raise DataError(f"{annotations}: the line {line!r} names no class of wnids.txt; unpack the archive anew")
        if name not in unlabelled:
            raise DataError(f"{annotations}: {name} is missing from {place}, or named twice; unpack the archive anew")
        test[wnid].append(unlabelled.pop(name))
    if unlabelled:
        raise DataError(f"{annotations} has no line for {_some(unlabelled)} of {place}; unpack the archive anew")

    words = root / "words.txt"
    named = (line.partition("\t") for line in _read_text(words).splitlines()) if words.exists() else ()
    names = _unique(wnids, {wnid: entry.split(",")[0].strip() for wnid, _, entry in named})
    return _checked(Source("tinyimagenet", names, _labelled(train, wnids), _labelled(test, wnids)))


def imagenet_r(
    *,
    path: str = "imagenet-r",
    train_list: str | None = None,
    test_list: str | None = None,
    seed: int = 0,
    test_share: float = 0.2,
    download: bool = True,
) -> Source:
    """ImageNet-R: 30,000 renditions of 200 classes, a folder per WordNet id, fetched into the data folder when absent.

    The set (https://people.eecs.berkeley.edu/~hendrycks/imagenet-r.tar) has no split of its own. `train_list` and
    `test_list` name files that hold one, such as the 24,000 / 6,000 images that most papers use
    (https://github.com/GT-RIPL/CODA-Prompt): one path per line, or YAML with the paths under `data`; of a path only
    WNID/FILE counts. Without lists a share of each class is drawn. The notes hold the sha256 of the test images' paths
    either way. Classes are named by the set's README.txt where it is there.

    Raises:
        DataError: the folder cannot be had, or a list disagrees with it.
    """
    root = _official(path, _IMAGENET_R, download)
    files = _tree(root)
    if train_list and test_list:
        train, test = _listed(root, files, train_list, test_list)
    elif train_list or test_list:
        raise DataError("only one of data.train_list and data.test_list is given for ImageNet-R: give both, or neither")
    else:
        train, test = _draw(files, test_share, np.random.default_rng(seed), "test_share")

    readme = root / "README.txt"
    named = (line.strip().partition(" ") for line in _read_text(readme).splitlines()) if readme.exists() else ()
    names = _unique(list(files), {wnid: name.strip() for wnid, _, name in named if name})
    notes = {"split_sha256": _split_hash(root, test)}
    return _checked(Source("imagenet_r", names, _labelled(train, files), _labelled(test, files), notes=notes))


def folder(*, path: str, seed: int = 0, test_share: float = 0.2, validation_share: float = 0.0) -> Source:
    """Images in a folder per class: PATH/train/CLASS/* and test/ and val/ (or valid/, validation/), or PATH/CLASS/*.

    A tree with train/ but no test/ is tested on val/; without that too, or without train/, a share of each class is
    drawn for the test. `validation_share` is the share of the training images then left to set apart for validation.
    The notes hold the sha256 of the test images' paths.

    Raises:
        DataError: a class without images, a class that training does not know, or too few images to split.
    """
    root = find(path, what="image folder", error=DataError)
    rng = np.random.default_rng(seed)
    notes = {}
    nested = (root / "train").is_dir()
    train = _tree(root / "train" if nested else root)
    present = [name for name in ("test", "val", "valid", "validation") if nested and (root / name).is_dir()]
    if len(set(present) - {"test"}) > 1:
        raise DataError(f"{root} holds {_some(present)}: keep one of val/, valid/ and validation/")
    held_out = [_known(_tree(root / name), train, root / name) for name in present]
    if present and present[0] != "test":
        notes["test"] = f"the folder {present[0]}/, as there is no test/"
    if not held_out:
        train, drawn = _draw(train, test_share, rng, "test_share")
        held_out = [drawn]
    test, *rest = held_out
    if validation_share > 0:
        if rest:
            raise DataError(f"{root} has validation images of its own: leave data.validation_share at 0")
        train, drawn = _draw(train, validation_share, rng, "validation_share")
        rest = [drawn]
    notes["split_sha256"] = _split_hash(root, test)
    return _checked(
        Source(
            root.resolve().name,
            tuple(train),
            _labelled(train, train),
            _labelled(test, train),
            _labelled(rest[0], train) if rest else None,
            notes,
        )
    )


def class_folders(root: Path) -> tuple[tuple[str, ...], list[Path], np.ndarray]:
    """The images of ROOT/CLASS/*: class names in order of the alphabet, the files, and their labels (N,) int64.

    Raises:
        DataError: no folder, or a class without an image.
    """
    files = _tree(root)
    images = [(image, label) for label, name in enumerate(files) for image in files[name]]
    return tuple(files), [image for image, _ in images], np.array([label for _, label in images])


def image_files(place: Path) -> list[Path]:
    """Every image file in a folder and the folders below it, in order."""
    return sorted(
        file
        for file in place.rglob("*")
        if file.suffix.lower() in _suffixes() and not file.name.startswith(".") and file.is_file()
    )


def _official(path: str, archive: _Archive, download: bool) -> Path:
    """The folder of an official data set: the one there is, else fetched into the data folder."""
    try:
        return find(path, what=archive.what, error=DataError)
    except DataError:
        if path != archive.folder or not download:
            raise

    from torchvision.datasets.utils import download_and_extract_archive

    root = data_root()
    try:
        root.mkdir(parents=True, exist_ok=True)
        # Unpacked aside, so that an interrupted run leaves no half of a data set that looks whole.
        with tempfile.TemporaryDirectory(prefix=f".{archive.folder}-", dir=root) as aside:
            download_and_extract_archive(archive.url, root, aside, md5=archive.md5)
            return (Path(aside) / archive.folder).rename(root / archive.folder)
    except (OSError, RuntimeError, HTTPException) as error:
        raise DataError(
            f"{archive.what} cannot be had from {archive.url} ({reason(error)}): "
            f"put {PurePosixPath(archive.url).name} into {root}, or pass data.path=FOLDER"
        ) from None


def _tree(root: Path) -> Files:
    """The images of ROOT/CLASS/* by class, sorted."""
    if not root.is_dir():
        raise DataError(f"{root} is not a folder: give one that holds a folder of images per class")
    classes = {place.name: place for place in root.iterdir() if place.is_dir() and not place.name.startswith(".")}
    if not classes:
        raise DataError(f"{root} has no class folders: put the images of each class into a folder of its own")
    return _class_images(dict(sorted(classes.items())))


def _class_images(places: dict[str, Path]) -> Files:
    files = {name: _images(place) for name, place in places.items()}
    empty = [str(places[name]) for name, images in files.items() if not images]
    if empty:
        raise DataError(f"no image in {_some(empty)}: add images, or remove the class")
    return files


def _images(place: Path) -> list[Path]:
    """The image files directly in a folder, sorted by name."""
    if not place.is_dir():
        raise DataError(f"the folder {place} is missing: unpack the data set anew, or give the right path")
    images = (file for file in place.iterdir() if file.suffix.lower() in _suffixes() and not file.name.startswith("."))
    return sorted(images, key=lambda file: file.name)


@cache
def _suffixes() -> frozenset[str]:
    """The file suffixes of images that may be opened, in lower case."""
    from PIL import Image

    kinds = image_formats()
    return frozenset(suffix for suffix, kind in Image.registered_extensions().items() if kind in kinds)


@cache
def image_formats() -> tuple[str, ...]:
    """Pillow's formats but those for which it starts another program (EPS: Ghostscript, whatever the file's name)."""
    from PIL import Image

    Image.init()
    return tuple(kind for kind in Image.OPEN if kind not in {"EPS", "WMF"})


def _known(files: Files, train: Files, place: Path) -> Files:
    strange = [name for name in files if name not in train]
    if strange:
        raise DataError(f"{place} has classes that train/ lacks: {_some(strange)}; remove them, or add training images")
    return files


def _draw(files: Files, share: float, rng: np.random.Generator, what: str) -> tuple[Files, Files]:
    """Draw a share of each class at random, at least one image and never all: (what stays, what is drawn)."""
    if not 0 < share < 1:
        raise DataError(f"data.{what}={share} must lie between 0 and 1")
    single = [name for name, images in files.items() if len(images) < 2]
    if single:
        raise DataError(
            f"data.{what} needs two images or more in every class, but {_some(single)} has fewer: add images"
        )
    stay: Files = {}
    drawn: Files = {}
    for name, images in files.items():
        count = min(max(round(share * len(images)), 1), len(images) - 1)
        chosen = set(rng.permutation(len(images))[:count].tolist())
        stay[name] = [image for i, image in enumerate(images) if i not in chosen]
        drawn[name] = [image for i, image in enumerate(images) if i in chosen]
    return stay, drawn


def _listed(root: Path, files: Files, train_list: str, test_list: str) -> tuple[Files, Files]:
    """The split that two lists give: (training images, test images)."""
    existing = {f"{name}/{image.name}" for name, images in files.items() for image in images}
    seen: set[str] = set()
    splits = []
    for given in (train_list, test_list):
        place = find(given, what="list of images", error=DataError)
        entries = Counter("/".join(PurePosixPath(entry).parts[-2:]) for entry in _entries(place))
        missing = sorted(set(entries) - existing)
        if missing:
            raise DataError(f"{place} names {len(missing)} files that {root} lacks: {_some(missing)}; mend the list")
        repeated = sorted(entry for entry, count in entries.items() if count > 1 or entry in seen)
        if repeated:
            raise DataError(f"{place} names files for a second time: {_some(repeated)}; keep each in one list, once")
        seen |= set(entries)
        splits.append({name: [image for image in files[name] if f"{name}/{image.name}" in entries] for name in files})
    train, test = splits
    return train, test


def _entries(place: Path) -> list[str]:
    """The paths that a list of images names."""
    text = _read_text(place)
    if place.suffix.lower() not in (".yaml", ".yml"):
        return [re.split(r"[\s,]", line.strip())[0] for line in text.splitlines() if line.strip()]

    import yaml

    try:
        # The parser in C takes a quarter of a second for 24,000 images, the one in Python two.
        content = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except yaml.YAMLError as error:
        raise DataError(f"{place} is not valid YAML ({reason(error)})") from None
    paths = content.get("data") if isinstance(content, dict) else None
    if not isinstance(paths, list) or not all(isinstance(entry, str) for entry in paths):
        raise DataError(f"{place} has no list of paths under the key data: write `data: [WNID/FILE, ...]`")
    return paths


def _labelled(files: Files, classes: Iterable[str]) -> Split:
    """The files in the order of the classes, each with its class's place in that order."""
    parts = [files.get(name, []) for name in classes]
    labels = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    return Split(tuple(image for part in parts for image in part), labels.astype(np.int64))


def _split_hash(root: Path, test: Files) -> str:
    """sha256 of the test images' paths below the root, sorted, one per line: equal for equal splits on any machine."""
    paths = sorted(image.relative_to(root).as_posix() for images in test.values() for image in images)
    return hashlib.sha256("\n".join(paths).encode()).hexdigest()


def _unique(wnids: Sequence[str], words: dict[str, str]) -> tuple[str, ...]:
    """A name for each class: its word; its id where it has none; both where another class has the same word."""
    names = [words.get(wnid) or wnid for wnid in wnids]
    count = Counter(names)
    return tuple(name if count[name] == 1 else f"{name} ({wnid})" for name, wnid in zip(names, wnids, strict=True))


def _read_text(place: Path) -> str:
    try:
        return place.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{place} cannot be read ({reason(error)}): unpack the data set anew") from None


# ---------------------------------------------------------------------------------------------------------------------
# Shared
# ---------------------------------------------------------------------------------------------------------------------


def _checked(source: Source) -> Source:
    """The source itself, once every class is known to have something to learn from and something to be tested on."""
    for part, split in (("training", source.train), ("test", source.test)):
        counts = np.bincount(split.labels, minlength=len(source.classes))
        empty = [source.classes[label] for label in np.flatnonzero(counts == 0)]
        if empty:
            raise DataError(f"{source.name} has no {part} image of class {_some(empty)}: add some, or remove the class")
    return source


def _some(names: Iterable[str], limit: int = 20) -> str:
    """Names for an error message: all, or the first ones and how many more."""
    names = list(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def reason(error: Exception) -> str:
    """What an exception says, on one line."""
    return getattr(error, "strerror", None) or " ".join(str(error).split()) or type(error).__name__
