"""A model that learns from a stream: images with class names as they come, each seen once.

The directory has the files of a model, without tasks; the state and the names of the classes are in its newest stored
state (`state`), which is complete or absent: after a kill the model is as it was after the last call of `observe`.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pearl.data.batches import fold
from pearl.data.csv_list import SUFFIXES, read_pairs
from pearl.data.decoding import Decoding
from pearl.data.images import Picture, in_batches, is_one, read_all
from pearl.data.inputs import given
from pearl.data.sources import tree
from pearl.errors import ConfigError, DataError, RunError, counted, printable
from pearl.lifecycle.choices import LearnOptions, config_for
from pearl.lifecycle.model import Prediction
from pearl.lifecycle.saved import read_config
from pearl.lifecycle.session import session
from pearl.online.learner import Learner
from pearl.online.state import begin, build_learner, restore, store
from pearl.settings.config import ModelConfig, OnlineModelConfig, check_config, merge
from pearl.storage.checkpoint import snapshot
from pearl.storage.run_directory import RunDirectory
from pearl.training.engine import Engine, Observer

BATCH = 64


class StreamModel:
    """A model on disk that learns from labelled images as they come. `pearl.stream` creates or opens it."""

    def __init__(self, path: Path, config: OnlineModelConfig, *, device: str = "auto") -> None:
        self.path, self.config, self.device = path, config, device
        self.learner: Learner = build_learner(config, Engine(config, device=device, precision="fp32"))
        self._start: dict[str, Tensor] = snapshot(self.learner.state_dict())
        manifest = restore(path, self.learner, self._start)
        if not manifest and RunDirectory(path).config_file.exists() and RunDirectory(path).online_states:
            raise RunError(f"{path}: its stored state is damaged; restore it from a copy")
        self.seen: int = manifest.get("seen", 0)
        self.classes: list[str] = list(manifest.get("classes", []))
        self._last: dict[str, Any] = manifest.get("last", {})

    def __repr__(self) -> str:
        what = f"{self.config.online.learner['name']} on {self.config.backbone['name']}"
        return (
            f"StreamModel({printable(str(self.path))}: {what}, {counted(self.seen, 'image')}, "
            f"{counted(len(self.classes), 'class')})"
        )

    def observe(self, images: Picture | Iterable[Picture], labels: Any, *, show: Observer | None = None) -> None:
        """Learn from an image and its class name, or from several and their names, and store the model.

        Images are as for `predict`. A new name is a new class, which can be predicted at once.

        Raises:
            DataError: an unusable image or label; nothing is learnt.
        """
        pictures, names = ([images], [labels]) if is_one(images) else (images, labels)
        found = given((list(pictures), list(names)), self.config.images.stored, part="train")  # type: ignore[arg-type]
        self._learn(np.asarray(found.images), [found.classes[label] for label in found.labels], show=show)

    def observe_files(self, data: Path, show: Observer | None = None) -> list[str]:
        """Learn from the images of a .csv in its order, or of a folder per class in the order of their time stamps.

        The model is stored after each 64 images; calling this again continues after the last ones. Returns a line for
        each file that cannot be read.

        Raises:
            DataError: no such file or folder, or files before the last learnt one have come or gone.
        """
        pairs, place, problems = files_in_order(data), str(data.absolute()), list[str]()
        done = self._last["done"] if self._last.get("place") == place else 0
        digest = hashlib.sha256(_lines(pairs[:done]))
        if done and digest.hexdigest() != self._last["files"]:
            raise DataError(
                f"{data}: the {counted(done, 'file')} that were learnt from it are not its first ones any more; add "
                f"new images after them (later lines, newer time stamps), or give them in a folder of their own"
            )
        for start in range(done, len(pairs), BATCH):
            part = pairs[start : start + BATCH]
            read, pixels, wrong = read_all(
                [f for f, _ in part], self.config.images.stored, Decoding.of(self.config.images)
            )
            problems += wrong
            label_of = dict(part)
            digest.update(_lines(part))
            self._last = {"place": place, "done": start + len(part), "files": digest.hexdigest()}
            if read:
                self._learn(pixels, [label_of[file] for file in read], show=show)
            (show or Observer()).step(start + len(part), len(pairs))
        return problems

    def _learn(self, pixels: np.ndarray, names: Sequence[str], *, show: Observer | None) -> None:
        with session(
            self.path, self.config, again="the same command", device=self.device, precision="fp32", show=show
        ) as work:
            if not work.directory.reference_manifest.is_file():
                begin(work, self.learner)
            self.learner.setup.engine.observer = work.log
            for start in range(0, len(names), BATCH):
                some = names[start : start + BATCH]
                self.classes += [name for name in dict.fromkeys(some) if name not in self.classes]
                labels = torch.tensor([self.classes.index(name) for name in some])
                torch.manual_seed(fold(self.config.seed, "observe", self.seen))
                self.learner.observe(torch.from_numpy(pixels[start : start + BATCH].copy()), labels)
                self.seen += len(some)
            facts = {"classes": self.classes, "last": self._last, "facts": self.learner.facts()}
            store(self.path, self.learner, self._start, self.seen, facts)

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
        """As `predict`, for raw pixels (N, S, S, 3) uint8 of the model's stored size.

        Raises:
            ConfigError: `task` or `unknown_rate`, which are for models of tasks.
        """
        if task is not None or unknown_rate is not None:
            raise ConfigError(f"{self.path}: learns from a stream, without tasks and unknown classes; leave these out")
        if not self.classes:
            raise RunError(f"{self.path}: has seen no image yet; give it some with observe(images, labels)")
        found = []
        for part in torch.from_numpy(pixels).split(BATCH):
            scores = self.learner.predict(part).double().cpu()
            best, order = scores.softmax(1).topk(min(top, len(self.classes)), dim=1)
            for row, shares in zip(order.tolist(), best.tolist(), strict=True):
                found.append(Prediction(tuple(self.classes[c] for c in row), ("stream",) * len(row), tuple(shares)))
        return found


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
        wanted = merge(config.online.model_dump(mode="json"), {"learner": learner} if learner else {})
        if recipe or backbone or settings or wanted["learner"] != config.online.learner:
            raise ConfigError(f"{path}: its settings are fixed since it was created; leave them out")
        return StreamModel(path, config, device=device)
    method = merge({"method": {"classifier": "heads"}}, {"method": settings.pop("method", {})})
    options = LearnOptions(recipe=recipe, backbone=backbone, overrides={**settings, **method})
    raw = config_for(path, None, options).model_dump(mode="json")
    made = check_config({**raw, "online": {"learner": learner or "pearl"}}, OnlineModelConfig)
    return StreamModel(path, made, device=device)


def _lines(pairs: Sequence[tuple[Path, str]]) -> bytes:
    return "".join(f"{str(file)!r} {name!r}\n" for file, name in pairs).encode()


def files_in_order(data: Path) -> list[tuple[Path, str]]:
    """Return files with their classes in the order of their arrival: the lines of a .csv, or time stamps.

    Raises:
        DataError: no such file or folder, or no image.
    """
    if data.is_file() and data.suffix.lower() in SUFFIXES:
        return read_pairs(data)[0]
    files = [(file, name) for name, found in tree(data).items() for file in found]
    return sorted(files, key=lambda pair: (pair[0].stat().st_mtime_ns, str(pair[0])))
