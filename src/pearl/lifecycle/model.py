"""A model on disk: the tasks it has learnt, and what it says about images.

A run directory is one too: `pearl run` and `pearl learn` write the same files.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from pearl.data.augment import View
from pearl.data.cache import read_all, read_image, upright_square
from pearl.data.sources import class_folders, left_out
from pearl.errors import ConfigError, DataError, RunError, short_of_memory
from pearl.evaluation import metrics
from pearl.evaluation.evaluate import Ensemble
from pearl.lifecycle.saved import TaskInfo, check_method, load_method, read_config, resume_command, task_infos
from pearl.methods.base import Method
from pearl.settings.config import ModelConfig
from pearl.settings.parts import METHODS
from pearl.settings.registry import nearest
from pearl.storage.files import check_no_gap, finished

BATCH = 64  # images decoded and asked about at a time

Picture = str | Path | Image.Image | np.ndarray  # a file, an image of Pillow, or pixels uint8 (H, W, 3) or (H, W)


@dataclass(frozen=True)
class Prediction:
    """What a model says of one image: its best classes, best first, with probabilities among all it was asked of.

    `known` is whether it may be of one of them at all; None if that was not asked.
    """

    classes: tuple[str, ...]
    tasks: tuple[str, ...]
    probabilities: tuple[float, ...]
    known: bool | None = None

    @property
    def name(self) -> str:
        """The best class."""
        return self.classes[0]


@dataclass(frozen=True)
class Evaluation:
    """What a model got right: `confusion` (C, C) counts of true class by predicted class, among all classes;
    `task_il` (C,) counts of images right among the classes of their own task; `reliability` (bins, 3): see
    `metrics.reliability`; `notes`: what was not looked at."""

    tasks: tuple[TaskInfo, ...]
    confusion: np.ndarray
    task_il: np.ndarray
    reliability: np.ndarray
    notes: tuple[str, ...] = ()

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the rows."""
        return tuple(name for task in self.tasks for name in task.classes)

    @property
    def total(self) -> np.ndarray:
        """Images per class (C,)."""
        return self.confusion.sum(1)

    @property
    def class_il(self) -> np.ndarray:
        """Images per class (C,) that are right among all classes."""
        return self.confusion.diagonal()

    @property
    def calibration_error(self) -> float:
        """How far the probability of the best class is from how often it is right, in percent."""
        return metrics.calibration_error(self.reliability)


