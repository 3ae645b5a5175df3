"""A grid of settings times seeds as jobs, with the directory of its manifest and logs, and its table of results.

runs/sweeps/RECIPE-HASH/sweep.json    the command, and for each job its overrides and the name of its run directory
runs/sweeps/RECIPE-HASH/logs/         output of each job, by the name of its run directory

Does not import torch. Progress is read from the run directories, so that it cannot be out of date.
"""

import hashlib
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import mean
from typing import Any

import yaml

from pearl.errors import ConfigError, counted, printable
from pearl.reports.text import duration
from pearl.settings.config import OnlineRunConfig, parse_overrides
from pearl.storage.durations import total_seconds
from pearl.storage.files import FORMAT, check_output, write_output
from pearl.storage.paths import runs_root
from pearl.storage.run_directory import RunDirectory, State
from pearl.storage.tabular import aligned, mean_and_std, rows_as_markdown
from pearl.sweeps.jobs import Job, JobResult, check
from pearl.yaml_io import parse_yaml

COLUMNS = {
    "class_il.final": "class-IL A_T",
    "class_il.average": "average",
    "class_il.forgetting": "forgetting",
    "task_il.final": "task-IL A_T",
    "task_il.average": "task-IL average",
    "task_il.forgetting": "task-IL forgetting",
    "parameters_million": "parameters (M)",
}
OF_STREAMS = {"a_auc": "A_auc", "a_last": "A_last", "forgetting": "forgetting", "passes": "passes"}
FORMATS = (".csv", ".md", ".json")
MOST_JOBS = 10_000  # of one sweep; each is configured before the first one starts

Point = dict[str, str]  # a value, as text, for each axis


@dataclass(frozen=True)
class Sweep:
    """A recipe with settings and seeds."""

    recipe: str
    settings: Mapping[str, Sequence[str]]  # values by key, as text; more than one are an axis
    axes: tuple[str, ...]  # the keys shown
    seeds: tuple[int, ...] = ()  # empty: the settings' seed
    smoke: bool = False

    @cached_property
    def points(self) -> list[Point]:
        """Return the grid: a value for each axis."""
        values = itertools.product(*(self.settings[key] for key in self.axes))
        return [dict(zip(self.axes, one, strict=True)) for one in values]

    def jobs_of(self, point: Point) -> list[Job]:
        """Return the jobs of a point, one per seed."""
        common = [f"{key}={point.get(key, values[0])}" for key, values in self.settings.items()]
        label = [f"{key}={value}" for key, value in point.items()]
        seeds = [[f"seed={seed}"] for seed in self.seeds] or [[]]
        return [
            Job(self.recipe, (*common, *seed), self.smoke, " ".join([*label, *seed]) or self.recipe) for seed in seeds
        ]

    @cached_property
    def jobs(self) -> list[Job]:
        """Return all jobs, grouped by point."""
        return [job for point in self.points for job in self.jobs_of(point)]

    @cached_property
    def path(self) -> Path:
        """Return the sweep's directory, named by its runs: equal grids have the same one, however they are written."""
        digest = hashlib.sha256(json.dumps(sorted({job.run.name for job in self.jobs})).encode()).hexdigest()[:8]
        return runs_root() / "sweeps" / f"{self.jobs[0].config.recipe}-{digest}"

    def manifest(self, command: str) -> dict[str, Any]:
        """Return the sweep's contents, and the command that resumes it."""
        facts = {"command": command, "recipe": self.recipe, "smoke": self.smoke}
        return facts | {"axes": [*self.axes], "seeds": [*self.seeds]}


