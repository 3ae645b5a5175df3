"""The files that a model has taken up from a stream, in the order of their arrival. No torch.

DIRECTORY/arrivals.jsonl      a line for each labelled file, written before it is learnt: its batch, class and stamp
DIRECTORY/unlabelled.jsonl    a line for each file without a class, written when it was scored

The order of arrival is that in which files were taken up, since a copied photo keeps its older time stamp. The state
of the model has the number of lines that it has learnt. A kill between the two leads to the same batches again.
"""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from pearl.errors import RunError, counted
from pearl.storage.events import append_lines
from pearl.storage.files import write_file
from pearl.storage.run_directory import RunDirectory

# size in bytes, time of the last change, and of the last change of name or permissions, in ns
Stamp = tuple[int, int, int]


class Arrived(NamedTuple):
    """An image file of a stream: absolute path, class ("" without one), and the stamp that changes with its content."""

    file: str
    name: str
    stamp: Stamp

    @property
    def key(self) -> tuple[str, str]:
        """Return path and class: a file that moves to another class folder is a new image, a replaced one is not."""
        return self.file, self.name

    @property
    def order(self) -> tuple[int, str]:
        """Return the key that files of one poll are sorted by: time stamp, then path."""
        return self.stamp[1], self.file


def stamp_of(status: os.stat_result) -> Stamp:
    """Return the stamp of a file."""
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


class Journal:
    """The labelled files that were taken up from streams; the first `taken` lines are learnt."""

    def __init__(self, path: Path, taken: int, unreadable: Iterable[Sequence[Any]]) -> None:
        """Read the journal of the model in a directory. `unreadable` are those of the learnt files that could not be.

        Raises:
            RunError: it has lost lines.
        """
        self.path, self.file = path, RunDirectory(path).arrivals_file
        try:
            lines = [
                (line["batch"], Arrived(line["file"], line["class"], (*line["stamp"],))) for line in _read(self.file)
            ]
        except (LookupError, TypeError):
            raise RunError(f"{self.file}: is damaged; restore it from a copy") from None
        if len(lines) < taken:
            raise RunError(
                f"{self.file}: has {counted(len(lines), 'line')}, but {taken:,} files were taken up; restore it from a "
                f"copy"
            )
        self._done, self._pending = lines[:taken], lines[taken:]
        self._learnt = {one.key for _, one in self._done}
        self.unreadable = {(file, name): (size, *times) for file, name, size, *times in unreadable}

    def batches(self, there: Sequence[Arrived], ready: Iterable[Arrived], size: int) -> Iterator[list[Arrived]]:
        """Yield the batches to learn, and count each as learnt when the next one is asked for.

        First come those that were taken up before and not learnt, as far as they are still `there`; then the `ready`
        files that are new, in order. New ones are in the journal on disk before the first of them is yielded.
        """
        present = {*there}
        left = [line for line in self._pending if line[1] in present]
        if len(left) < len(self._pending):  # moved, changed, or of another folder: they may come again
            text = "".join(json.dumps(_line(*line)) + "\n" for line in (*self._done, *left))
            write_file(self.file, text.encode(), within=self.path)
        waiting = {one.key for _, one in left}
        new = [one for one in ready if self._is_new(one) and one.key not in waiting]
        last = max((batch for batch, _ in (*self._done[-1:], *left)), default=-1)
        added = [(last + 1 + i // size, one) for i, one in enumerate(new)]
        if added:
            append_lines(self.file, (_line(*line) for line in added), sync=True)
        self._pending = left + added
        for _, lines in groupby([*self._pending], key=lambda line: line[0]):
            batch = [*lines]
            yield [one for _, one in batch]
            self._done += batch
            self._learnt.update(one.key for _, one in batch)
            self._pending = self._pending[len(batch) :]

    def _is_new(self, one: Arrived) -> bool:
        if one.key not in self._learnt:
            return True
        return self.unreadable.get(one.key, one.stamp) != one.stamp  # it may be readable now


def _line(batch: int, one: Arrived) -> dict[str, Any]:
    return {"batch": batch, "file": one.file, "class": one.name, "stamp": [*one.stamp]}


def _read(file: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a file; a killed process may have left an incomplete one."""
    entries = []
    with suppress(FileNotFoundError):
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
            with suppress(ValueError):
                entries.append(json.loads(line))
    return entries


# ---------------------------------------------------------------------------------------------- without a class


def record_scores(directory: RunDirectory, lines: Iterable[dict[str, Any]]) -> None:
    """Append what was found of files without a class: `file`, `stamp`, and `score`, `threshold`, `nearest` if readable.

    Raises:
        RunError: the file cannot be written to.
    """
    append_lines(directory.unlabelled_file, lines)


def scored(directory: RunDirectory) -> dict[str, dict[str, Any]]:
    """Return the last record of each file without a class, by path."""
    return {line["file"]: line for line in _read(directory.unlabelled_file)}


def unlabelled(directory: RunDirectory) -> tuple[int, list[str]]:
    """Return how many images without a class were scored, and the paths of those that looked unknown.

    Images that have been learnt since are left out.
    """
    learnt = {line["file"] for line in _read(directory.arrivals_file)}
    scored_lines = [line for line in scored(directory).values() if "score" in line and line["file"] not in learnt]
    return len(scored_lines), [line["file"] for line in scored_lines if line["score"] < line["threshold"]]
