"""The application: the page, predictions, and learning as a job. One process with one loaded model."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from jinja2 import Environment
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException as AnyHTTPException
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse

from pearl.data.decoding import MAX_PIXELS
from pearl.errors import PearlError, printable, shortened
from pearl.names import class_name
from pearl.serve import photos
from pearl.serve.changes import add_changes
from pearl.serve.describe import ranked
from pearl.serve.exports import add_exports
from pearl.serve.groups import add_groups
from pearl.serve.guard import LONGEST_BODY, Guard
from pearl.serve.learning_jobs import BUSY, LearningJob, Unavailable
from pearl.serve.openapi import IMAGES, PHOTOS, form, json_body, problems
from pearl.serve.predictor import Overloaded
from pearl.serve.server import Server
from pearl.version import __version__

LOOK = 0.2  # seconds between two looks at a job whose events are read
BEAT = 15.0  # seconds after which a stream of events without news gets an empty line, for proxies
KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
SCRIPTS = ("page.js", "server.js", "discover.js", "history.js")


class Ranked(BaseModel):
    """A class of a photo, with facts about the photo."""

    label: str
    score: float = Field(description="probability among all classes")
    task: str
    unknown: bool | None = Field(description="whether the photo shows no known class; null without class statistics")
    in_distribution: float | None = Field(description="share of photos of known classes that fit no better")


class Begun(BaseModel):
    """A job that has been started."""

    id: str
    task: str
    events: str = Field(description="where its events can be read")


def create_app(
    path: str | Path,
    *,
    device: str = "auto",
    method: str | None = None,
    unknown_rate: float | Literal["auto"] = "auto",
    token: str | None = None,
    names: Collection[str] = (),
) -> FastAPI:
    """Return the application for a model, to be run by any ASGI server in one process.

    Args:
        path: directory of the model.
        device: auto, cpu or cuda.
        method: the file of a method of the user's own, see `Model.open`.
        unknown_rate: as of `Model.predict`.
        token: required in every request; None for no token.
        names: allowed host names, besides localhost and numeric addresses.

    Raises:
        PearlError: the model is missing or cannot be read.
    """
    server = Server(Path(path), device=device, method=method, unknown_rate=unknown_rate)

    @asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.get_running_loop().run_in_executor(None, server.close)

    app = FastAPI(title="pearl", version=__version__, lifespan=life, docs_url=None, redoc_url=None)
    app.add_middleware(Guard, names=names, token=token, metrics=server.metrics)
    app.add_exception_handler(AnyHTTPException, _problem)
    app.add_exception_handler(RequestValidationError, _problem)
    app.add_exception_handler(PearlError, _problem)
    _add_pages(app)
    _add_predictions(app, server)
    _add_learning(app, server)
    add_changes(app, server)
    add_groups(app, server)
    add_exports(app, server)
    return app


async def _problem(_: Request, error: Exception) -> Response:
    """Return an error as one line of JSON; errors of the model have status 500."""
    if isinstance(error, AnyHTTPException):
        return JSONResponse({"error": error.detail}, error.status_code, error.headers)
    if isinstance(error, RequestValidationError):
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"][1:] if isinstance(part, str)) or "body"
        why = f"{first['msg'][:1].lower()}{first['msg'][1:]}"
        return JSONResponse({"error": shortened(printable(f"{where}: {why}"), 300)}, 400)
    return JSONResponse({"error": str(error).partition("\n")[0]}, 500)


def _add_pages(app: FastAPI) -> None:
    folder = files("pearl.serve") / "page"
    page = {name: (folder / name).read_bytes() for name in ("page.html", "page.css", "icon.svg", *SCRIPTS)}
    api = Environment(autoescape=True, trim_blocks=True).from_string((folder / "api.html.jinja").read_text("utf-8"))

    @app.get("/", include_in_schema=False)
    async def start() -> Response:
        return Response(page["page.html"], media_type=KINDS["html"])

    @app.get("/static/{name}", include_in_schema=False)
    async def static(name: str) -> Response:
        if name not in page:
            raise HTTPException(404, "no such file")
        return Response(page[name], media_type=KINDS[name.rpartition(".")[2]])

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return HTMLResponse(api.render(api=app.openapi()))


def _add_predictions(app: FastAPI, server: Server) -> None:
    @app.post(
        "/v1/predict",
        summary="Name what is in photos",
        response_model=list[Ranked] | list[list[Ranked]],
        responses=problems(400, 413, 415, 422, 503),
        openapi_extra={
            "requestBody": {
                "required": True,
                "content": {**IMAGES, **form({"images": PHOTOS}, ["images"]), **json_body(photos.Question)},
            },
            "parameters": [
                {
                    "name": "top_k",
                    "in": "query",
                    "description": "classes of each photo, if the body is not JSON",
                    "schema": {"type": "integer", "minimum": 1, "maximum": 1000, "default": photos.TOP},
                }
            ],
        },
    )
    async def predict(request: Request) -> Any:
        """A photo as the body, or `inputs` as one text, gives a list of classes, best first. A form, or `inputs` as a
        list, gives such a list for each photo. Requests that arrive together are predicted together.
        """
        asked, top, one = await photos.question(request)
        pixels = await server.decoder.pixels(asked)
        try:
            predictions = await asyncio.wrap_future(server.predictor.predict(pixels, top))
        except Overloaded:
            raise HTTPException(503, "too many photos wait already; try again later", {"Retry-After": "5"}) from None
        lists = [ranked(prediction, top) for prediction in predictions]
        return JSONResponse(lists[0] if one else lists)

    @app.get("/v1/model", summary="What the model is and has learnt")
    async def model() -> dict[str, Any]:
        """Classes, tasks with date, ranks and accuracy, limits of requests, and the running job."""
        job = server.teacher.current
        limits = {"photos": photos.MOST, "bytes": LONGEST_BODY, "pixels": MAX_PIXELS}
        return {**server.about, "limits": limits, "job": job and job.id}

    @app.get("/healthz", summary="Whether the server runs")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/metrics", summary="Counters for Prometheus", response_class=PlainTextResponse)
    async def metrics() -> Response:
        text = server.metrics.text(server.counters(), server.gauges())
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")


def _add_learning(app: FastAPI, server: Server) -> None:
    properties = {
        "images": PHOTOS,
        "labels": {"type": "array", "items": {"type": "string"}, "description": "a class for each of the images"},
        **{name: {"type": kind} for name, kind in (("task", "string"), ("fast", "boolean"))},
        "allow_new_style": {"type": "boolean"},
    }

    @app.post(
        "/v1/learn",
        summary="Learn new classes, or more photos of known ones",
        status_code=202,
        response_model=Begun,
        responses=problems(400, 409, 413, 415, 422, 503),
        openapi_extra={
            "requestBody": {
                "required": True,
                "content": {**form(properties, ["images", "labels"]), **json_body(photos.Lesson)},
            }
        },
    )
    async def learn(request: Request) -> Begun:
        """Starts a job. The model predicts as before until the new one is stored, which then replaces it."""
        shown, labels, options = await photos.lesson(request)
        pixels = await server.decoder.pixels(shown)
        task = class_name(options.task or server.task_name(labels))
        try:
            job = server.teacher.start(
                pixels, labels, task=task, fast=options.fast, allow_new_style=options.allow_new_style
            )
        except Unavailable:
            raise HTTPException(409, BUSY) from None
        return Begun(id=job.id, task=task, events=f"/v1/jobs/{job.id}/events")

    def job_of(job_id: str) -> LearningJob:
        if job_id not in server.teacher.jobs:
            raise HTTPException(404, "no such job; it may have been one of a server that has ended")
        return server.teacher.jobs[job_id]

    @app.get("/v1/jobs/{job_id}", summary="State of a job", responses=problems(404))
    async def job(job_id: str) -> dict[str, Any]:
        """Its state, its progress, and the estimated accuracy of the model once it is done."""
        return job_of(job_id).facts()

    @app.get("/v1/jobs/{job_id}/events", summary="Progress of a job", responses=problems(404))
    async def events(job_id: str) -> Response:
        """Server-sent events: the answer of `/v1/jobs/ID` after each change, until the job has ended."""
        job_of(job_id)
        return StreamingResponse(_events(server.teacher.jobs, job_id), media_type="text/event-stream")

    @app.delete("/v1/jobs/{job_id}", summary="Cancel a job", status_code=202, responses=problems(404))
    async def cancel(job_id: str) -> dict[str, Any]:
        """The model is unchanged. Finished steps are stored: the same photos resume there."""
        server.teacher.cancel(job_of(job_id).id)
        return job_of(job_id).facts()


async def _events(jobs: Mapping[str, LearningJob], job_id: str) -> AsyncIterator[str]:
    seen, sent = -1, time.monotonic()
    while (job := jobs.get(job_id)) is not None:
        if job.version != seen or time.monotonic() - sent > BEAT:
            yield f"id: {job.version}\ndata: {json.dumps(job.facts())}\n\n" if job.version != seen else ": learning\n\n"
            seen, sent = job.version, time.monotonic()
        if job.ended:
            return
        await asyncio.sleep(LOOK)
