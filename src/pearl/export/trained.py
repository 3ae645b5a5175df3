"""The input of an export, and the comparison of its output with the model."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from pearl.data.augment import View
from pearl.errors import ExportError, PearlError
from pearl.methods.base import Method
from pearl.methods.common.by_statistics import USUAL_RATE
from pearl.settings.registry import Spec
from pearl.settings.sections import ImagesConfig
from pearl.version import __version__

FORMAT = 1  # version of the metadata in exported files
FACTS = "pearl.json"  # name of the metadata in a program, and of the file that marks a folder as an export
TOLERANCE = 1e-4  # tolerance of logits, times the largest logit if that is above 1


@dataclass(frozen=True)
class Trained:
    """A method with its images, classes and backbone: all that an export needs.

    `tasks` are those that the method has learnt, each {"name": ..., "classes": [...]}; `backbone` is its spec for the
    registry. `first_answer` is a line if the newest task is not trained yet, see `Model.first_answer`.
    """

    method: Method
    images: ImagesConfig
    tasks: Sequence[Mapping[str, Any]]
    backbone: Spec
    first_answer: str = ""

    @property
    def facts(self) -> dict[str, Any]:
        """Return the metadata of the export, as JSON values."""
        size = self.images.size
        facts: dict[str, Any] = {
            "format": FORMAT,
            "pearl": __version__,
            "classes": [name for task in self.tasks for name in task["classes"]],
            "tasks": [{"name": task["name"], "classes": list(task["classes"])} for task in self.tasks],
            "input": {
                "shape": ["batch", 3, size, size],
                "dtype": "float32",
                "values": "RGB in [0, 1]",
                "resize": self.images.stored,  # the shorter side, before the centre crop of `size`
                "interpolation": "bicubic",
                "crop": "center",
            },
            "output": "logits (batch, classes), in the order of classes",
        }
        if self.first_answer:
            facts["note"] = self.first_answer
        if (expected := self.method.classifier.expected_rejections(USUAL_RATE)) is not None:
            facts["output"] = f"{facts['output']}; in_distribution (batch,), from 0 to 1"
            facts["unknown"] = {
                "in_distribution_below": USUAL_RATE,  # the share of images of known classes that are below it, too,
                "of_known_classes": [*expected],  # and where that lies in nine of ten cases
            }
        return facts


@contextmanager
def refusing(what: str) -> Iterator[None]:
    """Turn a library's error into one line: on untraceable networks, it raises many types of errors."""
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    except (PearlError, OSError):
        raise
    except Exception as error:
        raise ExportError(f"{what} ({_reason(error)}); choose another format with --to, or another backbone") from error


@contextmanager
def importing(to: str) -> Iterator[None]:
    """Turn an import error of a format's packages into one line: a broken installation raises many types of errors."""
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    except Exception as error:
        raise ExportError(
            f"--to {to}: its packages are installed but cannot be imported ({type(error).__name__}: {_reason(error)}); "
            f'reinstall what is named there, or all of them: pip install --upgrade "pearl[{to}]"'
        ) from error


def _reason(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def on_cpu(method: Method, task: int | None = None) -> Callable[[Tensor], Tensor]:
    """Return a method's logits for images (B, 3, S, S), on the CPU."""
    return lambda x: method(x.to(method.device), task=task).cpu()


def seen(model: Trained, raw: Tensor) -> Tensor:
    """Return raw images (n, H, W, 3) uint8 as network input (n, 3, S, S)."""
    return View(model.images, channels_last=False).test(raw)


def compare(
    model: Callable[[Tensor], Tensor], written: Callable[[Tensor], Tensor], x: Tensor, given: Tensor | None = None
) -> float:
    """Return the largest difference of logits on images `x`, both for the first alone and for all; `written` takes
    `given`.

    Raises:
        ExportError: the difference exceeds TOLERANCE, times the largest logit if that is above 1. Different predictions
            are thus ties up to rounding.
    """
    given = x if given is None else given
    times = -(-5 // len(x))  # a batch of five or more
    x, given = x.repeat(times, 1, 1, 1), given.repeat(times, 1, 1, 1)
    expected = model(x)
    worst = 0.0
    for count in (1, len(x)):
        outputs = written(given[:count].contiguous())
        difference = (
            float((outputs - expected[:count]).abs().max()) if outputs.shape == expected[:count].shape else np.inf
        )
        allowed = TOLERANCE * max(1.0, float(expected.abs().max()))
        if not difference <= allowed:  # also if a value is not a number
            raise ExportError(
                f"the written model disagrees with the trained one: logits differ by {difference:.1e}, allowed are "
                f"{allowed:.1e}; nothing was written; choose another format"
            )
        worst = max(worst, difference)
    return worst
