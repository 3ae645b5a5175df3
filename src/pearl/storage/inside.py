"""Writing and removing below a folder without leaving it: a directory that came from others may have links in it.

Every step from the folder down is taken by a descriptor and refuses links, so that nobody can exchange a folder for a
link between a check and the write. No torch.
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
_TEMPORARY = re.compile(r"\..+\.([0-9a-f]{32}|[0-9]+)\.tmp")  # version 0.1 named them by a process's number


def temporary_name(name: str) -> str:
    """A new hidden name beside `name`, which nobody can guess."""
    return f".{name}.{secrets.token_hex(16)}.tmp"


def is_temporary(name: str) -> bool:
    """Return True if a file has the name of a temporary file that an interrupted write left behind."""
    return bool(_TEMPORARY.fullmatch(name))


@contextmanager
def opened_folder(folder: Path, within: Path | None = None, *, make: bool = False) -> Iterator[int]:
    """A descriptor of `folder`, reached from `within` through no link that leads out of it.

    Without `within` the folder is taken as it is named: its user chose it, links included. With `make` folders that
    are missing are made, and survive a power cut.

    Raises:
        RunError: `folder` is not below `within`.
        OSError: it cannot be opened or made.
    """
    root = within or folder
    if make:
        make_folder(root)
    names = Path(os.path.relpath(os.path.realpath(folder), os.path.realpath(root))).parts
    if ".." in names:
        raise RunError(f"{folder}: leads outside of {root}; put what it stands for in its place")
    descriptor = os.open(root, _FOLDER)
    try:
        for name in names:
            try:
                below = os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=descriptor)
            except FileNotFoundError:
                if not make:
                    raise
                with suppress(FileExistsError):  # another process has made it just now
                    os.mkdir(name, dir_fd=descriptor)
                os.fsync(descriptor)
                below = os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = below
        yield descriptor
    finally:
        os.close(descriptor)


def make_folder(path: Path) -> None:
    """A folder that a power cut does not take away again, nor the folders that were made to hold it."""
    if not path.is_dir():
        make_folder(path.parent)
        with suppress(FileExistsError):
            os.mkdir(path)  # noqa: PTH102 - counted by the tests beside the others
        sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """See the names in a folder onto the disk."""
    with opened_folder(path) as folder:
        os.fsync(folder)


def sync_tree(root: Path) -> None:
    """See a folder with all in it onto the disk."""
    for _, _, names, folder in os.fwalk(root, topdown=False):
        for name in names:
            descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        os.fsync(folder)


def replace_file(path: Path, data: bytes, within: Path | None = None) -> None:
    """Write a whole file or none of it: new temporary name, fsync, atomic rename, fsync of the folder.

    What has the file's name is replaced and not followed if it is a link.

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
    """Write a file that is not there yet, in the folder of a descriptor if one is given, and see it onto the disk.

    Raises:
        FileExistsError: it is there, or a link is.
        OSError: it cannot be written; nothing is left of it.
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
    """A regular file, made if it is missing, to be read and appended to.

    A link is followed if `within` is given and it stays below that.

    Raises:
        RunError: see `opened_folder`.
        OSError: it cannot be opened, or is a link or something else than a file.
    """
    target = Path(os.path.realpath(path)) if within else path
    with opened_folder(target.parent, within) as folder:
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        return os.fdopen(os.open(target.name, flags, 0o666, dir_fd=folder), "ab+")


def remove_tree(path: Path, within: Path | None = None) -> None:
    """Remove a folder with all in it, as far as that can be done. Links in it are removed and not followed."""
    with suppress(OSError, RunError), opened_folder(path.parent, within) as folder:
        shutil.rmtree(path.name, ignore_errors=True, dir_fd=folder)


def remove_file(path: Path, within: Path | None = None) -> None:
    """Remove a file or a link, if it is there.

    Raises:
        RunError: see `opened_folder`.
        OSError: it cannot be removed.
    """
    with suppress(FileNotFoundError), opened_folder(path.parent, within) as folder:
        os.unlink(path.name, dir_fd=folder)


def remove_temporaries(root: Path) -> None:
    """Remove what writes below a folder left that were killed. Only a process that holds the folder may do so."""
    for _, _, names, folder in os.fwalk(root):
        for name in filter(is_temporary, names):
            with suppress(OSError):
                os.unlink(name, dir_fd=folder)


def check_no_links(root: Path) -> None:
    """See that a folder, in which others' code will write, is no link and has none in it.

    Raises:
        RunError: naming one.
    """
    links = [root] if root.is_symlink() else []
    for place, folders, files in os.walk(root):
        links += [link for name in (*folders, *files) if (link := Path(place, name)).is_symlink()]
    if links:
        raise RunError(f"{links[0]}: is a link, through which nothing is written; put what it stands for in its place")
