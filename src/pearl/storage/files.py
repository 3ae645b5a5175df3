"""Files of a run that are not tensors: written whole or not at all, read with a line for what is wrong. No torch."""

import errno
import json
import os
import stat
import tempfile
from pathlib import Path
from typing import Any, BinaryIO

from pearl.errors import RunError, reason, remedy
from pearl.storage.inside import replace_file
from pearl.storage.shapes import Record, problem

FORMAT = 1  # of a run directory; a higher number than this cannot be read


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


def check_writable(folder: Path, *, mend: str = "choose another place (PEARL_RUNS, for runs)") -> None:
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
    write_file(path, json_bytes(value), within=within)


def json_bytes(value: Any) -> bytes:
    """Return the bytes that `write_json` writes."""
    return (json.dumps(value, indent=1) + "\n").encode()


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
    if wrong := problem(value, shape):
        raise RunError(f"{path}: damaged ({wrong}); restore it from a copy, or move it away and run again")
    return value


def check_format(path: Path, number: int) -> None:
    """Refuse what a newer version of pearl has written.

    Raises:
        RunError: naming both versions of the format.
    """
    if number > FORMAT:
        raise RunError(f"{path}: format {number}, this pearl reads up to {FORMAT}; install a newer pearl to read it")
