"""Data sets of torchvision by their names there."""

import inspect
from typing import Any

import numpy as np

from pearl.data.sources.rows import class_names, divided
from pearl.data.sources.source import Rows, Source, Split, checked, reason
from pearl.errors import DataError
from pearl.settings.registry import nearest
from pearl.storage.network import short_waits
from pearl.storage.paths import data_root, find

# those with one class per image that only unpickle files whose checksum was verified
KNOWN = [
    "CIFAR10",
    "CIFAR100",
    "Caltech101",
    "Caltech256",
    "Country211",
    "DTD",
    "EuroSAT",
    "FER2013",
    "FGVCAircraft",
    "FashionMNIST",
    "Flowers102",
    "Food101",
    "GTSRB",
    "Imagenette",
    "KMNIST",
    "MNIST",
    "OxfordIIITPet",
    "PCAM",
    "RenderedSST2",
    "SEMEION",
    "STL10",
    "SUN397",
    "SVHN",
    "StanfordCars",
    "USPS",
]


def vision(
    dataset: str,
    *,
    path: str | None = None,
    train: str = "train",
    test: str = "test",
    seed: int = 0,
    test_share: float = 0.2,
    download: bool = True,
) -> Source:
    """A data set of torchvision (CIFAR10, Food101, ...), by its name there: one class per image, any size.

    `path` is its root folder (default: the data folder), into which it is downloaded when absent. `train` and `test`
    are names of its splits, if these have names; without splits, the test set is a random share of each class.

    Raises:
        DataError: unknown data set or split, or it is missing and cannot be downloaded.
    """
    if dataset not in KNOWN:
        raise DataError(f"torchvision/{dataset}: not a readable data set of torchvision; {nearest(dataset, KNOWN)}")
    import torchvision.datasets

    kind: Any = getattr(torchvision.datasets, dataset)
    root = data_root() if path is None else find(path, what=f"torchvision/{dataset}", error=DataError)
    takes = inspect.signature(kind).parameters

    def load(**which: Any) -> Any:
        more = {"download": False} if "download" in takes else {}
        try:
            try:
                return kind(str(root), **which, **more)
            except (RuntimeError, FileNotFoundError):  # it is not downloaded
                if not (more and download and path is None):
                    raise
                with short_waits():
                    return kind(str(root), **which, download=True)
        except Exception as error:  # torchvision raises many types of errors for missing or damaged data
            raise DataError(
                f"torchvision/{dataset} cannot be obtained ({reason(error)}): put its official files into {root} as "
                f"torchvision lays them out, or give data.path=FOLDER"
            ) from None

    if "train" in takes:
        parts = [load(train=True), load(train=False)]
    elif "split" in takes:
        parts = [load(split=train), load(split=test)]
    else:
        parts = [load()]
    labels = [_labels(part) for part in parts]
    names = class_names(parts[0]) or tuple(map(str, range(max(int(row_labels.max()) for row_labels in labels) + 1)))
    splits = [
        Split(Rows(lambda row, part=part: part[row][0], np.arange(len(part))), row_labels)  # type: ignore[misc]
        for part, row_labels in zip(parts, labels, strict=True)
    ]
    if len(splits) == 1:
        splits = [*divided(splits[0], test_share, seed)]
    return checked(Source(dataset, names, splits[0], splits[1]))


def _labels(part: Any) -> np.ndarray:
    """Return the label of every row, (N,) int64; the images are not read if the data set stores labels separately."""
    for key in ("targets", "labels", "_labels"):
        if (kept := getattr(part, key, None)) is not None and len(kept) == len(part):
            return np.asarray(kept, dtype=np.int64)
    return np.array([part[row][1] for row in range(len(part))], dtype=np.int64)
