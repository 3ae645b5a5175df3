"""A filled table as text, Markdown, HTML, CSV or LaTeX; and the list of all tables.

Each row has up to three lines: what the paper prints or quotes, ours, and the difference of the two in standard errors.
The CSV has a line for each cell instead, with every digit.
"""

import csv
import io
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from pearl import plots, report
from pearl.board import duration
from pearl.config import RunConfig
from pearl.errors import ConfigError, RunError
from pearl.files import read_json, write_file
from pearl.files import seconds as seconds_of
from pearl.tables import spec
from pearl.tables.objects import CPU_CORE, GPU, seconds
from pearl.tables.spec import Column, Row, Size
from pearl.tables.values import Cell, Filled, Missing, fill
from pearl.text import aligned, markdown

Lines = list[list[str]]


def write(filled: Filled, output: Path) -> Path:
    """Write a table in the format that the name of the file ends in, whole or not at all.

    Raises:
        ConfigError: no format has this ending.
        RunError: it cannot be written there.
    """
    check_output(output)
    text = FORMATS[output.suffix.lower()](filled, output.parent)
    write_file(output, text.encode("utf-8", "replace"), mend="choose another place with -o")
    return output


def check_output(output: Path) -> None:
    """See that a file can have a table, before anything is run for it.

    Raises:
        ConfigError: a folder, or no format has this ending.
    """
    if output.is_dir():
        raise ConfigError(f"-o {output}: is a folder; give the file a name in it")
    if output.suffix.lower() not in FORMATS:
        raise ConfigError(f"-o {output}: give it a name that ends in {', '.join(FORMATS)}")


# ----------------------------------------------------------------------------------------------------- what it says


def lines(filled: Filled) -> Lines:
    """The table less its head: name of the row, which line of it this is, a text for each column."""
    found = []
    for row in filled.rows:
        cells = [filled.cells[row.name, column.id] for column in filled.scalars]
        if not cells:
            continue
        paper = [cell.paper.text if cell.paper else "" for cell in cells]
        ours = [_ours(cell, column) for cell, column in zip(cells, filled.scalars, strict=True)]
        apart = [_apart(filled, cell) for cell in cells]
        name = f"{row.name}{_marks(filled, row)}"
        mine: Lines = [["quoted" if row.quoted else "paper", *paper], ["ours", *ours], ["difference", *apart]]
        kept = [line for line in mine if any(line[1:])] or [["ours", *ours]]
        found += [[name if index == 0 else "", *line] for index, line in enumerate(kept)]
    return found


def _head(filled: Filled) -> list[str]:
    """What stands above `lines`, each column by its whole name."""
    return [filled.table.rows_are, "", *(f"{column.title}{_marks(filled, column)}" for column in filled.scalars)]


def _ours(cell: Cell, column: Column) -> str:
    if not cell.values:
        return ""
    if cell.counted:
        return report.shown(float(cell.mean)) if not column.metric.startswith("settings.") else f"{cell.mean:g}"
    spread = "" if cell.std is None else f" ± {cell.std:.2f}"
    wanted = f" of {cell.n + len(cell.missing)}" if cell.missing else ""
    return f"{cell.mean:.2f}{spread} (n={cell.n}{wanted})"


def _apart(filled: Filled, cell: Cell) -> str:
    apart, errors = filled.difference(cell)
    if apart is None:
        return ""
    return f"{apart:+.2f}" if errors is None else f"{apart:+.2f} ({errors:+.1f} se)"


def _marks(filled: Filled, part: Row | Column) -> str:
    numbers = [[*filled.table.notes].index(key) + 1 for key in part.notes]
    return "".join(f" [{number}]" for number in numbers)


def _notes(filled: Filled) -> list[str]:
    used = {key for row in filled.rows for key in row.notes} | {key for c in filled.columns for key in c.notes}
    notes = enumerate(filled.table.notes.items(), start=1)
    sources: dict[str, list[str]] = {}
    for row in filled.rows:
        if row.quoted:
            sources.setdefault(row.quoted, []).append(row.name)
    quoted = [f"quoted from {source}: {', '.join(rows)}" for source, rows in sources.items()]
    damaged = [f"counted as missing: {problem}" for problem in filled.damaged]
    return [f"[{number}] {text}" for number, (key, text) in notes if key in used] + quoted + damaged


