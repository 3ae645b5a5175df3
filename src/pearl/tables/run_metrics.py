"""Metrics of finished runs, with and without task boundaries."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pearl.evaluation import metrics, online_metrics
from pearl.reports.records import Record, read
from pearl.storage.files import read_json
from pearl.storage.run_directory import RunDirectory
from pearl.tables.spec import OF_LAYERS, OF_STREAMS, OF_TASKS


@dataclass(frozen=True)
class StreamRecord:
    """The metrics of a finished run without task boundaries."""

    path: Path
    summary: Mapping[str, float]


def complete_run(path: Path) -> Record | StreamRecord | None:
    """Return a run if it is complete.

    Raises:
        RunError: it is damaged.
    """
    results = RunDirectory(path).results
    if "online" in results:
        return StreamRecord(path, online_metrics.summary(results["online"]))
    record = read(path) if results["stages"] else None
    return record if record and record.complete else None


def measured(record: Record | StreamRecord, metric: str) -> Any:
    """Return a metric of a run: a number, or numbers by label for a figure; None if the run has none."""
    if isinstance(record, StreamRecord):
        key, unit = OF_STREAMS.get(metric, (metric, 1.0))
        value = record.summary.get(key, math.nan) / unit
        return None if math.isnan(value) else value
    metric = "class_il.final" if metric == "online.a_last" else metric
    if metric == "inference_ms":
        file = RunDirectory(record.path).inference_file
        return float(read_json(file)["milliseconds"]) if file.is_file() else None
    if metric.startswith("seconds."):
        phase = metric.removeprefix("seconds.")
        took = [task.seconds[phase] for task in record.learnt if phase in task.seconds]
        return float(np.mean(took)) if took else None
    if metric == "share.each":
        return dict(zip(_numbers(record.shares), record.shares, strict=True))
    if metric in OF_TASKS:
        counts = record.counts
        if counts is None:
            return None
        scenario: metrics.Scenario = "class_il" if metric.startswith("class_il") else "task_il"
        last = metrics.accuracy_matrix(counts, scenario)[:, -1]
        return dict(zip(_numbers(last), last.tolist(), strict=True))
    if metric in OF_LAYERS:
        layers = record.layers[-1]
        return {name.removesuffix(".weight"): layer[metric.removesuffix(".layers")] for name, layer in layers.items()}
    return record.summary.get(metric)


def _numbers(values: Any) -> list[str]:
    return [str(number) for number in range(1, len(values) + 1)]
