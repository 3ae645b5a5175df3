"""The events of a run or model, one JSON object per line: appended during training, read by pages, logs and sweeps."""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pearl.errors import RunError, reason, remedy
from pearl.storage.inside import open_to_append
from pearl.storage.schemas import EVENTS, Schema


def append(file: Path, event: Mapping[str, Any]) -> None:
    """Append one event with the present time.

    Raises:
        RunError: the file cannot be written to.
    """
    append_lines(file, [{"time": datetime.now(UTC).isoformat(timespec="milliseconds"), **event}])


def append_lines(file: Path, values: Iterable[Mapping[str, Any]], *, sync: bool = False) -> None:
    """Append a JSON line for each value; with `sync` they are on disk on return.

    Raises:
        RunError: the file cannot be written to.
    """
    lines = b"".join(json.dumps(value).encode() + b"\n" for value in values)
    try:
        with open_to_append(file, file.parent) as opened:
            size = opened.seek(0, os.SEEK_END)
            opened.seek(max(size - 1, 0))
            cut = opened.read(1) not in (b"", b"\n")  # a line whose writer was killed
            opened.write(b"\n" * cut + lines)
            if sync:
                opened.flush()
                os.fsync(opened.fileno())
    except OSError as error:
        fix = remedy(error, "move it away")
        raise RunError(f"{file}: cannot be written ({reason(error)}); {fix}") from None


def read(file: Path) -> Iterator[dict[str, Any]]:
    """Yield all events of a file; none if it does not exist."""
    text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
    return _events(text.splitlines())


def _events(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yield the events of complete lines; a killed run may have left an incomplete one."""
    for line in lines:
        with suppress(ValueError, KeyError, TypeError, RecursionError):
            event = json.loads(line)
            EVENTS.get(event["event"], Schema).model_validate(event)
            yield event


class Tail:
    """Reads the events added to a file from now on."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.offset = file.stat().st_size if file.is_file() else 0

    def read(self) -> list[dict[str, Any]]:
        """Return the events since the last call. An incomplete line is left for the next one."""
        with suppress(OSError), self.file.open("rb") as file:
            file.seek(self.offset)
            whole, newline, _ = file.read().rpartition(b"\n")
            self.offset += len(whole) + len(newline)
            return [*_events(whole.decode(errors="replace").splitlines())]
        return []


class Epochs:
    """The epochs among events, in order; of epochs that were repeated after an interruption, only the last ones."""

    def __init__(self, events: Iterable[Mapping[str, Any]] = ()) -> None:
        self.by_position: dict[
            tuple[int, int, int], dict[str, Any]
        ] = {}  # by task, position of the phase in it, and number
        self._position = 0
        for event in events:
            self.add(event)

    def add(self, event: Mapping[str, Any]) -> None:
        """Add the next event."""
        if event["event"] == "task":
            self._position = 0
        elif event["event"] == "phase":
            self._position += 1
            if not event.get("done"):  # from its first step; phases before it may have been resumed
                task, position = event["task"], self._position
                self.by_position = {
                    at: epoch for at, epoch in self.by_position.items() if at[0] != task or at[1] < position
                }
        elif event["event"] == "epoch":
            self.by_position[event["task"], self._position, event["epoch"]] = dict(event)
