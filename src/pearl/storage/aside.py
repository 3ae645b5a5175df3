"""Temporary folders beside a target, and the removal of those that killed processes left. No torch.

Such a folder has an unguessable name, holds a marker file, and is locked while its process lives. Nonempty folders
without the marker, folders of other users and links are not leftovers, and are kept.
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
    """Yield a new folder beside `target`, locked, and removed at the end; `rescue` saves files that must not be lost.

    Leftovers of processes that were killed when they made `target` are rescued and removed first.

    Raises:
        Busy: another process is making `target`.
        RunError: the folder is not writable.
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
                with suppress(OSError):  # the folder is kept, and the next process rescues it
                    rescue(folder)
                    _remove(folder)
    finally:
        if _is_empty(folder):
            remove_tree(folder)


def remove_leftovers(target: Path, rescue: Callable[[Path], None] = lambda folder: None) -> None:
    """Remove the leftovers of processes that were killed while creating `target`.

    Raises:
        Busy: another process is making `target`.
        RunError: the folder is not writable.
        OSError: as well.
    """
    for leftover in _leftovers(target):
        with locked(leftover):
            rescue(leftover)
            _remove(leftover)


def _remove(folder: Path) -> None:
    """Remove a folder, its marker last: if something in it cannot be removed now, it is still known as a leftover."""
    for path in folder.iterdir():
        if path.name not in (MARKER, *LOCK):
            remove_tree(path)
            with suppress(OSError):  # a file, or a folder that could not be removed
                path.unlink(missing_ok=True)
    if all(path.name in (MARKER, *LOCK) for path in folder.iterdir()):
        remove_tree(folder)


def _leftovers(target: Path) -> list[Path]:
    """Return the folders in which processes of this user began to create `target`."""
    pattern = re.compile(re.escape(f".{target.name[:100]}.") + r"[0-9a-f]{32}\.new")
    return [path for path in target.parent.iterdir() if pattern.fullmatch(path.name) and _is_ours(path)]


def _is_ours(path: Path) -> bool:
    with suppress(OSError):
        status = path.lstat()
        if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid():
            marker = path / MARKER
            marked = not marker.is_symlink() and marker.is_file() and marker.read_bytes() == WORDS
            return marked or _is_empty(path)
    return False


def _is_empty(folder: Path) -> bool:
    """Return True if a folder has only a lock: its process was killed before writing the marker."""
    with suppress(OSError):
        return all(each.name in LOCK or is_temporary(each.name) for each in folder.iterdir())
    return False
