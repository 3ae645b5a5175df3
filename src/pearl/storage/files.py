"""Files of a run that are not tensors: written whole or not at all, read with a line for what is wrong. No torch."""

import errno
import itertools
import json
import os
import re
import stat
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import ValidationError

from pearl.errors import RunError, reason, remedy
from pearl.storage.inside import replace_file
from pearl.storage.shapes import Classes, Pending, Record, Results, Task

FORMAT = 1  # of a run directory; a higher number than this cannot be read
MANIFEST = "manifest.json"
PENDING = "resume/task.json"  # what the task that a model is learning is made of


def write_file(
    path: Path, data: bytes, *, within: Path | None = None, mend: str = "set PEARL_RUNS to another folder"
) -> None:
    """Write a whole file or none of it (see `inside.replace_file`).

    `within` is the folder below which it has to lie, whatever links there are. `mend` is what a user can do if that
    folder cannot be written to.

    Raises:
        RunError: no space or no permission, or the file would lie outside of `within`.
    """
    try:
        replace_file(path, data, within)
    except OSError as error:
        raise RunError(
            f"{path}: cannot be written ({reason(error)}); {remedy(error, mend)}, then run the same command again"
        ) from None


def check_writable(folder: Path, *, mend: str = "choose another path (PEARL_RUNS, for runs)") -> None:
    """See that files can be written into a folder, which need not be there yet; nothing is left of the attempt.

    Raises:
        RunError: no space, no permission, or something that is no folder in its place.
    """
    there = folder
    try:
        while not there.exists():
            there = there.parent
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise RunError(f"{folder}: cannot be written ({reason(error)}); {remedy(error, mend)}") from None


def open_regular(path: str | Path) -> BinaryIO:
    """A file, opened to be read. A FIFO would wait for a writer, and a device never end.

    Raises:
        OSError: it cannot be opened, or is something else.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except ValueError:  # a NUL
        raise OSError(errno.EINVAL, "no name that a file can have", str(path)) from None
    kind = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(kind):
        os.close(descriptor)
        code = errno.EISDIR if stat.S_ISDIR(kind) else errno.EINVAL
        raise OSError(code, os.strerror(code) if code == errno.EISDIR else "neither a file nor a folder", str(path))
    return os.fdopen(descriptor, "rb")


def read_regular(path: str | Path) -> bytes:
    """All of a file.

    Raises:
        OSError: see `open_regular`.
    """
    with open_regular(path) as file:
        return file.read()


def write_json(path: Path, value: Any, *, within: Path | None = None) -> None:
    """Write JSON whole or not at all; see `write_file`."""
    write_file(path, (json.dumps(value, indent=1) + "\n").encode(), within=within)


def read_json(path: Path, shape: type[Record] = Record) -> dict[str, Any]:
    """Read a JSON file of a run, as it is written, once it is known to have the entries of its `shape`.

    Raises:
        RunError: missing, damaged, of another shape, or of a newer format.
    """
    try:
        value = json.loads(read_regular(path))
    except FileNotFoundError:
        raise RunError(f"{path}: missing; restore it from a copy, or move the directory away and begin anew") from None
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise RunError(f"{path}: damaged ({reason}); restore it from a copy, or move it away and run again") from None
    number = value.get("format") if isinstance(value, dict) else None
    if not isinstance(number, int) or isinstance(number, bool):
        raise RunError(f"{path}: damaged (no format number); restore it from a copy, or move it away and run again")
    check_format(path, number)
    try:
        shape.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise RunError(
            f"{path}: damaged ({where}: {first['msg'][:1].lower()}{first['msg'][1:]}); restore it from a copy, or move "
            f"it away and run again"
        ) from None
    return value


def check_format(path: Path, number: int) -> None:
    """Refuse what a newer version of pearl has written.

    Raises:
        RunError: naming both versions of the format.
    """
    if number > FORMAT:
        raise RunError(f"{path}: format {number}, this pearl reads up to {FORMAT}; install a newer pearl to read it")


def folder_name(index: int, name: str) -> str:
    """A task's folder: its number and as much of its name as is safe in a path."""
    safe = re.sub(r"[^A-Za-z0-9_-]+", "-", name).strip("-")[:40]
    return f"{index:03d}-{safe}" if safe else f"{index:03d}"


def task_folders(run: Path) -> dict[int, list[Path]]:
    """All folders of tasks by number, finished or not."""
    numbered: dict[int, list[Path]] = {}
    for path in sorted((run / "tasks").glob("[0-9][0-9][0-9]*")):
        number, _, _ = path.name.partition("-")
        if number.isdecimal():
            numbered.setdefault(int(number), []).append(path)
    return numbered


