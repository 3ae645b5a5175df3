"""What the speed benchmarks share: interleaved timing, medians, and one line of JSON per ratio."""

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch


@dataclass
class Ratio:
    """Ours against a peer: below 1 is faster. `goal` is what the ratio should not exceed."""

    name: str
    ours: float  # seconds, median
    peer: float
    peer_is: str
    goal: float | None = None
    spread: tuple[float, float] = (0.0, 0.0)  # quartiles of the ratio over rounds
    facts: dict[str, object] = field(default_factory=dict)

    @property
    def ratio(self) -> float:
        return self.ours / self.peer

    def __str__(self) -> str:
        goal = "" if self.goal is None else f"   goal {self.goal:g}{'' if self.ratio <= self.goal else '   MISSED'}"
        low, high = self.spread
        ours, peer = (f"{1000 * seconds:.2f} ms" for seconds in (self.ours, self.peer))
        return f"{self.name:58} {self.ratio:6.3f} ({low:.3f} to {high:.3f})  {ours} / {peer} {self.peer_is}{goal}"


def compare(
    name: str,
    ours: Callable[[], Sequence[float] | None],
    peer: Callable[[], Sequence[float] | None],
    *,
    peer_is: str,
    rounds: int = 5,
    goal: float | None = None,
    **facts: object,
) -> Ratio:
    """Time both in turn, one warm-up each first. A function that returns durations is taken at its word."""
    _seconds(ours), _seconds(peer)
    pairs = [(_seconds(ours), _seconds(peer)) for _ in range(rounds)]
    ratios = sorted(a / b for a, b in pairs)
    quartiles = (ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4])
    a, b = (statistics.median(part) for part in zip(*pairs, strict=True))
    result = Ratio(name, a, b, peer_is, goal, quartiles, dict(facts))
    print(result, flush=True)
    return result


def _seconds(function: Callable[[], Sequence[float] | None]) -> float:
    started = time.perf_counter()
    durations = function()
    whole = time.perf_counter() - started
    return statistics.median(durations) if durations else whole


def write(results: Sequence[Ratio], path: Path) -> None:
    """All ratios with what they were measured on."""
    machine = {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }
    rows = [{**asdict(result), "ratio": result.ratio} for result in results]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": machine, "ratios": rows}, indent=1) + "\n")


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
