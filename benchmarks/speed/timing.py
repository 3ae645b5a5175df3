"""Timing of functions in turns, so that other load affects all of them equally; and their memory."""

import ctypes
import json
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from pearl.cli.memory import keep_freed_memory
from pearl.training.machine import machine

Row = dict[str, Any]


def ratios(work: Mapping[str, Callable[[], object]], repeats: int, device: str = "cpu") -> Row:
    """Return median milliseconds of each, and the time relative to the last, the peer: median, lowest, highest.

    On one CPU thread it is the process's CPU time, which other programs hardly affect. Freed memory is kept, as in a
    process of pearl.
    """
    keep_freed_memory()
    clock = time.process_time if device == "cpu" and torch.get_num_threads() == 1 else time.perf_counter
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    seconds: dict[str, list[float]] = {name: [] for name in work}
    names = list(work)
    for turn in range(repeats + 1):
        # each is first as often as last: position alone has made a difference of 7 %
        at = turn % len(names)
        for name in names[at:] + names[:at]:
            wait()
            start = clock()
            work[name]()
            wait()
            if turn:  # the first is a warm-up
                seconds[name].append(clock() - start)
    *ours, peer = names
    results: Row = {"milliseconds": {name: round(statistics.median(times) * 1e3, 3) for name, times in seconds.items()}}
    for name in ours:
        each = [mine / its for mine, its in zip(seconds[name], seconds[peer], strict=True)]
        results[f"{name} / {peer}"] = [round(value, 3) for value in (statistics.median(each), min(each), max(each))]
    return results


def peak_above(work: Callable[[], object]) -> int:
    """Return the peak memory of `work` in bytes above that before it, as counted by Linux.

    Memory that libraries allocate permanently counts for the first steps.
    """
    status, clear = Path("/proc/self/status"), Path("/proc/self/clear_refs")

    def read(key: str) -> int:
        return 1024 * next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith(key))

    ctypes.CDLL("libc.so.6").malloc_trim(0)  # return free memory to the system, or the next steps would reuse it
    clear.write_text("5")
    before = read("VmRSS:")
    work()
    return read("VmHWM:") - before


def cpu() -> str:
    """Return the widest relevant instruction set of this CPU: AVX2, AVX512, with AMX if available."""
    widest, features = machine(torch.device("cpu"))["cpu"]
    return widest + ", AMX" * bool(features.get("amx_bf16"))


def show(title: str, rows: list[Row], out: Path | None) -> None:
    """Print rows, and write them as JSON with the machine's description."""
    print(title)
    for row in rows:
        print("  " + "  ".join(f"{key}: {value}" for key, value in row.items()), flush=True)
    if out is not None:
        cuda = torch.cuda.get_device_name() if torch.cuda.is_available() else None
        here = {"torch": torch.__version__, "threads": torch.get_num_threads(), "cpu": cpu(), "gpu": cuda}
        out.write_text(json.dumps({"title": title, "machine": here, "rows": rows}, indent=1) + "\n")
