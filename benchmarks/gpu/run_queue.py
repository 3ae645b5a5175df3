"""Run a queue of the paper's recipes on a GPU within a time limit, and write what came of it as JSON.

    python benchmarks/gpu/run_queue.py --out OUT --minutes 9 --recipes cifar100-5t-resnet18 --seeds 0 1 2
    python benchmarks/gpu/run_queue.py --out OUT --variants "" "method.rank.name=fixed method.rank.r=8"
    python benchmarks/gpu/run_queue.py --out OUT --speed --recipes        speed alone: training, sub-networks, ranks

Runs are resumable: what does not fit into one call goes on in the next, if $PEARL_RUNS outlives it. Each row of
OUT/gpu.json has the figures, the paper's beside them, ranks, seconds, versions and the device. The speed tests are
those of benchmarks/speed, each with a JSON of its own; they come first. `--graphs` replays training steps as CUDA
graphs; look at what `--speed` says of them before.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import torch

from pearl.errors import PearlError
from pearl.lifecycle.runs import Run, execute
from pearl.settings.config import load_config
from pearl.training.engine import Observer

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
VARIANTS = ["", "method.classifier.name=chain method.classifier.train=all"]  # of one training, which is kept


class OutOfTimeError(Exception):
    """The limit has come; the run goes on from its last finished task."""


class Watch(Observer):
    """Prints stages, and ends the run when the time is up."""

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline

    def event(self, kind: str, **facts: object) -> None:
        if kind in {"run", "stage", "epoch"}:
            print(kind, json.dumps(facts), flush=True)
        if kind == "epoch" and time.monotonic() > self.deadline:
            raise OutOfTimeError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--speed", action="store_true", help="first the speed tests")
    parser.add_argument("--graphs", action="store_true", help="train with engine.cuda_graphs=true")
    parser.add_argument("--recipes", nargs="*", default=["cifar100-5t-resnet18", "cifar100-5t-bsc"])
    parser.add_argument("--variants", nargs="+", default=VARIANTS, help="settings of each, apart by blanks")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--smoke", action="store_true", help="one step per phase, to try the queue itself")
    options = parser.parse_args()
    deadline = time.monotonic() + 60 * options.minutes
    options.out.mkdir(parents=True, exist_ok=True)
    if options.speed:
        speed_tests(options.out, deadline)
    rows: list[dict] = []
    for seed in options.seeds:
        for recipe in options.recipes:
            for variant in options.variants:
                overrides = [f"seed={seed}", *variant.split(), f"engine.cuda_graphs={options.graphs}"]
                try:
                    config = load_config(recipe, overrides, smoke=options.smoke)
                    if torch.cuda.is_available():
                        torch.cuda.reset_peak_memory_stats()
                    rows.append(row(execute(config, show=Watch(deadline)), overrides))
                except OutOfTimeError:
                    rows.append({"recipe": recipe, "overrides": overrides, "unfinished": "out of time"})
                except PearlError as error:
                    rows.append({"recipe": recipe, "overrides": overrides, "error": str(error)})
                (options.out / "gpu.json").write_text(json.dumps(rows, indent=1) + "\n")
                if time.monotonic() > deadline:
                    return


SPEED = {
    "training": ["--nets", "resnet18", "bsc", "--steps", "100", "--repeats", "3"],
    "inference": ["--nets", "resnet18", "timm/vit_base_patch16_224", "--tasks", "20", "--batch", "256", "64"],
    "ranks": [],
}


def speed_tests(out: Path, deadline: float) -> None:
    """Each in a process of its own, which ends when the time is up; one that fails leaves its words in the output."""
    folder = Path(__file__).parents[1] / "speed"
    for name, options in SPEED.items():
        command = [sys.executable, str(folder / f"{name}.py"), "--device", "cuda", "--out", str(out / f"{name}.json")]
        try:
            subprocess.run([*command, *options], timeout=max(1.0, deadline - time.monotonic()), check=False)
        except subprocess.TimeoutExpired:
            print(f"{name}: out of time", flush=True)


def row(run: Run, overrides: list[str]) -> dict:
    summary = run.summary
    return {
        "recipe": run.config.recipe,
        "overrides": overrides,
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
