"""The rows of `pearl table online`, with a cache of features: learners on streams without task boundaries.

    python benchmarks/online.py run --rows "Grocery, Si-Blurry" --seeds 0 1
    python benchmarks/online.py page

`run` executes the runs that are missing; `page` collects the finished ones in docs/results/online.json and writes the
tables of docs/results/online.md. The frozen backbone's features of an image are computed once per process, for all
learners, so that the time per image in these runs is too short. They are therefore in $PEARL_RUNS/cached-features,
where `pearl table online` does not find them. `time` measures without that cache, in turns, in CPU seconds of one
thread.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import pearl.online.flyprompt
import pearl.online.frozen
import pearl.online.online_pearl
from pages import cell, table
from pearl.lifecycle.runs import execute as execute_tasks
from pearl.nn.intermediate_features import Layers
from pearl.online.learner import Network, Setup
from pearl.online.state import build_learner
from pearl.online.stream_run import OnlineRun, execute
from pearl.reports.progress import display
from pearl.reports.records import read as read_run
from pearl.settings.config import OnlineRunConfig, RunConfig, load_config
from pearl.storage.paths import runs_root
from pearl.storage.run_directory import RunDirectory
from pearl.tables.spec import Row, read
from pearl.training.engine import Engine

RESULTS = Path(__file__).parents[1] / "docs" / "results"
TABLE = read("online")
JOINT = "joint training"


def folder(made: RunConfig) -> Path:
    """Return the directory of a run."""
    return runs_root() / "cached-features" / made.id


def config(row: Row, seed: int) -> RunConfig:
    """Return the settings of one row; of the digits at their only size."""
    request = TABLE.request(row, TABLE.columns[0], "cpu" if row.is_at("cpu") else "paper")
    assert request is not None
    return request.config.model_copy(update={"seed": seed})


def remembering(make: Callable[[Setup, Layers], Network]) -> Callable[[Setup, Layers], Network]:
    """Return a function like `frozen_network` whose networks compute the features of an image once per process."""
    known: dict[bytes, Tensor] = {}

    def network_of(setup: Setup, layers: Layers) -> Network:
        network, width = make(setup, "auto"), int(setup.backbone.dim)  # type: ignore[arg-type]

        def network_once(images: Tensor) -> Tensor:
            keys = [image.numpy().tobytes() for image in images]
            if new := [i for i, key in enumerate(keys) if key not in known]:
                with torch.no_grad():
                    known.update(zip([keys[i] for i in new], network(images[new]), strict=True))
            computed = torch.stack([known[key] for key in keys])
            return computed if layers == "auto" else computed[:, -width:]

        network_once.module = network.module  # type: ignore[attr-defined]
        return network_once

    return network_of


def rows(args: argparse.Namespace) -> Iterator[tuple[Row, int]]:
    """Yield the rows whose names contain one of the texts asked for, with each seed; those of one stream together."""
    for seed in args.seeds:
        yield from ((row, seed) for row in TABLE.rows if any(text in row.name for text in args.rows))


LAST = r"method.targets=blocks\.({})\.attn\.qkv"
TIMED = {  # settings, and sub-networks
    "streaming LDA": (["online.learner=slda"], 0),
    "online RanPAC, M = 2,000": (["online.learner=ranpac", "online.learner.M=2000"], 0),
    "streaming LDA, intermediate features": (["online.learner=slda", "online.learner.layers=auto"], 0),
    "PEARL without growth": ([], 0),
    "PEARL, 1 sub-network": ([], 1),
    "PEARL, 2 sub-networks": ([], 2),
    "PEARL of the last 3 blocks, 1 sub-network": ([LAST.format("9|10|11")], 1),
    "PEARL of the last 3 blocks, 2 sub-networks": ([LAST.format("9|10|11")], 2),
    "PEARL of the last 2 blocks, 2 sub-networks": ([LAST.format("10|11")], 2),
}


def timed(turns: int, batch: int = 64) -> dict[str, dict[str, float]]:
    """Return CPU milliseconds per image of learning and of prediction: medians of `turns`, outside growth.

    Images are noise, and sub-networks are trained for one step: neither affects the time of a pass.
    """
    learners, times = {}, {}
    for name, (settings, count) in TIMED.items():
        made: Any = load_config("online-grocery-deit_tiny", [*settings, "train.epochs=1", "engine.max_steps=1"])
        made = made.model_copy(update={"train": made.train.model_copy(update={"phases": {}})})
        learner: Any = build_learner(made, Engine(made, device="cpu", precision="fp32"))
        size = made.images.stored
        images = torch.randint(256, (2 * batch, size, size, 3), dtype=torch.uint8)
        labels = torch.arange(2 * batch) % 80
        for part in (slice(0, batch), slice(batch, None)):
            learner.observe(images[part], labels[part])
        for _ in range(count):
            learner.grow(torch.arange(80))
        learner.sub_networks = 0  # no further growth
        learner.predict(images[:1])  # merges networks
        learners[name], times[name] = learner, ([], [])
    for _ in range(turns):
        for name, learner in learners.items():
            started = time.process_time()
            learner.observe(images, labels)
            took = [time.process_time() - started]
            learner.predict(images[:1])  # discriminants
            started = time.process_time()
            learner.predict(images)
            took.append(time.process_time() - started)
            for own, seconds in zip(times[name], took, strict=True):
                own.append(1000 * seconds / len(images))
    return {
        name: {"learning_ms": round(float(np.median(a)), 2), "prediction_ms": round(float(np.median(b)), 2)}
        for name, (a, b) in times.items()
    }


def collect() -> list[dict[str, Any]]:
    """Return all finished runs under $PEARL_RUNS, with their curves."""
    computed = []
    for row in TABLE.rows:
        for seed in range(10):
            made = config(row, seed)
            directory = RunDirectory(folder(made))
            if isinstance(made, OnlineRunConfig) and OnlineRun(directory.path, made).done:
                computed.append({"row": row.name, "seed": seed, **facts_of(OnlineRun(directory.path, made))})
            elif directory.results["stages"] and directory.is_done:
                computed.append(
                    {"row": row.name, "seed": seed, "a_last": read_run(directory.path).summary["class_il.final"]}
                )
    return computed


def facts_of(run: OnlineRun) -> dict[str, Any]:
    """Return the metrics of a finished run as JSON values."""
    facts, numbers = run.results["facts"], run.summary
    kept = {key: round(numbers[key], 2) for key in ("a_auc", "a_last", "forgetting", "longest_pause_seconds")}
    kept |= {key: facts[key] for key in ("passes", "images_bytes", "statistics_bytes", "classes")}
    curve = [[point.seen, round(point.accuracy, 2)] for point in run.curve]
    return {**kept, "images": run.curve[-1].seen, "grown_at": facts.get("grown_at", []), "curve": curve}


TIMES = ("learner", "learning, ms per image", "prediction, ms per image", "learning / streaming LDA")
HEAD = ("learner", "orders", "A_auc", "A_last", "forgetting", "sub-networks", "passes", "images", "statistics", "pause")


def line(title: str, rows: list[dict[str, Any]]) -> list[str]:
    """Return the cells of a learner's runs on one stream: means, with the standard deviation over orders."""
    cells = [title, str(len(rows))]
    cells += [cell((row.get(key) for row in rows), 1) for key in ("a_auc", "a_last", "forgetting")]
    if "passes" in rows[0]:
        grown = [len(row["grown_at"]) for row in rows]
        cells += [f"{np.mean(grown):.3g}", str(max(row["passes"] for row in rows))]
        cells += [f"{max(row[key] for row in rows) / 1e6:.1f} MB" for key in ("images_bytes", "statistics_bytes")]
        pauses = [row["longest_pause_seconds"] for row in rows if "longest_pause_seconds" in row]
        cells.append(f"{max(pauses):.1f} s" if pauses and any(grown) else "-")
    return [*cells, *["-"] * (len(HEAD) - len(cells))]


