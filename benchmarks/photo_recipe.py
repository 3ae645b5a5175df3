"""How much training does a set of photos need? Accuracy against CPU seconds, for the recipe that `pearl learn` uses.

    OMP_NUM_THREADS=1 python benchmarks/photo_recipe.py        missing rows; docs/results/photo_recipe.md
    python benchmarks/photo_recipe.py --only-page

Streams of 24 classes in 4 tasks, 16 photos a class, at 112 pixels, with DeiT-Tiny and class statistics; each seed draws
other classes. The first three tasks train a sub-network each. A variant differs from the first one in the epochs of the
probe, which chooses the ranks, and of the adapt phase, which trains the sub-network. Accuracies are on held-out
training photos, 8 or 16 a class. CPU seconds are those of the whole run, in one thread.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from pages import RESULTS, cell, table, write_page
from pearl.lifecycle.runs import execute
from pearl.settings.config import load_config

DATA = {
    "Grocery": ["cpu-grocery-deit_tiny", "stream.per_class=24"],
    "CIFAR-100": ["cpu-cifar100-deit_tiny", "stream.per_class=32", "stream.validation=0.5"],
}
COMMON = ["stream.tasks=4", "stream.classes=24", "stream.validation=0.3333", "stream.evaluate_on=validation"]
COMMON += ["method.targets=auto", "method.classifier.name=statistics", "engine.precision=auto"]
FIXED = ["method.rank.name=fixed", "method.rank.r=8"]
LINEAR = ["method.targets=linear", "train.phases.adapt.lr=0.002"]
VARIANTS = {  # epochs of probe and adapt; without a probe the rank is given
    "5 + 10": (5, 10, []),
    "1 + 6": (1, 6, []),
    "1 + 4": (1, 4, []),
    "no probe, rank 8, 4": (0, 4, FIXED),
    "all linear layers, no probe, rank 8, 4": (0, 4, [*FIXED, *LINEAR]),
    "all linear layers, 1 + 4": (1, 4, LINEAR),
}
FIRST = "5 + 10"


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="+", default=[*VARIANTS], choices=VARIANTS, metavar="VARIANT")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--only-page", action="store_true", help="run nothing")
    options = parser.parse_args(arguments)
    file = RESULTS / "photo_recipe.json"
    rows: dict[str, dict[str, float]] = json.loads(file.read_text()) if file.is_file() else {}
    for seed in [] if options.only_page else options.seeds:
        for data in DATA:
            for variant in options.variants:
                key = f"{data} | {variant} | {seed}"
                if key not in rows:
                    rows[key] = row(data, variant, seed)
                    print(key, rows[key], flush=True)
                    file.write_text(json.dumps(rows, indent=1, sort_keys=True) + "\n")
    write(rows)


def row(data: str, variant: str, seed: int) -> dict[str, float]:
    """Return accuracies in percent, the mean rank and CPU seconds of one run."""
    recipe, *settings = DATA[data]
    probe, adapt, rank = VARIANTS[variant]
    phases = [f"train.phases.adapt.epochs={adapt}", f"train.phases.allocate.epochs={max(1, probe)}"]
    phases += [f"train.phases.probe.epochs={probe}"] if probe else []
    config = load_config(recipe, [*COMMON, *settings, *phases, *rank, f"seed={seed}", f"stream.order={seed}"])
    with tempfile.TemporaryDirectory() as folder:
        began = time.process_time()
        run = execute(config, path=Path(folder) / "run")
        seconds = time.process_time() - began
        figures = {name: run.summary[name] for name in ("class_il.final", "class_il.average", "task_il.final")}
        mean_rank = run.mean_rank or 0.0
    return figures | {"mean_rank": mean_rank, "seconds": seconds}


def write(rows: dict[str, dict[str, float]]) -> None:
    """Write a table for each data set; the text below the mark is kept."""
    lines = ["# How much training photos need", "", (__doc__ or "").split("\n\n")[2].replace("\n", " ")]
    titles = ["epochs, probe + adapt", "n", "class-IL (%)", "class-IL against the first (points)", "task-IL (%)"]
    for data in DATA:
        body = []
        for variant in VARIANTS:
            seeds = sorted(key.rpartition(" | ")[2] for key in rows if key.startswith(f"{data} | {variant} | "))
            results = [rows[f"{data} | {variant} | {seed}"] for seed in seeds]
            first = [rows.get(f"{data} | {FIRST} | {seed}") for seed in seeds]
            apart = [a["class_il.final"] - b["class_il.final"] for a, b in zip(results, first, strict=True) if b]
            if results:
                cells = [cell((one["class_il.final"] for one in results), 1), cell(apart, 1)]
                cells += [cell((one[name] for one in results), 1) for name in ("task_il.final", "mean_rank", "seconds")]
                body.append([variant, str(len(results)), *cells])
        lines += ["", f"## {data}", "", *table([*titles, "mean rank", "CPU seconds"], body)]
    write_page(RESULTS / "photo_recipe.md", lines)


if __name__ == "__main__":
    main(sys.argv[1:])
