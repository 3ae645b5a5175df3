"""The time before the first step, the memory of each phase, and the bytes of a task.

    python benchmarks/speed/footprint.py

Memory is the process's peak above that before the phase, compared with a count: gradients and Adam's two moments of
trained parameters, 12 bytes each, a weight's merged copy and its gradient if updates are merged, 8 bytes, and the
activations that autograd stores. Bytes are those of a task's folder, compared with its tensors.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

from timing import Row, peak_above, show

from pearl.methods.pearl import Pearl
from pearl.nn.fast.parallel_lora import fits_beside
from pearl.nn.rank_rules import FixedRule
from pearl.reports.plan import activation_bytes
from pearl.settings.parts import BACKBONES
from pearl.storage.checkpoint import changed, snapshot, write_part
from pearl.training.engine import Engine
from pearl.training.resume import Resume
from training import BATCH, NETWORKS, RANK, config, make_task

FIRST_STEP = """
import sys, time
import pearl.cli, pearl.reports.progress
from pearl.training.engine import Observer

class Watch(Observer):
    def event(self, kind, **facts):
        if kind == "phase":
            self.training = True

    def step(self, done, total):
        if getattr(self, "training", False):  # steps of decoding come before
            print(time.time())
            raise SystemExit

pearl.reports.progress.display = lambda quiet: Watch()
sys.argv = ["pearl", "run", "digits"]
pearl.cli.main()
"""


def start_up(repeats: int) -> list[Row]:
    """Return seconds from a process's start to the end of `pearl --help`, and of the first step of digits."""
    pearl = Path(sys.executable).with_name("pearl")

    def help_() -> float:
        started = time.time()
        subprocess.run([pearl, "--help"], check=True, capture_output=True)
        return time.time() - started

    def first_step() -> float:
        with tempfile.TemporaryDirectory() as runs:
            started = time.time()
            out = subprocess.run(
                [sys.executable, "-c", FIRST_STEP],
                check=True,
                capture_output=True,
                text=True,
                env=os.environ | {"PEARL_RUNS": runs, "PEARL_CACHE": "off"},
            )
            return float(out.stdout.split()[-1]) - started

    def seconds(what: Callable[[], float]) -> float:
        what()  # the first start reads files from disk
        return round(median(what() for _ in range(repeats)), 2)

    return [
        {"start-up": "pearl --help", "seconds": seconds(help_), "goal": 0.5},
        {"start-up": "pearl run digits, to the first step", "seconds": seconds(first_step)},
    ]


def memory(backbone: str) -> list[Row]:
    """Return the peak memory of each phase, measured and counted, and the bytes of a task's folder."""
    size, rows = NETWORKS[backbone], []
    settings = config(backbone, size)
    engine = Engine(settings, device="cpu")
    method = engine.to_device(Pearl(BACKBONES.build(settings.backbone, size), rank=FixedRule(r=RANK), init="svd"))
    kept = BATCH * activation_bytes(method.backbone, size, engine.precision)
    layers = {t.parameter: method.backbone.get_submodule(t.parameter.removesuffix(".weight")) for t in method.targets}
    merged = sum(layer.weight.numel() for layer in layers.values() if not fits_beside(layer, RANK, method.fold))
    for task in (make_task(settings, 0), make_task(settings, 1)):
        before = snapshot(method.state_dict())
        for phase in method.learn(task):
            work = partial(engine.train, method, task, phase, 0, Resume())
            work()  # libraries allocate their permanent memory in the first steps
            peak = peak_above(work)
            counted = 12 * sum(p.numel() for p in phase.trained) + kept + (8 * merged if phase.name == "adapt" else 0)
            facts = {"network": backbone, "phase": phase.name, "precision": engine.precision, "batch": BATCH}
            facts |= {"peak (MB)": round(peak / 1e6), "counted (MB)": round(counted / 1e6)}
            rows.append(facts | {"peak / counted": round(peak / counted, 2)})
    new = changed(before, snapshot(method.state_dict()))
    with tempfile.TemporaryDirectory() as folder:
        write_part(Path(folder) / "task", new, {})
        written = sum(file.stat().st_size for file in (Path(folder) / "task").iterdir())
    tensors = sum(tensor.nbytes for tensor in new.values())
    rows.append({"network": backbone, "bytes of task 2": written, "written / tensors": round(written / tensors, 3)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", nargs="*", default=list(NETWORKS), choices=list(NETWORKS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help="a JSON file to write")
    options = parser.parse_args()
    rows = start_up(options.repeats)
    for network in options.nets:
        rows += memory(network)
    show("start-up, memory, bytes", rows, options.out)


if __name__ == "__main__":
    main()
