"""An HTML page about runs and models: results, costs, settings."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from markupsafe import Markup

from pearl.errors import counted
from pearl.evaluation import metrics
from pearl.reports import plots
from pearl.reports.compared import MODEL_NOTE, SHARE_NOTE, compare
from pearl.reports.html import (
    Cell,
    Chapter,
    Figure,
    PagePart,
    Table,
    bar_figure,
    curve_figure,
    heat_map,
    plain,
    render,
)
from pearl.reports.records import SCENARIOS, Record, flat, metric_title, percent, read_all
from pearl.reports.stream_page import is_stream
from pearl.reports.stream_page import page as stream_page
from pearl.reports.text import HEADLINES
from pearl.storage.files import HTML, check_output, write_output
from pearl.storage.run_directory import find_run


def write(runs: Sequence[str | Path], output: Path | None = None) -> Path:
    """Write the page about these runs and models atomically; return its path.

    By default it is in the run's directory, or for several runs in the current one.

    Raises:
        RunError: a directory is unreadable, or has no results yet.
        ReportError: the page cannot be written there, or two runs are the same.
    """
    if output is not None:
        check_output(output, HTML, "page")
    if any(map(is_stream, runs)):
        made = stream_page(runs)
        output = output or (find_run(runs[0]).path / "report.html" if len(runs) == 1 else Path("report.html"))
        write_output(output, made)
        return output
    records = read_all(runs)
    if output is None:
        output = records[0].path / "report.html" if len(records) == 1 else Path("report.html")
    write_output(output, page(records))
    return output


def page(records: Sequence[Record]) -> str:
    """Return the page as HTML."""
    chapters = [about_run(record, f"run{index}") for index, record in enumerate(records)]
    if len(records) > 1:
        chapters.insert(0, compare(records))
    title = records[0].title if len(records) == 1 else f"{_runs_and_models(records)} side by side"
    return render(title, chapters)


def _runs_and_models(records: Sequence[Record]) -> str:
    runs = sum(record.counts is not None for record in records)
    counts = {"run": runs, "model": len(records) - runs}
    return " and ".join(counted(number, what) for what, number in counts.items() if number)


def about_run(record: Record, name: str) -> Chapter:
    """Return the chapter on one run or model; `name` makes its figures' ids unique."""
    counts = record.counts
    parts = [
        PagePart("Results", tables=[_metrics(record)], note="Accuracies are in percent." if counts else MODEL_NOTE),
        PagePart("Tasks", tables=[_tasks(record)]),
        *([PagePart("Accuracy", figures=_accuracy(record, counts, name))] if counts else []),
        *([PagePart("Confusion between tasks", figures=[_confusion(record, counts, name)])] if counts else []),
        *([PagePart("Rank allocation", figures=_ranks(record, name), note=_RANK_NOTE)] if any(record.layers) else []),
        PagePart("Parameters", figures=_parameters(record, name), note=_parameters_note(record)),
        *([PagePart("Loss", figures=_losses(record, name))] if record.epochs else []),
        PagePart("Settings", tables=_training(record), text=_yaml(record.config)),
        PagePart("Environment", tables=[Table(f"Environment of {record.name}", ["what", "value"], _facts(record))]),
    ]
    unfinished = ""
    if not record.complete:
        unfinished = f"{record.state}: the same `pearl run` resumes it. The following is its state so far.".capitalize()
    elif record.pending:
        unfinished = "One more task was cut off: `pearl resume` continues it."
    return Chapter(record.title, parts, unfinished)


_RANK_NOTE = (
    "Every layer's rank depends on how far it moved: the threshold is the share of the update's energy "
    "that the rank must keep. Layers are in the network's order."
)


def _parameters_note(record: Record) -> str:
    notes = [SHARE_NOTE, "Bytes are of the tensors that a task changed or added: the first task stores all of them."]
    if record.isolation is None:
        notes.append(
            "Complete isolation is left out: some tasks were learnt by an earlier version of pearl that did not "
            "record it."
        )
    return " ".join(notes)


