"""The definition of a table: a file in this folder, read and checked; and the run of each cell.

A run is found by its configuration: a cell's recipe and settings determine the run directory of each seed, so that no
list of runs is needed.
"""

import re
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import resources
from string import Template
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from pearl.errors import ConfigError
from pearl.settings.config import RunConfig, load_config
from pearl.settings.registry import nearest, problems_of
from pearl.yaml_io import parse_yaml

Size = Literal["smoke", "cpu", "schedule", "paper"]
SIZES: tuple[Size, ...] = get_args(Size)

# The smaller recipe of each network; its stream has as many tasks as the paper's.
SMALL = {"resnet18": "table-resnet18", "bsc": "table-bsc", "vit": "table-deit_tiny"}
AS_LONG = {"resnet18": "schedule-resnet18", "bsc": "schedule-bsc", "vit": "schedule-deit_tiny"}

# Metrics in addition to those of `metrics.summary` are mean_rank, inference_ms, settings.KEY, seconds.PHASE (a mean
# over tasks), and these of figures, one number per task or layer, which `values.py` reads from the files of a run.
OF_TASKS = ("class_il.each", "task_il.each", "share.each")
OF_LAYERS = ("threshold.layers", "rank.layers", "full_rank.layers")

# Of runs without task boundaries: a key of `online_metrics.summary`, and the unit in which it is shown. A run with
# tasks has the accuracy at the end as well.
OF_STREAMS = {
    "online.a_auc": ("a_auc", 1.0),
    "online.a_last": ("a_last", 1.0),
    "online.forgetting": ("forgetting", 1.0),
    "online.milliseconds": ("seconds_per_image", 1e-3),
    "online.pause": ("longest_pause_seconds", 1.0),
    "online.passes": ("passes", 1.0),
    "online.images_mb": ("images_bytes", 1e6),
    "online.statistics_mb": ("statistics_bytes", 1e6),
    "online.sub_networks": ("sub_networks", 1.0),
}


@dataclass(frozen=True)
class Printed:
    """A number as printed in a paper."""

    text: str
    mean: float
    std: float | None = None

    @classmethod
    def read(cls, cell: Any) -> "Printed | None":
        """Parse `51.97 ± 0.93` or `51.97`; None for `-`, where the paper has no value."""
        if cell is None or cell == "-":
            return None
        match = re.fullmatch(r"([\d,]+(?:\.\d+)?)(?: ± (\d+(?:\.\d+)?))?", str(cell))
        if match is None:
            raise ValueError(f"{cell!r} is not a value of a paper; write 51.97, '51.97 ± 0.93' or '-'")
        mean, std = match.groups()
        return cls(str(cell), float(mean.replace(",", "")), None if std is None else float(std))


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)


def _cells(cells: Any) -> list[Printed | None]:
    """Parse the paper's values in a row, such as `51.97 ± 0.93 | - | 41.11`."""
    return [Printed.read(cell.strip()) for cell in str(cells).split("|")] if cells else []


Cells = Annotated[list[Printed | None], BeforeValidator(_cells)]
Notes = Annotated[list[str], BeforeValidator(lambda keys: [keys] if isinstance(keys, str) else keys)]
Settings = Annotated[list[str], AfterValidator(lambda items: [str(item) for item in items])]


class _Line(_Section):
    """Common fields of rows and columns."""

    given: dict[str, str] = {}  # replacements of $word in recipes and settings, for this row or column
    recipe: str = ""  # a row's precedes a column's, a column's the table's
    counted: Settings = []  # set as well if parameters are counted without a run
    notes: Notes = []
    sizes: list[Size] = [*SIZES]  # sizes to leave out, if runs would take too long or be meaningless

    def is_at(self, size: Size) -> bool:
        """Return True if there are runs of it at a size."""
        return size in self.sizes


class Row(_Line):
    """A line of the table: a method or variant. Without `set` there are no runs of it."""

    name: str
    set: Settings | None = None  # settings of its runs, as on the command line; [] for the recipe's
    paper: Cells = []
    statistics: bool = False  # adds a second row: the same sub-networks with class statistics
    quoted: str = ""  # source of values that the paper quotes
    mean_of: list[str] = []  # instead of runs: the mean over these rows
    add: list[float] = []  # a number per column to add to our values, for what only the paper counts

    def told_apart(self) -> "Row":
        """Return the same row with class statistics, which the paper does not have."""
        settings = [*(self.set or []), "method.classifier={name: statistics, train: all}"]
        return self.model_copy(update={"name": f"{self.name}, class statistics", "set": settings, "paper": []})


