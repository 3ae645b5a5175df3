"""One process that works on one directory: lock, log, signals, and the training and storing of tasks.

Processes that train together all have a session; the first one locks and writes.
"""

import copy
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
from pearl.errors import Interrupted, Lost, RunError
from pearl.lifecycle.accuracy_estimate import accuracy_of
from pearl.lifecycle.notes import notes
from pearl.lifecycle.recognition import sample, unlearnt
from pearl.lifecycle.saved import config_bytes, isolation_size
from pearl.methods.base import Method
from pearl.settings.config import ModelConfig
from pearl.settings.parts import METHODS
from pearl.storage import events
from pearl.storage.checkpoint import remove_replaced, snapshot, write_part
from pearl.storage.files import write_file
from pearl.storage.inside import is_temporary, remove_temporaries, remove_tree
from pearl.storage.locks import Lock, locked
from pearl.storage.run_directory import RunDirectory
from pearl.training.engine import Engine, Observer
from pearl.training.machine import device_name, versions
from pearl.training.resume import Resume
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
    directory = RunDirectory(path)
    log = Log(directory.events_file, show or Observer()) if world.first else Observer()
    made = engine(config, device=device, precision=precision, observer=log, world=world)
    stop = Stop(several=world.size > 1)
    with locked(path) if world.first else nullcontext() as lock, stop.caught():
        if world.first:
            remove_temporaries(path)
        directory.check_no_gap()
        resume = Resume(directory.resume_folder, minutes=minutes, stop=stop, world=world)
        work = Session(path, config, made, log, resume, lock)
        work.complete()
        resume.keep_only(len(directory.finished))
        try:
            with METHODS.blamed(config.method["name"]):
                yield work
            world.wait()
        except Interrupted as error:
            until = ", and the model answers without this training until then" if directory.first_answer else ""
            raise Interrupted(f"{error}; its state is stored{until}; resume with: {again}") from None
        except Exception as error:
            if world.size == 1 or not lost(error):
                raise
            raise Lost("another process of this run has ended; stored steps are complete; run it again") from None


def check_inside(path: Path) -> None:
    """Check that writing below a directory cannot leave it: a received directory may contain links.

    Raises:
        RunError: names a link that leads outside.
    """
    here, directory = os.path.realpath(path), RunDirectory(path)
    below = [directory.tasks_folder, directory.resume_folder, directory.change_folder]
    for folder in (path, *below, *(each for one in below for each in one.glob("*"))):
        for entry in folder.iterdir() if folder.is_dir() else ():
            if is_temporary(entry.name):  # removed, and never written to
                continue
            if entry.is_symlink() and not os.path.realpath(entry).startswith(f"{here}{os.sep}"):
                raise RunError(f"{entry}: leads outside of the directory; replace the link by its target")