def _metrics(record: Record) -> Table:
    fitting = record.config["method"]["name"] == "pearl" and not record.config.get("smoke")
    expected = (record.config.get("expected") if fitting else None) or {}
    columns = ["metric", "value", "name", *(["paper", "paper std", "where"] if expected else [])]
    rows: list[list[Cell]] = []
    for key, value in record.summary.items():
        figure = expected.get(key, {})
        beside = [figure.get("mean"), figure.get("std"), figure.get("where")] if expected else []
        rows.append([metric_title(key), value, key, *beside])
    headlines = [*HEADLINES, "mean_rank"]
    rows.sort(key=lambda row: headlines.index(row[2]) if row[2] in headlines else len(headlines))
    return Table(f"Metrics of {record.name}", columns, rows)


def _tasks(record: Record) -> Table:
    columns: dict[str, Sequence[Cell]] = {
        "task": range(1, len(record.tasks) + 1),
        "name": record.tasks,
        "images": [task.images for task in record.learnt],
    }
    if record.counts:
        columns["test images"] = record.counts.by_task(record.counts.stages[-1].total).tolist()
    columns["parameters added"] = record.added
    columns["bytes stored"] = [task.bytes for task in record.learnt]
    columns["classes"] = [", ".join(classes) for classes in record.classes]
    if any(task.reused for task in record.learnt):
        columns["trained by another run"] = [
            ", ".join(f"{phase} ({task.seconds.get(phase, 0):.1f} s)" for phase in task.reused)
            for task in record.learnt
        ]
    return Table(f"Tasks of {record.name}", [*columns], list(itertools.zip_longest(*columns.values())))


def _accuracy(record: Record, counts: metrics.Counts, name: str) -> list[Figure]:
    stages = [str(t + 1) for t in range(len(record.tasks))]
    figures, curves = [], {}
    for scenario, title in SCENARIOS.items():
        A = metrics.accuracy_matrix(counts, scenario)
        curves[title] = metrics.stage_accuracy(A)
        figures.append(
            heat_map(
                f"{title} accuracy of each task after each task (%)",
                A,
                name=f"{name}-{scenario}",
                rows=record.tasks,
                columns=stages,
                x="after task",
                y="accuracy on",
                unit="accuracy (%)",
                top=100,
            )
        )
    return [*figures, curve_figure("Mean accuracy over the tasks seen (%)", curves, f"{name}-stages", "accuracy (%)")]


def _confusion(record: Record, counts: metrics.Counts, name: str) -> Figure:
    confusion = counts.stages[-1].confusion
    return heat_map(
        "Task of the predicted class after the last task (% of images)",
        100 * confusion / confusion.sum(axis=1, keepdims=True),
        name=f"{name}-confusion",
        rows=record.tasks,
        columns=[str(t + 1) for t in range(len(record.tasks))],
        x="predicted task",
        y="true task",
        unit="images (%)",
        top=100,
    )


def _ranks(record: Record, name: str) -> list[Figure]:
    """Return the three panels of the paper's figure on rank allocation, for every task: threshold, rank, full rank."""
    adapted = [t for t, layers in enumerate(record.layers) if layers]
    layers = list(dict.fromkeys(layer for t in adapted for layer in record.layers[t]))
    short = [layer.removesuffix(".weight") for layer in layers]
    figures = []
    for key, title, unit, decimals in (
        ("threshold", "Threshold of each layer", "threshold", (2,)),
        ("rank", "Selected rank of each layer", "rank", (0,)),
    ):
        values = np.array([[record.layers[t].get(layer, {}).get(key, np.nan) for t in adapted] for layer in layers])
        figures.append(
            heat_map(
                title,
                values,
                name=f"{name}-{key}",
                rows=short,
                columns=[str(t + 1) for t in adapted],
                x="task",
                y="layer",
                unit=unit,
                decimals=decimals,
            )
        )
    full = [max(record.layers[t].get(layer, {}).get("full_rank", 0) for t in adapted) for layer in layers]
    return [*figures, bar_figure("Full rank of each layer", short, full, f"{name}-full-rank", x="full rank", y="layer")]


