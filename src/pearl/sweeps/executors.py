"""Where jobs are at work, as those who start jobs see it: processes of this machine, or of a cluster."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol


class Process(Protocol):
    """A job at work."""

    def poll(self) -> int | str | None:
        """None while it is at work; then its exit code, or in words why it has none."""

    def stop(self) -> None:
        """Let it store what it has learnt and end; called again: at once."""


class Executor(Protocol):
    """Where jobs are at work."""

    workers: int  # how many at once
    again: bool  # whether a job that is told to stop from outside, and has learnt something, is started again

    def start(self, worker: int, arguments: Sequence[str], log: Path) -> Process:
        """Start pearl with these arguments on a worker that is free; what it says is added to `log`.

        Raises:
            RunError: it cannot be started.
        """
