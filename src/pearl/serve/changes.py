"""Taking back over HTTP: `undo`, `rename` and `forget`, in this process and under the model's lock."""

from collections.abc import Callable
from functools import partial
from typing import Annotated

from fastapi import FastAPI, HTTPException
from pydantic import BaseModel, Field
from starlette.concurrency import run_in_threadpool

from pearl.errors import ConfigError, PearlError, RunError
from pearl.lifecycle.forget import forget
from pearl.lifecycle.rename import rename
from pearl.lifecycle.undo import undo
from pearl.serve.learning_jobs import BUSY, Unavailable
from pearl.serve.openapi import problems
from pearl.serve.photos import Name, Strict
from pearl.serve.server import Server

DryRun = Annotated[bool, Field(description="only describe what would happen")]


class Undo(Strict):
    """Take back the last task."""

    dry_run: DryRun = False


class Rename(Strict):
    """Another name for a class."""

    old: Name
    new: Name
    dry_run: DryRun = False


class Forget(Strict):
    """Remove a class or a task; give one of them."""

    class_: Name | None = Field(None, alias="class")
    task: Name | None = None
    dry_run: DryRun = False


class Changed(BaseModel):
    """The effect of a change, made or planned."""

    line: str = Field(description="what happens, and what stays")
    changed: bool = Field(description="false after a dry run")


def add_changes(app: FastAPI, server: Server) -> None:
    """Add the addresses that take something back."""
    wrong = problems(400, 409, 422)

    @app.post("/v1/undo", summary="Take back the last task", responses=wrong)
    async def undone(request: Undo) -> Changed:
        """The model is as it was before its last lesson, byte for byte. A cancelled lesson is discarded."""
        return await _changed(server, undo, request.dry_run)

    @app.post("/v1/rename", summary="Rename a class", responses=wrong)
    async def renamed(request: Rename) -> Changed:
        """Tensors are unchanged. A cancelled lesson is discarded."""
        return await _changed(server, partial(rename, old=request.old, new=request.new), request.dry_run)

    @app.post("/v1/forget", summary="Forget a class or a task", responses=wrong)
    async def forgotten(request: Forget) -> Changed:
        """A class is never predicted again; a task is removed exactly, from a model with heads or with the
        features of all images. The answer has what stays. A cancelled lesson is discarded.
        """
        return await _changed(server, partial(forget, name=request.class_, task=request.task), request.dry_run)


async def _changed(server: Server, change: Callable[..., str], dry_run: bool) -> Changed:
    """Change the model and load it, or return what would happen; predictions continue meanwhile.

    Raises:
        HTTPException: a job runs (409), the model cannot be changed like this (409) or a name is wrong (422).
    """

    def work() -> str:
        with server.teacher.held():
            line = change(server.path, dry_run=dry_run, discard=True)
            if not dry_run:
                server.reload()
            return line

    try:
        line = await run_in_threadpool(work)
    except Unavailable:
        raise HTTPException(409, BUSY) from None
    except (ConfigError, RunError) as error:
        raise HTTPException(422 if isinstance(error, ConfigError) else 409, _without_path(server, error)) from None
    return Changed(line=_without_path(server, line), changed=not dry_run)


def _without_path(server: Server, line: str | PearlError) -> str:
    """Return a line without the model's path, which the user of a page does not know."""
    words = str(line).partition("\n")[0].removeprefix("dry run, nothing is changed: ")
    return words.removeprefix(f"{server.path}: ").replace(str(server.path), server.path.resolve().name)
