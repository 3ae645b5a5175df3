"""From run directories to the numbers in cells, and to verdicts on the paper's claims."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from pearl.errors import RunError
from pearl.reports.compared import spread
from pearl.reports.records import Record, flat
from pearl.storage.paths import runs_root
from pearl.tables.model_values import classes_per_task, implied_rank, parameters
from pearl.tables.run_metrics import StreamRecord, complete_run, measured
from pearl.tables.spec import CellKey, Claim, Column, PaperTable, Printed, Request, Row, Size

LEVEL = 0.05  # significance level of claims


@dataclass(frozen=True)
class Missing:
    """A missing run of a cell."""

    request: Request
    seed: int

    @property
    def path(self) -> Path:
        """Return its directory."""
        return runs_root() / self.request.id(self.seed)


@dataclass(frozen=True)
class Cell:
    """The values of one cell, one per seed; in a figure they are vectors."""

    paper: Printed | None = None
    quoted: str = ""
    values: tuple[Any, ...] = ()
    runs: tuple[Path, ...] = ()
    missing: tuple[Missing, ...] = ()
    counted: bool = False  # exact, from a model object or settings: without runs and seeds
    labels: tuple[str, ...] = ()  # labels of a vector's entries

    @property
    def n(self) -> int:
        """Return the number of seeds."""
        return len(self.values)

    @property
    def mean(self) -> Any:
        """Return the mean over seeds; None without any."""
        return spread(self.values)[0]

    @property
    def std(self) -> Any:
        """Return the standard deviation over seeds (n - 1); None for fewer than two."""
        return spread(self.values)[1]

    @property
    def sample(self) -> "Sample":
        """Return mean, standard deviation and number; counted values do not vary."""
        return self.mean, 0.0 if self.counted else self.std, self.n


Sample = tuple[float, float | None, int]  # mean, standard deviation (None: unknown), number of seeds


def difference(ours: Sample, other: Sample) -> tuple[float, float | None]:
    """Return the difference of two means, and the same in standard errors of the difference.

    The standard error is sqrt(s1^2 / n1 + s2^2 / n2); without a standard deviation on one side, it is that of the
    other, and so too small. None if neither has one, or if they do not vary.
    """
    variance = sum(std**2 / n for _, std, n in (ours, other) if std is not None)
    apart = float(ours[0] - other[0])
    return apart, apart / math.sqrt(variance) if variance > 0 else None


@dataclass(frozen=True)
class Verdict:
    """The verdict on a claim."""

    claim: Claim
    holds: str  # yes, no, within noise; open: runs are missing; not here: there are none at this size
    because: str


@dataclass(frozen=True)
class Filled:
    """A table with the values of the runs on this machine."""

    table: PaperTable
    size: Size
    seeds: int
    cells: Mapping[CellKey, Cell] = field(repr=False)
    damaged: tuple[str, ...] = ()  # problems of unreadable runs

    @cached_property
    def missing(self) -> list[Missing]:
        """Return the missing runs of cells, each once."""
        waiting_at = {waiting.path: waiting for cell in self.cells.values() for waiting in cell.missing}
        return [*waiting_at.values()]

    @property
    def rows(self) -> list[Row]:
        """Return the rows at this size."""
        return [row for row in self.table.rows if row.is_at(self.size)]

    @property
    def columns(self) -> list[Column]:
        """Return the columns at this size."""
        return [column for column in self.table.columns if column.is_at(self.size)]

    @property
    def scalars(self) -> list[Column]:
        """Return the columns at this size with one number per cell."""
        return [column for column in self.columns if not column.vector]

    @property
    def runs(self) -> dict[Path, str]:
        """Return the finished runs of all numbers, with the first cell that used each."""
        row_of: dict[Path, str] = {}
        for (row, _), cell in self.cells.items():
            for path in cell.runs:
                row_of.setdefault(path, row)
        return row_of

    @property
    def ours(self) -> tuple[int, int]:
        """Return how many of our cells are complete, and how many there can be."""
        cells = [cell for cell in self.cells.values() if cell.values or cell.missing]
        return sum(not cell.missing for cell in cells), len(cells)

    def difference(self, cell: Cell) -> tuple[float | None, float | None]:
        """Return ours minus the paper's, and the same in standard errors; None if undefined.

        Runs at other settings than the paper's are compared with its claims, not with its values.
        """
        if self.size != "paper" or cell.paper is None or not cell.values or cell.labels:
            return None, None
        return difference(cell.sample, (cell.paper.mean, cell.paper.std, self.table.paper_runs))

    @property
    def verdicts(self) -> list[Verdict]:
        """Return the verdicts of the runs on all claims."""
        titles = {column.id: column.title for column in self.table.columns}
        return [verdict(claim, self.cells, titles) for claim in self.table.claims]


def fill(table: PaperTable, size: Size, seeds: int | None = None, extra: Sequence[str] = ()) -> Filled:
    """Collect the existing runs of each cell. `extra` is set in all of them. A damaged run counts as missing.

    Raises:
        ConfigError: invalid settings.
    """
    filling = _Filling(table, size, seeds or table.seeds, tuple(extra))
    cells: dict[CellKey, Cell] = {}
    for row, (index, column) in itertools.product(table.rows, enumerate(table.columns)):
        cells[row.name, column.id] = filling.cell(row, index)
    for row, column in itertools.product(table.rows, table.columns):
        if row.mean_of:
            below = [cells[name, column.id] for name in row.mean_of]
            whole = all(cell.values and not cell.missing for cell in below)
            means = tuple(cell.mean for cell in below) if whole else ()
            cells[row.name, column.id] = replace(cells[row.name, column.id], values=means)
    return Filled(table, size, filling.seeds, cells, tuple(filling.damaged))


class _Filling:
    """Cells from runs; each run is read once."""

    def __init__(self, table: PaperTable, size: Size, seeds: int, extra: tuple[str, ...]) -> None:
        self.table, self.size, self.seeds, self.extra = table, size, seeds, extra
        self.records: dict[Path, Record | StreamRecord | None] = {}
        self.damaged: list[str] = []

    def cell(self, row: Row, index: int) -> Cell:
        """Return the cell of a row in a column."""
        column = self.table.columns[index]
        paper = row.paper[index] if row.paper else None
        blank = Cell(self.implied(row, column) or paper, row.quoted if paper else "")
        add = self.table.added(row, index) if self.size == "paper" else 0.0
        request = self.table.request(row, column, self.size, self.extra)
        if request is None:
            return blank
        if column.metric.startswith("settings."):
            value = _setting(request, column.metric.removeprefix("settings."))
            return replace(blank, values=(value,), counted=True)
        if column.metric == "parameters_million" or column.implied_from:
            exact = parameters(_as_counted(request, row, column))
            if exact is not None:  # then no ranks depend on training
                return blank if column.implied_from else replace(blank, values=(exact / 1e6 + add,), counted=True)
        return self.measure(blank, request, column, add)

    def measure(self, blank: Cell, request: Request, column: Column, add: float) -> Cell:
        """Return the value of a cell from its runs."""
        values: list[Any] = []
        runs: list[Path] = []
        missing: list[Missing] = []
        labels: tuple[str, ...] = ()
        for seed in request.seeds(self.seeds):
            waiting = Missing(request, seed)
            record = self.record(waiting.path)
            value = None if record is None else measured(record, column.metric)
            if value is None and (record is None or column.metric == "inference_ms"):
                missing.append(waiting)
            elif value is not None:
                if column.vector:
                    labels, value = tuple(value), np.array([*value.values()])
                values.append(value + add)
                runs.append(waiting.path)
        return replace(blank, values=tuple(values), runs=tuple(runs), missing=tuple(missing), labels=labels)

    def implied(self, row: Row, column: Column) -> Printed | None:
        """Return the mean rank implied by a total of the paper, if the total depends on ranks."""
        index = next((i for i, one in enumerate(self.table.columns) if one.id == column.implied_from), None)
        if index is None or not row.paper:
            return None
        total, of = row.paper[index], self.table.columns[index]
        request = self.table.request(row, of, "paper")
        if total is None or request is None or parameters(request) is not None:
            return None
        rank = implied_rank(_as_counted(request, row, of), (total.mean - self.table.added(row, index)) * 1e6)
        return Printed(f"{rank:.1f}", rank)

    def record(self, path: Path) -> Record | StreamRecord | None:
        """Return a run if it is complete."""
        if path not in self.records:
            self.records[path] = None
            try:
                self.records[path] = complete_run(path)
            except RunError as error:
                self.damaged.append(str(error))
        return self.records[path]


def _as_counted(request: Request, row: Row, column: Column) -> Request:
    return Request(request.recipe, (*request.settings, *column.counted, *row.counted), request.smoke)


def _setting(request: Request, key: str) -> float:
    """Return a number of a recipe's settings."""
    if key == "classes_per_task":
        return float(classes_per_task(request.config)[0])
    return float(flat(request.config.model_dump(mode="json"))[key])


