"""One process that works on one directory: lock, log, signals, and the training and storing of tasks.

Processes that train together all have a session; the first one locks and writes.
"""

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import torch

from pearl.data.batches import Task
from pearl.errors import Interrupted, Lost, RunError, reason, remedy
from pearl.lifecycle.notes import notes
from pearl.lifecycle.recognition import sample, unlearnt
from pearl.lifecycle.saved import CODE, config_bytes, isolation_size, read_config, task_infos
from pearl.methods.base import Method
from pearl.settings.config import ModelConfig
from pearl.settings.parts import METHODS
from pearl.storage.checkpoint import changed, remove_replaced, snapshot, write_part
from pearl.storage.files import (
    FORMAT,
    PENDING,
    check_no_gap,
    finished,
    folder_name,
    half_learnt,
    listed,
    task_folders,
    write_file,
    write_json,
)
from pearl.storage.inside import is_temporary, open_to_append, remove_temporaries, remove_tree
from pearl.storage.locks import Lock, locked
from pearl.training.engine import Engine, Observer
from pearl.training.machine import device_name, versions
from pearl.training.replay import Replay
from pearl.training.stop import Stop
from pearl.training.world import World, lost

Precision = Literal["auto", "fp32", "bf16"]


@contextmanager
def session(
    path: Path,
    config: ModelConfig,
    *,
    again: str,
    device: str = "auto",
    precision: Precision | None = None,
    show: Observer | None = None,
    minutes: float = 10.0,
    world: World | None = None,
    engine: Callable[..., Engine] = Engine,
) -> Iterator["Session"]:
    """Yield a session with exclusive write access to `path`; `again` is the command that resumes after an interruption.

    Raises:
        Busy: another process works on it.
        RunError: the directory is not writable.
        Lost: another process of the `world` has ended.
        Interrupted: the user stopped it; has the command to resume.
    """
    world = world or World()
    check_inside(path)
    log = Log(path / "events.jsonl", show or Observer()) if world.first else Observer()
    made = engine(config, device=device, precision=precision, observer=log, world=world)
    stop = Stop(several=world.size > 1)
    with locked(path) if world.first else nullcontext() as lock, stop.caught():
        if world.first:
            remove_temporaries(path)
        check_no_gap(path)
        replay = Replay(path / "resume", minutes=minutes, stop=stop, world=world)
        replay.keep_only(len(finished(path)))
        work = Session(path, config, made, log, replay, lock)
        work.complete()
        try:
            with METHODS.blamed(config.method["name"]):
                yield work
            world.wait()
        except Interrupted as error:
            raise Interrupted(f"{error}; its state is stored; resume with: {again}") from None
        except Exception as error:
            if world.size == 1 or not lost(error):
                raise
            raise Lost("another process of this run has ended; stored steps are complete; run it again") from None


def check_inside(path: Path) -> None:
    """Check that writing below a directory cannot leave it: a received directory may contain links.

    Raises:
        RunError: names a link that leads outside.
    """
    here = os.path.realpath(path)
    for folder in (path, path / "tasks", path / "resume", *path.glob("tasks/*"), *path.glob("resume/*")):
        for place in folder.iterdir() if folder.is_dir() else ():
            if is_temporary(place.name):  # removed, and never written to
                continue
            if place.is_symlink() and not os.path.realpath(place).startswith(f"{here}{os.sep}"):
                raise RunError(f"{place}: leads outside of the directory; replace the link by its target")


