"""A model with class statistics without one of its tasks or classes, computed from the features of the other images.

All classes share a covariance, and the thresholds of a task depend on the tasks before it. So the statistics of every
task are computed anew, in order, as `learn` computed them; only their images' features are needed, which a model with
`method.classifier.keep_features` stores. Sub-networks do not depend on each other and keep their bits.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from pearl.errors import RunError, counted, printable
from pearl.lifecycle.accuracy_estimate import accuracy_of, left_out
from pearl.lifecycle.certificate import Kept
from pearl.methods.common.by_statistics import Statistics, facts_of, file_of, named_features
from pearl.methods.common.class_statistics import ClassStatistics
from pearl.methods.common.subnetworks import TASK_TENSOR
from pearl.settings.config import ModelConfig
from pearl.settings.parts import CLASSIFIERS
from pearl.storage.checkpoint import (
    FEATURES,
    RUNNING,
    WEIGHTS,
    changed,
    part_files,
    read_features,
    read_files,
    rows_without,
    snapshot,
)
from pearl.storage.run_directory import RunDirectory
from pearl.storage.stored_task import StoredTask

Tensors = dict[str, Tensor]

OWN = "class_statistics."  # names of the tensors of class statistics
_OF_TASK = re.compile(r"(?P<before>class_statistics\.tensors\.task/)(?P<task>\d+)(?P<after>/.+?)(?P<space>\d+)?")
_OF_SPACE = re.compile(r"(?P<before>class_statistics\.tensors\.space/)(?P<space>\d+)(?P<after>/.+)")


@dataclass(frozen=True)
class NewTask:
    """The files and the manifest of a task in the model without another one, and where they come from."""

    before: StoredTask
    folder: Path
    files: dict[str, bytes]
    manifest: dict[str, Any]
    renamed: Callable[[str], str]  # from names of tensors before to those after

    def kept(self) -> Iterator[Kept]:
        """Yield the files that remain, for the certificate."""
        for name in self.files:
            if (self.before.folder / name).is_file():
                yield Kept(self.before.folder / name, self.folder / name, self.renamed)


def check_removable(path: Path, tasks: Sequence[StoredTask], at: int) -> None:
    """Check that the model without task `at` can be computed.

    Raises:
        RunError: features are not stored, or another task depends on it.
    """
    gone = tasks[at]
    named = printable(gone.name)
    spaces = created_at(tasks)
    for task in (*tasks[:at], *tasks[at + 1 :]):
        if not (task.folder / FEATURES).is_file():
            last = f"take back the last task with `pearl undo {path}`, " if at == len(tasks) - 1 else ""
            raise RunError(
                f"{path}: with class statistics a task can be removed only if the features of all images are stored, "
                f"as in models created with method.classifier.keep_features=true, since all classes share a "
                f"covariance; {last}remove its classes with --class, or learn the other tasks into a new model"
            )
        if not task.names:  # no mean, and no scale of its feature space
            raise RunError(f"{path}: task {printable(task.name)} has no classes left; forget that task first")
        if known := {*task.also} & {*gone.classes}:
            raise RunError(
                f"{path}: task {printable(task.name)} has more images of {printable(min(known))}, a class of task "
                f"{named}; forget task {printable(task.name)} first"
            )
    if at == 0 and spaces[:2] != [0, 1]:
        raise RunError(
            f"{path}: task {printable(tasks[1].name)} has no feature space but that of task {named}; learn the other "
            f"tasks into a new model"
        )


def created_at(tasks: Sequence[StoredTask]) -> list[int]:
    """Return the tasks whose sub-networks are the feature spaces."""
    return [int(task) for task in tasks[-1].manifest["spaces"]]


@torch.no_grad()
def without_task(directory: RunDirectory, config: ModelConfig, tasks: Sequence[StoredTask], at: int) -> list[NewTask]:
    """Return the changed tasks of a model without task `at`: those after it, and those before it whose running
    statistics are needed again. Computed on the CPU.

    Raises:
        RunError: a file is damaged.
    """
    options = cast(Statistics, CLASSIFIERS.build(config.method["classifier"]))
    statistics, made = ClassStatistics(options), created_at(tasks)
    spaces = [v for v, task in enumerate(made) if task != at]
    first, count = tasks[at].first_class, len(tasks[at].classes)
    left = [task for index, task in enumerate(tasks) if index != at]
    earlier = tasks[at - 1].manifest if at else {**directory.start, "isolation_parameters": 0}
    changed_tasks: list[NewTask | None] = []
    for index, task in enumerate(left):
        known, old = snapshot(statistics.state_dict()), index + (index >= at)
        features = read_features(task.folder, task.manifest)
        raws = [features[f"raw.{v}"] for v in spaces if made[v] <= old]
        labels = features["labels"] - count * (features["labels"] >= first)
        spared = features.get("spared")
        statistics.observe_raw(raws, labels, adds_space=old in made, spared=spared)
        added = changed(known, statistics.state_dict())
        tensors = {f"{OWN}{name}": value for name, value in added.items()}
        keeps_running = config.engine.earlier_states or index >= len(left) - 2
        renamed = partial(_renamed, index=index, at=at, spaces=spaces)
        if index < at:
            changed_tasks += [_with_running(task, tensors, renamed)] if keeps_running else []
            continue
        weights = read_files(task.folder, task.manifest, {WEIGHTS})
        tensors |= {renamed(name): value for name, value in weights.items() if not name.startswith(OWN)}
        kept = named_features(raws, labels, spared)
        facts = _facts(task.manifest, index, statistics, tasks[at].manifest, earlier)
        files, manifest = part_files(tensors, facts, file_of, kept)
        if not keeps_running:
            files.pop(RUNNING)
        changed_tasks.append(NewTask(task, directory.folder_of(index, task.name), files, manifest, renamed))
    return [task for task in changed_tasks if task is not None]


def can_lose_class(tasks: Sequence[StoredTask], name: str) -> bool:
    """Return True if `without_class` can compute the statistics without a class.

    It needs the features of all images, and another class in every task.
    """
    return all((task.folder / FEATURES).is_file() and {*task.names} - {name} for task in tasks)


@torch.no_grad()
def without_class(
    config: ModelConfig, tasks: Sequence[StoredTask], owner: int, index: int, edit: Callable[[Tensors, int], Tensors]
) -> dict[int, NewTask]:
    """Return the tasks from `owner` on with statistics of all images but those of a class, the logit index `index`.

    `edit` maps the other tensors of a task, and its number, to those without the class. Computed on the CPU.

    Raises:
        RunError: a file is damaged.
    """
    statistics = ClassStatistics(cast(Statistics, CLASSIFIERS.build(config.method["classifier"])))
    made, new = created_at(tasks), dict[int, NewTask]()
    for t, task in enumerate(tasks):
        known = snapshot(statistics.state_dict())
        features = rows_without(read_features(task.folder, task.manifest), index)
        raws = [features[f"raw.{v}"] for v, created in enumerate(made) if created <= t]
        statistics.observe_raw(raws, features["labels"], adds_space=t in made, spared=features.get("spared"))
        if t < owner:
            continue
        weights = read_files(task.folder, task.manifest, {WEIGHTS})
        tensors = {**edit({name: value for name, value in weights.items() if not name.startswith(OWN)}, t)}
        tensors |= {f"{OWN}{name}": value for name, value in changed(known, statistics.state_dict()).items()}
        facts = {**task.manifest, **facts_of(statistics)}
        if facts.get("estimate", {}).get("how") == "left out":
            facts.pop("estimate")
            facts |= left_out(statistics.cross_validated, statistics.trained_on)
        files, manifest = part_files(tensors, facts, file_of, features)
        if not (task.folder / RUNNING).exists():
            files.pop(RUNNING)
        new[t] = NewTask(task, task.folder, files, manifest, str)
    return new


def _with_running(task: StoredTask, tensors: Mapping[str, Tensor], renamed: Callable[[str], str]) -> NewTask | None:
    """Return a task before the removed one with the running statistics that later tasks had replaced.

    None if they are there, or are not reproduced bit by bit, as on another machine: then they stay away, and the task
    after it cannot be taken back.
    """
    files, made = part_files(tensors, {}, file_of)
    if (task.folder / RUNNING).exists() or made["sha256"][RUNNING] != task.manifest["sha256"].get(RUNNING):
        return None
    return NewTask(task, task.folder, {RUNNING: files[RUNNING]}, dict(task.manifest), renamed)


def _facts(
    manifest: Mapping[str, Any],
    index: int,
    statistics: ClassStatistics,
    gone: Mapping[str, Any],
    earlier: Mapping[str, Any],
) -> dict[str, Any]:
    """Return a manifest's facts without the removed task, whose manifest is `gone`, after the one of `earlier`."""
    facts = {**manifest, "task": index, **facts_of(statistics)}
    estimate = facts.pop("estimate", None)
    if estimate and estimate["how"] == "left out":  # held-out images were classified among the removed classes, too
        facts |= left_out(statistics.cross_validated, statistics.trained_on)
    for key in ("parameters", "isolation_parameters"):
        if None not in (facts.get(key), gone.get(key), earlier.get(key)):
            facts[key] -= gone[key] - earlier[key]
    return facts


