"""Input and output of `pearl predict`."""

import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO

from pearl.data.decoding import Decoding
from pearl.data.images import read_all
from pearl.data.sources import files_below, image_files, no_images
from pearl.errors import DataError, printable
from pearl.storage.tabular import rows_as_csv

if TYPE_CHECKING:
    from pearl.lifecycle.model import Prediction, StoredModel

Write = Callable[[Path, "Prediction"], None]


def named(
    paths: Iterable[str], stdin: TextIO = sys.stdin, *, say: Callable[[str], object] = lambda line: None
) -> list[Path]:
    """Yield the given files: themselves, all images below a folder, and for "-" a list with a path per line.

    Files in a folder that are not images are counted and reported.

    Raises:
        DataError: a folder without images, or no input.
    """
    files: list[Path] = []
    for name in paths:
        if name == "-":
            files += [Path(line) for line in stdin.read().split("\n") if line.strip()]
        elif os.path.isdir(name):  # noqa: PTH112 - a name that is too long is not a folder, and not an error here
            in_folder = image_files(Path(name))
            for line in no_images(Path(name), files_below(Path(name))):
                say(line)
            if not in_folder:
                raise DataError(f"{name}: no image in this folder; give a folder with images, or a file")
            files += in_folder
        else:
            files.append(Path(name))
    if not files:
        raise DataError("no image was given; give files, folders, or a list on standard input")
    return files


def predict_files(
    model: "StoredModel",
    files: list[Path],
    write: Write,
    *,
    task: str | None = None,
    top: int = 1,
    unknown_rate: float | Literal["auto"] | None = "auto",
    say: Callable[[str], object] = lambda line: None,
) -> list[str]:
    """Write a prediction for every readable file; return a line for each other file.

    Notes on decoding are printed.
    """
    from pearl.lifecycle.evaluation import BATCH

    unreadable: list[str] = []
    decoding = Decoding.of(model.config.images)
    for start in range(0, len(files), BATCH):
        good, pixels, wrong = read_all(files[start : start + BATCH], model.config.images.stored, decoding)
        unreadable += wrong
        if good:
            predictions = model.predict_pixels(pixels, task=task, top=top, unknown_rate=unknown_rate)
            for file, prediction in zip(good, predictions, strict=True):
                write(file, prediction)
    for line in decoding.notes():
        say(line)
    return unreadable


def writer(form: Literal["table", "json", "csv"], out: TextIO, *, scored: bool = False) -> Write:
    """Return a function that writes predictions one by one.

    If they are `scored`, CSV has two more columns: whether an image is known, and its in-distribution score.
    """
    if form == "json":
        return lambda file, p: print(
            json.dumps(
                {"file": str(file), "predictions": _ranked(p)}
                | ({} if p.known is None else {"known": p.known, "in_distribution": p.in_distribution})
            ),
            file=out,
            flush=True,
        )
    if form == "csv":

        def lines(*rows: list[Any]) -> None:
            print(rows_as_csv(rows, end="\n"), end="", file=out)

        lines(["file", "rank", "class", "task", "probability", *(["known", "in_distribution"] if scored else [])])
        return lambda file, p: lines(
            *(
                [
                    str(file),
                    rank,
                    best["class"],
                    best["task"],
                    f"{best['probability']:.6f}",
                    *([str(p.known).lower(), f"{p.in_distribution:.4f}"] if scored else []),
                ]
                for rank, best in enumerate(_ranked(p), 1)
            )
        )

    def row(file: Path, prediction: "Prediction") -> None:
        shown = printable(str(file))
        if prediction.known is False:
            print(f"{shown:<40}  unknown; nearest:", file=out)
            shown = ""
        for best in _ranked(prediction):
            task, name = printable(str(best["task"])), printable(str(best["class"]))
            print(f"{shown:<40}  {_percent(best)} %  {name}  (task {task})", file=out)
            shown = ""

    return row


def _percent(best: Mapping[str, str | float]) -> str:
    """Return a probability with one decimal; 100.0 only if no other class has any."""
    probability = 100 * float(best["probability"])
    return f"{probability if probability == 100 else min(probability, 99.9):5.1f}"


def _ranked(prediction: "Prediction") -> list[dict[str, str | float]]:
    best = zip(prediction.classes, prediction.tasks, prediction.probabilities, strict=True)
    return [{"class": name, "task": task, "probability": probability} for name, task, probability in best]
