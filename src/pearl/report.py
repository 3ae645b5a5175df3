"""One HTML page about runs and models: what was learnt, what it cost, how it was set.

Reads their files and nothing else, without torch. A model of `pearl learn` has the files of a run less its results, so
its chapter has no accuracies. `read` turns a directory into a `Record`; the functions that
follow turn records into figures and tables, a figure and its table always from the same numbers; the template in
templates/ lays them out.
"""

import base64
import csv
import io
import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import yaml
from markupsafe import Markup

from pearl import metrics, plots
from pearl.errors import ReportError, RunError
from pearl.files import FORMAT, MANIFEST, check_format, check_no_gap, finished, read_json, write_file
from pearl.paths import runs_root
from pearl.registry import readable
from pearl.text import HEADLINES
from pearl.version import __version__


@dataclass(frozen=True)
class Link:
    """A cell that leads somewhere."""

    text: str
    address: str


Cell = str | int | float | Link | None
SCENARIOS: dict[metrics.Scenario, str] = {"class_il": "class-IL", "task_il": "task-IL"}


@dataclass(frozen=True)
class Learnt:
    """What the manifest of one task says."""

    name: str
    classes: list[str]
    images: int | None  # as `isolation`, not recorded by the first versions
    parameters: int  # of the whole model, after this task
    isolation: int | None  # of one network per task, after this task
    bytes: int
    layers: dict[str, dict[str, float]]  # threshold, rank, ... by layer
    train: dict[str, Any]  # settings, which for a model may change from task to task; empty in a run


@dataclass(frozen=True)
class Record:
    """What the files of one run or model say."""

    path: Path
    config: dict[str, Any]
    counts: metrics.Counts | None  # None for a model: it keeps no test images
    tasks: list[str]  # names; for a run, of those that were evaluated
    classes: list[list[str]]  # of each task
    parameters: list[int]  # of the whole model, after each stage
    isolation: list[int] | None  # of one network per task, after each stage; None if not recorded
    start: int  # parameters before the first task
    learnt: list[Learnt]
    epochs: list[dict[str, Any]]  # events of this kind, in order
    environment: dict[str, Any]
    complete: bool  # a model always is, as it has no end
    pending: bool  # a model has begun to learn one more task

    @property
    def name(self) -> str:
        """The directory's name."""
        return self.path.name

    @property
    def title(self) -> str:
        """The name, and for a model that it is one."""
        return self.name if self.counts else f"{self.name} ({self.state})"

    @property
    def label(self) -> str:
        """What tells it apart from runs of other kinds."""
        return f"{self.config['recipe'] if self.counts else self.name} {readable(self.config['method']['name'])}"

    @property
    def planned(self) -> int:
        """How many tasks the stream has."""
        tasks = self.config["stream"]["tasks"]
        return tasks if isinstance(tasks, int) else len(tasks)

    @property
    def state(self) -> str:
        """Done, or how far it came; a model is never done."""
        if self.counts is None:
            return f"model, {_count(len(self.tasks), 'task')}"
        done = f"{len(self.tasks)} of {self.planned} tasks"
        return f"done, {done}" if self.complete else f"unfinished, {done}"

    @property
    def kind(self) -> str:
        """What runs that differ by their seed alone have in common; a model has that with no other."""
        if self.counts is None:  # its configuration does not say what it has learnt
            return str(self.path)
        same = {key: value for key, value in self.config.items() if key not in {"seed", "about", "expected"}}
        return json.dumps(same, sort_keys=True, default=str)

    @cached_property
    def summary(self) -> dict[str, float]:
        """Every metric by name, as `runs.Run.summary`, and the mean rank if there is one."""
        if self.counts is not None:
            values = metrics.summary(self.counts, self.parameters, self.isolation)
        else:
            values = {"parameters_million": self.parameters[-1] / 1e6}
            if self.isolation:
                values["growth"] = metrics.growth(self.parameters[-1], self.isolation[-1])
        rank = metrics.mean_rank([layer for task in self.layers for layer in task.values()])
        return values if rank is None else values | {"mean_rank": rank}

    @property
    def layers(self) -> list[dict[str, dict[str, float]]]:
        """Threshold, rank, ... by layer, of each task."""
        return [task.layers for task in self.learnt]

    @property
    def added(self) -> list[int]:
        """Parameters that each task added to the model."""
        return np.diff([self.start, *self.parameters]).tolist()

    @property
    def shares(self) -> list[float]:
        """What each task added, in percent of what all tasks added."""
        return _percent(self.added)


