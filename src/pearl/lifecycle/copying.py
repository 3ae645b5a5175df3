"""A model that begins with what another directory has learnt."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pearl.errors import RunError, reason, remedy
from pearl.lifecycle.saved import CODE, config_bytes, read_config, task_infos, verify
from pearl.settings.config import ModelConfig, check_config
from pearl.storage.aside import beside, remove_leftovers
from pearl.storage.checkpoint import FILES
from pearl.storage.files import MANIFEST, PENDING, finished, read_regular
from pearl.storage.inside import is_temporary, make_folder, replace_file, sync_folder, sync_tree
from pearl.storage.locks import LOCK


@contextmanager
def made_aside(path: Path) -> Iterator[Path]:
    """A folder in which a model is made that gets its name, `path`, when it is whole.

    Raises:
        RunError: there is something of that name, or the place cannot be written to.
        Busy: another process is at it.
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
            raise RunError(f"{path}: another process has made it meanwhile; run the same command again") from None
        fix = remedy(error, "choose another place")
        raise RunError(f"{path}: cannot be made ({reason(error)}); {fix}") from None


def check_whole(path: Path) -> None:
    """See that all checksums of a model hold.

    Raises:
        RunError: naming every file that is damaged.
    """
    if damaged := verify(path):
        raise RunError("\n".join(damaged))


def copy_model(start: Path, path: Path) -> None:
    """Make a model with what another directory has learnt; its files are copied, whole or not at all.

    Raises:
        RunError: a file of `start` is damaged, or `path` cannot be written to.
        Busy: another process is at it.
    """
    check_whole(start)
    raw = read_config(start).model_dump(mode="json", include=set(ModelConfig.model_fields))
    with made_aside(path) as aside:
        for folder in (start / "reference", *finished(start)):
            copy_part(folder, aside / folder.relative_to(start))
        copy_beside(start, aside, check_config(raw, ModelConfig))


def copy_part(source: Path, target: Path) -> None:
    """Copy the files that `write_part` wrote into a folder, and nothing else that may lie there."""
    for name in (MANIFEST, *FILES):
        if (source / name).is_file():
            replace_file(target / name, read_regular(source / name))


def copy_beside(start: Path, path: Path, config: ModelConfig) -> None:
    """What a model has beside the folders of its tensors, with this configuration."""
    for name in ("classes.json", "environment.json", CODE):
        if (start / name).is_file():
            replace_file(path / name, read_regular(start / name))
    replace_file(path / "config.yaml", config_bytes(config))


def is_copy(path: Path, start: Path, name: str) -> bool:
    """Whether `path` holds what `start` has learnt and no more, or no more than task `name`: a copy that was cut off
    when it learnt its first task, or after that.
    """

    def there(place: Path) -> list[bytes]:
        return [(folder / MANIFEST).read_bytes() for folder in (place / "reference", *finished(place))]

    if not all((place / "reference" / MANIFEST).is_file() for place in (path, start)):
        return False
    copied, own = there(start), [info.name for info in task_infos(path)][len(finished(start)) :]
    return (path / "config.yaml").is_file() and there(path)[: len(copied)] == copied and own in ([], [name])


def check_place(path: Path, source: Path | None, instead: str = "choose another name") -> None:
    """Refuse a directory that holds other things, and one that is there already to be made by copying."""
    if (path / "config.yaml").exists() or (path / "tasks").exists():
        if source:
            remove_leftovers(path)  # its maker may have been killed just after it had given it its name
            raise RunError(f"{path}: is there already; {instead}")
    elif path.exists() and not path.is_dir():
        raise RunError(f"{path}: is a file; choose another name for the model")
    elif path.is_dir() and (source or not all(map(_is_early, path.iterdir()))):
        raise RunError(f"{path}: a folder of other things, not a model; choose a name that is not there yet")


def _is_early(place: Path) -> bool:
    """Whether something may lie in a directory before its configuration does."""
    if place.name == "resume" and place.is_dir():  # somebody may have a folder of that name, and all in it is removed
        return (place / Path(PENDING).name).is_file() or all(is_temporary(each.name) for each in place.iterdir())
    return place.name in (*LOCK, "events.jsonl") or is_temporary(place.name)
