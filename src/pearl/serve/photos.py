"""From a request's body to photos and labels, in memory: nothing is written, and no path or address is followed."""

import asyncio
import base64
import io
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, TypeVar

import numpy as np
from fastapi import HTTPException, Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from pearl.data.decoding import Decoding, ignore_oddities
from pearl.data.images import read_opened
from pearl.data.resources import threads
from pearl.errors import DataError, counted, printable, shortened
from pearl.names import class_name

MOST = 1000  # photos of a request
TOP = 5  # classes of a photo, if a request does not give a number; as Hugging Face
Body = TypeVar("Body", bound=BaseModel)
Photo = tuple[str, bytes]  # what to call it in an error, and its file
Name = Annotated[str, Field(min_length=1, max_length=200)]
Base64 = Annotated[str, Field(description="an image file in base64, with or without a data URL's head")]


class Strict(BaseModel):
    """A body of JSON without anything that is not expected."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Parameters(Strict):
    """Options of a prediction."""

    top_k: int = Field(TOP, ge=1, le=1000, description="classes of each photo, best first")


class Question(Strict):
    """One photo or several, as Hugging Face's inference takes them."""

    inputs: Base64 | Annotated[list[Base64], Field(min_length=1, max_length=MOST)]
    parameters: Parameters = Parameters(top_k=TOP)


class Pile(Strict):
    """Return photos to be grouped."""

    inputs: list[Base64] = Field(min_length=1, max_length=MOST)


class Example(Strict):
    """A photo with its class."""

    image: Base64
    label: Name


class Lesson(Strict):
    """Photos to learn."""

    images: list[Example] = Field(min_length=1, max_length=MOST)
    task: Name | None = Field(None, description="name of the task; after its classes if not given")
    fast: bool = Field(False, description="statistics alone, without training; after the first task")
    allow_new_style: bool = Field(
        False, description="learn photos of known classes though the model recognises none of them"
    )


class InMemory(MultiPartParser):
    """Starlette's parser writes files of more than 1 MiB to the disk. This one writes none."""

    spool_max_size = 0  # unlimited, for `tempfile.SpooledTemporaryFile`


async def question(request: Request) -> tuple[list[Photo], int, bool]:
    """Return photos to predict, how many classes of each are wanted, and whether it is one photo and not a list.

    Raises:
        HTTPException: with one line about what is wrong.
    """
    kind = kind_of(request)
    if kind == "application/json":
        asked = await _json(request, Question)
        one = isinstance(asked.inputs, str)
        inputs = [asked.inputs] if isinstance(asked.inputs, str) else asked.inputs
        return await _in_thread(lambda: _decoded(inputs)), asked.parameters.top_k, one
    top = _top(request)
    if kind == "multipart/form-data":
        photos, _ = await _multipart(request, set())
        return photos, top, False
    if kind.startswith("image/") or kind in ("", "application/octet-stream"):
        return [("the photo", await request.body())], top, True
    raise HTTPException(415, f"content type {kind!r}: send an image, multipart/form-data or JSON")


async def pile(request: Request) -> list[Photo]:
    """Return photos to be grouped.

    Raises:
        HTTPException: with one line about what is wrong.
    """
    kind = kind_of(request)
    if kind == "application/json":
        given = await _json(request, Pile)
        return await _in_thread(lambda: _decoded(given.inputs))
    if kind == "multipart/form-data":
        return (await _multipart(request, set()))[0]
    raise HTTPException(415, f"content type {kind!r}: send multipart/form-data or JSON")


async def lesson(request: Request) -> tuple[list[Photo], list[str], Lesson]:
    """Return photos to learn, their labels, and the options.

    Raises:
        HTTPException: with one line about what is wrong.
    """
    kind = kind_of(request)
    if kind == "application/json":
        given = await _json(request, Lesson)
        photos = await _in_thread(lambda: _decoded([example.image for example in given.images]))
        labels = [example.label for example in given.images]
    elif kind == "multipart/form-data":
        photos, fields = await _multipart(request, {"labels", "task", "fast", "allow_new_style"})
        labels = fields.pop("labels", [])
        if len(labels) != len(photos):
            raise HTTPException(
                400, f"{counted(len(photos), 'photo')}, but {counted(len(labels), 'label')}; send one label for each"
            )
        words = {name: values[-1] for name, values in fields.items()}
        flags = {name: words.pop(name).lower() for name in ("fast", "allow_new_style") if name in words}
        if wrong := [name for name, value in flags.items() if value not in ("true", "false")]:
            raise HTTPException(400, f"{wrong[0]}: send true or false")
        options: dict[str, Any] = {**words, **{name: value == "true" for name, value in flags.items()}}
        examples = [{"image": "", "label": label} for label in labels]
        given = _checked(lambda: Lesson.model_validate({"images": examples, **options}))
    else:
        raise HTTPException(415, f"content type {kind!r}: send multipart/form-data or JSON")
    labels = [class_name(label) for label in labels]
    for name in (*labels, *([] if given.task is None else [given.task])):
        if not name.strip() or not name.isprintable():
            raise HTTPException(400, f"{printable(name)!r} cannot be the name of a class or task; give it letters")
    return photos, labels, given


