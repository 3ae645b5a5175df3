"""Removal of a class or a task from a model that has learnt it.

Isolated sub-networks do not depend on each other, so that a model without one of its tasks has the same bits as one
that never learnt it. Training draws its random numbers by the task's name, not its number, for this reason. Class
statistics are shared by all tasks, and are computed anew without a removed one (see `without_task`).
"""

import math
import re
import shlex
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from pearl.errors import ConfigError, RunError, counted, printable
from pearl.lifecycle.certificate import Kept, certify, tensor_files
from pearl.lifecycle.changing import Event, changed, edit_events, list_classes
from pearl.lifecycle.choices import has_statistics
from pearl.lifecycle.without_task import (
    OWN,
    NewTask,
    can_lose_class,
    check_removable,
    costs,
    without_class,
    without_task,
)
from pearl.methods.common.subnetworks import TASK_TENSOR, SubNetworks
from pearl.names import class_name
from pearl.settings.config import ModelConfig
from pearl.settings.parts import METHODS
from pearl.settings.registry import nearest, readable
from pearl.storage.change import Change
from pearl.storage.checkpoint import FEATURES, STORED, features_without, rewritten, sha256
from pearl.storage.files import json_bytes, read_regular
from pearl.storage.run_directory import RunDirectory
from pearl.storage.stored_task import MANIFEST, StoredTask

Tensors = dict[str, Tensor]

_PROTOTYPES = re.compile(r"(class_statistics\.tensors\.task/\d+/)(classes|counts|means/\d+)")  # a row per class


def forget(
    path: Path, name: str | None = None, *, task: str | None = None, dry_run: bool = False, discard: bool = False
) -> str:
    """Remove a class, or a task; see `forget_class` and `forget_task`.

    Raises:
        ConfigError: both or none are given.
        PearlError: see there.
    """
    if (name is None) == (task is None):
        raise ConfigError("forget: give one class with --class, or one task with --task")
    if task is not None:
        return forget_task(path, task, dry_run=dry_run, discard=discard)
    return forget_class(path, str(name), dry_run=dry_run, discard=discard)


def forget_class(path: Path, name: str, *, dry_run: bool = False, discard: bool = False) -> str:
    """Remove a class from a model: its head's row, or its statistics. Return a line, also about what stays.

    Its share of the covariance and of thresholds goes only if the features of all images are stored
    (`method.classifier.keep_features`) and every task has another class: the statistics are then those of the other
    images. If its tasks were learnt without training, the removal is exact.

    Raises:
        ConfigError: the class is unknown, or it is the only one of its task, whose heads are removed as a task.
        RunError: not a model, the method does not support it, or a file is damaged or cannot be written.
        Busy: another process works on it.
    """
    name = class_name(name)

    def planned(change: Change | None, config: ModelConfig) -> str:
        tasks = RunDirectory(path).tasks
        classes = [each for task in tasks for each in task.classes]
        _check_method(path, config)
        if name not in classes:
            raise ConfigError(f"{path}: no class {printable(name)!r}; {nearest(name, classes)}")
        if len(classes) == 1:
            raise RunError(f"{path}: {printable(name)} is its only class; remove the folder instead")
        statistics = has_statistics(config)
        owner = next(t for t, task in enumerate(tasks) if name in task.classes)
        task = shlex.quote(printable(tasks[owner].name))
        if not statistics and len(tasks[owner].classes) == 1:
            raise ConfigError(
                f"{path}: {printable(name)} is the only class of its task; remove the task with: "
                f"pearl forget {path} --task {task}"
            )
        gone = "means and counts are" if statistics else "row of the head is"
        stays, anew = "weights", statistics and can_lose_class(tasks, name)
        if anew:
            gone = "share of all statistics is"
            stays *= any(each.seconds for each in tasks if name in each.names)
        elif statistics:
            stays = "weights and the covariance"
        exact = "" if statistics else f"remove its whole task with --task {task}, or "
        if change:
            _remove_class(change, config, tasks, owner, name, anew=anew)
            kept = map(_same, tensor_files([change.directory.reference, *change.directory.finished]))
            certify(change, {"class": name}, kept, stays=stays and f"the {stays} computed with its images")
        return (
            f"{path}: class {printable(name)} is forgotten: its {gone} removed, and it is never predicted again; "
            + (
                f"the {stays} computed with its images stay; to remove them too, {exact}learn the other classes into a "
                f"new model"
                if stays
                else "nothing of its images stays, since its tasks were learnt without training"
            )
        )

    return changed(path, "pearl forget --class", planned, dry_run=dry_run, discard=discard)


