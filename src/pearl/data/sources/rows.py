"""Helpers for data sets that other libraries read: class names, and a split where the library has none."""

from typing import Any

import numpy as np

from pearl.data.sources.folder_scan import draw
from pearl.data.sources.source import Rows, Split, unique


def class_names(data: Any) -> tuple[str, ...]:
    """Return the class names of a data set, from its `classes` or `categories`; empty if it has neither.

    A part of a data set (`torch.utils.data.Subset`, `ConcatDataset`) has those of the whole.
    """
    for key in ("classes", "categories"):
        if isinstance(names := getattr(data, key, None), list | tuple) and names:
            words = [name if isinstance(name, str) else ", ".join(map(str, name)) for name in names]
            ids = [str(label) for label in range(len(words))]
            return unique(ids, dict(zip(ids, words, strict=True)))
    if hasattr(data, "dataset"):
        return class_names(data.dataset)
    if isinstance(parts := getattr(data, "datasets", None), list | tuple):
        distinct = {class_names(part) for part in parts}
        return distinct.pop() if len(distinct) == 1 else ()
    return ()


def divided(split: Split, test_share: float, seed: int) -> tuple[Split, Split]:
    """Draw a test set: return the remaining rows for training, and a random share of each class.

    Raises:
        DataError: a class of one image.
    """
    rows = {str(label): np.flatnonzero(split.labels == label).tolist() for label in np.unique(split.labels)}
    return tuple(  # type: ignore[return-value]
        of_rows(split, np.sort(np.concatenate([*map(np.array, part.values())])))
        for part in draw(rows, test_share, np.random.default_rng(seed), "test_share")
    )


def of_rows(split: Split, rows: np.ndarray) -> Split:
    """Return some rows of a split that another library reads."""
    images: Any = split.images
    return Split(Rows(images.read, images.rows[rows]), split.labels[rows])
