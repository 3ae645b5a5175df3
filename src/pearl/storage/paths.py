"""Where things lie: data under $PEARL_DATA (default ./data), runs under $PEARL_RUNS (default ./runs)."""

import os
from pathlib import Path

from pearl.errors import PearlError


def data_root() -> Path:
    """The folder for data sets, weights and the cache of decoded images."""
    return Path(os.environ.get("PEARL_DATA", "data")).expanduser()


def runs_root() -> Path:
    """The folder whose sub-folders are runs."""
    return Path(os.environ.get("PEARL_RUNS", "runs")).expanduser()


def find(path: str | Path, *, what: str, error: type[PearlError]) -> Path:
    """Find a file or folder that a recipe names: as written, else under the data folder.

    Raises:
        PearlError: of the class `error`, naming both places that were tried.
    """
    given = Path(path).expanduser()
    below = data_root() / given
    for candidate in (given, below):
        if candidate.exists():
            return candidate
    tried = f"{given}" if given.is_absolute() else f"{given} and {below}"
    raise error(f"{what} not found: tried {tried}; give the right path, or set PEARL_DATA to the folder that holds it")
