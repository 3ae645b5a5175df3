"""A model that learns from a stream: images with class names as they come, each seen once.

The directory has the files of a model, without tasks; the state and the names of the classes are in its newest stored
state (`state`), which is complete or absent: after a kill the model is as it was after the last stored batch. The files
that were taken up are in a journal, see `storage.arrivals`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pearl.data.batches import derive_seed
from pearl.data.decoding import Decoding
from pearl.data.images import Picture, in_batches, is_one, read_all
from pearl.data.inputs import given
from pearl.errors import ConfigError, DataError, Interrupted, RunError, counted, printable
from pearl.lifecycle.choices import LearnOptions, config_for
from pearl.lifecycle.evaluation import UNKNOWN_RATE
from pearl.lifecycle.model import Prediction
from pearl.lifecycle.saved import read_config
from pearl.lifecycle.session import Session, session
from pearl.online.arriving import UNLABELLED, check_source, listed, polls
from pearl.online.learner import Learner
from pearl.online.state import begin, build_learner, restore, store
from pearl.settings.config import ModelConfig, OnlineModelConfig, check_config, merge, raw_config
from pearl.storage import arrivals
from pearl.storage.arrivals import Arrived, Journal
from pearl.storage.checkpoint import snapshot
from pearl.storage.run_directory import RunDirectory
from pearl.storage.stored_task import StoredTask
from pearl.training.engine import Engine, Observer

BATCH = 64


@dataclass(frozen=True)
class Intake:
    """Counts of the images that were taken up from a stream at once, and are stored."""

    learnt: int = 0  # labelled images
    scored: int = 0  # images without a class
    unknown: int = 0  # of these, those that look unknown
    problems: tuple[str, ...] = ()  # a line for each file that cannot be read

    def __add__(self, other: "Intake") -> "Intake":
        """Return both together."""
        counts = self.learnt + other.learnt, self.scored + other.scored, self.unknown + other.unknown
        return Intake(*counts, self.problems + other.problems)


class StreamModel:
    """A model on disk that learns from labelled images as they come. `pearl.stream` creates or opens it."""

    tasks: Sequence[StoredTask] = ()  # a model of a stream has none

    def __init__(self, path: Path, config: OnlineModelConfig, *, device: str = "auto") -> None:
        self.path, self.config, self.device = path, config, device
        self._load()

    def _load(self) -> None:
        """Take over the newest stored state, or begin."""
        self.learner: Learner = build_learner(self.config, Engine(self.config, device=self.device, precision="fp32"))
        self._start: dict[str, Tensor] = snapshot(self.learner.state_dict())
        manifest = restore(self.path, self.learner, self._start)
        if not manifest and RunDirectory(self.path).config_file.exists() and RunDirectory(self.path).online_states:
            raise RunError(f"{self.path}: its stored state is damaged; restore it from a copy")
        self._ahead = False  # of the stored state
        self.seen: int = manifest.get("seen", 0)
        self.classes: list[str] = list(manifest.get("classes", []))
        self._taken: int = manifest.get("taken", 0)
        self._unreadable: list[list[Any]] = manifest.get("unreadable", [])

    def __repr__(self) -> str:
        what = f"{self.config.online.learner['name']} on {self.config.backbone['name']}"
        return (
            f"StreamModel({printable(str(self.path))}: {what}, {counted(self.seen, 'image')}, "
            f"{counted(len(self.classes), 'class')})"
        )

    # ------------------------------------------------------------------------------------------------- learning

    def observe(self, images: Picture | Iterable[Picture], labels: Any, *, show: Observer | None = None) -> None:
        """Learn from an image and its class name, or from several and their names, and store the model.

        Images are as for `predict`. A new name is a new class, which can be predicted at once.

        Raises:
            DataError: an unusable image or label; nothing is learnt.
        """
        pictures, names = ([images], [labels]) if is_one(images) else (images, labels)
        inputs = given((list(pictures), list(names)), self.config.images.stored, part="train")  # type: ignore[arg-type]
        with self._session(show) as work:
            self._learn(work, np.asarray(inputs.images), [inputs.classes[label] for label in inputs.labels])

    def observe_files(self, data: str | Path, *, unlabelled: str = UNLABELLED, show: Observer | None = None) -> Intake:
        """Learn from the new images of a .csv in its order, or of a folder per class in the order of their time stamps.

        Images that were learnt before, by their path and class, are left out. Images directly in the folder, or in the
        one named `unlabelled`, are scored. The model is stored after each 64 images.

        Raises:
            DataError: no such file or folder, or no image.
        """
        there = listed(Path(data), unlabelled)
        with self._session(show) as work:
            return sum(self._take(work, self._journal(), there, there), Intake())

    def watch(
        self, folder: str | Path, *, every: float = 5.0, unlabelled: str = UNLABELLED, show: Observer | None = None
    ) -> Iterator[Intake]:
        """Learn as `observe_files` from a folder, and then from the files that appear in it, without end.

        The folder is read every so many seconds. A file is taken up once it has not changed between two readings. New
        files are learnt after older ones, whatever their time stamps. While the model watches, no other process can
        change it.

        Yields:
            What was taken up, after each batch of up to 64 images, when it is stored.

        Raises:
            ConfigError: `every` is not positive.
            DataError: it is not a folder.
            Interrupted: by Ctrl-C or a signal; the model is as after the last batch.
        """
        check_source(Path(folder), every)  # before anything is written
        with self._session(show) as work:
            journal = self._journal()
            for there, complete in polls(Path(folder), every, unlabelled):
                yield from self._take(work, journal, there, complete)

    def _journal(self) -> Journal:
        return Journal(self.path, self._taken, self._unreadable)

    def _take(
        self, work: Session, journal: Journal, there: Sequence[Arrived], ready: Sequence[Arrived]
    ) -> Iterator[Intake]:
        """Learn from the new ones of the `ready` files, then score those without a class; `there` are all files."""
        labelled = [one for one in ready if one.name]
        done, total = 0, len(labelled)
        for batch in journal.batches(there, labelled, BATCH):
            read, pixels, problems = self._read(batch)
            for one in batch:
                journal.unreadable.pop(one.key, None)
            journal.unreadable |= {one.key: one.stamp for one in batch if Path(one.file) not in read}
            self._unreadable = [[*key, *stamp] for key, stamp in journal.unreadable.items()]
            self._taken += len(batch)
            names = {Path(one.file): one.name for one in batch}
            self._learn(work, pixels, [names[file] for file in read])
            done += len(batch)
            work.log.step(done, max(done, total))
            yield Intake(learnt=len(read), problems=tuple(problems))
        yield from self._score([one for one in ready if not one.name])

    def _read(self, files: Sequence[Arrived]) -> tuple[list[Path], np.ndarray, list[str]]:
        return read_all([Path(one.file) for one in files], self.config.images.stored, Decoding.of(self.config.images))

    @contextmanager
    def _session(self, show: Observer | None) -> Iterator[Session]:
        """Hold the model for this process. After an error or an interruption the model is as it is stored."""
        with session(
            self.path, self.config, again="the same command", device=self.device, precision="fp32", show=show
        ) as work:
            if work.directory.online_manifest.get("seen", 0) != self.seen:  # another process has learnt since
                self._load()
            self.learner.setup.engine.observer = work.log
            try:
                yield work
            except KeyboardInterrupt:
                done = work.directory.online_manifest.get("seen", 0)
                raise Interrupted(f"interrupted after {counted(done, 'image')}") from None
            finally:
                if self._ahead:
                    self._load()

    def _learn(self, work: Session, pixels: np.ndarray, names: Sequence[str]) -> None:
        """Learn from pixels (N, S, S, 3) uint8 with their class names, and store the model."""
        if not work.directory.reference_manifest.is_file():
            if not names:
                return
            begin(work, self.learner)
        self._ahead = True
        for start in range(0, len(names), BATCH):
            some = names[start : start + BATCH]
            self.classes += [name for name in dict.fromkeys(some) if name not in self.classes]
            labels = torch.tensor([self.classes.index(name) for name in some])
            torch.manual_seed(derive_seed(self.config.seed, "observe", self.seen))
            self.learner.observe(torch.from_numpy(pixels[start : start + BATCH].copy()), labels)
            self.seen += len(some)
        facts = {"classes": self.classes, "taken": self._taken, "unreadable": self._unreadable}
        store(self.path, self.learner, self._start, self.seen, {**facts, "facts": self.learner.facts()})
        self._ahead = False

    # ------------------------------------------------------------------------------------------ images without a class

    def _score(self, files: Sequence[Arrived]) -> Iterator[Intake]:
        """Score the images that were not scored yet, once there are two classes."""
        if not files or not self.learner.finds_unknown or len(self.classes) < 2:
            return
        directory = RunDirectory(self.path)
        before = arrivals.scored(directory)
        new = [one for one in files if before.get(one.file, {}).get("stamp") != [*one.stamp]]
        for start in range(0, len(new), BATCH):
            batch = new[start : start + BATCH]
            read, pixels, problems = self._read(batch)
            lines: dict[str, dict[str, Any]] = {one.file: {"file": one.file, "stamp": [*one.stamp]} for one in batch}
            threshold, unknown = self.threshold(UNKNOWN_RATE), 0
            if read:
                logits, scores, _ = self.describe(pixels)
                for file, row, score in zip(read, logits.argmax(1).tolist(), scores.tolist(), strict=True):
                    lines[str(file)] |= {"score": score, "threshold": threshold, "nearest": self.classes[row]}
                    unknown += score < threshold
            arrivals.record_scores(directory, lines.values())
            yield Intake(scored=len(read), unknown=unknown, problems=tuple(problems))

    def unknown_files(self) -> list[Path]:
        """Return the images without a class that looked unknown when they arrived, and have not been learnt or removed.

        Raises:
            DataError: there are none.
        """
        stored = [Path(file) for file in arrivals.unlabelled(RunDirectory(self.path))[1]]
        if there := [file for file in stored if file.is_file()]:
            return there
        raise DataError(f"{self.path}: no unlabelled image looked unknown; name photos or folders to search")

    def threshold(self, rate: float) -> float:
        """Return the in-distribution score that a share `rate` of the newest learnt images lies below.

        Raises:
            ConfigError: not a share, or the learner does not find unknown images.
        """
        self._check_finds_unknown()
        if not 0 <= rate < 1:
            raise ConfigError(
                f"unknown_rate={rate}: must be a share of images of known classes, from 0 to below 1, such as 0.05"
            )
        known = self.learner.known_scores().sort().values
        return float(known[int(rate * len(known))]) if len(known) else -float("inf")

    def describe(self, pixels: np.ndarray) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits (N, classes), in-distribution scores (N,), and whitened features (N, p) of length 1.

        Raises:
            ConfigError: the learner does not find unknown images.
            RunError: nothing was learnt yet.
        """
        self._check_finds_unknown()
        parts = [self.learner.describe(part) for part in torch.from_numpy(pixels).split(BATCH)]
        logits, scores, features = (torch.cat(of).cpu() for of in zip(*parts, strict=True))
        return logits, scores, features

    def _check_finds_unknown(self) -> None:
        if not self.learner.finds_unknown:
            raise ConfigError(
                f"{self.path}: the learner {self.config.online.learner['name']} cannot detect unknown images; pearl can"
            )
        if not self.classes:
            raise RunError(f"{self.path}: has seen no image yet; give it some with observe(images, labels)")

    # ------------------------------------------------------------------------------------------------ predicting

    def predict(self, images: Picture | Iterable[Picture], *, top: int = 1) -> list[Prediction]:
        """Return the best `top` classes of each image.

        Raises:
            DataError: names the unreadable or unusable image.
            RunError: nothing was learnt yet.
        """
        pictures: Any = [images] if is_one(images) else images
        parts = in_batches(pictures, self.config.images.stored, BATCH, Decoding.of(self.config.images))
        return [prediction for pixels in parts for prediction in self.predict_pixels(pixels, top=top)]

    def predict_pixels(
        self, pixels: np.ndarray, *, task: str | None = None, top: int = 1, unknown_rate: Any = None
    ) -> list[Prediction]:
        """Predict as `predict`, from raw pixels (N, S, S, 3) uint8 of the model's stored size.

        Raises:
            ConfigError: `task` or `unknown_rate`, which are for models of tasks.
        """
        if task is not None or unknown_rate is not None:
            raise ConfigError(f"{self.path}: learns from a stream, without tasks and unknown classes; leave these out")
        if not self.classes:
            raise RunError(f"{self.path}: has seen no image yet; give it some with observe(images, labels)")
        predictions = []
        for part in torch.from_numpy(pixels).split(BATCH):
            scores = self.learner.predict(part).double().cpu()
            best, order = scores.softmax(1).topk(min(top, len(self.classes)), dim=1)
            for row, shares in zip(order.tolist(), best.tolist(), strict=True):
                predictions.append(
                    Prediction(tuple(self.classes[c] for c in row), ("stream",) * len(row), tuple(shares))
                )
        return predictions


