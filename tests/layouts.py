"""Small data sets in the official layouts, of random but seeded images, for the tests to read."""

import hashlib
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image


def wnids(classes: int) -> list[str]:
    """That many WordNet ids, sorted."""
    return [f"n{1_000_000 + 137 * label:08d}" for label in range(classes)]


def pixels(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Random uint8 of that shape."""
    return rng.integers(0, 256, shape, dtype=np.uint8)


def write_images(folder: Path, names: list[str], *, size: int, rng: np.random.Generator) -> None:
    """A random square image for each name, in a folder that is made."""
    folder.mkdir(parents=True)
    for name in names:
        Image.fromarray(pixels(rng, size, size, 3)).save(folder / name)


def tiny_imagenet(
    root: Path,
    *,
    classes: int = 4,
    per_class: int = 3,
    test_per_class: int = 2,
    size: int = 64,
    seed: int = 0,
    words: Mapping[int, str] | None = None,
) -> Path:
    """ROOT/tiny-imagenet-200 as its zip unpacks. wnids.txt is not sorted; class i by sorted id is called "thing i".

    `words` replaces entries of words.txt by class.
    """
    rng = np.random.default_rng(seed)
    base = root / "tiny-imagenet-200"
    ids = wnids(classes)
    for wnid in ids:
        names = [f"{wnid}_{i}.JPEG" for i in range(per_class)]
        write_images(base / "train" / wnid / "images", names, size=size, rng=rng)
        boxes = "".join(f"{name}\t0\t0\t{size - 1}\t{size - 1}\n" for name in names)
        (base / "train" / wnid / f"{wnid}_boxes.txt").write_text(boxes)
    test_labels = rng.permutation(np.repeat(np.arange(classes), test_per_class))
    names = [f"val_{i}.JPEG" for i in range(len(test_labels))]
    write_images(base / "val" / "images", names, size=size, rng=rng)
    lines = (f"{name}\t{ids[label]}\t0\t0\t62\t62\n" for name, label in zip(names, test_labels, strict=True))
    (base / "val" / "val_annotations.txt").write_text("".join(lines))
    write_images(base / "test" / "images", ["test_0.JPEG"], size=size, rng=rng)
    (base / "wnids.txt").write_text("".join(f"{wnid}\n" for wnid in reversed(ids)))
    entries = {label: f"thing {label}, object number {label}" for label in range(classes)} | dict(words or {})
    other = "n99999999\tsomething that has no images\n"
    (base / "words.txt").write_text("".join(f"{ids[label]}\t{entry}\n" for label, entry in entries.items()) + other)
    return base


def imagenet_r(root: Path, *, classes: int = 4, per_class: int = 5, size: int = 64, seed: int = 0) -> Path:
    """ROOT/imagenet-r as its tar unpacks; class i by sorted id is called "thing_i"."""
    rng = np.random.default_rng(seed)
    base = root / "imagenet-r"
    ids = wnids(classes)
    for wnid in ids:
        names = [f"{('art', 'cartoon', 'sketch')[i % 3]}_{i}.jpg" for i in range(per_class)]
        write_images(base / wnid, names, size=size, rng=rng)
    lines = "".join(f"{wnid} thing_{label}\n" for label, wnid in enumerate(ids))
    (base / "README.txt").write_text(f"Renditions of objects.\n\nThe classes are:\n\n{lines}")
    return base


def image_folder(
    root: Path,
    *,
    splits: Mapping[str, int] | None = None,
    classes: tuple[str, ...] = ("ant", "bee", "cow"),
    suffix: str = ".png",
    size: int = 16,
    seed: int = 0,
) -> Path:
    """ROOT/SPLIT/CLASS/* with that many images of each class; the split "" gives ROOT/CLASS/*."""
    rng = np.random.default_rng(seed)
    for split, count in (splits or {"train": 4, "test": 2}).items():
        for name in classes:
            names = [f"{split or 'image'}_{i}{suffix}" for i in range(count)]
            write_images(root / split / name, names, size=size, rng=rng)
    return root


def arrays(
    *,
    classes: int = 100,
    per_class: int = 3,
    test_per_class: int = 1,
    validation_per_class: int = 0,
    size: int = 32,
    seed: int = 0,
) -> dict[str, np.ndarray]:
    """The arrays of an .npz, rows grouped by class, the classes called "kind 0", "kind 1", ..."""
    rng = np.random.default_rng(seed)
    made: dict[str, np.ndarray] = {"class_names": np.array([f"kind {label}" for label in range(classes)])}
    for part, count in (("train", per_class), ("test", test_per_class), ("validation", validation_per_class)):
        if count:
            made[f"{part}_images"] = pixels(rng, classes * count, size, size, 3)
            made[f"{part}_labels"] = np.repeat(np.arange(classes), count)
    return made


def cifar100_npz(root: Path, **settings: int) -> Path:
    """ROOT/cifar100.npz; settings as for `arrays`."""
    root.mkdir(parents=True, exist_ok=True)
    np.savez(root / "cifar100.npz", **arrays(**settings))  # type: ignore[arg-type]
    return root / "cifar100.npz"


class _OldPickler(pickle.Pickler):
    """Spells a dtype as the numpy of CIFAR's time did, with integers for its flags."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, np.dtype):
            return np.dtype, (obj.str[1:], 0, 1), obj.__reduce__()[2]
        return NotImplemented


def cifar100_python(root: Path, monkeypatch: pytest.MonkeyPatch, **settings: int) -> Path:
    """ROOT/cifar-100-python, with its checksums made known to torchvision; settings as for `arrays`."""
    from torchvision.datasets import CIFAR100

    made = arrays(**settings)
    base = root / "cifar-100-python"
    base.mkdir(parents=True)

    def write(name: str, content: dict[str, Any]) -> str:
        with (base / name).open("wb") as file:
            _OldPickler(file, protocol=2).dump(content)
        return hashlib.md5((base / name).read_bytes(), usedforsecurity=False).hexdigest()

    md5 = {
        part: write(
            part,
            {
                "data": made[f"{part}_images"].transpose(0, 3, 1, 2).reshape(len(made[f"{part}_images"]), -1),
                "fine_labels": made[f"{part}_labels"].tolist(),
            },
        )
        for part in ("train", "test")
    }
    names = {"fine_label_names": made["class_names"].tolist()}
    monkeypatch.setattr(CIFAR100, "train_list", [["train", md5["train"]]])
    monkeypatch.setattr(CIFAR100, "test_list", [["test", md5["test"]]])
    monkeypatch.setattr(CIFAR100, "meta", {**CIFAR100.meta, "md5": write("meta", names)})
    return base
