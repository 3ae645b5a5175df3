"""Detection of duplicate images by the hash of their pixels."""

import base64
import hashlib
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from pearl.errors import counted, printable

WIDTH = 8  # bytes kept of a hash: among a million images, two differ with a probability of 1 - 3e-8


def hashes(pixels: np.ndarray) -> list[bytes]:
    """Return the first bytes of each image's SHA-256; pixels are (N, H, W, 3) uint8."""
    return [hashlib.sha256(np.ascontiguousarray(image).data).digest()[:WIDTH] for image in pixels]


def written(hashes_of_images: Sequence[bytes], labels: np.ndarray, names: Sequence[str]) -> dict[str, str]:
    """Return the hashes of N images by class, as text for a manifest; labels (N,) are indices into `names`."""
    return {
        names[row]: base64.b64encode(
            b"".join(hashes_of_images[i] for i in np.flatnonzero(labels == row).tolist())
        ).decode()
        for row in np.unique(labels)
    }


def read(text: Mapping[str, str]) -> dict[bytes, str]:
    """Return the class of each hash in a text by `written`.

    Raises:
        ValueError: the text has another format.
    """
    class_of_hash: dict[bytes, str] = {}
    for name, of_class in text.items():
        content = base64.b64decode(of_class, validate=True)
        class_of_hash |= {content[start : start + WIDTH]: name for start in range(0, len(content), WIDTH)}
    return class_of_hash


def without_copies(
    hashes_of_images: Sequence[bytes],
    labels: np.ndarray,
    names: Sequence[str],
    known: Mapping[bytes, str],
    where: Callable[[int], str],
) -> tuple[np.ndarray, list[str]]:
    """Choose the images to learn or count, each once.

    Of equal images, the first in a class is kept. Images in several classes are dropped, and so are those that `known`
    has in the same class, unless the class has no other image.

    Args:
        found: hashes of the N images.
        labels: their classes (N,), indices into `names`.
        known: the class of each image learnt before, by hash.
        where: returns the name of image i, for notes.

    Returns:
        A mask (N,) bool of the images to keep, and a line for each kind of duplicate.
    """
    classes: dict[bytes, dict[int, int]] = {}  # by hash: the first image in each class
    for i, (one, label) in enumerate(zip(hashes_of_images, labels.tolist(), strict=True)):
        classes.setdefault(one, {}).setdefault(label, i)
    first = np.zeros(len(hashes_of_images), dtype=bool)
    first[[i for of_one in classes.values() for i in of_one.values()]] = True
    several = np.array([len(classes[one]) > 1 for one in hashes_of_images], dtype=bool)
    before = np.array(
        [known.get(one) == names[row] for one, row in zip(hashes_of_images, labels.tolist(), strict=True)], bool
    )
    stay = first & ~several & ~before
    alone = np.bincount(labels[stay], minlength=len(names)) == 0  # classes that would lose all images
    stay |= first & alone[labels]
    notes = []
    if (~first).any():
        notes.append(f"{counted(int((~first).sum()), 'image')} repeated within a class; counted once")
    if twice := [of_one for of_one in classes.values() if len(of_one) > 1]:
        pair = [f"{where(i)} ({printable(names[row])})" for row, i in list(twice[0].items())[:2]]
        notes.append(
            f"{counted(len(twice), 'image')} in several classes, as {' and '.join(pair)}: left out unless the class "
            f"has no others; keep each in one class"
        )
    if before.any():
        notes.append(f"{counted(int(before.sum()), 'image')} learnt before: left out unless the class has no others")
    return stay, notes