def _renamed(name: str, *, index: int, at: int, spaces: Sequence[int]) -> str:
    """Return the name of a tensor of task `index` in the new model; one of a removed space is not in it."""
    if name.startswith("raw."):
        return _of_space(name, "raw.", int(name.removeprefix("raw.")), "", spaces)
    if match := _OF_SPACE.fullmatch(name):
        return _of_space(name, match["before"], int(match["space"]), match["after"], spaces)
    if match := _OF_TASK.fullmatch(name):
        task = int(match["task"])
        begin = f"{match['before']}{task - (task > at)}{match['after']}"
        return begin if match["space"] is None else _of_space(name, begin, int(match["space"]), "", spaces)
    return TASK_TENSOR.sub(rf"\g<before>{index}\g<after>", name)


def _of_space(name: str, before: str, v: int, after: str, spaces: Sequence[int]) -> str:
    return f"{before}{spaces.index(v)}{after}" if v in spaces else f"removed/{name}"


def costs(tasks: Sequence[StoredTask], at: int, new: Sequence[NewTask]) -> str:
    """Return what the removal of task `at` costs the rest: its feature space, and accuracy as far as it is known."""
    made, parts = created_at(tasks), []
    if at in made:
        left = counted(len(made) - 1, "feature space")
        parts.append(f"its feature space goes, so that {left} of {len(made)} remain, and no other takes its place")
    last = next((each for each in reversed(new) if each.folder != each.before.folder), None)
    before = accuracy_of(last.before.manifest.get("estimate")) if last else None
    after = accuracy_of(last.manifest.get("estimate")) if last else None
    if last and before is not None and after is not None:
        parts.append(
            f"of the images of task {printable(last.before.name)} {after:.1f} % are classified correctly without it, "
            f"{before:.1f} % with it (cross-validation)"
        )
    return "; ".join(parts)
