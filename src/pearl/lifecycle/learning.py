"""New tasks for a model from images with classes; the first task creates the model.

MODEL has the files of a run (see `runs`) without its stream and results. Decoded images are not stored, since the user
may not be allowed to keep them: they are in memory, or in a file without a name if they are too many (see `scratch`).
MODEL/resume/task.json describes the current task, so that `resume` needs nothing else.
"""

import hashlib
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pearl.data import copies, scratch
from pearl.data.augment import View
from pearl.data.batches import Task, derive_seed
from pearl.data.decoding import Decoding
from pearl.data.images import unreadable
from pearl.data.inputs import Inputs, check_aliases, given, name_of
from pearl.errors import ConfigError, DataError, RunError, TrainingError, printable
from pearl.lifecycle import accuracy_estimate
from pearl.lifecycle.choices import LearnOptions, config_for, has_statistics
from pearl.lifecycle.copying import check_target, copy_model, is_copy
from pearl.lifecycle.needs import needs
from pearl.lifecycle.recognition import check_known
from pearl.lifecycle.saved import build_method, learnt_images, load_method, read_config, resume_command
from pearl.lifecycle.session import session
from pearl.methods.base import has_frozen_features
from pearl.names import class_name, without_marks
from pearl.settings.config import ModelConfig, check_config
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
    plan: Callable[[str], object] | None = None,
) -> None:
    """Train the model at `path` on the classes of `data` as task `task`.

    `data` are folders of images, DATA/CLASS/* or DATA/train/CLASS/*, at any depth if `nested`, or anything else that
    `given` takes. The default name of a task is that of the folder or file, or of the classes for images in memory.

    A missing model is created: from a recipe, the name of a backbone, or the tasks of the run or model `start`. An
    interrupted attempt is resumed if data and settings are equal; if they are those of the last finished task, nothing
    is left to do.

    New models use class statistics (`method.classifier: statistics`). With these, a known class may get more images,
    possibly in a new style; `aliases` maps folders to the classes of their images, {"beetles": "beetle"}. If `fast`,
    classes are added in seconds by class statistics, without training.

    With `first_answer`, a task that is trained is learnt by class statistics alone first, if there are frozen features
    for it: a pretrained network's, or those of earlier tasks. This model is used until the trained one replaces it.

    `holdout` is a share of each class's images to evaluate on instead of training; at least one of two images. See
    `accuracy_estimate` for the estimate without it.

    With `plan`, nothing is decoded, trained or written: it gets a line for each thing that the task needs.

    If the model recognises almost no image of a known class, they are refused, since they may show something else; with
    `allow_new_style` they are learnt. Duplicate images are learnt once; see `copies.without_copies`.

    Raises:
        PearlError: any user error. The model is then unchanged.
    """
    path, start = Path(path), options.start
    options = replace(options, task=options.task and class_name(options.task))
    name = name_of(data) if options.task is None else options.task
    source = None if start is None or is_copy(path, Path(start), name) else Path(start)
    if start is not None and source is None:  # the copy is complete, but its process was possibly killed right then
        remove_leftovers(path)
    check_target(path, source, "leave out --from to continue it, or choose another name")
    config = config_for(path, source, options)
    with scratch.beside(path):
        _learn(path, data, config, options, source=source, device=device, show=show, minutes=minutes, plan=plan)


