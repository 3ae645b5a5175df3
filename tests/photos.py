"""Small photos: scikit-learn's digits as image files, a folder per class, and what a test needs to learn them."""

import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from pearl.lifecycle import learning
from pearl.lifecycle.choices import LearnOptions
from pearl.training.engine import Observer

# a network and images so small that a task is learnt in a second
SETTINGS: dict[str, Any] = {
    "backbone": {"name": "resnet18", "width": 8},
    "images": {"size": 8, "pad": 1, "flip": False},
    "train": {"epochs": 4, "batch_size": 8, "phases": {"probe": {"epochs": 2}}},
}


# the same with a smaller network and two steps a phase, and three tasks of two classes each, by their first digit
SMALL = {**SETTINGS, "backbone": {"name": "convnet", "width": 2}, "train": {"epochs": 1}, "engine": {"max_steps": 2}}
TASKS = {"first": 0, "second": 2, "third": 4}


class StopAt(Observer):
    """Asks to stop after a step of a phase."""

    def __init__(self, phase: str, step: int) -> None:
        self.at, self.phase = (phase, step), ""

    def event(self, kind: str, **facts: Any) -> None:
        if kind == "phase":
            self.phase = facts["phase"]

    def step(self, done: int, total: int) -> None:
        if (self.phase, done) == self.at:
            os.kill(os.getpid(), signal.SIGINT)


@cache
def digit(label: int) -> np.ndarray:
    """All images of one digit, uint8 (N, 8, 8)."""
    from sklearn.datasets import load_digits

    data = load_digits()
    return np.rint(data.images[data.target == label] * (255 / 16)).astype(np.uint8)


def write_class(folder: Path, label: int, count: int = 16, *, start: int = 0) -> Path:
    """Images of a digit as files of a folder."""
    folder.mkdir(parents=True)
    for i, image in enumerate(digit(label)[start : start + count]):
        Image.fromarray(image).save(folder / f"{i:03d}.png")
    return folder


def write_photos(root: Path, classes: Mapping[str, int], count: int = 16, *, start: int = 0) -> Path:
    """ROOT/CLASS/*.png with images of the digit that each class stands for."""
    for name, label in classes.items():
        write_class(root / name, label, count, start=start)
    return root


def write_tasks(root: Path) -> None:
    """ROOT/TASK/CLASS/*.png for all `TASKS`, with four images of each class."""
    for task, label in TASKS.items():
        write_photos(root / task, {f"{task} {i}": label + i for i in (0, 1)}, 4)


def learn(path, data, *, device="auto", show=None, minutes=10.0, **options: Any) -> None:
    """`learning.learn` with options by name."""
    learning.learn(path, data, LearnOptions(**options), device=device, show=show, minutes=minutes)


def files_of(path: Path) -> dict[str, tuple[bytes, int]]:
    """Bytes and time of every file that learning on may not touch."""
    paths = [path / "config.yaml", *(path / "reference").rglob("*"), *(path / "tasks").rglob("*")]
    return {
        str(location.relative_to(path)): (location.read_bytes(), location.stat().st_mtime_ns)
        for location in paths
        if location.is_file()
    }


def weights_of(path: Path) -> dict[str, bytes]:
    """The weights and statistics of every task."""
    return {str(location.relative_to(path)): location.read_bytes() for location in path.rglob("*.safetensors")}


@contextmanager
def folders(root: Path) -> Iterator[None]:
    """PEARL_DATA and PEARL_RUNS below `root`, for a fixture that lives longer than a test."""
    before = {key: os.environ.get(key) for key in ("PEARL_RUNS", "PEARL_DATA")}
    os.environ.update(PEARL_RUNS=str(root / "runs"), PEARL_DATA=str(root / "data"))
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                del os.environ[key]
            else:
                os.environ[key] = value
