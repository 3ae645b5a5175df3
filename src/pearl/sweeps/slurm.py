"""Jobs on a SLURM cluster, through submitit (`pip install "pearl[slurm]"`). No torch.

submitit writes, into the folder it is given, a batch script, and pickles of the function it is to call (`on_node`, by
its name) and of what that gave (an exit code). pearl itself reads none of them, and nothing of a run is in them.
"""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pearl.errors import ConfigError, RunError
from pearl.sweeps.executors import Process
from pearl.training import launch

DAY = 24 * 60  # minutes
ASK = 30.0  # seconds between two questions to SLURM about a job: each costs its controller something
SOON = 2.0  # the same, where someone waits for the answer
AT_WORK = {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "REQUEUED", "RESIZING", "UNKNOWN"}


def parse_options(items: Sequence[str]) -> dict[str, str | int | bool]:
    """Options of sbatch as the command line gives them. Not as YAML, to which 10:00:00 is a number.

    Raises:
        ConfigError: with every item that is not key=value.
    """
    pairs = [item.partition("=") for item in items]
    wrong = [
        f"--slurm {''.join(pair)}: write it as key=value, such as partition=gpu" for pair in pairs if not all(pair)
    ]
    if wrong:
        raise ConfigError(*wrong)
    words = {"true": True, "false": False}
    return {
        key.lstrip("-").replace("-", "_"): int(text) if text.isdecimal() else words.get(text, text)
        for key, _, text in pairs
    }


def on_node(arguments: Sequence[str], log: str) -> int:
    """What a job of SLURM does: pearl with these arguments; its exit code.

    The warning before the time is up, a preemption and scancel let it store what it has learnt, as Ctrl-C does. Some
    clusters send them to this process alone, some to all, so only this one listens and passes them on once.
    """
    kinds = (signal.SIGTERM, *launch.OF_MACHINES)
    for kind in kinds:
        signal.signal(kind, signal.SIG_IGN)  # the one that is started inherits that
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with open(log, "ab") as file:  # noqa: PTH123
        process = launch.child(arguments, {}, file)
    close = process.stdin.close  # type: ignore[union-attr]  # on which it stops; closing twice is once
    for kind in (signal.SIGINT, *kinds):
        signal.signal(kind, lambda *_: close())
    code = process.wait()
    close()
    return code


class Submitit:
    """Jobs of SLURM, or without it processes of submitit's own (`real` is false), at most `workers` at once.

    A job that has stopped before its time was up, or since another took its place, is submitted again. SLURM must not
    requeue it as well, so jobs say `--no-requeue`: a preempted one then ends, whatever the cluster's PreemptMode.

    Raises:
        ConfigError: submitit or SLURM is not here, or it knows no such option.
    """

    again = True

    def __init__(self, workers: int, folder: Path, options: Mapping[str, Any], *, real: bool) -> None:
        try:
            import submitit
        except ImportError:
            raise ConfigError('submitit is not installed; pip install "pearl[slurm]"') from None
        if workers < 1:
            raise ConfigError(f"--workers {workers}: give 1 or more")
        if "requeue" in options:
            raise ConfigError("--slurm requeue: pearl itself submits a job again that was preempted; leave it out")
        self.workers, self.real = workers, real
        try:
            if real:
                python = f"{shlex.quote(sys.executable)} -P"  # as `launch.COMMAND`
                self.executor: Any = submitit.SlurmExecutor(folder, python=python)
                known = self.executor._valid_parameters()
                settings = {"job_name": "pearl", "time": DAY}
                settings |= {key: value for key, value in options.items() if key in known}
                more = {key: value for key, value in options.items() if key not in known}  # sbatch knows
                os.environ.pop("SBATCH_REQUEUE", None)  # it would count for more than what the batch script says
                self.executor.update_parameters(**settings, additional_parameters={"no_requeue": True, **more})
            else:
                os.environ["PYTHONSAFEPATH"] = "1"  # the same, also for the process that submitit puts in between
                self.executor = submitit.LocalExecutor(folder)
                self.executor.update_parameters(timeout_min=DAY, **options)
        except RuntimeError:
            raise ConfigError("--executor slurm: no srun here; start it where SLURM's commands are") from None
        except (ValueError, TypeError, AssertionError) as error:
            raise ConfigError(f"--slurm: {' '.join(str(error).split())}") from None

    def start(self, worker: int, arguments: Sequence[str], log: Path) -> Process:
        """See `jobs.Executor`."""
        import submitit

        log.touch()  # it may end before it has begun
        try:
            return _Submitted(self.executor.submit(on_node, [*arguments], str(log.resolve())), real=self.real)
        except (submitit.core.utils.FailedJobError, OSError) as error:
            raise RunError(f"SLURM did not take the job: {' '.join(str(error).split())}") from None


class _Submitted:
    """A job of submitit. It has ended when its exit code is there, or when SLURM says that it is no more at work.

    Not as submitit finds out, which asks for accounting: many a cluster has none, and a killed job would never end.
    Why a job was told to stop only SLURM knows: one that `scancel` has ended is not to be started again.
    """

    def __init__(self, job: Any, *, real: bool) -> None:
        self.job, self.real = job, real
        self.asked, self.every = time.monotonic(), ASK
        self.ended = ""  # as what, when it was last asked

    def poll(self) -> int | str | None:
        code = self._exit()
        if code is not None:
            if code != launch.INTERRUPTED or not self.real:
                return code
            self.every = min(self.every, SOON)  # SLURM says why in a moment; until then the job may count as at work
        if time.monotonic() - self.asked < self.every:
            return None
        self.asked, ended, state = time.monotonic(), self.ended, self._state()
        self.ended = "" if state in AT_WORK else state
        # asked twice: on a shared disk the exit code may come later than SLURM's word
        if not self.ended or not (ended or code is not None):
            return None
        if state == "CANCELLED":
            return "cancelled; what it has learnt is stored"
        if state == "PREEMPTED":
            return launch.BUSY  # its turn comes again, also if it had no time to learn anything
        if code is None:
            return f"ended as {state}; see {self.job.paths.stderr}"
        return self._exit()  # read again: an operator may have requeued the job, which has ended once more since

    def _exit(self) -> int | str | None:
        """The exit code of the job's newest start, the last words of one that submitit failed in, or None so far."""
        if not self.job.paths.result_pickle.exists():
            return None
        if (error := self.job.exception()) is not None:
            return str(error).strip().splitlines()[-1]
        return int(self.job.result())

    def _state(self) -> str:
        if not self.real:
            return str(self.job.state)
        asked = ["squeue", "--noheader", "--states=all", "--format=%T", f"--jobs={self.job.job_id}"]
        answer = subprocess.run(asked, capture_output=True, text=True)
        if answer.returncode and "Invalid job id" not in answer.stderr:
            return "UNKNOWN"  # its controller is busy, or away for a moment
        return answer.stdout.strip() or "FORGOTTEN"

    def stop(self) -> None:
        self.every = SOON  # someone waits
        with suppress(OSError):
            self.job.cancel(check=False)  # with its controller away, the others are still to be told
