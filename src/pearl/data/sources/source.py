"""The data set types, and helpers that all functions creating one share."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pearl.errors import DataError
from pearl.names import class_name


@dataclass(frozen=True)
class Split:
    """Images and their labels: `images` uint8 (N, H, W, 3), or not yet read: N files, or N pictures (`Rows`).

    `labels` are int64 (N,).
    """

    images: "np.ndarray | tuple[Path, ...] | Rows"
    labels: np.ndarray


class Rows(Sequence[Any]):
    """Pictures of a data set that another library reads on demand; `rows` (N,) are its rows there."""

    def __init__(self, read: Callable[[int], Any], rows: np.ndarray) -> None:
        self.read, self.rows = read, rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        try:
            return self.read(int(self.rows[index]))
        except Exception as error:  # a damaged file makes a library raise nearly any exception
            raise DataError(f"row {self.rows[index]} cannot be read ({reason(error)}); remove or replace it") from error


@dataclass(frozen=True)
class Source:
    """A data set. Label i is classes[i]; `notes` are recorded by runs, such as the hash of a random split."""

    name: str
    classes: tuple[str, ...]
    train: Split
    test: Split
    validation: Split | None = None
    notes: dict[str, str] = field(default_factory=dict)


def checked(source: Source) -> Source:
    """Return the source after checking that every class has training and test images."""
    for part, split in (("training", source.train), ("test", source.test)):
        counts = np.bincount(split.labels, minlength=len(source.classes))
        empty = [source.classes[label] for label in np.flatnonzero(counts == 0)]
        if empty:
            raise DataError(f"{source.name} has no {part} image of class {some(empty)}: add some, or remove the class")
    return source


def three_channels(grey: np.ndarray) -> np.ndarray:
    """Return grey images (N, H, W) as (N, H, W, 3)."""
    return np.repeat(grey[..., None], 3, axis=-1)


def some(names: Iterable[str], limit: int = 20) -> str:
    """Join names for an error message: all, or the first ones and the number of others."""
    names = list(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def reason(error: Exception) -> str:
    """Return the message of an exception on one line."""
    return getattr(error, "strerror", None) or " ".join(str(error).split()) or type(error).__name__


def unique(ids: Sequence[str], words: Mapping[str, str]) -> tuple[str, ...]:
    """Return a unique name per class: its word; its id if it has none; both if another class has the same word."""
    names = [class_name(words.get(one) or one) for one in ids]
    count = Counter(names)
    return tuple(name if count[name] == 1 else f"{name} ({one})" for name, one in zip(names, ids, strict=True))
