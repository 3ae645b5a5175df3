"""What a data set is to pearl, and what all functions that make one share."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from pearl.errors import DataError


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


def checked(source: Source) -> Source:
    """The source itself, once every class is known to have something to learn from and something to be tested on."""
    for part, split in (("training", source.train), ("test", source.test)):
        counts = np.bincount(split.labels, minlength=len(source.classes))
        empty = [source.classes[label] for label in np.flatnonzero(counts == 0)]
        if empty:
            raise DataError(f"{source.name} has no {part} image of class {some(empty)}: add some, or remove the class")
    return source


def three_channels(grey: np.ndarray) -> np.ndarray:
    """Grey images (N, H, W) as (N, H, W, 3)."""
    return np.repeat(grey[..., None], 3, axis=-1)


def some(names: Iterable[str], limit: int = 20) -> str:
    """Names for an error message: all, or the first ones and how many more."""
    names = list(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def reason(error: Exception) -> str:
    """What an exception says, on one line."""
    return getattr(error, "strerror", None) or " ".join(str(error).split()) or type(error).__name__
