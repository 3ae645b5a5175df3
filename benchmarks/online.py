"""The rows of `pearl table online`, with a cache of features: learners on streams without task boundaries.

    python benchmarks/online.py run --rows "Grocery, Si-Blurry" --seeds 0 1
    python benchmarks/online.py page

`run` executes the runs that are missing; `page` collects the finished ones in docs/results/online.json and writes the
tables of docs/results/online.md. The frozen backbone's features of an image are computed once per process, for all
learners, so that the time per image in these runs is too short. They are therefore in $PEARL_RUNS/cached-features,
where `pearl table online` does not find them. `time` measures without that cache, in CPU seconds of one thread.
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
import pearl.online.pearl
from pearl.lifecycle.runs import execute as execute_tasks
from pearl.nn.intermediate_features import Layers
from pearl.online.learner import Network, Setup
from pearl.online.run import Arrivals, OnlineRun, execute
from pearl.online.state import build_learner, restore
from pearl.reports.progress import display
from pearl.reports.records import read as read_run
from pearl.settings.config import OnlineRunConfig, RunConfig
from pearl.storage.paths import runs_root
from pearl.storage.run_directory import RunDirectory
from pearl.tables.spec import Row, read
from pearl.training.engine import Engine, Observer

RESULTS = Path(__file__).parents[1] / "docs" / "results"
TABLE = read("online")
JOINT = "joint training"


def place(made: RunConfig) -> Path:
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
            found = torch.stack([known[key] for key in keys])
            return found if layers == "auto" else found[:, -width:]

        network_once.module = network.module  # type: ignore[attr-defined]
        return network_once

    return network_of


def rows(args: argparse.Namespace) -> Iterator[tuple[Row, int]]:
    """Yield the rows whose names contain one of the texts asked for, with each seed; those of one stream together."""
    for seed in args.seeds:
        yield from ((row, seed) for row in TABLE.rows if any(text in row.name for text in args.rows))


def measured(run: OnlineRun, batch: int = 64) -> dict[str, float]:
    """Return CPU milliseconds per image of learning and of prediction, at the end of a run, without growth."""
    engine = Engine(run.config, device="cpu", precision="fp32")
    learner: Any = build_learner(run.config, engine)
    restore(run.path, learner, learner.state_dict())
    if hasattr(learner, "checked_at"):
        learner.checked_at.copy_(learner.seen)
    arrivals, _ = Arrivals.of(run.config, Observer())
    images, labels = torch.from_numpy(arrivals.images[: 2 * batch]), torch.from_numpy(arrivals.labels[: 2 * batch])
    learner.predict(images[:batch])
    times = []
    for call in (
        lambda part: learner.observe(images[part], labels[part]),
        lambda part: learner.predict(images[part]),
    ):
        call(slice(0, batch))  # the first call merges networks and computes discriminants
        started = time.process_time()
        call(slice(batch, 2 * batch))
        times.append(1000 * (time.process_time() - started) / batch)
    return {"learning_ms": round(times[0], 2), "prediction_ms": round(times[1], 2)}


def collect() -> list[dict[str, Any]]:
    """Return all finished runs under $PEARL_RUNS, with their curves."""
    found = []
    for row in TABLE.rows:
        for seed in range(10):
            made = config(row, seed)
            directory = RunDirectory(place(made))
            if isinstance(made, OnlineRunConfig) and OnlineRun(directory.path, made).done:
                found.append({"row": row.name, "seed": seed, **facts_of(OnlineRun(directory.path, made))})
            elif directory.results["stages"] and directory.is_done:
                found.append(
                    {"row": row.name, "seed": seed, "a_last": read_run(directory.path).summary["class_il.final"]}
                )
    return found


def facts_of(run: OnlineRun) -> dict[str, Any]:
    """Return the metrics of a finished run as JSON values."""
    facts, numbers = run.results["facts"], run.summary
    kept = {key: round(numbers[key], 2) for key in ("a_auc", "a_last", "forgetting", "longest_pause_seconds")}
    kept |= {key: facts[key] for key in ("passes", "images_bytes", "statistics_bytes", "classes")}
    curve = [[point.seen, round(point.accuracy, 2)] for point in run.curve]
    return {**kept, "images": run.curve[-1].seen, "grown_at": facts.get("grown_at", []), "curve": curve}


HEAD = ("learner", "orders", "A_auc", "A_last", "forgetting", "sub-networks", "passes", "images", "statistics", "pause")


def line(title: str, own: list[dict[str, Any]]) -> str:
    """Return the line of a learner's runs on one stream: means, with the standard deviation over orders."""
    cells = [title, str(len(own))]
    for key in ("a_auc", "a_last", "forgetting"):
        values = np.array([row[key] for row in own if key in row])
        spread = f" ± {values.std(ddof=1):.1f}" if len(values) > 1 else ""
        cells.append(f"{values.mean():.1f}{spread}" if len(values) else "-")
    if "passes" in own[0]:
        grown = [len(row["grown_at"]) for row in own]
        cells += [f"{np.mean(grown):.3g}", str(max(row["passes"] for row in own))]
        cells += [f"{max(row[key] for row in own) / 1e6:.1f} MB" for key in ("images_bytes", "statistics_bytes")]
        pauses = [row["longest_pause_seconds"] for row in own if "longest_pause_seconds" in row]
        cells.append(f"{max(pauses):.1f} s" if pauses and any(grown) else "-")
    return f"| {' | '.join([*cells, *['-'] * (len(HEAD) - len(cells))])} |"


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
        lines += [f"| {' | '.join(HEAD)} |", "|---" * len(HEAD) + "|"]
        lines += [line(learner, by_row[f"{stream}: {learner}"]) for learner in learners]
        if bound := by_row.get(f"{stream.partition(',')[0]}: {JOINT}"):
            lines.append(line(f"{JOINT} (bound)", bound))
        lines.append("")
    if results.get("times"):
        lines += [
            "### CPU time",
            "",
            "| learner | learning, ms per image | prediction, ms per image |",
            "|---|---|---|",
        ]
        lines += [
            f"| {name} | {own['learning_ms']:.1f} | {own['prediction_ms']:.1f} |"
            for name, own in results["times"].items()
        ]
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "time", "page"])
    parser.add_argument("--rows", nargs="+", default=[""], metavar="TEXT", help="rows whose names contain one of these")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    args = parser.parse_args()
    torch.set_num_threads(1)
    file, text = RESULTS / "online.json", RESULTS / "online.md"
    before = json.loads(file.read_text()) if file.exists() else {}
    if args.what == "run":
        network_of = remembering(pearl.online.frozen.frozen_network)
        for module in (pearl.online.frozen, pearl.online.pearl, pearl.online.flyprompt):
            module.frozen_network = network_of  # type: ignore[attr-defined]
        for row, seed in rows(args):
            made, show = config(row, seed), display(quiet=True)
            online = isinstance(made, OnlineRunConfig)
            run: Any = (
                execute(made, path=place(made), device="cpu", show=show)
                if online
                else execute_tasks(made, path=place(made), device="cpu", show=show)
            )  # type: ignore[arg-type]
            print(row.name, seed, {key: round(value, 2) for key, value in run.summary.items()}, flush=True)
    elif args.what == "time":
        times = {}
        for row, seed in rows(args):
            made = config(row, seed)
            if isinstance(made, OnlineRunConfig) and (run := OnlineRun(place(made), made)).done:
                times[row.name.partition(": ")[2]] = measured(run)
        file.write_text(json.dumps({**before, "times": {**before.get("times", {}), **times}}, indent=1))
    else:
        rank = {row.name: i for i, row in enumerate(TABLE.rows)}
        found = {
            (row["row"], row["seed"]): row for row in [*before.get("rows", []), *collect()]
        }  # also of other machines
        ordered = [found[key] for key in sorted(found, key=lambda key: (rank[key[0]], key[1]))]
        results = {**before, "rows": ordered}
        file.write_text(json.dumps(results, indent=1))
        start, marker, _ = text.read_text().partition("<!-- tables -->\n")
        text.write_text(f"{start}{marker}\n{page(results)}")


if __name__ == "__main__":
    main()
