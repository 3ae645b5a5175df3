"""The HTML page about runs with hidden task boundaries: accuracy over images seen, its metrics, cost and growth."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from pearl.errors import ReportError, RunError
from pearl.evaluation.online_metrics import Point, class_forgetting, summary
from pearl.reports.html import Cell, Chapter, Figure, PagePart, Table, line_figure, render
from pearl.reports.streams import growth
from pearl.settings.registry import readable
from pearl.storage.run_directory import RunDirectory, find_run

SEEN, ACCURACY = "images seen", "accuracy (%)"
METRICS = {
    "a_auc": "A_auc (%), the mean of the evaluations at the fixed interval",
    "a_last": "A_last (%), the accuracy after the stream",
    "forgetting": "forgetting (points), the mean over classes",
    "seconds_per_image": "learning (s per image), with the training of sub-networks",
    "longest_pause_seconds": "longest pause (s)",
    "passes": "forward passes per prediction",
    "images_bytes": "stored images, with their features (bytes)",
    "statistics_bytes": "other stored numbers (bytes)",
    "sub_networks": "sub-networks",
}


def is_stream(run: str | Path) -> bool:
    """Return True for the directory of a run with hidden boundaries."""
    directory = find_run(run)
    return directory.config_file.is_file() and {"online", "recipe"} <= directory.config.keys()


def page(runs: Sequence[str | Path]) -> str:
    """Return the page as HTML.

    Raises:
        RunError: no evaluation yet, or a damaged state.
        ReportError: among the runs is one of tasks.
    """
    if strange := [str(run) for run in runs if not is_stream(run)]:
        raise ReportError(f"{strange[0]}: not a run of a stream, as others are; make a page of each kind")
    streams = [_read(run) for run in runs]
    chapters = [_about(*each, name=f"run{index}") for index, each in enumerate(streams)]
    if len(streams) > 1:
        curves = {directory.path.name: _line(_points(online)) for directory, online in streams}
        table = Table("Streams side by side", ["run", *METRICS], [_numbers(*each) for each in streams])
        figures = [line_figure("Accuracy over images seen, side by side (%)", curves, "all", x=SEEN, y=ACCURACY)]
        chapters.insert(
            0, Chapter("Side by side", [PagePart("Accuracy over images seen", figures=figures, tables=[table])])
        )
    return render(chapters[0].title if len(streams) == 1 else "Streams side by side", chapters)


def _read(run: str | Path) -> tuple[RunDirectory, dict[str, Any]]:
    directory = RunDirectory(find_run(run).path.resolve())
    online = directory.results.get("online") or directory.online_manifest.get("online") or {}
    if not any(point["regular"] for point in online.get("curve", [])):
        raise RunError(f"{directory.path}: no evaluation at the fixed interval yet; let `pearl run` continue")
    return directory, online


def _points(online: dict[str, Any]) -> list[Point]:
    return [Point.from_json(point) for point in online["curve"]]


def _line(points: Sequence[Point]) -> tuple[list[int], list[float]]:
    return [p.seen for p in points], [p.accuracy for p in points]


def _numbers(directory: RunDirectory, online: dict[str, Any]) -> list[Cell]:
    numbers = summary(online)
    return [directory.path.name, *(numbers.get(key) for key in METRICS)]


def _about(directory: RunDirectory, online: dict[str, Any], *, name: str) -> Chapter:
    points, numbers, config = _points(online), summary(online), directory.config
    values = [[title, numbers.get(key), key] for key, title in METRICS.items() if key in numbers]
    lost = class_forgetting(points)
    by_class = sorted(zip(online["names"], lost, points[-1].accuracies, strict=False), key=_most_forgotten)
    table = Table(
        "Forgetting of each class (points)",
        ["class", "forgetting (points)", "last accuracy (%)"],
        [[label, *map(float, rest)] for label, *rest in by_class],
    )
    curve = _curve(points, readable(config["online"]["learner"]["name"]), name, online["facts"].get("grown_at", []))
    parts = [
        PagePart("Results", tables=[Table(f"Metrics of {directory.path.name}", ["metric", "value", "name"], values)]),
        PagePart(
            "Accuracy over images seen", figures=[curve], note=" ".join(f"{line}." for line in growth(online["facts"]))
        ),
        PagePart("Forgetting", tables=[table], note="Best accuracy at an earlier regular evaluation minus the last."),
        PagePart("Settings", text=yaml.safe_dump(config, sort_keys=False, width=120)),
    ]
    unfinished = "" if "online" in directory.results else "Unfinished: the same `pearl run` resumes it."
    return Chapter(directory.path.name, parts, unfinished)


def _most_forgotten(row: tuple[Any, ...]) -> float:
    return -float(np.nan_to_num(row[1], nan=-np.inf))


def _curve(points: Sequence[Point], label: str, name: str, grown: Sequence[int]) -> Figure:
    """Draw accuracy over images seen; the table also has the classes and sub-networks at each evaluation."""
    title = "Accuracy over images seen (%)"
    drawn = line_figure(title, {label: _line(points)}, f"{name}-stream", x=SEEN, y=ACCURACY)
    rows = [[p.seen, len(p.total), p.accuracy, sum(at <= p.seen for at in grown)] for p in points]
    return replace(drawn, table=Table(title, [SEEN, "classes", ACCURACY, "sub-networks"], rows))
