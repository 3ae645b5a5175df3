"""A filled table as text, Markdown, HTML, CSV or LaTeX. The CSV has a line per cell, with all digits."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from pearl.reports import plots
from pearl.reports.html import Chapter, Figure, Link, PagePart, Table, bar_figure, curve_figure, render
from pearl.storage.files import check_output, write_output
from pearl.storage.tabular import aligned, rows_as_csv, rows_as_markdown
from pearl.tables import spec, words
from pearl.tables.values import Cell, Filled


def write(filled: Filled, output: Path) -> Path:
    """Write a table atomically, in the format of the file's suffix.

    Raises:
        ConfigError: unknown suffix.
        RunError: it cannot be written.
    """
    check_output(output, [*FORMATS], "table")
    text = FORMATS[output.suffix.lower()](filled, output.parent)
    write_output(output, text)
    return output


def page(filled: Filled) -> str:
    """Return the table for a terminal."""
    table = filled.table
    parts = [f"{table.title} ({table.name})", *words.about(filled)]
    if body := words.lines(filled):
        groups = ["", "", *(column.group for column in filled.scalars)]
        head = [table.rows_are, "", *(f"{column.name}{words.marks(filled, column)}" for column in filled.scalars)]
        parts += ["", aligned([*([_once(groups)] if any(groups) else []), head, *body])]
    for title, rows in words.vectors(filled):
        parts += ["", title, aligned(rows)]
    if verdicts := words.verdicts(filled):
        parts += ["", "Does it hold here?", *(f"  {holds}: {text} ({because})" for text, holds, because in verdicts)]
    if notes := words.notes(filled):
        parts += ["", *notes]
    if filled.runs:
        parts += ["", "Runs:", *(f"  {path}" for path in filled.runs), *words.made(filled)]
    return "\n".join(parts)


def _once(head: list[str]) -> list[str]:
    """Return a heading over several columns at the first of them only."""
    return [text if not i or text != head[i - 1] else "" for i, text in enumerate(head)]


def _markdown(filled: Filled, folder: Path) -> str:
    table = filled.table
    parts = [f"# {table.title}", "", " ".join(words.about(filled)), ""]
    if body := words.lines(filled):
        parts += [rows_as_markdown([words.head(filled), *body]), "", words.READING, ""]
    for title, rows in words.vectors(filled):
        parts += [f"## {title}", "", rows_as_markdown(rows), ""]
    if verdicts := words.verdicts(filled):
        parts += ["## Does it hold here?", "", rows_as_markdown([words.VERDICT, *verdicts]), ""]
    if notes := words.notes(filled):
        parts += [f"- {note}" for note in notes] + [""]
    if filled.runs:
        links = [f"- {_named(path, folder)}: {row}" for path, row in filled.runs.items()]
        parts += ["## Runs", "", *links, "", *(f"- {line}" for line in words.made(filled)), ""]
    return "\n".join(parts)


def _address(path: Path, folder: Path) -> str:
    """Return a run directory relative to the folder of the page."""
    return Path(os.path.relpath(path.resolve(), folder.resolve())).as_posix()


def _goes_along(path: Path, folder: Path) -> bool:
    """Return True if a run is below its page, so that a relative link remains valid; other runs are named only."""
    return path.resolve().is_relative_to(folder.resolve())


def _named(path: Path, folder: Path) -> str:
    return f"[{path.name}]({_address(path, folder)})" if _goes_along(path, folder) else path.name


def _html(filled: Filled, folder: Path) -> str:
    table = filled.table
    parts = []
    if body := words.lines(filled):
        note = f"{' '.join(words.about(filled)[1:])} {words.READING}"
        parts.append(PagePart(table.where, [], [Table(table.title, words.head(filled), body)], note))
    if figures := _figures(filled):
        note = "" if body else " ".join(words.about(filled)[1:])
        parts.append(PagePart("Drawn" if body else table.where, figures, note=note))
    if not parts:
        parts.append(PagePart(table.where, note=" ".join(words.about(filled))))
    if verdicts := words.verdicts(filled):
        parts.append(PagePart("Does it hold here?", [], [Table("Claims", words.VERDICT, verdicts)]))
    if notes := words.notes(filled):
        parts.append(PagePart("Notes", [], [Table("Notes", ["note"], [[note] for note in notes])]))
    if filled.runs:
        links: list[list[str | Link]] = [
            [Link(path.name, _address(path, folder)) if _goes_along(path, folder) else path.name, row]
            for path, row in filled.runs.items()
        ]
        made = "; ".join(words.made(filled))
        parts.append(PagePart("Runs", [], [Table("Runs", ["directory", "used for"], links)], made))
    return render(table.title, [Chapter(table.title, parts)])


def _figures(filled: Filled) -> list[Figure]:
    figures = []
    for index, column in enumerate(filled.columns):
        if not column.vector:
            continue
        name = f"{filled.table.name}-{index}"
        there = {row.name: filled.cells[row.name, column.id] for row in filled.rows}
        there = {row: cell for row, cell in there.items() if cell.values}
        if column.metric in spec.OF_TASKS and there:
            curves = {f"{row} (n={cell.n})": (cell.mean, cell.std) for row, cell in there.items()}
            figures.append(curve_figure(column.title, curves, name, column.name, x="task"))
        elif column.metric in spec.OF_LAYERS:
            for row, cell in there.items():
                title = f"{row}, {column.title} (n={cell.n})"
                figures.append(
                    bar_figure(
                        title, cell.labels, cell.mean.tolist(), f"{name}-{row.split()[0]}", x=column.name, y="layer"
                    )
                )
    if filled.table.values:
        figures += _over_columns(filled)
    return figures


def _over_columns(filled: Filled) -> list[Figure]:
    """Draw a curve per row of our values over the columns."""
    table, columns = filled.table, filled.columns
    curves: dict[str, Any] = {}
    for row in filled.rows:
        cells = [filled.cells[row.name, column.id] for column in columns]
        if all(cell.values and not cell.missing for cell in cells):
            std = None if any(cell.std is None for cell in cells) else np.array([cell.std for cell in cells])
            curves[f"{row.name} (n={min(cell.n for cell in cells)})"] = (np.array([float(c.mean) for c in cells]), std)
    if not curves:
        return []
    numbers = Table(
        table.title,
        ["", *(column.name for column in columns)],
        [[label, *mean.tolist()] for label, (mean, _) in curves.items()],
    )
    at = np.array([float(index if column.at is None else column.at) for index, column in enumerate(columns, start=1)])
    series = {label: (at, mean, std) for label, (mean, std) in curves.items()}
    ends = "; ".join(f"{label} from {mean[0]:.4g} to {mean[-1]:.4g}" for label, (mean, _) in curves.items())
    svg = plots.lines(series, name=table.name, alt=f"{table.title}: {ends}.", x=table.over, y=table.values)
    return [Figure(Markup(svg), numbers)]


def _csv(filled: Filled, folder: Path) -> str:
    head = ["table", "row", "column", "metric", "label", "paper", "paper std", "quoted from", "ours", "ours std", "n"]
    lines: list[list[Any]] = [[*head, "difference", "standard errors", "missing", "runs"]]
    for row in filled.rows:
        for column in filled.columns:
            cell = filled.cells[row.name, column.id]
            paper = [cell.paper.mean, cell.paper.std] if cell.paper else [None, None]
            apart = filled.difference(cell)
            ends = [*apart, len(cell.missing), " ".join(_address(path, folder) for path in cell.runs)]
            for label, mean, std in _entries(cell):
                start = [filled.table.name, row.name, column.title, column.metric, label]
                lines.append([*start, *paper, cell.quoted, mean, std, cell.n, *ends])
    return rows_as_csv(lines)


def _entries(cell: Cell) -> list[tuple[Any, Any, Any]]:
    if not cell.labels:
        return [("", cell.mean, cell.std)]
    spread = cell.std if cell.std is not None else [None] * len(cell.labels)
    return [*zip(cell.labels, cell.mean, spread, strict=True)]


def _latex(filled: Filled, folder: Path) -> str:
    table = filled.table
    head, body = words.head(filled), words.lines(filled)
    if not body and (vectors := words.vectors(filled)):  # a tabular has one; the CSV and the page have all
        title, (names, *body) = vectors[0]
        head = [title, *names[1:]]
    rows = [" & ".join(map(_tex, row)) + r" \\" for row in (head, *body)]
    claims = [f"{text} {holds}: {because}." for text, holds, because in words.verdicts(filled)]
    return "\n".join(
        [
            r"\begin{table}",
            r"\caption{" + _tex(" ".join([table.title + ".", *words.about(filled)])) + "}",
            r"\begin{tabular}{" + "l" * len(head) + "}",
            r"\toprule",
            rows[0],
            r"\midrule",
            *rows[1:],
            r"\bottomrule",
            r"\end{tabular}",
            *(_tex(text) + r"\\" for text in [*claims, *words.notes(filled)]),
            r"\end{table}",
            *(f"% run: {_address(path, folder)}" for path in filled.runs),
            "",
        ]
    )


_TEX = {
    "\\": r"\textbackslash{}",
    "±": r"$\pm$",
    "Ā": r"$\bar{A}$",
    "²": "$^2$",
    "~": r"\textasciitilde{}",
    "^": r"\^{}",
}
_TEX |= {letter: f"\\{letter}" for letter in "&%$#_{}"}


def _tex(text: str) -> str:
    return "".join(_TEX.get(letter, letter) for letter in text)


FORMATS: dict[str, Callable[[Filled, Path], str]] = {".md": _markdown, ".html": _html, ".csv": _csv, ".tex": _latex}
