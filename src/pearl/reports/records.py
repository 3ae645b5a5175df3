"""What the files of runs and models say, for pages, tables and sweeps. Reads files and nothing else, without torch.

A model of `pearl learn` has the files of a run less its results, so its record has no counts.
"""

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from pearl.errors import ConfigError, ReportError, RunError, counted
from pearl.evaluation import metrics
from pearl.reports.text import HEADLINES
from pearl.settings.documents import parse_yaml
from pearl.settings.registry import readable
from pearl.storage.files import (
    FORMAT,
    MANIFEST,
    check_format,
    check_no_gap,
    finished,
    half_learnt,
    manifests,
    read_json,
    read_regular,
    stored_bytes,
)
from pearl.storage.paths import runs_root
from pearl.storage.shapes import EVENTS, Environment, Reference, Results
from pearl.storage.shapes import Record as Shape

SCENARIOS: dict[metrics.Scenario, str] = {"class_il": "class-IL", "task_il": "task-IL"}


@dataclass(frozen=True)
class Learnt:
    """What the manifest of one task says."""

    name: str
    classes: list[str]
    images: int | None  # as `isolation`, not recorded by the first versions
    parameters: int  # of the whole model, after this task
    isolation: int | None  # of one network per task, after this task
    bytes: int
    layers: dict[str, dict[str, float]]  # threshold, rank, ... by layer
    seconds: dict[str, float]  # of each phase
    reused: list[str]  # phases that another run has trained, in so many seconds
    train: dict[str, Any]  # settings, which for a model may change from task to task; empty in a run


@dataclass(frozen=True)
class Record:
    """What the files of one run or model say."""

    path: Path
    config: dict[str, Any]
    counts: metrics.Counts | None  # None for a model: it keeps no test images
    tasks: list[str]  # names; for a run, of those that were evaluated
    classes: list[list[str]]  # of each task
    parameters: list[int]  # of the whole model, after each stage
    isolation: list[int] | None  # of one network per task, after each stage; None if not recorded
    start: int  # parameters before the first task
    learnt: list[Learnt]
    epochs: list[dict[str, Any]]  # events of this kind, in order
    environment: dict[str, Any]
    complete: bool  # a model always is, as it has no end
    pending: bool  # a model has begun to learn one more task

    @property
    def name(self) -> str:
        """The directory's name."""
        return self.path.name

    @property
    def title(self) -> str:
        """The name, and for a model that it is one."""
        return self.name if self.counts else f"{self.name} ({self.state})"

    @property
    def label(self) -> str:
        """What tells it apart from runs of other kinds."""
        return f"{self.config['recipe'] if self.counts else self.name} {readable(self.config['method']['name'])}"

    @property
    def planned(self) -> int:
        """How many tasks the stream has."""
        tasks = self.config["stream"]["tasks"]
        return tasks if isinstance(tasks, int) else len(tasks)

    @property
    def state(self) -> str:
        """Done, or how far it came; a model is never done."""
        if self.counts is None:
            return f"model, {counted(len(self.tasks), 'task')}"
        done = f"{len(self.tasks)} of {self.planned} tasks"
        return f"done, {done}" if self.complete else f"unfinished, {done}"

    @property
    def kind(self) -> str:
        """What runs that differ by their seed alone have in common; a model has that with no other."""
        if self.counts is None:  # its configuration does not say what it has learnt
            return str(self.path)
        same = {key: value for key, value in self.config.items() if key not in {"seed", "about", "expected"}}
        return json.dumps(same, sort_keys=True, default=str)

    @cached_property
    def summary(self) -> dict[str, float]:
        """Every metric by name, as `runs.Run.summary`, and the mean rank if there is one."""
        if self.counts is not None:
            values = metrics.summary(self.counts, self.parameters, self.isolation)
        else:
            values = {"parameters_million": self.parameters[-1] / 1e6}
            if self.isolation:
                values["growth"] = metrics.growth(self.parameters[-1], self.isolation[-1])
        rank = metrics.mean_rank([layer for task in self.layers for layer in task.values()])
        return values if rank is None else values | {"mean_rank": rank}

    @property
    def layers(self) -> list[dict[str, dict[str, float]]]:
        """Threshold, rank, ... by layer, of each task."""
        return [task.layers for task in self.learnt]

    @property
    def added(self) -> list[int]:
        """Parameters that each task added to the model."""
        return np.diff([self.start, *self.parameters]).tolist()

    @property
    def shares(self) -> list[float]:
        """What each task added, in percent of what all tasks added."""
        return percent(self.added)


