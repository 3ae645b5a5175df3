"""Warnings for the user about a task before its training; they are not errors and do not stop it."""

from collections.abc import Iterator

import numpy as np

from pearl.data.batches import Task
from pearl.data.sources import some
from pearl.errors import counted, printable
from pearl.methods.base import Method
from pearl.settings.derived_defaults import usual_resize

FEW = 5  # images per class; with fewer, the model mostly learns these images
SEEN = 0.5  # share of a picture; below, the centre crop discards most of it
UNBALANCED = 10  # ratio of images between two classes; above, the larger one is predicted too often


def notes(method: Method, task: Task) -> Iterator[str]:
    """Return the warnings of the method and of the images of a new task."""
    yield from method.notes(task)
    yield from _crop(task)
    if method.oracle or task.shows_known_classes:  # the data of a joint task is not the user's task
        return
    counts = np.bincount(task.labels.cpu().numpy() - task.first_class, minlength=len(task.classes))
    if len(task.classes) == 1 and method.task_local_loss:
        yield (
            f"a task of one class: its head cannot compare {printable(task.classes[0])!r} with others, so that this "
            f"class will rarely be predicted; learn it together with other new classes, or with a method that uses "
            f"class "
            f"means (method=ncm)"
        )
    few = np.flatnonzero(counts < FEW)
    if len(few):
        named = some([f"{printable(task.classes[row])!r} ({counts[row]})" for row in few], 5)
        yield f"fewer than {FEW} images of {named}: such classes are often confused; add images if you can"
    least, most = counts.argmin(), counts.argmax()
    if counts[most] >= UNBALANCED * counts[least]:
        small, large = (f"{printable(task.classes[row])!r} ({counted(counts[row], 'image')})" for row in (least, most))
        yield f"very unbalanced: {large} will be predicted too often instead of {small}; balance them if you can"


def _crop(task: Task) -> Iterator[str]:
    """Return a line if the network reads only a small part of the images, before the first task."""
    size, resize = task.view.images.size, task.view.images.stored
    if task.id == 0 and (share := (size / resize) ** 2) < SEEN:
        yield (
            f"the network reads the central {size} of {resize} pixels, {100 * share:.0f} % of the picture; leave out "
            f"images.resize={resize}, or set it to {usual_resize(size)} (auto)"
        )
