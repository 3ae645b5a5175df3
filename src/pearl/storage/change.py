"""An atomic change of several files of a directory, also if its process is killed. No torch.

The new files are first written into a folder of the directory, then a list of them, which makes the change valid:
`complete` exchanges the files, and is repeated if it was interrupted. Until it has ended, the directory cannot be read
(`RunDirectory.check_no_change`).
"""

from pathlib import Path, PurePosixPath

from pearl.errors import RunError, reason, remedy
from pearl.storage.files import read_json, read_regular, write_file
from pearl.storage.inside import remove_empty, remove_file, remove_tree, sync_folder
from pearl.storage.run_directory import RunDirectory
from pearl.storage.schemas import Exchange


class Change:
    """New and removed files of a locked directory; `commit` makes the change."""

    def __init__(self, path: Path) -> None:
        self.directory = RunDirectory(path)
        self.files: list[str] = []
        self.removed: list[str] = []

    def write(self, file: Path, data: bytes) -> None:
        """Prepare a new content of a file, or a new file.

        Raises:
            RunError: it cannot be written.
        """
        target, path = self.directory.change_folder / f"{len(self.files)}", self.directory.path
        write_file(target, data, within=path)
        self.files.append(file.relative_to(path).as_posix())

    def content(self, file: Path) -> bytes | None:
        """Return the prepared content of a file; None if there is none."""
        name = file.relative_to(self.directory.path).as_posix()
        if name not in self.files:
            return None
        return read_regular(self.directory.change_folder / f"{self.files.index(name)}")

    def remove(self, file: Path) -> None:
        """Prepare the removal of a file, and of its folder if nothing else is in it."""
        self.removed.append(file.relative_to(self.directory.path).as_posix())

    def commit(self, verb: str) -> None:
        """Make the change: `verb` is the command that it belongs to.

        Raises:
            RunError: a file cannot be written or removed; `complete` continues.
        """
        removed = [name for name in self.removed if name not in self.files]
        self.directory.write(self.directory.change_file, {"verb": verb, "files": self.files, "removed": removed})
        complete(self.directory.path)


def complete(path: Path) -> str:
    """Complete an interrupted change of a locked directory; return its command, or an empty text if there is none.

    Raises:
        RunError: a file cannot be written or removed, or the list is damaged.
    """
    directory = RunDirectory(path)
    if not directory.change_file.is_file():
        remove_tree(directory.change_folder, path)  # of a process that was killed before its change counted
        return ""
    change = read_json(directory.change_file, Exchange)
    for name in (*change["files"], *change["removed"]):
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise RunError(f"{directory.change_file}: {name!r} is outside of the directory; restore it from a copy")
    try:
        for number, name in enumerate(change["files"]):
            write_file(path / name, read_regular(directory.change_folder / f"{number}"), within=path)
        for name in change["removed"]:
            if (folder := (path / name).parent).is_dir():
                remove_file(path / name, path)
                sync_folder(folder)
        for folder in {(path / name).parent for name in change["removed"]} - {path}:
            remove_empty(folder, path)
        remove_file(directory.change_file, path)
        sync_folder(directory.change_folder)
    except OSError as error:
        fix = remedy(error, "change its permissions")
        raise RunError(
            f"{path}: the change is not complete ({reason(error)}); {fix}, then run: pearl resume {path}"
        ) from None
    remove_tree(directory.change_folder, path)
    return str(change["verb"])
