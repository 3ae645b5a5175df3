"""Commands as people wait for them: CPU seconds of whole processes, against a script of their own.

    python benchmarks/speed/people.py --out docs/results/speed/people.json                some minutes

The peer loads timm's DeiT-Tiny and passes one image through it. Goals: a prediction within 0.9 of it, and one more
class of 20 photos by statistics alone, three passes each, within 1.3. With heads, learning task 40 of a tiny network
should take as long as learning task 4; each task's tensors are loaded, so that it takes longer.
"""

import argparse
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image
from timing import Row, show

import pearl

PEER = """
import timm, torch
net = timm.create_model("deit_tiny_patch16_224", num_classes=0).eval()
with torch.no_grad():
    net(torch.zeros(1, 3, 224, 224))
"""
VIT = {"backbone": {"name": "timm/deit_tiny_patch16_224", "pretrained": False}, "smoke": True}
TINY = {
    "backbone": {"name": "resnet18", "width": 8},
    "images": {"size": 8, "resize": 8, "augment": "none"},
    "method": {"name": "pearl", "rank": {"name": "fixed", "r": 2}, "classifier": "heads"},
    "train": {"epochs": 1},
}


def photos(folder: Path, classes: list[str], count: int) -> Path:
    """Write photos of 600 x 400 pixels with random contents, a folder per class."""
    rng = np.random.default_rng(0)
    for name in classes:
        (folder / name).mkdir(parents=True)
        for i in range(count):
            small = Image.fromarray(rng.integers(0, 256, (6, 4, 3), dtype=np.uint8))
            small.resize((600, 400), Image.Resampling.BICUBIC).save(folder / name / f"{i}.jpg")
    return folder


def process(*command: str) -> float:
    """Return the CPU seconds, user and system, of a process."""

    def spent() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    before = spent()
    subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL)
    return spent() - before


def commands(root: Path, repeats: int) -> list[Row]:
    """Return the rows of a prediction and of a class that is added, in turns with the peer."""
    model, more = root / "model", photos(root / "more", ["new"], 20)
    for t in range(3):
        pearl.learn(model, photos(root / f"{t}", [f"{t}a", f"{t}b"], 4), quiet=True, **({} if t else VIT))
    photo = next((root / "0" / "0a").iterdir())

    def adding() -> float:
        seconds = process("-m", "pearl", "learn", str(model), "--data", str(more), "--fast", "--quiet")
        pearl.load(model).undo()
        return seconds

    work: dict[str, Callable[[], float]] = {
        "predict a photo": lambda: process("-m", "pearl", "predict", str(model), str(photo)),
        "add a class of 20 photos, --fast": adding,
        "timm alone": lambda: process("-c", PEER),
    }
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(repeats):
        for name, run in work.items():
            seconds[name].append(run())
    *ours, peer = work
    rows = []
    for name in ours:
        each = [mine / its for mine, its in zip(seconds[name], seconds[peer], strict=True)]
        middle = {key: round(statistics.median(seconds[key]), 2) for key in (name, peer)}
        rows.append({"command": name, "CPU seconds": middle, "ratio": _spread(each)})
    return rows


def growth(root: Path, tasks: int) -> Row:
    """Return the CPU time of the last five of some tasks, relative to tasks 3 to 7, with heads."""
    rng, seconds = np.random.default_rng(0), []
    for t in range(tasks):
        images = rng.integers(0, 256, (40, 8, 8, 3), dtype=np.uint8), np.arange(2).repeat(20), [f"{t}a", f"{t}b"]
        start = time.process_time()
        pearl.learn(
            root / "heads", images, task=f"{t}", quiet=True, **({"recipe": "photos-resnet18", **TINY} if not t else {})
        )
        seconds.append(time.process_time() - start)
    first, last = statistics.median(seconds[2:7]), statistics.median(seconds[-5:])
    return {
        "command": f"learn task {tasks}, heads, tiny network",
        "CPU seconds": {"early": round(first, 3), "late": round(last, 3)},
        "ratio": [round(last / first, 2)],
    }


def _spread(values: list[float]) -> list[float]:
    return [round(value, 2) for value in (statistics.median(values), min(values), max(values))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tasks", type=int, default=40)
    parser.add_argument("--out", type=Path, help="a JSON file to write")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = [*commands(Path(folder), options.repeats), growth(Path(folder), options.tasks)]
    show("commands as people wait for them", rows, options.out)


if __name__ == "__main__":
    main()
