"""Peak memory of learning a task that has more photos than fit into memory.

    python benchmarks/speed/many_photos.py --photos 20000 200000 --out docs/results/speed/many_photos.json

Made-up photos of 192 x 128 pixels in 20 classes, JPEG, are learnt by `pearl learn` at 112 pixels for one epoch per
phase, by a ConvNet of width 8. A decoded photo takes 37.6 kB, so that 200,000 take 7.5 GB: more than a quarter of 24
GB, and therefore a mapped file. Of the process, memory of its own (RssAnon) is what it needs, and pages of mapped files
(RssFile) are what the system lends it. Photos and model are written below the current folder and removed.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image
from timing import Row, show

CLASSES = 20
SETTINGS = (
    *("backbone.name=convnet", "backbone.width=8", "images.size=112", "train.epochs=1", "train.batch_size=128"),
    *("method.rank.name=fixed", "method.rank.r=2", "train.phases.adapt.epochs=1"),
)


def make(folder: Path, photos: int) -> None:
    """Write JPEG files of random colours around one of each class."""
    rng = np.random.default_rng(0)
    colours = rng.integers(0, 256, (CLASSES, 3))
    for number in range(photos):
        place = folder / f"class {number % CLASSES:02}"
        place.mkdir(parents=True, exist_ok=True)
        pixels = (colours[number % CLASSES] + rng.integers(-60, 60, (4, 6, 3))).clip(0, 255).astype(np.uint8)
        Image.fromarray(pixels).resize((192, 128), Image.Resampling.BILINEAR).save(place / f"{number}.jpg")


def learn(photos: int) -> Row:
    """Learn so many photos in a process, and read its memory four times a second."""
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        make(Path(folder) / "photos", photos)
        command: list[str | Path] = [Path(sys.executable).with_name("pearl"), "learn", f"{folder}/model", "--quiet"]
        command += ["--recipe", "photos-resnet18", "--data", f"{folder}/photos", *SETTINGS]
        before, started = child_seconds(), time.monotonic()
        peaks = {"RssAnon": 0, "RssFile": 0}
        process = subprocess.Popen(command)
        while process.poll() is None:
            for key, size in memory(process.pid).items():
                peaks[key] = max(peaks[key], size)
            time.sleep(0.25)
        if process.returncode:
            sys.exit(f"pearl learn ended with {process.returncode}")
    return {
        "photos": photos,
        "decoded GB": round(photos * 112 * 112 * 3 / 1e9, 2),
        "own memory GB": round(peaks["RssAnon"] / 1e9, 2),
        "mapped files GB": round(peaks["RssFile"] / 1e9, 2),
        "seconds": round(time.monotonic() - started),
        "CPU seconds": round(child_seconds() - before),
    }


def child_seconds() -> float:
    """Return the CPU seconds of all processes that this one has waited for."""
    times = os.times()
    return times.children_user + times.children_system


def memory(pid: int) -> dict[str, int]:
    """Return RssAnon and RssFile of a process in bytes; nothing if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.split(":") for line in lines if line.startswith(("RssAnon", "RssFile")))
    return {key: 1024 * int(text.split()[0]) for key, text in pairs}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--photos", nargs="+", type=int, default=[20_000, 200_000])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows: list[Row] = []
    for photos in options.photos:
        rows.append(learn(photos))
        show("learning many photos", rows, options.out)
