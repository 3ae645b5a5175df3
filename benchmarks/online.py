"""Online learners compared on streams without task boundaries: DeiT-Tiny on CIFAR-100 and on Grocery Store images.

    python benchmarks/online.py run --data cifar100 --protocols si_blurry --learners slda pearl --seeds 0 1
    python benchmarks/online.py page

`run` executes the runs that are missing under $PEARL_RUNS; `page` collects the finished ones in
docs/results/online.json and writes the tables of docs/results/online.md. The frozen backbone's features of an image are
computed once per process, for all learners; `time` measures the time per image without that cache, in CPU seconds of
one thread.
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

import pearl.online.frozen
import pearl.online.pearl
from pearl.nn.intermediate_features import Layers
from pearl.online.learner import Network, Setup
from pearl.online.run import Arrivals, OnlineRun, execute
from pearl.online.state import build_learner, restore
from pearl.reports.progress import display
from pearl.settings.config import OnlineRunConfig, load_config
from pearl.storage.paths import runs_root
from pearl.training.engine import Engine, Observer

RESULTS = Path(__file__).parents[1] / "docs" / "results"
RECIPES = {"cifar100": "online-cifar100-deit_tiny", "grocery": "online-grocery-deit_tiny"}
PROTOCOLS = {
    "si_blurry": ("Si-Blurry", []),
    "gaussian": ("periodic Gaussian", ["online.protocol=gaussian", "online.periods=3"]),
    "sorted": ("class by class", ["online.protocol=sorted"]),
}
LEARNERS = {
    "ncm": ("nearest class mean", ["online.learner=ncm"]),
    "slda": ("streaming LDA", ["online.learner=slda"]),
    "ranpac_2k": ("online RanPAC, M = 2,000", ["online.learner=ranpac", "online.learner.M=2000"]),
    "ranpac": ("online RanPAC, M = 5,000", ["online.learner=ranpac", "online.learner.M=5000"]),
    "er": ("ER, 500 images", ["online.learner=er", "online.learner.iterations=1"]),
    "derpp": ("DER++, 500 images", ["online.learner=derpp", "online.learner.iterations=1"]),
    "slda_auto": ("streaming LDA, intermediate features", ["online.learner=slda", "online.learner.layers=auto"]),
    "pearl0": ("PEARL without growth", ["online.learner.sub_networks=0"]),
    "pearl1": ("PEARL, 1 sub-network", ["online.learner.sub_networks=1"]),
    "pearl": ("PEARL, 2 sub-networks", []),
}


def config(data: str, protocol: str, learner: str, seed: int) -> OnlineRunConfig:
    """Return the settings of one row."""
    changes = [*PROTOCOLS[protocol][1], *LEARNERS[learner][1], f"seed={seed}", "engine.precision=fp32"]
    made = load_config(RECIPES[data], changes)
    assert isinstance(made, OnlineRunConfig)
    return made


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

        return network_once

    return network_of


def rows(args: argparse.Namespace) -> Iterator[tuple[str, str, str, int]]:
    """Yield the rows that are asked for, those of one stream together."""
    for data in args.data:
        for seed in args.seeds:
            for protocol in args.protocols:
                yield from ((data, protocol, learner, seed) for learner in args.learners)


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


def collect() -> dict[str, Any]:
    """Return all finished runs, with their curves."""
    found = []
    for data in RECIPES:
        for protocol in PROTOCOLS:
            for learner in LEARNERS:
                for seed in range(10):
                    made = config(data, protocol, learner, seed)
                    run = OnlineRun(runs_root() / made.id, made)
                    if not run.done:
                        continue
                    facts = run.results["facts"]
                    row = {
                        "data": data,
                        "protocol": protocol,
                        "learner": learner,
                        "seed": seed,
                        "images": run.curve[-1].seen,
                    }
                    row |= {key: round(run.summary[key], 2) for key in ("a_auc", "a_last", "forgetting")}
                    row |= {key: facts[key] for key in ("passes", "images_bytes", "statistics_bytes", "classes")}
                    row["grown_at"] = facts.get("grown_at", [])
                    row["curve"] = [[point.seen, round(point.accuracy, 2)] for point in run.curve]
                    found.append(row)
    return {"rows": found}


def table(found: list[dict[str, Any]]) -> list[str]:
    """Return the lines of one stream's table: means over seeds."""
    lines = [
        "| learner | orders | A_auc | A_last | forgetting | passes | images | statistics |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for learner, (title, _) in LEARNERS.items():
        own = [row for row in found if row["learner"] == learner]
        if not own:
            continue
        cells = [title, str(len(own))]
        for key in ("a_auc", "a_last", "forgetting"):
            values = np.array([row[key] for row in own])
            cells.append(f"{values.mean():.1f}" + (f" ± {values.std(ddof=1):.1f}" if len(own) > 1 else ""))
        cells.append(str(max(row["passes"] for row in own)))
        cells += [f"{max(row[key] for row in own) / 1e6:.1f} MB" for key in ("images_bytes", "statistics_bytes")]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def page(results: dict[str, Any]) -> str:
    """Return the tables of all streams in Markdown."""
    lines = []
    for data in RECIPES:
        for protocol, (title, _) in PROTOCOLS.items():
            found = [row for row in results["rows"] if (row["data"], row["protocol"]) == (data, protocol)]
            if found:
                what = f"{'CIFAR-100' if data == 'cifar100' else 'Grocery'}, {title}: {found[0]['images']:,} images"
                lines += [f"### {what}, {found[0]['classes']} classes", "", *table(found), ""]
    if results.get("times"):
        lines += [
            "### CPU time",
            "",
            "| learner | learning, ms per image | prediction, ms per image |",
            "|---|---|---|",
        ]
        for learner, own in results["times"].items():
            lines.append(f"| {LEARNERS[learner][0]} | {own['learning_ms']:.1f} | {own['prediction_ms']:.1f} |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "time", "page"])
    parser.add_argument("--data", nargs="+", default=[*RECIPES], choices=RECIPES)
    parser.add_argument("--protocols", nargs="+", default=[*PROTOCOLS], choices=PROTOCOLS)
    parser.add_argument("--learners", nargs="+", default=[*LEARNERS], choices=LEARNERS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    args = parser.parse_args()
    torch.set_num_threads(1)
    file, text = RESULTS / "online.json", RESULTS / "online.md"
    before = json.loads(file.read_text()) if file.exists() else {}
    if args.what == "run":
        network_of = remembering(pearl.online.frozen.frozen_network)
        pearl.online.frozen.frozen_network = pearl.online.pearl.frozen_network = network_of
        for row in rows(args):
            run = execute(config(*row), device="cpu", show=display(quiet=True))
            print(*row, {key: round(value, 2) for key, value in run.summary.items()}, flush=True)
    elif args.what == "time":
        runs = [(row[2], OnlineRun(runs_root() / config(*row).id, config(*row))) for row in rows(args)]
        times = {learner: measured(run) for learner, run in runs if run.done}
        file.write_text(json.dumps({**before, "times": {**before.get("times", {}), **times}}, indent=1))
    else:
        results = {**before, **collect()}
        file.write_text(json.dumps(results, indent=1))
        start, marker, _ = text.read_text().partition("<!-- tables -->\n")
        text.write_text(f"{start}{marker}\n{page(results)}")


if __name__ == "__main__":
    main()
