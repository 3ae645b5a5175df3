"""What the files of runs and models say, for pages, tables and sweeps. Reads files and nothing else, without torch.

A model of `pearl learn` has the files of a run less its results, so its record has no counts.
"""

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from pearl.errors import ReportError, RunError, counted
from pearl.evaluation import metrics
from pearl.reports.text import HEADLINES
from pearl.settings.registry import readable
from pearl.storage.events import Epochs
from pearl.storage.paths import runs_root
from pearl.storage.run_directory import RunDirectory
from pearl.storage.stored_task import StoredTask

SCENARIOS: dict[metrics.Scenario, str] = {"class_il": "class-IL", "task_il": "task-IL"}


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
    learnt: list[StoredTask]
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
    places = [RunDirectory(Path(run)), RunDirectory(runs_root() / run)]
    directory = next((place for place in places if place.config_file.is_file()), places[0])
    config = directory.config
    directory = RunDirectory(directory.path.resolve())  # "." has no name
    measured = _results(directory) if "recipe" in config else _model(directory)
    return Record(
        path=directory.path,
        config=config,
        start=directory.start["parameters"],
        epochs=[*Epochs(directory.events).found.values()],
        environment=directory.environment,
        **measured,
    )


def _results(directory: RunDirectory) -> dict[str, Any]:
    """What a run's results say about the tasks that were evaluated, with the manifests of those."""
    results = directory.results
    stages, tasks = results["stages"], results["tasks"]
    if not stages:
        raise RunError(f"{directory.path}: no task is finished yet; let `pearl run` finish at least one, then report")
    try:
        counts = metrics.Counts.from_results(results)
    except RunError as error:
        raise RunError(
            f"{directory.results_file}: damaged ({error}); delete it and run again, which evaluates anew"
        ) from None
    return {
        "counts": counts,
        "tasks": [task["name"] for task in tasks],
        "classes": [task["classes"] for task in tasks],
        "parameters": [stage["parameters"] for stage in stages],
        "isolation": [stage["isolation_parameters"] for stage in stages],
        "learnt": directory.first_tasks(len(tasks)),
        "complete": directory.is_done,
        "pending": False,
    }


def _model(directory: RunDirectory) -> dict[str, Any]:
    """What a model's manifests say in the place of results."""
    directory.check_no_gap()
    learnt = directory.tasks
    if not learnt:
        path = directory.path
        raise RunError(f"{path}: no task is finished yet; let `pearl resume {path}` finish one, then report")
    isolation = [task.isolation for task in learnt]
    return {
        "counts": None,
        "tasks": [task.name for task in learnt],
        "classes": [list(task.classes) for task in learnt],
        "parameters": [task.parameters for task in learnt],
        "isolation": None if None in isolation else isolation,
        "learnt": learnt,
        "complete": True,
        "pending": directory.is_half_learnt,
    }


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
