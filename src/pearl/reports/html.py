"""Parts of a page: chapters of headings, figures and tables, and their conversion to HTML.

A figure and its table always have the same numbers.
"""

import base64
import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup

from pearl.errors import counted
from pearl.reports import plots
from pearl.storage.tabular import rows_as_csv
from pearl.version import __version__


@dataclass(frozen=True)
class Link:
    """A cell with a link."""

    text: str
    address: str


Cell = str | int | float | Link | None


@dataclass(frozen=True)
class Table:
    """Numbers with a title; rounded on the page, with all digits in the CSV."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]

    @property
    def file(self) -> str:
        """Return the file name of the CSV."""
        return f"{re.sub(r'[^a-z0-9]+', '-', self.title.lower()).strip('-')}.csv"

    @property
    def csv(self) -> str:
        """Return the table as CSV; NaN is an empty cell."""
        return rows_as_csv([[_csv_cell(cell) for cell in row] for row in [self.columns, *self.rows]])

    @property
    def link(self) -> str:
        """Return the CSV as a data URL, so that downloading it needs neither script nor network."""
        return f"data:text/csv;charset=utf-8;base64,{base64.b64encode(self.csv.encode('utf-8', 'replace')).decode()}"


@dataclass(frozen=True)
class Figure:
    """A drawing and its table, with the same title."""

    svg: Markup
    table: Table


@dataclass(frozen=True)
class Picture:
    """A small JPEG image with a caption."""

    jpeg: bytes
    alt: str
    words: Sequence[str]

    @property
    def link(self) -> str:
        """Return the image as a data URL."""
        return f"data:image/jpeg;base64,{base64.b64encode(self.jpeg).decode()}"


@dataclass(frozen=True)
class PagePart:
    """A heading of the page with its contents."""

    title: str
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()
    note: str = ""
    text: str = ""
    pictures: Sequence[Picture] = ()


@dataclass(frozen=True)
class Chapter:
    """A run, a model, or a comparison."""

    title: str
    parts: Sequence[PagePart]
    unfinished: str = ""


def render(title: str, chapters: Sequence[Chapter]) -> str:
    """Return chapters as a self-contained HTML page."""
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined)
    environment.filters["shown"] = shown
    template = environment.from_string(
        (resources.files("pearl.reports.templates") / "report.html.jinja").read_text("utf-8")
    )
    return template.render(title=title, chapters=chapters, version=__version__)


def heat_map(title: str, values: Any, *, rows: Sequence[str], columns: Sequence[str], **axes: Any) -> Figure:
    """Draw values (rows, columns) as colours; `axes` are those of `plots.heat_map`."""
    table = Table(
        title,
        [axes["y"], *(f"{axes['x']} {column}" for column in columns)],
        [[row, *cells] for row, cells in zip(rows, values.tolist(), strict=True)],
    )
    alt = f"{title}: heat map of {counted(len(rows), 'row')} ({axes['y']}) by {counted(len(columns), 'column')} "
    alt += f"({axes['x']}), from {np.nanmin(values):.4g} to {np.nanmax(values):.4g}."
    return Figure(Markup(plots.heat_map(values, alt=alt, rows=rows, columns=columns, **axes)), table)


def curve_figure(title: str, curves: Mapping[str, Any], name: str, y: str, x: str = "after task") -> Figure:
    """Draw a curve per label over the tasks: its values, or their mean and standard deviation."""
    pairs = {label: curve if isinstance(curve, tuple) else (curve, None) for label, curve in curves.items()}
    longest = max(len(mean) for mean, _ in pairs.values())
    columns: dict[str, list[Cell]] = {x: [*range(1, longest + 1)]}
    for label, (mean, std) in pairs.items():
        columns[label] = mean.tolist()
        if std is not None:
            columns[f"{label}: std"] = std.tolist()
    ends = "; ".join(f"{label} from {mean[0]:.4g} to {mean[-1]:.4g}" for label, (mean, _) in pairs.items())
    series = {label: (np.arange(1.0, len(mean) + 1), mean, std) for label, (mean, std) in pairs.items()}
    svg = plots.lines(series, name=name, alt=f"{title}: {ends}.", x=x, y=y)
    return Figure(Markup(svg), Table(title, [*columns], list(itertools.zip_longest(*columns.values()))))


def line_figure(
    title: str, series: Mapping[str, tuple[Sequence[float], Sequence[float]]], name: str, *, x: str, y: str
) -> Figure:
    """Draw a line per label over any x; the table has a row per point."""
    rows: list[list[Cell]] = []
    for label, (at, values) in series.items():
        rows += [[label, *point] for point in zip(at, values, strict=True)]
    spans = "; ".join(f"{label} from {values[0]:.4g} to {values[-1]:.4g}" for label, (_, values) in series.items())
    drawn = {label: (np.array(at, dtype=float), np.array(values), None) for label, (at, values) in series.items()}
    svg = plots.lines(drawn, name=name, alt=f"{title}: {spans}.", x=x, y=y)
    return Figure(Markup(svg), Table(title, ["line", x, y], rows))


def bar_figure(
    title: str,
    labels: Sequence[str],
    values: Sequence[float],
    name: str,
    *,
    x: str,
    y: str,
    beside: Mapping[str, Sequence[Cell]] | None = None,
) -> Figure:
    """Draw a bar per label; `beside` adds columns to the table only."""
    beside = beside or {}
    table = Table(title, [y, x, *beside], list(zip(labels, values, *beside.values(), strict=True)))
    alt = f"{title}: {len(labels)} bars from {min(values, default=0):.4g} to {max(values, default=0):.4g}."
    return Figure(Markup(plots.bars(labels, np.array(values, dtype=float), name=name, alt=alt, x=x, y=y)), table)


def shown(cell: Cell) -> str:
    """Return a cell as shown on the page."""
    if cell is None or (isinstance(cell, float) and math.isnan(cell)):
        return "–"
    if isinstance(cell, Link):
        return Markup('<a href="{}">{}</a>').format(cell.address, cell.text)
    if isinstance(cell, bool | str):
        return str(cell)
    if isinstance(cell, int):
        return f"{cell:,}"
    return f"{cell:.2f}" if abs(cell) >= 1 or cell == 0 else f"{cell:.3g}"


def _csv_cell(cell: Cell) -> Cell:
    """Return a cell as a value: NaN becomes empty, a link its address."""
    if isinstance(cell, float) and math.isnan(cell):
        return None
    if isinstance(cell, Link):
        return cell.address
    return cell


def plain(value: Any) -> Cell:
    """Return a setting as a cell."""
    return value if isinstance(value, str | int | float) or value is None else json.dumps(value)