class Model:
    """A model that goes on learning. Made by `pearl learn` or `pearl run`, opened by `pearl.load`."""

    def __init__(self, path: Path, config: ModelConfig, tasks: list[TaskInfo], device: torch.device) -> None:
        self.path, self.config, self.tasks, self.device = path, config, tasks, device
        self.view = View(config.images, channels_last=config.engine.channels_last)

    @classmethod
    def open(
        cls, path: str | Path, *, tasks: int | None = None, device: str = "auto", method: str | None = None
    ) -> "Model":
        """A model as it was after its first `tasks` tasks; after all of them if not given.

        `method` ("path/to/file.py:Class") names the file that its method is in, if it is in one.

        Raises:
            RunError: not a model, no task finished, or files missing or damaged.
            ConfigError: the method's file is not named, or another one is.
        """
        path = Path(path)
        named = METHODS.admit(method) if method else None
        config = read_config(path)
        check_method(path, config, named)
        there = len(finished(path))
        if tasks is None or not 1 <= tasks <= there:  # up to a gap a directory can be used, if one says so
            check_no_gap(path)
        if not there:
            raise RunError(f"{path}: no task is finished; go on with: {resume_command(path, config)}")
        if tasks is not None and not 1 <= tasks <= there:
            raise RunError(f"{path}: {there} tasks are finished, not {tasks}; ask for 1 to {there}")
        chosen = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
        if chosen.partition(":")[0] not in ("cpu", "cuda"):
            raise ConfigError(f"device {device!r} cannot be used here; use auto, cpu or cuda")
        try:
            place = torch.empty(0, device=chosen).device
        except (RuntimeError, AssertionError) as error:
            reason = str(error).partition("\n")[0]
            raise ConfigError(f"device {device!r} cannot be used here ({reason}); use auto or cpu") from None
        return cls(path, config, task_infos(path, tasks), place)

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of all classes; a class's place is its logit index."""
        return tuple(name for task in self.tasks for name in task.classes)

    @cached_property
    def method(self) -> Method:
        """The method with all it has learnt, on the device, in evaluation mode."""
        layout = torch.channels_last if self.config.engine.channels_last else torch.contiguous_format
        return load_method(
            self.path,
            self.config,
            len(self.tasks),
            place=lambda method: method.to(device=self.device).to(memory_format=layout),
            to_ask=True,
        )

    @cached_property
    def _ensemble(self) -> Ensemble:
        return Ensemble(self.method)

    def task_index(self, name: str) -> int:
        """The place of a task by its name.

        Raises:
            ConfigError: no such task; the message gives the nearest one.
        """
        names = [task.name for task in self.tasks]
        if name not in names:
            raise ConfigError(f"{self.path}: no task {name!r}; {nearest(name, names)}")
        return names.index(name)

    # ------------------------------------------------------------------------------------------------- predictions

    def predict(
        self,
        images: Picture | Iterable[Picture],
        *,
        task: str | None = None,
        top: int = 1,
        unknown_rate: float | None = None,
    ) -> list[Prediction]:
        """The best `top` classes of each image, among all classes (class-IL), or among those of `task` (task-IL).

        Images go through the transforms of training's test images; of any size. One image, or any number of them. With
        `unknown_rate` each prediction says whether its image is `known`, so strictly that about this share of images of
        known classes is not.

        Raises:
            DataError: naming an image that cannot be read.
            ConfigError: no such task, `top` is below 1, or the model cannot say what is unknown.
        """
        if isinstance(images, str | Path | Image.Image) or (isinstance(images, np.ndarray) and images.ndim < 4):
            images = [images]
        waiting, found = iter(images), []
        while batch := [to_pixels(image, self.config.images.stored) for image in islice(waiting, BATCH)]:
            found += self.predict_pixels(np.stack(batch), task=task, top=top, unknown_rate=unknown_rate)
        return found

    def predict_pixels(
        self, pixels: np.ndarray, *, task: str | None = None, top: int = 1, unknown_rate: float | None = None
    ) -> list[Prediction]:
        """As `predict`, of raw pixels (N, S, S, 3) uint8 of the model's stored size."""
        if top < 1:
            raise ConfigError(f"top={top}: ask for 1 class or more")
        index = None if task is None else self.task_index(task)
        names = [(name, info.name) for info in self.tasks for name in info.classes]
        known: list[bool] | list[None] = [None] * len(pixels)
        if unknown_rate is None:
            logits = self.logits(pixels, index)
        else:
            logits, familiar = self.judge(pixels)
            known = (familiar >= self._threshold(unknown_rate)).tolist()
            if index is not None:
                logits = logits[:, [c for c, (name, _) in enumerate(names) if name in self.tasks[index].names]]
        if index is not None:
            names = [place for place in names if place[0] in self.tasks[index].names]
        share, order = logits.double().softmax(1).topk(min(top, len(names)), dim=1)
        return [
            Prediction(
                tuple(names[c][0] for c in row),
                tuple(names[c][1] for c in row),
                tuple(float(p) for p in probability),
                is_known,
            )
            for row, probability, is_known in zip(order.tolist(), share.tolist(), known, strict=True)
        ]

    def _threshold(self, rate: float) -> float:
        if not 0 <= rate < 1:
            raise ConfigError(f"unknown_rate={rate}: a share of images of known classes, from 0 to below 1, as 0.05")
        return self.method.threshold(rate)

    def logits(self, pixels: np.ndarray, task: int | None = None) -> Tensor:
        """Logits (N, classes) float32 on the CPU of raw pixels (N, S, S, 3) uint8; of one task's classes if given.

        In float32 whatever the precision of training, so that an image's answer does not depend on the machine.

        Raises:
            RunError: the method has other classes than the manifests name.
        """
        width = len(self.classes if task is None else self.tasks[task].names)
        return self._asked(pixels, lambda x: self._ensemble(x, task), width)

    def judge(self, pixels: np.ndarray) -> tuple[Tensor, Tensor]:
        """Logits as `logits`, and how familiar each image is, (N,) float32 on the CPU.

        Raises:
            ConfigError: the model has no class statistics, without which it cannot say.
        """
        judge = self._ensemble.judge
        if judge is None:
            raise ConfigError(
                f"{self.path}: its classifier cannot say what is unknown; a model with class statistics can "
                f"(method.classifier=chain, which new models have)"
            )
        width = len(self.classes) + 1
        both = self._asked(pixels, lambda x: torch.cat([part.view(len(x), -1) for part in judge(x)], 1), width)
        return both[:, :-1], both[:, -1]

    @torch.no_grad()
    def _asked(self, pixels: np.ndarray, ask: Callable[[Tensor], Tensor], width: int) -> Tensor:
        parts = []
        try:
            with METHODS.blamed(self.config.method["name"]):
                for start in range(0, len(pixels), BATCH):
                    x = self.view.test(torch.from_numpy(pixels[start : start + BATCH]).to(self.device))
                    parts.append(ask(x).cpu())
        except (RuntimeError, TypeError, ValueError, LookupError) as error:
            if short_of_memory(error):
                raise
            reason = str(error).partition("\n")[0]
            raise RunError(f"{self.path}: its tensors do not fit together ({reason}); restore a copy") from error
        logits = torch.cat(parts)
        if logits.shape[1] != width:
            raise RunError(
                f"{self.path}: its manifests name {width} classes, its weights answer with {logits.shape[1]}; restore "
                f"them from a copy"
            )
        if logits.isnan().any():
            raise RunError(f"{self.path}: its tensors give no numbers for {width} classes; restore a copy")
        return logits

    def evaluate(self, data: str | Path) -> "Evaluation":
        """Accuracy on an image folder: DATA/CLASS/*, or DATA/test/CLASS/*; any of the model's classes.

        Raises:
            DataError: classes that the model does not know, or images that cannot be read, all of which are named.
        """
        root = Path(data)
        images = root / "test" if (root / "test").is_dir() else root
        names, files, known = class_folders(images)
        place = {name: index for index, name in enumerate(self.classes)}
        if strange := [name for name in names if name not in place]:
            first = f"{strange[0]!r} ({nearest(strange[0], self.classes)})"
            more = [*map(repr, strange[1:5]), *([f"{len(strange) - 5} more"] if len(strange) > 5 else [])]
            raise DataError(
                f"{root}: classes that the model does not know: {', '.join([first, *more])}; give a folder without them"
            )
        labels = np.array([place[names[label]] for label in known])
        confusion = np.zeros((len(place), len(place)), dtype=np.int64)
        bounds = np.array([task.first_class for task in self.tasks] + [len(place)])
        task_il = np.zeros(len(place), dtype=np.int64)
        reliability = np.zeros((metrics.BINS, 3))
        problems: list[str] = []
        for start in range(0, len(files), BATCH):
            good, pixels, wrong = read_all(files[start : start + BATCH], self.config.images.stored)
            problems += wrong
            if problems:
                continue  # all of them are named, no more is computed
            truth, scores = labels[start : start + len(good)], self.logits(pixels).numpy()
            np.add.at(confusion, (truth, scores.argmax(1)), 1)
            confidence = torch.from_numpy(scores).double().softmax(1).numpy().max(1)
            reliability += metrics.reliability(confidence, scores.argmax(1) == truth)
            for label, row in zip(truth, scores, strict=True):
                own = slice(*bounds[np.searchsorted(bounds, label, side="right") - 1 :][:2])
                task_il[label] += row[own].argmax() + own.start == label
        if problems:
            raise DataError("\n".join([f"{len(problems)} images cannot be read: remove or replace them", *problems]))
        return Evaluation(tuple(self.tasks), confusion, task_il, reliability, tuple(left_out(images)))

    # ----------------------------------------------------------------------------------------------------- learning

    def learn(self, data: str | Path, *, task: str | None = None, **overrides: Any) -> "Model":
        """Learn the classes of an image folder as a new task, and store it: `pearl learn` in Python.

        Returns the grown model. `overrides` are settings of training: `learn(data, train={"epochs": 5})`.

        Raises:
            PearlError: anything a user can mend; the model is then as it was.
        """
        from pearl.lifecycle.learning import learn

        learn(self.path, data, task=task, overrides=overrides, device=self.device.type)
        return Model.open(self.path, device=self.device.type)

    def refit(
        self,
        data: str | Path | Iterable[str | Path],
        to: str | Path,
        classifier: Mapping[str, Any] | str = "chain",
        *,
        aliases: Mapping[str, str] | None = None,
    ) -> "Model":
        """A new model, at `to`, that is this one with class statistics of images in one folder or several.

        Nothing is trained, and this model stays as it is. Images are needed of all its classes.

        Raises:
            PearlError: anything a user can mend; nothing is made then.
        """
        from pearl.lifecycle.remodel import refit_model

        folders = [data] if isinstance(data, str | Path) else data
        how: dict[str, Any] = {
            "aliases": aliases,
            "device": self.device.type,
            "method": str(self.config.method["name"]),
        }
        refit_model(self.path, [Path(folder) for folder in folders], Path(to), classifier, **how)
        return Model.open(to, device=self.device.type)


def to_pixels(image: Picture, size: int) -> np.ndarray:
    """Any picture as training saw it: upright, RGB, shorter side `size`, centre crop; uint8 (size, size, 3).

    Raises:
        DataError: it cannot be read, or is no picture.
    """
    if isinstance(image, str | Path):
        return read_image(Path(image), size)
    if isinstance(image, np.ndarray):
        if image.dtype != np.uint8 or not (image.ndim == 2 or (image.ndim == 3 and image.shape[2] in (3, 4))):
            raise DataError(
                f"pixels must be uint8 of shape (height, width, 3), not {image.dtype} of {image.shape}; "
                f"convert them, or give a file"
            )
        image = Image.fromarray(image)
    try:
        return np.asarray(upright_square(image, size))
    except Exception as error:  # of a damaged image a decoder raises nearly anything
        raise DataError(f"an image cannot be used ({error}); give a file, a Pillow image or a uint8 array") from None