def forget_task(path: Path, name: str, *, dry_run: bool = False, discard: bool = False) -> str:
    """Remove a task from a model with isolated sub-networks, and return a line about it.

    The rest has the bits of a model that learnt only the other tasks. With class statistics this needs the features of
    all images (`method.classifier.keep_features`). It holds on the CPU with as many threads as learnt; elsewhere sums
    are equal up to rounding. If the sub-network is a feature space, a task that was learnt without training, for lack
    of a free space, stays so.

    Raises:
        ConfigError: the task is unknown.
        RunError: not a model, it is the only task, others depend on it, or a file is damaged or cannot be written.
        Busy: another process works on it.
    """

    def planned(change: Change | None, config: ModelConfig) -> str:
        directory = RunDirectory(path)
        tasks = directory.tasks
        _check_method(path, config)
        names = [class_name(task.name) for task in tasks]
        if class_name(name) not in names:
            raise ConfigError(f"{path}: no task {printable(name)!r}; {nearest(class_name(name), names)}")
        at = names.index(class_name(name))
        if len(tasks) == 1:
            raise RunError(f"{path}: {printable(name)} is its only task; remove the folder instead")
        statistics = has_statistics(config)
        if statistics:
            check_removable(path, tasks, at)
        for task in tasks[at:]:
            tensors = [tensor for tensor in task.manifest["tensors"] if not (statistics and tensor.startswith(OWN))]
            if shared := [tensor for tensor in tensors if not TASK_TENSOR.fullmatch(tensor)]:
                raise RunError(
                    f"{path}: task {printable(task.name)} trained weights that other tasks use ({shared[0]}), and "
                    f"cannot be removed; learn the other tasks into a new model"
                )
        new = without_task(directory, config, tasks, at) if statistics else _renumbered_tasks(directory, tasks, at)
        if change:
            _remove_task(change, tasks, at, new)
            certify(change, {"task": tasks[at].name, "classes": [*tasks[at].classes]}, _kept(directory, tasks, at, new))
        cost = costs(tasks, at, new) if statistics else ""
        classes, left = counted(len(tasks[at].classes), "class"), counted(len(tasks) - 1, "task")
        return (
            f"{path}: task {printable(tasks[at].name)} is forgotten with its {classes}; "
            f"the model has the bits of one that learnt only the other {left}{cost and f'; {cost}'}"
        )

    return changed(path, "pearl forget --task", planned, dry_run=dry_run, discard=discard)


def _check_method(path: Path, config: ModelConfig) -> None:
    """Refuse a method whose tensors are not known to belong to one task or class each.

    A method declares it itself: a subclass may train a task by others, as `pnn` does.
    """
    name = str(config.method["name"])
    method = None if METHODS.closed(name) else METHODS.load(name)
    if not (isinstance(method, type) and issubclass(method, SubNetworks) and vars(method).get("isolated")):
        raise RunError(
            f"{path}: method {readable(name)} cannot forget, since its tensors may belong to several tasks; learn the "
            f"other classes into a new model, or take back the last task with: pearl undo {path}"
        )


# --------------------------------------------------------------------------------------------------------- a class


def _remove_class(
    change: Change, config: ModelConfig, tasks: list[StoredTask], owner: int, name: str, *, anew: bool
) -> None:
    """Prepare the files of a model without a class, the new one of task `owner`; with `anew` the statistics, too."""
    row = tasks[owner].classes.index(name)
    index = tasks[owner].first_class + row

    def without_rows(tensors: Tensors, t: int) -> Tensors:
        return _without_class(tensors, index=index, task=t, row=row if t == owner else None)

    new = without_class(config, tasks, owner, index, without_rows) if anew else {}
    removed = {"parameters": 0, "isolation_parameters": 0, "statistics": 0}
    for t, task in enumerate(tasks[owner:], owner):
        before = dict(task.manifest["tensors"])
        if anew:
            files, manifest = new[t].files, new[t].manifest
        else:
            files, manifest = rewritten(task.folder, dict(task.manifest), partial(without_rows, t=t))
        for tensor, shape in manifest["tensors"].items():
            if lost := math.prod(before.get(tensor, shape)) - math.prod(shape):
                removed["statistics" if tensor.startswith(OWN) else "parameters"] += lost
        if t == owner:
            removed["isolation_parameters"] = before[f"heads.blocks.{t}.weight"][1] + 1
        if not anew and (data := features_without(task.folder, manifest, index)) is not None:
            size = len(read_regular(task.folder / FEATURES))
            manifest |= {"bytes": manifest["bytes"] + len(data) - size}
            manifest["sha256"] = {**manifest["sha256"], FEATURES: sha256(data)}
            files[FEATURES] = data
        for file, data in files.items():
            change.write(task.folder / file, data)
        for key in ("classes", "also"):
            if key in manifest:
                manifest[key] = [each for each in manifest[key] if class_name(each) != name]
        for key, count in removed.items():
            if manifest.get(key) is not None and not (anew and key == "statistics"):
                manifest[key] -= count
        if hashes := manifest.get("image_hashes"):
            manifest["image_hashes"] = {each: text for each, text in hashes.items() if class_name(each) != name}
        estimate = manifest.get("estimate")
        if estimate and not (anew and estimate["how"] == "left out"):
            manifest.pop("estimate")
            manifest |= _estimate_without(estimate, index)
        change.write(task.file, json_bytes(manifest))
    list_classes(change, ((task.name, [each for each in task.classes if each != name]) for task in tasks))

    def without(event: Event) -> Event:
        names = event.get("classes")
        if not isinstance(names, list):
            return event
        return {**event, "classes": [each for each in names if class_name(str(each)) != name]}

    edit_events(change, without)


