"""Tables as CSV, text and HTML that are safe for spreadsheets, terminals and pages: names may be anything."""

import csv
import io
import re
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from pearl.errors import printable


def cell(value: Any) -> Any:
    """Return a value as a cell: in texts, unprintable characters are escaped, and formulas get an apostrophe."""
    if not isinstance(value, str):
        return value
    text = printable(value)
    return f"'{text}" if re.match(r"\s*[=+\-@＝＋－＠]|[\t\r\n]", value) else text


def rows_as_csv(rows: Iterable[Iterable[Any]], *, end: str = "\r\n") -> str:
    """Return rows of values as CSV, one per line."""
    file = io.StringIO()
    csv.writer(file, lineterminator=end).writerows([cell(value) for value in row] for row in rows)
    return file.getvalue()


def aligned(rows: Sequence[Sequence[str]], *, numbers: bool = False) -> str:
    """Return a table of texts for a terminal; with `numbers`, all columns but the first are right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = ["<", *(">" if numbers else "<" for _ in widths[1:])]
    lines = (
        "  ".join(f"{text:{side}{width}}" for text, side, width in zip(row, sides, widths, strict=True)) for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)


def rows_as_html(rows: Sequence[Sequence[str]]) -> str:
    """Return a table for a notebook; the first row is its header."""

    def line(row: Sequence[str], tag: str) -> str:
        return f"<tr>{''.join(f'<{tag}>{escape(text)}</{tag}>' for text in row)}</tr>"

    body = "".join(line(row, "td") for row in rows[1:])
    return f"<table><thead>{line(rows[0], 'th')}</thead><tbody>{body}</tbody></table>"


def rows_as_markdown(rows: Sequence[Sequence[str]]) -> str:
    """Return a table of texts in Markdown; the first row is its head."""
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    head, *body = (f"| {' | '.join(row)} |" for row in escaped)
    return "\n".join([head, f"|{' --- |' * len(rows[0])}", *body])


def mean_and_std(mean: float | None, std: float | None) -> str:
    """Return a mean with its standard deviation, as `51.97 ± 0.93`; either may be unknown."""
    if mean is None:
        return "-"
    return f"{mean:.2f}" if std is None else f"{mean:.2f} ± {std:.2f}"
