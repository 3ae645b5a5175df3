"""A new task for a model, out of a folder of images; on its first task the model is made.

MODEL has the files of a run (see `runs`) without its stream and results. Decoded images stay in memory: nothing of
them is left on disk, since who learns so may not keep them.
"""

import hashlib
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from pearl.config import ModelConfig, RunConfig, check_config, merge, raw_config
from pearl.data.augment import View
from pearl.data.batches import Task
from pearl.data.cache import read_all
from pearl.data.sources import class_folders
from pearl.engine import Observer
from pearl.errors import ConfigError, DataError, RunError
from pearl.files import check_no_gap, finished, read_json, write_json
from pearl.saved import build_method, config_bytes, load_method, read_config, task_infos
from pearl.session import session


def learn(
    path: str | Path,
    data: str | Path,
    *,
    task: str | None = None,
    recipe: str | None = None,
    backbone: str | None = None,
    start: str | Path | None = None,
    overrides: dict[str, Any] | None = None,
    device: str = "auto",
    show: Observer | None = None,
    minutes: float = 10.0,
) -> None:
    """Let the model at `path` learn the classes of `data` (DATA/CLASS/*, or DATA/train/CLASS/*) as task `task`.

    A model that is not there yet is made: by a recipe, by the name of a backbone, or with what the run or model
    `start` has learnt. An attempt that was cut off is gone on with if data and settings are the same.

    Raises:
        PearlError: anything a user can mend. The model is then as it was.
    """
    path, root, show = Path(path), Path(data), show or Observer()
    call: dict[str, Any] = {"data": str(root.absolute()), "task": task, "recipe": recipe, "backbone": backbone}
    call |= {"start": None if start is None else str(Path(start).absolute()), "overrides": overrides or {}}
    try:
        names, files, own_labels = class_folders(root / "train" if (root / "train").is_dir() else root)
        name = task or root.resolve().name
        if start is not None:
            begin_from(Path(start), path)
        config = _config(path, recipe, backbone, overrides or {})
        _check_new(path, name, names)
        # before the images are decoded: mistakes in it are cheaper to find
        method = build_method(config, structure_only=bool(finished(path)))
        if method.oracle:
            raise ConfigError(f"method={config.method['name']} needs the data of all tasks; choose another method")
        pixels = _decode(files, config, show)
        facts = {
            "index": len(finished(path)),
            "name": name,
            "classes": list(names),
            "images_sha256": hashlib.sha256(pixels.tobytes()).hexdigest(),
            "config_sha256": hashlib.sha256(config_bytes(config)).hexdigest(),
        }
        pending = path / "resume" / "task.json"
        known = read_json(pending) if pending.is_file() else {}
        same = facts.items() <= known.items()
        precision = known["precision"] if same else None  # another machine may prefer another one, but not in mid-task

        again = f"pearl resume {path}"
        with session(path, config, again=again, device=device, precision=precision, show=show, minutes=minutes) as work:
            done = len(finished(path))
            if not same:
                shutil.rmtree(pending.parent, ignore_errors=True)
                write_json(pending, {"format": 1, **facts, "precision": work.engine.precision, "call": call})
            method = load_method(path, config, place=work.engine.place) if done else work.begin(method)
            first = sum(len(info.classes) for info in task_infos(path))
            view = View(config.images, channels_last=config.engine.channels_last)
            labels = first + own_labels
            new = Task(done, name, names, first, pixels, labels, view, work.engine.fabric.device)
            show.event("run", run=str(path), tasks=done + 1, done=done, classes=first + len(names))
            work.learn(method, new, train=config.train.model_dump(mode="json"), seed=config.seed)
    finally:
        show.close()


def resume(path: Path, **how: Any) -> None:
    """Go on with the task that an interrupted `learn` left.

    Raises:
        RunError: there is none.
    """
    pending = path / "resume" / "task.json"
    if not pending.is_file() or read_json(pending)["index"] < len(finished(path)):
        raise RunError(f"{path}: no task is half learnt; add one with: pearl learn {path} --data FOLDER")
    call = read_json(pending)["call"]
    if len(finished(path)):
        call["start"] = None  # it has been begun from there already
    learn(path, **call, **how)


def begin_from(start: Path, path: Path) -> None:
    """Make a model with what another directory has learnt; its files are copied, whole or not at all.

    Raises:
        RunError: `path` is there already, or `start` has no finished task.
    """
    if (path / "config.yaml").exists():
        raise RunError(f"{path}: is there already; leave out --from to go on with it")
    check_no_gap(start)
    config = read_config(start)
    if not finished(start):
        raise RunError(f"{start}: no task is finished; choose a directory that has learnt something")
    plain = ModelConfig(**config.model_dump(include=set(ModelConfig.model_fields)))
    aside = path.with_name(f".{path.name}.copy")
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        for name in ("reference", "tasks"):
            shutil.copytree(start / name, aside / name)
        for name in ("classes.json", "environment.json"):
            shutil.copy2(start / name, aside / name)
        (aside / "config.yaml").write_bytes(config_bytes(plain))
        aside.rename(path)
    except OSError as error:
        raise RunError(f"{path}: cannot be written ({error.strerror}); mend its permissions or free space") from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _config(path: Path, recipe: str | None, backbone: str | None, overrides: dict[str, Any]) -> ModelConfig:
    """The settings of this task: the model's own with other settings of training, or those of a new model."""
    if finished(path):
        config = read_config(path)
        if isinstance(config, RunConfig):
            raise RunError(
                f"{path}: a run of `pearl run`, whose tasks its recipe says; begin a model with what it has learnt: "
                f"pearl learn NEW --from {path} --data FOLDER"
            )
        check_no_gap(path)
        fixed = sorted(overrides.keys() - {"train"})
        fixed += [f"--{word}" for word, given in (("recipe", recipe), ("backbone", backbone)) if given]
        if fixed:
            raise ConfigError(
                f"{', '.join(fixed)}: fixed since {path} was made; only train.* may change from task to task"
            )
        return check_config(merge(config.model_dump(mode="json"), overrides), ModelConfig)
    own = backbone is None or backbone.startswith("timm/")
    raw = raw_config(recipe or ("photos-vit" if own else "photos-resnet18"))
    if backbone is not None:
        raw = merge(raw, {"backbone": {"name": backbone, **({"pretrained": True} if own else {})}})
    raw = merge(raw, overrides)
    return check_config({key: value for key, value in raw.items() if key in ModelConfig.model_fields}, ModelConfig)


def _check_new(path: Path, name: str, names: tuple[str, ...]) -> None:
    """Refuse a task or classes that the model knows already."""
    infos = task_infos(path)
    for info in infos:
        if info.name == name:
            raise ConfigError(f"task {name!r} is there already ({info.folder}); give another one with --task")
    where = {known: info for info in infos for known in info.classes}
    twice = [f"{known!r} (task {where[known].name}, {where[known].folder})" for known in names if known in where]
    if twice:
        raise DataError(
            f"classes that the model knows already: {', '.join(twice)}; a class is learnt once, so rename or remove "
            f"their folders"
        )


def _decode(files: list[Path], config: ModelConfig, show: Observer) -> np.ndarray:
    show.event("decode", split="train", images=len(files))
    parts, problems = [], []
    for begin in range(0, len(files), 256):
        _, pixels, wrong = read_all(files[begin : begin + 256], config.images.stored)
        parts.append(pixels)
        problems += wrong
        show.step(min(begin + 256, len(files)), len(files))
    if problems:
        count = f"{len(problems)} of {len(files)} images cannot be read: remove or replace them"
        raise DataError("\n".join([count, *problems]))
    return np.concatenate(parts)
