"""Files of a run that are not tensors: written atomically, read with one-line errors. No torch."""

import errno
import json
import os
import stat
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

from pearl.errors import ReportError, RunError, reason, remedy
from pearl.storage.inside import replace_file
from pearl.storage.schemas import Schema, problem

HTML = (".html", ".htm")  # endings of a page
OTHER_OUTPUT = "choose another path with -o"
FORMAT = 1  # of a run directory; a higher number than this cannot be read


def write_file(
    path: Path, data: bytes, *, within: Path | None = None, fix: str = "set PEARL_RUNS to another folder"
) -> None:
    """Write a file atomically (see `inside.replace_file`).

    The file must be below `within`, also after following links. `fix` is the fix if that folder is not writable.

    Raises:
        RunError: no space or no permission, or the file would lie outside of `within`.
    """
    try:
        replace_file(path, data, within)
    except OSError as error:
        raise RunError(
            f"{path}: cannot be written ({reason(error)}); {remedy(error, fix)}, then run the same command again"
        ) from None


def check_writable(folder: Path, *, fix: str = "choose another path (PEARL_RUNS, for runs)") -> None:
    """Check that files can be written into a folder, which need not exist yet; nothing is left behind.

    Raises:
        RunError: no space, no permission, or the path is not a folder.
    """
    there = folder
    try:
        while not there.exists():
            there = there.parent
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise RunError(f"{folder}: cannot be written ({reason(error)}); {remedy(error, fix)}") from None


def check_output(output: Path, endings: Sequence[str], what: str) -> None:
    """Check that a page or table (`what`) can be written to a path, before the work for it is done.

    Raises:
        ReportError: a folder, or a name with none of these endings, as that of a run's results.
        RunError: it cannot be written there.
    """
    if output.is_dir():
        raise ReportError(f"{output}: is a folder; give the {what} a name in it")
    if output.suffix.lower() not in endings:
        raise ReportError(f"{output}: give the {what} a name that ends in {', '.join(endings)}")
    check_writable(output.parent, fix=OTHER_OUTPUT)


def write_output(output: Path, text: str) -> None:
    """Write a page or table atomically. Names may contain what UTF-8 cannot hold, which is replaced.

    Raises:
        RunError: it cannot be written.
    """
    write_file(output, text.encode("utf-8", "replace"), fix=OTHER_OUTPUT)


def open_regular(path: str | Path) -> BinaryIO:
    """Open a regular file for reading. A FIFO would block, and a device never end.

    Raises:
        OSError: it cannot be opened, or is not a regular file.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except ValueError:  # a NUL
        raise OSError(errno.EINVAL, "not a valid file name", str(path)) from None
    kind = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(kind):
        os.close(descriptor)
        code = errno.EISDIR if stat.S_ISDIR(kind) else errno.EINVAL
        raise OSError(code, os.strerror(code) if code == errno.EISDIR else "neither a file nor a folder", str(path))
    return os.fdopen(descriptor, "rb")


def read_regular(path: str | Path) -> bytes:
    """Return the contents of a regular file.

    Raises:
        OSError: see `open_regular`.
    """
    with open_regular(path) as file:
        return file.read()


def write_json(path: Path, value: Any, *, within: Path | None = None) -> None:
    """Write JSON atomically; see `write_file`."""
    write_file(path, json_bytes(value), within=within)


def json_bytes(value: Any) -> bytes:
    """Return the bytes that `write_json` writes."""
    return (json.dumps(value, indent=1) + "\n").encode()


def read_json(path: Path, shape: type[Schema] = Schema) -> dict[str, Any]:
    """Read a JSON file of a run and check it against its schema `shape`.

    Raises:
        RunError: missing, damaged, of another schema, or of a newer format.
    """
    try:
        value = json.loads(read_regular(path))
    except FileNotFoundError:
        raise RunError(f"{path}: missing; restore it from a copy, or move the directory away and start again") from None
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise RunError(f"{path}: damaged ({reason}); restore it from a copy, or move it away and run again") from None
    number = value.get("format") if isinstance(value, dict) else None
    if not isinstance(number, int) or isinstance(number, bool):
        raise RunError(f"{path}: damaged (no format number); restore it from a copy, or move it away and run again")
    check_format(path, number)
    if wrong := problem(value, shape):
        raise RunError(f"{path}: damaged ({wrong}); restore it from a copy, or move it away and run again")
    return value


def check_format(path: Path, number: int) -> None:
    """Refuse files of a newer version of pearl.

    Raises:
        RunError: names both versions of the format.
    """
    if number > FORMAT:
        raise RunError(f"{path}: format {number}, this pearl reads up to {FORMAT}; install a newer pearl to read it")