def _about(filled: Filled) -> list[str]:
    table, (done, cells) = filled.table, filled.ours
    at = {
        "paper": "the paper's settings",
        "cpu": "settings for CPUs, far smaller than the paper's",
        "smoke": "smoke runs, whose numbers say nothing",
    }
    state = f"Ours: {at[filled.size]}; {done} of {cells} cells complete, {len(filled.missing)} runs missing."
    where = f"{table.where[0].upper()}{table.where[1:]}."
    return [line for line in (where, table.about, state if cells else "") if line]


def _made(filled: Filled) -> list[str]:
    """What runs were made with, a line for those made alike, and how long they took together."""
    alike: dict[str, list[float]] = {}
    for run in filled.runs:
        with suppress(RunError, KeyError):  # a run can be without it, and still has its numbers
            made = read_json(run / "environment.json")
            on = f"{made['device']}, threads: {made['threads']}, {made['precision']}"
            versions = [f"{name} {made['packages'][name]}" for name in ("torch", "torchvision", "timm")]
            commit = f", commit {made['commit'][:10]}" if made["commit"] else ""
            facts = f"{on}; pearl {made['pearl']}{commit}, Python {made['python']}, {', '.join(versions)}"
            alike.setdefault(facts, []).append(seconds_of(run))
    return [f"{len(took)} runs in {duration(sum(took))}: {facts}" for facts, took in alike.items()]


_READING = (
    "Ours: mean ± standard deviation (n - 1) over n seeds; a value without n is exact, from a model object. "
    "Difference: ours less the paper's, and in standard errors, sqrt(s²/n + s²/n) of what has a standard deviation; "
    "at the paper's settings only. An empty cell has no run; what is quoted the paper took from elsewhere."
)


_VERDICT = ["claim", "holds", "because"]


def _verdicts(filled: Filled) -> Lines:
    return [[verdict.claim.text, verdict.holds, verdict.because] for verdict in filled.verdicts]


# ------------------------------------------------------------------------------------------------- text and Markdown


def page(filled: Filled) -> str:
    """The table for a terminal."""
    table = filled.table
    parts = [f"{table.title} ({table.name})", *_about(filled)]
    if body := lines(filled):
        groups = ["", "", *(column.group for column in filled.scalars)]
        head = [table.rows_are, "", *(f"{column.name}{_marks(filled, column)}" for column in filled.scalars)]
        parts += ["", aligned([*([_once(groups)] if any(groups) else []), head, *body])]
    for title, rows in _vectors(filled):
        parts += ["", title, aligned(rows)]
    if verdicts := _verdicts(filled):
        parts += ["", "Does it hold here?", *(f"  {holds}: {text} ({because})" for text, holds, because in verdicts)]
    if notes := _notes(filled):
        parts += ["", *notes]
    if filled.runs:
        parts += ["", "Runs:", *(f"  {path}" for path in filled.runs), *_made(filled)]
    return "\n".join(parts)


def _once(head: list[str]) -> list[str]:
    """A heading that stands above several columns, at the first of them only."""
    return [text if not i or text != head[i - 1] else "" for i, text in enumerate(head)]


def _vectors(filled: Filled) -> list[tuple[str, Lines]]:
    """Of a figure over tasks or layers: for each column its title, and a table with a line per label."""
    found = []
    for column in filled.columns:
        there = [(row.name, filled.cells[row.name, column.id]) for row in filled.rows] if column.vector else []
        there = [(name, cell) for name, cell in there if cell.values]
        if there:
            labels = max((cell.labels for _, cell in there), key=len)
            texts = zip(*(_texts(cell, len(labels)) for _, cell in there), strict=True)
            body = [[label, *line] for label, line in zip(labels, texts, strict=True)]
            found.append((column.title, [["", *(name for name, _ in there)], *body]))
    return found


def _texts(cell: Cell, count: int) -> list[str]:
    spread = cell.std if cell.std is not None else [None] * len(cell.mean)
    texts = [
        f"{mean:.2f}" + ("" if std is None else f" ± {std:.2f}") for mean, std in zip(cell.mean, spread, strict=True)
    ]
    return texts + [""] * (count - len(texts))


