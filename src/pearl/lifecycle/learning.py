"""A new task for a model, out of a folder of images; on its first task the model is made.

MODEL has the files of a run (see `runs`) without its stream and results. Decoded images stay in memory: nothing of
them is left on disk, since who learns so may not keep them. MODEL/resume/task.json says of the task that is being
learnt what it is made of, so that `resume` needs nothing else.
"""

import hashlib
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from pearl.data.augment import View
from pearl.data.batches import Task
from pearl.data.cache import read_all
from pearl.data.sources import class_folders, left_out
from pearl.errors import ConfigError, DataError, RunError
from pearl.lifecycle.copying import check_place, copy_model, is_copy
from pearl.lifecycle.saved import (
    build_method,
    check_method,
    load_method,
    read_config,
    resume_command,
    task_infos,
)
from pearl.lifecycle.session import session
from pearl.settings.config import ModelConfig, RunConfig, admit, as_stored, check_config, merge, raw_config
from pearl.settings.parts import METHODS
from pearl.settings.registry import nearest
from pearl.storage.files import MANIFEST, PENDING, check_no_gap, finished, half_learnt, read_json, write_json
from pearl.training.engine import Engine, Observer

Backbone = str | dict[str, Any] | None  # a name, or a name with options


def learn(
    path: str | Path,
    data: str | Path,
    *,
    task: str | None = None,
    recipe: str | None = None,
    backbone: Backbone = None,
    start: str | Path | None = None,
    overrides: dict[str, Any] | None = None,
    device: str = "auto",
    show: Observer | None = None,
    minutes: float = 10.0,
    aliases: Mapping[str, str] | None = None,
    fast: bool = False,
) -> None:
    """Let the model at `path` learn the classes of `data` (DATA/CLASS/*, or DATA/train/CLASS/*) as task `task`.

    A model that is not there yet is made: by a recipe, by the name of a backbone, or with what the run or model
    `start` has learnt. An attempt that was cut off is gone on with if data and settings are the same; if they are those
    of the last task that was learnt, there is nothing left to do.

    New models tell tasks apart by class statistics (`method.classifier: chain`). These may be shown a class again, more
    images or another kind of them; `aliases` maps folders to the classes they show, {"beetles": "beetle"}. If `fast`,
    classes are added by their statistics alone, in seconds.

    Raises:
        PearlError: anything a user can mend. The model is then as it was.
    """
    path, root, overrides = Path(path), Path(data), admit(overrides or {})
    name = root.resolve().name if task is None else task
    source = None if start is None or is_copy(path, Path(start), name) else Path(start)
    check_place(path, source)
    config = _config(path, source, recipe, backbone, overrides)
    how: dict[str, Any] = {"device": device, "show": show, "minutes": minutes}
    _learn(path, root, name, config, source=source, aliases=dict(aliases or {}), fast=fast, **how)


def resume(path: Path, *, device: str = "auto", show: Observer | None = None, minutes: float = 10.0) -> None:
    """Go on with the task that an interrupted `learn` left.

    Raises:
        RunError: there is none, or its images are not the same any more.
    """
    known = _half_learnt(path)
    if not known and (path / PENDING).is_file():  # its process died when it was learnt
        with session(path, read_config(path), again="", device=device):
            return
    if not known:
        raise RunError(f"{path}: no task is half learnt; add one with: pearl learn {path} --data FOLDER")
    try:
        root, name, config = Path(known["data"]), known["name"], check_config(known["config"], ModelConfig)
    except ConfigError as error:
        raise RunError(f"{path / PENDING}: damaged ({error}); begin the task anew with `pearl learn`") from None
    how: dict[str, Any] = {"device": device, "show": show, "minutes": minutes}
    aliases, fast = known["aliases"], known["fast"]
    _learn(path, root, name, config, resumed=True, aliases=aliases, fast=fast, **how)