class Column(_Line):
    """A column: a metric and its data."""

    id: str
    name: str
    group: str = ""  # heading over several columns
    set: Settings = []
    metric: str
    implied_from: str = ""  # the paper's mean rank, implied by its total of parameters in that column
    add: float = 0.0  # added to all values of the column
    at: float | None = None  # figures over columns: position on the axis

    @property
    def title(self) -> str:
        """Return group and name."""
        return f"{self.group}: {self.name}" if self.group else self.name

    @property
    def vector(self) -> bool:
        """Return True if it has a number per task or layer."""
        return self.metric in {*OF_TASKS, *OF_LAYERS}


CellKey = tuple[str, str]  # the row's name and the column's id


class Claim(_Section):
    """A claim of the paper about the table, in checkable form if possible.

    A cell has `more` or `less` than all others; vectors are compared by mean, or by unevenness: the standard deviation
    over layers or tasks divided by the mean. Cells have a `spread` (standard deviation) `below` some number of points.
    A vector `rises` if the mean of its later half is above that of its earlier half, and `peaks` if the mean of its
    middle third is above those of the two others.
    """

    text: str
    more: CellKey | None = None
    less: CellKey | None = None
    than: list[CellKey] = []
    measure: Literal["mean", "unevenness"] = "mean"
    spread: list[CellKey] = []
    below: float = 1.0
    rises: CellKey | None = None
    peaks: CellKey | None = None

    @model_validator(mode="after")
    def _is_whole(self) -> "Claim":
        kinds = [kind for kind in (self.more, self.less, self.spread, self.rises, self.peaks) if kind]
        if len(kinds) != 1 or bool(self.more or self.less) != bool(self.than):
            raise ValueError(
                f"claim {self.text!r}: give one of `more`, `less` (each with `than`), `spread`, `rises` and `peaks`"
            )
        return self

    @property
    def cell_keys(self) -> list[CellKey]:
        """Return all cells that it compares."""
        return [key for key in (self.more, self.less, *self.than, *self.spread, self.rises, self.peaks) if key]


class PaperTable(_Section):
    """A table or figure of the paper, or an additional one."""

    name: str
    title: str
    kind: Literal["table", "figure"] = "table"
    where: str  # "Table 4", or "beyond the paper"
    label: str = ""  # name of the LaTeX environment with the values
    about: str = ""
    paper_runs: Annotated[int, Field(ge=1)] = 3  # number of seeds of the paper's means and standard deviations
    seeds: Annotated[int, Field(ge=1)] = 3  # our default number of seeds
    rows_are: str = ""
    recipe: str = ""
    values: str = ""  # figures over columns: label of the values, with unit ...
    over: str = ""  # ... and of the axis
    columns: list[Column] = []
    rows: list[Row] = []
    claims: list[Claim] = []
    notes: dict[str, str] = {}

    @model_validator(mode="after")
    def _has_second_rows(self) -> "PaperTable":
        self.rows = [one for row in self.rows for one in ([row, row.told_apart()] if row.statistics else [row])]
        return self

    @model_validator(mode="after")
    def _fits_together(self) -> "PaperTable":
        columns, rows = [column.id for column in self.columns], [row.name for row in self.rows]
        for names in (columns, rows):
            twice = [name for name in names if names.count(name) > 1]
            if twice:
                raise ValueError(f"{twice[0]} is repeated; give each its own name")
        for row in self.rows:
            for values, of in ((row.paper, "of the paper"), (row.add, "to add")):
                if values and len(values) != len(columns):
                    raise ValueError(f"row {row.name}: {len(values)} values {of} for {len(columns)} columns")
        named = [one for claim in self.claims for one in claim.cell_keys]
        lost = [one for one in named if one[0] not in rows or one[1] not in columns]
        lost += [(name, row.name) for row in self.rows for name in row.mean_of if name not in rows]
        if lost:
            raise ValueError(f"there is no cell {lost[0]}; give a row's name and a column's id")
        parts: list[_Line] = [*self.rows, *self.columns]
        used = {key for part in parts for key in part.notes}
        if used != set(self.notes):
            raise ValueError(f"notes {sorted(used ^ set(self.notes))} are only used or only written; do both")
        return self

    def added(self, row: Row, index: int) -> float:
        """Return what only the paper counts in a cell, at its own settings."""
        return self.columns[index].add + (row.add[index] if row.add else 0.0)

    def request(self, row: Row, column: Column, size: Size, extra: tuple[str, ...] = ()) -> "Request | None":
        """Return the run of a cell, or None."""
        if row.set is None or not row.is_at(size) or not column.is_at(size):
            return None
        words = {**column.given, **row.given}
        recipe, *settings = (
            Template(text).substitute(words)
            for text in (row.recipe or column.recipe or self.recipe, *column.set, *row.set)
        )
        small = sized(recipe, size)
        return small and Request(small[0], (*small[1], *settings, *extra), size == "smoke")


