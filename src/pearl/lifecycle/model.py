"""A model on disk: its tasks, and its predictions for images.

A run directory is a model too: `pearl run` and `pearl learn` write the same files.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from html import escape
from pathlib import Path
from threading import RLock
from typing import Any, Literal, Self, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from pearl.data.augment import View
from pearl.data.decoding import Decoding
from pearl.data.images import Picture, in_batches, is_one
from pearl.errors import ConfigError, DataError, RunError, counted, printable, short_of_memory, typed
from pearl.evaluation.evaluate import Ensemble
from pearl.lifecycle.accuracy_estimate import Outcome, estimated
from pearl.lifecycle.evaluation import BATCH, UNKNOWN_RATE, Data, Evaluation, evaluate
from pearl.lifecycle.saved import check_method, load_method, read_config, resume_command
from pearl.methods.base import Method
from pearl.names import class_name
from pearl.nn.layout import placed
from pearl.settings.config import ModelConfig, OnlineModelConfig, OnlineRunConfig
from pearl.settings.parts import METHODS
from pearl.settings.registry import nearest, readable
from pearl.storage.run_directory import RunDirectory
from pearl.storage.stored_task import StoredTask
from pearl.storage.tabular import rows_as_html

T = TypeVar("T")
Describing = Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]  # see `TaskClassifier.describing`

_LOADING = RLock()  # shared by all models: a model with its own lock could not be pickled


@dataclass(frozen=True)
class Prediction:
    """A prediction for one image: its best classes, best first, with probabilities among the compared classes.

    `in_distribution` is the share of images of known classes with a score at most as high as this image's, and `known`
    is True if it reaches the false-rejection rate; both are None without a rate or without class statistics.
    """

    classes: tuple[str, ...]
    tasks: tuple[str, ...]
    probabilities: tuple[float, ...]
    known: bool | None = None
    in_distribution: float | None = None

    @property
    def name(self) -> str:
        """Return the best class."""
        return self.classes[0]


class StoredModel:
    """A model that can learn more tasks. `pearl learn` or `pearl run` creates it, `pearl.load` opens it."""

    def __init__(self, path: Path, config: ModelConfig, tasks: list[StoredTask], device: torch.device) -> None:
        self.path, self.config, self.tasks, self.device = path, config, tasks, device
        self.view = View(config.images, channels_last=config.engine.channels_last)
        self._loaded: dict[str, Any] = {}

    @classmethod
    def open(
        cls, path: str | Path, *, tasks: int | None = None, device: str = "auto", method: str | None = None
    ) -> Self:
        """Open a model after its first `tasks` tasks (default: all).

        `method` ("path/to/file.py:Class") names the file of its method, if it has one.

        Raises:
            RunError: not a model, no task finished, or files missing or damaged.
            ConfigError: the method's file is not given, or another one is.
        """
        path = Path(path)
        named = METHODS.admit(method) if method else None
        config = read_config(path)
        check_method(path, config, named)
        directory = RunDirectory(path)
        if isinstance(config, OnlineModelConfig | OnlineRunConfig):
            raise RunError(f"{path}: learns from a stream, without tasks; use pearl predict, or pearl.stream in Python")
        there = len(directory.usable)
        if tasks is None or not 1 <= tasks <= there:  # a directory is usable up to a gap if `tasks` is given
            directory.check_no_gap()
        if not there:
            raise RunError(f"{path}: no task is finished; resume it with: {resume_command(path, config)}")
        if tasks is not None and not 1 <= tasks <= there:
            raise RunError(f"{path}: it has {counted(there, 'finished task')}, not {tasks}; give 1 to {there}")
        chosen = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
        if chosen.partition(":")[0] not in ("cpu", "cuda"):
            raise ConfigError(f"device {device!r} cannot be used here; use auto, cpu or cuda")
        try:
            placed_on = torch.empty(0, device=chosen).device
        except (RuntimeError, AssertionError) as error:
            reason = str(error).partition("\n")[0]
            raise ConfigError(f"device {device!r} cannot be used here ({reason}); use auto or cpu") from None
        return cls(path, config, directory.first_tasks(there if tasks is None else tasks), placed_on)

    def __repr__(self) -> str:
        made = f"{readable(self.config.method['name'])} on {self.config.backbone['name']}"
        size = f"{counted(len(self.tasks), 'task')}, {counted(len(self.classes), 'class')}"
        return f"Model({printable(str(self.path))}: {made}, {size})"

    def _repr_html_(self) -> str:
        rows = [(task.name, f"{len(task.names)}", ", ".join(task.names)) for task in self.tasks]
        return f"<p>{escape(repr(self))}</p>{rows_as_html([('task', 'classes', ''), *rows])}"

    @property
    def classes(self) -> tuple[str, ...]:
        """Return the names of all classes, by logit index."""
        return tuple(name for task in self.tasks for name in task.classes)

    @property
    def method(self) -> Method:
        """Return the method with its weights, on the device, in evaluation mode."""
        to_device = partial(placed, device=self.device, channels_last=self.config.engine.channels_last)
        load = partial(load_method, self.path, self.config, len(self.tasks), to_device=to_device, to_ask=True)
        return self._once("method", load)

    @property
    def _ensemble(self) -> Ensemble:
        return self._once("ensemble", lambda: Ensemble(self.method))

    def _once(self, name: str, load: Callable[[], T]) -> T:
        """Load in the first thread that needs it; the others wait."""
        with _LOADING:
            if name not in self._loaded:
                self._loaded[name] = load()
        attribute: T = self._loaded[name]
        return attribute

    @property
    def outcome(self) -> Outcome | None:
        """Return the accuracy estimate after its newest task, from the time of learning; None if there is none.

        Raises:
            RunError: a manifest is damaged.
        """
        return estimated(self.tasks, self.method)

    @property
    def first_answer(self) -> str:
        """Return a line if the newest task's training is not finished, so that its statistics alone are used."""
        if self.tasks[-1].folder != RunDirectory(self.path).first_answer_folder:
            return ""
        return (
            f"task {printable(self.tasks[-1].name)} is not trained yet; until then this is a first answer, by "
            f"statistics of frozen features"
        )

    def task_index(self, name: str) -> int:
        """Return the index of a task by name.

        Raises:
            ConfigError: unknown task; the message has the nearest one.
        """
        names = [class_name(task.name) for task in self.tasks]
        if class_name(name) not in names:
            raise ConfigError(f"{self.path}: no task {name!r}; {nearest(name, names)}")
        return names.index(class_name(name))

    # ------------------------------------------------------------------------------------------------- predictions

    @typed
    def predict(
        self,
        images: Picture | Iterable[Picture],
        *,
        task: str | None = None,
        top: int = 1,
        unknown_rate: float | Literal["auto"] | None = "auto",
    ) -> list[Prediction]:
        """Return the best `top` classes of each image, among all classes (class-IL), or among those of `task`
        (task-IL).

        Images are one image or any iterable of files, Pillow images, arrays (H, W, 3) and tensors (3, H, W), uint8 or
        floats from 0 to 1, of any size; they get the test transform of training. `unknown_rate` is the false-rejection
        rate of `Prediction.known`: about this share of images of known classes is called unknown. "auto" is 0.05 for a
        model with class statistics, and None, which disables it, for others.

        Raises:
            DataError: names the unreadable or unusable image.
            ConfigError: unknown task, `top` below 1, or a rate for a model without class statistics.
        """
        pictures: Any = [images] if is_one(images) else images
        if not isinstance(pictures, Iterable):
            raise DataError(f"a {type(images).__name__} is not an image; give files, Pillow images, arrays or tensors")
        predictions = []
        for pixels in in_batches(pictures, self.config.images.stored, BATCH, Decoding.of(self.config.images)):
            predictions += self.predict_pixels(pixels, task=task, top=top, unknown_rate=unknown_rate)
        return predictions

    def predict_pixels(
        self,
        pixels: np.ndarray,
        *,
        task: str | None = None,
        top: int = 1,
        unknown_rate: float | Literal["auto"] | None = "auto",
    ) -> list[Prediction]:
        """Predict as `predict`, from raw pixels (N, S, S, 3) uint8 of the model's stored size."""
        if top < 1:
            raise ConfigError(f"top={top}: give 1 or more")
        index = None if task is None else self.task_index(task)
        if index is not None and not self.tasks[index].names:
            raise ConfigError(f"{self.path}: task {task!r} has no classes left")
        names = [(name, info.name) for info in self.tasks for name in info.classes]
        known: list[bool] | list[None] = [None] * len(pixels)
        shares: list[float] | list[None] = [None] * len(pixels)
        if unknown_rate == "auto":
            unknown_rate = UNKNOWN_RATE if self.has_ood_scores else None
        if unknown_rate is None:
            logits = self.logits(pixels, index)
        else:
            threshold = self.threshold(unknown_rate)
            logits, scores = self.logits_and_scores(pixels)
            known, shares = (scores >= threshold).tolist(), self.method.classifier.shares(scores).tolist()
            if index is not None:
                logits = logits[:, [c for c, (name, _) in enumerate(names) if name in self.tasks[index].names]]
        if index is not None:
            names = [pair for pair in names if pair[0] in self.tasks[index].names]
        probabilities, order = logits.double().softmax(1).topk(min(top, len(names)), dim=1)
        return [
            Prediction(
                tuple(names[c][0] for c in row),
                tuple(names[c][1] for c in row),
                tuple(best),
                is_known,
                share,
            )
            for row, best, is_known, share in zip(order.tolist(), probabilities.tolist(), known, shares, strict=True)
        ]

    @property
    def has_ood_scores(self) -> bool:
        """Return True if it has in-distribution scores, and so can call images unknown: with class statistics."""
        return self.method.classifier.ood_scorer() is not None

    def threshold(self, rate: float) -> float:
        """Return the in-distribution score below which images are unknown, at a false-rejection rate for known ones.

        Raises:
            ConfigError: not a share, or the model has no class statistics.
        """
        self._check_has_ood_scores()
        if not 0 <= rate < 1:
            raise ConfigError(
                f"unknown_rate={rate}: must be a share of images of known classes, from 0 to below 1, such as 0.05"
            )
        return self.method.classifier.threshold(rate)

    def logits(self, pixels: np.ndarray, task: int | None = None) -> Tensor:
        """Return logits (N, classes) float32 on the CPU for raw pixels (N, S, S, 3) uint8; of one task's classes if
        given.

        They are computed in float32 whatever the precision of training, so that they do not depend on the machine.

        Raises:
            RunError: the method's classes differ from the manifests'.
        """
        width = len(self.classes if task is None else self.tasks[task].names)
        return self._asked(pixels, lambda x: self._ensemble(x, task), width)

    def logits_and_scores(self, pixels: np.ndarray) -> tuple[Tensor, Tensor]:
        """Return logits as `logits`, and in-distribution scores (N,), float32 on the CPU.

        Raises:
            ConfigError: the model has no class statistics, and so no scores.
        """
        self._check_has_ood_scores()

        def scored(x: Tensor) -> tuple[Tensor, Tensor]:
            scorer = cast(Callable[[Tensor], tuple[Tensor, Tensor]], self._ensemble.scorer)  # not None, see above
            return scorer(x)

        width = len(self.classes) + 1
        both = self._asked(pixels, lambda x: torch.cat([part.view(len(x), -1) for part in scored(x)], 1), width)
        return both[:, :-1], both[:, -1]

    def describe(self, pixels: np.ndarray) -> tuple[Tensor, Tensor, Tensor]:
        """Return what `logits_and_scores` returns, and whitened features (N, p) float32 for grouping unknown images.

        See `TaskClassifier.describing`.

        Raises:
            ConfigError: the model has no class statistics.
        """
        self._check_has_ood_scores()
        describe = cast(Describing, self._once("describing", self.method.classifier.describing))

        def described(x: Tensor) -> Tensor:
            logits, scores, features = describe(x)
            return torch.cat([logits, scores[:, None], features.to(logits)], 1)

        classes = len(self.classes)
        columns = self._asked(pixels, described)
        return columns[:, :classes], columns[:, classes], columns[:, classes + 1 :]

    def _check_has_ood_scores(self) -> None:
        if not self.has_ood_scores:
            raise ConfigError(
                f"{self.path}: its classifier cannot detect unknown images; a model with class statistics can, which "
                f"new models have; give it some with: pearl refit {self.path} --data IMAGES --to NEW"
            )

    @torch.no_grad()
    def _asked(self, pixels: np.ndarray, ask: Callable[[Tensor], Tensor], width: int | None = None) -> Tensor:
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
        if width is not None and logits.shape[1] != width:
            raise RunError(
                f"{self.path}: its manifests list {counted(width, 'class')}, its weights give "
                f"{logits.shape[1]} logits; restore them from a copy"
            )
        if logits.isnan().any():
            raise RunError(
                f"{self.path}: its tensors give no finite logits for {counted(len(self.classes), 'class')}; restore a "
                f"copy"
            )
        return logits

    @typed
    def evaluate(
        self,
        data: Data,
        *,
        unknown_rate: float = UNKNOWN_RATE,
        aliases: Mapping[str, str] | None = None,
        nested: bool = False,
    ) -> Evaluation:
        """Evaluate on images: DATA/CLASS/*, DATA/test/CLASS/*, or other inputs of `given`; a list for several folders.

        Images of classes that the model has not learnt should be called unknown, at its threshold for `unknown_rate`;
        without class statistics they are left out, with a note. `aliases` maps folders to the classes of their images.

        Raises:
            DataError: no known class, an alias of a missing folder, or unreadable images, all listed.
            ConfigError: `unknown_rate` is not a share.
        """
        return evaluate(self, data, unknown_rate=unknown_rate, aliases=aliases, nested=nested)

    # ----------------------------------------------------------------------------------------------------- learning

    @typed
    def refit(
        self,
        data: str | Path | Iterable[str | Path],
        to: str | Path,
        classifier: Mapping[str, Any] | str = "statistics",
        *,
        aliases: Mapping[str, str] | None = None,
    ) -> Self:
        """Create a new model at `to`: this one with class statistics from images in one or several folders.

        Nothing is trained, and this model is unchanged. Images of all its classes are needed.

        Raises:
            PearlError: any user error; nothing is created then.
        """
        from pearl.lifecycle.refit import refit_model

        folders = [data] if isinstance(data, str | Path) else data
        arguments: dict[str, Any] = {
            "aliases": aliases,
            "device": self.device.type,
            "method": str(self.config.method["name"]),
        }
        refit_model(self.path, [Path(folder) for folder in folders], Path(to), classifier, **arguments)
        return type(self).open(Path(to), device=self.device.type)
