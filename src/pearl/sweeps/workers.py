"""Executors of jobs: processes of this machine, or SLURM. No torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pearl.storage.files import check_writable
from pearl.sweeps.executors import Executor
from pearl.sweeps.local import Local

ExecutorName = Literal["local", "slurm", "submitit-local"]


def executor_for(
    count: int,
    folder: Path,
    *,
    workers: int | None,
    executor: ExecutorName,
    device: str,
    per_gpu: int,
    slurm: Mapping[str, Any] | None,
) -> Executor:
    """Return the executor for this many runs, with files in `folder`; see `jobs.run_jobs`.

    Nothing is started or written.

    Raises:
        ConfigError: invalid workers, device, or options.
        RunError: the folder is not writable.
    """
    check_writable(folder)
    if executor == "local":
        return Local(workers, device=device, per_gpu=per_gpu)
    from pearl.sweeps.slurm import Submitit

    at_once = count if workers is None else workers
    return Submitit(at_once, folder / "submitit", slurm or {}, real=executor == "slurm")
