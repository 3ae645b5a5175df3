"""Runs that differ only after a phase, with that phase trained once and with it trained by each.

    python benchmarks/speed/reuse.py                      PEARL by three rank rules on digits; a minute

The recipe `digits` with equally many epochs in each phase, so that the reference and the probes are half of all steps.
It also checks that the results are bit-identical.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from timing import Row, show

from pearl.lifecycle.runs import Run, execute
from pearl.settings.config import load_config
from pearl.storage.checkpoint import load_state
from pearl.storage.paths import runs_root

RULES = ("paper", "energy", "even")


def runs(epochs: int, cache: str, rules: Sequence[str] = RULES) -> tuple[float, list[Run]]:
    """Return the CPU seconds of a run by each rule, in a new folder of runs, and the runs."""
    os.environ["PEARL_CACHE"] = cache
    overrides = [f"train.epochs={epochs}", f"train.phases.probe.epochs={epochs}"]
    started = time.process_time()
    results = []
    for rule in rules:
        config = load_config("digits", [*overrides, f"method.rank={rule}"])
        results.append(execute(config, path=runs_root() / (Path(cache).name or "each") / rule))
    return time.process_time() - started, results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--out", type=Path, help="a JSON file to write")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"PEARL_RUNS": f"{folder}/runs", "PEARL_DATA": folder}
        runs(1, "off", ["fixed"])  # warm-up
        os.environ["PEARL_RUNS"] = f"{folder}/timed"
        each, plain = runs(options.epochs, "off")
        empty, first = runs(options.epochs, f"{folder}/kept")
        os.environ["PEARL_RUNS"] = f"{folder}/again"
        full, again = runs(options.epochs, f"{folder}/kept")
        for alone, *others in zip(plain, first, again, strict=True):
            state = load_state(alone.path)
            for other in others:
                if not all(torch.equal(state[name], value) for name, value in load_state(other.path).items()):
                    raise SystemExit(f"{other.path}: other bits than without the phase cache")
        manifests = [manifest for run in first for manifest in run.manifests]
        size = sum(file.stat().st_size for file in Path(folder, "kept").rglob("*") if file.is_file())
    row: Row = {
        "runs": len(RULES),
        "phases": sum(len(manifest["seconds"]) for manifest in manifests),
        "reused": sum(len(manifest.get("reused", [])) for manifest in manifests),
        "CPU seconds, each by itself": round(each, 1),
        "CPU seconds, from an empty folder": round(empty, 1),
        "CPU seconds, all of it there": round(full, 1),
        "shared / each by itself": round(empty / each, 2),
        "all there / each by itself": round(full / each, 2),
        "MB kept": round(size / 1e6, 1),
    }
    show("phases that are trained once, of PEARL by several rank rules on digits", [row], options.out)


if __name__ == "__main__":
    main()