def _markdown(filled: Filled, folder: Path) -> str:
    table = filled.table
    parts = [f"# {table.title}", "", " ".join(_about(filled)), ""]
    if body := lines(filled):
        parts += [markdown([_head(filled), *body]), "", _READING, ""]
    for title, rows in _vectors(filled):
        parts += [f"## {title}", "", markdown(rows), ""]
    if verdicts := _verdicts(filled):
        parts += ["## Does it hold here?", "", markdown([_VERDICT, *verdicts]), ""]
    if notes := _notes(filled):
        parts += [f"- {note}" for note in notes] + [""]
    if filled.runs:
        links = [f"- [{path.name}]({_address(path, folder)}): {row}" for path, row in filled.runs.items()]
        parts += ["## Runs", "", *links, "", *(f"- {line}" for line in _made(filled)), ""]
    return "\n".join(parts)


def _address(path: Path, folder: Path) -> str:
    """A run directory as seen from the folder of the page."""
    return Path(os.path.relpath(path.resolve(), folder.resolve())).as_posix()


# ------------------------------------------------------------------------------------------------------------- HTML


def _html(filled: Filled, folder: Path) -> str:
    table = filled.table
    parts = []
    if body := lines(filled):
        note = f"{' '.join(_about(filled)[1:])} {_READING}"
        parts.append(report.Part(table.where, [], [report.Table(table.title, _head(filled), body)], note))
    if figures := _figures(filled):
        note = "" if body else " ".join(_about(filled)[1:])
        parts.append(report.Part("Drawn" if body else table.where, figures, note=note))
    if not parts:
        parts.append(report.Part(table.where, note=" ".join(_about(filled))))
    if verdicts := _verdicts(filled):
        parts.append(report.Part("Does it hold here?", [], [report.Table("Claims", _VERDICT, verdicts)]))
    if notes := _notes(filled):
        parts.append(report.Part("Notes", [], [report.Table("Notes", ["note"], [[note] for note in notes])]))
    if filled.runs:
        links: list[list[report.Cell]] = [
            [report.Link(path.name, _address(path, folder)), row] for path, row in filled.runs.items()
        ]
        made = "; ".join(_made(filled))
        parts.append(report.Part("Runs", [], [report.Table("Runs", ["directory", "used for"], links)], made))
    return report.render(table.title, [report.Chapter(table.title, parts)])


def _figures(filled: Filled) -> list[report.Figure]:
    figures = []
    for index, column in enumerate(filled.columns):
        if not column.vector:
            continue
        name = f"{filled.table.name}-{index}"
        there = {row.name: filled.cells[row.name, column.id] for row in filled.rows}
        there = {row: cell for row, cell in there.items() if cell.values}
        if column.metric in spec.OF_TASKS and there:
            curves = {f"{row} (n={cell.n})": (cell.mean, cell.std) for row, cell in there.items()}
            figures.append(report.curve_figure(column.title, curves, name, column.name, x="task"))
        elif column.metric in spec.OF_LAYERS:
            for row, cell in there.items():
                title = f"{row}, {column.title} (n={cell.n})"
                figures.append(
                    report.bar_figure(
                        title, cell.labels, cell.mean.tolist(), f"{name}-{row.split()[0]}", x=column.name, y="layer"
                    )
                )
    if filled.table.values:
        figures += _over_columns(filled)
    return figures


def _over_columns(filled: Filled) -> list[report.Figure]:
    """A curve of ours per row over the columns."""
    table, columns = filled.table, filled.columns
    curves: dict[str, Any] = {}
    for row in filled.rows:
        cells = [filled.cells[row.name, column.id] for column in columns]
        if all(cell.values and not cell.missing for cell in cells):
            std = None if any(cell.std is None for cell in cells) else np.array([cell.std for cell in cells])
            curves[f"{row.name} (n={min(cell.n for cell in cells)})"] = (np.array([float(c.mean) for c in cells]), std)
    if not curves:
        return []
    numbers = report.Table(
        table.title,
        ["", *(column.name for column in columns)],
        [[label, *mean.tolist()] for label, (mean, _) in curves.items()],
    )
    at = np.array([float(index if column.at is None else column.at) for index, column in enumerate(columns, start=1)])
    series = {label: (at, mean, std) for label, (mean, std) in curves.items()}
    ends = "; ".join(f"{label} from {mean[0]:.4g} to {mean[-1]:.4g}" for label, (mean, _) in curves.items())
    svg = plots.lines(series, name=table.name, alt=f"{table.title}: {ends}.", x=table.over, y=table.values)
    return [report.Figure(Markup(svg), numbers)]


