"""A new task for a model, out of a folder of images; on its first task the model is made.

MODEL has the files of a run (see `runs`) without its stream and results. Decoded images stay in memory: nothing of
them is left on disk, since who learns so may not keep them. MODEL/resume/task.json says of the task that is being
learnt what it is made of, so that `resume` needs nothing else.
"""

import hashlib
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from pearl.data.augment import View
from pearl.data.batches import Task
from pearl.data.cache import read_all
from pearl.data.sources import class_folders, left_out
from pearl.errors import ConfigError, DataError, RunError
from pearl.lifecycle.saved import (
    CODE,
    build_method,
    check_method,
    config_bytes,
    load_method,
    read_config,
    resume_command,
    task_infos,
    verify,
)
from pearl.lifecycle.session import LOCK, locked, session
from pearl.settings.config import ModelConfig, RunConfig, admit, as_stored, check_config, merge, raw_config
from pearl.storage.files import MANIFEST, PENDING, check_no_gap, finished, half_learnt, read_json, write_json
from pearl.training.engine import Engine, Observer

Backbone = str | dict[str, Any] | None  # a name, or a name with options

# what may lie in a directory before its configuration does
_EARLY = {*LOCK, "resume", "events.jsonl"}


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
) -> None:
    """Let the model at `path` learn the classes of `data` (DATA/CLASS/*, or DATA/train/CLASS/*) as task `task`.

    A model that is not there yet is made: by a recipe, by the name of a backbone, or with what the run or model
    `start` has learnt. An attempt that was cut off is gone on with if data and settings are the same; if they are those
    of the last task that was learnt, there is nothing left to do.

    Raises:
        PearlError: anything a user can mend. The model is then as it was.
    """
    path, root, overrides = Path(path), Path(data), admit(overrides or {})
    name = root.resolve().name if task is None else task
    source = None if start is None or _is_copy(path, Path(start), name) else Path(start)
    _check_place(path, source)
    config = _config(path, source, recipe, backbone, overrides)
    _learn(path, root, name, config, source=source, device=device, show=show, minutes=minutes)


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
    _learn(path, root, name, config, resumed=True, device=device, show=show, minutes=minutes)


