"""Discovery over HTTP: photos that a model finds unknown, in groups."""

import asyncio
from collections import Counter
from collections.abc import Iterable
from functools import partial

from fastapi import FastAPI, HTTPException, Request
from pydantic import BaseModel, Field
from starlette.concurrency import run_in_threadpool

from pearl.errors import ConfigError, DataError
from pearl.lifecycle.discovery import Discovery, discover
from pearl.lifecycle.evaluation import UNKNOWN_RATE
from pearl.serve import photos
from pearl.serve.openapi import PHOTOS, form, json_body, problems
from pearl.serve.server import Server


class PhotoGroup(BaseModel):
    """Unknown photos that are probably of one class, by their numbers in the request."""

    photos: list[int] = Field(description="most typical first")
    typical: list[int] = Field(description="nearest to the mean of the group")
    doubtful: list[int] = Field(description="farthest from it")
    nearest: str = Field(description="the known class that most of them resemble, probably wrongly")


class Groups(BaseModel):
    """Photos of a request by what they show; all numbers are those in the request, from 0."""

    groups: list[PhotoGroup]
    alone: list[int] = Field(description="unknown photos in no group")
    known: list[int] = Field(description="photos of known classes")
    duplicates: list[list[int]] = Field(description="equal photos, of which only the first is listed elsewhere")
    near_duplicates: list[list[int]] = Field(description="pairs of nearly equal photos")


def add_groups(app: FastAPI, server: Server) -> None:
    """Add the address that groups unknown photos."""
    one_at_a_time = asyncio.Lock()

    @app.post(
        "/v1/discover",
        summary="Group photos of unknown classes",
        responses=problems(400, 413, 415, 422, 503),
        openapi_extra={
            "requestBody": {
                "required": True,
                "content": {**form({"images": PHOTOS}, ["images"]), **json_body(photos.Pile)},
            }
        },
    )
    async def discovered(request: Request) -> Groups:
        """Photos that the model finds unknown are grouped by their features; the data decide the number of groups."""
        pixels = await server.decoder.pixels(await photos.pile(request))
        rate = UNKNOWN_RATE if server.unknown_rate == "auto" else server.unknown_rate
        work = partial(discover, server.predictor.model, [*pixels], unknown_rate=rate)
        try:
            async with one_at_a_time:
                return described(await run_in_threadpool(work))
        except (ConfigError, DataError) as error:
            raise HTTPException(422, str(error).partition("\n")[0]) from None


def described(discovery: Discovery) -> Groups:
    """Return groups as JSON values."""
    return Groups(
        groups=[
            PhotoGroup(
                photos=[*one.images],
                typical=[*one.typical],
                doubtful=[*one.doubtful],
                nearest=_most(discovery.nearest[i] for i in one.images),
            )
            for one in discovery.groups
        ],
        alone=[*discovery.alone],
        known=[*discovery.known],
        duplicates=[[*rows] for rows in discovery.duplicates],
        near_duplicates=[[*pair] for pair in discovery.near_duplicates],
    )


def _most(names: Iterable[str]) -> str:
    return Counter(names).most_common(1)[0][0]
