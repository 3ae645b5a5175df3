"""A model that begins with what another directory has learnt."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pearl.errors import RunError
from pearl.lifecycle.saved import CODE, config_bytes, read_config, task_infos, verify
from pearl.lifecycle.session import LOCK, locked
from pearl.settings.config import ModelConfig, check_config
from pearl.storage.files import MANIFEST, finished

# what may lie in a directory before its configuration does
_EARLY = {*LOCK, "resume", "events.jsonl"}


@contextmanager
def made_aside(path: Path) -> Iterator[Path]:
    """A locked folder in which a model is made that gets its name, `path`, when it is whole.

    Raises:
        RunError: there is something of that name, or the place cannot be written to.
        Busy: another process is at it.
    """
    aside = path.with_name(f".{path.name}.copy")
    with locked(aside):
        try:
            if path.exists():
                raise RunError(f"{path}: another process has made it meanwhile; run the same command again")
            for leftover in aside.iterdir():  # of a copy that was killed
                if leftover.is_dir():
                    shutil.rmtree(leftover)
            yield aside
            aside.rename(path)  # with its lock
        except (OSError, shutil.Error) as error:
            raise RunError(
                f"{path}: cannot be made ({getattr(error, 'strerror', None) or error}); mend permissions or free space"
            ) from None
        finally:
            shutil.rmtree(aside, ignore_errors=True)


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
            shutil.copytree(folder, aside / folder.relative_to(start))
        copy_beside(start, aside, check_config(raw, ModelConfig))


def copy_beside(start: Path, path: Path, config: ModelConfig) -> None:
    """What a model has beside the folders of its tensors, with this configuration."""
    for name in ("classes.json", "environment.json", CODE):
        if (start / name).is_file():
            shutil.copy2(start / name, path / name)
    (path / "config.yaml").write_bytes(config_bytes(config))


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
            raise RunError(f"{path}: is there already; {instead}")
    elif path.exists() and not path.is_dir():
        raise RunError(f"{path}: is a file; choose another name for the model")
    elif path.is_dir() and (source or {place.name for place in path.iterdir()} - _EARLY):
        raise RunError(f"{path}: a folder of other things, not a model; choose a name that is not there yet")