def _without_class(tensors: Tensors, *, index: int, task: int, row: int | None) -> Tensors:
    """Return the tensors of a file without a class: a logit index, and the row in the head of its task's file."""
    kept: Tensors = {}
    for name, value in tensors.items():
        if row is not None and name in (f"heads.blocks.{task}.weight", f"heads.blocks.{task}.bias"):
            kept[name] = _drop(value, [row])
        elif match := _PROTOTYPES.fullmatch(name):
            classes = tensors[f"{match[1]}classes"]
            kept[name] = _drop(value, (classes == index).nonzero()[:, 0].tolist())
            if match[2] == "classes":
                kept[name] = kept[name] - (kept[name] > index).to(value.dtype)
        else:
            kept[name] = value
    return kept


def _drop(value: Tensor, rows: list[int]) -> Tensor:
    return value[[row for row in range(len(value)) if row not in rows]].contiguous()


def _estimate_without(entry: Mapping[str, Any], index: int) -> dict[str, Any]:
    """Return a manifest's estimate without the counts of a class; its reliability is that of all images."""
    rows = [row for row, label in enumerate(entry["classes"]) if label != index]
    if not rows:
        return {}

    def moved(label: int) -> int:
        return label - (label > index)

    counts = {key: [entry[key][row] for row in rows] for key in ("total", "class_il", "task_il")}
    mistakes = [[moved(a), moved(b), n] for a, b, n in entry["mistakes"] if index not in (a, b)]
    labels = [moved(entry["classes"][row]) for row in rows]
    return {"estimate": {**entry, **counts, "classes": labels, "mistakes": mistakes}}


# ---------------------------------------------------------------------------------------------------------- a task


def _renumbered_tasks(directory: RunDirectory, tasks: list[StoredTask], at: int) -> list[NewTask]:
    """Return the tasks after a removed one, which get its place in names of folders and tensors."""
    before = tasks[at - 1].manifest if at else {**directory.start, "isolation_parameters": 0}
    gone, new = tasks[at].manifest, []
    for t, task in enumerate(tasks[at + 1 :], at):
        files, manifest = rewritten(task.folder, task.manifest, partial(_renumbered, task=t))
        manifest["task"] = t
        manifest.pop("estimate", None)  # measured among the removed classes, too
        for key in ("parameters", "isolation_parameters"):
            if None not in (manifest.get(key), gone.get(key), before.get(key)):
                manifest[key] -= gone[key] - before[key]
        old = {name: task.folder / name for name in STORED if (task.folder / name).is_file()}
        every = {name: files[name] if name in files else read_regular(file) for name, file in old.items()}
        new.append(NewTask(task, directory.folder_of(t, task.name), every, manifest, partial(_numbered, task=t)))
    return new


def _remove_task(change: Change, tasks: list[StoredTask], at: int, new: list[NewTask]) -> None:
    """Prepare the files of a model without a task, of which `new` are not as they were."""
    for task in tasks[at:]:
        for file in sorted(task.folder.iterdir()):
            if file.is_symlink() or not file.is_dir():
                change.remove(file)
    for each in new:
        for name, data in each.files.items():
            change.write(each.folder / name, data)
        change.write(each.folder / MANIFEST, json_bytes(each.manifest))
    list_classes(change, ((task.name, task.classes) for t, task in enumerate(tasks) if t != at))

    def without(event: Event) -> Event | None:
        number = event.get("task")
        if number == at:
            return None
        return {**event, "task": number - 1} if isinstance(number, int) and number > at else event

    edit_events(change, without)


def _renumbered(tensors: Tensors, *, task: int) -> Tensors:
    return {_numbered(name, task): value for name, value in tensors.items()}


def _numbered(name: str, task: int) -> str:
    return TASK_TENSOR.sub(rf"\g<before>{task}\g<after>", name)


def _kept(directory: RunDirectory, tasks: list[StoredTask], at: int, new: list[NewTask]) -> Iterator[Kept]:
    """Yield the files that remain without a task."""
    yield from map(_same, tensor_files([directory.reference, *(task.folder for task in tasks[:at])]))
    for each in new:
        if each.folder != each.before.folder:
            yield from each.kept()


def _same(file: Path) -> Kept:
    return Kept(file, file)
