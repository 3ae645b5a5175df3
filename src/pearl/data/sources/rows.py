"""What data sets that other libraries read have in common: names of classes, and a split where they have none."""

from typing import Any

import numpy as np

from pearl.data.sources.source import Rows, Split, unique
from pearl.data.sources.trees import draw


def class_names(data: Any) -> tuple[str, ...]:
    """What the labels of a data set mean, by its `classes` or `categories`; nothing if it does not say.

    A part of a data set (`torch.utils.data.Subset`, `ConcatDataset`) is asked for those of the whole.
    """
    for key in ("classes", "categories"):
        if isinstance(names := getattr(data, key, None), list | tuple) and names:
            words = [name if isinstance(name, str) else ", ".join(map(str, name)) for name in names]
            ids = [str(label) for label in range(len(words))]
            return unique(ids, dict(zip(ids, words, strict=True)))
    if hasattr(data, "dataset"):
        return class_names(data.dataset)
    if isinstance(parts := getattr(data, "datasets", None), list | tuple):
        found = {class_names(part) for part in parts}
        return found.pop() if len(found) == 1 else ()
    return ()


def divided(split: Split, test_share: float, seed: int) -> tuple[Split, Split]:
    """A split without a test: what stays to be learnt from, and a share of each class drawn for the test.

    Raises:
        DataError: a class of one image.
    """
    rows = {str(label): np.flatnonzero(split.labels == label).tolist() for label in np.unique(split.labels)}
    return tuple(  # type: ignore[return-value]
        of_rows(split, np.sort(np.concatenate([*map(np.array, part.values())])))
        for part in draw(rows, test_share, np.random.default_rng(seed), "test_share")
    )


def of_rows(split: Split, rows: np.ndarray) -> Split:
    """Some rows of a split that another library reads."""
    images: Any = split.images
    return Split(Rows(images.read, images.rows[rows]), split.labels[rows])
