"""A run is a directory named by its configuration: same configuration, same directory, resumed or already done.

RUN/config.yaml         resolved configuration          RUN/environment.json   versions, device, threads, commit
RUN/data.json           source, split and digests of the data
RUN/classes.json        names in order of arrival, per task, as in the manifests; append-only
RUN/reference/          the method's state before the first task
RUN/tasks/000-NAME/     what task 0 added or changed, with thresholds, ranks, parameters, seconds
RUN/results.json        counts per stage, task and class; every metric is derived from them
RUN/events.jsonl        one line per phase and epoch    RUN/resume/     moments of the task that is being learnt
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pearl.data.augment import View
from pearl.data.batches import Task
from pearl.data.cache import Images, decode_rows
from pearl.data.decoding import Decoding
from pearl.data.sources import Source
from pearl.data.stream import Stream, make_stream
from pearl.errors import ConfigError, DataError, RunError, TrainingError, counted, printable
from pearl.evaluation import metrics
from pearl.evaluation.evaluate import Evaluator, TestSet
from pearl.lifecycle.saved import build_method, isolation_size, load_method, read_config, resume_command
from pearl.lifecycle.session import Precision, Session, session
from pearl.methods.base import Method
from pearl.settings.config import RunConfig
from pearl.settings.parts import METHODS, SOURCES
from pearl.storage.files import (
    FORMAT,
    MANIFEST,
    check_no_gap,
    check_writable,
    done,
    finished,
    manifests,
    read_json,
    write_json,
)
from pearl.storage.inside import remove_tree
from pearl.storage.paths import runs_root
from pearl.storage.shapes import Data, Environment, Results
from pearl.storage.sheets import rows_as_html
from pearl.training.engine import Engine, Observer, is_out_of_memory
from pearl.training.kept import Kept
from pearl.training.world import World


@dataclass(repr=False)
class Run:
    """A run directory."""

    path: Path
    config: RunConfig

    def __repr__(self) -> str:
        stages = self.results["stages"]
        accuracy = f", class-IL {self.summary['class_il.final']:.2f} %" if stages else ""
        done = f"{counted(len(stages), 'task')}{'' if self.done else ' so far'}"
        return f"Run({printable(str(self.path))}: {done}{accuracy})"

    def _repr_html_(self) -> str:
        rows = [["task", "class-IL (%)", "task-IL (%)"]]
        if self.results["stages"]:
            last = (metrics.accuracy_matrix(self.counts, scenario)[:, -1] for scenario in metrics.SCENARIOS)
            named = zip(self.results["tasks"], *last, strict=True)
            rows += [[task["name"], *(f"{value:.2f}" for value in values)] for task, *values in named]
        return f"<p>{escape(repr(self))}</p>{rows_as_html(rows)}"

    @classmethod
    def open(cls, path: Path) -> "Run":
        """A run that exists.

        Raises:
            RunError: not a run directory, or its configuration cannot be read.
        """
        config = read_config(path)
        if not isinstance(config, RunConfig):
            raise RunError(f"{path}: a model made by `pearl learn`, not a run; see it with: pearl inspect {path}")
        return cls(path, config)

    @property
    def results(self) -> dict[str, Any]:
        """Counts of every finished stage; see `metrics.Counts.from_results`."""
        file = self.path / "results.json"
        return read_json(file, Results) if file.exists() else {"format": FORMAT, "tasks": [], "stages": []}

    @property
    def done(self) -> bool:
        """Whether every task has been learnt and evaluated."""
        return done(self.path)

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
        return [manifest for _, manifest in manifests(self.path)]


@dataclass
class Prepared:
    """Data ready to learn from: decoded, cut into tasks."""

    source: Source
    stream: Stream
    train: Images
    test: Images

    @cached_property
    def images_sha256(self) -> dict[str, str]:
        """Digests of the pixels that are learnt from and of those evaluated on."""
        return {
            "train": self.train.sha256(self.stream.train_rows),
            "test": self.test.sha256(self.stream.test_rows),
        }


def prepare(config: RunConfig, show: Observer | None = None) -> Prepared:
    """Load the data, cut it into tasks and decode the images that these use.

    Raises:
        DataError: data missing or unusable; those of its images that cannot be read are listed together.
    """
    show = show or Observer()
    source: Source = SOURCES.build(config.data)
    stream = make_stream(source, config.stream, config.seed)
    splits = {"train": source.train, "test": source.test, "validation": source.validation or source.test}
    used = {"train": stream.train_rows}
    # held-out images are of the training split too
    used[stream.test_from] = np.union1d(used.get(stream.test_from, stream.test_rows), stream.test_rows)
    decoded: dict[str, Images] = {}
    problems, decoding = [], Decoding.of(config.images)
    for name, rows in used.items():
        show.event("decode", split=name, images=len(rows))
        try:
            decoded[name] = decode_rows(splits[name], rows, config.images.stored, decoding, on_progress=show.step)
        except DataError as error:
            problems.append(str(error))
    if problems:
        raise DataError("\n".join(problems))
    for line in decoding.notes():
        show.event("note", text=line)
    shorter = min(decoded["train"].pixels.shape[1:3])
    if config.images.augment == "crop" and shorter != config.images.size:
        raise DataError(
            f"images.augment=crop needs images of the network's size {config.images.size}, these are {shorter} pixels; "
            f"set images.size={shorter}, or use images.augment=resized_crop"
        )
    return Prepared(source, stream, decoded["train"], decoded[stream.test_from])


@dataclass
class Ready:
    """A run as it is before its next step: all that may be wrong with it has been looked for."""

    run: Run
    begun: bool  # its start is stored
    precision: Precision | None  # a run goes on in the one it began with, on whatever machine
    method: Method
    prepared: Prepared
    kept: Kept | None  # phases that other runs have trained


def ready(
    config: RunConfig,
    *,
    path: Path | None = None,
    devices: int = 1,
    show: Observer | None = None,
    world: World | None = None,
    weights: bool = True,
) -> Ready | None:
    """Read and build what a run needs, and write nothing; None if nothing is left to do.

    Without `weights` the network keeps its random ones: for a look at shapes.

    Raises:
        PearlError: anything a user can mend.
    """
    world, show, method_name = world or World(), show or Observer(), config.method["name"]
    if devices > 1 and (why := _alone(METHODS.load(method_name))):  # type: ignore[arg-type]
        raise ConfigError(f"--devices {devices}: method={method_name} {why}; leave --devices out")
    run = Run(path or runs_root() / config.id, config)
    if (run.path / "config.yaml").is_file():
        before = Run.open(run.path).config
        if before.decides != config.decides:
            raise RunError(f"{run.path}: holds another configuration; move it away, or choose another PEARL_RUNS")
        check_no_gap(run.path)
        if run.done:
            remove_tree(run.path / "resume", run.path)  # a last removal may have failed
            show.event("already_done", run=str(run.path))
            return None
    elif finished(run.path):
        raise RunError(f"{run.path}/config.yaml: missing, though tasks are there; restore it, or move them away")
    check_writable(run.path)
    kept = Kept.of(config, world)
    show.event("prepare", run=str(run.path), recipe=config.recipe, method=method_name)
    environment = run.path / "environment.json"
    precision = read_json(environment, Environment)["precision"] if environment.is_file() else None
    # before the images are decoded: mistakes in it are cheaper to find
    begun = (run.path / "reference" / MANIFEST).is_file()  # the last file of what a run starts with
    with world.first_on_each_machine():
        method = build_method(config, structure_only=begun or not weights)
        if config.stream.domains and not method.shown_again:
            raise ConfigError(
                f"stream.domains: method={method_name} learns a class once; choose finetune, joint or er, or one with "
                f"method.classifier=chain"
            )
        prepared = prepare(config, show)
    if begun:
        _check_same_data(run.path, prepared)
    return Ready(run, begun, precision, method, prepared, kept)


def _alone(kind: type[Method]) -> str | None:
    """Why several processes cannot learn by a method as one does."""
    if kind.rehearsal:
        return "keeps images, which each process would draw for itself"
    return "learns from a batch as a whole, of which each process has a part" if kind.couples else None


def _check_same_data(path: Path, prepared: Prepared) -> None:
    """Refuse to go on with other data than a run was begun with."""
    before = read_json(path / "data.json", Data)
    other = [
        f"{name} images"
        for name, digest in prepared.images_sha256.items()
        if before["images_sha256"].get(name) != digest
    ]
    if before["stream_sha256"] != prepared.stream.digest:
        other = ["rows, labels or class names"]  # then there are other images too
    if other:
        raise RunError(
            f"{path}: was begun with other data ({' and '.join(other)} differ from data.json); bring that data back, "
            f"or move the directory away to begin anew"
        )


def execute(
    config: RunConfig,
    *,
    path: Path | None = None,
    device: str = "auto",
    devices: int = 1,
    show: Observer | None = None,
    minutes: float = 10.0,
    stop_after: int | None = None,
    precision: Precision | None = None,
    engine: Callable[..., Engine] | None = None,
) -> Run:
    """Run a configuration to its end, from where its directory stands.

    `path` is the directory (default: by the configuration's id, below the runs folder); `minutes` between two stored
    moments of training. `stop_after` ends it early, after so many tasks in all; the next call goes on. With several
    `devices` every process of them calls this, and the first one writes (see `world`). A new run has this `precision`
    if one is given, and may be learnt by another `engine`; by the usual one, phases that another run has trained are
    taken from where it kept them (see `training.kept`).

    Raises:
        PearlError: anything a user can mend.
    """
    world = World.join(device, devices)
    show = show if show and world.first else Observer()
    path = path or runs_root() / config.id
    try:
        with world.watched():
            if made := ready(config, path=path, devices=world.size, show=show, world=world):
                again = resume_command(path, config) + f" --devices {devices}" * (devices > 1)
                usual = partial(Engine, kept=made.kept)
                how: dict[str, Any] = {"precision": made.precision or precision, "minutes": minutes, "show": show}
                how |= {"again": again, "device": device, "world": world, "engine": engine or usual}
                with session(path, config, **how) as work:
                    _Work(made, work).go(stop_after)
    finally:
        show.close()
    return Run(path, config)


class _Work:
    """What a run adds to a session: tasks out of a stream, each evaluated once it is learnt."""

    def __init__(self, made: Ready, work: Session) -> None:
        self.run, self.prepared, self.made, self.session = made.run, made.prepared, made, work
        run = made.run
        self.view = View(run.config.images, channels_last=run.config.engine.channels_last)
        self.evaluator = Evaluator(
            self.view,
            device=work.engine.fabric.device,
            batch_size=run.config.engine.eval_batch_size,
            autocast=work.engine.fabric.autocast,
        )

    def go(self, stop_after: int | None) -> None:
        run, stream, world = self.run, self.prepared.stream, self.session.world
        start = world.same(len(finished(run.path)))
        method = self._restore(start) if self.made.begun else self._begin(self.made.method)
        self.session.log.event(
            "run", run=str(run.path), tasks=len(stream.tasks), done=start, classes=len(stream.classes)
        )
        evaluated = len(run.results["stages"]) if world.first else start
        for stage in range(evaluated, start):  # learnt, but not evaluated before the end came
            self._evaluate(self._restore(stage + 1), stage)
        for t in range(start, min(len(stream.tasks), stop_after or len(stream.tasks))):
            known = [name for name in stream.shown(t) if name not in stream.tasks[t].classes]
            self.session.learn(method, self._task(method, t), also=known)
            if world.first:
                self._evaluate(method, t)

    def _begin(self, method: Method) -> Method:
        """Write what a run starts with."""
        if self.session.world.first:
            facts = self._data_facts()
            write_json(self.run.path / "data.json", facts)
            self.session.log.event("data", name=self.prepared.source.name, **facts)
        return self.session.begin(method)

    def _restore(self, tasks: int) -> Method:
        """The method after its first `tasks` tasks."""
        return load_method(self.run.path, self.run.config, tasks, place=self.session.engine.place)

    def _data_facts(self) -> dict[str, Any]:
        prepared = self.prepared
        return {
            "format": FORMAT,
            "source": prepared.source.name,
            "stream_sha256": prepared.stream.digest,
            "images_sha256": prepared.images_sha256,
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
        images = np.concatenate([split.train_images(self.prepared.train) for split in splits])
        labels = np.concatenate([split.train_labels for split in splits])
        device = self.session.engine.fabric.device
        return Task(t, task.name, task.classes, task.first_class, images, labels, self.view, device)

    def _evaluate(self, method: Method, t: int) -> None:
        started = time.perf_counter()
        splits = self.prepared.stream.tasks[: t + 1]
        tests = [
            TestSet(
                torch.from_numpy(self.prepared.stream.test_images(i, self.prepared.test)),
                torch.from_numpy(split.test_labels),
            )
            for i, split in enumerate(splits)
        ]
        shown = [split.shown for split in splits]
        try:
            stage = self.evaluator.stage(method, tests, shown)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise TrainingError("out of memory while evaluating; lower engine.eval_batch_size") from None
        results = self.run.results
        domain = {"domain": splits[t].domain} if self.run.config.stream.domains else {}
        task = {"name": splits[t].name, "classes": self.prepared.stream.shown(t), **domain}
        results["tasks"] = [*results["tasks"][:t], task]
        entry = {
            **stage.to_json(),
            "parameters": method.size(),
            "isolation_parameters": isolation_size(method, [len(classes) for classes in shown]),
            "evaluation_seconds": round(time.perf_counter() - started, 2),
        }
        results["stages"] = [*results["stages"][:t], entry]
        results["complete"] = t + 1 == len(self.prepared.stream.tasks)
        write_json(self.run.path / "results.json", results)
        right = {name: 100 * getattr(stage, name).sum() / stage.total.sum() for name in ("class_il", "task_il")}
        self.session.log.event("stage", task=t, **{key: round(float(value), 2) for key, value in right.items()})