def parse(recipe: str, items: Sequence[str], seeds: str | None = None, *, smoke: bool = False) -> Sweep:
    """Parse a sweep from the command line: `key=[a,b,c]` is an axis, `key=value` is set in all jobs.

    `seeds` is a number ("3" is 0, 1 and 2) or a list ("0,1,5").

    Raises:
        ConfigError: has a line per problem, with the invalid jobs.
    """
    problems: list[str] = []
    settings: dict[str, list[str]] = {}
    axes: list[str] = []
    for item in items:
        try:
            parse_overrides([item])
        except ConfigError as error:
            problems += error.problems
            continue
        key, _, text = item.partition("=")
        value = parse_yaml(text)
        if key in settings:
            problems.append(f"{key}: given twice; write all its values as {key}=[A,B]")
        elif isinstance(value, list) and not value:
            problems.append(f"{key}: has no value; write {key}=[A,B]")
        elif isinstance(value, list):
            settings[key] = [*dict.fromkeys(written(one) for one in value)]
            axes.append(key)
        else:
            settings[key] = [text]
    if "seed" in axes:
        problems.append(f"seed={settings['seed']}: means are over seeds; give them as --seeds 0,1,5")
    elif "seed" in settings and seeds is not None:
        problems.append("seed: given twice; remove it, or --seeds")
    numbers: tuple[int, ...] = ()
    try:
        numbers = parse_seeds(seeds) if seeds is not None else ()
    except ConfigError as error:
        problems += error.problems
    sweep = Sweep(recipe, settings, tuple(axes), numbers, smoke)
    size = math.prod(len(settings[key]) for key in axes) * max(1, len(numbers))
    if size > MOST_JOBS:
        problems.append(f"a grid of {size:,} jobs; give fewer values or seeds, {MOST_JOBS:,} jobs at most")
    try:
        if not problems:
            check(sweep.jobs)
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(*problems)
    return sweep


def parse_seeds(text: str) -> tuple[int, ...]:
    """Parse `"3"` to 0, 1 and 2; `"0,1,5"` to these; `"7,"` to 7.

    Raises:
        ConfigError: another format.
    """
    parts = [part.strip() for part in text.removesuffix(",").split(",")]
    if not all(part.isascii() and part.isdecimal() for part in parts):
        raise ConfigError(f"--seeds {text}: give a number, such as 3, or a list, such as 0,1,5")
    if any(len(part) > 10 for part in parts):
        raise ConfigError(f"--seeds {text}: seeds must be below 2**32; give smaller ones")
    numbers = [int(part) for part in parts]
    if len(numbers) > 1 or text.endswith(","):
        return tuple(dict.fromkeys(numbers))
    if not 1 <= numbers[0] <= MOST_JOBS:
        raise ConfigError(f"--seeds {text}: give 1 to {MOST_JOBS:,}, or a list, such as 0,")
    return tuple(range(numbers[0]))


def written(value: Any) -> str:
    """Return a value as it is written after `key=`."""
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=math.inf)
    return text.removesuffix("\n").removesuffix("\n...")


# -------------------------------------------------------------------------------------------------- before the runs


def plan(sweep: Sweep, workers: int) -> str:
    """Return the grid as text: each job, its state, and the estimated time of the rest."""
    unique = {job.run: job for job in sweep.jobs}
    states = {run: _state(run) for run in unique}
    took = {run: total_seconds(RunDirectory(run)) for run in unique if states[run] == "done"}
    width, wide = (max(map(len, names)) for names in ([job.title for job in unique.values()], states.values()))
    lines = [
        f"{job.title:{width}}  {states[run]:{wide}}  {run.name}" + (f"  {duration(took[run])}" if run in took else "")
        for run, job in unique.items()
    ]
    missing = [run for run in unique if run not in took]
    total = f"{len(sweep.points)} x {len(sweep.seeds) or 1} = {counted(len(sweep.jobs), 'job')}, "
    total += f"{counted(len(unique), 'run')}: {len(took)} done, {len(missing)} missing"
    trained = [run for run in missing if not _is_taken(unique[run], unique)]
    if len(trained) < len(missing):
        total += f", of which {len(missing) - len(trained)} only fit class statistics to sub-networks of other runs"
    if took and trained:
        expected, usual = _expected(sweep, took), mean(took.values())
        seconds = sum(expected.get(run, usual) for run in trained)
        total += (
            f"; about {duration(seconds / min(workers, len(trained)))} with {workers} in parallel, by the finished runs"
        )
    return "\n".join([*lines, "", total, f"sweep directory: {sweep.path}"])


def _is_taken(job: Job, jobs: Mapping[Path, Job]) -> bool:
    from pearl.lifecycle.refit import can_be_taken

    return job.source is not None and (job.source in jobs or can_be_taken(job.source))


def _expected(sweep: Sweep, took: Mapping[Path, float]) -> dict[Path, float]:
    """Return the expected seconds of runs, from finished runs of their point."""
    expected: dict[Path, float] = {}
    for point in sweep.points:
        runs = [job.run for job in sweep.jobs_of(point)]
        known = [took[run] for run in runs if run in took]
        expected |= dict.fromkeys(runs, mean(known)) if known else {}
    return expected


