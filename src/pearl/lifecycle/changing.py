"""Atomic changes of a model for the verbs `undo`, `rename` and `forget`: all files are exchanged, or none."""

import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from pearl.errors import RunError, printable
from pearl.lifecycle.saved import read_config
from pearl.lifecycle.session import check_inside
from pearl.settings.config import ModelConfig, RunConfig
from pearl.storage.change import Change, complete
from pearl.storage.files import FORMAT, json_bytes, read_regular
from pearl.storage.inside import remove_temporaries, remove_tree
from pearl.storage.locks import locked
from pearl.storage.run_directory import RunDirectory
from pearl.storage.stored_task import classes_of

Planned = Callable[[Change | None, ModelConfig], str]  # None in a dry run; returns what happens, in a line
Event = dict[str, Any]


def changed(path: Path, verb: str, planned: Planned, *, dry_run: bool = False, discard: bool = False) -> str:
    """Change a model by the files that `planned` prepares, and return its line.

    If an earlier change was interrupted, that one is completed, and nothing else happens. `discard` discards an
    interrupted task whose images were in memory: only who still has them could resume it.

    Raises:
        RunError: not a model, a task is interrupted, or a file is damaged or cannot be written.
        Busy: another process works on it.
    """
    directory = RunDirectory(path)
    if dry_run or not directory.change_file.is_file():
        read_config(path)  # before locking, which would write into a directory of another kind
    with nullcontext() if dry_run else locked(path):
        if not dry_run:
            check_inside(path)
            remove_temporaries(path)
            if interrupted := complete(path):
                return completed(interrupted)
        config = read_config(path)
        if isinstance(config, RunConfig):
            raise RunError(
                f"{path}: a run of `pearl run`, whose recipe defines its tasks; start a model from it with: "
                f"pearl learn NEW --from {path} --data FOLDER"
            )
        directory.check_no_gap()
        lost = directory.interrupted_task if discard else {}
        if directory.is_interrupted and (not lost or lost["data"]):
            raise RunError(
                f"{path}: a task was interrupted; complete it with: pearl resume {path}; or discard it with the next "
                f"`pearl learn --discard`"
            )
        discarded = f"; the interrupted task {printable(lost['name'])} is discarded" if lost else ""
        if dry_run:
            return f"dry run, nothing is changed: {planned(None, config)}{discarded}"
        try:
            line = planned(change := Change(path), config)
        except BaseException:
            remove_tree(directory.change_folder, path)
            raise
        if lost:
            remove_tree(directory.resume_folder, path)
        change.commit(verb)
        return line + discarded


def complete_interrupted(path: Path) -> str:
    """Complete an interrupted change, and return a line about it; empty if there is none.

    Raises:
        RunError: see `change.complete`.
        Busy: another process works on it, perhaps on this change.
    """
    if not RunDirectory(path).change_file.is_file():
        return ""
    with locked(path):
        check_inside(path)
        return completed(verb) if (verb := complete(path)) else ""


def completed(verb: str) -> str:
    """Return the line about a change that was interrupted and is complete now."""
    return f"completed the interrupted `{verb}`, and changed nothing else; run the command again if more is to change"


def list_classes(change: Change, tasks: Iterable[tuple[str, Sequence[str]]]) -> None:
    """Prepare classes.json, from the name and the new classes of each task."""
    change.write(change.directory.classes_file, json_bytes({"format": FORMAT, **classes_of(tasks)}))


def edit_events(change: Change, edit: Callable[[Event], Event | None]) -> None:
    """Prepare events.jsonl with other events; those mapped to None are left out, unchanged lines keep their bytes."""
    file = change.directory.events_file
    if not file.is_file():
        return
    lines = []
    for line in read_regular(file).splitlines(keepends=True):
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):  # a line whose writer was killed
            lines.append(line)
            continue
        after = edit(dict(event)) if isinstance(event, dict) else event
        if after is not None:
            lines.append(line if after == event else json.dumps(after).encode() + b"\n")
    change.write(file, b"".join(lines))