def _learn(
    path: Path,
    root: Path,
    name: str,
    config: ModelConfig,
    *,
    source: Path | None = None,
    resumed: bool = False,
    device: str,
    show: Observer | None,
    minutes: float,
) -> None:
    show = show or Observer()
    folder = root / "train" if (root / "train").is_dir() else root
    names, files, own_labels = class_folders(folder)
    before = source or path
    known, settings = _half_learnt(path), config.model_dump(mode="json")
    try:
        if source is None and _is_learnt(path, name, names, files, own_labels, config, show):
            with session(path, config, again="", device=device, show=show):
                return
        _check_new(before, name, names)
        done = len(finished(before))
        # before the images are decoded: mistakes in it are cheaper to find
        written = done > 0 or (known.get("config") == settings and (path / "reference" / MANIFEST).is_file())
        method = build_method(config, structure_only=written)
        if method.oracle:
            raise ConfigError(f"method={config.method['name']} needs the data of all tasks; choose another method")
        Engine(config, device=device)
        pixels = _decode(files, config, show)
        images = _facts(pixels, own_labels)
        facts = {
            "index": done,
            "name": name,
            "classes": list(names),
            **images,
            "config": settings,
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
            first = sum(len(info.classes) for info in task_infos(path))
            view = View(config.images, channels_last=config.engine.channels_last)
            labels = first + own_labels
            new = Task(done, name, names, first, pixels, labels, view, work.engine.fabric.device)
            for line in left_out(folder):
                work.log.event("note", task=done, text=line)
            show.event("run", run=str(path), tasks=done + 1, done=done, classes=first + len(names))
            work.learn(method, new, train=settings["train"], seed=config.seed, **images)
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
    if not last or (last[0].name, last[0].classes) != (name, names):
        return False
    wanted = {"train": config.model_dump(mode="json")["train"], "seed": config.seed}
    manifest = read_json(last[0].folder / MANIFEST)
    if any(manifest.get(key) != value for key, value in wanted.items()):
        return False
    wanted = _facts(_decode(files, config, show), labels)
    return all(manifest.get(key) == value for key, value in wanted.items())


def _facts(pixels: np.ndarray, labels: np.ndarray) -> dict[str, Any]:
    """What a task's manifest says of its images (N, S, S, 3) uint8 with labels (N,) that count from 0."""
    return {
        "images_per_class": np.bincount(labels).tolist(),
        "images_sha256": hashlib.sha256(pixels.data).hexdigest(),
    }


def _half_learnt(path: Path) -> dict[str, Any]:
    """What is noted of the task that is being learnt; nothing if none is."""
    known = half_learnt(path)
    if known:
        with suppress(ConfigError):  # a damaged one equals no other, so that the task begins anew
            known["config"] = as_stored(known["config"], ModelConfig)
    return known


def copy_model(start: Path, path: Path) -> None:
    """Make a model with what another directory has learnt; its files are copied, whole or not at all.

    Raises:
        RunError: a file of `start` is damaged, or `path` cannot be written to.
        Busy: another process is at it.
    """
    damaged = verify(start)
    if damaged:
        raise RunError("\n".join(damaged))
    raw = read_config(start).model_dump(mode="json", include=set(ModelConfig.model_fields))
    aside = path.with_name(f".{path.name}.copy")
    with locked(aside):
        try:
            if path.exists():
                raise RunError(f"{path}: another process has made it meanwhile; run the same command again")
            for leftover in aside.iterdir():  # of a copy that was killed
                if leftover.is_dir():
                    shutil.rmtree(leftover)
            for folder in (start / "reference", *finished(start)):
                shutil.copytree(folder, aside / folder.relative_to(start))
            for name in ("classes.json", "environment.json", CODE):
                if (start / name).is_file():
                    shutil.copy2(start / name, aside / name)
            (aside / "config.yaml").write_bytes(config_bytes(check_config(raw, ModelConfig)))
            aside.rename(path)  # with its lock
        except (OSError, shutil.Error) as error:
            raise RunError(
                f"{path}: {start} cannot be copied to it ({getattr(error, 'strerror', None) or error}); mend "
                f"permissions or free space"
            ) from None
        finally:
            shutil.rmtree(aside, ignore_errors=True)


def _is_copy(path: Path, start: Path, name: str) -> bool:
    """Whether `path` holds what `start` has learnt and no more, or no more than task `name`: a copy that was cut off
    when it learnt its first task, or after that.
    """

    def there(place: Path) -> list[bytes]:
        return [(folder / MANIFEST).read_bytes() for folder in (place / "reference", *finished(place))]

    if not all((place / "reference" / MANIFEST).is_file() for place in (path, start)):
        return False
    copied, own = there(start), [info.name for info in task_infos(path)][len(finished(start)) :]
    return (path / "config.yaml").is_file() and there(path)[: len(copied)] == copied and own in ([], [name])


def _check_place(path: Path, source: Path | None) -> None:
    """Refuse a directory that holds other things, and one that is there already to be made by copying."""
    if (path / "config.yaml").exists() or (path / "tasks").exists():
        if source:
            raise RunError(f"{path}: is there already; leave out --from to go on with it, or choose another name")
    elif path.exists() and not path.is_dir():
        raise RunError(f"{path}: is a file; choose another name for the model")
    elif path.is_dir() and (source or {place.name for place in path.iterdir()} - _EARLY):
        raise RunError(f"{path}: a folder of other things, not a model; choose a name that is not there yet")


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
    return check_config(merge({key: value for key, value in raw.items() if key in own}, overrides), ModelConfig)


def _check_new(path: Path, name: str, names: tuple[str, ...]) -> None:
    """Refuse a task or classes that the model knows already."""
    if not name.strip():
        raise ConfigError("a task needs a name; give it one with --task")
    infos = task_infos(path)
    for info in infos:
        if info.name == name:
            raise ConfigError(f"task {name!r} is there already ({info.folder}); give another one with --task")
    where = {known: info for info in infos for known in info.classes}
    twice = [f"{known!r} (task {where[known].name!r}, {where[known].folder})" for known in names if known in where]
    if twice:
        raise DataError(
            f"classes that the model knows already: {', '.join(twice)}; a class is learnt once, so rename or remove "
            f"their folders"
        )


def _decode(files: list[Path], config: ModelConfig, show: Observer) -> np.ndarray:
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