def finished(run: Path) -> list[Path]:
    """Folders of the finished tasks, in order; a gap ends the list."""
    numbered = {
        number: path
        for number, paths in task_folders(run).items()
        for path in reversed(paths)
        if (path / MANIFEST).is_file()
    }
    return [numbered[index] for index in itertools.takewhile(numbered.__contains__, itertools.count())]


def manifests(run: Path, tasks: int | None = None, shape: type[Record] = Task) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Folder and manifest of the first `tasks` finished tasks (all if not given), each in its own place.

    Raises:
        RunError: a manifest cannot be read, or is of another task than its folder's number says.
    """
    for index, folder in enumerate(finished(run)[:tasks]):
        manifest = read_json(folder / MANIFEST, shape)
        if (own := manifest.get("task", index)) != index:
            raise RunError(
                f"{folder / MANIFEST}: is not of task {index:03d} but says {own!r}; folders were swapped, renamed or "
                f"copied, so give each its own name again, or restore them from a copy"
            )
        yield folder, manifest


def stored_bytes(folder: Path, manifest: Mapping[str, Any]) -> int:
    """Bytes of a task's tensors on disk; as its manifest says where none of them are kept."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors")) or int(manifest["bytes"])


def listed(run: Path) -> list[tuple[str, list[str]]]:
    """Name and classes of each task by classes.json, the second copy of what manifests say; none if it is not there.

    It is written after a task's manifest, so it may lack the last task and never has more than there are.

    Raises:
        RunError: it is damaged.
    """
    file = run / "classes.json"
    if not file.is_file():
        return []
    return [(task["name"], task["classes"]) for task in read_json(file, Classes)["tasks"]]


def half_learnt(model: Path) -> dict[str, Any]:
    """What is noted of the task that a model is learning; nothing if none is.

    The manifests are what counts: a task that has one is learnt, also if its process died before it removed the note.

    Raises:
        RunError: the note is damaged.
    """
    note = read_json(model / PENDING, Pending) if (model / PENDING).is_file() else {}
    return {} if note.get("index") in range(len(finished(model))) else note


def stored_checkpoints(run: Path) -> list[Path]:
    """What is stored of the task that a model or run is learning; nothing if none is."""
    return sorted(manifest.parent for manifest in (run / "resume").glob(f"*/{MANIFEST}"))


def done(run: Path) -> bool:
    """Return True if every task of a run has been learnt and evaluated.

    Raises:
        RunError: its results are damaged.
    """
    file = run / "results.json"
    if not file.is_file():
        return False
    results = read_json(file, Results)
    return bool(results.get("complete")) and len(finished(run)) == len(results["tasks"])


def check_no_gap(run: Path) -> None:
    """Refuse a directory that has lost a task, whose place another one would take, or has two in one place.

    Raises:
        RunError: naming the manifest that is missing, or the folders.
    """
    done, folders = len(finished(run)), task_folders(run)
    for number, paths in folders.items():
        both = [path.name for path in paths if (path / MANIFEST).is_file()]
        if len(both) > 1:
            raise RunError(f"{run / 'tasks'}: {' and '.join(both)} are both task {number:03d}; move all but one away")
    later = [path for number, paths in folders.items() if number > done for path in paths if (path / MANIFEST).exists()]
    if later or len(listed(run)) > done:
        lost = folders.get(done, [run / "tasks" / f"{done:03d}"])[0] / MANIFEST
        though = f"{later[0].name} is there" if later else "classes.json lists the task"
        raise RunError(
            f"{lost}: missing, though {though}; restore it from a copy, or, to learn again from there, remove "
            f"classes.json and the folders of tasks from {done:03d} on"
        )


def seconds(run: Path) -> float:
    """What learning and evaluating a run took, phases that another run has trained among it.

    Raises:
        RunError: its files are damaged.
    """
    learning = sum(sum(manifest["seconds"].values()) for _, manifest in manifests(run))
    return learning + sum(stage["evaluation_seconds"] for stage in read_json(run / "results.json", Results)["stages"])


def reused_seconds(run: Path) -> float:
    """What of that it took other runs, from which this one has finished phases.

    Raises:
        RunError: its files are damaged.
    """
    every = [manifest for _, manifest in manifests(run)]
    return sum(manifest["seconds"].get(phase, 0.0) for manifest in every for phase in manifest.get("reused", []))
