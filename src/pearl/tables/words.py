"""Texts of a filled table: lines of cells, notes, verdicts, settings of its runs.

Each row has up to three lines: what the paper prints or quotes, ours, and the difference of the two in standard errors.
"""

from contextlib import suppress

from pearl.errors import RunError, counted
from pearl.reports.html import shown
from pearl.reports.text import duration
from pearl.storage.durations import reused_seconds, total_seconds
from pearl.storage.run_directory import RunDirectory
from pearl.storage.tabular import mean_and_std
from pearl.tables.spec import Column, Row
from pearl.tables.values import Cell, Filled

Lines = list[list[str]]


def lines(filled: Filled) -> Lines:
    """Return the table without its header: row name, kind of line, a text per column."""
    out = []
    for row in filled.rows:
        cells = [filled.cells[row.name, column.id] for column in filled.scalars]
        if not cells:
            continue
        paper = [cell.paper.text if cell.paper else "" for cell in cells]
        ours = [_ours(cell, column) for cell, column in zip(cells, filled.scalars, strict=True)]
        apart = [_apart(filled, cell) for cell in cells]
        name = f"{row.name}{marks(filled, row)}"
        mine: Lines = [["quoted" if row.quoted else "paper", *paper], ["ours", *ours], ["difference", *apart]]
        kept = [line for line in mine if any(line[1:])] or [["ours", *ours]]
        out += [[name if index == 0 else "", *line] for index, line in enumerate(kept)]
    return out


def head(filled: Filled) -> list[str]:
    """Return the header of `lines`, with the full name of each column."""
    return [filled.table.rows_are, "", *(f"{column.title}{marks(filled, column)}" for column in filled.scalars)]


def _ours(cell: Cell, column: Column) -> str:
    if not cell.values:
        return ""
    if cell.counted:
        return shown(float(cell.mean)) if not column.metric.startswith("settings.") else f"{cell.mean:g}"
    wanted = f" of {cell.n + len(cell.missing)}" if cell.missing else ""
    return f"{mean_and_std(cell.mean, cell.std)} (n={cell.n}{wanted})"


def _apart(filled: Filled, cell: Cell) -> str:
    apart, errors = filled.difference(cell)
    if apart is None:
        return ""
    return f"{apart:+.2f}" if errors is None else f"{apart:+.2f} ({errors:+.1f} se)"


def marks(filled: Filled, part: Row | Column) -> str:
    """Return the numbers of the notes of a row or column."""
    numbers = [[*filled.table.notes].index(key) + 1 for key in part.notes]
    return "".join(f" [{number}]" for number in numbers)


def notes(filled: Filled) -> list[str]:
    """Return the text below the table: its notes, sources of quoted values, damaged runs."""
    used = {key for row in filled.rows for key in row.notes} | {key for c in filled.columns for key in c.notes}
    numbered = enumerate(filled.table.notes.items(), start=1)
    sources: dict[str, list[str]] = {}
    for row in filled.rows:
        if row.quoted:
            sources.setdefault(row.quoted, []).append(row.name)
    quoted = [f"quoted from {source}: {', '.join(rows)}" for source, rows in sources.items()]
    damaged = [f"counted as missing: {problem}" for problem in filled.damaged]
    return [f"[{number}] {text}" for number, (key, text) in numbered if key in used] + quoted + damaged


def about(filled: Filled) -> list[str]:
    """Return the table's place in the paper, its subject, and how much of ours is complete."""
    table, (done, cells) = filled.table, filled.ours
    at = {
        "paper": "the paper's settings",
        "schedule": "the paper's epochs, batch sizes and rates, on smaller networks and CIFAR-100",
        "cpu": "settings for CPUs, far smaller than the paper's",
        "smoke": "smoke runs, whose numbers are meaningless",
    }
    state = f"Ours: {at[filled.size]}; {done} of {cells} cells complete, {counted(len(filled.missing), 'run')} missing."
    where = f"{table.where[0].upper()}{table.where[1:]}."
    return [line for line in (where, table.about, state if cells else "", _recipes(filled)) if line]


def _recipes(filled: Filled) -> str:
    """Return the recipes used instead of the paper's, by column if they differ."""
    columns: dict[str, list[str]] = {}
    for column in filled.columns if filled.size != "paper" else ():
        title = column.group or column.name
        for row in filled.rows:
            request = filled.table.request(row, column, filled.size)
            if request and title not in columns.setdefault(request.recipe, []):
                columns[request.recipe].append(title)
    titles = [title for each in columns.values() for title in each]
    if len(columns) > 1 and len({*titles}) == len(titles):
        return " ".join(f"{', '.join(each)}: runs of {recipe}." for recipe, each in columns.items())
    return f"All are runs of {', '.join(columns)}." if columns else ""


def made(filled: Filled) -> list[str]:
    """Return the environment of runs, a line per group, and their total time."""
    alike: dict[str, list[tuple[float, float]]] = {}
    for run in filled.runs:
        with suppress(RunError, KeyError):  # missing in some runs, which still have their numbers
            directory = RunDirectory(run)
            made = directory.environment
            on = f"{made['device']}, threads: {made['threads']}, {made['precision']}"
            versions = [f"{name} {made['packages'][name]}" for name in ("torch", "torchvision", "timm")]
            commit = f", commit {made['commit'][:10]}" if made["commit"] else ""
            facts = f"{on}; pearl {made['pearl']}{commit}, Python {made['python']}, {', '.join(versions)}"
            alike.setdefault(facts, []).append((total_seconds(directory), reused_seconds(directory)))
    lines = []
    for facts, took in alike.items():
        every, reused = (sum(each) for each in zip(*took, strict=True))
        shared = f", {duration(reused)} of it in phases that several of these runs share" if reused else ""
        lines.append(f"{counted(len(took), 'run')} in {duration(every)}{shared}: {facts}")
    return lines


READING = (
    "Ours: mean ± standard deviation (n - 1) over n seeds; a value without n is exact, from a model object. "
    "Difference: ours minus the paper's, and in standard errors, sqrt(s²/n + s²/n) of values with a standard "
    "deviation; at the paper's settings only. An empty cell has no run; quoted values are from other papers."
)
VERDICT = ["claim", "holds", "because"]


def verdicts(filled: Filled) -> Lines:
    """Return the claims, their verdicts and reasons, with the header `VERDICT`."""
    return [[verdict.claim.text, verdict.holds, verdict.because] for verdict in filled.verdicts]


def vectors(filled: Filled) -> list[tuple[str, Lines]]:
    """Return, for figures over tasks or layers, the title of each column, and a table with a line per label."""
    tables = []
    for column in filled.columns:
        there = [(row.name, filled.cells[row.name, column.id]) for row in filled.rows] if column.vector else []
        there = [(name, cell) for name, cell in there if cell.values]
        if there:
            labels = max((cell.labels for _, cell in there), key=len)
            texts = zip(*(_texts(cell, len(labels)) for _, cell in there), strict=True)
            body = [[label, *line] for label, line in zip(labels, texts, strict=True)]
            tables.append((column.title, [["", *(name for name, _ in there)], *body]))
    return tables


def _texts(cell: Cell, count: int) -> list[str]:
    spread = cell.std if cell.std is not None else [None] * len(cell.mean)
    texts = [mean_and_std(mean, std) for mean, std in zip(cell.mean, spread, strict=True)]
    return texts + [""] * (count - len(texts))
