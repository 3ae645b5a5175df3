"""Standard paths: data under $PEARL_DATA (default ./data), runs under $PEARL_RUNS (default ./runs)."""

import os
from pathlib import Path

from pearl.errors import ConfigError, PearlError


def as_path(text: str | Path, *, what: str, error: type[PearlError] = ConfigError) -> Path:
    """Return a path written by a user, with `~` for a home directory.

    Raises:
        PearlError: of the class `error`: unknown home directory, or an impossible file name.
    """
    if "\0" in str(text):
        raise error(f"{what}: {str(text)!r} contains a NUL, which paths cannot; give another one")
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise error(f"{what}: {text}: that user has no home directory; write the full path") from None


def data_root() -> Path:
    """Return the folder for data sets, weights and the cache of decoded images."""
    return as_path(os.environ.get("PEARL_DATA", "data"), what="PEARL_DATA")


def runs_root() -> Path:
    """Return the folder whose sub-folders are runs."""
    return as_path(os.environ.get("PEARL_RUNS", "runs"), what="PEARL_RUNS")


def find(path: str | Path, *, what: str, error: type[PearlError]) -> Path:
    """Find a file or folder of a recipe: by its path as written, else under the data folder.

    Raises:
        PearlError: of the class `error`, with both paths that were tried.
    """
    given = as_path(path, what=what, error=error)
    below = data_root() / given
    for candidate in (given, below):
        if candidate.exists():
            return candidate
    tried = f"{given}" if given.is_absolute() else f"{given} and {below}"
    raise error(f"{what} not found: tried {tried}; give the right path, or set PEARL_DATA to the folder that holds it")
