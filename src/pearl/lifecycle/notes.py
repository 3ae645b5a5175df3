"""What a user should know of a task before it is trained, in words: a note is no error, and nothing waits for it."""

from collections.abc import Iterator

import numpy as np

from pearl.data.batches import Task
from pearl.data.sources import some
from pearl.errors import counted, printable
from pearl.methods.base import Method
from pearl.settings.follow import usual_resize

FEW = 5  # images of a class: below, most of what is learnt is those images
SEEN = 0.5  # share of a picture: below, the crop at its centre throws away most of it
UNBALANCED = 10  # times as many images of one class as of another: the larger one is named too often


def notes(method: Method, task: Task) -> Iterator[str]:
    """The method's and those of the images, of a task that has not been learnt yet."""
    yield from method.notes(task)
    yield from _crop(task)
    if method.oracle or task.shows_known_classes:  # what a joint task holds is no task of the user's
        return
    counts = np.bincount(task.labels.cpu().numpy() - task.first_class, minlength=len(task.classes))
    if len(task.classes) == 1 and method.own_classes:
        yield (
            f"a task of one class: its head has nothing to compare {printable(task.classes[0])!r} with, so the class "
            f"will hardly ever be named among others; learn it together with other new classes, or with a method that "
            f"keeps class means (method=ncm)"
        )
    few = np.flatnonzero(counts < FEW)
    if len(few):
        named = some([f"{printable(task.classes[row])!r} ({counts[row]})" for row in few], 5)
        yield f"fewer than {FEW} images of {named}: such classes are often confused; add images if you can"
    least, most = counts.argmin(), counts.argmax()
    if counts[most] >= UNBALANCED * counts[least]:
        small, large = (f"{printable(task.classes[row])!r} ({counted(counts[row], 'image')})" for row in (least, most))
        yield f"very unbalanced: {large} will be named too often where it is {small}; even them out if you can"


def _crop(task: Task) -> Iterator[str]:
    """A line for images of which the network sees the least part, before the first task."""
    size, resize = task.view.images.size, task.view.images.stored
    if task.id == 0 and (share := (size / resize) ** 2) < SEEN:
        yield (
            f"the network sees the central {size} of {resize} pixels, {100 * share:.0f} % of the picture; leave out "
            f"images.resize={resize}, or set it to {usual_resize(size)} (auto)"
        )
