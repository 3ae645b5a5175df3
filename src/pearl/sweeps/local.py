"""Jobs as processes of this machine. Imports torch only to count the GPUs."""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from pearl.errors import ConfigError
from pearl.storage.inside import open_to_append
from pearl.sweeps.executors import Process
from pearl.training import launch


class Local:
    """Processes of this machine, which share its cores as threads and its GPUs.

    The default number of workers is `per_gpu` per GPU; on a CPU one per 4 cores, or per OMP_NUM_THREADS cores.

    Raises:
        ConfigError: unknown device, or less than one worker.
    """

    again = False

    def __init__(self, workers: int | None = None, *, device: str = "auto", per_gpu: int = 1) -> None:
        if device not in ("auto", "cpu", "cuda"):
            raise ConfigError(f"--device {device}: cannot be used here; use auto, cpu or cuda")
        gpus = visible_gpus() if device != "cpu" else []
        if device == "cuda" and not gpus:
            raise ConfigError("--device cuda: no GPU is available; use auto or cpu")
        for name, number in (("workers", workers), ("per-gpu", per_gpu)):
            if number is not None and number < 1:
                raise ConfigError(f"--{name} {number}: give 1 or more")
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        said = os.environ.get("OMP_NUM_THREADS", "")
        threads = int(said) if said.isdecimal() and int(said) else None
        self.workers = workers or len(gpus) * per_gpu or max(1, cores // (threads or 4))
        threads = threads or max(1, cores // self.workers)
        self.environments = [
            {"OMP_NUM_THREADS": str(threads), **({"CUDA_VISIBLE_DEVICES": gpus[w % len(gpus)]} if gpus else {})}
            for w in range(self.workers)
        ]

    def start(self, worker: int, arguments: Sequence[str], log: Path) -> Process:
        """See `Executor`."""
        with open_to_append(log) as file:
            return _Child(launch.child(arguments, self.environments[worker], file))


def visible_gpus() -> list[str]:
    """Return the GPUs of this machine as in CUDA_VISIBLE_DEVICES."""
    import torch

    count = torch.cuda.device_count()
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return (named.split(",") if named is not None else [str(gpu) for gpu in range(count)])[:count]


class _Child:
    """A process started by `launch.child`."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process

    def poll(self) -> int | None:
        code = self.process.poll()
        if code is not None:
            self._close()
        return code

    def stop(self) -> None:
        if self.process.stdin and self.process.stdin.closed:
            self.process.terminate()
        self._close()

    def _close(self) -> None:
        if self.process.stdin:
            self.process.stdin.close()
