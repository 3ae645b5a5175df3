"""Test sets in a process of pearl, which keeps freed memory, against plain passes in one of PyTorch only.

    python benchmarks/speed/allocator.py

Batches of 256, the engine's. Each turn is a separate process, since a process has a single allocator.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from inference import learnt, passes
from timing import Row, show

from pearl.cli.memory import keep_freed_memory
from pearl.training.engine import has_fast_bf16

KINDS = ("ours", "plain passes, memory kept", "plain passes")
TASKS, BATCHES, BATCH = 2, 2, 256


@torch.no_grad()
def one_turn(kind: str, net: str, precision: str) -> None:
    """Print milliseconds of CPU time of the second run."""
    if kind != KINDS[-1] and not keep_freed_memory():
        raise SystemExit("the allocator is not glibc's, or the environment configures it")
    method = learnt(net, 32, TASKS, "cpu", True, 64)
    x = torch.randn(BATCH, 3, 32, 32).contiguous(memory_format=torch.channels_last)
    work = passes(method, x, BATCHES)["ours" if kind == "ours" else "plain passes"]
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        work()
        before = time.process_time()
        work()
        print(round(1e3 * (time.process_time() - before)))


def row(net: str, precision: str, repeats: int) -> Row:
    """Return a row of all kinds, measured in turns."""
    spent: dict[str, list[int]] = {kind: [] for kind in KINDS}
    clean = {name: value for name, value in os.environ.items() if "MALLOC" not in name and name != "GLIBC_TUNABLES"}
    for turn in range(repeats):
        for kind in KINDS[turn % 3 :] + KINDS[: turn % 3]:
            command = [sys.executable, __file__, "--turn", kind, net, precision]
            spent[kind].append(int(subprocess.run(command, env=clean, check=True, capture_output=True).stdout))
    results: Row = {"net": net, "precision": precision, "tasks": TASKS, "batch": BATCH, "batches": BATCHES}
    results["milliseconds"] = {kind: statistics.median(times) for kind, times in spent.items()}
    for kind in KINDS[:-1]:
        each = sorted(ours / plain for ours, plain in zip(spent[kind], spent[KINDS[-1]], strict=True))
        results[f"{kind} / plain passes"] = [round(v, 3) for v in (statistics.median(each), each[0], each[-1])]
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", nargs="+", default=["resnet18", "bsc"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--turn", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="a JSON file to write")
    options = parser.parse_args()
    if options.turn:
        one_turn(*options.turn)
        return
    precisions = ["fp32", *["bf16"] * has_fast_bf16("cpu")]
    rows = [row(net, precision, options.repeats) for net in options.nets for precision in precisions]
    show("test sets in processes: [median, lowest, highest] of the peer's time", rows, options.out)


if __name__ == "__main__":
    main()
