"""Another name for a class of a model, wherever the name is stored."""

from pathlib import Path

from pearl.errors import ConfigError, printable
from pearl.lifecycle.changing import Event, changed, edit_events, list_classes
from pearl.names import class_name
from pearl.settings.config import ModelConfig
from pearl.settings.registry import nearest
from pearl.storage.change import Change
from pearl.storage.files import json_bytes
from pearl.storage.run_directory import RunDirectory


def rename(path: Path, old: str, new: str, *, dry_run: bool = False, discard: bool = False) -> str:
    """Give a class of a model another name, and return a line about it. Tensors are unchanged.

    Raises:
        ConfigError: the class is unknown, or the new name exists or is empty.
        RunError: not a model, or a file is damaged or cannot be written.
        Busy: another process works on it.
    """
    old, new = class_name(old), class_name(new)

    def renamed(name: str) -> str:
        return new if class_name(name) == old else name

    def planned(change: Change | None, config: ModelConfig) -> str:
        directory = RunDirectory(path)
        tasks = directory.tasks
        known = [class_name(name) for task in tasks for name in task.classes]
        if old not in known:
            raise ConfigError(f"{path}: no class {printable(old)!r}; {nearest(old, known)}")
        if not new.strip():
            raise ConfigError(f"{path}: the new name of class {printable(old)!r} is empty; give another one")
        if new in known:
            raise ConfigError(f"{path}: class {printable(new)!r} exists; give another name")
        if change:
            for task in tasks:
                manifest = dict(task.manifest)
                for key in ("classes", "also"):
                    if key in manifest:
                        manifest[key] = [renamed(name) for name in manifest[key]]
                hashes = manifest.get("image_hashes", {})
                if hashes:
                    manifest["image_hashes"] = {renamed(name): text for name, text in hashes.items()}
                change.write(task.file, json_bytes(manifest))
            list_classes(change, ((task.name, [renamed(name) for name in task.classes]) for task in tasks))
            edit_events(change, named)
        return f"{path}: class {printable(old)} is now called {printable(new)}"

    def named(event: Event) -> Event:
        names = event.get("classes")
        return {**event, "classes": [renamed(str(name)) for name in names]} if isinstance(names, list) else event

    return changed(path, "pearl rename", planned, dry_run=dry_run, discard=discard)
