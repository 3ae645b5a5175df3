"""A model on disk: the tasks it has learnt, and what it says about images.

A run directory is one too: `pearl run` and `pearl learn` write the same files.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from PIL import Image
from torch import Tensor, nn

from pearl.checkpoint import load_state, read_part
from pearl.config import ModelConfig, RunConfig, check_config
from pearl.data.augment import View
from pearl.data.batches import fold
from pearl.data.cache import read_image, upright_square
from pearl.errors import ConfigError, DataError, RunError
from pearl.files import FORMAT, MANIFEST, check_format, check_no_gap, finished, read_json
from pearl.methods.base import Method
from pearl.registry import BACKBONES, METHODS, nearest

BATCH = 64  # images decoded and asked about at a time

Picture = str | Path | Image.Image | np.ndarray  # a file, an image of Pillow, or pixels uint8 (H, W, 3) or (H, W)


@dataclass(frozen=True)
class TaskInfo:
    """A task that a model has learnt."""

    name: str
    classes: tuple[str, ...]
    first_class: int  # logit index of its first class
    folder: Path


@dataclass(frozen=True)
class Prediction:
    """What a model says of one image: its best classes, best first, with probabilities among all it was asked of."""

    classes: tuple[str, ...]
    tasks: tuple[str, ...]
    probabilities: tuple[float, ...]

    @property
    def name(self) -> str:
        """The best class."""
        return self.classes[0]


class Model:
    """A model that goes on learning. Made by `pearl learn` or `pearl run`, opened by `pearl.load`."""

    def __init__(self, path: Path, config: ModelConfig, tasks: list[TaskInfo], device: torch.device) -> None:
        self.path, self.config, self.tasks, self.device = path, config, tasks, device
        self.view = View(config.images, channels_last=config.engine.channels_last)

    @classmethod
    def open(cls, path: str | Path, *, tasks: int | None = None, device: str = "auto") -> "Model":
        """A model as it was after its first `tasks` tasks; after all of them if not given.

        Raises:
            RunError: not a model, no task finished, or files missing or damaged.
        """
        path = Path(path)
        config = read_config(path)
        if tasks is None:  # a directory with a gap can still be used up to there, if one says so
            check_no_gap(path)
        known = task_infos(path)
        if tasks is not None and not 1 <= tasks <= len(known):
            raise RunError(f"{path}: {len(known)} tasks are finished, {tasks} were asked for; ask for 1 to {len(known)}")
        if not known:
            raise RunError(f"{path}: no task is finished yet; run the command that began it again")
        chosen = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
        try:
            place = torch.empty(0, device=chosen).device
        except (RuntimeError, AssertionError) as error:
            raise ConfigError(f"device {device!r} cannot be used here ({error}); use auto or cpu") from None
        return cls(path, config, known[:tasks], place)

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
        )

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
        self, images: Picture | Iterable[Picture], *, task: str | None = None, top: int = 1
    ) -> list[Prediction]:
        """The best `top` classes of each image, among all classes (class-IL), or among those of `task` (task-IL).

        Images go through the transforms of training's test images; of any size. One image, or any number of them.

        Raises:
            DataError: naming an image that cannot be read.
            ConfigError: no such task.
        """
        if isinstance(images, str | Path | Image.Image) or (isinstance(images, np.ndarray) and images.ndim < 4):
            images = [images]  # type: ignore[list-item]
        images = list(images)
        found: list[Prediction] = []
        for start in range(0, len(images), BATCH):
            pixels = [to_pixels(image, self.config.images.stored) for image in images[start : start + BATCH]]
            found += self.predict_pixels(np.stack(pixels), task=task, top=top)
        return found

    def predict_pixels(self, pixels: np.ndarray, *, task: str | None = None, top: int = 1) -> list[Prediction]:
        """As `predict`, of raw pixels (N, S, S, 3) uint8 of the model's stored size."""
        index = None if task is None else self.task_index(task)
        tasks = self.tasks if index is None else [self.tasks[index]]
        names = [(name, info.name) for info in tasks for name in info.classes]
        share, order = self.logits(pixels, index).double().softmax(1).topk(min(top, len(names)), dim=1)
        return [
            Prediction(
                tuple(names[c][0] for c in row), tuple(names[c][1] for c in row), tuple(float(p) for p in probability)
            )
            for row, probability in zip(order.tolist(), share.tolist(), strict=True)
        ]

    @torch.no_grad()
    def logits(self, pixels: np.ndarray, task: int | None = None) -> Tensor:
        """Logits (N, classes) float32 on the CPU of raw pixels (N, S, S, 3) uint8; of one task's classes if given.

        In float32 whatever the precision of training, so that an image's answer does not depend on the machine.
        """
        method, parts = self.method, []
        for start in range(0, len(pixels), BATCH):
            x = self.view.test(torch.from_numpy(pixels[start : start + BATCH]).to(self.device))
            if task is not None:
                parts.append(method(x, task).cpu())
            else:
                parts.append(torch.cat([expert.forward(x) for expert in method.experts()], dim=1).cpu())
        return torch.cat(parts)

    # ----------------------------------------------------------------------------------------------------- learning

    def learn(self, data: str | Path, *, task: str | None = None, **overrides: Any) -> "Model":
        """Learn the classes of an image folder as a new task, and store it: `pearl learn` in Python.

        Returns the grown model. `overrides` are settings of training: `learn(data, train={"epochs": 5})`.

        Raises:
            PearlError: anything a user can mend; the model is then as it was.
        """
        from pearl.learn import learn

        return learn(self.path, data, task=task, overrides=overrides, device=self.device.type)


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
    except (ValueError, OSError, AttributeError) as error:
        raise DataError(f"an image cannot be used ({error}); give a file, a Pillow image or a uint8 array") from None