def _state(run: Path) -> str:
    directory = RunDirectory(run)
    state, tasks = directory.state, len(directory.finished)
    if state in (State.UNFINISHED, State.INTERRUPTED) and tasks:
        return counted(tasks, "task")
    return "done" if state == State.FINISHED else str(state)


# ------------------------------------------------------------------------------------------------------ results


@dataclass(frozen=True)
class GridRow:
    """A point of the grid, over its finished seeds."""

    point: Point
    runs: list[str]
    values: dict[str, tuple[float | None, float | None]]  # mean and standard deviation (n - 1), by metric


def columns(sweep: Sweep) -> dict[str, str]:
    """Return the metrics of its runs with their titles."""
    return OF_STREAMS if isinstance(sweep.jobs[0].config, OnlineRunConfig) else COLUMNS


def rows(sweep: Sweep, outcomes: Sequence[JobResult]) -> list[GridRow]:
    """Return the table of results; points without finished runs have no values.

    Raises:
        RunError: a finished run is damaged.
    """
    from pearl.evaluation.online_metrics import summary
    from pearl.reports.compared import spread
    from pearl.reports.records import read

    ended = {outcome.job: outcome for outcome in outcomes}
    table = []
    for point in sweep.points:
        runs = dict.fromkeys(ended[job].run for job in sweep.jobs_of(point) if ended[job].state != "failed")
        streams = [RunDirectory(run).results.get("online") for run in runs]
        summaries = [summary(one) if one else read(run).summary for run, one in zip(runs, streams, strict=True)]
        values = {key: spread([summary[key] for summary in summaries]) for key in columns(sweep)}
        table.append(GridRow(point, [run.name for run in runs], {key: _finite(*pair) for key, pair in values.items()}))
    return table


def _finite(*numbers: float | None) -> Any:
    """Drop NaN values: with a single task, forgetting is undefined."""
    return tuple(None if number is None or math.isnan(number) else float(number) for number in numbers)


def cells(sweep: Sweep, table: Sequence[GridRow]) -> list[list[str]]:
    """Return the table as text, with a header."""
    head = [*(sweep.axes or ["recipe"]), "n", *columns(sweep).values()]
    lines = [
        [
            *(row.point.values() or [sweep.recipe]),
            str(len(row.runs)),
            *(mean_and_std(*row.values[key]) for key in columns(sweep)),
        ]
        for row in table
    ]
    return [head, *lines]


def page(sweep: Sweep, table: Sequence[GridRow]) -> str:
    """Return the table for a terminal."""
    shown = [[printable(cell) for cell in line] for line in cells(sweep, table)]
    return f"{aligned(shown)}\n\nmean ± standard deviation over n seeds; accuracies in %"


def write(sweep: Sweep, table: Sequence[GridRow], output: Path) -> Path:
    """Write the table atomically, as CSV, Markdown or JSON by suffix; with all digits except in .md.

    Raises:
        ReportError: unknown suffix.
        RunError: it cannot be written.
    """
    check_output(output, FORMATS, "table")
    text = {".csv": _csv, ".md": _markdown, ".json": _json}[output.suffix.lower()](sweep, table)
    write_output(output, text)
    return output


def _csv(sweep: Sweep, table: Sequence[GridRow]) -> str:
    from pearl.reports.html import Table

    metrics = [f"{key} {what}" for key in columns(sweep) for what in ("mean", "std")]
    lines = [
        [
            *(row.point.values() or [sweep.recipe]),
            len(row.runs),
            *(value for key in columns(sweep) for value in row.values[key]),
        ]
        for row in table
    ]
    return Table(sweep.recipe, [*(sweep.axes or ["recipe"]), "n", *metrics], lines).csv


def _markdown(sweep: Sweep, table: Sequence[GridRow]) -> str:
    return rows_as_markdown(cells(sweep, table)) + "\n"


def _json(sweep: Sweep, table: Sequence[GridRow]) -> str:
    rows = [
        {
            "settings": row.point,
            "n": len(row.runs),
            "runs": row.runs,
            **{key: {"mean": mean, "std": std} for key, (mean, std) in row.values.items()},
        }
        for row in table
    ]
    return (
        json.dumps({"format": FORMAT, "recipe": sweep.recipe, "sweep": sweep.path.name, "rows": rows}, indent=1) + "\n"
    )