# --------------------------------------------------------------------------------------------------------- claims


def verdict(claim: Claim, cells: Mapping[CellKey, Cell], titles: Mapping[str, str]) -> Verdict:
    """Return the verdict on a claim: `yes`, `no`, or `within noise` if other seeds might give another result.

    Means are compared by Welch's t-test. A claim of several comparisons holds if each of them does, and is refuted by
    any, at a level divided by their number; it may therefore be refuted while runs are missing. Rows without runs at
    this size are left out. `titles` are the columns' titles by id.
    """
    missing = [key for key in claim.cell_keys if cells[key].missing]
    absent = [key for key in claim.cell_keys if not cells[key].missing and not cells[key].values]
    rivals = [key for key in claim.than if key not in (*missing, *absent)]
    needed = [key for key in claim.cell_keys if key not in claim.than]
    if key := next((key for key in needed if key in missing), None):
        return Verdict(claim, "open", f"runs of {key[0]}, {titles[key[1]]} are missing")
    if key := next((key for key in needed if key in absent), None):
        return Verdict(claim, "not here", f"no run of {key[0]}, {titles[key[1]]} at this size")
    if claim.than and not rivals:
        row, column = (missing or absent)[0]
        told = f"runs of {row}, {titles[column]} are missing" if missing else f"no run of {row} at this size"
        return Verdict(claim, "open" if missing else "not here", told)
    if claim.spread:
        return _spread(claim, [cells[key] for key in claim.spread])
    sign = -1 if claim.less else 1
    because, holds = _compared(_comparisons(claim, rivals, cells, titles), len(rivals) + len(missing), sign)
    for keys, what in ((missing, "runs are missing"), (absent, "no run at this size")):
        if keys:
            because.append(f"{what}: {', '.join(dict.fromkeys(row for row, _ in keys))}")
    return Verdict(claim, "open" if missing and holds != "no" else holds, "; ".join(because))


