"""Files of a run that are not tensors: written whole or not at all, read with a line for what is wrong. No torch."""

import itertools
import json
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from pearl.errors import RunError

FORMAT = 1  # of a run directory; a higher number than this cannot be read
MANIFEST = "manifest.json"


def write_file(path: Path, data: bytes, *, mend: str = "set PEARL_RUNS to another folder") -> None:
    """Write a whole file or none of it: temporary name, fsync, atomic rename, fsync of the folder.

    `mend` is what a user can do if that folder cannot be written to.

    Raises:
        RunError: no space or no permission.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise RunError(
            f"{path}: cannot be written ({error.strerror}); free space or permissions there, or {mend}, then run the "
            f"same command again"
        ) from None
    finally:
        with suppress(OSError):  # there only if something went wrong, and perhaps not even then
            temporary.unlink()


def write_json(path: Path, value: Any) -> None:
    """Write JSON whole or not at all."""
    write_file(path, (json.dumps(value, indent=1) + "\n").encode())


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file of a run: a mapping with its format number.

    Raises:
        RunError: missing, damaged, or of a newer format.
    """
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        raise RunError(f"{path}: missing; restore it from a copy, or delete the run directory and run again") from None
    except (OSError, ValueError) as error:
        raise RunError(f"{path}: damaged ({error}); restore it from a copy, or delete it and run again") from None
    if not isinstance(value, dict) or not isinstance(value.get("format"), int):
        raise RunError(f"{path}: damaged (no format number); restore it from a copy, or delete it and run again")
    if value["format"] > FORMAT:
        raise RunError(
            f"{path}: format {value['format']}, this pearl reads up to {FORMAT}; install a newer pearl to read it"
        )
    return value


def folder_name(index: int, name: str) -> str:
    """A task's folder: its number and as much of its name as is safe in a path."""
    safe = re.sub(r"[^A-Za-z0-9_-]+", "-", name).strip("-")[:40]
    return f"{index:03d}-{safe}" if safe else f"{index:03d}"


def finished(run: Path) -> list[Path]:
    """Folders of the finished tasks, in order; a gap ends the list."""
    numbered: dict[int, Path] = {}
    for path in sorted((run / "tasks").glob("[0-9][0-9][0-9]*")):
        number, _, _ = path.name.partition("-")
        if number.isdecimal() and (path / MANIFEST).is_file():
            numbered.setdefault(int(number), path)
    return [numbered[index] for index in itertools.takewhile(numbered.__contains__, itertools.count())]
