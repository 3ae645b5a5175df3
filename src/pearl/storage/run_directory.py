"""The directory of a run or model: its files, their contents, and its progress. No torch.

Only this file names them. A model of `pearl learn` has the files of a run, less its data and results.
"""

import itertools
import shlex
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from pearl.errors import ConfigError, RunError, counted
from pearl.names import class_name
from pearl.storage import events
from pearl.storage.below import Below
from pearl.storage.files import FORMAT, check_format, read_json, read_regular, write_json
from pearl.storage.locks import is_held
from pearl.storage.paths import runs_root
from pearl.storage.schemas import (
    Classes,
    Data,
    Environment,
    Pending,
    Reference,
    Results,
    Schema,
    Settings,
    TaskManifest,
    WeightFile,
    problem,
)
from pearl.storage.stored_task import MANIFEST, StoredTask, classes_of, composed, folder_name, read_manifest, task_rows
from pearl.yaml_io import parse_yaml


class State(StrEnum):
    """The progress of a directory."""

    MISSING = "missing"  # no task is finished or interrupted
    LEARNING = "learning"  # a process works on it
    INTERRUPTED = "interrupted"  # a task was interrupted
    UNFINISHED = "unfinished"  # a run has unfinished tasks
    FINISHED = "finished"  # also a model without an interrupted task, since it has no end
    DAMAGED = "damaged"


