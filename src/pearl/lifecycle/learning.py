"""A new task for a model, out of images with classes; on its first task the model is made.

MODEL has the files of a run (see `runs`) without its stream and results. Decoded images stay in memory: nothing of
them is left on disk, since who learns so may not keep them. MODEL/resume/task.json says of the task that is being
learnt what it is made of, so that `resume` needs nothing else.
"""

import hashlib
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pearl.data import copies
from pearl.data.augment import View
from pearl.data.batches import Task, fold
from pearl.data.decoding import Decoding
from pearl.data.given import Given, check_aliases, given, name_of
from pearl.data.pictures import unreadable
from pearl.errors import ConfigError, DataError, RunError, TrainingError, printable
from pearl.lifecycle import outcome
from pearl.lifecycle.choices import LearnOptions, config_for, has_statistics
from pearl.lifecycle.copying import check_place, copy_model, is_copy
from pearl.lifecycle.recognition import check_known
from pearl.lifecycle.saved import build_method, learnt_images, load_method, read_config, resume_command
from pearl.lifecycle.session import session
from pearl.names import class_name, without_marks
from pearl.settings.config import ModelConfig, as_stored, check_config
from pearl.storage.aside import remove_leftovers
from pearl.storage.inside import remove_tree
from pearl.storage.run_directory import RunDirectory
from pearl.storage.stored_task import StoredTask
from pearl.training.engine import Engine, Observer


def learn(
    path: str | Path,
    data: Any,
    options: LearnOptions,
    *,
    device: str = "auto",
    show: Observer | None = None,
    minutes: float = 10.0,
) -> None:
    """Let the model at `path` learn the classes of `data` as a new task.

    `data` are folders of images, DATA/CLASS/* or DATA/train/CLASS/*, at any depth if `nested`, or anything else that
    `given` takes. A task without a name is called as the folder or file, or after the classes of images in memory.

    A model that is not there yet is made: by a recipe, by the name of a backbone, or with what the run or model
    `start` has learnt. An attempt that was cut off is gone on with if data and settings are the same; if they are those
    of the last task that was learnt, there is nothing left to do.

    New models tell tasks apart by class statistics (`method.classifier: chain`). These may be shown a class again, more
    images or another kind of them. Of images that are held out, one at least of a class of two is; see `outcome` for
    what is known of a model without that. Copies of an image are learnt once; see `copies.without_copies`.

    Raises:
        PearlError: anything a user can mend. The model is then as it was.
    """
    path, start = Path(path), options.start
    options = replace(options, task=options.task and class_name(options.task))
    name = name_of(data) if options.task is None else options.task
    source = None if start is None or is_copy(path, Path(start), name) else Path(start)
    if start is not None and source is None:  # the copy was made, but its maker was perhaps killed just then
        remove_leftovers(path)
    check_place(path, source, "leave out --from to go on with it, or choose another name")
    config = config_for(path, source, options)
    _learn(path, data, config, options, source=source, device=device, show=show, minutes=minutes)


def resume(path: Path, *, device: str = "auto", show: Observer | None = None, minutes: float = 10.0) -> None:
    """Go on with the task that an interrupted `learn` left.

    Raises:
        RunError: there is none, or its images are not the same any more.
    """
    known, directory = _half_learnt(path), RunDirectory(path)
    if not known and directory.pending_file.is_file():  # its process died when it was learnt
        with session(path, read_config(path), again="", device=device):
            return
    if not known:
        raise RunError(f"{path}: no task is half learnt; add one with: pearl learn {path} --data FOLDER")
    try:
        data, name, config = known["data"], known["name"], check_config(known["config"], ModelConfig)
    except ConfigError as error:
        raise RunError(
            f"{directory.pending_file}: damaged ({error}); begin the task anew with `pearl learn --discard`"
        ) from None
    if not data:
        raise RunError(
            f"{path}: task {name!r} was of images in memory; give them again: pearl.learn({str(path)!r}, ...)"
        )
    same = {key: known[key] for key in ("aliases", "fast", "nested", "holdout")}
    options = LearnOptions(task=name, allow_new_style=True, **same)  # or the task would not have begun
    _learn(path, data, config, options, resumed=True, device=device, show=show, minutes=minutes)


