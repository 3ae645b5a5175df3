"""How cheaply can the ranks of the paper's rule be computed without fine-tuning the whole network?

    python benchmarks/probes.py                                     both networks, seeds 0, 1, 2; docs/results/probes.md
    python benchmarks/probes.py --streams ResNet --seeds 0 --probes targets
    python benchmarks/probes.py --set stream.classes=8 --set stream.tasks=2 --to tried          anything smaller

A run of PEARL per probe, whose ranks are compared task by task with those of the full probe: overlap is the number of
parameters that both give the same layers, relative to those that either gives; correlation is Spearman's, over the
layers. Updates train in the same way afterwards, so that accuracies differ only by ranks. Finished runs are skipped, so
the command can be stopped and started again. Data is looked for under $PEARL_DATA, runs lie under $PEARL_RUNS.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from scipy.stats import spearmanr

from pages import RESULTS, cell, table, write_page
from pearl.lifecycle.runs import Run, execute
from pearl.reports.progress import display
from pearl.settings.config import load_config

# Learning rates of the probe at which thresholds have the paper's size, .1 to .8. At the ViT recipe's own rate all
# ranks are 1, which any probe would find.
STREAMS = {
    "CIFAR, ResNet-18, 5 tasks of 8": ["table-resnet18"],
    "CIFAR-100, DeiT-Tiny, 3 tasks of 10": [
        *("cpu-cifar100-deit_tiny", "stream.tasks=3", "stream.classes=30", "train.phases.probe.lr=0.02")
    ],
}
FULL = "full"
PROBES = {
    FULL: [],
    "full, other draws": ["method.probe_images=0.999"],  # all but one image per class: the effect of chance on ranks
    "full, 1 epoch": ["train.phases.probe.epochs=1"],
    "full, 2 epochs": ["train.phases.probe.epochs=2"],
    "full, half of the images": ["method.probe_images=0.5"],
    "full, a fifth of the images": ["method.probe_images=0.2"],
    "targets": ["method.probe=targets"],
}
COLUMNS = {
    "seconds": "probe (s a task)",
    "mean_rank": "mean rank",
    "overlap": "overlap",
    "correlation": "rank correlation",
    "parameters_million": "parameters (M)",
    "class_il.final": "class-IL A_T",
    "task_il.final": "task-IL A_T",
}
PLACES = dict.fromkeys(["mean_rank", "overlap", "correlation", "parameters_million"], 2)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", nargs="+", default=[""], metavar="STREAM", help="by a part of its name")
    parser.add_argument("--probes", nargs="+", default=[*PROBES], choices=[*PROBES], metavar="PROBE")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="in all runs")
    parser.add_argument("--to", type=Path, default=RESULTS, help="folder of probes.json and probes.md")
    options = parser.parse_args(arguments)
    if options.set and options.to == RESULTS:
        parser.error("--set makes other runs than those of docs/results; name a folder for them with --to")
    options.to.mkdir(parents=True, exist_ok=True)
    file = options.to / "probes.json"
    rows: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
    streams = [name for name in STREAMS if any(part in name for part in options.streams)]
    for seed in options.seeds:
        for stream in streams:
            recipe, *rest = STREAMS[stream]
            for probe in dict.fromkeys([FULL, *options.probes]):  # the others are compared with it
                key = f"{stream} | {probe} | {seed}"
                settings = [*rest, *options.set, *PROBES[probe], f"seed={seed}"]
                config = load_config(recipe, settings)
                if rows.get(key, {}).get("run") == config.id:
                    continue
                rows[key] = row(execute(config, show=display()))
                lines = [f"{json.dumps(name)}: {json.dumps(rows[name], sort_keys=True)}" for name in sorted(rows)]
                file.write_text("{\n" + ",\n".join(lines) + "\n}\n")  # a line per run
                page(options.to / "probes.md", rows)
    page(options.to / "probes.md", rows)


def row(run: Run) -> dict[str, Any]:
    """Return the measurements of one run; accuracies in percent.

    Seconds include other load, so they are an upper bound.
    """
    tasks = [task for task in run.manifests if task["layers"]]
    layers = [
        {layer["layer"]: [layer["rank"], layer["rows_and_columns"]] for layer in task["layers"]} for task in tasks
    ]
    return {
        "run": run.path.name,
        "seconds": fmean(task["seconds"]["probe"] for task in tasks),
        "layers": layers,
        "mean_rank": run.mean_rank,
        **{key: run.summary[key] for key in ("parameters_million", "class_il.final", "task_il.final")},
    }


def agreement(of: dict[str, Any], with_: dict[str, Any]) -> dict[str, float | None]:
    """Return the agreement between the ranks of two runs, averaged over tasks."""
    overlaps, correlations = [], []
    for ours, theirs in zip(of["layers"], with_["layers"], strict=True):
        pairs = [(ours[name][0], theirs[name][0], cost) for name, (_, cost) in theirs.items()]
        overlaps.append(sum(min(a, b) * cost for a, b, cost in pairs) / sum(max(a, b) * cost for a, b, cost in pairs))
        first, second = [a for a, *_ in pairs], [b for _, b, _ in pairs]
        if len({*first}) > 1 and len({*second}) > 1:  # equal ranks have no order
            correlations.append(float(spearmanr(first, second).statistic))
    return {"overlap": fmean(overlaps), "correlation": fmean(correlations) if correlations else None}


def page(file: Path, rows: dict[str, Any]) -> None:
    """Write a table per stream; the text below the mark is kept."""
    about = (
        "`python benchmarks/probes.py`; mean ± standard deviation over n seeds. Ranks are compared with those "
        "of the full probe, task by task: overlap in parameters, correlation over the layers."
    )
    lines = ["# Cheaper probes", "", about]
    for stream in STREAMS:
        if not any(key.startswith(f"{stream} |") for key in rows):
            continue
        body = []
        for probe in PROBES:
            results = []
            for key, value in sorted(rows.items()):
                if key.startswith(f"{stream} | {probe} | "):
                    full = rows[f"{stream} | {FULL} | {key.rpartition('| ')[2]}"]
                    results.append(value | agreement(value, full))
            if results:
                cells = [cell((one[column] for one in results), PLACES.get(column, 1)) for column in COLUMNS]
                body.append([probe, str(len(results)), *cells])
        command = f"`pearl run {' '.join(STREAMS[stream])}`"
        lines += ["", f"## {stream}", "", command, "", *table(["probe", "n", *COLUMNS.values()], body)]
    write_page(file, lines)


if __name__ == "__main__":
    main(sys.argv[1:])