@dataclass(frozen=True)
class Table:
    """Numbers with a title; the page shows them rounded, the CSV has every digit."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]

    @property
    def file(self) -> str:
        """The name a browser saves the CSV under."""
        return f"{re.sub(r'[^a-z0-9]+', '-', self.title.lower()).strip('-')}.csv"

    @property
    def csv(self) -> str:
        """The table as CSV; NaN is an empty cell."""
        file = io.StringIO()
        csv.writer(file).writerows([[_csv_cell(cell) for cell in row] for row in [self.columns, *self.rows]])
        return file.getvalue()

    @property
    def link(self) -> str:
        """The CSV as an address that holds it whole, so that downloading it needs neither script nor network."""
        return f"data:text/csv;charset=utf-8;base64,{base64.b64encode(self.csv.encode('utf-8', 'replace')).decode()}"


@dataclass(frozen=True)
class Figure:
    """A drawing and its numbers, whose title it shares."""

    svg: Markup
    table: Table


@dataclass(frozen=True)
class Part:
    """One heading of the page."""

    title: str
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()
    note: str = ""
    text: str = ""


@dataclass(frozen=True)
class Chapter:
    """A run, a model, or the comparison of several."""

    title: str
    parts: Sequence[Part]
    unfinished: str = ""


def write(runs: Sequence[str | Path], output: Path | None = None) -> Path:
    """Write the page about these runs and models, whole or not at all; the path it is at.

    Without `output` it lies in the run's directory, or for several runs in the current one.

    Raises:
        RunError: a directory that cannot be read, or one that has nothing to show yet.
        ReportError: the page cannot be written there, or two runs are the same.
    """
    if output is not None and output.is_dir():
        raise ReportError(f"{output}: is a folder; give the page a name in it, as -o {output / 'report.html'}")
    if output is not None and output.suffix.lower() not in {".html", ".htm"}:  # -o RUN/results.json would replace it
        raise ReportError(f"{output}: the page is HTML; give it a name that ends in .html")
    records = read_all(runs)
    if output is None:
        output = records[0].path / "report.html" if len(records) == 1 else Path("report.html")
    write_file(output, page(records).encode("utf-8", "replace"), mend="choose another place with -o")
    return output


def page(records: Sequence[Record]) -> str:
    """The page as HTML."""
    chapters = [about_run(record, f"run{index}") for index, record in enumerate(records)]
    if len(records) > 1:
        chapters.insert(0, compare(records))
    title = records[0].title if len(records) == 1 else f"{_runs_and_models(records)} side by side"
    return render(title, chapters)


def render(title: str, chapters: Sequence[Chapter]) -> str:
    """Chapters as one page of HTML that needs nothing else."""
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined)
    environment.filters["shown"] = shown
    template = environment.from_string((resources.files("pearl.templates") / "report.html.jinja").read_text("utf-8"))
    return template.render(title=title, chapters=chapters, version=__version__)


# ------------------------------------------------------------------------------------------------------ reading


def read_all(runs: Sequence[str | Path]) -> list[Record]:
    """Read several runs, of which no two may be the same: a seed that counts twice makes the spread too small.

    Raises:
        RunError: with a line for each run that cannot be read.
        ReportError: the same run twice, or no run at all.
    """
    if not runs:
        raise ReportError("no run given; name at least one, `pearl list runs` shows those there are")
    records, problems = [], []
    for run in runs:
        try:
            records.append(read(run))
        except RunError as error:
            problems.append(str(error))
    if problems:
        raise RunError("\n".join(problems))
    for first, second in itertools.combinations(records, 2):
        if (first.kind, first.config["seed"]) == (second.kind, second.config["seed"]):
            raise ReportError(f"{second.path}: the same configuration and seed as {first.path}; give one of them")
        if first.name == second.name:  # figures, tables and folders go by it
            raise ReportError(f"{second.path}: has the same name as {first.path}; rename one of the directories")
    return records


def read(run: str | Path) -> Record:
    """What the files of a run or model say; a run is a path, or a name under the folder of runs.

    Raises:
        RunError: neither a run nor a model, no task is finished, or a file is damaged.
    """
    path = next((at for at in (Path(run), runs_root() / run) if (at / "config.yaml").is_file()), None)
    if path is None:
        if (Path(run) / "tasks").is_dir():
            raise RunError(f"{Path(run) / 'config.yaml'}: missing, though tasks are there; restore it from a copy")
        raise RunError(
            f"{run}: neither a run nor a model, it has no config.yaml; `pearl list runs` shows the runs there are"
        )
    path = path.resolve()  # "." has no name
    config = _config(path / "config.yaml")
    measured = _results(path) if "recipe" in config else _model(path)
    reference = path / "reference" / MANIFEST
    return Record(
        path=path,
        config=config,
        start=_of_manifest(reference, lambda manifest: int(manifest["parameters"])),
        epochs=_epochs(path / "events.jsonl"),
        environment=read_json(path / "environment.json") if (path / "environment.json").exists() else {},
        **measured,
    )


def _results(path: Path) -> dict[str, Any]:
    """What a run's results say about the tasks that were evaluated, with the manifests of those."""
    file = path / "results.json"
    results = read_json(file) if file.exists() else {"stages": []}
    if results.get("stages") == []:
        raise RunError(f"{path}: no task is finished yet; let `pearl run` finish at least one, then report")
    folders = finished(path)
    try:
        counts = metrics.Counts.from_results(results)
        stages, tasks = results["stages"], results["tasks"]
        complete = bool(results.get("complete")) and len(folders) == len(tasks)
        names = [str(task["name"]) for task in tasks]
        classes = [[str(name) for name in task["classes"]] for task in tasks]
        sizes = [[int(stage[key]) for stage in stages] for key in ("parameters", "isolation_parameters")]
    except (KeyError, TypeError, ValueError, RunError) as error:
        raise RunError(f"{file}: damaged ({_reason(error)}); delete it and run again, which evaluates anew") from None
    return {
        "counts": counts,
        "tasks": names,
        "classes": classes,
        "parameters": sizes[0],
        "isolation": sizes[1],
        "learnt": [_of_manifest(folder / MANIFEST, _learnt) for folder in folders[: len(names)]],
        "complete": complete,
        "pending": False,
    }