def _learn(
    path: Path,
    data: Any,
    config: ModelConfig,
    options: LearnOptions,
    *,
    source: Path | None = None,
    resumed: bool = False,
    device: str,
    show: Observer | None,
    minutes: float,
) -> None:
    show, aliases, holdout = show or Observer(), dict(options.aliases or {}), options.holdout
    size, before, directory = config.images.stored, RunDirectory(source or path), RunDirectory(path)
    known, settings = {} if options.discard else _half_learnt(path), config.model_dump(mode="json")
    try:
        read: dict[str, Any] = {"decoding": Decoding.of(config.images), "on_progress": _progress(show)}
        found = given(data, size, part="train", nested=options.nested, **read)
        check_aliases(aliases, [found])
        found = found.renamed(aliases)
        name, names = found.name if options.task is None else options.task, found.classes
        _check_holdout(found, found.labels, holdout)
        if source is None and _is_learnt(path, name, found, config, holdout, show):
            with session(path, config, again="", device=device, show=show):
                return
        new, again_shown = _new_and_known(before.tasks, name, names, config)
        done = len(before.finished)
        if options.fast and (done == 0 or not has_statistics(config)):
            raise ConfigError(
                f"{path}: without training, classes can only be added to a model with class statistics "
                f"(method.classifier=chain), after its first task"
            )
        # before the images are decoded: mistakes in it are cheaper to find
        written = done > 0 or (known.get("config") == settings and directory.reference_manifest.is_file())
        method = build_method(config, structure_only=written)
        if method.oracle:
            raise ConfigError(f"method={config.method['name']} needs the data of all tasks; choose another method")
        engine = Engine(config, device=device)
        facts: dict[str, Any] = {"index": done, "name": name, "classes": list(names), "config": settings}
        facts |= {"fast": options.fast, "aliases": aliases, "holdout": holdout}
        if not resumed and not facts.items() <= known.items():  # before the images are decoded
            _check_nothing_half_learnt(path, known, config)
        pixels = decode(found, size, show)
        images = facts_of(pixels, found.labels)
        facts |= images
        same = all(known.get(key) == value for key, value in facts.items())
        if resumed and not same:
            raise RunError(
                f"{found.place}: not the images that the half-learnt task {name!r} began with; bring those back, "
                f"or begin it anew with `pearl learn --discard`"
            )
        if not same:
            _check_nothing_half_learnt(path, known, config)
        infos = before.tasks
        every = [label for info in infos for label in info.classes]
        index_of = {label: index for index, label in enumerate([*every, *new])}
        labels = np.array([index_of[label] for label in names])[found.labels]
        stay, notes = copies.without_copies(
            copies.hashes(pixels), found.labels, names, learnt_images(infos), found.where
        )
        if not stay.all():
            pixels, labels = pixels[stay], labels[stay]
            _check_holdout(found, labels, holdout)
        if not new:
            notes.append("no new class: these are more images of known ones")
        if (known_ones := labels < len(every)).any():
            of_known = pixels[known_ones], labels[known_ones], every
            notes += check_known(before.path, config, engine, done, *of_known, allow_new_style=options.allow_new_style)
        # what a first task that was cut off began with is there already, whatever became of a file of weights
        begun = written and (done > 0 or same)
        precision = known.get("precision") if same else None  # another machine may prefer another one, not in mid-task
        if source:
            copy_model(source, path)

        again = resume_command(path, config) if found.place else "the same pearl.learn, with the same images"
        with session(path, config, again=again, device=device, precision=precision, show=show, minutes=minutes) as work:
            if len(directory.finished) != done:
                raise RunError(f"{path}: another process has learnt a task meanwhile; run the same command again")
            if not same:
                remove_tree(directory.resume_folder, path)
                origin = {"data": found.place or "", "nested": options.nested, "precision": work.engine.precision}
                directory.write(directory.pending_file, {**facts, **origin})
            if begun:
                method = load_method(path, config, done, place=work.engine.place)
            else:
                method = work.begin(build_method(config) if written else method)
            view = View(config.images, channels_last=config.engine.channels_last)
            place = view, work.engine.fabric.device
            task = Task(done, name, new, len(every), pixels, labels, *place, train=not options.fast)
            if holdout:
                torch.manual_seed(fold(config.seed, done, "holdout"))
                (task, held), images["holdout"] = task.hold_out(holdout), holdout
            learnt = task.images.cpu().numpy(), task.labels.cpu().numpy()
            images["image_hashes"] = copies.written(copies.hashes(learnt[0]), learnt[1], [*every, *new])
            measure = outcome.held_out(held) if holdout else outcome.left_out
            every_note = (*found.notes, *notes, *found.decoding.notes())
            for line in (*every_note, *_much_alike(new, every), *_heads_alone(path, done, config)):
                work.log.event("note", task=done, text=line)
            show.event("run", run=str(path), tasks=done + 1, done=done, classes=len(every) + len(new))
            try:
                work.learn(
                    method, task, also=again_shown, measure=measure, train=settings["train"], seed=config.seed, **images
                )
            except TrainingError as error:
                if not directory.checkpoints:
                    raise
                raise TrainingError(f"{error}; with other settings the task begins anew, by --discard") from None
    finally:
        show.close()


def _check_holdout(found: Given, labels: np.ndarray, holdout: float) -> None:
    if holdout and np.bincount(labels).max() < 2:
        raise ConfigError(
            f"{found.place or found.name}: holdout={holdout:g} needs a class of two images or more; leave it out"
        )


