"""A run with hidden task boundaries: images arrive in batches, and accuracy is measured on the way.

The state after each evaluation is stored. All random numbers are a function of the seed and of the number of images
seen, so that a run that was killed at any image repeats what was lost, bit by bit.

RUN/online/            the state after the last evaluation, see `state`
RUN/results.json       the curve, when the stream has ended; the state at its end stays
"""

import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pearl.data.batches import derive_seed
from pearl.data.protocols import arrival_stages
from pearl.errors import RunError
from pearl.evaluation.online_metrics import Point, summary
from pearl.lifecycle.runs import prepare
from pearl.lifecycle.saved import read_config, resume_command
from pearl.lifecycle.session import Session, session
from pearl.online.state import begin, build_learner, restore, store
from pearl.settings.config import OnlineRunConfig
from pearl.storage.checkpoint import read_part, snapshot
from pearl.storage.paths import runs_root
from pearl.storage.run_directory import RunDirectory
from pearl.training.engine import Observer

LONG = 60.0  # seconds of learning after which the state is stored


@dataclass
class Arrivals:
    """The images of a stream in order of arrival, and the test images.

    Classes are numbered in order of first appearance.
    """

    images: np.ndarray  # (N, H, W, 3) uint8
    labels: np.ndarray  # (N,)
    test_images: np.ndarray  # class by class, in order of appearance
    test_labels: np.ndarray
    names: tuple[str, ...]  # of the classes
    ends: tuple[int, ...] = ()  # images seen at the end of each stage, if the boundaries are given

    @classmethod
    def of(cls, config: OnlineRunConfig, show: Observer) -> tuple["Arrivals", dict[str, Any]]:
        """Load the data and put it in order; also return the digests of the pixels and of the order."""
        made = prepare(config, show)
        task = made.stream.tasks[0]
        in_file = np.argsort(task.train, kind="stable")  # protocols are defined on the data set's order
        stages = arrival_stages(task.train_labels[in_file], len(task.classes), config.online, config.seed)
        order = in_file[np.concatenate(stages)]
        given = config.online.boundaries == "given"
        ends = tuple(np.cumsum([*map(len, stages)]).tolist()) if given else ()
        labels = task.train_labels[order]
        present, first = np.unique(labels, return_index=True)
        shown = present[np.argsort(first)]
        number = np.full(len(task.classes), -1)
        number[shown] = np.arange(len(shown))
        of_test = number[task.test_labels]
        by_class = np.argsort(of_test, kind="stable")
        by_class = by_class[of_test[by_class] >= 0]  # protocols may leave out classes
        test = made.stream.test_images(0, made.test)[by_class], of_test[by_class]
        names = tuple(task.classes[c] for c in shown)
        facts: dict[str, Any] = {
            "images_sha256": made.images_sha256,
            "stream_sha256": made.stream.digest,
            "source": made.source.name,
        }
        facts |= {"train_images": len(order), "test_images": len(test[1]), "notes": dict(made.source.notes)}
        return cls(task.train_images(made.train)[order], number[labels], *test, names, ends), facts


class OnlineRun:
    """A finished or unfinished run on disk."""

    def __init__(self, path: Path, config: OnlineRunConfig) -> None:
        self.path, self.config = path, config

    @property
    def directory(self) -> RunDirectory:
        """Its files."""
        return RunDirectory(self.path)

    @property
    def results(self) -> dict[str, Any]:
        """Return the curve, facts and class names so far, of the newest stored state that is intact."""
        for folder in reversed(self.directory.online_states):
            with suppress(RunError):
                return dict(read_part(folder)[1]["online"])
        return {"curve": [], "facts": {}, "names": []}

    @property
    def done(self) -> bool:
        """Return True if the stream has ended."""
        return "online" in self.directory.results

    @property
    def curve(self) -> list[Point]:
        """Return the evaluations, in order."""
        return [Point.from_json(point) for point in self.results["curve"]]

    @property
    def summary(self) -> dict[str, float]:
        """Return the metrics by name; accuracies in percent."""
        return summary(self.results)


def execute(
    config: OnlineRunConfig,
    *,
    path: Path | None = None,
    device: str = "auto",
    show: Observer | None = None,
    stop_at: int | None = None,
) -> OnlineRun:
    """Run a configuration to its end, starting from the newest stored state.

    `stop_at` ends it early, after the batch that reaches this many images.

    Raises:
        PearlError: any user error.
    """
    show, path = show or Observer(), path or runs_root() / config.id
    run = OnlineRun(path, config)
    try:
        if run.done:
            show.event("already_done", run=str(path))
            return run
        directory = RunDirectory(path)
        begun = directory.config_file.is_file()
        if begun and getattr(read_config(path), "decides", None) != config.decides:
            raise RunError(f"{path}: holds another configuration; move it away, or choose another PEARL_RUNS")
        show.event("prepare", run=str(path), recipe=config.recipe, method=config.learns)
        arrivals, facts = Arrivals.of(config, show)
        precision = directory.environment.get("precision")
        if begun and directory.data_file.is_file() and directory.data["images_sha256"] != facts["images_sha256"]:
            raise RunError(f"{path}: was started with other data; restore that data, or move the directory away")
        again = resume_command(path, config)
        with session(path, config, again=again, device=device, precision=precision, show=show) as work:
            directory.write(directory.data_file, facts)
            _Stream(run, arrivals, work).go(stop_at)
    finally:
        show.close()
    return run


