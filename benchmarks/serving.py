"""Clients that send one photo after the other to `pearl serve` while it learns, compared with `predict` on a list.

    python benchmarks/serving.py                                  50 clients for 60 seconds, a ResNet-18 at 32 pixels
    python benchmarks/serving.py --clients 4 --seconds 10         less
    python benchmarks/serving.py --width 8 --size 8               a tiny network: what HTTP costs

Every answer is compared with those of the model before the lesson, of its first answer, and of the model after it: it
has to be one of the three, whole. The program ends with an error if one is not, or if a request fails. Clients and the
lesson share the machine with the server, so that the throughput includes their work. The server's own efficiency is
therefore measured before the lesson, in CPU time per photo, against `predict` on a list; both have one thread.
"""

import argparse
import asyncio
import base64
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import numpy as np
import psutil
import torch
from PIL import Image
from sklearn.datasets import load_digits

import pearl

Predictions = list[dict[str, float]]  # of each photo, the score of each class


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--width", type=int, default=32, help="channels of the ResNet-18")
    parser.add_argument("--size", type=int, default=32, help="pixels")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(measure(Path(folder), given), indent=1))


def measure(folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Figures of one run: photos a second, latencies in milliseconds, and how the lesson ended."""
    path, data = folder / "model", load_digits()
    rows = {label: np.flatnonzero(data.target == label) for label in range(6)}
    images = {label: np.rint(data.images[rows[label]] * 15.9).astype(np.uint8) for label in rows}
    train = {"epochs": 3, "batch_size": 16, "phases": {"probe": {"epochs": 1}}}
    settings: dict[str, Any] = {"backbone": {"name": "resnet18", "width": given.width}}
    settings |= {"images": {"size": given.size, "pad": 1, "flip": False}}
    for classes in ((0, 1), (2, 3)):
        shown = [(image, f"digit {label}") for label in classes for image in images[label][:20]]
        pearl.learn(path, shown, quiet=True, train=train, **settings)
    files = [png(image, given.size) for label in range(6) for image in images[label][30:40]]
    torch.set_num_threads(1)
    untaught = Path(shutil.copytree(path, folder / "first"))
    before, alone, cpu_alone = in_python(path, files)

    command = [sys.executable, "-m", "pearl", "serve", str(path), "--no-browser", "--port", "0"]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=one_thread) as server:
        try:
            url = server.stdout.readline().split()[-1]  # type: ignore[union-attr]
            cpu = cpu_per_photo(server.pid, url, files, given)
            lesson = [(png(image, given.size), label) for label in (4, 5) for image in images[label][:20]]
            answers, times, job = asyncio.run(load(url, files, given, lesson))
        finally:
            server.terminate()
    after, *_ = in_python(path, files)
    shown = [(Image.open(io.BytesIO(file)), f"digit {label}") for file, label in lesson]
    pearl.learn(untaught, shown, task="lesson", fast=True, quiet=True)
    first, *_ = in_python(untaught, files)
    models = before, first, after
    wrong = sum(not any(same(answer, model[photo]) for model in models) for photo, answer in answers)
    if wrong or job["state"] != "done":
        raise SystemExit(
            f"{wrong} of {len(answers)} answers are of no model; the lesson: {job['state']} {job['error']}"
        )
    percentiles = np.percentile(np.array(times) * 1000, [50, 95, 99])
    grown = sum(len(answer) == len(after[0]) for _, answer in answers)
    return {
        "CPU ms per photo, server, no lesson": round(cpu, 2),
        "CPU ms per photo, predict on a list": round(cpu_alone, 2),
        "ratio of CPU time": round(cpu_alone / cpu, 2),
        "clients": given.clients,
        "requests": len(answers),
        "requests answered with the new classes": grown,
        "photos per second": round(len(answers) / given.seconds, 1),
        "photos per second, predict on a list": round(alone, 1),
        "ratio of photos per second": round(len(answers) / given.seconds / alone, 2),
        **{f"p{p} (ms)": round(value, 1) for p, value in zip((50, 95, 99), percentiles, strict=True)},
    }


def png(image: np.ndarray, side: int) -> bytes:
    """An image as the bytes of a file of some size."""
    file = io.BytesIO()
    Image.fromarray(image).resize((8 * side, 8 * side)).save(file, "PNG")
    return file.getvalue()


def cpu_per_photo(pid: int, url: str, files: list[bytes], given: argparse.Namespace) -> float:
    """Return the milliseconds of CPU time that the server takes per photo, over a sixth of the seconds."""

    def spent() -> float:
        times = psutil.Process(pid).cpu_times()
        return float(times.user + times.system)

    short = argparse.Namespace(clients=given.clients, seconds=given.seconds / 6)
    asyncio.run(load(url, files, argparse.Namespace(clients=given.clients, seconds=1.0)))  # to warm up
    began = spent()
    answers, _, _ = asyncio.run(load(url, files, short))
    return 1000 * (spent() - began) / len(answers)


def in_python(path: Path, files: list[bytes]) -> tuple[Predictions, float, float]:
    """Return predictions for each photo, photos per second, and milliseconds of CPU time per photo."""
    model = pearl.load(path, device="cpu")
    many = files * 5
    model.predict([Image.open(io.BytesIO(file)) for file in files[:2]])
    began, cpu = time.perf_counter(), time.process_time()
    results = model.predict([Image.open(io.BytesIO(file)) for file in many], top=99)
    rate, spent = len(many) / (time.perf_counter() - began), 1000 * (time.process_time() - cpu) / len(many)
    return [dict(zip(each.classes, each.probabilities, strict=True)) for each in results[: len(files)]], rate, spent


def same(answer: dict[str, float], expected: dict[str, float]) -> bool:
    """Return True if an answer is a model's: all its classes and no other, with its probabilities."""
    return answer.keys() == expected.keys() and all(abs(answer[name] - expected[name]) < 1e-3 for name in expected)


async def load(
    url: str, files: list[bytes], given: argparse.Namespace, lesson: list[tuple[bytes, int]] | None = None
) -> tuple[list[tuple[int, dict[str, float]]], list[float], dict[str, Any]]:
    """Let clients ask for a while, and the server learn a lesson meanwhile; answers with their photo, seconds, and the
    job.
    """
    answers: list[tuple[int, dict[str, float]]] = []
    times: list[float] = []
    until = time.monotonic() + given.seconds
    host, port = url.removeprefix("http://").strip("/").split(":")

    async def client(number: int) -> None:
        reader, writer = await asyncio.open_connection(host, int(port))
        photo = number
        while time.monotonic() < until:
            photo = (photo + 1) % len(files)
            head = f"POST /v1/predict?top_k=99 HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(files[photo])}\r\n\r\n"
            began = time.perf_counter()
            writer.write(head.encode() + files[photo])
            answer = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = next(line for line in answer.lower().splitlines() if line.startswith("content-length:"))
            body = json.loads(await reader.readexactly(int(length.partition(":")[2])))
            times.append(time.perf_counter() - began)
            if " 200 " not in answer.splitlines()[0]:
                raise SystemExit(f"an error: {body}")
            answers.append((photo, {each["label"]: each["score"] for each in body}))
        writer.close()

    clients = asyncio.gather(*(client(number) for number in range(given.clients)))
    if lesson is None:
        await clients
        return answers, times, {}
    await asyncio.sleep(min(3.0, given.seconds / 4))
    job = await asyncio.to_thread(learn, url, lesson)
    await clients
    state: dict[str, Any] = {}
    while state.get("state") not in ("done", "failed", "cancelled"):
        await asyncio.sleep(0.5)
        state = await asyncio.to_thread(get, f"{url}v1/jobs/{job}")
    return answers, times, state


def learn(url: str, lesson: list[tuple[bytes, int]]) -> str:
    """Start a job; its id."""
    images = [{"image": base64.b64encode(file).decode(), "label": f"digit {label}"} for file, label in lesson]
    body = json.dumps({"images": images}).encode()
    request = Request(f"{url}v1/learn", body, {"Content-Type": "application/json"})
    with urlopen(request) as answer:
        return str(json.load(answer)["id"])


def get(url: str) -> dict[str, Any]:
    with urlopen(url) as answer:
        results: dict[str, Any] = json.load(answer)
        return results


if __name__ == "__main__":
    main()
