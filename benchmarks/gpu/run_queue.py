"""Run a queue of the paper's recipes on a GPU within a time limit, and write the results as JSON.

    python benchmarks/gpu/run_queue.py --out OUT --check            do CUDA graphs change what is learnt?
    python benchmarks/gpu/run_queue.py --out OUT --speed            training, sub-networks, ranks
    python benchmarks/gpu/run_queue.py --out OUT --minutes 9 --recipes cifar100-5t-resnet18 --seeds 0 1 2
    python benchmarks/gpu/run_queue.py --out OUT --variants "" "method.rank.name=fixed method.rank.r=8"

Runs are resumable: the next call continues, if $PEARL_RUNS is kept. Each row of OUT/gpu.json has our figures and the
paper's, ranks, seconds, versions and the device. `--graphs` replays training steps as CUDA graphs.
"""

import argparse
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path

import torch

from pearl.errors import Interrupted
from pearl.lifecycle.refit import run_or_refit
from pearl.lifecycle.runs import Run, execute
from pearl.settings.config import load_config
from pearl.storage.paths import runs_root
from pearl.training.engine import Observer

RECIPES = ["cifar100-5t-resnet18", "cifar100-5t-bsc"]
BACKBONES = [*RECIPES, "schedule-deit_tiny backbone.weights=null"]  # its weights do not affect `--check`
FIGURES = (
    "class_il.final",
    "class_il.average",
    "class_il.forgetting",
    "class_il.final_pooled",
    "task_il.final",
    "task_identification",
    "parameters_million",
    "growth",
)
VARIANTS = ["", "method.classifier.name=statistics method.classifier.train=all"]  # the second one trains nothing


class Watch(Observer):
    """Prints stages, and stops the run like Ctrl-C at the time limit, after storing its state."""

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline

    def event(self, kind: str, **facts: object) -> None:
        if kind in {"run", "stage", "epoch"}:
            print(kind, json.dumps(facts), flush=True)
        if kind == "epoch" and time.monotonic() > self.deadline:
            self.deadline = float("inf")
            signal.raise_signal(signal.SIGINT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument(
        "--check", action="store_true", help="each backbone with and without CUDA graphs, 20 steps a phase"
    )
    parser.add_argument("--speed", action="store_true", help="the speed tests of benchmarks/speed, a JSON each")
    parser.add_argument("--graphs", action="store_true", help="train with engine.cuda_graphs=true")
    parser.add_argument("--recipes", nargs="+", default=RECIPES)
    parser.add_argument("--variants", nargs="+", default=VARIANTS, help="settings of each, apart by blanks")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--smoke", action="store_true", help="one step per phase, to test the queue")
    options = parser.parse_args()
    deadline = time.monotonic() + 60 * options.minutes
    options.out.mkdir(parents=True, exist_ok=True)
    if options.speed:
        speed_tests(options.out, deadline)
        return
    rows: list[dict] = []
    for facts, work in checks() if options.check else figures(options):
        try:
            results = work(Watch(deadline))
        except (Interrupted, KeyboardInterrupt):
            results = {"unfinished": "out of time"}
        except Exception as error:  # a failed one does not stop the others
            results = {"error": f"{type(error).__name__}: {error}"}
        rows.append({**facts, **results})
        (options.out / "gpu.json").write_text(json.dumps(rows, indent=1) + "\n")
        if time.monotonic() > deadline:
            return


Work = Iterator[tuple[dict, Callable[[Watch], dict]]]  # keys of a row, by which its other entries are found


def figures(options: argparse.Namespace) -> Work:
    """Write a row for each seed, recipe and variant."""
    for seed, recipe, variant in product(options.seeds, options.recipes, options.variants):
        overrides = [f"seed={seed}", *variant.split(), f"engine.cuda_graphs={options.graphs}"]
        yield {"recipe": recipe, "overrides": overrides}, partial(figures_of, recipe, overrides, options.smoke)


def figures_of(recipe: str, overrides: list[str], smoke: bool, watch: Watch) -> dict:
    """Return the results and costs of a run."""
    config = load_config(recipe, overrides, smoke=smoke)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    return row(run_or_refit(config, show=watch))


def checks() -> Work:
    """Write a row for each backbone."""
    for each in BACKBONES:
        yield {"recipe": each}, partial(check, each.split())


def check(words: list[str], watch: Watch) -> dict:
    """Compare the losses of all phases with and without graphs, relative to their size."""
    recipe, *settings = words
    losses = {}
    for name in ("eager", "graphs"):
        changes = [*settings, "engine.max_steps=20", "engine.reuse=false", f"engine.cuda_graphs={name == 'graphs'}"]
        config = load_config(recipe, changes)
        run = execute(config, path=runs_root() / name / config.id, show=watch)
        events = map(json.loads, (run.path / "events.jsonl").read_text().splitlines())
        losses[name] = [event["loss"] for event in events if event["event"] == "epoch"]
    apart = [abs(a - b) / b for a, b in zip(losses["graphs"], losses["eager"], strict=True)]
    return {**losses, "furthest apart": max(apart)}


SPEED = {
    "training": ["--nets", "resnet18", "bsc", "--steps", "300", "--repeats", "3"],
    "inference": ["--nets", "resnet18", "timm/vit_base_patch16_224", "--tasks", "20", "--batch", "256", "64"],
    "ranks": ["--repeats", "1"],
}


def speed_tests(out: Path, deadline: float) -> None:
    """Run each in a separate process, which ends at the time limit; a failed one's output is kept."""
    folder = Path(__file__).parents[1] / "speed"
    for name, options in SPEED.items():
        command = [sys.executable, str(folder / f"{name}.py"), "--device", "cuda", "--out", str(out / f"{name}.json")]
        try:
            subprocess.run([*command, *options], timeout=max(1.0, deadline - time.monotonic()), check=False)
        except subprocess.TimeoutExpired:
            print(f"{name}: out of time", flush=True)


def row(run: Run) -> dict:
    summary = run.summary
    return {
        "figures": {key: round(summary[key], 3) for key in FIGURES},
        "paper": {key: figure.model_dump() for key, figure in run.config.expected.items()},
        "mean_rank": run.mean_rank,
        "training_seconds": round(sum(sum(manifest["seconds"].values()) for manifest in run.manifests), 1),
        "seconds_per_phase": [manifest["seconds"] for manifest in run.manifests],
        "layers": [manifest.get("layers", []) for manifest in run.manifests],
        "environment": json.loads((run.path / "environment.json").read_text()),
        "peak_gpu_bytes": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None,
    }


if __name__ == "__main__":
    main()
