"""What is attacked: photos, a model of two tasks, a run, and what they answer as long as nobody touches them."""

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
    """One input: what `pearl` is called with in a folder that was prepared for it, and what is right."""

    what: str  # in words, for whoever reads of a failure
    arguments: list[str]
    model: Path | None = None  # its files stay as they are, of one that learns those that are finished
    learns: bool = False
    sealed: bool = False  # nor is a file added to it
    answer: Any = None  # what `answer_of` makes of the output if the exit code is 0; None: any
    code: tuple[int, ...] = (0, 2)
    env: dict[str, str] = field(default_factory=dict)
    stdin: bytes = b""
    memory: float = 3.0  # GiB more than it starts with


class Stage:
    """The originals, below one folder. Every case works on copies."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.photos, self.model, self.runs = root / "photos", root / "model", root / "runs"

    @property
    def run(self) -> Path:
        """The run's directory."""
        return next(place for place in self.runs.iterdir() if place.is_dir())

    @property
    def answers(self) -> dict[str, Any]:
        """What the originals say, by what they are asked."""
        return json.loads((self.root / "answers.json").read_text())

    def copy(self, folder: Path, name: str = "model") -> Path:
        """A copy of the model, or of the run where its command would find it."""
        if name == "model":
            return Path(shutil.copytree(self.model, folder / "model", symlinks=True))
        return Path(shutil.copytree(self.run, folder / "runs" / self.run.name, symlinks=True))


def write_photos(root: Path) -> None:
    """Four classes of four small images, each class of its own brightness; tasks `first` and `second`."""
    rng = np.random.default_rng(0)
    for task, names in (("first", FIRST), ("second", SECOND)):
        for name in names:
            (root / task / name).mkdir(parents=True)
            for i in range(4):
                pixels = rng.integers(30 * len(name), 30 * len(name) + 60, (8, 8, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(root / task / name / f"{i}.png")


def asked(model: Path, photos: Path) -> dict[str, list[str]]:
    """Questions to a directory whose answers must not change."""
    return {
        "predict": ["predict", f"{model}", f"{photos}/first", "--json", "--top", "4"],
        "evaluate": ["evaluate", f"{model}", "--data", f"{photos}/first", "--json"],
    }


def answer_of(arguments: list[str], out: str) -> Any:
    """What an output says, as far as it has to be right: predictions by image, counts, or a line of a page."""
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
