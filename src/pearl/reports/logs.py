"""Curves while a run or model learns, by Fabric's loggers: `--log tensorboard`, `csv`, `wandb`.

They are in DIRECTORY/logs/. They get the same events as events.jsonl, so that a log started or resumed later includes
earlier events.
"""

import os
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pearl.errors import ReportError, RunError
from pearl.settings.registry import nearest
from pearl.storage.events import Epochs
from pearl.storage.inside import check_no_links
from pearl.storage.run_directory import RunDirectory
from pearl.training.engine import Observer

if TYPE_CHECKING:
    from lightning_fabric.loggers import Logger

KINDS = ("tensorboard", "csv", "wandb")
# the package that each needs; pearl's extras have the same names
_PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb"}


def logged(show: Observer, kinds: str | Iterable[str], directory: Path) -> Observer:
    """Return the display, plus a log of each of these kinds in `directory`/logs.

    Raises:
        ReportError: unknown kind, or its package is missing.
    """
    chosen = [*dict.fromkeys([kinds] if isinstance(kinds, str) else kinds)]
    for kind in chosen:
        if kind not in KINDS:
            raise ReportError(f"log {kind!r}: unknown kind of log; {nearest(kind, KINDS)}")
        if kind in _PACKAGES and find_spec(_PACKAGES[kind]) is None:
            raise ReportError(f"log {kind}: needs the package {kind}; install it with: pip install 'pearl[{kind}]'")
    return Logs(show, chosen, directory) if chosen else show


class Logs(Observer):
    """Forwards everything to a display, and measurements to loggers."""

    def __init__(self, show: Observer, kinds: list[str], directory: Path) -> None:
        self.show, self.kinds, self.directory = show, kinds, RunDirectory(directory)
        self.loggers: dict[str, Logger | Wandb] = {}
        self.epochs = Epochs()

    def event(self, kind: str, **facts: Any) -> None:
        """Show an event, and log its measurements: from `run` on, when this process holds the directory."""
        self.show.event(kind, **facts)
        if kind == "run":
            self._guarded(self._open)
        elif self.loggers:
            self._guarded(self._log, {"event": kind, **facts}, [*self.loggers.values()])

    def step(self, done: int, total: int) -> None:
        """Forward the step."""
        self.show.step(done, total)

    def close(self) -> None:
        """Close the logs and the display."""
        self.show.close()
        for logger in self.loggers.values():
            self._guarded(logger.finalize, "success")

    def _guarded(self, act: Any, *args: Any) -> None:
        try:
            act(*args)
        except RunError:  # a link; the message has its own wording
            raise
        except Exception as error:  # each logger raises its own types of errors
            reason = getattr(error, "strerror", None) or " ".join(str(error).split()) or type(error).__name__
            raise ReportError(
                f"{self.directory.logs_folder}: a log cannot be written ({reason}); fix it, or leave out --log"
            ) from error

    def _open(self) -> None:
        folder = self.directory.logs_folder
        check_no_links(folder)  # the loggers' own code would write through links
        new = [kind for kind in self.kinds if kind == "csv" or not (folder / kind).is_dir()]
        if "csv" in self.kinds:  # Fabric's logger would overwrite it, with a warning
            (folder / "csv" / "metrics.csv").unlink(missing_ok=True)
        self.loggers = {kind: _logger(kind, folder, self.directory.path.resolve().name) for kind in self.kinds}
        for event in self.directory.events:
            self._log(event, [self.loggers[kind] for kind in new])

    def _log(self, event: Mapping[str, Any], loggers: "list[Logger | Wandb]") -> None:
        """Log an event's measurements, by number of the epoch in its kind of phase, or by task."""
        self.epochs.add(event)
        if event["event"] == "epoch":
            phase = event["phase"]
            values = {f"loss/{phase}": event["loss"], f"lr/{phase}": event["lr"]}
            number = sum(epoch["phase"] == phase for epoch in self.epochs.by_position.values())
        elif event["event"] == "stage":
            values = {f"pooled_accuracy_percent/{name}": event[name] for name in ("class_il", "task_il")}
            number = event["task"] + 1
        elif event["event"] == "learnt":
            values, number = {"parameters": event["parameters"]}, event["task"] + 1
        else:
            return
        for logger in loggers:
            logger.log_metrics(values, number)
            logger.save()


def _logger(kind: str, folder: Path, name: str) -> "Logger | Wandb":
    if kind == "wandb":
        return Wandb(folder / kind, name)
    from lightning_fabric.loggers import CSVLogger, TensorBoardLogger  # two seconds, with PyTorch's compiler

    return {"csv": CSVLogger, "tensorboard": TensorBoardLogger}[kind](folder, name=kind, version="")


class Wandb:
    """Weights & Biases with the methods of Fabric's loggers that are called here. wandb's own needs all of Lightning.

    The directory's name is the run's id, so that a resumed directory continues the same run.
    """

    def __init__(self, folder: Path, name: str) -> None:
        import wandb

        folder.mkdir(parents=True, exist_ok=True)
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "pearl"),
            dir=folder,
            name=name,
            id=name,
            resume="allow",
            settings=wandb.Settings(console="off"),
        )
        self.run.define_metric("*", step_metric="number")

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Log values at one step of their curves."""
        self.run.log({**metrics, "number": step})

    def save(self) -> None:
        """Do nothing: wandb writes by itself."""

    def finalize(self, status: str) -> None:
        """End the run."""
        self.run.finish()
