"""Which method? Writes `pearl list methods --long` and docs/which_method.md from the rows of docs/results.

python benchmarks/which_method.py
"""

import json
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import pages as pages_of_results
from pages import RESULTS
from pearl.reports.measured import COLUMNS, FILE, cells, old_data
from pearl.settings.config import read_recipe
from pearl.settings.parts import METHODS
from real_images import RECIPES

ROOT = Path(__file__).parents[1]
PAGE, DATA = ROOT / "docs" / "which_method.md", ROOT / "src" / "pearl" / "reports" / FILE
START, END = "<!-- measured: written by benchmarks/which_method.py -->\n", "<!-- end of measured -->"


def measured(recipe: str) -> dict[str, dict[str, float | None]]:
    """Return each method with the recipe's own settings, best first: means over seeds, None if a row has none."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for row in json.loads((RESULTS / f"{recipe}.json").read_text(encoding="utf-8")):
        # others are variants of one; PEARL with class statistics is the default
        if row["method"] in METHODS.builtin or row["method"] == "pearl, statistics":
            rows.setdefault(row["method"], []).append(row)
    results = {method: {key: _mean([row.get(key) for row in of]) for key in COLUMNS} for method, of in rows.items()}
    return dict(sorted(results.items(), key=lambda item: -(item[1]["class_il.final"] or 0)))


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(mean(known), 4) if len(known) == len(values) else None


def table(recipe: str, methods: dict[str, dict[str, float | None]]) -> Iterator[str]:
    """Return a recipe's table, a line per method."""
    yield from (f"### {recipe}", "", read_recipe(recipe)["about"], "")
    head = ["method", *COLUMNS.values(), "old data"]
    rows = []
    for method, values in methods.items():
        name, comma, form = method.partition(",")
        rows.append([f"`{name}`{comma}{form}", *cells(values), old_data(METHODS.load(name))])
    yield from pages_of_results.table(head, rows)
    yield ""


def pages() -> Iterator[tuple[Path, str]]:
    """Write the installed file, and the page with the tables between their marks."""
    results = {recipe: measured(recipe) for recipe in RECIPES}
    yield DATA, json.dumps(results, indent=1) + "\n"
    lines = [line for recipe, methods in results.items() for line in table(recipe, methods)]
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(START)
    yield PAGE, before + START + "\n".join(["", *lines]) + END + rest.partition(END)[2]


if __name__ == "__main__":
    for file, text in pages():
        file.write_text(text, encoding="utf-8")