@dataclass(frozen=True)
class Request:
    """A run without its seed."""

    recipe: str
    settings: tuple[str, ...]
    smoke: bool

    @cached_property
    def config(self) -> RunConfig:
        """Return the configuration, with seed 0 if the settings have none.

        Raises:
            ConfigError: lists every problem.
        """
        return _config(self)

    def seeds(self, count: int) -> list[int]:
        """Return the seeds to run: that of the settings, or the first `count`."""
        given = any(item.startswith("seed=") for item in self.settings)
        return [self.config.seed] if given else [*range(count)]

    def overrides(self, seed: int) -> tuple[str, ...]:
        """Return the overrides of `pearl run RECIPE` for one seed."""
        return (*(item for item in self.settings if not item.startswith("seed=")), f"seed={seed}")

    def id(self, seed: int) -> str:
        """Return the name of the run directory of one seed."""
        return self.config.model_copy(update={"seed": seed}).id


@cache
def _config(request: Request) -> RunConfig:
    return load_config(request.recipe, request.settings, smoke=request.smoke)


def sized(recipe: str, size: Size) -> tuple[str, list[str]] | None:
    """Return a recipe at a size, and its additional settings; None if there is none.

    Small ones use CIFAR-100 in as many tasks as the paper: TinyImageNet has no small recipe, and CIFAR-100 replaces it
    in smoke runs, whose results are meaningless.
    """
    match = re.fullmatch(r"(cifar100|tinyimagenet|imagenet_r)-(\d+)t-(\w+)", recipe)
    if size == "paper" or match is None:
        return recipe, []
    data, tasks, net = match.groups()
    if size in ("cpu", "schedule") and data == "tinyimagenet":
        return None
    return (AS_LONG if size == "schedule" else SMALL)[net], [f"stream.tasks={tasks}"]


def as_size(text: str) -> Size:
    """Return a size by name.

    Raises:
        ConfigError: unknown size.
    """
    for size in SIZES:
        if text == size:
            return size
    raise ConfigError(f"unknown size {text!r}; {nearest(text, SIZES)}")


def names() -> list[str]:
    """Return the names of all tables, the paper's first, in its order."""
    return [table.name for table in sorted(map(read, _files()), key=lambda table: _order(table.where))]


def read(name: str) -> PaperTable:
    """Read a table by name.

    Raises:
        ConfigError: unknown table, or an invalid file.
    """
    known = _files()
    if name not in known:
        raise ConfigError(f"unknown table {name!r}; {nearest(name, known)} (`pearl table list`)")
    text = (resources.files("pearl.tables") / f"{name}.yaml").read_text(encoding="utf-8")
    try:
        raw = parse_yaml(text)
        return PaperTable.model_validate({"name": name, **raw})
    except (ConfigError, TypeError) as error:
        raise ConfigError(f"table {name}: {' '.join(str(error).split())}") from None
    except ValidationError as error:
        raise ConfigError(*problems_of(error, f"table {name}", lambda path: None)) from None


@cache
def _files() -> tuple[str, ...]:
    folder = resources.files("pearl.tables")
    return tuple(sorted(file.name.removesuffix(".yaml") for file in folder.iterdir() if file.name.endswith(".yaml")))


def _order(where: str) -> tuple[int, int]:
    """Sort tables, figures, and additional ones; by number."""
    kind, _, number = where.partition(" ")
    return ("Table", "Figure").index(kind) if kind in {"Table", "Figure"} else 2, int(
        number
    ) if number.isdecimal() else 0
