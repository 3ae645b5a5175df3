"""The accuracy that `pearl learn` estimates after a task, compared with that on unseen images.

    python benchmarks/estimates.py                               all streams, seed 0; docs/results/estimates.md
    python benchmarks/estimates.py --streams digits --seeds 0 1 2

A model learns the tasks of a stream one by one, as a user's would, and its `outcome` after each is recorded; after the
last one, for old classes too. Data is looked for under $PEARL_DATA.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import pearl
from pages import RESULTS, cell, table, write_page
from pearl.lifecycle.runs import prepare
from pearl.settings.config import load_config

STREAMS = {
    "digits": ("digits", {}),
    "CIFAR-20": ("cpu-cifar20-resnet18", {"stream": {"per_class": 100}, "backbone": {"width": 16}}),
    "Grocery": ("cpu-grocery-deit_tiny", {"train": {"epochs": 3}}),
}
COLUMNS = {
    "new": "new classes",
    "new_estimated": "estimated",
    "then": "old classes when learnt",
    "then_estimated": "estimated",
    "now": "old classes after the last task",
    "now_estimated": "estimated",
}


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", nargs="+", default=[*STREAMS], choices=STREAMS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    options = parser.parse_args(arguments)
    file = RESULTS / "estimates.json"
    rows: dict[str, dict[str, float]] = json.loads(file.read_text()) if file.is_file() else {}
    for stream in options.streams:
        for seed in options.seeds:
            if f"{stream} | {seed}" not in rows:
                rows[f"{stream} | {seed}"] = row(*STREAMS[stream], seed)
                file.write_text(json.dumps(rows, indent=1, sort_keys=True) + "\n")
    write(rows)


def row(recipe: str, settings: dict[str, Any], seed: int) -> dict[str, float]:
    """Return class-IL in percent, means over tasks: the model's estimates, and its test accuracy."""
    dotted = [f"{section}.{key}={value}" for section, own in settings.items() for key, value in own.items()]
    data = prepare(load_config(recipe, [*dotted, f"seed={seed}"]))
    tasks = data.stream.tasks
    names = [*data.stream.classes]
    tests = [(task.test_images(data.test), task.test_labels, names) for task in tasks]
    told, measured = [], []
    with tempfile.TemporaryDirectory() as folder:
        for task, test in zip(tasks, tests, strict=True):
            shown = task.train_images(data.train), task.train_labels, names
            model = pearl.learn(
                Path(folder) / "model", shown, recipe=recipe if task is tasks[0] else None, seed=seed, **settings
            )
            told.append(model.outcome)
            measured.append(right(model, test))
        now = fmean(right(model, test) for test in tests[:-1])
    last = told[-1]
    return {
        "new": fmean(measured),
        "new_estimated": fmean(one.new for one in told),
        "then": fmean(measured[:-1]),
        "then_estimated": last.old_then,
        "now": now,
        "now_estimated": last.old_now,
    }


def right(model: Any, test: Any) -> float:
    """Return the percentage of images classified correctly."""
    answers = model.evaluate(test).known
    return 100 * float((answers.best == answers.true).mean())


def write(rows: dict[str, dict[str, float]]) -> None:
    """Write a line per stream, over its seeds."""
    body = []
    for stream in STREAMS:
        of = [value for key, value in rows.items() if key.startswith(f"{stream} | ")]
        if of:
            body.append([stream, str(len(of)), *(cell((one[column] for one in of), 1) for column in COLUMNS)])
    about = "`python benchmarks/estimates.py`; mean ± standard deviation over n seeds, class-IL in percent."
    head = ["", "n", *COLUMNS.values()]
    write_page(RESULTS / "estimates.md", ["# Estimated accuracy of `learn`", "", about, "", *table(head, body)])


if __name__ == "__main__":
    main(sys.argv[1:])
