"""Measurements of each method on the CPU-sized recipes; benchmarks/which_method.py writes the file beside this."""

import json
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

FILE = "measured.json"
COLUMNS = {
    "class_il.final": "class-IL (%)",
    "task_il.final": "task-IL (%)",
    "training_seconds": "training (s)",
    "memory_mb": "memory (MB)",
    "parameters_million": "parameters (M)",
    "inference_cost": "passes per image",
}
_PLACES = {"training_seconds": 0, "memory_mb": 0}  # printed digits; one for the others
HOW = (
    "Measured on recipes for CPUs, mostly with one seed: accuracy after the last task, mean over tasks; training "
    "on one thread with other load, an upper bound; peak memory of three steps per phase in float32, without "
    "libraries; "
    "parameters stored; forward passes of the network per image."
)


def old_data(method: Any) -> str:
    """Return what a method needs of earlier tasks' data."""
    return "data of all tasks" if method.oracle else "a memory of old images" if method.rehearsal else "no old data"


@cache
def _read() -> dict[str, dict[str, dict[str, float | None]]]:
    return json.loads((resources.files("pearl.reports") / FILE).read_text(encoding="utf-8"))


def cells(values: Mapping[str, float | None]) -> list[str]:
    """Return the columns as printed."""
    return [
        "-" if values[key] is None else f"{values[key]:.{_PLACES.get(key, 1)}f}"  # unknown values are left out
        for key in COLUMNS
    ]


def lines_of(method: str) -> list[str]:
    """Return the measurements of a method, a line per recipe; empty if there are none."""
    rows_of = {
        f"{recipe}{row.removeprefix(method)}": cells(values)
        for recipe, methods in _read().items()
        for row, values in methods.items()
        if row.partition(",")[0] == method  # its own row, and that of a variant
    }
    titles = COLUMNS.values()
    return [f"{recipe}: {', '.join(map(' '.join, zip(titles, row, strict=True)))}" for recipe, row in rows_of.items()]
