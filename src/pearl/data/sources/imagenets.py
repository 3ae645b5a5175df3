"""TinyImageNet and ImageNet-R: a folder per WordNet id, in their official layouts."""

import re
import tempfile
from collections import Counter
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path, PurePosixPath
from typing import Literal

import numpy as np

from pearl.data.sources.folder_scan import Files, class_images, draw, images_in, labelled, read_text, split_hash, tree
from pearl.data.sources.source import Source, checked, reason, some, unique
from pearl.errors import ConfigError, DataError, counted
from pearl.storage.network import short_waits
from pearl.storage.paths import data_root, find
from pearl.yaml_io import parse_yaml


@dataclass(frozen=True)
class _Archive:
    """An official archive, and the folder that it unpacks to."""

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


def tinyimagenet(
    *, path: str = "tiny-imagenet-200", order: Literal["wnids", "sorted"] = "sorted", download: bool = True
) -> Source:
    """TinyImageNet, 64 x 64: 200 classes, 100,000 training images; the 10,000 labelled validation images are the test.

    The official folders (http://cs231n.stanford.edu/tiny-imagenet-200.zip), downloaded into the data folder when
    absent. `order` is the order of the labels: that of wnids.txt, or by WordNet id as image-folder loaders have it.
    Classes are named by words.txt where it is there.

    Raises:
        DataError: a folder, file or annotation is missing or disagrees with the others.
    """
    root = _official(path, _TINYIMAGENET, download)
    wnids = read_text(root / "wnids.txt").split()
    if order == "sorted":
        wnids.sort()
    train = class_images({wnid: root / "train" / wnid / "images" for wnid in wnids})

    test: Files = {wnid: [] for wnid in wnids}
    folder, annotations = root / "val" / "images", root / "val" / "val_annotations.txt"
    unlabelled = {image.name: image for image in images_in(folder)}
    for line in read_text(annotations).splitlines():
        name, wnid, *_ = [*line.split("\t"), ""]
        if wnid not in test:
            raise DataError(f"{annotations}: the line {line!r} has no class of wnids.txt; unpack the archive again")
        if name not in unlabelled:
            raise DataError(f"{annotations}: {name} is missing from {folder}, or named twice; unpack the archive again")
        test[wnid].append(unlabelled.pop(name))
    if unlabelled:
        raise DataError(f"{annotations} has no line for {some(unlabelled)} of {folder}; unpack the archive again")

    words = root / "words.txt"
    named = (line.partition("\t") for line in read_text(words).splitlines()) if words.exists() else ()
    names = unique(wnids, {wnid: entry.split(",")[0].strip() for wnid, _, entry in named})
    return checked(Source("tinyimagenet", names, labelled(train, wnids), labelled(test, wnids)))


def imagenet_r(
    *,
    path: str = "imagenet-r",
    train_list: str | None = None,
    test_list: str | None = None,
    seed: int = 0,
    test_share: float = 0.2,
    download: bool = True,
) -> Source:
    """ImageNet-R: 30,000 renditions of 200 classes, a folder per WordNet id, downloaded into the data folder when
    absent.

    The set (https://people.eecs.berkeley.edu/~hendrycks/imagenet-r.tar) has no split of its own. `train_list` and
    `test_list` are files with a split, such as the 24,000 / 6,000 images that most papers use
    (https://github.com/GT-RIPL/CODA-Prompt): one path per line, or YAML with the paths under `data`; only WNID/FILE of
    a path is used. Without lists, the test set is a random share of each class. The notes hold the sha256 of the test
    images' paths in both cases. Classes are named by the set's README.txt where it is there.

    Raises:
        DataError: the folder cannot be obtained, or a list disagrees with it.
    """
    root = _official(path, _IMAGENET_R, download)
    files = tree(root)
    if train_list and test_list:
        train, test = _listed(root, files, train_list, test_list)
    elif train_list or test_list:
        raise DataError("only one of data.train_list and data.test_list is given for ImageNet-R: give both, or neither")
    else:
        train, test = draw(files, test_share, np.random.default_rng(seed), "test_share")

    readme = root / "README.txt"
    named = (line.strip().partition(" ") for line in read_text(readme).splitlines()) if readme.exists() else ()
    names = unique(list(files), {wnid: name.strip() for wnid, _, name in named if name})
    notes = {"split_sha256": split_hash(root, test)}
    return checked(Source("imagenet_r", names, labelled(train, files), labelled(test, files), notes=notes))


def _official(path: str, archive: _Archive, download: bool) -> Path:
    """Return the folder of an official data set, downloaded into the data folder if it is missing."""
    try:
        return find(path, what=archive.what, error=DataError)
    except DataError:
        if path != archive.folder or not download:
            raise

    from torchvision.datasets.utils import download_and_extract_archive

    root = data_root()
    try:
        root.mkdir(parents=True, exist_ok=True)
        # Unpacked into a temporary folder, so that an interrupted run leaves no incomplete data set.
        with short_waits(), tempfile.TemporaryDirectory(prefix=f".{archive.folder}-", dir=root) as aside:
            download_and_extract_archive(archive.url, root, aside, md5=archive.md5)
            return (Path(aside) / archive.folder).rename(root / archive.folder)
    except (OSError, RuntimeError, HTTPException) as error:
        raise DataError(
            f"{archive.what} cannot be obtained from {archive.url} ({reason(error)}): "
            f"put {PurePosixPath(archive.url).name} into {root}, or pass data.path=FOLDER"
        ) from None


def _listed(root: Path, files: Files, train_list: str, test_list: str) -> tuple[Files, Files]:
    """Return the split that two lists define: (training images, test images)."""
    existing = {f"{name}/{image.name}" for name, images in files.items() for image in images}
    seen: set[str] = set()
    splits = []
    for given in (train_list, test_list):
        path = find(given, what="list of images", error=DataError)
        entries = Counter("/".join(PurePosixPath(entry).parts[-2:]) for entry in _entries(path))
        missing = sorted(set(entries) - existing)
        if missing:
            raise DataError(
                f"{path} names {counted(len(missing), 'file')} that {root} lacks: {some(missing)}; fix the list"
            )
        repeated = sorted(entry for entry, count in entries.items() if count > 1 or entry in seen)
        if repeated:
            raise DataError(f"{path} lists files twice: {some(repeated)}; keep each in one list, once")
        seen |= set(entries)
        splits.append({name: [image for image in files[name] if f"{name}/{image.name}" in entries] for name in files})
    train, test = splits
    return train, test


def _entries(path: Path) -> list[str]:
    """Return the paths in a list of images."""
    text = read_text(path)
    if path.suffix.lower() not in (".yaml", ".yml"):
        return [re.split(r"[\s,]", line.strip())[0] for line in text.splitlines() if line.strip()]

    try:
        content = parse_yaml(text)
    except ConfigError as error:
        raise DataError(f"{path} is {error}; write `data: [WNID/FILE, ...]`") from None
    paths = content.get("data") if isinstance(content, dict) else None
    if not isinstance(paths, list) or not all(isinstance(entry, str) for entry in paths):
        raise DataError(f"{path} has no list of paths under the key data: write `data: [WNID/FILE, ...]`")
    return paths
