"""Progress of a run: a live bar with remaining time on a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from pearl.errors import counted, drawn_on, printable
from pearl.reports.text import duration
from pearl.training.engine import Observer


def display(quiet: bool = False) -> Observer:
    """Return the display that fits the output."""
    if quiet:
        return Observer()
    return Live() if sys.stderr.isatty() else Lines()


class Lines(Observer):
    """Prints one line per task, phase and stage to standard error; within a phase one every 20 seconds."""

    interval = 20.0

    def __init__(self) -> None:
        self.console = Console(file=drawn_on(sys.stderr), highlight=False, soft_wrap=True)
        self.tasks = 0
        self.phase = ""
        self.began = self.said = time.monotonic()

    def event(self, kind: str, **facts: Any) -> None:
        """Print events that are worth a line."""
        if kind in {"phase", "decode", "online"}:
            self.phase = facts.get("phase", "images" if kind == "online" else "decode")
            self.began = self.said = time.monotonic()
        line = self.line(kind, facts)
        if line:
            self.console.print(printable(line), markup=False)

    def line(self, kind: str, facts: Mapping[str, Any]) -> str | None:
        """Return an event as a line; None if it is not worth one."""
        if kind == "prepare":
            return f"{facts['recipe']}: {facts['method']} -> {facts['run']}"
        if kind == "already_done":
            return f"already done: {facts['run']}"
        if kind == "run":
            self.tasks = facts["tasks"]
            after = f", resuming after task {facts['done']}" if facts["done"] else ""
            return f"{counted(facts['tasks'], 'task')}, {counted(facts['classes'], 'class')}{after}"
        if kind == "task":
            names = ", ".join(facts["classes"][:6]) + (" ..." if len(facts["classes"]) > 6 else "")
            size = f"{counted(len(facts['classes']), 'class')} ({names}), {counted(facts['images'], 'image')}"
            return f"task {facts['task'] + 1}/{self.tasks}: {size}"
        if kind == "data" and (
            said := [facts["notes"][key] for key in ("left_out", "copies") if key in facts["notes"]]
        ):
            return f"note: {'; '.join(said)}"
        if kind == "note":
            return f"  note: {facts['text']}"
        if kind == "first_answer":
            share = "" if facts["accuracy"] is None else f", {facts['accuracy']:.1f} % correct by cross-validation"
            return f"  first answer after {facts['seconds']:.1f} s{share}; it is used until training ends"
        if kind == "phase":
            before = (
                f"; loaded from the phase cache, trained in {duration(facts['reused'])}" if "reused" in facts else ""
            )
            size = f"{counted(facts['steps'], 'step')}, {counted(facts['trained'], 'parameter')}"
            return f"  {facts['phase']}: {size}{before}"
        if kind == "stream":
            after = f", resuming after {counted(facts['done'], 'image')}" if facts["done"] else ""
            return f"{counted(facts['images'], 'image')}, {counted(facts['classes'], 'class')}{after}"
        if kind == "online":
            return f"  {facts['seen']} images, {counted(facts['classes'], 'class')}: {facts['accuracy']:.2f} % correct"
        if kind == "stage":
            accuracy = f"class-IL {facts['class_il']:.2f} %, task-IL {facts['task_il']:.2f} % (pooled over images)"
            return f"  after task {facts['task'] + 1}: {accuracy}"
        return None

    def step(self, done: int, total: int) -> None:
        """Print the progress of the phase, at intervals."""
        now = time.monotonic()
        if now - self.said >= self.interval and done < total:
            self.said = now
            left = (now - self.began) / done * (total - done)
            self.console.print(f"    {self.phase} {done}/{total}, {left:.0f} s left", markup=False)


class Live(Lines):
    """A bar per phase with remaining time, below the lines."""

    def __init__(self) -> None:
        super().__init__()
        self.bar = Progress(
            TextColumn("  {task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self.console,
            transient=True,
        )
        self.row = self.bar.add_task("")

    def event(self, kind: str, **facts: Any) -> None:
        """Start, restart or end the bar, and print."""
        if kind in {"phase", "decode"}:
            self.bar.start()
            self.bar.reset(self.row, total=facts.get("steps", facts["images"]), description=facts.get("phase", kind))
        elif kind == "epoch":
            self.bar.update(self.row, description=f"{facts['phase']} epoch {facts['epoch']} loss {facts['loss']:.3f}")
        elif kind in {"run", "learnt", "stage", "online"}:
            self.bar.stop()
        super().event(kind, **facts)

    def step(self, done: int, total: int) -> None:
        """Move the bar."""
        self.bar.update(self.row, completed=done)

    def close(self) -> None:
        """Restore the terminal's cursor."""
        self.bar.stop()