class Session:
    """See `session`."""

    def __init__(
        self, path: Path, config: ModelConfig, engine: Engine, log: Observer, replay: Replay, lock: Lock | None
    ) -> None:
        self.path, self.config, self.engine, self.log, self.replay = path, config, engine, log, replay
        self.lock = lock  # of the first process only
        self.world = engine.world

    def begin(self, method: Method) -> Method:
        """Write the initial files of a directory: configuration, environment, and the state before the first task."""
        method = self.engine.place(method)
        if not self.world.first:
            return method
        if source := METHODS.source(self.config.method["name"]):
            write_file(self.path / CODE, source, within=self.path)
        write_file(self.path / "config.yaml", config_bytes(self.config), within=self.path)
        write_json(self.path / "environment.json", environment(self.engine), within=self.path)
        self.list_classes()  # may be empty: the file exists from now on
        facts = {"parameters": method.size()}
        write_part(self.path / "reference", snapshot(method.state_dict()), facts, within=self.path)
        return method

    def learn(
        self,
        method: Method,
        task: Task,
        *,
        also: Sequence[str] = (),
        measure: Callable[[Method], Mapping[str, Any]] = lambda method: {},
        **facts: Any,
    ) -> None:
        """Train a method on a task and store its tensors; until they are complete, the directory is unchanged.

        `also` are its known classes; `measure` returns facts about the method after the task.
        """
        names = [*also, *task.classes]
        self.log.event("task", task=task.id, name=task.name, classes=names, images=len(task))
        for note in notes(method, task):
            self.log.event("note", task=task.id, text=note)
        started = time.perf_counter()
        images, some = len(task), sample(task)
        seconds = self.engine.learn(method, task, self.replay)
        if not self.world.first:
            self.replay.end()
            return
        added = changed(self.replay.start, method.state_dict())
        for folder in task_folders(self.path).get(task.id, []):  # of an attempt that was killed
            remove_tree(folder, self.path)
        classes = [len(info.classes) for info in task_infos(self.path)] + [len(task.classes)]
        facts = {
            "task": task.id,
            "name": task.name,
            "classes": list(task.classes),
            **({"also": list(also)} if also else {}),
            "images": images,
            "parameters": method.size(),
            "isolation_parameters": isolation_size(method, classes),
            "seconds": {key: round(value, 2) for key, value in seconds.items()},
            **({"reused": self.engine.reused} if self.engine.reused else {}),
            **facts,
            **method.facts(task.id),
            **measure(method),
        }
        if self.lock:
            self.lock.check()
        folder = self.path / "tasks" / folder_name(task.id, task.name)
        write_part(folder, added, facts, method.file_of, within=self.path)
        try:
            self.list_classes()
            self._thin_out()
            self.replay.end()
            for note in () if self.config.smoke else unlearnt(method, task.view, *some, task.shown):
                self.log.event("note", task=task.id, text=note)
            seconds_in_all = round(time.perf_counter() - started, 2)
            self.log.event("learnt", task=task.id, parameters=method.size(), seconds=seconds_in_all)
        except RunError as error:
            raise RunError(f"{error}; task {task.name!r} is learnt and stored nevertheless") from None

    def complete(self) -> None:
        """Complete the steps after a task's manifest, if a process died before them."""
        if not self.world.first:
            return
        with suppress(RunError):  # a damaged note: `learn` removes it with `discard`
            if (self.path / PENDING).is_file() and not half_learnt(self.path):
                remove_tree(self.path / "resume", self.path)
        if len(listed(self.path)) < len(finished(self.path)):
            self.list_classes()
        self._thin_out()

    def _thin_out(self) -> None:
        """Remove files that only earlier states need, unless they are to be kept."""
        if not finished(self.path):
            return
        settings = self.config, read_config(self.path)  # version 0.1 may have written there
        if not any(config.engine.earlier_states for config in settings):
            remove_replaced(self.path)

    def list_classes(self) -> None:
        """Write classes.json, the manifests' class names in order of arrival."""
        tasks = [{"name": info.name, "classes": list(info.classes)} for info in task_infos(self.path)]
        write_json(self.path / "classes.json", {"format": FORMAT, "tasks": tasks}, within=self.path)


class Log(Observer):
    """Writes events.jsonl and forwards everything to a display."""

    def __init__(self, file: Path, show: Observer) -> None:
        self.file, self.show = file, show

    def event(self, kind: str, **facts: Any) -> None:
        """Append one line, and show it."""
        line = json.dumps({"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "event": kind, **facts})
        try:
            with open_to_append(self.file, self.file.parent) as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(size - 1, 0))
                cut = file.read(1) not in (b"", b"\n")  # a line whose writer was killed
                file.write(b"\n" * cut + line.encode() + b"\n")
        except OSError as error:
            fix = remedy(error, "move it away")
            raise RunError(f"{self.file}: cannot be written ({reason(error)}); {fix}") from None
        self.show.event(kind, **facts)

    def step(self, done: int, total: int) -> None:
        """Forward the step."""
        self.show.step(done, total)


def environment(engine: Engine) -> dict[str, Any]:
    """Return the environment that a result depends on in addition to its configuration."""
    return {
        "format": FORMAT,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        **versions(),
        "device": device_name(engine.fabric.device),
        "precision": engine.precision,
        "processes": engine.world.size,
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "commit": _commit(),
    }


def _commit() -> str | None:
    """Return the commit of a source checkout; None for an installed package."""
    here = Path(__file__).parent
    with suppress(OSError, subprocess.SubprocessError):
        shown = subprocess.run(
            ["git", "-C", str(here), "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=True
        )
        return shown.stdout.strip()
    return None
