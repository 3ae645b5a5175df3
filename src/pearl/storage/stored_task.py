"""A task on disk: a folder of tensors with their manifest. No torch."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pearl.names import class_name
from pearl.storage.files import read_json
from pearl.storage.schemas import Schema, TaskManifest

MANIFEST = "manifest.json"  # of a folder of tensors, which is complete once it exists


@dataclass(frozen=True)
class StoredTask:
    """A finished task: its new classes, repeated known ones, and its manifest."""

    name: str
    classes: tuple[str, ...]
    first_class: int  # logit index of its first class
    folder: Path
    also: tuple[str, ...]  # in the order of their logit indices
    manifest: Mapping[str, Any]  # see `shapes.Task`

    @property
    def names(self) -> tuple[str, ...]:
        """Return all of its classes, by logit index."""
        return (*self.also, *self.classes)

    @property
    def file(self) -> Path:
        """Return the path of the manifest."""
        return self.folder / MANIFEST

    @property
    def images(self) -> int | None:
        """Return the number of its images; None if not recorded."""
        return self.manifest.get("images")

    @property
    def parameters(self) -> int:
        """Return the parameters of the whole model after this task."""
        return int(self.manifest["parameters"])

    @property
    def isolation(self) -> int | None:
        """Return the parameters of one network per task after this task; None if not recorded."""
        return self.manifest.get("isolation_parameters")

    @property
    def bytes(self) -> int:
        """Return the bytes of its tensors on disk."""
        return stored_bytes(self.folder, self.manifest)

    @property
    def layers(self) -> dict[str, dict[str, float]]:
        """Return threshold, rank, full rank, rows and columns by layer; empty if no ranks are chosen."""
        keys = ("threshold", "rank", "full_rank", "rows_and_columns")
        return {layer["layer"]: {key: layer[key] for key in keys} for layer in self.manifest.get("layers", [])}

    @property
    def seconds(self) -> dict[str, float]:
        """Return the seconds of each phase."""
        return dict(self.manifest["seconds"])

    @property
    def reused(self) -> list[str]:
        """Return the phases that another run has trained, with their seconds."""
        return list(self.manifest.get("reused", []))

    @property
    def train(self) -> dict[str, Any]:
        """Return the training settings, which may differ between a model's tasks; empty in a run."""
        return dict(self.manifest.get("train", {}))


def read_manifest(folder: Path, shape: type[Schema] = TaskManifest) -> dict[str, Any]:
    """Return the manifest of a folder of tensors.

    Raises:
        RunError: it is missing, damaged or of another shape.
    """
    return read_json(folder / MANIFEST, shape)


def folder_name(index: int, name: str) -> str:
    """Return the name of a task's folder: its number and as much of its name as is safe in a path."""
    safe = re.sub(r"[^A-Za-z0-9_-]+", "-", name).strip("-")[:40]
    return f"{index:03d}-{safe}" if safe else f"{index:03d}"


def stored_bytes(folder: Path, manifest: Mapping[str, Any]) -> int:
    """Return the bytes of a task's tensors on disk; from its manifest if none are stored."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors")) or int(manifest["bytes"])


def task_rows(task: int, shapes: Mapping[str, Sequence[int]]) -> set[int]:
    """Return the number of classes of a task by the shapes of its tensors: its head, or class statistics."""
    names = (f"heads.blocks.{task}.weight", f"statistics.tensors.{task}/count")
    return {shapes[name][0] for name in names if name in shapes}


def classes_of(tasks: Iterable[tuple[str, Sequence[str]]]) -> dict[str, Any]:
    """Return the content of classes.json, from the name and the new classes of each task."""
    return {"tasks": [{"name": name, "classes": list(classes)} for name, classes in tasks]}


def composed(names: Sequence[str]) -> tuple[str, ...]:
    """Return names in the form in which they are compared."""
    return tuple(map(class_name, names))