# --------------------------------------------------------------------------------------------------- CSV and LaTeX


def _csv(filled: Filled, folder: Path) -> str:
    file = io.StringIO()
    writer = csv.writer(file)
    head = ["table", "row", "column", "metric", "label", "paper", "paper std", "quoted from", "ours", "ours std", "n"]
    writer.writerow([*head, "difference", "standard errors", "missing", "runs"])
    for row in filled.rows:
        for column in filled.columns:
            cell = filled.cells[row.name, column.id]
            paper = [cell.paper.mean, cell.paper.std] if cell.paper else [None, None]
            apart = filled.difference(cell)
            ends = [*apart, len(cell.missing), " ".join(_address(path, folder) for path in cell.runs)]
            for label, mean, std in _entries(cell):
                start = [filled.table.name, row.name, column.title, column.metric, label]
                writer.writerow([*start, *paper, cell.quoted, mean, std, cell.n, *ends])
    return file.getvalue()


def _entries(cell: Cell) -> list[tuple[Any, Any, Any]]:
    if not cell.labels:
        return [("", cell.mean, cell.std)]
    spread = cell.std if cell.std is not None else [None] * len(cell.labels)
    return [*zip(cell.labels, cell.mean, spread, strict=True)]


def _latex(filled: Filled, folder: Path) -> str:
    table = filled.table
    head, body = _head(filled), lines(filled)
    if not body and (vectors := _vectors(filled)):  # a tabular has one; the CSV and the page have all
        title, (names, *body) = vectors[0]
        head = [title, *names[1:]]
    rows = [" & ".join(map(_tex, row)) + r" \\" for row in (head, *body)]
    claims = [f"{text} {holds}: {because}." for text, holds, because in _verdicts(filled)]
    return "\n".join(
        [
            r"\begin{table}",
            r"\caption{" + _tex(" ".join([table.title + ".", *_about(filled)])) + "}",
            r"\begin{tabular}{" + "l" * len(head) + "}",
            r"\toprule",
            rows[0],
            r"\midrule",
            *rows[1:],
            r"\bottomrule",
            r"\end{tabular}",
            *(_tex(text) + r"\\" for text in [*claims, *_notes(filled)]),
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


# ------------------------------------------------------------------------------------------------------ the list


def listing(size: Size, seeds: int | None = None, extra: Sequence[str] = ()) -> str:
    """All tables: where they stand, what they need, what is done, about how long the rest takes."""
    rows: Lines = [["name", "where", "title", "cells done", "runs missing", "CPU core", "GPU", "needs"]]
    waiting: dict[Path, Missing] = {}
    for name in spec.names():
        filled = fill(spec.read(name), size, seeds, extra)
        waiting |= {missing.path: missing for missing in filled.missing}
        done, cells = filled.ours
        rows.append(
            [
                name,
                filled.table.where,
                filled.table.title,
                f"{done}/{cells}" if cells else "-",
                str(len(filled.missing)),
                *_times(filled.missing),
                _needs(filled),
            ]
        )
    rows.append(["all", "", "", "", str(len(waiting)), *_times([*waiting.values()]), ""])
    counts = f"Size {size}, {seeds} seeds" if seeds else f"Size {size}"
    return f"{counts}. A run that several tables share is run once. Times are rough.\n{aligned(rows)}"


def _times(missing: Sequence[Missing]) -> tuple[str, str]:
    cpu, gpu = (sum(seconds(one.request.config, machine) for one in missing) for machine in (CPU_CORE, GPU))
    return duration(cpu) if cpu else "-", duration(gpu) if gpu else "-"


def _needs(filled: Filled) -> str:
    """Data and networks of its runs."""
    configs: list[RunConfig] = [one.request.config for one in filled.missing]
    parts = [*(config.data["name"] for config in configs), *(config.backbone["name"] for config in configs)]
    return ", ".join(dict.fromkeys(parts)) or ("nothing" if filled.ours[1] or not filled.columns else "")