def _learn(
    path: Path,
    root: Path,
    name: str,
    config: ModelConfig,
    *,
    source: Path | None = None,
    resumed: bool = False,
    aliases: dict[str, str],
    fast: bool,
    device: str,
    show: Observer | None,
    minutes: float,
) -> None:
    show = show or Observer()
    folder = root / "train" if (root / "train").is_dir() else root
    names, files, own_labels = classes_of(folder, aliases)
    before = source or path
    known, settings = _half_learnt(path), config.model_dump(mode="json")
    try:
        if source is None and _is_learnt(path, name, names, files, own_labels, config, show):
            with session(path, config, again="", device=device, show=show):
                return
        new, again_shown = _new_and_known(before, name, names, config)
        done = len(finished(before))
        if fast and (done == 0 or not _has_statistics(config)):
            raise ConfigError(
                f"{path}: without training, classes can only be added to a model with class statistics "
                f"(method.classifier=chain), after its first task"
            )
        # before the images are decoded: mistakes in it are cheaper to find
        written = done > 0 or (known.get("config") == settings and (path / "reference" / MANIFEST).is_file())
        method = build_method(config, structure_only=written)
        if method.oracle:
            raise ConfigError(f"method={config.method['name']} needs the data of all tasks; choose another method")
        Engine(config, device=device)
        pixels = decode(files, config, show)
        images = facts_of(pixels, own_labels)
        facts = {
            "index": done,
            "name": name,
            "classes": list(names),
            **images,
            "config": settings,
            "fast": fast,
            "aliases": aliases,
        }
        same = all(known.get(key) == value for key, value in facts.items())
        if resumed and not same:
            raise RunError(
                f"{root}: not the images that the half-learnt task {name!r} began with; bring those back, or begin it "
                f"anew with `pearl learn`"
            )
        # what a first task that was cut off began with is there already, whatever became of a file of weights
        begun = written and (done > 0 or same)
        precision = known.get("precision") if same else None  # another machine may prefer another one, not in mid-task
        if source:
            copy_model(source, path)

        again = resume_command(path, config)
        with session(path, config, again=again, device=device, precision=precision, show=show, minutes=minutes) as work:
            if len(finished(path)) != done:
                raise RunError(f"{path}: another process has learnt a task meanwhile; run the same command again")
            if not same:
                shutil.rmtree(path / "resume", ignore_errors=True)
                place = {"data": str(root.absolute()), "precision": work.engine.precision}
                write_json(path / PENDING, {"format": 1, **facts, **place})
            if begun:
                method = load_method(path, config, done, place=work.engine.place)
            else:
                method = work.begin(build_method(config) if written else method)
            every = [label for info in task_infos(path) for label in info.classes]
            view = View(config.images, channels_last=config.engine.channels_last)
            index_of = {label: index for index, label in enumerate([*every, *new])}
            labels = np.array([index_of[label] for label in names])[own_labels]
            task = Task(done, name, new, len(every), pixels, labels, view, work.engine.fabric.device, train=not fast)
            if done and config.method.get("classifier", {}).get("name") == "heads":
                refit = f"pearl refit {path} --data FOLDER"
                text = f"its heads never met; with images of all its classes, {refit} makes a model that compares them"
                work.log.event("note", task=done, text=text)
            for line in left_out(folder):
                work.log.event("note", task=done, text=line)
            show.event("run", run=str(path), tasks=done + 1, done=done, classes=len(every) + len(new))
            work.learn(method, task, also=again_shown, train=settings["train"], seed=config.seed, **images)
    finally:
        show.close()


def _is_learnt(
    path: Path,
    name: str,
    names: tuple[str, ...],
    files: list[Path],
    labels: np.ndarray,
    config: ModelConfig,
    show: Observer,
) -> bool:
    """Whether the model's last task is this one, of these images and settings: a process was killed after it."""
    last = task_infos(path)[-1:]
    if not last or last[0].name != name or sorted(last[0].names) != list(names):
        return False
    wanted = {"train": config.model_dump(mode="json")["train"], "seed": config.seed}
    manifest = read_json(last[0].folder / MANIFEST)
    if any(manifest.get(key) != value for key, value in wanted.items()):
        return False
    wanted = facts_of(decode(files, config, show), labels)
    return all(manifest.get(key) == value for key, value in wanted.items())


def facts_of(pixels: np.ndarray, labels: np.ndarray) -> dict[str, Any]:
    """What a task's manifest says of its images (N, S, S, 3) uint8 with labels (N,) that count from 0."""
    return {
        "images_per_class": np.bincount(labels).tolist(),
        "images_sha256": hashlib.sha256(pixels.data).hexdigest(),
    }


def _half_learnt(path: Path) -> dict[str, Any]:
    """What is noted of the task that is being learnt; nothing if none is."""
    known = half_learnt(path)
    if known:
        known = {"fast": False, "aliases": {}, **known}
        with suppress(ConfigError):  # a damaged one equals no other, so that the task begins anew
            known["config"] = as_stored(known["config"], ModelConfig)
    return known


def _config(
    path: Path, source: Path | None, recipe: str | None, backbone: Backbone, overrides: dict[str, Any]
) -> ModelConfig:
    """The settings of this task: the model's own with other settings of training, or those of a new model."""
    before = source or path
    check_no_gap(before)
    if source or (path / "config.yaml").exists() or finished(path):
        config = read_config(before)
        if source and not finished(source):
            raise RunError(f"{source}: no task is finished; choose a directory that has learnt something")
        if not source and isinstance(config, RunConfig):
            raise RunError(
                f"{path}: a run of `pearl run`, whose tasks its recipe says; begin a model with what it has learnt: "
                f"pearl learn NEW --from {path} --data FOLDER"
            )
        if finished(before):
            same = _makes(config, recipe, backbone, overrides)
            if (named := overrides.get("method", {})).keys() <= {"name"}:  # which one it is, not another one
                check_method(before, config, named.get("name"))
                overrides = {key: value for key, value in overrides.items() if key != "method"}
            fixed = sorted(overrides.keys() - {"train"})
            fixed += [f"--{word}" for word, given in (("recipe", recipe), ("backbone", backbone)) if given]
            if fixed and not same:
                raise ConfigError(
                    f"{', '.join(fixed)}: fixed since {before} was made; only train.* may change from task to task"
                )
            overrides = {key: value for key, value in overrides.items() if key == "train"}
            return check_config(
                merge(config.model_dump(mode="json", include=set(ModelConfig.model_fields)), overrides), ModelConfig
            )
    return _new_config(recipe, backbone, overrides)


