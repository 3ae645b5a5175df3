"""The targets of attacks: photos, a model of two tasks, a run, and their predictions when undisturbed."""

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

TINY = ["backbone.width=2", "engine.channels_last=false", "engine.precision=fp32", "train.batch_size=8"]
TINY += ["train.epochs=1", "engine.max_steps=2"]
SMALL = [*TINY, "stream.classes=4", "stream.tasks=2", "stream.per_class=4", "stream.test_per_class=2"]
LEARN = [*TINY, "images.size=8", "images.pad=1", "images.flip=false"]
RUN = ["run", "digits", "method=er", "method.buffer_size=8", *TINY, "stream.classes=4", "stream.tasks=2"]
RUN += ["stream.per_class=8", "stream.test_per_class=4", "-q"]
FIRST, SECOND = ("zero", "one"), ("two", "three")


@dataclass
class Case:
    """One input: the `pearl` command in a folder prepared for it, and the expected result."""

    what: str  # a description for readers of a failure
    arguments: list[str]
    model: Path | None = None  # its files must not change; for learning, those of finished tasks
    learns: bool = False
    sealed: bool = False  # no file may be added either
    answer: Any = None  # the result of `answer_of` for the output with exit code 0; None: any
    code: tuple[int, ...] = (0, 2)
    env: dict[str, str] = field(default_factory=dict)
    stdin: bytes = b""
    memory: float = 3.0  # GiB more than at the start


class Stage:
    """The originals, below one folder. Every case uses copies."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.photos, self.model, self.runs = root / "photos", root / "model", root / "runs"

    @property
    def run(self) -> Path:
        """Return the run's directory."""
        return next(path for path in self.runs.iterdir() if path.is_dir())

    @property
    def answers(self) -> dict[str, Any]:
        """Return the originals' results, by query."""
        return json.loads((self.root / "answers.json").read_text())

    def copy(self, folder: Path, name: str = "model") -> Path:
        """Copy the model, or the run to where its command finds it."""
        if name == "model":
            return Path(shutil.copytree(self.model, folder / "model", symlinks=True))
        return Path(shutil.copytree(self.run, folder / "runs" / self.run.name, symlinks=True))


def write_photos(root: Path) -> None:
    """Write four classes of four small images, each class of its own brightness; tasks `first` and `second`."""
    rng = np.random.default_rng(0)
    for task, names in (("first", FIRST), ("second", SECOND)):
        for name in names:
            (root / task / name).mkdir(parents=True)
            for i in range(4):
                pixels = rng.integers(30 * len(name), 30 * len(name) + 60, (8, 8, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(root / task / name / f"{i}.png")


def asked(model: Path, photos: Path) -> dict[str, list[str]]:
    """Return queries on a directory whose results must not change."""
    return {
        "predict": ["predict", f"{model}", f"{photos}/first", "--json", "--top", "4"],
        "evaluate": ["evaluate", f"{model}", "--data", f"{photos}/first", "--json"],
    }


def answer_of(arguments: list[str], out: str) -> Any:
    """Return the part of an output that must be correct: predictions by image, counts, or a line of a page."""
    if arguments[0] == "predict":
        rows = [json.loads(line) for line in out.splitlines()]
        return {
            "/".join(Path(row["file"]).parts[-2:]): [
                [best["class"], best["task"], round(best["probability"], 4)] for best in row["predictions"]
            ]
            for row in rows
        }
    if arguments[0] == "evaluate":
        return json.loads(out)
    return [line for line in out.splitlines() if line.startswith(("class-IL", "task-IL", "task identified"))]
