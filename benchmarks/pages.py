"""Output of results: a cell over seeds, a table, and a page whose text is kept when its figures change."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean, stdev

RESULTS = Path(__file__).parents[1] / "docs" / "results"
MARK = "\n<!-- words -->\n"  # text below it is written by hand


def cell(values: Iterable[float | None], digits: int, *, spread: bool = True) -> str:
    """Return mean ± sample standard deviation of the values; a single value without."""
    there = [value for value in values if value is not None]  # a method without ranks, or a row older than its column
    if not there:
        return "-"
    around = f" ± {stdev(there):.{digits}f}" if spread and len(there) > 1 else ""
    return f"{fmean(there):.{digits}f}{around}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table."""
    return [f"| {' | '.join(head)} |", "|" + "---|" * len(head), *(f"| {' | '.join(row)} |" for row in rows)]


def write_page(file: Path, lines: Iterable[str]) -> None:
    """Write a page of these lines; its hand-written text is kept."""
    words = file.read_text(encoding="utf-8").partition(MARK)[2] if file.is_file() else ""
    file.write_text("\n".join(lines) + "\n" + (MARK + words if words else ""), encoding="utf-8")
