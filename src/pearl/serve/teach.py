"""The process that learns for a server: `python -m pearl.serve.teach MODEL DEVICE`, started by `jobs`.

It reads a line of JSON and the pixels from standard input, and writes a line of JSON for each event of training. The
photos exist in its memory alone. When its input is closed, as its server has ended, it stores what it has learnt and
ends (see `launch.enter`).
"""

import json
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from pearl.data.inputs import given
from pearl.errors import Busy, Interrupted, PearlError
from pearl.lifecycle.choices import LearnOptions
from pearl.lifecycle.learning import facts_of, learn
from pearl.storage.run_directory import RunDirectory
from pearl.training import launch
from pearl.training.engine import Observer

EVERY = 0.2  # seconds between two reports within a phase


class Report(Observer):
    """Writes events as lines of JSON. Training continues if the reader has ended."""

    def __init__(self) -> None:
        self._last = 0.0

    def event(self, kind: str, **facts: Any) -> None:
        """Write a line."""
        line = json.dumps({"event": kind, **facts}, default=str)
        with suppress(OSError):
            os.write(1, f"{line}\n".encode())

    def step(self, done: int, total: int) -> None:
        """Write a line, but not too often."""
        if time.monotonic() - self._last >= EVERY or done == total:
            self._last = time.monotonic()
            self.event("step", done=done, total=total)


def main() -> None:
    """Learn what comes from standard input as a task of a model; the exit code is that of `pearl learn`."""
    path, device = Path(sys.argv[1]), sys.argv[2]
    job = json.loads(_line())
    shape = job["shape"]
    images = np.frombuffer(_bytes(int(np.prod(shape))), np.uint8).reshape(shape)
    launch.enter()
    os.nice(10)  # predictions come first
    report = Report()
    try:
        _learn(path, device, images, job, report)
    except Interrupted:
        sys.exit(launch.INTERRUPTED)
    except PearlError as error:
        report.event("failed", error=str(error).partition("\n")[0])
        sys.exit(launch.BUSY if isinstance(error, Busy) else 2)


def _learn(path: Path, device: str, images: np.ndarray, job: dict[str, Any], report: Report) -> None:
    """Learn images (N, S, S, 3) uint8 with the labels of a job.

    An interrupted task is resumed if its images are the same. Otherwise it is discarded if its images were in memory as
    well: they are gone, so it cannot be resumed.
    """
    inputs = given((images, job["labels"]), images.shape[1], part="train")
    same = {"name": job["task"], "classes": [*inputs.classes], "fast": job["fast"]}
    same |= facts_of(inputs.pixels(0, len(inputs), images.shape[1])[0], inputs.labels)
    note = RunDirectory(path).interrupted_task
    options = LearnOptions(
        task=job["task"],
        fast=job["fast"],
        allow_new_style=job["allow_new_style"],
        discard=bool(note) and not note["data"] and not same.items() <= note.items(),
        overrides={"method": job["method"]} if job["method"] else {},
    )
    learn(path, (images, job["labels"]), options, device=device, show=report)


def _line() -> bytes:
    """Read the first line of standard input, and no byte more."""
    line = bytearray()
    while not line.endswith(b"\n"):
        line += _some(1)
    return bytes(line)


def _bytes(count: int) -> bytearray:
    """Read this many bytes of standard input."""
    received = bytearray()
    while len(received) < count:
        received += _some(min(count - len(received), 2**20))
    return received


def _some(most: int) -> bytes:
    chunk = os.read(0, most)
    if not chunk:  # the server has ended
        sys.exit(launch.INTERRUPTED)
    return chunk


if __name__ == "__main__":
    main()