def _makes(config: ModelConfig, recipe: str | None, backbone: Backbone, overrides: dict[str, Any]) -> bool:
    """Whether these are the words that a model was made with: the command that made it is given again."""
    with suppress(ConfigError):
        return _new_config(recipe, backbone, overrides).model_dump() == config.model_dump(
            include=set(ModelConfig.model_fields)
        )
    return False


def _new_config(recipe: str | None, backbone: Backbone, overrides: dict[str, Any]) -> ModelConfig:
    """The settings of a new model."""
    own = ModelConfig.model_fields
    spec = merge({"backbone": backbone}, {"backbone": overrides.get("backbone", {})})["backbone"]
    timm = str(spec.get("name", "timm/")).startswith("timm/")
    raw = raw_config(recipe or ("photos-vit" if timm else "photos-resnet18"))
    if timm and (spec or not recipe):
        spec = {"pretrained": not spec.get("weights"), **spec}
    raw = merge(raw, {"backbone": spec})
    raw = merge({key: value for key, value in raw.items() if key in own}, overrides)
    return check_config(_with_statistics(raw), ModelConfig)


def _with_statistics(raw: dict[str, Any]) -> dict[str, Any]:
    """The configuration of a new model, which tells tasks apart by class statistics unless it says otherwise."""
    method = merge({}, {"method": raw["method"]})["method"]
    with suppress(ConfigError):  # of a name that there is not, `check_config` says so
        name = str(method["name"])
        if not METHODS.closed(name) and "classifier" in METHODS.options(name).model_fields:
            return {**raw, "method": {"classifier": "chain", **method}}
    return raw


def _has_statistics(config: ModelConfig) -> bool:
    return bool(config.method.get("classifier", {}).get("name") == "chain")


def classes_of(folder: Path, aliases: dict[str, str]) -> tuple[tuple[str, ...], list[Path], np.ndarray]:
    """As `class_folders`, by the names that folders stand for."""
    names, files, labels = class_folders(folder)
    if strange := sorted(aliases.keys() - {*names}):
        raise DataError(f"{folder}: no folder {strange[0]!r} that could be an alias; {nearest(strange[0], names)}")
    named = [aliases.get(name, name) for name in names]
    merged = sorted({*named})
    return tuple(merged), files, np.array([merged.index(name) for name in named])[labels]


def _new_and_known(
    path: Path, name: str, names: tuple[str, ...], config: ModelConfig
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The classes that the model does not know yet, and those that it does, in the order of their logit indices.

    Raises:
        ConfigError: the model knows the task.
        DataError: it knows a class that it cannot be shown again.
    """
    if not name.strip():
        raise ConfigError("a task needs a name; give it one with --task")
    infos = task_infos(path)
    for info in infos:
        if info.name == name:
            raise ConfigError(f"task {name!r} is there already ({info.folder}); give another one with --task")
    where = {known: info for info in infos for known in info.classes}
    twice = [f"{known!r} (task {where[known].name!r}, {where[known].folder})" for known in names if known in where]
    if twice and not _has_statistics(config):
        raise DataError(
            f"classes that the model knows already: {', '.join(twice)}; without class statistics a class is learnt "
            f"once, so rename or remove their folders"
        )
    return tuple(known for known in names if known not in where), tuple(known for known in where if known in names)


def decode(files: list[Path], config: ModelConfig, show: Observer) -> np.ndarray:
    """Pixels (N, S, S, 3) uint8 of all of them.

    Raises:
        DataError: naming every one that cannot be read.
    """
    show.event("decode", split="train", images=len(files))
    size = config.images.stored
    pixels = np.empty((len(files), size, size, 3), np.uint8)
    problems: list[str] = []
    for begin in range(0, len(files), 256):
        good, part, wrong = read_all(files[begin : begin + 256], size)
        pixels[begin : begin + len(good)] = part  # of no use if one is missing, and then not used
        problems += wrong
        show.step(min(begin + 256, len(files)), len(files))
    if problems:
        count = f"{len(problems)} of {len(files)} images cannot be read: remove or replace them"
        raise DataError("\n".join([count, *problems]))
    return pixels
