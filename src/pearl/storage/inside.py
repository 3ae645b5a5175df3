"""Writing and removing below a folder without following links out of it: a received directory may contain links.

Every step from the folder down uses a descriptor and refuses links, so that a folder cannot be exchanged for a link
between a check and the write. No torch.
"""

import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from pearl.errors import RunError

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{32}\.tmp")


def temporary_name(name: str) -> str:
    """Return a new hidden, unguessable name beside `name`."""
    return f".{name}.{secrets.token_hex(16)}.tmp"


def is_temporary(name: str) -> bool:
    """Return True if a file has the name of an interrupted write's temporary file."""
    return bool(_TEMPORARY.fullmatch(name))


@contextmanager
def opened_folder(folder: Path, within: Path | None = None, *, make: bool = False) -> Iterator[int]:
    """Yield a descriptor of `folder`, reached from `within` without links that lead out of it.

    Without `within` links are followed, since the user chose the folder. With `make` missing folders are created, and
    survive a power cut.

    Raises:
        RunError: `folder` is not below `within`.
        OSError: it cannot be opened or created.
    """
    root = within or folder
    if make:
        make_folder(root)
    names = Path(os.path.relpath(os.path.realpath(folder), os.path.realpath(root))).parts
    if ".." in names:
        raise RunError(f"{folder}: leads outside of {root}; replace the link by its target")
    descriptor = os.open(root, _FOLDER)
    try:
        for name in names:
            try:
                below = os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=descriptor)
            except FileNotFoundError:
                if not make:
                    raise
                with suppress(FileExistsError):  # another process has just created it
                    os.mkdir(name, dir_fd=descriptor)
                os.fsync(descriptor)
                below = os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = below
        yield descriptor
    finally:
        os.close(descriptor)


def make_folder(path: Path) -> None:
    """Create a folder, and missing parents, that survive a power cut."""
    if not path.is_dir():
        make_folder(path.parent)
        with suppress(FileExistsError):
            os.mkdir(path)  # noqa: PTH102 - counted by the tests beside the others
        sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Sync the names in a folder to disk."""
    with opened_folder(path) as folder:
        os.fsync(folder)


def sync_tree(root: Path) -> None:
    """Sync a folder with all its contents to disk."""
    for _, _, names, folder in os.fwalk(root, topdown=False):
        for name in names:
            descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        os.fsync(folder)


def replace_file(path: Path, data: bytes, within: Path | None = None) -> None:
    """Write a file atomically: new temporary name, fsync, atomic rename, fsync of the folder.

    A link with the file's name is replaced, not followed.

    Raises:
        RunError: see `opened_folder`.
        OSError: it cannot be written.
    """
    with opened_folder(path.parent, within, make=True) as folder:
        temporary = temporary_name(path.name[:100])
        create_file(temporary, data, folder)
        try:
            os.replace(temporary, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary, dir_fd=folder)
            raise
        os.fsync(folder)


def create_file(path: str | Path, data: bytes, folder: int | None = None) -> None:
    """Create a file, in the folder of a descriptor if one is given, and sync it to disk.

    Raises:
        FileExistsError: the file, or a link of this name, exists.
        OSError: it cannot be written; nothing is left behind.
    """
    descriptor = os.open(path, _NEW, 0o666, dir_fd=folder)
    try:
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(descriptor, rest) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except BaseException:
        with suppress(OSError):
            os.unlink(path, dir_fd=folder)
        raise


def open_to_append(path: Path, within: Path | None = None) -> BinaryIO:
    """Open a regular file for reading and appending, creating it if it is missing.

    A link is followed if it stays below `within`.

    Raises:
        RunError: see `opened_folder`.
        OSError: it cannot be opened, or is not a regular file.
    """
    target = Path(os.path.realpath(path)) if within else path
    with opened_folder(target.parent, within) as folder:
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        return os.fdopen(os.open(target.name, flags, 0o666, dir_fd=folder), "ab+")


def remove_tree(path: Path, within: Path | None = None) -> None:
    """Remove a folder with all its contents, as far as possible. Links in it are removed, not followed."""
    with suppress(OSError, RunError), opened_folder(path.parent, within) as folder:
        shutil.rmtree(path.name, ignore_errors=True, dir_fd=folder)


def remove_file(path: Path, within: Path | None = None) -> None:
    """Remove a file or link, if it exists.

    Raises:
        RunError: see `opened_folder`.
        OSError: it cannot be removed.
    """
    with suppress(FileNotFoundError), opened_folder(path.parent, within) as folder:
        os.unlink(path.name, dir_fd=folder)


def remove_empty(path: Path, within: Path | None = None) -> None:
    """Remove a folder if it is empty."""
    with suppress(OSError), opened_folder(path.parent, within) as folder:
        os.rmdir(path.name, dir_fd=folder)


def remove_temporaries(root: Path) -> None:
    """Remove temporary files of killed processes below a folder; only for the process that holds the folder."""
    for _, _, names, folder in os.fwalk(root):
        for name in filter(is_temporary, names):
            with suppress(OSError):
                os.unlink(name, dir_fd=folder)


def check_no_links(root: Path) -> None:
    """Check that a folder, in which foreign code will write, is not a link and contains none.

    Raises:
        RunError: names a link.
    """
    links = [root] if root.is_symlink() else []
    for folder, folders, files in os.walk(root):
        links += [link for name in (*folders, *files) if (link := Path(folder, name)).is_symlink()]
    if links:
        raise RunError(f"{links[0]}: is a link, which is never followed for writing; replace it by its target")
