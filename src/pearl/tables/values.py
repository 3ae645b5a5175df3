"""From run directories to the numbers in cells, and to what they say about the paper's claims."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from pearl import metrics, report
from pearl.files import read_json
from pearl.paths import runs_root
from pearl.tables.objects import classes_per_task, implied_rank, parameters
from pearl.tables.spec import OF_LAYERS, OF_TASKS, Claim, Column, Place, Printed, Request, Row, Size, Table

INFERENCE = "inference.json"  # in a run directory: how long an answer takes, see `missing.py`
NOISE = 2.0  # standard errors; a difference below it may be another seed's


@dataclass(frozen=True)
class Missing:
    """A run that a cell waits for."""

    request: Request
    seed: int

    @property
    def path(self) -> Path:
        """Its directory."""
        return runs_root() / self.request.id(self.seed)


@dataclass(frozen=True)
class Cell:
    """What is known of one cell. Values are one per seed; of a figure they are vectors."""

    paper: Printed | None = None
    quoted: str = ""
    values: tuple[Any, ...] = ()
    runs: tuple[Path, ...] = ()
    missing: tuple[Missing, ...] = ()
    counted: bool = False  # exact, from a model object or from settings: no run, no seed
    labels: tuple[str, ...] = ()  # of a vector's entries

    @property
    def n(self) -> int:
        """How many seeds."""
        return len(self.values)

    @property
    def mean(self) -> Any:
        """Over seeds; None without any."""
        return report.spread(self.values)[0]

    @property
    def std(self) -> Any:
        """Over seeds, with n - 1; None for fewer than two."""
        return report.spread(self.values)[1]

    @property
    def sample(self) -> "Sample":
        """Mean, standard deviation and number; what is counted does not vary."""
        return self.mean, 0.0 if self.counted else self.std, self.n


Sample = tuple[float, float | None, int]  # mean, standard deviation (None: not known), over how many


def difference(ours: Sample, other: Sample) -> tuple[float, float | None]:
    """The difference of two means, and the same in standard errors of the difference.

    The standard error is sqrt(s1^2 / n1 + s2^2 / n2); where a side has no standard deviation, that of the other alone,
    which makes it too small. None if neither has one, or if they do not vary.
    """
    variance = sum(std**2 / n for _, std, n in (ours, other) if std is not None)
    apart = float(ours[0] - other[0])
    return apart, apart / math.sqrt(variance) if variance > 0 else None


@dataclass(frozen=True)
class Verdict:
    """Whether a claim holds here."""

    claim: Claim
    holds: str  # yes, no, within noise; or that runs are missing, or that it is not checked
    because: str


@dataclass(frozen=True)
class Filled:
    """A table with what the runs on this machine say."""

    table: Table
    size: Size
    seeds: int
    cells: Mapping[Place, Cell] = field(repr=False)

    @cached_property
    def missing(self) -> list[Missing]:
        """Runs that cells wait for, each once."""
        found = {waiting.path: waiting for cell in self.cells.values() for waiting in cell.missing}
        return [*found.values()]

    @property
    def rows(self) -> list[Row]:
        """Rows that there are at this size."""
        return [row for row in self.table.rows if self.size in row.sizes]

    @property
    def columns(self) -> list[Column]:
        """Columns that there are at this size."""
        return [column for column in self.table.columns if self.size in column.sizes]

    @property
    def runs(self) -> dict[Path, str]:
        """Finished runs that a number came from, and the first cell that used it."""
        found: dict[Path, str] = {}
        for (row, _), cell in self.cells.items():
            for path in cell.runs:
                found.setdefault(path, row)
        return found

    @property
    def ours(self) -> tuple[int, int]:
        """How many cells of ours are complete, and how many there can be."""
        cells = [cell for cell in self.cells.values() if cell.values or cell.missing]
        return sum(not cell.missing for cell in cells), len(cells)

    def difference(self, cell: Cell) -> tuple[float | None, float | None]:
        """Ours less the paper's, and the same in standard errors; None for what cannot be said.

        Other settings than the paper's are not held against its values, only against its claims.
        """
        if self.size != "paper" or cell.paper is None or not cell.values or cell.labels:
            return None, None
        return difference(cell.sample, (cell.paper.mean, cell.paper.std, self.table.paper_runs))

    @property
    def verdicts(self) -> list[Verdict]:
        """What the runs say about each claim."""
        return [verdict(claim, self.cells, self.size) for claim in self.table.claims]


def fill(table: Table, size: Size, seeds: int | None = None, extra: Sequence[str] = ()) -> Filled:
    """Find what runs there are for each cell. `extra` is set in all of them.

    Raises:
        ConfigError: settings that cannot be.
        RunError: a run is damaged.
    """
    count = seeds or table.seeds
    read = _Reader()
    cells: dict[Place, Cell] = {}
    for row, (index, column) in itertools.product(table.rows, enumerate(table.columns)):
        paper = row.paper[index] if row.paper else None
        add = table.added(row, index) if size == "paper" else 0.0
        cells[row.name, column.id] = _cell(table, row, column, paper, add, size, count, tuple(extra), read)
    for row, column in itertools.product(table.rows, table.columns):
        if row.mean_of:
            below = [cells[name, column.id] for name in row.mean_of]
            whole = all(cell.values and not cell.missing for cell in below)
            means = tuple(cell.mean for cell in below) if whole else ()
            own = cells[row.name, column.id]
            cells[row.name, column.id] = Cell(own.paper, own.quoted, means)
    if implied := [column for column in table.columns if column.implied_from]:
        cells |= _implied(table, implied, cells)
    return Filled(table, size, count, cells)


def _cell(
    table: Table,
    row: Row,
    column: Column,
    paper: Printed | None,
    add: float,
    size: Size,
    seeds: int,
    extra: tuple[str, ...],
    read: "_Reader",
) -> Cell:
    known = {"paper": paper, "quoted": row.quoted if paper else ""}
    request = table.request(row, column, size, extra)
    if request is None:
        return Cell(**known)
    if column.metric.startswith("settings."):
        return Cell(**known, values=(_setting(request, column.metric.removeprefix("settings.")),), counted=True)
    if column.metric == "parameters_million" or column.implied_from:
        exact = parameters(Request(request.recipe, (*request.settings, *column.counted, *row.counted), request.smoke))
        if exact is not None:  # then there are no ranks that depend on what is learnt
            return Cell(**known, values=() if column.implied_from else (exact / 1e6 + add,), counted=True)
    values, runs, missing, labels = [], [], [], ()
    for seed in request.seeds(seeds):
        waiting = Missing(request, seed)
        record = read(waiting.path)
        value = None if record is None else measured(record, column.metric)
        if value is None and (record is None or column.metric == "inference_ms"):
            missing.append(waiting)
        elif value is not None:
            if column.vector:
                labels, value = tuple(value), np.array([*value.values()])
            values.append(value + add)
            runs.append(waiting.path)
    return Cell(**known, values=tuple(values), runs=tuple(runs), missing=tuple(missing), labels=labels)


def _implied(table: Table, columns: Sequence[Column], cells: Mapping[Place, Cell]) -> dict[Place, Cell]:
    """The mean rank that a total of the paper implies, where the total depends on ranks."""
    found = {}
    ids = [column.id for column in table.columns]
    for row, column in itertools.product(table.rows, columns):
        index = ids.index(column.implied_from)
        of = table.columns[index]
        total = cells[row.name, of.id].paper
        request = table.request(row, of, "paper")
        if total is not None and request is not None and parameters(request) is None:
            counted = Request(request.recipe, (*request.settings, *of.counted, *row.counted), request.smoke)
            rank = implied_rank(counted, (total.mean - table.added(row, index)) * 1e6)
            own = cells[row.name, column.id]
            found[row.name, column.id] = Cell(
                Printed(f"{rank:.1f}", rank), "", own.values, own.runs, own.missing, own.counted, own.labels
            )
    return found


class _Reader:
    """Records of complete runs, each read once."""

    def __init__(self) -> None:
        self.records: dict[Path, report.Record | None] = {}

    def __call__(self, path: Path) -> report.Record | None:
        if path not in self.records:
            begun = (path / "results.json").is_file()
            record = report.read(path) if begun and read_json(path / "results.json").get("stages") else None
            self.records[path] = record if record and record.complete else None
        return self.records[path]


def measured(record: report.Record, metric: str) -> Any:
    """A metric of a run: a number, or for a figure one by label; None if the run has none."""
    if metric == "inference_ms":
        file = record.path / INFERENCE
        return float(read_json(file)["milliseconds"]) if file.is_file() else None
    if metric == "share.each":
        return dict(zip(_numbers(record.shares), record.shares, strict=True))
    if metric in OF_TASKS:
        counts = record.counts
        if counts is None:
            return None
        scenario: metrics.Scenario = "class_il" if metric.startswith("class_il") else "task_il"
        last = metrics.accuracy_matrix(counts, scenario)[:, -1]
        return dict(zip(_numbers(last), last.tolist(), strict=True))
    if metric in OF_LAYERS:
        layers = record.layers[-1]
        return {name.removesuffix(".weight"): layer[metric.removesuffix(".layers")] for name, layer in layers.items()}
    return record.summary.get(metric)


def _numbers(values: Any) -> list[str]:
    return [str(number) for number in range(1, len(values) + 1)]


def _setting(request: Request, key: str) -> float:
    """A number that a recipe sets."""
    if key == "classes_per_task":
        return float(classes_per_task(request.config)[0])
    return float(report.flat(request.config.model_dump(mode="json"))[key])


# --------------------------------------------------------------------------------------------------------- claims


def verdict(claim: Claim, cells: Mapping[Place, Cell], size: Size) -> Verdict:
    """Whether a claim holds: it does if every part of it does, and is refuted by any that is."""
    if claim.more is None and not claim.spread:
        return Verdict(claim, "not checked", "it compares nothing that a machine could")
    wanted = [place for place in (claim.more, *claim.than, *claim.spread) if place]
    unsupported = [place for place in wanted if not cells[place].values]
    if unsupported:
        return Verdict(claim, "open", f"no run of {' / '.join(unsupported[0])} yet at this size")
    if claim.spread:
        means = [float(cells[place].mean) for place in claim.spread]
        spread = float(np.std(means, ddof=1))
        because = f"standard deviation {spread:.2f} over {len(means)}, against {claim.below:g}"
        return Verdict(claim, "yes" if spread < claim.below else "no", because)
    parts, reasons = [], []
    for other in claim.than:
        a, b = cells[claim.more or other].sample, cells[other].sample
        apart, errors = difference(a, b)
        against = f"{apart:+.2f} against {_label(claim, other)}"
        if a[1] is None or b[1] is None:
            parts.append("within noise")
            reasons.append(f"{against}, and one seed does not tell how much seeds differ")
        elif errors is None:  # neither varies
            parts.append("yes" if apart > 0 else "no")
            reasons.append(against)
        else:
            parts.append("within noise" if abs(errors) < NOISE else "yes" if errors > 0 else "no")
            reasons.append(f"{against} ({errors:+.1f} standard errors)")
    holds = "no" if "no" in parts else "yes" if all(part == "yes" for part in parts) else "within noise"
    return Verdict(claim, holds, "; ".join(reasons))


def _label(claim: Claim, place: Place) -> str:
    return place[0] if claim.more and place[0] != claim.more[0] else place[1]
