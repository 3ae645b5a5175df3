"""Names of the files of a directory. No torch."""

from pathlib import Path
from typing import Protocol


class HasPath(Protocol):
    """A directory."""

    path: Path


class Below:
    """A file or folder of a directory, by name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, directory: HasPath, owner: type) -> Path:
        return directory.path / self.name
