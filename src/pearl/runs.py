"""A run is a directory named by its configuration: same configuration, same directory, resumed or already done.

RUN/config.yaml         resolved configuration          RUN/environment.json   versions, device, threads, commit
RUN/data.json           source, split and digest of the data
RUN/classes.json        names in order of arrival, per task; append-only
RUN/reference/          the method's state before the first task
RUN/tasks/000-NAME/     what task 0 added or changed, with thresholds, ranks, parameters, seconds
RUN/results.json        counts per stage, task and class; every metric is derived from them
RUN/events.jsonl        one line per phase and epoch
"""

import json
import os
import platform
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from torch import nn

from pearl import metrics
from pearl.checkpoint import changed, load_state, snapshot, write_part
from pearl.config import RunConfig, check_config
from pearl.data.augment import View
from pearl.data.batches import Task, fold
from pearl.data.cache import decode
from pearl.data.sources import Source
from pearl.data.stream import Stream, make_stream
from pearl.engine import Engine, Observer
from pearl.errors import ConfigError, DataError, RunError
from pearl.evaluate import Evaluator, TestSet
from pearl.files import FORMAT, finished, folder_name, read_json, write_file, write_json
from pearl.methods.base import Method
from pearl.paths import runs_root
from pearl.registry import BACKBONES, METHODS, SOURCES
from pearl.version import __version__


@dataclass
class Run:
    """A run directory."""

    path: Path
    config: RunConfig

    @classmethod
    def open(cls, path: Path) -> "Run":
        """A run that exists.

        Raises:
            RunError: not a run directory, or its configuration cannot be read.
        """
        file = path / "config.yaml"
        if not file.is_file():
            raise RunError(
                f"{path}: not a run directory, it has no config.yaml; `pearl list runs` shows those there are"
            )
        try:
            return cls(path, check_config(yaml.safe_load(file.read_text())))
        except (OSError, ValueError, TypeError, yaml.YAMLError, ConfigError) as error:
            reason = " ".join(str(error).split())
            raise RunError(f"{file}: cannot be read ({reason}); restore it, or run into a new directory") from None

    @property
    def results(self) -> dict[str, Any]:
        """Counts of every finished stage; see `metrics.Counts.from_results`."""
        file = self.path / "results.json"
        return read_json(file) if file.is_file() else {"format": FORMAT, "tasks": [], "stages": []}

    @property
    def done(self) -> bool:
        """Whether every task has been learnt and evaluated."""
        results = self.results
        return bool(results.get("complete")) and len(finished(self.path)) == len(results["tasks"])

    @cached_property
    def counts(self) -> metrics.Counts:
        """The counts that every metric is derived from."""
        return metrics.Counts.from_results(self.results)

    @property
    def summary(self) -> dict[str, float]:
        """Every metric by name; accuracies in percent."""
        stages = self.results["stages"]
        return metrics.summary(
            self.counts, [s["parameters"] for s in stages], [s["isolation_parameters"] for s in stages]
        )

    @property
    def mean_rank(self) -> float | None:
        """Mean rank over low-rank targets and tasks, weighted by rows + columns as parameters are; None without any."""
        return metrics.mean_rank([layer for manifest in self.manifests for layer in manifest.get("layers", [])])

    @property
    def manifests(self) -> list[dict[str, Any]]:
        """What each finished task recorded about itself."""
        return [read_json(folder / "manifest.json") for folder in finished(self.path)]


@dataclass
class Prepared:
    """Data ready to learn from: decoded, cut into tasks."""

    source: Source
    stream: Stream
    train: np.ndarray
    test: np.ndarray


def prepare(config: RunConfig, show: Observer | None = None) -> Prepared:
    """Load and decode the data and cut it into tasks.

    Raises:
        DataError: data missing or unusable; unreadable images of all splits are listed together.
    """
    show = show or Observer()
    source: Source = SOURCES.build(config.data)
    stream = make_stream(source, config.stream, config.seed)
    splits = {"train": source.train, "test": source.test, "validation": source.validation or source.test}
    decoded: dict[str, np.ndarray] = {}
    problems = []
    for name in dict.fromkeys(("train", stream.test_from)):
        split = splits[name]
        show.event("decode", split=name, images=len(split.labels))
        try:
            decoded[name] = decode(split, config.images.stored, on_progress=show.step)
        except DataError as error:
            problems.append(str(error))
    if problems:
        raise DataError("\n".join(problems))
    shorter = min(decoded["train"].shape[1:3])
    if config.images.augment == "crop" and shorter != config.images.size:
        raise DataError(
            f"images.augment=crop needs images of the network's size {config.images.size}, these are {shorter} pixels; "
            f"set images.size={shorter}, or use images.augment=resized_crop"
        )
    return Prepared(source, stream, decoded["train"], decoded[stream.test_from])


