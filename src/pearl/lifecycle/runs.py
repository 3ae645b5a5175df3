"""A run is a directory named by its configuration: an equal configuration resumes it, or finds it done.

Its files are listed in `storage.run_directory`.
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
from pearl.storage.files import check_writable
from pearl.storage.inside import remove_tree
from pearl.storage.paths import runs_root
from pearl.storage.run_directory import RunDirectory
from pearl.storage.tabular import rows_as_html
from pearl.training.engine import Engine, Observer, is_out_of_memory
from pearl.training.phase_cache import PhaseCache
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
        """Open an existing run.

        Raises:
            RunError: not a run directory, or its configuration cannot be read.
        """
        config = read_config(path)
        if not isinstance(config, RunConfig):
            raise RunError(f"{path}: a model made by `pearl learn`, not a run; see it with: pearl inspect {path}")
        return cls(path, config)

    @property
    def directory(self) -> RunDirectory:
        """Its files."""
        return RunDirectory(self.path)

    @property
    def results(self) -> dict[str, Any]:
        """Return the counts of every finished stage; see `metrics.Counts.from_results`."""
        return self.directory.results

    @property
    def done(self) -> bool:
        """Return True if every task has been learnt and evaluated."""
        return self.directory.is_done

    @cached_property
    def counts(self) -> metrics.Counts:
        """Return the counts from which every metric is computed."""
        return metrics.Counts.from_results(self.results)

    @property
    def summary(self) -> dict[str, float]:
        """Return every metric by name; accuracies in percent."""
        stages = self.results["stages"]
        return metrics.summary(
            self.counts, [s["parameters"] for s in stages], [s["isolation_parameters"] for s in stages]
        )

    @property
    def mean_rank(self) -> float | None:
        """Return the mean rank over low-rank targets and tasks, weighted by rows + columns as parameters are; None
        without any.
        """
        return metrics.mean_rank([layer for manifest in self.manifests for layer in manifest.get("layers", [])])

    @property
    def manifests(self) -> list[dict[str, Any]]:
        """Return the records of each finished task."""
        return [manifest for _, manifest in self.directory.manifests()]


@dataclass
class Prepared:
    """Data ready for training: decoded, divided into tasks."""

    source: Source
    stream: Stream
    train: Images
    test: Images

    @cached_property
    def images_sha256(self) -> dict[str, str]:
        """Return digests of the pixels for training and of those for evaluation."""
        return {
            "train": self.train.sha256(self.stream.train_rows),
            "test": self.test.sha256(self.stream.test_rows),
        }


def prepare(config: RunConfig, show: Observer | None = None) -> Prepared:
    """Load the data, divide it into tasks and decode the images in use.

    Raises:
        DataError: data is missing or unusable; lists all unreadable images.
    """
    show = show or Observer()
    source: Source = SOURCES.build(config.data)
    stream = make_stream(source, config.stream, config.seed)
    splits = {"train": source.train, "test": source.test, "validation": source.validation or source.test}
    used = {"train": stream.train_rows}
    # held-out images belong to the training split too
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
    """A run ready for its next step, after all checks."""

    run: Run
    begun: bool  # its start is stored
    precision: Precision | None  # a run keeps its initial precision, on any machine
    method: Method
    prepared: Prepared
    phase_cache: PhaseCache | None  # phases of other runs


def ready(
    config: RunConfig,
    *,
    path: Path | None = None,
    devices: int = 1,
    show: Observer | None = None,
    world: World | None = None,
    weights: bool = True,
) -> Ready | None:
    """Read and build what a run needs, without writing; return None if the run is done.

    Without `weights` the network is random: for plans.

    Raises:
        PearlError: any user error.
    """
    world, show, method_name = world or World(), show or Observer(), config.method["name"]
    if devices > 1 and (why := _alone(METHODS.load(method_name))):  # type: ignore[arg-type]
        raise ConfigError(f"--devices {devices}: method={method_name} {why}; leave --devices out")
    run = Run(path or runs_root() / config.id, config)
    if run.directory.config_file.is_file():
        before = Run.open(run.path).config
        if before.decides != config.decides:
            raise RunError(f"{run.path}: holds another configuration; move it away, or choose another PEARL_RUNS")
        run.directory.check_no_gap()
        if run.done:
            remove_tree(run.directory.resume_folder, run.path)  # a last removal may have failed
            show.event("already_done", run=str(run.path))
            return None
    elif run.directory.finished:
        raise RunError(f"{run.directory.config_file}: missing, though tasks are there; restore it, or move them away")
    check_writable(run.path)
    phase_cache = PhaseCache.of(config, world)
    show.event("prepare", run=str(run.path), recipe=config.recipe, method=method_name)
    precision = run.directory.environment.get("precision")
    # before decoding images: errors here are cheaper to find
    begun = run.directory.reference_manifest.is_file()  # the last file written at a run's start
    with world.first_on_each_machine():
        method = build_method(config, structure_only=begun or not weights)
        if config.stream.domains and not method.allows_repeated_classes:
            raise ConfigError(
                f"stream.domains: method={method_name} learns a class once; choose finetune, joint or er, or one with "
                f"method.classifier=statistics"
            )
        prepared = prepare(config, show)
    if begun:
        _check_same_data(run.path, prepared)
    return Ready(run, begun, precision, method, prepared, phase_cache)


def _alone(kind: type[Method]) -> str | None:
    """Return the reason why several processes cannot train a method as one does; None if they can."""
    if kind.rehearsal:
        return "stores images, which each process would draw separately"
    return "needs whole batches, of which each process has a part" if kind.batch_coupled else None


def _check_same_data(path: Path, prepared: Prepared) -> None:
    """Refuse to resume a run with other data."""
    before = RunDirectory(path).data
    other = [
        f"{name} images"
        for name, digest in prepared.images_sha256.items()
        if before["images_sha256"].get(name) != digest
    ]
    if before["stream_sha256"] != prepared.stream.digest:
        other = ["rows, labels or class names"]  # the images differ then, too
    if other:
        raise RunError(
            f"{path}: was started with other data ({' and '.join(other)} differ from data.json); restore that data, "
            f"or move the directory away to start again"
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
    """Run a configuration to its end, starting from the state of its directory.

    `path` is the directory (default: by the configuration's id, below the runs folder); `minutes` are between two
    checkpoints. `stop_after` ends it early, after this many tasks in total; the next call resumes. With several
    `devices` every process calls this, and the first one writes (see `world`). `precision` is for a new run; `engine`
    replaces the usual one, which uses the phase cache (see `training.phase_cache`).

    Raises:
        PearlError: any user error.
    """
    world = World.join(device, devices)
    show = show if show and world.first else Observer()
    path = path or runs_root() / config.id
    try:
        with world.watched():
            if made := ready(config, path=path, devices=world.size, show=show, world=world):
                again = resume_command(path, config) + f" --devices {devices}" * (devices > 1)
                usual = partial(Engine, phase_cache=made.phase_cache)
                arguments: dict[str, Any] = {"precision": made.precision or precision, "minutes": minutes, "show": show}
                arguments |= {"again": again, "device": device, "world": world, "engine": engine or usual}
                with session(path, config, **arguments) as work:
                    _Work(made, work).go(stop_after)
    finally:
        show.close()
    return Run(path, config)


class _Work:
    """The tasks of a stream for a session, each evaluated after training."""

    def __init__(self, made: Ready, work: Session) -> None:
        self.run, self.prepared, self.made, self.session = made.run, made.prepared, made, work
        run = made.run
        self.view = View(run.config.images, channels_last=run.config.engine.channels_last)
        self.evaluator = Evaluator(
            self.view,
            device=work.engine.device,
            batch_size=run.config.engine.eval_batch_size,
            autocast=work.engine.fabric.autocast,
        )

    def go(self, stop_after: int | None) -> None:
        run, stream, world = self.run, self.prepared.stream, self.session.world
        start = world.same(len(run.directory.finished))
        method = self._restore(start) if self.made.begun else self._begin(self.made.method)
        self.session.log.event(
            "run", run=str(run.path), tasks=len(stream.tasks), done=start, classes=len(stream.classes)
        )
        evaluated = len(run.results["stages"]) if world.first else start
        for stage in range(evaluated, start):  # learnt, but interrupted before its evaluation
            self._evaluate(self._restore(stage + 1), stage)
        for t in range(start, min(len(stream.tasks), stop_after or len(stream.tasks))):
            known = [name for name in stream.shown(t) if name not in stream.tasks[t].classes]
            self.session.learn(method, self._task(method, t), also=known)
            if world.first:
                self._evaluate(method, t)

    def _begin(self, method: Method) -> Method:
        """Write the files of a run's start."""
        if self.session.world.first:
            facts = self._data_facts()
            self.run.directory.write(self.run.directory.data_file, facts)
            self.session.log.event("data", name=self.prepared.source.name, **facts)
        return self.session.begin(method)

    def _restore(self, tasks: int) -> Method:
        """Return the method after its first `tasks` tasks."""
        return load_method(self.run.path, self.run.config, tasks, to_device=self.session.engine.to_device)

    def _data_facts(self) -> dict[str, Any]:
        prepared = self.prepared
        return {
            "source": prepared.source.name,
            "stream_sha256": prepared.stream.digest,
            "images_sha256": prepared.images_sha256,
            "train_images": int(sum(len(task.train) for task in prepared.stream.tasks)),
            "test_images": int(sum(len(task.test) for task in prepared.stream.tasks)),
            "notes": dict(prepared.source.notes),
        }

    def _task(self, method: Method, t: int) -> Task:
        """Return task t's data, for an oracle with that of all tasks before."""
        splits = self.prepared.stream.tasks[: t + 1]
        task = splits[-1]
        if not method.oracle:
            splits = splits[-1:]
        images = np.concatenate([split.train_images(self.prepared.train) for split in splits])
        labels = np.concatenate([split.train_labels for split in splits])
        device = self.session.engine.device
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
        self.run.directory.write(self.run.directory.results_file, results)
        right = {name: 100 * getattr(stage, name).sum() / stage.total.sum() for name in ("class_il", "task_il")}
        self.session.log.event("stage", task=t, **{key: round(float(value), 2) for key, value in right.items()})
