"""How well a model recognises images that it is given with their classes: before it learns them, and after."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pearl.data.augment import View
from pearl.data.batches import Task
from pearl.errors import DataError, counted, printable
from pearl.evaluation.evaluate import Evaluator, TestSet
from pearl.lifecycle.saved import load_method
from pearl.methods.base import Method
from pearl.settings.config import ModelConfig
from pearl.training.engine import Engine

ENOUGH = 5  # images of a class that say whether it is recognised; fewer are only noted
NEARLY_NONE = 0.1  # share of a class's images that the model recognises, up to which something else may be shown
LOOKED_AT = 64  # images, at most, of a class that is checked, and of a task that was learnt
BATCH = 256


@torch.no_grad()
def recognised(
    method: Method, view: View, images: Tensor, labels: Tensor, among: np.ndarray | None = None
) -> np.ndarray:
    """Return which images (N,) get their own class among all classes, or among some; labels (N,) are logit indices."""
    how: dict[str, Any] = {"device": method.device, "batch_size": BATCH, "autocast": torch.no_grad}
    (logits,) = Evaluator(view, **how).logits(method.eval(), [TestSet(images, labels)])
    found = logits.argmax(1).numpy() if among is None else among[logits[:, among].argmax(1).numpy()]
    return found == labels.cpu().numpy()


def check_known(
    path: Path,
    config: ModelConfig,
    engine: Engine,
    tasks: int,
    pixels: np.ndarray,
    labels: np.ndarray,
    names: Sequence[str],
    *,
    allow_new_style: bool,
) -> list[str]:
    """See that new images of known classes show these: the model as it is recognises some of them.

    Args:
        path: the model, before it learns the images.
        engine: the device.
        tasks: how many tasks it has learnt.
        pixels: images (N, S, S, 3) uint8 of known classes.
        labels: their logit indices (N,).
        names: all classes of the model.

    Returns:
        A line for each class of which nearly no image is recognised.

    Raises:
        DataError: there are such classes, and `allow_new_style` is False.
    """
    method = load_method(path, config, tasks, place=engine.place, to_ask=True)
    rows = np.concatenate([_spread(np.flatnonzero(labels == label)) for label in np.unique(labels)])
    chosen = torch.from_numpy(labels[rows])
    view = View(config.images, channels_last=config.engine.channels_last)
    right = recognised(method, view, torch.from_numpy(pixels[rows]), chosen)
    lines: list[str] = []
    refused: dict[str, str] = {}
    for label in np.unique(labels).tolist():
        of_class = right[labels[rows] == label]
        if of_class.mean() > NEARLY_NONE:
            continue
        name = printable(names[label])
        lines.append(
            f"{of_class.sum()} of {counted(len(of_class), 'image')} of {name} are recognised as {name} so far: a new "
            f"style, or something else?"
        )
        if len(of_class) >= ENOUGH:
            refused[name] = lines[-1]
    if refused and not allow_new_style:
        fix = "give other numbers, or names" if all(name.isdigit() for name in refused) else "rename the class"
        more = f" So of {counted(len(refused) - 3, 'more class')}." if len(refused) > 3 else ""
        raise DataError(
            f"{' '.join([*refused.values()][:3])}{more} Learn them with --allow-new-style (in Python "
            f"allow_new_style=True), or {fix}"
        )
    return lines


def sample(task: Task) -> tuple[Tensor, Tensor]:
    """Some of a task's images (n, H, W, 3) and their logit indices (n,), which stay when the task is over."""
    rows = torch.from_numpy(_spread(np.arange(len(task))))
    return task.images[rows.to(task.images.device)].clone(), task.labels.cpu()[rows]


def unlearnt(method: Method, view: View, images: Tensor, labels: Tensor, shown: np.ndarray) -> Iterator[str]:
    """A line if a method tells training images of the task that it has learnt apart no better than by chance.

    Args:
        method: the method after the task.
        view: how it sees images.
        images: some of the task's (n, H, W, 3) uint8.
        labels: their logit indices (n,).
        shown: logit indices of the task's classes, rising.
    """
    if len(shown) < 2:
        return
    share, chance = recognised(method, view, images, labels, shown).mean(), 1 / len(shown)
    if share <= min(2 * chance, chance + 0.1 * (1 - chance)):
        yield (
            f"{100 * share:.0f} % of its own training images are recognised among the task's {len(shown)} classes, "
            f"near chance ({100 * chance:.0f} %): training has failed; lower train.lr, or choose another method"
        )


def _spread(rows: np.ndarray) -> np.ndarray:
    """The rows, or some from all over if there are very many."""
    return rows[np.unique(np.linspace(0, len(rows) - 1, min(len(rows), LOOKED_AT)).round().astype(int))]
