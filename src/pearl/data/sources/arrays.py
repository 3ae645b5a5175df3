"""Arrays of one .npz file."""

import zipfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pearl.data.sources.source import Source, Split, checked, reason, some, three_channels
from pearl.errors import DataError, counted
from pearl.names import class_name
from pearl.storage.files import open_regular
from pearl.storage.paths import find


def npz(*, path: str) -> Source:
    """Arrays of one .npz file: train_images uint8 (N, H, W, 3) or (N, H, W), train_labels integers (N,), and test_*
    likewise.

    Optional: validation_* likewise; class_names (C,) of str (default: "0", "1", ...).

    Raises:
        DataError: naming the file and the key that is missing or does not fit.
    """
    file = find(path, what="data file", error=DataError)
    arrays = read_npz(file)
    names = _npz_names(file, arrays)
    validation = {"validation_images", "validation_labels"} & set(arrays)
    return checked(
        Source(
            file.stem,
            names,
            train=_npz_split(file, arrays, "train", names),
            test=_npz_split(file, arrays, "test", names),
            validation=_npz_split(file, arrays, "validation", names) if validation else None,
        )
    )


def read_npz(path: Path) -> dict[str, np.ndarray]:
    """Read the arrays of an .npz file by name; pickles in it are not opened.

    Raises:
        DataError: it is not an .npz file, or damaged.
    """
    arrays = {}
    key = "the list of arrays"
    try:
        with open_regular(path) as file:
            if not zipfile.is_zipfile(file):
                raise DataError(f"{path} is not an .npz archive, or is damaged: write it with numpy.savez")
            with np.load(file, allow_pickle=False) as archive:
                for key in archive.files:
                    arrays[key] = np.asarray(archive[key])
    except DataError:
        raise
    except Exception as error:  # a damaged archive makes NumPy and zipfile raise nearly any exception
        raise DataError(f"{path}: {key} cannot be read ({reason(error)}); write the file again") from None
    return arrays


def _npz_array(path: Path, arrays: dict[str, np.ndarray], key: str) -> np.ndarray:
    if key not in arrays:
        raise DataError(f"{path}: {key} is missing; the file has {some(arrays)}")
    return arrays[key]


def _npz_names(path: Path, arrays: dict[str, np.ndarray]) -> tuple[str, ...]:
    if "class_names" not in arrays:
        labels = [_npz_array(path, arrays, key) for key in ("train_labels", "test_labels")]
        highest = max((int(part.max()) for part in labels if part.size and part.dtype.kind in "iu"), default=0)
        if highest >= max(labels[0].size, 1):
            raise DataError(
                f"{path}: labels up to {highest}, but {labels[0].size} training images; number the classes from 0"
            )
        return tuple(str(label) for label in range(highest + 1))
    names = arrays["class_names"]
    if names.ndim != 1 or names.dtype.kind != "U":
        raise DataError(f"{path}: class_names must be a list of str, not {names.dtype} of shape {names.shape}")
    class_names = tuple(map(class_name, names.tolist()))
    repeated = [name for name, count in Counter(class_names).items() if count > 1]
    if repeated:
        raise DataError(f"{path}: class_names repeats {some(repeated)}; give each class a name of its own")
    return class_names


def _npz_split(path: Path, arrays: dict[str, np.ndarray], part: str, names: Sequence[str]) -> Split:
    images = _npz_array(path, arrays, f"{part}_images")
    labels = _npz_array(path, arrays, f"{part}_labels")
    if images.dtype != np.uint8:
        raise DataError(f"{path}: {part}_images must be uint8 (0 to 255), not {images.dtype}")
    if images.ndim == 3:
        images = three_channels(images)
    if images.ndim != 4 or images.shape[-1] != 3:
        raise DataError(f"{path}: {part}_images must have shape (N, H, W, 3) or (N, H, W), not {images.shape}")
    if 0 in images.shape[1:]:
        raise DataError(f"{path}: {part}_images has no pixels: its shape is {images.shape}; put images in")
    frame = arrays["train_images"].shape[1:3]
    if images.shape[1:3] != frame:
        raise DataError(f"{path}: {part}_images must be {frame} pixels as train_images, not {images.shape[1:3]}")
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise DataError(f"{path}: {part}_labels must be integers of shape (N,), not {labels.dtype} {labels.shape}")
    if len(labels) != len(images):
        raise DataError(
            f"{path}: {part}_labels is of length {len(labels)}, for {counted(len(images), 'image')} in {part}_images"
        )
    if len(labels) and (labels.min() < 0 or labels.max() >= len(names)):
        raise DataError(
            f"{path}: {part}_labels has values from {labels.min()} to {labels.max()}, which must lie in "
            f"0 to {len(names) - 1}, as there are {counted(len(names), 'class')}"
        )
    return Split(images, labels.astype(np.int64))
