"""Copies among images: what is the same picture is found by the hash of its pixels."""

import base64
import hashlib
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from pearl.errors import counted, printable

WIDTH = 8  # bytes of a hash that are kept: among a million images two differ with a probability of 1 - 3e-8


def hashes(pixels: np.ndarray) -> list[bytes]:
    """Return the first bytes of each image's SHA-256; pixels are (N, H, W, 3) uint8."""
    return [hashlib.sha256(np.ascontiguousarray(image).data).digest()[:WIDTH] for image in pixels]


def written(found: Sequence[bytes], labels: np.ndarray, names: Sequence[str]) -> dict[str, str]:
    """Return the hashes of N images by class, as text for a manifest; labels (N,) are places in `names`."""
    return {
        names[row]: base64.b64encode(b"".join(found[i] for i in np.flatnonzero(labels == row).tolist())).decode()
        for row in np.unique(labels)
    }


def read(text: Mapping[str, str]) -> dict[bytes, str]:
    """Return the class of each hash that `written` put into a manifest.

    Raises:
        ValueError: it is not such a text.
    """
    found: dict[bytes, str] = {}
    for name, of_class in text.items():
        content = base64.b64decode(of_class, validate=True)
        found |= {content[start : start + WIDTH]: name for start in range(0, len(content), WIDTH)}
    return found


def without_copies(
    found: Sequence[bytes],
    labels: np.ndarray,
    names: Sequence[str],
    known: Mapping[bytes, str],
    where: Callable[[int], str],
) -> tuple[np.ndarray, list[str]]:
    """Choose the images that are learnt or counted, each once.

    Of images that are the same, the first of a class stays. None stays that are in several classes, nor any that
    `known` has in the same class, unless their class has no other image.

    Args:
        found: hashes of N images.
        labels: their classes (N,), places in `names`.
        known: the class of each image that was learnt before, by its hash.
        where: gives the name of image i, for notes.

    Returns:
        Which images stay (N,) bool, and a line for each kind of copies.
    """
    classes: dict[bytes, dict[int, int]] = {}  # of each hash, the first image in each class
    for i, (one, label) in enumerate(zip(found, labels.tolist(), strict=True)):
        classes.setdefault(one, {}).setdefault(label, i)
    first = np.zeros(len(found), dtype=bool)
    first[[i for of_one in classes.values() for i in of_one.values()]] = True
    several = np.array([len(classes[one]) > 1 for one in found], dtype=bool)
    before = np.array([known.get(one) == names[row] for one, row in zip(found, labels.tolist(), strict=True)], bool)
    stay = first & ~several & ~before
    alone = np.bincount(labels[stay], minlength=len(names)) == 0  # classes that would have no image
    stay |= first & alone[labels]
    notes = []
    if (~first).any():
        notes.append(f"{counted(int((~first).sum()), 'image')} given more than once in a class, and counted once")
    if twice := [of_one for of_one in classes.values() if len(of_one) > 1]:
        pair = [f"{where(i)} ({printable(names[row])})" for row, i in list(twice[0].items())[:2]]
        notes.append(
            f"{counted(len(twice), 'image')} in several classes, as {' and '.join(pair)}: left out where a class has "
            f"others; keep each in one class"
        )
    if before.any():
        notes.append(f"{counted(int(before.sum()), 'image')} learnt before: left out where a class has others")
    return stay, notes
