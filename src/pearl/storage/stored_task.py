"""A task on disk: a folder of tensors with a manifest that says what they are. No torch."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pearl.storage.files import read_json
from pearl.storage.shapes import Record, Task

MANIFEST = "manifest.json"  # of a folder of tensors, which counts once it is there


@dataclass(frozen=True)
class StoredTask:
    """A finished task: its new classes, known ones that it has shown again, and what its manifest says."""

    name: str
    classes: tuple[str, ...]
    first_class: int  # logit index of its first class
    folder: Path
    also: tuple[str, ...]  # in the order of their logit indices
    manifest: Mapping[str, Any]  # see `shapes.Task`

    @property
    def names(self) -> tuple[str, ...]:
        """All of its classes, in the order of their logit indices."""
        return (*self.also, *self.classes)

    @property
    def file(self) -> Path:
        """The manifest's file."""
        return self.folder / MANIFEST

    @property
    def images(self) -> int | None:
        """How many images it was learnt from; None if not recorded."""
        return self.manifest.get("images")

    @property
    def parameters(self) -> int:
        """Parameters of the whole model, after this task."""
        return int(self.manifest["parameters"])

    @property
    def isolation(self) -> int | None:
        """Parameters of one network per task, after this task; None if not recorded."""
        return self.manifest.get("isolation_parameters")

    @property
    def bytes(self) -> int:
        """Bytes of its tensors on disk."""
        return stored_bytes(self.folder, self.manifest)

    @property
    def layers(self) -> dict[str, dict[str, float]]:
        """Threshold, rank, full rank, rows and columns by layer; empty if no ranks are chosen."""
        keys = ("threshold", "rank", "full_rank", "rows_and_columns")
        return {layer["layer"]: {key: layer[key] for key in keys} for layer in self.manifest.get("layers", [])}

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of each phase."""
        return dict(self.manifest["seconds"])

    @property
    def reused(self) -> list[str]:
        """Phases that another run has trained, in so many seconds."""
        return list(self.manifest.get("reused", []))

    @property
    def train(self) -> dict[str, Any]:
        """Settings, which for a model may change from task to task; empty in a run."""
        return dict(self.manifest.get("train", {}))


def read_manifest(folder: Path, shape: type[Record] = Task) -> dict[str, Any]:
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
    """Return the bytes of a task's tensors on disk; as its manifest says where none of them are kept."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors")) or int(manifest["bytes"])


def task_rows(task: int, shapes: Mapping[str, Sequence[int]]) -> set[int]:
    """Return how many classes a task has, by the shapes of what it added: its head, or statistics of its classes."""
    names = (f"heads.blocks.{task}.weight", f"statistics.tensors.{task}/count")
    return {shapes[name][0] for name in names if name in shapes}
