"""Logs that are written while something learns: the same numbers as in events.jsonl, whatever became of the process."""

import csv
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import pearl
from pearl.errors import Interrupted, ReportError
from pearl.lifecycle.runs import execute
from pearl.reports.logs import logged
from pearl.reports.records import read
from pearl.settings.config import load_config
from pearl.storage.paths import runs_root
from pearl.training.engine import Observer
from photos import StopAt, weights_of

SMALL = {
    "backbone": {"width": 4},
    "stream": {"tasks": [5, 5], "per_class": 6, "test_per_class": 4},
    "train": {"epochs": 2, "batch_size": 8, "phases": {}},
}
CONFIG = [f"{key}={json.dumps(value)}" for key, value in SMALL.items()]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> pearl.lifecycle.runs.Run:
    """A run without a log."""
    return execute(load_config("digits", CONFIG), path=tmp_path_factory.mktemp("plain") / "run")


def rows(directory: Path) -> list[tuple[float, str, float]]:
    """(step, name, value) of each number in the CSV."""
    with (directory / "logs/csv/metrics.csv").open(newline="") as file:
        return [
            (float(row["step"]), key, float(value))
            for row in csv.DictReader(file)
            for key, value in row.items()
            if key != "step" and value
        ]


def expected(directory: Path) -> list[tuple[float, str, float]]:
    """What the report's records, manifests and results say."""
    record, actual, seen = read(directory), [], dict[str, int]()
    for epoch in record.epochs:
        phase = epoch["phase"]
        seen[phase] = seen.get(phase, 0) + 1
        actual += [(float(seen[phase]), f"{key}/{phase}", epoch[key]) for key in ("loss", "lr")]
    assert record.counts is not None
    for number, stage in enumerate(record.counts.stages, start=1):
        for name in ("class_il", "task_il"):
            share = round(100 * float(getattr(stage, name).sum() / stage.total.sum()), 2)
            actual.append((float(number), f"pooled_accuracy_percent/{name}", share))
    return actual + [(float(n), "parameters", float(size)) for n, size in enumerate(record.parameters, start=1)]


def test_a_log_has_what_the_report_has_and_changes_no_bit(plain, tmp_path):
    show = logged(Observer(), "csv", tmp_path / "run")
    run = execute(plain.config, path=tmp_path / "run", show=show)
    assert sorted(rows(run.path)) == sorted(expected(run.path))
    assert weights_of(run.path) == weights_of(plain.path) and run.results["stages"][-1]["class_il"]
    assert [stage["confusion"] for stage in run.results["stages"]] == [s["confusion"] for s in plain.results["stages"]]


class Both(StopAt):
    """A log below somebody who stops."""

    def __init__(self, log: Observer, phase: str, step: int) -> None:
        super().__init__(phase, step)
        self.log = log

    def event(self, kind: str, **facts: Any) -> None:
        super().event(kind, **facts)
        self.log.event(kind, **facts)

    def close(self) -> None:
        self.log.close()


@pytest.mark.parametrize("begun", ["with a log", "without one"])
def test_what_is_gone_on_with_goes_on_in_the_log(plain, tmp_path, begun):
    """In the middle of an epoch, which is told once; with what came before if the log is new."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    path, kinds = tmp_path / "run", ["csv", "tensorboard"]
    first = logged(Observer(), kinds if begun == "with a log" else [], path)
    with pytest.raises(Interrupted):
        execute(plain.config, path=path, show=Both(first, "adapt", 4))
    execute(plain.config, path=path, show=logged(Observer(), kinds, path))
    assert sorted(rows(path)) == sorted(expected(path)) == sorted(rows(path))
    board = EventAccumulator(str(path / "logs/tensorboard")).Reload()
    told = {(event.step, name, event.value) for name in board.Tags()["scalars"] for event in board.Scalars(name)}
    assert {(step, name) for step, name, _ in told} == {(int(step), name) for step, name, _ in rows(path)}
    assert len(told) == len(rows(path)), "nothing is told twice with another value"


def test_a_model_has_a_log_too(tmp_path):
    from photos import SETTINGS, digit

    images, labels = [*digit(0)[:8], *digit(1)[:8]], ["zero"] * 8 + ["one"] * 8
    pearl.learn(tmp_path / "m", (images, labels), quiet=True, log=["csv"], **SETTINGS)
    names = {name for _, name, _ in rows(tmp_path / "m")}
    assert names == {"loss/reference", "lr/reference", "parameters"}


def test_wandb(tmp_path, monkeypatch):
    """By a stand-in: what it is told, and that it goes on in the same run."""
    told: list[Any] = []

    def init(**options: Any) -> SimpleNamespace:
        told.append(options)
        return SimpleNamespace(define_metric=lambda *_, **__: None, log=told.append, finish=lambda: told.append("end"))

    fake = ModuleType("wandb")
    fake.__spec__ = SimpleNamespace()  # type: ignore[assignment]
    fake.init, fake.Settings = init, dict  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", fake)
    log = logged(Observer(), ["wandb"], tmp_path / "run")
    assert told == [], "nothing is begun before the directory is this process's"
    log.event("run")
    log.event("stage", task=1, class_il=50.0, task_il=60.0)
    log.close()
    assert told[0]["id"] == told[0]["name"] == "run" and told[0]["resume"] == "allow"
    assert told[0]["dir"] == tmp_path / "run/logs/wandb"
    assert told[1:] == [
        {"pooled_accuracy_percent/class_il": 50.0, "pooled_accuracy_percent/task_il": 60.0, "number": 2},
        "end",
    ]


def test_wandb_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="needs pearl[wandb]")
    for key, value in {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}.items():
        monkeypatch.setenv(key, value)
    log = logged(Observer(), ["wandb"], tmp_path / "run")
    log.event("run")
    log.event("stage", task=1, class_il=50.0, task_il=60.0)
    log.close()
    assert [*(tmp_path / "run/logs/wandb").rglob("run-run.wandb")]


def test_a_log_that_cannot_be_is_one_line_before_anything_begins(tmp_path, monkeypatch, cli):
    for kind in ("tensorboard", "wandb"):
        monkeypatch.setattr("pearl.reports.logs.find_spec", lambda name: None)
        with pytest.raises(ReportError, match=rf"needs the package {kind}; .* pip install 'pearl\[{kind}\]'"):
            logged(Observer(), kind, tmp_path)
    with pytest.raises(ReportError, match="log 'tensorbord': unknown kind of log; did you mean 'tensorboard'"):
        logged(Observer(), "tensorbord", tmp_path)
    _, said = cli("run", "digits", *CONFIG, "--log", "csv", "--log", "csw", "--quiet", code=2)
    assert said.startswith("pearl: log 'csw': unknown kind of log") and not [*runs_root().glob("*")]


def test_a_log_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/logs").write_text("")
    log = logged(Observer(), "csv", tmp_path / "run")
    with pytest.raises(ReportError, match=r"run/logs: a log cannot be written .*leave out --log"):
        log.event("run")