def build_backbone(config: RunConfig, *, structure_only: bool = False) -> nn.Module:
    """The backbone of a run; `structure_only` leaves out reference weights that a state will overwrite."""
    spec = dict(config.backbone)
    given = bool(spec.get("pretrained") or spec.get("weights"))
    if structure_only or config.smoke:
        spec |= {key: False if key == "pretrained" else None for key in ("pretrained", "weights") if key in spec}
    torch.manual_seed(fold(config.seed, "backbone"))
    backbone = BACKBONES.build(spec, config.images.size)
    if given:
        backbone.pretrained = True
    return backbone


def build_method(config: RunConfig, *, structure_only: bool = False) -> Method:
    """The method of a run, before its first task.

    Raises:
        ConfigError: options that this backbone cannot fulfil.
    """
    return METHODS.build(config.method, build_backbone(config, structure_only=structure_only))


def load_method(
    run: Path, config: RunConfig, tasks: int | None = None, *, place: Callable[[Method], Method] = lambda method: method
) -> Method:
    """A method as it was after its first `tasks` tasks (all finished ones if not given).

    `place` moves it to a device and layout.

    Raises:
        RunError: files missing, damaged, or not of this configuration.
    """
    method = place(build_method(config, structure_only=True))
    try:
        method.load_state_dict(load_state(run, tasks), strict=True)
    except RuntimeError as error:
        raise RunError(f"{run}: state does not fit its configuration ({' '.join(str(error).split())})") from None
    return place(method).eval()  # again, for the tensors that came with the state


def isolation_size(method: Method, classes: list[int]) -> int:
    """Parameters of complete isolation: a backbone and a head with bias for every task."""
    backbone = sum(p.numel() for p in method.backbone.parameters())
    return sum(backbone + (method.heads.dim + 1) * count for count in classes)


def execute(
    config: RunConfig,
    *,
    device: str = "auto",
    show: Observer | None = None,
    stop_after: int | None = None,
) -> Run:
    """Run a configuration to its end, from where its directory stands.

    `stop_after` ends it early, after so many tasks in all; the next call goes on.

    Raises:
        PearlError: anything a user can mend.
    """
    run = Run(runs_root() / config.id, config)
    show = show or Observer()
    if (run.path / "config.yaml").is_file():
        before = Run.open(run.path).config
        if before.model_dump(exclude={"about", "expected"}) != config.model_dump(exclude={"about", "expected"}):
            raise RunError(f"{run.path}: holds another configuration; move it away, or choose another PEARL_RUNS")
        if run.done:
            show.event("already_done", run=str(run.path))
            return run
    show.event("prepare", run=str(run.path), recipe=config.recipe, method=config.method["name"])
    try:
        build_method(config, structure_only=True)  # mistakes in it are cheaper to find before the images are decoded
        return _Session(run, prepare(config, show), device, show).go(stop_after)
    finally:
        show.close()