def read_all(runs: Sequence[str | Path]) -> list[Record]:
    """Read several runs, of which no two may be the same: a seed that counts twice makes the spread too small.

    Raises:
        RunError: with a line for each run that cannot be read.
        ReportError: the same run twice, or no run at all.
    """
    if not runs:
        raise ReportError("no run given; name at least one, `pearl list runs` shows those there are")
    records, problems = [], []
    for run in runs:
        try:
            records.append(read(run))
        except RunError as error:
            problems.append(str(error))
    if problems:
        raise RunError("\n".join(problems))
    for first, second in itertools.combinations(records, 2):
        if (first.kind, first.config["seed"]) == (second.kind, second.config["seed"]):
            raise ReportError(f"{second.path}: the same configuration and seed as {first.path}; give one of them")
        if first.name == second.name:  # figures, tables and folders go by it
            raise ReportError(f"{second.path}: has the same name as {first.path}; rename one of the directories")
    return records


def read(run: str | Path) -> Record:
    """What the files of a run or model say; a run is a path, or a name under the folder of runs.

    Raises:
        RunError: neither a run nor a model, no task is finished, or a file is damaged.
    """
    path = next((at for at in (Path(run), runs_root() / run) if (at / "config.yaml").is_file()), None)
    if path is None:
        if (Path(run) / "tasks").is_dir():
            raise RunError(f"{Path(run) / 'config.yaml'}: missing, though tasks are there; restore it from a copy")
        raise RunError(
            f"{run}: neither a run nor a model, it has no config.yaml; `pearl list runs` shows the runs there are"
        )
    path = path.resolve()  # "." has no name
    config = _config(path / "config.yaml")
    measured = _results(path) if "recipe" in config else _model(path)
    reference = path / "reference" / MANIFEST
    return Record(
        path=path,
        config=config,
        start=read_json(reference, Reference)["parameters"],
        epochs=[*Epochs(events(path / "events.jsonl")).found.values()],
        environment=read_json(path / "environment.json", Environment) if (path / "environment.json").exists() else {},
        **measured,
    )


def _results(path: Path) -> dict[str, Any]:
    """What a run's results say about the tasks that were evaluated, with the manifests of those."""
    file = path / "results.json"
    results = read_json(file, Results) if file.exists() else {"stages": []}
    if not results["stages"]:
        raise RunError(f"{path}: no task is finished yet; let `pearl run` finish at least one, then report")
    folders = finished(path)
    try:
        counts = metrics.Counts.from_results(results)
        stages, tasks = results["stages"], results["tasks"]
        complete = bool(results.get("complete")) and len(folders) == len(tasks)
        names = [task["name"] for task in tasks]
        classes = [task["classes"] for task in tasks]
        sizes = [[stage[key] for stage in stages] for key in ("parameters", "isolation_parameters")]
    except RunError as error:
        raise RunError(f"{file}: damaged ({_reason(error)}); delete it and run again, which evaluates anew") from None
    return {
        "counts": counts,
        "tasks": names,
        "classes": classes,
        "parameters": sizes[0],
        "isolation": sizes[1],
        "learnt": _learnt(path, len(names)),
        "complete": complete,
        "pending": False,
    }


def _model(path: Path) -> dict[str, Any]:
    """What a model's manifests say in the place of results."""
    check_no_gap(path)
    learnt = _learnt(path)
    if not learnt:
        raise RunError(f"{path}: no task is finished yet; let `pearl resume {path}` finish one, then report")
    isolation = [task.isolation for task in learnt]
    return {
        "counts": None,
        "tasks": [task.name for task in learnt],
        "classes": [task.classes for task in learnt],
        "parameters": [task.parameters for task in learnt],
        "isolation": None if None in isolation else isolation,
        "learnt": learnt,
        "complete": True,
        "pending": _pending(path),
    }


