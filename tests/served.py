"""A model served on a port of this machine by a thread, as tests and benchmarks need it."""

import io
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import uvicorn
from PIL import Image

import pearl
from pearl.serve.app import create_app
from pearl.serve.serving import configured, listening
from photos import SETTINGS, folders, write_photos


def taught(root: Path, name: str = "one") -> Path:
    """Create a model of two digits in `root`, whose next tasks take a second; return `root`."""
    write_photos(root / "first", {"zero": 0, "one": 1}, 12)
    with folders(root):
        pearl.learn(root / name, root / "first", quiet=True, **SETTINGS)
    return root


@contextmanager
def served(path: Any, **options: Any) -> Iterator[httpx.Client]:
    """A client of a server in a thread; `client.base_url` is where it is."""
    listener = listening("127.0.0.1", 0)
    app = create_app(path, device="cpu", **options)
    server = uvicorn.Server(configured(app))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{listener.getsockname()[1]}", timeout=30) as client:
            yield client
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


def png(pixels: np.ndarray, side: int | None = None) -> bytes:
    """An image as the bytes of a file, enlarged to a side if one is given."""
    image, file = Image.fromarray(pixels), io.BytesIO()
    if side:
        image = image.resize((side, side), Image.Resampling.BICUBIC)
    image.save(file, "PNG")
    return file.getvalue()


def learn(client: httpx.Client, photos: list[tuple[str, bytes]], **options: Any) -> str:
    """Start to learn photos with their labels; the job's id."""
    files = [("images", (f"{i}.png", file)) for i, (_, file) in enumerate(photos)]
    answer = client.post("/v1/learn", files=files, data={"labels": [label for label, _ in photos], **options})
    assert answer.status_code == 202, answer.text
    return str(answer.json()["id"])


def events(client: httpx.Client, job: str) -> Iterator[dict[str, Any]]:
    """What a job's stream of events says, until it ends."""
    with client.stream("GET", f"/v1/jobs/{job}/events") as stream:
        for line in stream.iter_lines():
            if line.startswith("data: "):
                yield json.loads(line.removeprefix("data: "))


def ended(client: httpx.Client, job: str, seconds: float = 60) -> dict[str, Any]:
    """How a job has ended, once it has."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        actual: dict[str, Any] = client.get(f"/v1/jobs/{job}").json()
        if actual["state"] in ("done", "failed", "cancelled"):
            return actual
        time.sleep(0.05)
    raise AssertionError(f"the job still runs after {seconds} s: {actual}")
