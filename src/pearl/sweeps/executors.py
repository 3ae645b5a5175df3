"""Interface for running jobs: as processes of this machine or of a cluster."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol


class Process(Protocol):
    """A running job."""

    def poll(self) -> int | str | None:
        """Return None while it runs; then its exit code, or the reason why there is none."""

    def stop(self) -> None:
        """Ask it to store its state and end; a second call does not wait."""


class Executor(Protocol):
    """Runs jobs."""

    workers: int  # maximum number of parallel jobs
    again: bool  # True if a job that was stopped from outside, after some progress, is started again

    def start(self, worker: int, arguments: Sequence[str], log: Path) -> Process:
        """Start pearl with these arguments on a free worker; its output is appended to `log`.

        Raises:
            RunError: it cannot be started.
        """
