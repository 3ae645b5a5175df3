"""New models that start with the tasks of another directory."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pearl.errors import RunError, reason, remedy
from pearl.lifecycle.saved import config_bytes, read_config, verify
from pearl.settings.config import ModelConfig, check_config
from pearl.storage.aside import beside, remove_leftovers
from pearl.storage.checkpoint import STORED
from pearl.storage.files import read_regular
from pearl.storage.inside import is_temporary, make_folder, replace_file, sync_folder, sync_tree
from pearl.storage.locks import LOCK
from pearl.storage.run_directory import RunDirectory
from pearl.storage.stored_task import MANIFEST


@contextmanager
def made_aside(path: Path) -> Iterator[Path]:
    """Yield a folder for creating a model, renamed to `path` when it is complete.

    Raises:
        RunError: the path exists, or is not writable.
        Busy: another process is creating it.
    """
    named = False
    try:
        make_folder(path.parent)
        with beside(path) as folder:
            aside = folder / path.name
            aside.mkdir()
            yield aside
            sync_tree(aside)
            if path.exists():
                raise FileExistsError
            aside.rename(path)
            named = True
            sync_folder(path.parent)
    except OSError as error:
        if named:
            raise RunError(
                f"{path}: is made and stored, but a power cut may still undo it ({reason(error)}); look at it with: "
                f"pearl inspect {path}"
            ) from None
        if error.errno in (None, errno.EEXIST, errno.ENOTEMPTY):
            raise RunError(f"{path}: another process has created it meanwhile; run the same command again") from None
        fix = remedy(error, "choose another path")
        raise RunError(f"{path}: cannot be created ({reason(error)}); {fix}") from None


def check_whole(path: Path) -> None:
    """Check all checksums of a model.

    Raises:
        RunError: lists every damaged file.
    """
    if damaged := verify(path):
        raise RunError("\n".join(damaged))


def copy_model(start: Path, path: Path) -> None:
    """Create a model with the tasks of another directory; its files are copied atomically.

    Raises:
        RunError: a file of `start` is damaged, or `path` is not writable.
        Busy: another process is creating it.
    """
    check_whole(start)
    raw = read_config(start).model_dump(mode="json", include=set(ModelConfig.model_fields))
    with made_aside(path) as aside:
        for folder in (RunDirectory(start).reference, *RunDirectory(start).finished):
            copy_part(folder, aside / folder.relative_to(start))
        copy_beside(start, aside, check_config(raw, ModelConfig))


def copy_part(source: Path, target: Path) -> None:
    """Copy the files that `write_part` wrote into a folder, and no others."""
    for name in (MANIFEST, *STORED):
        if (source / name).is_file():
            replace_file(target / name, read_regular(source / name))


def copy_beside(start: Path, path: Path, config: ModelConfig) -> None:
    """Copy the files of a model outside the folders of its tensors, with this configuration."""
    source, made = RunDirectory(start), RunDirectory(path)
    for file in (source.classes_file, source.environment_file, source.code_file):
        if file.is_file():
            replace_file(path / file.name, read_regular(file))
    replace_file(made.config_file, config_bytes(config))


def is_copy(path: Path, start: Path, name: str) -> bool:
    """Return True if `path` holds only the tasks of `start`, and at most task `name` more: an interrupted copy."""

    def there(directory: RunDirectory) -> list[bytes]:
        return [(folder / MANIFEST).read_bytes() for folder in (directory.reference, *directory.finished)]

    made, source = RunDirectory(path), RunDirectory(start)
    if not all(each.reference_manifest.is_file() for each in (made, source)):
        return False
    copied, added_names = there(source), [task.name for task in made.tasks][len(source.finished) :]
    return made.config_file.is_file() and there(made)[: len(copied)] == copied and added_names in ([], [name])


def check_target(path: Path, source: Path | None, instead: str = "choose another name") -> None:
    """Refuse a directory with other contents, and an existing one that a copy would create."""
    directory = RunDirectory(path)
    if directory.config_file.exists() or directory.tasks_folder.exists():
        if source:
            remove_leftovers(path)  # its process may have been killed right after renaming it
            raise RunError(f"{path}: exists; {instead}")
    elif path.exists() and not path.is_dir():
        raise RunError(f"{path}: is a file; choose another name for the model")
    elif path.is_dir() and (source or not all(_is_early(directory, file) for file in path.iterdir())):
        raise RunError(f"{path}: a folder with other contents, not a model; choose a new name")


def _is_early(directory: RunDirectory, file: Path) -> bool:
    """Return True if a file can exist in a directory before its configuration does."""
    # a user may have a folder of that name, and everything in it is removed
    if file == directory.resume_folder and file.is_dir():
        return directory.pending_file.is_file() or all(is_temporary(each.name) for each in file.iterdir())
    return file == directory.events_file or file.name in LOCK or is_temporary(file.name)