def read_all(files: Sequence[Path], size: int) -> tuple[list[Path], np.ndarray, list[str]]:
    """Decode files side by side: those that can be read, their pixels (N, size, size, 3) uint8, and what is wrong
    with the others, a line each."""

    def attempt(file: Path) -> np.ndarray | DataError:
        try:
            return read_image(file, size)
        except DataError as error:
            return error

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        decoded = list(pool.map(attempt, files))
    good = [(file, image) for file, image in zip(files, decoded, strict=True) if isinstance(image, np.ndarray)]
    pixels = np.stack([image for _, image in good]) if good else np.empty((0, size, size, 3), np.uint8)
    return [file for file, _ in good], pixels, [str(found) for found in decoded if isinstance(found, DataError)]


# ------------------------------------------------------------------------------------------------------------- files


def read_config(path: Path) -> ModelConfig:
    """The configuration of a model or run directory.

    Raises:
        RunError: not such a directory, or its configuration cannot be read.
    """
    file = path / "config.yaml"
    if not file.is_file():
        if (path / "tasks").is_dir():
            raise RunError(f"{file}: missing, though tasks are there; restore it from a copy")
        raise RunError(f"{path}: not a run directory, it has no config.yaml; `pearl list runs` shows those there are")
    try:
        raw = yaml.safe_load(file.read_text())
        number = raw.pop("format")
        check_format(file, number)
        return check_config(raw, RunConfig if "recipe" in raw else ModelConfig)
    except (OSError, ValueError, TypeError, AttributeError, KeyError, yaml.YAMLError, ConfigError) as error:
        reason = " ".join(str(error).split())
        raise RunError(f"{file}: cannot be read ({reason}); restore it, or run into a new directory") from None


def config_bytes(config: ModelConfig) -> bytes:
    """What `read_config` reads."""
    return f"format: {FORMAT}\n{config.to_yaml()}".encode()


def task_infos(path: Path) -> list[TaskInfo]:
    """The finished tasks of a model, from their manifests."""
    found: list[TaskInfo] = []
    first = 0
    for folder in finished(path):
        manifest = read_json(folder / MANIFEST)
        try:
            info = TaskInfo(str(manifest["name"]), tuple(map(str, manifest["classes"])), first, folder)
        except (KeyError, TypeError) as error:
            raise RunError(f"{folder / MANIFEST}: damaged (no {error}); restore it from a copy") from None
        found.append(info)
        first += len(info.classes)
    return found


def verify(path: Path) -> list[str]:
    """What is wrong with the files of a model, a line each; every checksum is computed."""
    wrong = []
    for folder in (path / "reference", *finished(path)):
        try:
            read_part(folder)
        except RunError as error:
            wrong.append(str(error))
    return wrong


def build_backbone(config: ModelConfig, *, structure_only: bool = False) -> nn.Module:
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


def build_method(config: ModelConfig, *, structure_only: bool = False) -> Method:
    """The method of a run, before its first task.

    Raises:
        ConfigError: options that this backbone cannot fulfil.
    """
    return METHODS.build(config.method, build_backbone(config, structure_only=structure_only))


def load_method(
    path: Path,
    config: ModelConfig,
    tasks: int | None = None,
    *,
    place: Callable[[Method], Method] = lambda method: method,
) -> Method:
    """A method as it was after its first `tasks` tasks (all finished ones if not given).

    `place` moves it to a device and layout.

    Raises:
        RunError: files missing, damaged, or not of this configuration.
    """
    method = place(build_method(config, structure_only=True))
    try:
        method.load_state_dict(load_state(path, tasks), strict=True)
    except RuntimeError as error:
        raise RunError(f"{path}: state does not fit its configuration ({' '.join(str(error).split())})") from None
    return place(method).eval()  # again, for the tensors that came with the state
