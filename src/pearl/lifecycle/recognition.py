"""Recognition of labelled images by a model: before it learns them, and after."""

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

ENOUGH = 5  # images per class needed for a decision; fewer only give a note
NEARLY_NONE = 0.1  # share of a class's images recognised by the model, at or below which they are refused
LOOKED_AT = 64  # maximum images of a checked class, and of a learnt task
BATCH = 256


@torch.no_grad()
def recognised(
    method: Method,
    view: View,
    images: Tensor,
    labels: Tensor,
    among: np.ndarray | None = None,
    task: int | None = None,
) -> np.ndarray:
    """Return a mask (N,) of images classified correctly among all classes, or among some; labels (N,) are logit
    indices.

    If `among` are the classes of `task`, the experts of other tasks are not evaluated.
    """
    settings: dict[str, Any] = {"device": method.device, "batch_size": BATCH, "autocast": torch.no_grad}
    task_experts = [expert for expert in method.eval().experts() if task is not None and expert.task == task]
    (logits,) = Evaluator(view, **settings).logits(method, [TestSet(images, labels)], task_experts or None)
    if among is None:
        predicted = logits.argmax(1).numpy()
    else:
        predicted = among[(logits if task_experts else logits[:, among]).argmax(1).numpy()]
    return predicted == labels.cpu().numpy()


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
    """Check that new images of known classes match them: the current model must recognise some.

    Args:
        path: the model, before it learns the images.
        engine: the device.
        tasks: number of its tasks.
        pixels: images (N, S, S, 3) uint8 of known classes.
        labels: their logit indices (N,).
        names: all classes of the model.

    Returns:
        A line for each class of which almost no image is recognised.

    Raises:
        DataError: such classes exist, and `allow_new_style` is False.
    """
    method = load_method(path, config, tasks, to_device=engine.to_device, to_ask=True)
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
            f"{of_class.sum()} of {counted(len(of_class), 'image')} of {name} are recognised as {name}: a new "
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
    """Return a sample of a task's images (n, H, W, 3) and logit indices (n,), which remain after the task."""
    rows = torch.from_numpy(_spread(np.arange(len(task))))
    return task.images[rows.to(task.images.device)].clone(), task.labels.cpu()[rows]


def unlearnt(method: Method, view: View, images: Tensor, labels: Tensor, shown: np.ndarray, task: int) -> Iterator[str]:
    """Return a warning if a method classifies the training images of its last task no better than by chance.

    Args:
        method: the method after the task.
        view: the transform of its images.
        images: some of the task's (n, H, W, 3) uint8.
        labels: their logit indices (n,).
        shown: logit indices of the task's classes, ascending.
        task: its number.
    """
    if len(shown) < 2:
        return
    fitted, chance = method.classifier.fitted(), 1 / len(shown)
    right = recognised(method, view, images, labels, shown, task) if fitted is None else fitted.best_own == fitted.true
    share = right.mean()
    if share <= min(2 * chance, chance + 0.1 * (1 - chance)):
        yield (
            f"{100 * share:.0f} % of the task's training images are classified correctly among its {len(shown)} "
            f"classes, "
            f"near chance ({100 * chance:.0f} %): training has failed; lower train.lr, or choose another method"
        )


def _spread(rows: np.ndarray) -> np.ndarray:
    """Return the rows, or an evenly spread sample if there are very many."""
    return rows[np.unique(np.linspace(0, len(rows) - 1, min(len(rows), LOOKED_AT)).round().astype(int))]