def _model(path: Path) -> dict[str, Any]:
    """What a model's manifests say in the place of results."""
    check_no_gap(path)
    learnt: list[Learnt] = [_of_manifest(folder / MANIFEST, _learnt) for folder in finished(path)]
    if not learnt:
        raise RunError(f"{path}: no task is finished yet; let `pearl resume {path}` finish one, then report")
    isolation = [task.isolation for task in learnt]
    return {
        "counts": None,
        "tasks": [task.name for task in learnt],
        "classes": [task.classes for task in learnt],
        "parameters": [task.parameters for task in learnt],
        "isolation": None if None in isolation else isolation,
        "learnt": learnt,
        "complete": True,
        "pending": (path / "resume" / "task.json").is_file(),
    }


def _config(file: Path) -> dict[str, Any]:
    """The settings as they are written: checking them again would import every part they name, and torch."""
    try:
        config = yaml.safe_load(file.read_text(encoding="utf-8"))
        check_format(file, config.pop("format", FORMAT))  # no setting
        whole = isinstance(config["seed"], int) and isinstance(config["method"]["name"], str)
        whole = whole and isinstance(config["train"], dict)
        if config.keys() & {"recipe", "stream"}:
            whole = whole and isinstance(config["stream"]["tasks"], int | list) and isinstance(config["recipe"], str)
        whole = whole and all(isinstance(figure, dict) for figure in (config.get("expected") or {}).values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, yaml.YAMLError) as error:
        raise RunError(f"{file}: cannot be read ({_reason(error)}); restore it from a copy") from None
    if not whole:
        raise RunError(f"{file}: damaged (not the settings of a run or model); restore it from a copy")
    return config


def _of_manifest(file: Path, take: Any) -> Any:
    manifest = read_json(file)
    try:
        return take(manifest)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RunError(f"{file}: damaged ({_reason(error)}); restore it from a copy of the run") from None


