"""The accuracy that `pearl learn` estimates after a task, compared with that on unseen images of the same kind.

    python benchmarks/estimates.py                               all streams, seeds 0 to 2; docs/results/estimates.md
    python benchmarks/estimates.py --streams digits --seeds 0 --most 1

A model learns two tasks, as a user's would. Classes and images are drawn by the seed; other images of the same folders
or files are the unseen ones. Finished rows are kept. Data is looked for under $PEARL_DATA.
"""

import argparse
import json
import math
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

import pearl
from pages import RESULTS, table, write_page
from pearl.data.images import read_all
from pearl.settings.config import load_config
from pearl.settings.parts import SOURCES

VIT = {
    "recipe": "photos-vit",
    "images": {"size": 112},
    "backbone": {"name": "timm/deit_tiny_patch16_224", "weights": "deit_tiny_patch16_224.safetensors"},
}
RESNET = {
    "recipe": "photos-resnet18",
    "images": {"size": 32, "pad": 4},
    "backbone": {"name": "resnet18", "width": 16},
    "train": {"epochs": 20},
}
TASKS = 2


class Stream(NamedTuple):
    """Two tasks of some classes each: the recipe of the data, images per class to learn and to test on, settings."""

    data: str
    classes: int
    photos: int
    tests: int
    settings: dict[str, Any]
    coarse: bool = False  # the superclasses of CIFAR-100


STREAMS = {
    "digits, ResNet-18": Stream("digits", 5, 40, 60, {"recipe": "digits"}),
    "Grocery, DeiT-Tiny": Stream("cpu-grocery-deit_tiny", 5, 15, 15, VIT),
    "CIFAR-100, DeiT-Tiny": Stream("cpu-cifar100-deit_tiny", 5, 15, 30, VIT),
    "CIFAR-100 superclasses, DeiT-Tiny": Stream("cpu-cifar100-deit_tiny", 5, 15, 30, VIT, True),
    "CIFAR-100, ResNet-18 from scratch": Stream("cpu-cifar100-deit_tiny", 5, 60, 60, RESNET),
}


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", nargs="+", default=[*STREAMS], choices=STREAMS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--most", type=int, help="end after so many new rows")
    options = parser.parse_args(arguments)
    file = RESULTS / "estimates.json"
    rows: dict[str, list[dict[str, float]]] = json.loads(file.read_text()) if file.is_file() else {}
    todo = [(stream, seed) for seed in options.seeds for stream in options.streams if f"{stream} | {seed}" not in rows]
    for stream, seed in todo[: options.most]:
        rows[f"{stream} | {seed}"] = tasks_of(STREAMS[stream], seed)
        file.write_text(json.dumps(rows, indent=1, sort_keys=True) + "\n")
    write(rows)


def tasks_of(stream: Stream, seed: int) -> list[dict[str, float]]:
    """Return, for each task, class-IL on its classes in percent: measured, estimated, and not corrected."""
    found, rng = [], np.random.default_rng(seed)
    config = load_config(stream.data)
    source = SOURCES.build(config.data).train
    labels = np.array(source.labels)
    if stream.coarse:
        labels = np.load(Path(os.environ["PEARL_DATA"]) / "cifar100.npz")["fine_to_coarse"][labels]
    count = stream.photos + stream.tests
    classes = [c for c in rng.permutation(np.unique(labels)) if (labels == c).sum() >= count]
    with tempfile.TemporaryDirectory() as folder:
        for task in range(TASKS):
            own = classes[task * stream.classes : (task + 1) * stream.classes]
            drawn = np.stack([rng.permutation(np.flatnonzero(labels == c))[:count] for c in own])
            parts = []
            for rows in (drawn[:, : stream.photos], drawn[:, stream.photos :]):
                some = [source.images[row] for row in rows.ravel()]
                pixels = np.stack(some) if isinstance(source.images, np.ndarray) else read_all(some, 128)[1]
                parts.append((pixels, np.repeat(np.arange(len(own)), rows.shape[1]), [str(c) for c in own]))
            new = {key: value for key, value in stream.settings.items() if not task or key == "train"}
            model = pearl.learn(Path(folder) / "model", parts[0], task=f"task {task}", seed=seed, quiet=True, **new)
            answers = model.evaluate(parts[1]).known
            entry = model.tasks[-1].manifest["estimate"]
            found.append(
                {
                    "measured": 100 * float((answers.best == answers.true).mean()),
                    "estimated": model.outcome.new,
                    "left_out": 100 * sum(entry["class_il"]) / sum(entry["total"]),
                    "images": sum(entry["total"]),
                    "unseen": len(answers.true),
                }
            )
    return found


def chance(row: dict[str, float]) -> float:
    """Return the mean absolute difference of two binomial shares of these numbers of images, in points."""
    share = min(max(row["measured"] / 100, 0.01), 0.99)
    return 100 * math.sqrt(2 / math.pi * share * (1 - share) * (1 / row["images"] + 1 / row["unseen"]))


def write(rows: dict[str, list[dict[str, float]]]) -> None:
    """Write a line per stream and task, over the seeds, and one for all."""
    lines = []
    for stream in (*STREAMS, ""):
        for tasks in ([0], [1]) if stream else ([0, 1],):
            some = [
                found[task]
                for key, found in rows.items()
                if key.startswith(f"{stream} | " if stream else "")
                for task in tasks
            ]
            if not some:
                continue
            errors = {kind: [row[kind] - row["measured"] for row in some] for kind in ("estimated", "left_out")}
            parts = [fmean(row["measured"] for row in some), fmean(row["estimated"] for row in some)]
            for values in errors.values():
                parts += [fmean(values), fmean(map(abs, values))]
            parts.insert(4, fmean(map(chance, some)))
            number = str(tasks[0] + 1) if stream else "both"
            signed = [f"{part:+.1f}" if place in (2, 5) else f"{part:.1f}" for place, part in enumerate(parts)]
            lines.append([stream or "all", number, str(len(some)), *signed])
    head = ["", "task", "n", "measured", "estimated", "bias", "mean absolute error", "by chance alone"]
    head += ["bias without correction", "its mean absolute error"]
    about = "`python benchmarks/estimates.py`; class-IL on a task's own classes after it, in percent; errors in points."
    write_page(RESULTS / "estimates.md", ["# Estimated accuracy of `learn`", "", about, "", *table(head, lines)])


if __name__ == "__main__":
    main(sys.argv[1:])