class Decoder:
    """Decodes photos to the size that a model is trained with, in as many threads as there are CPUs."""

    def __init__(self, size: int, decoding: Decoding) -> None:
        self.size, self.decoding, self._pool = size, decoding, ThreadPoolExecutor(threads(), "decode")

    async def pixels(self, photos: Sequence[Photo]) -> np.ndarray:
        """Return raw pixels (N, size, size, 3) uint8.

        Raises:
            HTTPException: naming the first photo that cannot be read.
        """
        ignore_oddities()
        loop = asyncio.get_running_loop()
        work = [loop.run_in_executor(self._pool, self._one, photo) for photo in photos]
        decoded = await asyncio.gather(*work, return_exceptions=True)
        for error in decoded:
            if isinstance(error, BaseException):
                raise error
        return np.stack([each for each in decoded if isinstance(each, np.ndarray)])

    def _one(self, photo: Photo) -> np.ndarray:
        name, file = photo
        try:
            return read_opened(io.BytesIO(file), name, self.size, self.decoding)
        except DataError as error:
            raise HTTPException(422, str(error)) from None

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(cancel_futures=True)


def kind_of(request: Request) -> str:
    """Return the content type of a request without its parameters."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def _top(request: Request) -> int:
    text = request.query_params.get("top_k", str(TOP))
    if not (text.isascii() and text.isdecimal() and 1 <= int(text[:9]) <= 1000):
        raise HTTPException(400, f"top_k={printable(text[:20])}: give a whole number from 1 to 1000")
    return int(text)


async def _multipart(request: Request, fields: set[str]) -> tuple[list[Photo], dict[str, list[str]]]:
    """Return the files and the fields of a form."""
    try:
        parser = InMemory(request.headers, request.stream(), max_files=MOST, max_fields=2 * MOST)
        form = await parser.parse()
    except MultiPartException as error:
        raise HTTPException(400, f"the form cannot be read: {error.message}") from None
    photos: list[Photo] = []
    texts: dict[str, list[str]] = {}
    try:
        for name, value in form.multi_items():
            if name == "images" and isinstance(value, UploadFile):
                photos.append((printable(value.filename or f"photo {len(photos)}")[:200], await value.read()))
            elif name in fields and isinstance(value, str):
                texts.setdefault(name, []).append(value)
            else:
                kind = "a file" if isinstance(value, UploadFile) else "a text"
                more = f"; texts are {', '.join(sorted(fields))}" if fields else ""
                why = f"{printable(name[:40])!r} as {kind} is not expected; photos are files 'images'{more}"
                raise HTTPException(400, why)
    finally:
        await form.close()
    if not photos:
        raise HTTPException(400, "no photo was sent; send each as a file 'images'")
    return photos, texts


async def _json(request: Request, shape: type[Body]) -> Body:
    body = await request.body()
    return await _in_thread(lambda: _checked(lambda: shape.model_validate_json(body)))


def _checked(validate: Callable[[], Body]) -> Body:
    try:
        return validate()
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"])) or "body"
        raise HTTPException(400, shortened(f"{printable(where)}: {printable(first['msg'])}", 300)) from None


def _decoded(texts: Sequence[str]) -> list[Photo]:
    photos = []
    for number, text in enumerate(texts):
        head, comma, rest = text.partition(",")
        try:
            file = base64.b64decode(rest if comma and head.endswith(";base64") else text, validate=True)
        except ValueError:
            raise HTTPException(
                400, f"photo {number} is not base64; send the bytes of an image file, never a path or an address"
            ) from None
        photos.append((f"photo {number}", file))
    return photos


Result = TypeVar("Result")


async def _in_thread(work: Callable[[], Result]) -> Result:
    return await asyncio.get_running_loop().run_in_executor(None, work)
