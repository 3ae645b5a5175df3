"""Jobs on a SLURM cluster, through submitit (`pip install "pearl[slurm]"`). No torch.

submitit writes a batch script into its folder, and pickles of the function to call (`on_node`, by name) and its result
(an exit code). pearl does not read them, and they contain no data of a run.
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
ASK = 30.0  # seconds between two queries of a job's state: each loads SLURM's controller
SOON = 2.0  # the same, while a user waits for the result
AT_WORK = {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "REQUEUED", "RESIZING", "UNKNOWN"}


def parse_options(items: Sequence[str]) -> dict[str, str | int | bool]:
    """Parse options of sbatch from the command line; not as YAML, which reads 10:00:00 as a number.

    Raises:
        ConfigError: lists every item that is not key=value.
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
    """Run pearl with these arguments in a SLURM job; return its exit code.

    Before the time limit, on preemption and on scancel it stores its state, as on Ctrl-C. Some clusters send these
    signals to this process only, some to all, so only this one handles them and forwards them once.
    """
    kinds = (signal.SIGTERM, *launch.OF_MACHINES)
    for kind in kinds:
        signal.signal(kind, signal.SIG_IGN)  # the child inherits that
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
    """Jobs of SLURM, or processes of submitit without SLURM (`real` is false), at most `workers` in parallel.

    A job that stopped at its time limit or by preemption is submitted again. SLURM must not requeue it as well, so jobs
    have `--no-requeue`: a preempted one then ends, whatever the cluster's PreemptMode.

    Raises:
        ConfigError: submitit or SLURM is missing, or an option is unknown.
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
            raise ConfigError("--slurm requeue: pearl resubmits preempted jobs itself; remove it")
        self.workers, self.real = workers, real
        try:
            if real:
                python = f"{shlex.quote(sys.executable)} -P"  # as `launch.COMMAND`
                self.executor: Any = submitit.SlurmExecutor(folder, python=python)
                known = self.executor._valid_parameters()
                settings = {"job_name": "pearl", "time": DAY}
                settings |= {key: value for key, value in options.items() if key in known}
                more = {key: value for key, value in options.items() if key not in known}  # options that sbatch accepts
                os.environ.pop("SBATCH_REQUEUE", None)  # they would override the batch script's
                self.executor.update_parameters(**settings, additional_parameters={"no_requeue": True, **more})
            else:
                os.environ["PYTHONSAFEPATH"] = "1"  # the same, for submitit's intermediate process
                self.executor = submitit.LocalExecutor(folder)
                self.executor.update_parameters(timeout_min=DAY, **options)
        except RuntimeError:
            raise ConfigError("--executor slurm: srun not found; run this on a machine with SLURM's commands") from None
        except (ValueError, TypeError, AssertionError) as error:
            raise ConfigError(f"--slurm: {' '.join(str(error).split())}") from None

    def start(self, worker: int, arguments: Sequence[str], log: Path) -> Process:
        """See `jobs.Executor`."""
        import submitit

        log.touch()  # it may end before it has started
        try:
            return _Submitted(self.executor.submit(on_node, [*arguments], str(log.resolve())), real=self.real)
        except (submitit.core.utils.FailedJobError, OSError) as error:
            raise RunError(f"SLURM rejected the job: {' '.join(str(error).split())}") from None


class _Submitted:
    """A job of submitit. It has ended when its exit code exists, or when SLURM reports that it no longer runs.

    submitit's own check needs accounting, which many clusters lack, so that a killed job would never end. Only SLURM
    has the reason of a stop: a job ended by `scancel` must not be started again.
    """

    def __init__(self, job: Any, *, real: bool) -> None:
        self.job, self.real = job, real
        self.asked, self.every = time.monotonic(), ASK
        self.ended = ""  # its state at the last query

    def poll(self) -> int | str | None:
        code = self._exit()
        if code is not None:
            if code != launch.INTERRUPTED or not self.real:
                return code
            # SLURM reports the reason a moment later; until then the job may count as running
            self.every = min(self.every, SOON)
        if time.monotonic() - self.asked < self.every:
            return None
        self.asked, ended, state = time.monotonic(), self.ended, self._state()
        self.ended = "" if state in AT_WORK else state
        # queried twice: on a shared disk the exit code may appear after SLURM's report
        if not self.ended or not (ended or code is not None):
            return None
        if state == "CANCELLED":
            return "cancelled; its state is stored"
        if state == "PREEMPTED":
            return launch.BUSY  # it is scheduled again, even if it had no time to store anything
        if code is None:
            return f"ended as {state}; see {self.job.paths.stderr}"
        return self._exit()  # read again: an operator may have requeued the job, which has ended again since

    def _exit(self) -> int | str | None:
        """Return the exit code of the job's newest start, submitit's last error, or None if it has not ended."""
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
            return "UNKNOWN"  # the controller is busy or temporarily unavailable
        return answer.stdout.strip() or "FORGOTTEN"

    def stop(self) -> None:
        self.every = SOON  # a user waits
        with suppress(OSError):
            self.job.cancel(check=False)  # if the controller is unavailable, still cancel the others