class Session:
    """See `session`."""

    def __init__(
        self, path: Path, config: ModelConfig, engine: Engine, log: Observer, resume: Resume, lock: Lock | None
    ) -> None:
        self.path, self.config, self.engine, self.log, self.resume = path, config, engine, log, resume
        self.directory = RunDirectory(path)
        self.lock = lock  # of the first process alone
        self.world = engine.world

    def begin(self, method: Method) -> Method:
        """Write the initial files of a directory: configuration, environment, and the state before the first task."""
        method = self.engine.to_device(method)
        if not self.world.first:
            return method
        if source := METHODS.source(self.config.method["name"]):
            write_file(self.directory.code_file, source, within=self.path)
        write_file(self.directory.config_file, config_bytes(self.config), within=self.path)
        self.directory.write(self.directory.environment_file, environment(self.engine))
        self.directory.list_classes()  # may be empty: the file exists from now on
        facts = {"parameters": method.size()}
        write_part(self.directory.reference, snapshot(method.state_dict()), facts, within=self.path)
        return method

    def learn(
        self,
        method: Method,
        task: Task,
        *,
        also: Sequence[str] = (),
        measure: Callable[[Method], Mapping[str, Any]] = lambda method: {},
        first_answer: bool = False,
        **facts: Any,
    ) -> None:
        """Train a method on a task and store its tensors; until they are complete, the directory is unchanged.

        `also` are its known classes; `measure` returns facts about the method after the task. With `first_answer`, the
        state without training is stored before, if the method can learn the task so; models use it until the task is
        finished.
        """
        names = [*also, *task.classes]
        self.log.event("task", task=task.id, name=task.name, classes=names, images=len(task))
        for note in notes(method, task):
            self.log.event("note", task=task.id, text=note)
        started = time.perf_counter()
        images, some = len(task), sample(task)

        def described(learnt: Method, seconds: Mapping[str, float]) -> dict[str, Any]:
            task_facts = self._facts(learnt, task, also, images, seconds)
            return task_facts | facts | learnt.facts(task.id) | {**measure(learnt)}

        if first_answer and method.classifier.learns_at_once(task) and self.directory.first_answer is None:
            self._answer_first(method, task, described)
        try:
            seconds = self.engine.learn(method, task, self.resume)
        except Interrupted:
            raise
        except Exception:  # training has failed, and the model is as it was before
            if self.world.first:
                remove_tree(self.directory.first_answer_folder, self.path)
            raise
        if not self.world.first:
            self.resume.end()
            return
        added = self.resume.changes(method)
        for folder in self.directory.folders.get(task.id, []):  # of an attempt that was killed
            remove_tree(folder, self.path)
        about = described(method, seconds)
        if self.lock:
            self.lock.check()
        storage: dict[str, Any] = {"features": method.classifier.features_of_images(), "within": self.path}
        write_part(self.directory.folder_of(task.id, task.name), added, about, method.file_of, **storage)
        try:
            self.directory.list_classes()
            self._thin_out()
            self.resume.end()
            for note in () if self.config.smoke else unlearnt(method, task.view, *some, task.shown, task.id):
                self.log.event("note", task=task.id, text=note)
            seconds_in_all = round(time.perf_counter() - started, 2)
            self.log.event("learnt", task=task.id, parameters=method.size(), seconds=seconds_in_all)
        except RunError as error:
            raise RunError(f"{error}; task {task.name!r} is learnt and stored nevertheless") from None

    def _answer_first(
        self, method: Method, task: Task, described: Callable[[Method, Mapping[str, float]], dict[str, Any]]
    ) -> None:
        """Store the state after a task without training. The method itself is unchanged, and so are its later bits."""
        started = time.perf_counter()
        first, resume = copy.deepcopy(method), Resume()
        seconds = self.engine.learn(first, task.without_training(), resume)
        if not self.world.first:
            return
        added, about = resume.changes(first), described(first, seconds)
        write_part(self.directory.first_answer_folder, added, about, first.file_of, within=self.path)
        spent = round(time.perf_counter() - started, 2)
        self.log.event("first_answer", task=task.id, seconds=spent, accuracy=accuracy_of(about.get("estimate")))

    def _facts(
        self, method: Method, task: Task, also: Sequence[str], images: int, seconds: Mapping[str, float]
    ) -> dict[str, Any]:
        """Return the manifest's facts about a task that a method has learnt from so many images."""
        classes = [len(info.classes) for info in self.directory.tasks] + [len(task.classes)]
        return {
            "task": task.id,
            "name": task.name,
            "classes": list(task.classes),
            **({"also": list(also)} if also else {}),
            "images": images,
            "parameters": method.size(),
            "isolation_parameters": isolation_size(method, classes),
            "seconds": {key: round(value, 2) for key, value in seconds.items()},
            **({"reused": self.engine.reused} if self.engine.reused else {}),
        }

    def complete(self) -> None:
        """Complete the steps after a task's manifest, if a process died before them, and remove what never counted."""
        if not self.world.first:
            return
        remove_tree(self.directory.change_folder, self.path)
        with suppress(RunError):  # a damaged note: `learn` removes it with `discard`
            if not self.directory.pending_file.is_file():  # its removal, with all that is beside it, was cut off
                remove_tree(self.directory.first_answer_folder, self.path)
            elif not self.directory.interrupted_task:
                remove_tree(self.directory.resume_folder, self.path)
        if len(self.directory.listed) < len(self.directory.finished):
            self.directory.list_classes()
        self._thin_out()

    def _thin_out(self) -> None:
        """Remove files that only earlier states need, unless they are to be kept."""
        if self.directory.finished and not self.config.engine.earlier_states:
            remove_replaced(self.path)


class Log(Observer):
    """Writes events.jsonl and forwards everything to a display."""

    def __init__(self, file: Path, show: Observer) -> None:
        self.file, self.show = file, show

    def event(self, kind: str, **facts: Any) -> None:
        """Append one line, and show it."""
        events.append(self.file, {"event": kind, **facts})
        self.show.event(kind, **facts)

    def step(self, done: int, total: int) -> None:
        """Forward the step."""
        self.show.step(done, total)


def environment(engine: Engine) -> dict[str, Any]:
    """Return the environment that a result depends on in addition to its configuration."""
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        **versions(),
        "device": device_name(engine.device),
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
