"""Contents of the files of runs and models, for pages, tables and sweeps. Reads only files, without torch.

A model of `pearl learn` has the files of a run without its results, so its record has no counts.
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
from pearl.storage.run_directory import RunDirectory, find_run
from pearl.storage.stored_task import StoredTask

SCENARIOS: dict[metrics.Scenario, str] = {"class_il": "class-IL", "task_il": "task-IL"}


@dataclass(frozen=True)
class Record:
    """The contents of the files of one run or model."""

    path: Path
    config: dict[str, Any]
    counts: metrics.Counts | None  # None for a model: it stores no test images
    tasks: list[str]  # names; for a run, of those that were evaluated
    classes: list[list[str]]  # of each task
    parameters: list[int]  # of the whole model, after each stage
    isolation: list[int] | None  # of one network per task, after each stage; None if not recorded
    start: int  # parameters before the first task
    learnt: list[StoredTask]
    epochs: list[dict[str, Any]]  # events of this kind, in order
    environment: dict[str, Any]
    complete: bool  # always True for a model, since it has no end
    pending: bool  # a model has an interrupted task

    @property
    def name(self) -> str:
        """Return the directory's name."""
        return self.path.name

    @property
    def title(self) -> str:
        """Return the name, and for a model that it is one."""
        return self.name if self.counts else f"{self.name} ({self.state})"

    @property
    def label(self) -> str:
        """Return a label that distinguishes it from runs of other kinds."""
        return f"{self.config['recipe'] if self.counts else self.name} {readable(self.config['method']['name'])}"

    @property
    def planned(self) -> int:
        """Return the number of tasks of the stream."""
        tasks = self.config["stream"]["tasks"]
        return tasks if isinstance(tasks, int) else len(tasks)

    @property
    def state(self) -> str:
        """Return "done" or the progress; a model is never done."""
        if self.counts is None:
            return f"model, {counted(len(self.tasks), 'task')}"
        done = f"{len(self.tasks)} of {self.planned} tasks"
        return f"done, {done}" if self.complete else f"unfinished, {done}"

    @property
    def kind(self) -> str:
        """Return a key that runs differing only by seed share; a model's is unique."""
        if self.counts is None:  # its configuration does not determine its tasks
            return str(self.path)
        same = {key: value for key, value in self.config.items() if key not in {"seed", "about", "expected"}}
        return json.dumps(same, sort_keys=True, default=str)

    @cached_property
    def summary(self) -> dict[str, float]:
        """Return every metric by name, as `runs.Run.summary`, and the mean rank if there is one."""
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
        """Return threshold, rank, ... by layer, of each task."""
        return [task.layers for task in self.learnt]

    @property
    def added(self) -> list[int]:
        """Return the parameters that each task added to the model."""
        return np.diff([self.start, *self.parameters]).tolist()

    @property
    def shares(self) -> list[float]:
        """Return each task's share of all added parameters, in percent."""
        return percent(self.added)


def read_all(runs: Sequence[str | Path]) -> list[Record]:
    """Read several runs, without repetition: a repeated seed would make the standard deviation too small.

    Raises:
        RunError: lists every unreadable run.
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
        if first.name == second.name:  # names of figures, tables and folders
            raise ReportError(f"{second.path}: has the same name as {first.path}; rename one of the directories")
    return records


def read(run: str | Path) -> Record:
    """Read the files of a run or model; a run is a path, or a name in the folder of runs.

    Raises:
        RunError: neither a run nor a model, no task is finished, or a file is damaged.
    """
    directory = find_run(run)
    config = directory.config
    if "online" in config:
        raise RunError(f"{directory.path}: learns from a stream, without tasks; see it with pearl inspect")
    directory = RunDirectory(directory.path.resolve())  # "." has no name
    measured = _results(directory) if "recipe" in config else _model(directory)
    return Record(
        path=directory.path,
        config=config,
        start=directory.start["parameters"],
        epochs=[*Epochs(directory.events).by_position.values()],
        environment=directory.environment,
        **measured,
    )


def _results(directory: RunDirectory) -> dict[str, Any]:
    """Return the results of a run's evaluated tasks, with the tasks' manifests."""
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
    """Return the contents of a model's manifests instead of results."""
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
        "pending": directory.is_interrupted,
    }


def flat(settings: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Return nested settings by dotted names, as on the command line."""
    numbers: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, dict) and value:
            numbers |= flat(value, f"{above}{key}.")
        else:
            numbers[f"{above}{key}"] = value
    return numbers


def metric_title(key: str) -> str:
    """Return a metric's name for users."""
    names = HEADLINES | {"mean_rank": "mean rank, weighted by (in + out)"}
    return names.get(key, key.replace("class_il.", "class-IL ").replace("task_il.", "task-IL ").replace("_", " "))


def percent(values: Sequence[int]) -> list[float]:
    """Return each value's share of their sum, in percent."""
    return [100 * value / max(sum(values), 1) for value in values]