def _pending(path: Path) -> bool:
    try:
        return bool(half_learnt(path))
    except RunError:  # whoever goes on with it is told
        return True


def _config(file: Path) -> dict[str, Any]:
    """The settings as they are written: checking them again would import every part they name, and torch."""
    try:
        config = parse_yaml(read_regular(file).decode())
        check_format(file, config.pop("format", FORMAT))  # no setting
        whole = isinstance(config["seed"], int) and isinstance(config["method"]["name"], str)
        whole = whole and isinstance(config["train"], dict)
        if config.keys() & {"recipe", "stream"}:
            whole = whole and isinstance(config["stream"]["tasks"], int | list) and isinstance(config["recipe"], str)
        whole = whole and all(isinstance(figure, dict) for figure in (config.get("expected") or {}).values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ConfigError) as error:
        raise RunError(f"{file}: cannot be read ({_reason(error)}); restore it from a copy") from None
    if not whole:
        raise RunError(f"{file}: damaged (not the settings of a run or model); restore it from a copy")
    return config


def _learnt(path: Path, tasks: int | None = None) -> list[Learnt]:
    """What each of the first `tasks` manifests (all if not given) says."""
    return [_of_task(folder, manifest) for folder, manifest in manifests(path, tasks)]


def _of_task(folder: Path, manifest: Mapping[str, Any]) -> Learnt:
    keys = ("threshold", "rank", "full_rank", "rows_and_columns")
    return Learnt(
        name=manifest["name"],
        classes=manifest["classes"],
        images=manifest.get("images"),
        parameters=manifest["parameters"],
        isolation=manifest.get("isolation_parameters"),
        bytes=stored_bytes(folder, manifest),
        layers={layer["layer"]: {key: layer[key] for key in keys} for layer in manifest.get("layers", [])},
        seconds=manifest["seconds"],
        reused=manifest.get("reused", []),
        train=manifest.get("train", {}),
    )


class Epochs:
    """The epochs among events, in order; of what was trained twice, since it was cut off, only the second time."""

    def __init__(self, events: Iterable[Mapping[str, Any]] = ()) -> None:
        self.found: dict[tuple[int, int, int], dict[str, Any]] = {}  # by task, position of the phase in it, and number
        self._position = 0
        for event in events:
            self.add(event)

    def add(self, event: Mapping[str, Any]) -> None:
        """Take in the next event."""
        if event["event"] == "task":
            self._position = 0
        elif event["event"] == "phase":
            self._position += 1
            if not event.get("done"):  # from its first step; phases before it may have been gone on with
                task, position = event["task"], self._position
                self.found = {at: epoch for at, epoch in self.found.items() if at[0] != task or at[1] < position}
        elif event["event"] == "epoch":
            self.found[event["task"], self._position, event["epoch"]] = dict(event)


def events(file: Path) -> Iterator[dict[str, Any]]:
    """The events of a run or model.

    A line that is not whole is passed over: a run that was killed may have left one.
    """
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines() if file.is_file() else []
    for line in lines:
        try:
            event = json.loads(line)
            EVENTS.get(event["event"], Shape).model_validate(event)
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
        yield event


def _reason(error: Exception) -> str:
    text = f"no {error}" if isinstance(error, KeyError) else str(error)
    return " ".join(text.split())


def flat(settings: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Nested settings by their dotted names, as the command line writes them."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, dict) and value:
            found |= flat(value, f"{above}{key}.")
        else:
            found[f"{above}{key}"] = value
    return found


def metric_title(key: str) -> str:
    """A metric's name for people."""
    names = HEADLINES | {"mean_rank": "mean rank, weighted by (in + out)"}
    return names.get(key, key.replace("class_il.", "class-IL ").replace("task_il.", "task-IL ").replace("_", " "))


def percent(values: Sequence[int]) -> list[float]:
    """Each value's share of their sum."""
    return [100 * value / max(sum(values), 1) for value in values]