def _parameters(record: Record, name: str) -> list[Figure]:
    millions = {"this run" if record.counts else "this model": np.array(record.parameters) / 1e6}
    if record.isolation:
        millions["complete isolation"] = np.array(record.isolation) / 1e6
    names, stored = [task.name for task in record.learnt], [task.bytes for task in record.learnt]
    return [
        bar_figure(
            "Share of the added parameters (%)",
            record.tasks,
            record.shares,
            f"{name}-share",
            x="share of added parameters (%)",
            y="task",
            beside={"parameters added": record.added},
        ),
        bar_figure(
            "Share of the stored bytes (%)",
            names,
            percent(stored),
            f"{name}-bytes",
            x="share of stored bytes (%)",
            y="task",
            beside={"bytes stored": stored},
        ),
        curve_figure("Growth of the model (million parameters)", millions, f"{name}-growth", "parameters (million)"),
    ]


def _losses(record: Record, name: str) -> list[Figure]:
    """Return a curve for each kind of phase, over all tasks."""
    figures = []
    for index, phase in enumerate(dict.fromkeys(epoch["phase"] for epoch in record.epochs)):
        epochs = [epoch for epoch in record.epochs if epoch["phase"] == phase]
        tasks = [epoch["task"] for epoch in epochs]
        running = np.arange(1, len(epochs) + 1)
        marks = {
            str(t + 1): (tasks.index(t) + 0.5, len(tasks) - tasks[::-1].index(t) + 0.5) for t in dict.fromkeys(tasks)
        }
        loss = np.array([epoch["loss"] for epoch in epochs], dtype=float)
        broken = np.where(np.diff(tasks, prepend=tasks[0]) != 0)[0]  # each task has its own curve
        table = Table(
            f"Training loss, phase {phase}",
            ["running epoch", "task", "epoch", "loss (nats)", "learning rate", "seconds"],
            [
                [n, e["task"] + 1, e["epoch"], e["loss"], e["lr"], e["seconds"]]
                for n, e in zip(running.tolist(), epochs, strict=True)
            ],
        )
        curve = (np.insert(running.astype(float), broken, np.nan), np.insert(loss, broken, np.nan), None)
        svg = plots.lines(
            {"loss": curve},
            name=f"{name}-loss{index}",
            alt=f"{table.title}: {counted(len(epochs), 'epoch')} over {counted(len(marks), 'task')}, the last at "
            f"{loss[-1]:.4g}.",
            x="epoch of this phase, running",
            y="loss (nats)",
            marks=marks,
        )
        figures.append(Figure(Markup(svg), table))
    return figures


def _training(record: Record) -> list[Table]:
    """Return training settings per task, where they differ from the configuration."""
    usual = flat(record.config["train"], "train.")
    each = [flat(task.train, "train.") for task in record.learnt]
    keys = dict.fromkeys([*usual, *(key for settings in each for key in settings)])
    other = [key for key in keys if any(settings and settings.get(key) != usual.get(key) for settings in each)]
    rows = [
        [number, task.name, *(plain(settings.get(key)) for key in other)]
        for number, (task, settings) in enumerate(zip(record.learnt, each, strict=True), start=1)
    ]
    return [Table("Training that differs between tasks", ["task", "name", *other], rows)] if other else []


def _yaml(config: Mapping[str, Any]) -> str:
    return yaml.safe_dump(config, sort_keys=False, allow_unicode=True)


def _facts(record: Record) -> list[list[Cell]]:
    return [[key, str(value)] for key, value in flat(record.environment).items() if key != "format"]