class _Stream:
    """The stream of a session: batches in order, evaluations on the way, and the state after each."""

    def __init__(self, run: OnlineRun, arrivals: Arrivals, work: Session) -> None:
        self.run, self.arrivals, self.work = run, arrivals, work
        self.learner = build_learner(run.config, work.engine, work.resume)
        self.start = snapshot(self.learner.state_dict())
        self.tests: dict[str, list[Tensor]] = {}  # features of test images, of networks that have not changed
        self.curve: list[Point] = []
        self.seconds, self.longest, self.evaluation_seconds, self.seen = 0.0, 0.0, 0.0, 0

    def go(self, stop_at: int | None) -> None:
        online, labels = self.run.config.online, torch.from_numpy(self.arrivals.labels)
        self._restore()
        count = len(labels)
        self.work.log.event("stream", images=count, done=self.seen, classes=len(self.arrivals.names))
        while self.seen < min(count, stop_at or count):
            end = next((end for end in self.arrivals.ends if end > self.seen), count)
            rows = slice(self.seen, min(self.seen + online.batch_size, end))
            torch.manual_seed(derive_seed(self.run.config.seed, "observe", self.seen))
            started = time.perf_counter()
            self.learner.observe(torch.from_numpy(self.arrivals.images[rows]), labels[rows])
            if rows.stop in self.arrivals.ends:
                self.learner.boundary()
            took = time.perf_counter() - started
            before, self.seen = self.seen, rows.stop
            self.seconds, self.longest = self.seconds + took, max(self.longest, took)
            self.work.log.step(self.seen, count)
            regular = self.seen // online.evaluate_every > before // online.evaluate_every or self.seen == count
            evaluated = regular or self.seen.bit_length() > before.bit_length()
            if evaluated:
                self._evaluate(regular=regular)
            if evaluated or took > LONG:
                self._store()
        if self.seen == count:
            directory = self.run.directory
            directory.write(
                directory.results_file, {"tasks": [], "stages": [], "complete": True, "online": self._results()}
            )

    def _evaluate(self, *, regular: bool) -> None:
        """Count correct predictions on the test images of the classes seen so far."""
        started, learner, arrivals = time.perf_counter(), self.learner, self.arrivals
        size, classes = self.run.config.engine.eval_batch_size, int(learner.classes)
        count = int(np.searchsorted(arrivals.test_labels, classes))
        with torch.no_grad():
            networks = learner.networks()
            self.tests = {key: [*self.tests.get(key, [])] for key in networks}
            for key, network in networks.items():
                done = sum(map(len, self.tests[key]))
                new = torch.from_numpy(arrivals.test_images[done:count])
                self.tests[key] += [network(part) for part in new.split(size) if len(part)]
            parts = zip(*(torch.cat(of_class).split(size) for of_class in self.tests.values()), strict=True)
            best = torch.cat([learner.scores(part).argmax(1).cpu() for part in parts]).numpy()
        truth = arrivals.test_labels[:count]
        total, right = (np.bincount(some, minlength=classes) for some in (truth, truth[best == truth]))
        self.curve.append(Point(self.seen, total, right, regular))
        self.evaluation_seconds += time.perf_counter() - started
        point = self.curve[-1]
        self.work.log.event("online", seen=self.seen, classes=classes, accuracy=round(point.accuracy, 2))

    def _results(self) -> dict[str, Any]:
        learner = self.learner
        statistics = sum(b.nbytes for name, b in learner.named_buffers() if not name.startswith("method.backbone"))
        facts = {
            "classes": int(learner.classes),
            "passes": learner.passes(),
            "images_bytes": learner.images_bytes(),
            "statistics_bytes": statistics - learner.images_bytes(),
            "seconds_per_image": self.seconds / max(1, self.seen),
            "longest_pause_seconds": self.longest,
            "evaluation_seconds": self.evaluation_seconds,
            **learner.facts(),
        }
        return {"curve": [point.to_json() for point in self.curve], "facts": facts, "names": [*self.arrivals.names]}

    def _store(self) -> None:
        spent = {"seconds": self.seconds, "longest": self.longest, "evaluation": self.evaluation_seconds}
        store(self.run.path, self.learner, self.start, self.seen, {"spent": spent, "online": self._results()})

    def _restore(self) -> None:
        """Continue from the newest stored state, or begin."""
        if not self.run.directory.reference_manifest.is_file():
            begin(self.work, self.learner)
        elif stored := restore(self.run.path, self.learner, self.start):
            self.seen, spent = stored["seen"], stored["spent"]
            self.curve = [Point.from_json(point) for point in stored["online"]["curve"]]
            self.seconds, self.longest = spent["seconds"], spent["longest"]
            self.evaluation_seconds = spent["evaluation"]