def _learnt(manifest: Mapping[str, Any]) -> Learnt:
    keys = ("threshold", "rank", "full_rank", "rows_and_columns")
    layers = manifest.get("layers", [])
    images, isolation = (manifest.get(key) for key in ("images", "isolation_parameters"))
    return Learnt(
        name=str(manifest["name"]),
        classes=[str(name) for name in manifest["classes"]],
        images=None if images is None else int(images),
        parameters=int(manifest["parameters"]),
        isolation=None if isolation is None else int(isolation),
        bytes=int(manifest["bytes"]),
        layers={str(layer["layer"]): {key: layer[key] + 0 for key in keys} for layer in layers},
        train=dict(manifest.get("train", {})),
    )


def _epochs(file: Path) -> list[dict[str, Any]]:
    """The epochs in order; of what was trained twice, since it was cut off, only the second time.

    A line that is not whole is passed over: a run that was killed may have left one.
    """
    epochs: dict[tuple[int, int, int], dict[str, Any]] = {}  # by task, position of the phase in it, and number
    position = 0
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines() if file.is_file() else []
    for line in lines:
        try:
            event = json.loads(line)
            if event["event"] == "task":
                position = 0
            elif event["event"] == "phase":
                position += 1
                if not event.get("done"):  # from its first step; phases before it may have been gone on with
                    task = event["task"]
                    epochs = {at: epoch for at, epoch in epochs.items() if at[0] != task or at[1] < position}
            elif event["event"] == "epoch":
                numbers = {key: event[key] + 0 for key in ("task", "epoch", "loss", "lr", "seconds")}
                at = (event["task"], position, event["epoch"])
                epochs[at] = {**numbers, "phase": str(event["phase"]), "time": str(event["time"])}
        except (ValueError, KeyError, TypeError):
            continue
    return [*epochs.values()]


def _reason(error: Exception) -> str:
    text = f"no {error}" if isinstance(error, KeyError) else str(error)
    return " ".join(text.split())


# ------------------------------------------------------------------------------------------------ one run or model


def about_run(record: Record, name: str) -> Chapter:
    """Everything about one run or model; `name` keeps its figures' ids apart from those of others."""
    counts = record.counts
    parts = [
        Part("Results", tables=[_metrics(record)], note="Accuracies are in percent." if counts else _MODEL_NOTE),
        Part("Tasks", tables=[_tasks(record)]),
        *([Part("Accuracy", figures=_accuracy(record, counts, name))] if counts else []),
        *([Part("Confusion between tasks", figures=[_confusion(record, counts, name)])] if counts else []),
        *([Part("Rank allocation", figures=_ranks(record, name), note=_RANK_NOTE)] if any(record.layers) else []),
        Part("Parameters", figures=_parameters(record, name), note=_parameters_note(record)),
        *([Part("Loss", figures=_losses(record, name))] if record.epochs else []),
        Part("Settings", tables=_training(record), text=_yaml(record.config)),
        Part("Environment", tables=[Table(f"Environment of {record.name}", ["what", "value"], _facts(record))]),
    ]
    unfinished = ""
    if not record.complete:
        unfinished = f"{record.state}: the same `pearl run` goes on. What follows is as far as it came.".capitalize()
    elif record.pending:
        unfinished = "One more task is half learnt: `pearl resume` goes on with it."
    return Chapter(record.title, parts, unfinished)


_MODEL_NOTE = (
    "A model keeps no test images, so it has no accuracies and no confusion between tasks here; "
    "`pearl evaluate MODEL --data FOLDER` measures them."
)
_RANK_NOTE = (
    "Every layer chooses its rank from how far it moved: the threshold is the share of the update's energy that the "
    "rank must keep. Layers are in the network's order."
)
_SHARE_NOTE = (
    "Shares are of all parameters that tasks added. Without pretraining the first task trains the reference itself, "
    "and adds its head alone."
)