class RunDirectory:
    """A run or model on disk. Attributes are read on every access, since other processes may write meanwhile."""

    config_file = Below("config.yaml")  # resolved settings
    environment_file = Below("environment.json")  # versions, device, threads, commit
    data_file = Below("data.json")  # source, split and digests of a run's data
    classes_file = Below("classes.json")  # names in order of arrival, per task, as in the manifests; append-only
    results_file = Below("results.json")  # counts per stage, task and class, from which every metric is computed
    events_file = Below("events.jsonl")  # one line per phase and epoch
    code_file = Below("method.py")  # a copy of the method's file, for the user
    inference_file = Below("inference.json")  # inference time, if a table measured it
    reference = Below("reference")  # the method's state before the first task
    reference_manifest = Below(f"reference/{MANIFEST}")  # the last file of a directory's start
    tasks_folder = Below("tasks")  # 000-NAME/: tensors added or changed by task 0, with thresholds, ranks, seconds
    resume_folder = Below("resume")  # checkpoints of the current task
    pending_file = Below("resume/task.json")  # a description of a model's current task
    first_answer_folder = Below("resume/first-answer")  # its state without training, until it is trained
    change_folder = Below("unfinished-change")  # new files of a change that is not complete, see `change`
    change_file = Below("unfinished-change/change.json")
    certificates_folder = Below("certificates")  # of what was forgotten
    online_folder = Below("online")  # the state of an online learner after so many images, see `online.state`
    arrivals_file = Below("arrivals.jsonl")  # files of a stream in the order of their arrival, see `arrivals`
    unlabelled_file = Below("unlabelled.jsonl")  # scores of images without a class in a stream
    logs_folder = Below("logs")  # curves, see `--log`

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def write(self, file: Path, value: Mapping[str, Any]) -> None:
        """Write one of its JSON files atomically and not through links; see `files.write_json`."""
        write_json(file, {"format": FORMAT, **value}, within=self.path)

    # ----------------------------------------------------------------------------------------------- what files hold

    @property
    def config(self) -> dict[str, Any]:
        """Return the settings as stored: checking them would import every part that they name, and torch.

        Raises:
            RunError: neither a run nor a model, its configuration cannot be read, or a change is not complete.
        """
        self.check_no_change()
        file = self.config_file
        if not file.is_file():
            if self.tasks_folder.is_dir():
                raise RunError(f"{file}: missing, though tasks are there; restore it from a copy")
            raise RunError(
                f"{self.path}: neither a model nor a run, it has no {file.name}; `pearl list runs` shows the runs "
                f"there are"
            )
        try:
            config = parse_yaml(read_regular(file).decode())
            if not isinstance(number := config.pop("format", None), int):
                raise ValueError("no format number")
            check_format(file, number)
        except (OSError, ValueError, TypeError, AttributeError, ConfigError) as error:
            reason = " ".join(str(error).split())
            raise RunError(f"{file}: cannot be read ({reason}); restore it from a copy") from None
        if wrong := problem(config, Settings):
            raise RunError(f"{file}: damaged, not the settings of a run or model ({wrong}); restore it from a copy")
        return dict(config)

    @property
    def results(self) -> dict[str, Any]:
        """Return the counts of every finished stage of a run; empty if the file does not exist.

        Raises:
            RunError: the file is damaged.
        """
        file = self.results_file
        return read_json(file, Results) if file.exists() else {"tasks": [], "stages": []}

    @property
    def environment(self) -> dict[str, Any]:
        """Return versions, device and other facts of its creation; empty if the file does not exist.

        Raises:
            RunError: the file is damaged.
        """
        return read_json(self.environment_file, Environment) if self.environment_file.exists() else {}

    @property
    def data(self) -> dict[str, Any]:
        """Return the digests of a run's data.

        Raises:
            RunError: the file is missing or damaged.
        """
        return read_json(self.data_file, Data)

    @property
    def start(self) -> dict[str, Any]:
        """Return the manifest of the state before the first task.

        Raises:
            RunError: the file is missing or damaged.
        """
        return read_json(self.reference_manifest, Reference)

    @property
    def events(self) -> Iterator[dict[str, Any]]:
        """Return all events, in order."""
        return events.read(self.events_file)

    @property
    def learnt_at(self) -> dict[int, str]:
        """Return when each task was learnt, by its index; the last time counts, and tasks without one are left out."""
        known = (event for event in self.events if event["event"] == "learnt" and {"task", "time"} <= event.keys())
        return {event["task"]: event["time"] for event in known}

    @property
    def certificates(self) -> list[Path]:
        """Return the files of all certificates, oldest first."""
        return sorted(file for file in self.certificates_folder.glob("*.json") if file.stem.isdecimal())

    # --------------------------------------------------------------------------------------------------------- tasks

    @property
    def tasks(self) -> list[StoredTask]:
        """Return the finished tasks; see `first_tasks`."""
        return self.first_tasks()

    def first_tasks(self, count: int | None = None) -> list[StoredTask]:
        """Return the first `count` usable tasks (all finished ones if not given); no later manifest is read.

        Raises:
            RunError: a manifest is damaged, belongs to another task, or disagrees with classes.json or its tensors.
        """
        stored_tasks: list[StoredTask] = []
        first = 0
        second_copy = itertools.chain(self.listed, itertools.repeat(None))
        for (folder, manifest), known in zip(self.manifests(count), second_copy, strict=False):
            classes, also = tuple(manifest["classes"]), tuple(manifest.get("also", ()))
            task = StoredTask(manifest["name"], classes, first, folder, also, manifest)
            if known and (known[0], composed(known[1])) != (task.name, composed(classes)):
                raise RunError(f"{task.file}: differs from classes.json in name or classes; restore it from a copy")
            rows = task_rows(len(stored_tasks), manifest["tensors"])
            if rows - {len(classes)}:
                raise RunError(
                    f"{task.file}: lists {counted(len(classes), 'class')}, the task's tensors have {max(rows)}; "
                    f"restore it from a copy"
                )
            stored_tasks.append(task)
            first += len(classes)
        every = [name for task in stored_tasks for name in task.classes]
        if len({*map(class_name, every)}) < len(every):  # of a model that took two forms of a name for two classes
            return stored_tasks
        return [replace(task, classes=composed(task.classes), also=composed(task.also)) for task in stored_tasks]

    @property
    def folders(self) -> dict[int, list[Path]]:
        """Return all folders of tasks by number, finished or not."""
        numbered: dict[int, list[Path]] = {}
        for path in sorted(self.tasks_folder.glob("[0-9][0-9][0-9]*")):
            number, _, _ = path.name.partition("-")
            if number.isdecimal():
                numbered.setdefault(int(number), []).append(path)
        return numbered

    @property
    def finished(self) -> list[Path]:
        """Return the folders of the finished tasks, in order; a gap ends the list."""
        numbered = {
            number: path
            for number, paths in self.folders.items()
            for path in reversed(paths)
            if (path / MANIFEST).is_file()
        }
        return [numbered[index] for index in itertools.takewhile(numbered.__contains__, itertools.count())]

    def folder_of(self, index: int, name: str) -> Path:
        """Return the current or future path of a task's folder."""
        return self.tasks_folder / folder_name(index, name)

    @property
    def usable(self) -> list[Path]:
        """Return the folders of the finished tasks, and that of the current task's first answer if there is one."""
        first = self.first_answer
        return [*self.finished, *([first] if first else [])]

    @property
    def first_answer(self) -> Path | None:
        """Return the folder of the current task's state without training; None if there is none."""
        folder = self.first_answer_folder
        with suppress(RunError):  # a damaged record of the task
            if (folder / MANIFEST).is_file() and self.interrupted_task.get("index") == len(self.finished):
                return folder
        return None

    def manifests(
        self, count: int | None = None, shape: type[Schema] = TaskManifest
    ) -> Iterator[tuple[Path, dict[str, Any]]]:
        """Yield folder and manifest of the first `count` usable tasks (all finished ones if not given).

        Raises:
            RunError: a manifest is unreadable, or belongs to another task than its folder's number.
        """
        for index, folder in enumerate(self.finished if count is None else self.usable[:count]):
            manifest = read_manifest(folder, shape)
            if (stored_index := manifest.get("task", index)) != index:
                raise RunError(
                    f"{folder / MANIFEST}: has the number {stored_index!r}, not {index:03d}; folders were swapped, "
                    f"renamed or copied, so give each its own name again, or restore them from a copy"
                )
            yield folder, manifest

    @property
    def listed(self) -> list[tuple[str, list[str]]]:
        """Return name and classes of each task by classes.json, which duplicates the manifests.

        It is written after a task's manifest, so it may lack the last task and never has more.

        Raises:
            RunError: it is damaged.
        """
        file = self.classes_file
        if not file.is_file():
            return []
        return [(task["name"], task["classes"]) for task in read_json(file, Classes)["tasks"]]

    def list_classes(self) -> None:
        """Write classes.json, the manifests' class names in order of arrival."""
        self.write(self.classes_file, classes_of((task.name, task.classes) for task in self.tasks))

    def check_no_change(self) -> None:
        """Refuse a directory in which an exchange of files is in progress or was interrupted.

        Raises:
            RunError: names the command that completes the change.
        """
        if self.change_file.is_file():
            raise RunError(
                f"{self.path}: a change of it is in progress or was interrupted; complete it with: "
                f"pearl resume {shlex.quote(str(self.path))}"
            )

    def check_no_gap(self) -> None:
        """Refuse a directory that has lost a task, or has two tasks with the same number.

        Raises:
            RunError: names the missing manifest, or the folders; or a change is not complete.
        """
        self.check_no_change()
        done, folders = len(self.finished), self.folders
        whole = {number: [path for path in paths if (path / MANIFEST).exists()] for number, paths in folders.items()}
        for number, paths in whole.items():
            if len(paths) > 1:
                both = " and ".join(path.name for path in paths)
                raise RunError(f"{self.tasks_folder}: {both} are both task {number:03d}; move all but one away")
        later = [path for number, paths in whole.items() if number > done for path in paths]
        if later or len(self.listed) > done:
            lost = folders.get(done, [self.tasks_folder / f"{done:03d}"])[0] / MANIFEST
            though = f"{later[0].name} is there" if later else "classes.json lists the task"
            raise RunError(
                f"{lost}: missing, though {though}; restore it from a copy, or, to learn again from there, remove "
                f"classes.json and the folders of tasks from {done:03d} on"
            )

    @property
    def online_states(self) -> list[Path]:
        """Return the complete states of an online learner, oldest first; empty for models and runs of tasks."""
        return sorted(manifest.parent for manifest in self.online_folder.glob(f"*/{MANIFEST}"))

    @property
    def online_manifest(self) -> dict[str, Any]:
        """Return the manifest of the newest of these states; empty if there is none.

        Raises:
            RunError: it is damaged.
        """
        states = self.online_states
        return read_manifest(states[-1], WeightFile) if states else {}

    # ------------------------------------------------------------------------------------------------ how far it is

    @property
    def state(self) -> State:
        """Return its progress. A short attempt to take the lock shows whether a process works on it."""
        with suppress(OSError):  # a directory that cannot be locked
            if is_held(self.path):
                return State.LEARNING
        try:
            if self.is_done:
                return State.FINISHED
            if self.is_interrupted or self.checkpoints:
                return State.INTERRUPTED
            if not self.finished:
                return State.MISSING
            return State.UNFINISHED if "recipe" in self.config else State.FINISHED
        except RunError:
            return State.DAMAGED

    @property
    def is_done(self) -> bool:
        """Return True if every task of a run has been learnt and evaluated.

        Raises:
            RunError: its results are damaged.
        """
        results = self.results
        return bool(results.get("complete")) and len(self.finished) == len(results["tasks"])

    @property
    def interrupted_task(self) -> dict[str, Any]:
        """Return the record of a model's current task; empty if there is none.

        A task with a manifest is learnt, even if its process died before it removed the record.

        Raises:
            RunError: the record is damaged.
        """
        note = read_json(self.pending_file, Pending) if self.pending_file.is_file() else {}
        return {} if note.get("index") in range(len(self.finished)) else note

    @property
    def is_interrupted(self) -> bool:
        """Return True if a model has an interrupted task, also with a damaged record, which is reported on resuming."""
        try:
            return bool(self.interrupted_task)
        except RunError:
            return True

    @property
    def checkpoints(self) -> list[Path]:
        """Return the checkpoints of the current task; empty if there are none."""
        folders = sorted(manifest.parent for manifest in self.resume_folder.glob(f"*/{MANIFEST}"))
        return [folder for folder in folders if folder != self.first_answer_folder]


def find_run(run: str | Path) -> RunDirectory:
    """Return the directory of a run or model: at this path, or of this name in the folder of runs; else the path."""
    candidates = [RunDirectory(Path(run)), RunDirectory(runs_root() / run)]
    return next((directory for directory in candidates if directory.config_file.is_file()), candidates[0])
