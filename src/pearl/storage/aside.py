"""A fresh folder beside what is being made, and the removal of those that killed processes left. No torch.

Such a folder has a name that nobody can guess, holds a marker file, and is locked while its process lives. What lacks
the marker and is not empty, belongs to another user or is a link is nobody's leftover, and stays.
"""

import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pearl.storage.inside import is_temporary, remove_tree, replace_file
from pearl.storage.locks import LOCK, locked

MARKER = ".made-by-pearl"
WORDS = b"A temporary folder of pearl, which removes it with all in it.\n"


@contextmanager
def beside(target: Path, *, rescue: Callable[[Path], None] = lambda folder: None) -> Iterator[Path]:
    """A new folder beside `target`, locked and removed in the end; `rescue` saves from it what must not be lost.

    Leftovers of processes that were killed when they made `target` are rescued and removed first.

    Raises:
        Busy: another process is making `target`.
        RunError: the place cannot be written to.
        OSError: as well.
    """
    remove_leftovers(target, rescue)
    folder = target.with_name(f".{target.name[:100]}.{secrets.token_hex(16)}.new")
    folder.mkdir()
    try:
        with locked(folder):
            try:
                replace_file(folder / MARKER, WORDS)
                yield folder
            finally:
                with suppress(OSError):  # then it stays, and the next one rescues it
                    rescue(folder)
                    _remove(folder)
    finally:
        if _is_empty(folder):
            remove_tree(folder)


def remove_leftovers(target: Path, rescue: Callable[[Path], None] = lambda folder: None) -> None:
    """Remove what processes left that were killed when they made `target`.

    Raises:
        Busy: another process is making `target`.
        RunError: the place cannot be written to.
        OSError: as well.
    """
    for leftover in _leftovers(target):
        with locked(leftover):
            rescue(leftover)
            _remove(leftover)


def _remove(folder: Path) -> None:
    """Remove a folder, its marker last: if something in it cannot be removed now, it is still known as a leftover."""
    for place in folder.iterdir():
        if place.name not in (MARKER, *LOCK):
            remove_tree(place)
            with suppress(OSError):  # a file, or a folder that could not be removed
                place.unlink(missing_ok=True)
    if all(place.name in (MARKER, *LOCK) for place in folder.iterdir()):
        remove_tree(folder)


def _leftovers(target: Path) -> list[Path]:
    """Folders that processes of this user began to make `target` in."""
    pattern = re.compile(re.escape(f".{target.name[:100]}.") + r"[0-9a-f]{32}\.new")
    return [place for place in target.parent.iterdir() if pattern.fullmatch(place.name) and _is_ours(place)]


def _is_ours(place: Path) -> bool:
    with suppress(OSError):
        status = place.lstat()
        if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid():
            marker = place / MARKER
            marked = not marker.is_symlink() and marker.is_file() and marker.read_bytes() == WORDS
            return marked or _is_empty(place)
    return False


def _is_empty(place: Path) -> bool:
    """Return True if a folder holds only a lock: its process was killed before it had marked the folder."""
    with suppress(OSError):
        return all(each.name in LOCK or is_temporary(each.name) for each in place.iterdir())
    return False