def open_stream(
    path: str | Path,
    *,
    learner: str | dict[str, Any] | None = None,
    recipe: str | None = None,
    backbone: str | dict[str, Any] | None = None,
    device: str = "auto",
    overrides: Mapping[str, Any] | None = None,
) -> StreamModel:
    """Open a model that learns from a stream, or create one; options are those of `pearl.learn` for a first task.

    Raises:
        PearlError: not such a model, or invalid settings.
    """
    path, settings = Path(path), dict(overrides or {})
    if RunDirectory(path).config_file.is_file():
        config: ModelConfig = read_config(path)
        if not isinstance(config, OnlineModelConfig):
            raise RunError(f"{path}: a model of tasks, not of a stream; add a task with: pearl learn {path} --data ...")
        stream_settings = {
            key: value
            for key, value in (raw_config(recipe) if recipe else {}).items()
            if key in ModelConfig.model_fields
        }
        raw = merge(merge(config.model_dump(mode="json"), stream_settings), {"backbone": backbone} if backbone else {})
        raw = merge(raw, {**settings, **({"online": {"learner": learner}} if learner else {})})
        if check_config(raw, OnlineModelConfig) != config:
            raise ConfigError(f"{path}: its settings are fixed since it was created; leave them out")
        return StreamModel(path, config, device=device)
    method = merge({"method": {"classifier": "heads"}}, {"method": settings.pop("method", {})})
    options = LearnOptions(recipe=recipe, backbone=backbone, overrides={**settings, **method})
    raw = config_for(path, None, options).model_dump(mode="json")
    made = check_config({**raw, "online": {"learner": learner or "pearl"}}, OnlineModelConfig)
    return StreamModel(path, made, device=device)
