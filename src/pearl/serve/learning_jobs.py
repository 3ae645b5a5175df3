"""Learning during predictions: one child process at a time, and the state of its job."""

import json
import os
import secrets
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any, BinaryIO, Literal, cast

import numpy as np

from pearl.errors import PearlError
from pearl.training import launch

KEPT = 20  # jobs whose end can still be read
PATIENCE = 20.0  # seconds that a process has to store what it has learnt before it is killed
ENDED = ("done", "failed", "cancelled")
BUSY = "the model is learning or changing already; wait for that to end, or cancel the job"


@dataclass(frozen=True)
class LearningJob:
    """State of a job at one time; `version` counts the changes.

    `photos` counts them by class. `done` of `total` are steps of `phase`, which may take `seconds_left` more.
    """

    id: str
    task: str
    photos: dict[str, int]
    state: Literal["starting", "learning", "loading", "done", "failed", "cancelled"] = "starting"
    phase: str = ""
    done: int = 0
    total: int = 0
    seconds_left: float | None = None
    first_answer: bool = False  # the model answers with the new classes already, before they are trained
    notes: tuple[str, ...] = ()
    error: str = ""
    outcome: dict[str, Any] | None = None
    version: int = 0

    @property
    def ended(self) -> bool:
        """Return True if nothing changes any more."""
        return self.state in ENDED

    def facts(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        return asdict(self)


class Unavailable(Exception):
    """Another job runs, or the server is about to end."""


class Teacher:
    """Starts the process that learns, reads what it reports, and has the grown model loaded.

    Args:
        path: the model.
        device: auto, cpu or cuda.
        method: the file of a method of the user's own, see `Model.open`.
        learnt: called when a task or its first answer is stored; loads the model, and returns its estimated accuracy.
        stopped: called when a task that has answered was not trained to its end; loads the model from before.
    """

    def __init__(
        self,
        path: Path,
        device: str,
        method: str | None,
        learnt: Callable[[], dict[str, Any] | None],
        stopped: Callable[[], object],
    ) -> None:
        self.path, self.device, self.method, self.learnt, self.stopped = path, device, method, learnt, stopped
        self.jobs: dict[str, LearningJob] = {}
        self.ended: Counter[str] = Counter()  # jobs by how they ended
        self._process: Any = None
        self._cancelled = self._closed = self._held = False
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    @property
    def current(self) -> LearningJob | None:
        """Return the running job."""
        return next((job for job in self.jobs.values() if not job.ended), None)

    def start(
        self, images: np.ndarray, labels: Sequence[str], *, task: str, fast: bool, allow_new_style: bool
    ) -> LearningJob:
        """Start to learn images (N, S, S, 3) uint8 with a class each.

        Raises:
            Unavailable: one job at a time.
        """
        with self._lock:
            if self._closed or self._held or self.current:
                raise Unavailable
            job = LearningJob(secrets.token_hex(8), task, dict(Counter(labels)))
            for old in [*self.jobs][: max(0, len(self.jobs) + 1 - KEPT)]:
                del self.jobs[old]
            self.jobs[job.id], self._cancelled = job, False
            request: dict[str, Any] = {"labels": [*labels], "shape": images.shape, "task": task, "method": self.method}
            request |= {"fast": fast, "allow_new_style": allow_new_style}
            self._thread = threading.Thread(target=self._run, args=(job.id, images, request), name="teacher")
            self._thread.start()
        return job

    @contextmanager
    def held(self) -> Iterator[None]:
        """Let no job start while the model is changed in another way.

        Raises:
            Unavailable: a job runs, or the model is being changed.
        """
        with self._lock:
            if self._closed or self._held or self.current:
                raise Unavailable
            self._held = True
        try:
            yield
        finally:
            self._held = False

    def cancel(self, job_id: str) -> None:
        """Ask the process of a job to store its progress and to end; the model is unchanged."""
        with self._lock:
            if self.current and self.current.id == job_id:
                self._cancelled = True
                if self._process:
                    self._process.terminate()

    def close(self) -> None:
        """End the process; its progress is stored, and the same photos resume there."""
        with self._lock:
            self._closed = True
        if job := self.current:
            self.cancel(job.id)
        if self._thread:
            self._thread.join(PATIENCE)
            if self._thread.is_alive() and self._process:
                self._process.kill()
            self._thread.join()

    def _change(self, job_id: str, **facts: Any) -> None:
        job = self.jobs[job_id]
        self.jobs[job_id] = replace(job, **facts, version=job.version + 1)

    def _run(self, job_id: str, images: np.ndarray, request: Mapping[str, Any]) -> None:
        """Watch one job from its start to its end."""
        end: dict[str, Any] = {"error": "the server lost contact with the process; see the messages in its terminal"}
        try:
            reads, writes = os.pipe()
            with os.fdopen(reads, "rb") as reports:
                with os.fdopen(writes, "wb") as out:
                    process = launch.child([str(self.path), self.device], {}, out, module="pearl.serve.teach")
                stdin = cast("IO[bytes]", process.stdin)
                with self._lock:
                    self._process = process
                    if self._cancelled:
                        process.terminate()
                with suppress(BrokenPipeError):  # it has ended, and has reported the reason
                    stdin.write(json.dumps(request).encode() + b"\n")
                    stdin.write(np.ascontiguousarray(images).data)
                    stdin.flush()
                error = self._follow(job_id, reports)
            code = process.wait()
            with suppress(BrokenPipeError):
                stdin.close()
            end = self._end(job_id, code, error)
        except (OSError, PearlError) as problem:
            end = {"error": " ".join(str(problem).split())}
        finally:
            self._process = None
            end = {"state": "failed", **end}
            if end["state"] != "done" and self.jobs[job_id].first_answer:
                with suppress(PearlError):
                    self.stopped()
            self.ended[end["state"]] += 1
            self._change(job_id, **end)

    def _follow(self, job_id: str, reports: BinaryIO) -> str:
        """Read reports until the end; return the error, or the last lines that were not reports."""
        error, words, began, first = "", "", 0.0, 0
        for line in reports:
            try:
                event = json.loads(line)
                kind = event["event"]
            except (ValueError, LookupError, TypeError):  # of an interpreter that ends with an error
                words = line.decode(errors="replace").strip() or words
                continue
            if kind in ("phase", "decode"):
                began, first = time.monotonic(), event.get("done", 0)
                facts = {"phase": event.get("phase", kind), "total": event.get("steps", event.get("images", 0))}
                self._change(job_id, state="learning", done=first, seconds_left=None, **facts)
            elif kind == "step":
                done, total = event["done"], event["total"]
                left = (time.monotonic() - began) / max(done - first, 1) * (total - done)
                self._change(job_id, done=done, total=total, seconds_left=round(left, 1))
            elif kind == "note":
                self._change(job_id, notes=(*self.jobs[job_id].notes, event["text"]))
            elif kind == "first_answer":
                with suppress(PearlError):  # the task itself is not concerned
                    self.learnt()
                    self._change(job_id, first_answer=True)
            elif kind == "failed":
                error = event["error"]
        return error or words

    def _end(self, job_id: str, code: int, error: str) -> dict[str, Any]:
        """Return the end state of a job from the exit code of its process; load a new model."""
        if code == 0:
            self._change(job_id, state="loading", phase="", seconds_left=None)
            try:
                return {"state": "done", "outcome": self.learnt()}
            except PearlError as problem:
                return {"error": f"learnt and stored, but not loaded: {problem}"}
        if self._cancelled:
            return {"state": "cancelled"}
        if code < 0:
            reason = "perhaps memory was short" if code == -signal.SIGKILL else "it was stopped from outside"
            return {"error": f"its process was ended by {signal.Signals(-code).name}: {reason}"}
        return {"error": error or f"its process ended with exit code {code}"}