def _comparisons(
    claim: Claim, rivals: Sequence[CellKey], cells: Mapping[CellKey, Cell], titles: Mapping[str, str]
) -> list[tuple[str, Sample, Sample]]:
    """Return the comparisons of a claim, each with its name and two samples."""
    if claim.rises or claim.peaks:
        key, parts = next(filter(None, (claim.rises, claim.peaks))), 2 if claim.rises else 3
        means = np.array([[part.mean() for part in np.array_split(vector, parts)] for vector in cells[key].values])
        names = ["the earlier half"] if claim.rises else ["the first third", "the last third"]
        others = means[:, [0]] if claim.rises else means[:, [0, 2]]
        apart = means[:, [1]] - others
        return [(name, Cell(values=tuple(apart[:, i])).sample, (0.0, 0.0, 1)) for i, name in enumerate(names)]
    key = next(filter(None, (claim.more, claim.less)))

    def sample(at: CellKey) -> Sample:
        return _measured(cells[at], claim.measure).sample

    return [(titles[other[1]] if other[0] == key[0] else other[0], sample(key), sample(other)) for other in rivals]


def _measured(cell: Cell, measure: str) -> Cell:
    """Return a cell of numbers; for vectors, of their means or their unevenness."""
    if not cell.labels:
        return cell
    vectors = [np.asarray(vector, float) for vector in cell.values]
    uneven = measure == "unevenness"
    return Cell(values=tuple(float(vector.std() / vector.mean() if uneven else vector.mean()) for vector in vectors))


def _compared(comparisons: Sequence[tuple[str, Sample, Sample]], of: int, sign: int) -> tuple[list[str], str]:
    """Return the differences of comparisons in words, and the verdict, at a level divided by their number.

    It holds if all differences have this sign.
    """
    because = []
    parts: list[tuple[float, float | None]] = []
    for name, a, b in comparisons:
        apart, p = a[0] - b[0], chance(a, b)
        parts.append((sign * apart, p))
        reason = ", and one seed does not show how much seeds differ" if p is None else f" (p = {p:.2g})" if p else ""
        because.append(f"{apart:+.2f} against {name}{reason}")
    if all(apart > 0 and p is not None and p < LEVEL for apart, p in parts):
        return because, "yes"
    refuted = any(apart <= 0 and p is not None and p < LEVEL / max(of, len(parts)) for apart, p in parts)
    return because, "no" if refuted else "within noise"


def chance(a: Sample, b: Sample) -> float | None:
    """Return p of Welch's t-test, two-sided: the probability that seeds alone set two means as far apart.

    0 if neither varies; None if one of them has a single seed.
    """
    if a[1] is None or b[1] is None:
        return None
    parts = [(std**2 / n, n - 1) for _, std, n in (a, b) if std]
    if not parts:
        return 0.0
    variance = sum(part for part, _ in parts)
    freedom = variance**2 / sum(part**2 / free for part, free in parts)
    return float(2 * stats.t.sf(abs(a[0] - b[0]) / math.sqrt(variance), freedom))


def _spread(claim: Claim, cells: Sequence[Cell]) -> Verdict:
    """Return the verdict that means differ by less than a standard deviation, given the variance due to their seeds.

    At exactly that deviation, the variance of the means over its expected value has an F distribution; its degrees of
    freedom are the number of means minus one, and those of the seeds' part (Satterthwaite).
    """
    spread, free = float(np.std([cell.mean for cell in cells], ddof=1)), len(cells) - 1
    because = f"standard deviation {spread:.2f} over {len(cells)}, against {claim.below:g}"
    samples = [(std**2 / n, n - 1) for _, std, n in (cell.sample for cell in cells) if std is not None]
    if len(samples) < len(cells):
        return Verdict(claim, "within noise", f"{because}; one seed each does not show how much of it is due to seeds")
    seeds = math.sqrt(sum(part for part, _ in samples) / len(samples))
    expected = claim.below**2 + seeds**2
    known = expected**2 * sum(n for _, n in samples) / seeds**4 if seeds else 1e9
    share = stats.f.cdf(spread**2 / expected, free, known)
    holds = "yes" if share < LEVEL / 2 else "no" if share > 1 - LEVEL / 2 else "within noise"
    return Verdict(claim, holds, f"{because}; seeds alone give {seeds:.2f}")