def _is_learnt(
    path: Path,
    name: str,
    found: Given,
    config: ModelConfig,
    holdout: float,
    show: Observer,
) -> bool:
    """Whether the model's last task is this one, of these images and settings: a process was killed after it."""
    last = RunDirectory(path).tasks[-1:]
    if not last or last[0].name != name or sorted(last[0].names) != sorted(found.classes):
        return False
    wanted = {"train": config.model_dump(mode="json")["train"], "seed": config.seed}
    manifest = last[0].manifest
    if any(manifest.get(key) != value for key, value in wanted.items()) or manifest.get("holdout", 0.0) != holdout:
        return False
    wanted = facts_of(decode(found, config.images.stored, show), found.labels)
    return all(manifest.get(key) == value for key, value in wanted.items())


def facts_of(pixels: np.ndarray, labels: np.ndarray) -> dict[str, Any]:
    """What a task's manifest says of its images (N, S, S, 3) uint8 with labels (N,) that count from 0."""
    return {
        "images_per_class": np.bincount(labels).tolist(),
        "images_sha256": hashlib.sha256(pixels.data).hexdigest(),
    }


def _half_learnt(path: Path) -> dict[str, Any]:
    """What is noted of the task that is being learnt; nothing if none is."""
    known = RunDirectory(path).half_learnt
    if known:
        known = {"fast": False, "aliases": {}, "nested": False, "holdout": 0.0, **known}
        with suppress(ConfigError):  # a damaged one equals no other, so that the task begins anew
            known["config"] = as_stored(known["config"], ModelConfig)
    return known


def _check_nothing_half_learnt(path: Path, known: Mapping[str, Any], config: ModelConfig) -> None:
    """Refuse to throw away what is stored of another task, if anything is.

    Raises:
        RunError: naming the task, and both ways to go on.
    """
    if known and RunDirectory(path).checkpoints:
        again = resume_command(path, config) if known["data"] else "the same pearl.learn, with the same images"
        raise RunError(
            f"{path}: task {known['name']!r} is half learnt; go on with: {again}; or throw it away with --discard "
            f"(in Python discard=True)"
        )


def _heads_alone(path: Path, done: int, config: ModelConfig) -> Iterator[str]:
    """A line for a model whose heads cannot be compared, though they could be."""
    if done and config.method.get("classifier", {}).get("name") == "heads":
        yield (
            f"its heads never met; with images of all its classes, pearl refit {path} --data FOLDER makes a model that "
            f"compares them"
        )


def _much_alike(new: Sequence[str], known: Sequence[str]) -> Iterator[str]:
    """A line for each new class that is called as a known one but for capitals, spaces and marks."""

    def plain(name: str) -> str:
        return "".join(c for c in without_marks(name).casefold() if c.isalnum())

    place = {plain(name): name for name in known}
    for name in new:
        if plain(name) and (other := place.get(plain(name))):
            yield (
                f"{printable(name)!r} is a new class beside the known {printable(other)!r}; if they are the same, "
                f"learn it with --alias {shlex.quote(f'{name}={other}')}"
            )


def _new_and_known(
    infos: Sequence[StoredTask], name: str, names: tuple[str, ...], config: ModelConfig
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The classes that the model does not know yet, and those that it does, in the order of their logit indices.

    Raises:
        ConfigError: the model knows the task.
        DataError: it knows a class that it cannot be shown again.
    """
    if not name.strip():
        raise ConfigError("a task needs a name; give it one with --task")
    for info in infos:
        if info.name == name:
            raise ConfigError(f"task {name!r} is there already ({info.folder}); give another one with --task")
    where = {known: info for info in infos for known in info.classes}
    twice = [f"{known!r} (task {where[known].name!r}, {where[known].folder})" for known in names if known in where]
    if twice and not has_statistics(config):
        raise DataError(
            f"classes that the model knows already: {', '.join(twice)}; without class statistics a class is learnt "
            f"once, so rename or remove their folders"
        )
    return tuple(known for known in names if known not in where), tuple(known for known in where if known in names)


def decode(found: Given, size: int, show: Observer) -> np.ndarray:
    """Pixels (N, size, size, 3) uint8 of all of them.

    Raises:
        DataError: naming every one that cannot be read.
    """
    if isinstance(found.images, np.ndarray):
        return found.pixels(0, len(found), size)[0]
    tell = _progress(show)
    pixels = np.empty((len(found), size, size, 3), np.uint8)
    problems: list[str] = []
    for begin in range(0, len(found), 256):
        part, wrong = found.pixels(begin, begin + 256, size)
        pixels[begin : begin + len(part)] = part  # of no use if one is missing, and then not used
        problems += wrong
        tell(min(begin + 256, len(found)), len(found))
    if problems:
        raise unreadable(problems, len(found))
    return pixels


def _progress(show: Observer) -> Callable[[int, int], None]:
    """Tells how many images are read, and first that they are."""
    begun = False

    def tell(done: int, total: int) -> None:
        nonlocal begun
        if not begun:
            show.event("decode", split="train", images=total)
            begun = True
        show.step(done, total)

    return tell