def page(results: dict[str, Any]) -> str:
    """Return the tables of all streams in Markdown."""
    by_row: dict[str, list[dict[str, Any]]] = {}
    for one in results["rows"]:
        by_row.setdefault(one["row"], []).append(one)
    streams: dict[str, list[str]] = {}
    for row in TABLE.rows:
        stream, _, learner = row.name.partition(": ")
        if row.name in by_row and learner != JOINT:
            streams.setdefault(stream, []).append(learner)
    lines = []
    for stream, learners in streams.items():
        first = by_row[f"{stream}: {learners[0]}"][0]
        lines += [f"### {stream}: {first['images']:,} images, {first['classes']} classes", ""]
        rows = [line(learner, by_row[f"{stream}: {learner}"]) for learner in learners]
        if bound := by_row.get(f"{stream.partition(',')[0]}: {JOINT}"):
            rows.append(line(f"{JOINT} (bound)", bound))
        lines += [*table(HEAD, rows), ""]
    if times := results.get("times"):
        base = times["streaming LDA"]["learning_ms"]
        rows = [
            [
                name,
                *(f"{time[key]:.1f}" for key in ("learning_ms", "prediction_ms")),
                f"{time['learning_ms'] / base:.2f}",
            ]
            for name, time in times.items()
        ]
        lines += ["### CPU time", "", *table(TIMES, rows), ""]
    return "\n".join(lines)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "time", "page"])
    parser.add_argument("--rows", nargs="+", default=[""], metavar="TEXT", help="rows whose names contain one of these")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--turns", type=int, default=5, help="of `time`")
    args = parser.parse_args()
    torch.set_num_threads(1)
    file, text = RESULTS / "online.json", RESULTS / "online.md"
    before = json.loads(file.read_text()) if file.exists() else {}
    if args.what == "run":
        network_of = remembering(pearl.online.frozen.frozen_network)
        for module in (pearl.online.frozen, pearl.online.online_pearl, pearl.online.flyprompt):
            module.frozen_network = network_of  # type: ignore[attr-defined]
        for row, seed in rows(args):
            made, show = config(row, seed), display(quiet=True)
            online = isinstance(made, OnlineRunConfig)
            run: Any = (
                execute(made, path=folder(made), device="cpu", show=show)
                if online
                else execute_tasks(made, path=folder(made), device="cpu", show=show)
            )  # type: ignore[arg-type]
            print(row.name, seed, {key: round(value, 2) for key, value in run.summary.items()}, flush=True)
    elif args.what == "time":
        file.write_text(json.dumps({**before, "times": timed(args.turns)}, indent=1))
    else:
        rank = {row.name: i for i, row in enumerate(TABLE.rows)}
        computed = {
            (row["row"], row["seed"]): row for row in [*before.get("rows", []), *collect()]
        }  # also of other machines
        ordered = [computed[key] for key in sorted(computed, key=lambda key: (rank[key[0]], key[1]))]
        results = {**before, "rows": ordered}
        file.write_text(json.dumps(results, indent=1))
        start, marker, _ = text.read_text().partition("<!-- tables -->\n")
        text.write_text(f"{start}{marker}\n{page(results)}")


if __name__ == "__main__":
    main()
