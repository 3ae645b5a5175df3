"""Unknown images in groups: which new classes a pile of photos contains."""

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pearl.data import copies
from pearl.data.decoding import Decoding
from pearl.data.images import Picture, in_batches, is_one, read_all
from pearl.errors import DataError, printable
from pearl.evaluation.grouping import group
from pearl.lifecycle.evaluation import BATCH, UNKNOWN_RATE
from pearl.lifecycle.predict import named
from pearl.lifecycle.saved import learnt_images
from pearl.settings.config import ModelConfig
from pearl.storage.stored_task import StoredTask
from pearl.storage.tabular import aligned, rows_as_html

SIDE = 16  # pixels of a thumbnail that near-duplicates are found by
# Correlation of two thumbnails from which images are near-duplicates. Of 300 photos of Grocery Store it finds all
# smaller, recompressed or brighter copies, 94 % of copies cropped by 2 % at each side, and 1 of 44,850 other pairs.
ALIKE = 0.95


class Describer(Protocol):
    """The part of a model that `discover` uses; see `Model` in model.py, and `StreamModel`."""

    @property
    def config(self) -> ModelConfig:
        """Return its settings."""

    @property
    def tasks(self) -> Sequence[StoredTask]:
        """Return its tasks, which record the images that were learnt."""

    @property
    def classes(self) -> Sequence[str]:
        """Names of all classes, in the order of the logits."""

    def threshold(self, rate: float) -> float:
        """Return the score below which an image is unknown."""

    def describe(self, pixels: np.ndarray) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits (N, classes), in-distribution scores (N,) and whitened features (N, p) of pixels (N, S, S, 3)
        uint8.
        """


@dataclass(frozen=True)
class Group:
    """Unknown images that are probably of one class: their numbers in `Discovery.images`, the most typical first."""

    name: str
    images: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.images)

    @property
    def typical(self) -> tuple[int, ...]:
        """Return the images nearest to the group's mean, nearest first: two thirds of the group, at most 8."""
        return self.images[: min(8, len(self) - len(self) // 3)]

    @property
    def doubtful(self) -> tuple[int, ...]:
        """Return the images farthest from the group's mean, farthest first: a third of the group, at most 4."""
        return self.images[::-1][: min(4, len(self) // 3)]


@dataclass(frozen=True, eq=False, repr=False)
class Discovery:
    """Images of a model's known classes, and groups of the others.

    `images` are N paths, or pixels (size, size, 3) uint8 of images in memory; all other fields have their numbers.
    `groups` are sorted by size. `alone` are unknown images in no group. `nearest` has the model's best class of every
    image, right or not. `duplicates` are sets of images with equal pixels, of which only the first is in a group or
    known; `near_duplicates` are pairs of nearly equal ones, both of which are. `learnt` are those known images that
    the model was trained on. `unreadable` has a line for each file that is left out.
    """

    images: tuple[Path | np.ndarray, ...]
    groups: tuple[Group, ...]
    alone: tuple[int, ...]
    known: tuple[int, ...]
    learnt: tuple[int, ...]
    nearest: tuple[str, ...]
    duplicates: tuple[tuple[int, ...], ...]
    near_duplicates: tuple[tuple[int, int], ...]
    unknown_rate: float
    unreadable: tuple[str, ...] = ()

    def where(self, index: int) -> str:
        """Return the name of an image: its file, or its number from 0."""
        image = self.images[index]
        return f"image {index}" if isinstance(image, np.ndarray) else printable(str(image))

    @property
    def labels(self) -> dict[int, str]:
        """Return the name of each unknown image's group, by number; empty for those in no group."""
        return {i: one.name for one in self.groups for i in one.images} | dict.fromkeys(self.alone, "")

    def as_csv(self) -> str:
        """Return the list that `pearl learn --data` reads, once its labels are names: a line PATH,LABEL per unknown
        image.

        Raises:
            DataError: images in memory have no path, and names that are not UTF-8 cannot be written.
        """
        file = io.StringIO(newline="")
        lines = csv.writer(file)
        lines.writerow(["path", "label"])
        for i, label in self.labels.items():
            image = self.images[i]
            if isinstance(image, np.ndarray):
                raise DataError(f"image {i} is in memory, a list has paths; give files, or use .groups")
            path = str(image.absolute())
            try:
                path.encode()
            except UnicodeEncodeError:
                raise DataError(f"{printable(path)}: its name is not UTF-8 text; rename the file") from None
            lines.writerow([path, label])
        return file.getvalue()

    def rows(self) -> list[list[str]]:
        """Return the groups as texts; the first row is the header."""
        lines = [["", "images", "nearest known class"]]
        for name, part in [*((one.name, one.images) for one in self.groups), ("in no group", self.alone)]:
            names, times = np.unique([self.nearest[i] for i in part], return_counts=True)
            lines.append([name, f"{len(part)}", printable(str(names[times.argmax()])) if len(part) else "-"])
        return [*lines, ["known", f"{len(self.known)}", ""]]

    def __repr__(self) -> str:
        return aligned(self.rows(), numbers=True)

    def _repr_html_(self) -> str:
        return rows_as_html(self.rows())


def discover(
    model: Describer, images: str | Path | Iterable[Picture], *, unknown_rate: float = UNKNOWN_RATE
) -> Discovery:
    """Group the images that a model finds unknown; see `Model.discover`."""
    threshold = model.threshold(unknown_rate)
    if isinstance(images, str | Path):
        images = named([str(images)])
    if not isinstance(images, Iterable) or is_one(images):
        raise DataError(f"a {type(images).__name__} is not several images; give a folder, or a list of images")
    unreadable: list[str] = []
    names: list[Path | np.ndarray] = []
    hashes: list[bytes] = []
    parts: list[tuple[Tensor, ...]] = []
    for batch_names, pixels in _batches([*images], model.config, unreadable):
        names += batch_names
        hashes += copies.hashes(pixels)
        logits, *more = model.describe(pixels)
        parts.append((logits.argmax(1), *more, thumbnails(pixels)))
    if not parts:
        raise DataError("\n".join(["no image was given that can be read; give a folder of photos", *unreadable]))
    best, scores, together, thumbs = (torch.cat(of).numpy() for of in zip(*parts, strict=True))
    equal: dict[bytes, list[int]] = {}
    for i, one in enumerate(hashes):
        equal.setdefault(one, []).append(i)
    first = np.array([rows[0] for rows in equal.values()])
    is_unknown = scores[first] < threshold
    unknown, known = first[is_unknown], first[~is_unknown]
    learnt = learnt_images(model.tasks)
    labels = group(together[unknown])
    return Discovery(
        images=tuple(names),
        groups=tuple(_groups(unknown, together, labels)),
        alone=tuple(unknown[labels < 0].tolist()),
        known=tuple(known.tolist()),
        learnt=tuple(i for i in known.tolist() if hashes[i] in learnt),
        nearest=tuple(model.classes[c] for c in best.tolist()),
        duplicates=tuple(tuple(rows) for rows in equal.values() if len(rows) > 1),
        near_duplicates=tuple(near_duplicates(thumbs, first)),
        unknown_rate=unknown_rate,
        unreadable=tuple(unreadable),
    )


def check_list(path: Path) -> None:
    """Check that a list can be written there.

    Raises:
        DataError: it exists, and may have the names that the user gave; or `learn` would not read it.
    """
    if path.suffix.lower() != ".csv":
        raise DataError(f"{path}: the list is CSV; give a name that ends in .csv")
    if path.exists():
        raise DataError(f"{path}: exists already, perhaps with names of groups; remove it, or give another name")


def _batches(
    pictures: Sequence[Picture], config: ModelConfig, unreadable: list[str]
) -> Iterator[tuple[list[Any], np.ndarray]]:
    """Yield images, as paths or pixels, with their pixels (n, S, S, 3) uint8; add a line for each unreadable file."""
    size, decoding = config.images.stored, Decoding.of(config.images)
    if not all(isinstance(one, str | Path) for one in pictures):
        yield from (([*pixels], pixels) for pixels in in_batches(pictures, size, BATCH, decoding))
        return
    for start in range(0, len(pictures), BATCH):
        files = [Path(str(one)) for one in pictures[start : start + BATCH]]
        good, pixels, problems = read_all(files, size, decoding)
        unreadable += problems
        if good:
            yield [*good], pixels


def _groups(rows: np.ndarray, features: np.ndarray, labels: np.ndarray) -> Iterator[Group]:
    """Yield groups of images, the largest first, each sorted by the distance to the mean of its features (N, p).

    `labels` (n,) are the groups of images `rows` (n,), -1 for none.
    """
    sizes = np.bincount(labels[labels >= 0])
    for number, label in enumerate(np.argsort(-sizes, kind="stable").tolist(), 1):
        members = rows[labels == label]
        away = np.linalg.norm(features[members] - features[members].mean(0), axis=1)
        yield Group(f"group {number}", tuple(members[away.argsort(kind="stable")].tolist()))


def thumbnails(pixels: np.ndarray) -> Tensor:
    """Return pixels (N, S, S, 3) uint8 as small grey pictures (N, SIDE^2), float32, of mean 0 and length 1."""
    grey = torch.from_numpy(pixels).float().mean(3)[:, None]
    small = F.adaptive_avg_pool2d(grey, SIDE).flatten(1)
    return F.normalize(small - small.mean(1, keepdim=True))


def near_duplicates(thumbs: np.ndarray, rows: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yield pairs of `rows` (n,) whose thumbnails (N, d) correlate at least as `ALIKE`, each image with the earlier
    one that it resembles most.
    """
    thumbnails = thumbs[rows]
    for i in range(1, len(rows)):
        alike = thumbnails[:i] @ thumbnails[i]
        if alike.max() >= ALIKE:
            yield int(rows[alike.argmax()]), int(rows[i])