def resume(path: Path, *, device: str = "auto", show: Observer | None = None, minutes: float = 10.0) -> None:
    """Resume the task that an interrupted `learn` left.

    Raises:
        RunError: there is none, or its images have changed.
    """
    known, directory = RunDirectory(path).interrupted_task, RunDirectory(path)
    if not known and directory.pending_file.is_file():  # its process died when the task was finished
        with session(path, read_config(path), again="", device=device):
            return
    if not known:
        raise RunError(f"{path}: no interrupted task; add one with: pearl learn {path} --data FOLDER")
    try:
        data, name, config = known["data"], known["name"], check_config(known["config"], ModelConfig)
    except ConfigError as error:
        raise RunError(
            f"{directory.pending_file}: damaged ({error}); start the task again with `pearl learn --discard`"
        ) from None
    if not data:
        raise RunError(f"{path}: task {name!r} used images in memory; give them again: pearl.learn({str(path)!r}, ...)")
    same = {key: known[key] for key in ("aliases", "fast", "nested", "holdout", "first_answer") if key in known}
    options = LearnOptions(task=name, allow_new_style=True, **same)  # the task would not have started otherwise
    with scratch.beside(path):
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
    plan: Callable[[str], object] | None = None,
) -> None:
    show, aliases, holdout = show or Observer(), dict(options.aliases or {}), options.holdout
    size, before, directory = config.images.stored, RunDirectory(source or path), RunDirectory(path)
    known, settings = {} if options.discard else RunDirectory(path).interrupted_task, config.model_dump(mode="json")
    try:
        read: dict[str, Any] = {"decoding": Decoding.of(config.images), "on_progress": _progress(show)}
        inputs = given(data, size, part="train", nested=options.nested, **read)
        check_aliases(aliases, [inputs])
        inputs = inputs.renamed(aliases)
        name, names = inputs.name if options.task is None else options.task, inputs.classes
        _check_holdout(inputs, inputs.labels, holdout)
        if plan is None and source is None and _is_learnt(path, name, inputs, config, holdout, show):
            with session(path, config, again="", device=device, show=show):
                return
        new, again_shown = _new_and_known(before.tasks, name, names, config)
        done = len(before.finished)
        # before decoding images: errors here are cheaper to find
        written = done > 0 or (known.get("config") == settings and directory.reference_manifest.is_file())
        method = build_method(config, structure_only=written, without_timm=True)
        if options.fast and not (has_frozen_features(method, done) and has_statistics(config)):
            raise ConfigError(
                f"{path}: without training, classes can only be added to a model with class statistics "
                f"(method.classifier=statistics), after its first task or to a pretrained network"
            )
        if method.oracle:
            raise ConfigError(f"method={config.method['name']} needs the data of all tasks; choose another method")
        if plan is not None:
            for line in needs(method, config, before, inputs, name, new, fast=options.fast):
                plan(line)
            return
        engine = Engine(config, device=device)
        facts: dict[str, Any] = {"index": done, "name": name, "classes": list(names), "config": settings}
        facts |= {"fast": options.fast, "aliases": aliases, "holdout": holdout}
        if not resumed and not facts.items() <= known.items():  # before decoding images
            _check_nothing_interrupted(path, known, config)
        pixels = decode(inputs, size, show)
        images = facts_of(pixels, inputs.labels)
        facts |= images
        same = all(known.get(key) == value for key, value in facts.items())
        if resumed and not same:
            raise RunError(
                f"{inputs.source}: the images of the interrupted task {name!r} have changed; restore them, "
                f"or start it again with `pearl learn --discard`"
            )
        if not same:
            _check_nothing_interrupted(path, known, config)
        infos = before.tasks
        every = [label for info in infos for label in info.classes]
        index_of = {label: index for index, label in enumerate([*every, *new])}
        labels = np.array([index_of[label] for label in names])[inputs.labels]
        stay, notes = copies.without_copies(
            copies.hashes(pixels), inputs.labels, names, learnt_images(infos), inputs.where
        )
        if not stay.all():
            pixels, labels = scratch.taken(pixels, np.flatnonzero(stay)), labels[stay]
            _check_holdout(inputs, labels, holdout)
        if not new:
            notes.append("no new class: these are more images of known ones")
        if (known_ones := labels < len(every)).any():
            of_known = scratch.taken(pixels, np.flatnonzero(known_ones)), labels[known_ones], every
            notes += check_known(before.path, config, engine, done, *of_known, allow_new_style=options.allow_new_style)
        # the first task's start is stored, even if a weight file is gone now
        begun = written and (done > 0 or same)
        # another machine may prefer another precision, but not within a task
        precision = known.get("precision") if same else None
        if source:
            copy_model(source, path)

        again = resume_command(path, config) if inputs.source else "the same pearl.learn, with the same images"
        with session(path, config, again=again, device=device, precision=precision, show=show, minutes=minutes) as work:
            if [info.names for info in directory.tasks] != [info.names for info in infos]:
                raise RunError(f"{path}: another process has changed it meanwhile; run the same command again")
            if not same:
                remove_tree(directory.resume_folder, path)
                origin = {"data": inputs.source or "", "nested": options.nested, "precision": work.engine.precision}
                origin["first_answer"] = options.first_answer
                directory.write(directory.pending_file, {**facts, **origin})
            if begun:
                method = load_method(path, config, done, to_device=work.engine.to_device, without_timm=True)
            else:
                method = work.begin(build_method(config) if written else method)
            view = View(config.images, channels_last=config.engine.channels_last)
            view_and_device = view, work.engine.device
            # by name: then the task is the same, bit by bit, without an earlier one, see `forget`
            task = Task(
                done, name, new, len(every), pixels, labels, *view_and_device, train=not options.fast, seed_part=name
            )
            if holdout:
                torch.manual_seed(derive_seed(config.seed, name, "holdout"))
                (task, held), images["holdout"] = task.hold_out(holdout), holdout
            task.spares = has_statistics(config) and not holdout
            learnt = task.images.cpu().numpy(), task.labels.cpu().numpy()
            images["image_hashes"] = copies.written(copies.hashes(learnt[0]), learnt[1], [*every, *new])
            measure = accuracy_estimate.held_out(held) if holdout else accuracy_estimate.cross_validated
            every_note = (*inputs.notes, *notes, *inputs.decoding.notes())
            for line in (*every_note, *_much_alike(new, every), *_heads_alone(path, done, config)):
                work.log.event("note", task=done, text=line)
            show.event("run", run=str(path), tasks=done + 1, done=done, classes=len(every) + len(new))
            try:
                measuring: dict[str, Any] = {"measure": measure, "first_answer": options.first_answer}
                work.learn(
                    method, task, also=again_shown, **measuring, train=settings["train"], seed=config.seed, **images
                )
            except TrainingError as error:
                if not directory.checkpoints:
                    raise
                raise TrainingError(f"{error}; to start the task again with other settings, use --discard") from None
    finally:
        show.close()


