"""CSV that spreadsheets, terminals and readers of lines take for what it is: names may be anything."""

import csv
import io
import re
from collections.abc import Iterable
from typing import Any

from pearl.errors import printable


def cell(value: Any) -> Any:
    """A value as a cell: of a text, what cannot be printed is escaped, and a formula gets an apostrophe before it."""
    if not isinstance(value, str):
        return value
    text = printable(value)
    return f"'{text}" if re.match(r"\s*[=+\-@＝＋－＠]|[\t\r\n]", value) else text


def rows_as_csv(rows: Iterable[Iterable[Any]], *, end: str = "\r\n") -> str:
    """Rows of values, each on a line of its own."""
    file = io.StringIO()
    csv.writer(file, lineterminator=end).writerows([cell(value) for value in row] for row in rows)
    return file.getvalue()