def _parameters_note(record: Record) -> str:
    notes = [_SHARE_NOTE, "Bytes are of the tensors that a task changed or added: that first task stores all of them."]
    if record.isolation is None:
        notes.append(
            "Complete isolation is left out: some tasks were learnt by an earlier pearl that did not record it."
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
        rows.append([_title(key), value, key, *beside])
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
    return Table(f"Tasks of {record.name}", [*columns], list(itertools.zip_longest(*columns.values())))


def _accuracy(record: Record, counts: metrics.Counts, name: str) -> list[Figure]:
    stages = [str(t + 1) for t in range(len(record.tasks))]
    figures, curves = [], {}
    for scenario, title in SCENARIOS.items():
        A = metrics.accuracy_matrix(counts, scenario)
        curves[title] = metrics.stage_accuracy(A)
        figures.append(
            _heat_map(
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
    return _heat_map(
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
    """The three panels of the paper's figure on rank allocation, for every task: threshold, rank, full rank."""
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
            _heat_map(
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
            _percent(stored),
            f"{name}-bytes",
            x="share of stored bytes (%)",
            y="task",
            beside={"bytes stored": stored},
        ),
        curve_figure("Growth of the model (million parameters)", millions, f"{name}-growth", "parameters (million)"),
    ]


def _losses(record: Record, name: str) -> list[Figure]:
    """A curve for each kind of phase, the tasks one after the other."""
    figures = []
    for index, phase in enumerate(dict.fromkeys(epoch["phase"] for epoch in record.epochs)):
        epochs = [epoch for epoch in record.epochs if epoch["phase"] == phase]
        tasks = [epoch["task"] for epoch in epochs]
        running = np.arange(1, len(epochs) + 1)
        marks = {
            str(t + 1): (tasks.index(t) + 0.5, len(tasks) - tasks[::-1].index(t) + 0.5) for t in dict.fromkeys(tasks)
        }
        loss = np.array([epoch["loss"] for epoch in epochs], dtype=float)
        broken = np.where(np.diff(tasks, prepend=tasks[0]) != 0)[0]  # a new task is a new curve
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
            alt=f"{table.title}: {len(epochs)} epochs over {len(marks)} tasks, the last at {loss[-1]:.4g}.",
            x="epoch of this phase, running",
            y="loss (nats)",
            marks=marks,
        )
        figures.append(Figure(Markup(svg), table))
    return figures


def _training(record: Record) -> list[Table]:
    """How each task was trained, where that was not always as the configuration says."""
    usual = flat(record.config["train"], "train.")
    each = [flat(task.train, "train.") for task in record.learnt]
    keys = dict.fromkeys([*usual, *(key for settings in each for key in settings)])
    other = [key for key in keys if any(settings and settings.get(key) != usual.get(key) for settings in each)]
    rows = [
        [number, task.name, *(_plain(settings.get(key)) for key in other)]
        for number, (task, settings) in enumerate(zip(record.learnt, each, strict=True), start=1)
    ]
    return [Table("Training that differs between tasks", ["task", "name", *other], rows)] if other else []


def _yaml(config: Mapping[str, Any]) -> str:
    return yaml.safe_dump(config, sort_keys=False, allow_unicode=True)


def _facts(record: Record) -> list[list[Cell]]:
    return [[key, str(value)] for key, value in flat(record.environment).items() if key != "format"]


# ------------------------------------------------------------------------------------------------------ several runs


@dataclass(frozen=True)
class Group:
    """Runs that differ by their seed alone, or one model.

    Only complete runs count: a mean over unlike stages means nothing.
    """

    label: str
    runs: list[Record]

    @property
    def complete(self) -> list[Record]:
        """Runs that are done."""
        return [run for run in self.runs if run.complete]

    def statistics(self, key: str) -> tuple[float | None, float | None]:
        """Mean and standard deviation of one metric over the seeds."""
        values = [run.summary[key] for run in self.complete if key in run.summary]
        mean, std = spread(np.array(values))
        return (None if mean is None else float(mean)), (None if std is None else float(std))


def spread(values: Any) -> tuple[Any, Any]:
    """Mean and standard deviation (n - 1) over the first axis; None where there are too few for it."""
    mean = np.mean(values, axis=0) if len(values) else None
    return mean, np.std(values, axis=0, ddof=1) if len(values) > 1 else None


def groups(records: Sequence[Record]) -> list[Group]:
    """Runs by all that decides a result but the seed, numbered, since recipe and method may not tell them apart."""
    members: dict[str, list[Record]] = {}
    for record in records:
        members.setdefault(record.kind, []).append(record)
    return [Group(f"{number}. {runs[0].label}", runs) for number, runs in enumerate(members.values(), start=1)]


def compare(records: Sequence[Record]) -> Chapter:
    """Runs and models side by side, and the mean over seeds of runs that differ by nothing else."""
    together = groups(records)
    seeds = [group for group in together if group.runs[0].counts]
    models = len(seeds) < len(together)
    what = "Models" if not seeds else "Runs and models" if models else "Runs"
    label = {id(run): group.label for group in together for run in group.runs}
    keys = [key for key in [*HEADLINES, "mean_rank"] if any(key in run.summary for run in records)]
    runs = Table(
        what,
        ["run", "group", "seed", "state", *map(_title, keys)],
        [
            [run.name, label[id(run)], run.config["seed"], run.state, *(run.summary.get(key) for key in keys)]
            for run in records
        ],
    )
    differing = _differing(records)
    settings = Table(
        "Settings that differ",
        ["run", "group", *differing],
        [[run.name, label[id(run)], *(_plain(flat(run.config).get(key)) for key in differing)] for run in records],
    )
    share = {run.name: np.array(run.shares) for run in records if run.complete}
    parts = [
        Part(what, tables=[runs], note=_MODEL_NOTE if models else ""),
        *([Part("Mean over seeds", tables=[_group_table(seeds)], note=_GROUP_NOTE)] if seeds else []),
        *([Part("Stage by stage", figures=figures)] if (figures := _group_figures(together)) else []),
        *([Part("Resource allocation", [_shares(share)], note=_SHARE_NOTE)] if share else []),
        Part("Settings", tables=[settings]),
    ]
    return Chapter("Comparison", parts)


_GROUP_NOTE = (
    "A group is one configuration with several seeds. Mean and standard deviation (n - 1) are over its complete runs; "
    "a single run has no standard deviation."
)


def _shares(share: Mapping[str, Any]) -> Figure:
    """The paper's figure on resource allocation over several runs; shares of a run half done would mislead."""
    return curve_figure("Share of the added parameters, by run (%)", share, "all-share", "share (%)", x="task")


def _group_table(together: Sequence[Group]) -> Table:
    keys = dict.fromkeys(key for group in together for run in group.complete for key in run.summary)
    order = [key for key in [*HEADLINES, "mean_rank"] if key in keys]
    rows: list[list[Cell]] = [
        ["complete runs (n)", *(cell for group in together for cell in (len(group.complete), None))]
    ]
    rows += [
        [_title(key), *(cell for group in together for cell in group.statistics(key))]
        for key in dict.fromkeys([*order, *keys])
    ]
    names = [f"{group.label}: {what}" for group in together for what in ("mean", "std")]
    return Table("Mean and standard deviation over seeds", ["metric", *names], rows)


def _group_figures(together: Sequence[Group]) -> list[Figure]:
    figures = []
    with_runs = [group for group in together if group.complete]
    for scenario, title in SCENARIOS.items():
        curves = {
            f"{group.label} (n={len(group.complete)})": spread(
                [metrics.stage_accuracy(metrics.accuracy_matrix(counts, scenario)) for counts in all_counts]
            )
            for group in with_runs
            if (all_counts := [run.counts for run in group.complete if run.counts])
        }
        if curves:
            figures.append(curve_figure(f"{title}, mean over seeds (%)", curves, f"all-{scenario}", "accuracy (%)"))
    millions = {
        f"{group.label} (n={len(group.complete)})": spread([np.array(run.parameters) / 1e6 for run in group.complete])
        for group in with_runs
    }
    if millions:
        figures.append(
            curve_figure("Parameters, mean over seeds (million)", millions, "all-growth", "parameters (million)")
        )
    return figures


def _differing(records: Sequence[Record]) -> list[str]:
    """The settings that are not the same in all of these runs."""
    settings = [flat(record.config) for record in records]
    keys = dict.fromkeys(key for each in settings for key in each)
    missing = object()  # a setting that is not there differs from one that is None
    return [
        key
        for key in keys
        if key.partition(".")[0] not in {"about", "expected"}
        and any(each.get(key, missing) != settings[0].get(key, missing) for each in settings)
    ]


# ------------------------------------------------------------------------------------- numbers to figure and table


def _heat_map(title: str, values: Any, *, rows: Sequence[str], columns: Sequence[str], **axes: Any) -> Figure:
    table = Table(
        title,
        [axes["y"], *(f"{axes['x']} {column}" for column in columns)],
        [[row, *cells] for row, cells in zip(rows, values.tolist(), strict=True)],
    )
    alt = f"{title}: heat map of {len(rows)} rows ({axes['y']}) by {len(columns)} columns ({axes['x']}), "
    alt += f"from {np.nanmin(values):.4g} to {np.nanmax(values):.4g}."
    return Figure(Markup(plots.heat_map(values, alt=alt, rows=rows, columns=columns, **axes)), table)


def curve_figure(title: str, curves: Mapping[str, Any], name: str, y: str, x: str = "after task") -> Figure:
    """A curve per label over the tasks; its values, or their mean and standard deviation."""
    pairs = {label: curve if isinstance(curve, tuple) else (curve, None) for label, curve in curves.items()}
    longest = max(len(mean) for mean, _ in pairs.values())
    columns: dict[str, list[Cell]] = {x: [*range(1, longest + 1)]}
    for label, (mean, std) in pairs.items():
        columns[label] = mean.tolist()
        if std is not None:
            columns[f"{label}: std"] = std.tolist()
    ends = "; ".join(f"{label} from {mean[0]:.4g} to {mean[-1]:.4g}" for label, (mean, _) in pairs.items())
    series = {label: (np.arange(1.0, len(mean) + 1), mean, std) for label, (mean, std) in pairs.items()}
    svg = plots.lines(series, name=name, alt=f"{title}: {ends}.", x=x, y=y)
    return Figure(Markup(svg), Table(title, [*columns], list(itertools.zip_longest(*columns.values()))))


def bar_figure(
    title: str,
    labels: Sequence[str],
    values: Sequence[float],
    name: str,
    *,
    x: str,
    y: str,
    beside: Mapping[str, Sequence[Cell]] | None = None,
) -> Figure:
    """A bar per label; `beside` adds columns to the table alone."""
    beside = beside or {}
    table = Table(title, [y, x, *beside], list(zip(labels, values, *beside.values(), strict=True)))
    alt = f"{title}: {len(labels)} bars from {min(values, default=0):.4g} to {max(values, default=0):.4g}."
    return Figure(Markup(plots.bars(labels, np.array(values, dtype=float), name=name, alt=alt, x=x, y=y)), table)


def _percent(values: Sequence[int]) -> list[float]:
    return [100 * value / max(sum(values), 1) for value in values]


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _runs_and_models(records: Sequence[Record]) -> str:
    runs = sum(record.counts is not None for record in records)
    found = {"run": runs, "model": len(records) - runs}
    return " and ".join(_count(number, what) for what, number in found.items() if number)


def _title(key: str) -> str:
    names = HEADLINES | {"mean_rank": "mean rank, weighted by (in + out)"}
    return names.get(key, key.replace("class_il.", "class-IL ").replace("task_il.", "task-IL ").replace("_", " "))


def shown(cell: Cell) -> str:
    """A cell as the page shows it."""
    if cell is None or (isinstance(cell, float) and math.isnan(cell)):
        return "–"
    if isinstance(cell, Link):
        return Markup('<a href="{}">{}</a>').format(cell.address, cell.text)
    if isinstance(cell, bool | str):
        return str(cell)
    if isinstance(cell, int):
        return f"{cell:,}"
    return f"{cell:.2f}" if abs(cell) >= 1 or cell == 0 else f"{cell:.3g}"


def _csv_cell(cell: Cell) -> Cell:
    """A cell that a spreadsheet will not take for a formula, with an apostrophe before one that it would."""
    if isinstance(cell, float) and math.isnan(cell):
        return None
    if isinstance(cell, Link):
        return cell.address
    if isinstance(cell, str) and re.match(r"\s*[=+\-@＝＋－＠]|[\t\r\n]", cell):
        return f"'{cell}"
    return cell


def flat(settings: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Nested settings by their dotted names, as the command line writes them."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, dict) and value:
            found |= flat(value, f"{above}{key}.")
        else:
            found[f"{above}{key}"] = value
    return found


def _plain(value: Any) -> Cell:
    return value if isinstance(value, str | int | float) or value is None else json.dumps(value)
