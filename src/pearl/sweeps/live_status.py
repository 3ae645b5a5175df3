"""Progress of many runs from their events.jsonl: a live table on a terminal, plain lines elsewhere. No torch."""

import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pearl.errors import counted, drawn_on, printable
from pearl.reports.text import duration
from pearl.storage.events import Tail


class Position:
    """Progress of a run, from events added to its file from now on."""

    def __init__(self, file: Path) -> None:
        self.file, self.tail = file, Tail(file)
        self.learnt: int | None = None  # number of tasks; None until the run has reported it
        self.tasks = 0
        self.doing = "starting"

    def read(self) -> None:
        """Read new events. An incomplete line is left for the next call."""
        for event in self.tail.read():
            with suppress(ValueError, KeyError, TypeError):  # an event with fewer fields than pearl writes
                self._take(event)

    def _take(self, event: Mapping[str, Any]) -> None:
        kind = event["event"]
        if kind == "run":
            self.learnt, self.tasks, self.doing = event["done"], event["tasks"], "starting"
        elif kind == "phase":
            self.doing = f"{event['phase']}, {counted(event['steps'], 'step')}"
        elif kind == "epoch":
            self.doing = f"{event['phase']}, epoch {event['epoch']} done, loss {event['loss']:.3f}"
        elif kind == "learnt":
            self.learnt, self.doing = event["task"] + 1, "evaluating"
        elif kind == "stage":
            self.doing = f"class-IL {event['class_il']:.2f} %"

    def __str__(self) -> str:
        return self.doing if self.learnt is None else f"{self.learnt}/{self.tasks} tasks learnt; {self.doing}"


@dataclass
class Status:
    """Progress of all runs together, in tasks; tasks of different runs take different times, so it is approximate."""

    tasks: Mapping[Path, int]  # of each run
    learnt: dict[Path, int] = field(default_factory=dict)  # tasks learnt before the start, of unfinished runs
    states: dict[Path, str] = field(default_factory=dict)  # of ended runs
    running: list[tuple[str, Position, float]] = field(default_factory=list)  # name, progress, seconds
    began: float = 0.0

    def begin(self, learnt: dict[Path, int]) -> None:
        """Start the progress: the number of tasks learnt of each unfinished run."""
        self.learnt, self.began = learnt, time.monotonic()

    def ended(self, run: Path, state: str) -> None:
        """Record that a run has ended."""
        self.states[run] = state

    @property
    def share(self) -> float:
        """Return the completed share of the work, from 0 to 1."""
        todo = sum(self.tasks[run] - learnt for run, learnt in self.learnt.items())
        return self._behind / todo if todo else 1.0

    @property
    def left(self) -> float | None:
        """Return the estimated remaining seconds at the current speed; None before the first task is learnt."""
        share = self.share
        return (time.monotonic() - self.began) * (1 - share) / share if share else None

    @property
    def _behind(self) -> int:
        ended = sum(self.tasks[run] - learnt for run, learnt in self.learnt.items() if run in self.states)
        running = {position.file.parent: position.learnt for _, position, _ in self.running}
        return ended + sum(
            max(0, learnt - self.learnt[run]) for run, learnt in running.items() if learnt and run in self.learnt
        )

    def __str__(self) -> str:
        count = {state: [*self.states.values()].count(state) for state in ("done", "skipped", "failed")}
        waiting = len(self.tasks) - len(self.states) - len(self.running)
        numbers = {"running": len(self.running), "waiting": waiting, "failed": count["failed"]}
        parts = [f"{count['done'] + count['skipped']} of {len(self.tasks)} runs done"]
        parts += [f"{number} {what}" for what, number in numbers.items() if number]
        if self.left and (self.running or waiting):
            parts.append(f"about {duration(self.left)} left")
        return ", ".join(parts)


class LiveStatus:
    """Receives the progress of all runs. The base class shows nothing."""

    def say(self, line: str) -> None:
        """Print an event."""

    def update(self, status: Status) -> None:
        """Called a few times per second."""

    def close(self) -> None:
        """Called when all runs have ended, successfully or not."""


def board(quiet: bool = False) -> LiveStatus:
    """Return the board that fits the output."""
    if quiet:
        return LiveStatus()
    return LiveBoard() if sys.stderr.isatty() else LineBoard()


class LineBoard(LiveStatus):
    """Prints a line for each run that ends, and one for all every minute and when the first one starts."""

    interval = 60.0

    def __init__(self) -> None:
        self.console = Console(file=drawn_on(sys.stderr), highlight=False, soft_wrap=True)
        self.said = -self.interval

    def say(self, line: str) -> None:
        """Print a line."""
        self.console.print(printable(line), markup=False)

    def update(self, status: Status) -> None:
        """Print the progress of all runs, at intervals."""
        if len(status.states) < len(status.tasks) and time.monotonic() - self.said >= self.interval:
            self.said = time.monotonic()
            self.say(str(status))
            for name, position, seconds in status.running:
                self.say(f"  {name}: {position}; {duration(seconds)}")


class LiveBoard(LineBoard):
    """A table with a line per active run and a bar for all, below the lines."""

    def __init__(self) -> None:
        super().__init__()
        self.live = Live(console=self.console, auto_refresh=False, transient=True)

    def update(self, status: Status) -> None:
        """Draw the table again."""
        self.live.start()
        table = Table.grid(padding=(0, 2), expand=True)
        table.add_column(no_wrap=True, overflow="ellipsis")
        table.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
        table.add_column(justify="right", no_wrap=True)
        for name, position, seconds in status.running:
            table.add_row(Text(printable(name)), Text(printable(str(position))), duration(seconds))
        self.live.update(Group(table, Text(str(status)), ProgressBar(completed=100 * status.share)), refresh=True)

    def close(self) -> None:
        """Restore the terminal's cursor."""
        self.live.stop()