def _check_holdout(inputs: Inputs, labels: np.ndarray, holdout: float) -> None:
    if holdout and np.bincount(labels).max() < 2:
        raise ConfigError(
            f"{inputs.source or inputs.name}: holdout={holdout:g} needs a class of two images or more; leave it out"
        )


def _is_learnt(
    path: Path,
    name: str,
    inputs: Inputs,
    config: ModelConfig,
    holdout: float,
    show: Observer,
) -> bool:
    """Return True if the last task is this one, with these images and settings: a process was killed after it."""
    last = RunDirectory(path).tasks[-1:]
    if not last or last[0].name != name or sorted(last[0].names) != sorted(inputs.classes):
        return False
    wanted = {"train": config.model_dump(mode="json")["train"], "seed": config.seed}
    manifest = last[0].manifest
    if any(manifest.get(key) != value for key, value in wanted.items()) or manifest.get("holdout", 0.0) != holdout:
        return False
    wanted = facts_of(decode(inputs, config.images.stored, show), inputs.labels)
    return all(manifest.get(key) == value for key, value in wanted.items())


def facts_of(pixels: np.ndarray, labels: np.ndarray) -> dict[str, Any]:
    """Return a manifest's facts about a task's images (N, S, S, 3) uint8 with labels (N,) from 0."""
    return {
        "images_per_class": np.bincount(labels).tolist(),
        "images_sha256": hashlib.sha256(pixels.data).hexdigest(),
    }


def _check_nothing_interrupted(path: Path, known: Mapping[str, Any], config: ModelConfig) -> None:
    """Refuse to discard another interrupted task.

    Raises:
        RunError: names the task, and both ways to continue.
    """
    if known and (RunDirectory(path).checkpoints or RunDirectory(path).first_answer):
        again = resume_command(path, config) if known["data"] else "the same pearl.learn, with the same images"
        raise RunError(
            f"{path}: task {known['name']!r} was interrupted; resume it with: {again}; or discard it with --discard "
            f"(in Python discard=True)"
        )


def _heads_alone(path: Path, done: int, config: ModelConfig) -> Iterator[str]:
    """Return a line for a model whose heads are not comparable although class statistics are possible."""
    if done and config.method.get("classifier", {}).get("name") == "heads":
        yield (
            f"its heads were trained separately; with images of all its classes, pearl refit {path} --data FOLDER "
            f"makes a model that compares them"
        )


def _much_alike(new: Sequence[str], known: Sequence[str]) -> Iterator[str]:
    """Return a line for each new class whose name equals a known one up to capitals, spaces and diacritics."""

    def plain(name: str) -> str:
        return "".join(c for c in without_marks(name).casefold() if c.isalnum())

    original = {plain(name): name for name in known}
    for name in new:
        if plain(name) and (other := original.get(plain(name))):
            yield (
                f"{printable(name)!r} is a new class with a name like the known {printable(other)!r}; if they "
                f"are the same, use --alias {shlex.quote(f'{name}={other}')}"
            )


def _new_and_known(
    infos: Sequence[StoredTask], name: str, names: tuple[str, ...], config: ModelConfig
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the new classes, and the known ones in the order of their logit indices.

    Raises:
        ConfigError: the task's name exists.
        DataError: a known class is repeated, which the method does not support.
    """
    if not name.strip():
        raise ConfigError("a task needs a name; give it one with --task")
    for info in infos:
        if info.name == name:
            raise ConfigError(f"task {name!r} exists ({info.folder}); give another one with --task")
    where = {known: info for info in infos for known in info.classes}
    twice = [f"{known!r} (task {where[known].name!r}, {where[known].folder})" for known in names if known in where]
    if twice and not has_statistics(config):
        raise DataError(
            f"known classes: {', '.join(twice)}; without class statistics a class can be learnt only once, so "
            f"rename or remove their folders"
        )
    return tuple(known for known in names if known not in where), tuple(known for known in where if known in names)


def decode(inputs: Inputs, size: int, show: Observer) -> np.ndarray:
    """Decode all images to pixels (N, size, size, 3) uint8.

    Raises:
        DataError: lists every unreadable image.
    """
    if isinstance(inputs.images, np.ndarray):
        return inputs.pixels(0, len(inputs), size)[0]
    tell = _progress(show)
    pixels = scratch.room((len(inputs), size, size, 3))
    problems: list[str] = []
    for begin in range(0, len(inputs), 256):
        part, wrong = inputs.pixels(begin, begin + 256, size)
        pixels[begin : begin + len(part)] = part  # incomplete results are not used
        problems += wrong
        tell(min(begin + 256, len(inputs)), len(inputs))
    if problems:
        raise unreadable(problems, len(inputs))
    return pixels


def _progress(show: Observer) -> Callable[[int, int], None]:
    """Report the number of read images, and first that reading has started."""
    begun = False

    def tell(done: int, total: int) -> None:
        nonlocal begun
        if not begun:
            show.event("decode", split="train", images=total)
            begun = True
        show.step(done, total)

    return tell
