"""Jobs on a SLURM cluster, through submitit (`pip install "pearl[slurm]"`). No torch.

submitit writes, into the folder it is given, a batch script, and pickles of the function it is to call (`on_node`, by
its name) and of what that gave (an exit code). pearl itself reads none of them, and nothing of a run is in them.
"""

import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pearl import launch
from pearl.errors import ConfigError, RunError
from pearl.jobs import Process

DAY = 24 * 60  # minutes
ASK = 30.0  # seconds between two questions to SLURM about a job: each costs its controller something


def on_node(arguments: Sequence[str], log: str) -> int:
    """What a job of SLURM does: pearl with these arguments; its exit code.

    The warning before the time is up, a preemption and scancel let it store what it has learnt, as Ctrl-C does.
    """
    with open(log, "ab") as file:  # noqa: PTH123
        process = launch.child(arguments, {}, file)
    close = process.stdin.close  # type: ignore[union-attr]  # on which it stops; closing twice is once
    for kind in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(kind, lambda *_: close())
    code = process.wait()
    close()
    return code


class Submitit:
    """Jobs of SLURM, or without it processes of submitit's own (`real` is false), at most `workers` at once.

    Raises:
        ConfigError: submitit or SLURM is not here, or it knows no such option.
    """

    def __init__(self, workers: int, folder: Path, options: Mapping[str, Any], *, real: bool) -> None:
        try:
            import submitit
        except ImportError:
            raise ConfigError('submitit is not installed; pip install "pearl[slurm]"') from None
        self.workers = workers
        try:
            if real:
                self.executor: Any = submitit.SlurmExecutor(folder)
                known = self.executor._valid_parameters()
                settings = {"job_name": "pearl", "time": DAY}
                settings |= {key: value for key, value in options.items() if key in known}
                more = {key: value for key, value in options.items() if key not in known}  # sbatch knows
                self.executor.update_parameters(**settings, **({"additional_parameters": more} if more else {}))
            else:
                self.executor = submitit.LocalExecutor(folder)
                self.executor.update_parameters(timeout_min=DAY, **options)
        except RuntimeError:
            raise ConfigError("--executor slurm: no srun here; start it where SLURM's commands are") from None
        except (ValueError, TypeError, AssertionError) as error:
            raise ConfigError(f"--slurm: {' '.join(str(error).split())}") from None

    def start(self, worker: int, arguments: Sequence[str], log: Path) -> Process:
        """See `jobs.Executor`."""
        import submitit

        try:
            return _Submitted(self.executor.submit(on_node, [*arguments], str(log.resolve())), log)
        except (submitit.core.utils.FailedJobError, OSError) as error:
            raise RunError(f"SLURM did not take the job: {' '.join(str(error).split())}") from None


class _Submitted:
    """A job of submitit."""

    def __init__(self, job: Any, log: Path) -> None:
        log.touch()  # it may end before it has begun
        self.job, self.asked = job, time.monotonic()

    def poll(self) -> int | str | None:
        force = time.monotonic() - self.asked > ASK
        if force:
            self.asked = time.monotonic()
        if not self.job.done(force_check=force):
            return None
        if self.job.exception() is None:
            return int(self.job.result())
        return f"ended as {self.job.state} before it could say why; see {self.job.paths.stderr}"

    def stop(self) -> None:
        self.job.cancel()
