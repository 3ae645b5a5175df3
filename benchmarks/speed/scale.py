"""A hundred tasks on a small network: time, memory and bytes of each, and of the evaluation after it.

    python benchmarks/speed/scale.py --out docs/results/speed/scale.json      also scale.svg beside it; some minutes

Random images of 200 classes, two a task, ResNet-18 of width 8, PEARL at rank 2. The time of learning a task and the
bytes that it adds should be constant, and evaluation should take T^2 pairs of a sub-network and a test set in total: t
+ t - 1 of them after task t, so that its time is linear in t.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil
from timing import Row, show

from pearl.lifecycle.runs import execute
from pearl.reports.plots import lines
from pearl.settings.config import check_config
from pearl.storage.run_directory import RunDirectory
from pearl.storage.stored_task import read_manifest
from pearl.training.engine import Observer


def data(file: Path, tasks: int, per_class: int = 32) -> None:
    """Return two classes per task, of random pixels."""
    rng = np.random.default_rng(0)
    labels = np.arange(2 * tasks).repeat(per_class)
    images = rng.integers(0, 256, (len(labels), 8, 8, 3), dtype=np.uint8)
    np.savez(file, train_images=images, train_labels=labels, test_images=images, test_labels=labels)


class Memory(Observer):
    """The process's memory after each stage, in bytes."""

    def __init__(self) -> None:
        self.after: list[int] = []

    def event(self, kind: str, **facts: object) -> None:
        """Record the end of a stage."""
        if kind == "stage":
            self.after.append(psutil.Process().memory_info().rss)


def measure(tasks: int, folder: Path) -> Row:
    """Run it, and read the run's records."""
    data(folder / "random.npz", tasks)
    config = check_config(
        {
            "recipe": "scale",
            "data": {"name": "npz", "path": str(folder / "random.npz")},
            "stream": {"tasks": tasks},
            "images": {"size": 8, "augment": "crop", "pad": 1},
            "backbone": {"name": "resnet18", "width": 8},
            "method": {"name": "pearl", "rank": {"name": "fixed", "r": 2}},
            "train": {"epochs": 2, "batch_size": 32},
        }
    )
    memory, started = Memory(), time.perf_counter()
    run = execute(config, path=folder / "run", show=memory)
    seconds = time.perf_counter() - started
    paths = RunDirectory(run.path).finished
    return {
        "tasks": tasks,
        "seconds": round(seconds, 1),
        "learning": [round(sum(read_manifest(target)["seconds"].values()), 3) for target in paths],
        "evaluation": [stage["evaluation_seconds"] for stage in run.results["stages"]],
        "bytes": [sum(file.stat().st_size for file in target.iterdir()) for target in paths],
        "parameters": [stage["parameters"] for stage in run.results["stages"]],
        "memory": memory.after,
    }


def growth(values: list[float]) -> float:
    """Return the mean of the last tenth over the mean of the first tenth after the first two tasks."""
    tenth = max(1, len(values) // 10)
    return float(np.mean(values[-tenth:]) / np.mean(values[2 : 2 + tenth]))


def summary(row: Row) -> Row:
    """Summarise the series in a few numbers."""
    tasks = np.arange(2, row["tasks"])
    return {
        "tasks": row["tasks"],
        "seconds in all": row["seconds"],
        "milliseconds that a task adds to learning the next": round(
            1e3 * float(np.polyfit(tasks, row["learning"][2:], 1)[0]), 2
        ),
        "bytes a task adds, last tenth / first tenth": round(growth(row["bytes"]), 3),
        "evaluation grows as tasks to the power": round(
            float(np.polyfit(np.log(tasks[8:]), np.log(row["evaluation"][10:]), 1)[0]), 2
        ),
        "memory a task adds (kB)": round(float(np.polyfit(tasks, row["memory"][2:], 1)[0]) / 1e3),
    }


def figure(row: Row) -> str:
    """Draw the seconds to learn and to evaluate, by task."""
    at = np.arange(1, row["tasks"] + 1).astype(float)
    series = {
        "learning the task": (at, np.array(row["learning"]), None),
        "evaluating all tasks so far": (at, np.array(row["evaluation"]), None),
    }
    alt = "Seconds to learn each of a hundred tasks, and to evaluate all tasks so far"
    return lines(series, name="scale", alt=alt, x="task", y="seconds")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=100)
    parser.add_argument("--out", type=Path, help="a JSON file to write; the figure goes beside it as .svg")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        row = measure(options.tasks, Path(folder))
    show("many tasks", [summary(row)], options.out)
    if options.out is not None:
        measured = json.loads(options.out.read_text()) | {"series": row}
        options.out.write_text(json.dumps(measured) + "\n")
        options.out.with_suffix(".svg").write_text(standalone(figure(row)) + "\n", encoding="utf-8")


def standalone(svg: str) -> str:
    """Return the figure for use outside a page, with its own colours."""
    colours = {"--grid": "#ddd", "--paper": "#fff", "--series-0": "#2b6cb0", "--series-1": "#c05621"}
    for name, colour in colours.items():
        svg = svg.replace(f"var({name})", colour)
    return svg


if __name__ == "__main__":
    main()