class _Session:
    """One process working on one run."""

    def __init__(self, run: Run, prepared: Prepared, device: str, show: Observer) -> None:
        self.run, self.config, self.prepared = run, run.config, prepared
        self.log = _Log(run.path / "events.jsonl", show)
        begun = run.path / "environment.json"
        # a run goes on in the precision it began with, on whatever machine
        precision = read_json(begun)["precision"] if begun.is_file() else None
        self.engine = Engine(self.config, device=device, precision=precision, observer=self.log)
        self.view = View(self.config.images, channels_last=self.config.engine.channels_last)
        self.evaluator = Evaluator(
            self.view,
            device=self.engine.fabric.device,
            batch_size=self.config.engine.eval_batch_size,
            autocast=self.engine.fabric.autocast,
        )

    def go(self, stop_after: int | None) -> Run:
        run, tasks = self.run, self.prepared.stream.tasks
        start = len(finished(run.path))
        method = self._begin() if start == 0 else self._restore(start)
        self.log.event(
            "run", run=str(run.path), tasks=len(tasks), done=start, classes=len(self.prepared.stream.classes)
        )
        for stage in range(len(run.results["stages"]), start):  # learnt, but not evaluated before the end came
            self._evaluate(self._restore(stage + 1), stage)
        for t in range(start, min(len(tasks), stop_after or len(tasks))):
            self._learn(method, t)
            self._evaluate(method, t)
        return Run(run.path, run.config)

    def _begin(self) -> Method:
        """Write what a run starts with."""
        path, prepared = self.run.path, self.prepared
        method = self.engine.place(build_method(self.config))
        write_file(path / "config.yaml", self.config.to_yaml().encode())
        write_json(path / "environment.json", environment(self.engine))
        write_json(path / "data.json", self._data_facts())
        write_json(path / "classes.json", {"format": FORMAT, "tasks": []})
        write_part(path / "reference", snapshot(method.state_dict()), {"parameters": method.size()})
        self.log.event("data", name=prepared.source.name, **self._data_facts())
        return method

    def _restore(self, tasks: int) -> Method:
        """The method after its first `tasks` tasks, if the data is still the same."""
        before = read_json(self.run.path / "data.json")
        if before["stream_sha256"] != self.prepared.stream.digest:
            raise RunError(
                f"{self.run.path}: was begun with other data (stream_sha256 in data.json differs); bring that data "
                f"back, or move the directory away to begin anew"
            )
        return load_method(self.run.path, self.config, tasks, place=self.engine.place)

    def _data_facts(self) -> dict[str, Any]:
        prepared = self.prepared
        return {
            "format": FORMAT,
            "source": prepared.source.name,
            "stream_sha256": prepared.stream.digest,
            "train_images": int(sum(len(task.train) for task in prepared.stream.tasks)),
            "test_images": int(sum(len(task.test) for task in prepared.stream.tasks)),
            "notes": dict(prepared.source.notes),
        }

    def _task(self, method: Method, t: int) -> Task:
        """Task t's data, for an oracle with that of all tasks before."""
        splits = self.prepared.stream.tasks[: t + 1]
        task = splits[-1]
        if not method.oracle:
            splits = splits[-1:]
        rows = np.concatenate([split.train for split in splits])
        labels = np.concatenate([split.train_labels for split in splits])
        images, device = self.prepared.train[rows], self.engine.fabric.device
        return Task(t, task.name, task.classes, task.first_class, images, labels, self.view, device)

    def _learn(self, method: Method, t: int) -> None:
        task, path = self._task(method, t), self.run.path
        before = snapshot(method.state_dict())
        self.log.event("task", task=t, name=task.name, classes=list(task.classes), images=len(task))
        started = time.perf_counter()
        seconds = self.engine.learn(method, task)
        added = changed(before, snapshot(method.state_dict()))
        seen = self.prepared.stream.tasks[: t + 1]
        names = [{"name": split.name, "classes": list(split.classes)} for split in seen]
        write_json(path / "classes.json", {"format": FORMAT, "tasks": names})
        facts = {
            "task": t,
            "name": task.name,
            "classes": list(task.classes),
            "parameters": method.size(),
            "seconds": {key: round(value, 2) for key, value in seconds.items()},
            **method.facts(t),
        }
        write_part(path / "tasks" / folder_name(t, task.name), added, facts)
        self.log.event("learnt", task=t, parameters=method.size(), seconds=round(time.perf_counter() - started, 2))

    def _evaluate(self, method: Method, t: int) -> None:
        started = time.perf_counter()
        splits = self.prepared.stream.tasks[: t + 1]
        tests = [
            TestSet(torch.from_numpy(self.prepared.test[split.test]), torch.from_numpy(split.test_labels))
            for split in splits
        ]
        classes = [len(split.classes) for split in splits]
        stage = self.evaluator.stage(method, tests, classes)
        results = self.run.results
        results["tasks"] = [*results["tasks"][:t], {"name": splits[t].name, "classes": list(splits[t].classes)}]
        entry = {
            **stage.to_json(),
            "parameters": method.size(),
            "isolation_parameters": isolation_size(method, classes),
            "evaluation_seconds": round(time.perf_counter() - started, 2),
        }
        results["stages"] = [*results["stages"][:t], entry]
        results["complete"] = t + 1 == len(self.prepared.stream.tasks)
        write_json(self.run.path / "results.json", results)
        right = {name: 100 * getattr(stage, name).sum() / stage.total.sum() for name in ("class_il", "task_il")}
        self.log.event("stage", task=t, **{key: round(float(value), 2) for key, value in right.items()})


class _Log(Observer):
    """Writes events.jsonl and passes everything on to a display."""

    def __init__(self, file: Path, show: Observer) -> None:
        self.file, self.show = file, show

    def event(self, kind: str, **facts: Any) -> None:
        """Append one line, and show it."""
        line = json.dumps({"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "event": kind, **facts})
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with self.file.open("a") as file:
                file.write(line + "\n")
        except OSError as error:
            raise RunError(
                f"{self.file}: cannot be written ({error.strerror}); free space or permissions there"
            ) from None
        self.show.event(kind, **facts)

    def step(self, done: int, total: int) -> None:
        """Pass on."""
        self.show.step(done, total)


def environment(engine: Engine) -> dict[str, Any]:
    """What a result depends on beside its configuration."""
    device = engine.fabric.device
    packages = ("torch", "torchvision", "timm", "lightning-fabric", "numpy", "safetensors")
    return {
        "format": FORMAT,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "pearl": __version__,
        "python": platform.python_version(),
        "packages": {name: metadata.version(name) for name in packages},
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name(),
        "precision": engine.precision,
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "commit": _commit(),
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _commit() -> str | None:
    """The commit of a source checkout; None for an installed package."""
    here = Path(__file__).parent
    try:
        shown = subprocess.run(
            ["git", "-C", str(here), "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return shown.stdout.strip()
