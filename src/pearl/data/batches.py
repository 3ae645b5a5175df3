"""A task's training data on its device, and the batches of an epoch."""

import copy
import hashlib
from collections.abc import Iterator
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from pearl.data.augment import Draws, View
from pearl.data.scratch import is_large, taken

# Values of network input per chunk of whole batches: a GPU would wait for forty small launches per batch. Keeping a
# batch keeps its chunk in memory.
AHEAD = {"cpu": 1, "cuda": 2**24}

SPARED, FEWEST = 200, 4  # images of a task that are spared from training at most, and of a class that loses one


class Batch(NamedTuple):
    """Network input (B, 3, size, size) float32; labels (B,) int64, the logit index; rows of `Task.images`."""

    x: Tensor
    y: Tensor
    rows: Tensor


def derive_seed(*parts: object) -> int:
    """Hash the position in a run to a 63-bit seed, so that any step can be resumed without stored random state."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big") >> 1


class Batches(Protocol):
    """Anything a phase can train on: a task, a part of it, samples from statistics, a task's images and a memory's."""

    def __len__(self) -> int:
        """Return the number of images in an epoch."""

    def batches(self, size: int, seed: int, *, skip: int = 0) -> Iterator[Batch]:
        """Yield the batches of one epoch, without its first `skip` ones; their bounds are those of `batch_bounds`.

        The batches are a function of `seed` and of values that are constant during the phase. Any step can therefore be
        resumed, and all processes that train together get the same batches.
        """


class Task:
    """A task as a method sees it. Once the task is over, its data is closed."""

    def __init__(
        self,
        id: int,
        name: str,
        classes: tuple[str, ...],
        first_class: int,
        images: np.ndarray,
        labels: np.ndarray,
        view: View,
        device: torch.device,
        *,
        train: bool = True,
        seed_part: int | str | None = None,
    ) -> None:
        self.id = id
        self.seed_part = id if seed_part is None else seed_part  # determines the random numbers of its training
        self.name = name
        self.classes = classes  # names of the new ones; class i has logit index first_class + i
        self.train = train  # False: class statistics suffice, no sub-network is trained
        self.first_class = first_class
        self.shown = np.unique(labels)  # logit indices of all its classes, ascending
        self.view = view
        self.device = device
        self._images = _on_device(torch.from_numpy(np.ascontiguousarray(images)), device)
        self._labels = torch.from_numpy(labels).to(device)
        self._open = True
        self._parts: list[Task] = []
        self.spares = False  # True: the images of `spared` are learnt by class statistics, but not trained on

    @property
    def spared(self) -> Tensor:
        """Mask (N,) of the images that no sub-network is trained on; see `spares`."""
        rows = spared_rows(self.labels) if self.spares else torch.zeros(len(self), dtype=torch.bool)
        return rows.to(self.device)

    @property
    def images(self) -> Tensor:
        """Raw images (N, H, W, 3) uint8, on the device if they fit into its memory."""
        self._check_open("images")
        return self._images

    @property
    def labels(self) -> Tensor:
        """Logit indices (N,) int64; values below `first_class` are classes of earlier tasks."""
        self._check_open("labels")
        return self._labels

    @property
    def shows_known_classes(self) -> bool:
        """Return True if some of its classes are known from earlier tasks."""
        return bool((self.shown < self.first_class).any())

    def __len__(self) -> int:
        return len(self._labels)

    def as_new(self) -> "Task":
        """Return the same images as a task whose classes are all new, with contiguous labels from `first_class`."""
        labels = self.first_class + np.searchsorted(self.shown, self.labels.cpu().numpy())
        header = self.id, self.name, tuple(map(str, self.shown)), self.first_class
        made = Task(*header, self.images.cpu().numpy(), labels, self.view, self.device, train=self.train)
        self._parts.append(made)
        return made

    def part(self, rows: Tensor, view: View | None = None) -> "Task":
        """Return a task of some of its images, or with another `view` of them; it is closed with this one.

        Its batches index its own images.
        """
        rows = rows.cpu()
        images, labels = taken(self.images.cpu().numpy(), rows.numpy()), self.labels.cpu()[rows]
        header = self.id, self.name, self.classes, self.first_class
        part = Task(*header, images, labels.numpy(), view or self.view, self.device, train=self.train)
        self._parts.append(part)
        return part

    def viewed(self, view: View) -> "Task":
        """Return the same images, in the same memory, with another view; the result is closed with this task."""
        made = copy.copy(self)
        made.view, made._parts = view, []
        self._parts.append(made)
        return made

    def to_train_on(self) -> "Task":
        """Return the part of it that sub-networks are trained on: all, or all but the spared images."""
        return self.part((~self.spared.cpu()).nonzero()[:, 0]) if self.spares else self

    def without_training(self) -> "Task":
        """Return the same task, in the same memory, for class statistics alone; it is closed with this one."""
        made = self.viewed(self.view)
        made.train = False
        return made

    def joined(self, images: Tensor, labels: Tensor, view: View | None = None) -> "Task":
        """Return a task of its images followed by others (n, H, W, 3) with logit indices (n,), such as those of a
        memory.

        It is closed with this one.
        """
        every = torch.cat([self.images.cpu(), images.cpu()]).numpy()
        every_label = torch.cat([self.labels.cpu(), labels.cpu()]).numpy()
        header = self.id, self.name, self.classes, self.first_class
        made = Task(*header, every, every_label, view or self.view, self.device, train=self.train)
        self._parts.append(made)
        return made

    def hold_out(self, share: float) -> tuple["Task", "Task"]:
        """Split off a random `share` of each class's images; return (the training part, the held-out part).

        Each class keeps at least one image; a class with two or more gives at least one. Draws use torch's global
        generator, which the engine seeds by the position in the run.
        """
        held = torch.zeros(len(self), dtype=torch.bool)
        labels = self.labels.cpu()
        for label in labels.unique():
            rows = (labels == label).nonzero()[:, 0]
            count = min(max(round(share * len(rows)), 1), len(rows) - 1)
            held[rows[torch.randperm(len(rows))[:count]]] = True
        return self.part((~held).nonzero()[:, 0]), self.part(held.nonzero()[:, 0])

    def close(self) -> None:
        """End the task: its data can no longer be read, and its memory is freed."""
        self._open = False
        self._images = torch.empty(0)
        for part in self._parts:
            part.close()

    def _check_open(self, what: str) -> None:
        if not self._open:
            raise RuntimeError(f"task {self.id} ({self.name}) is over: its {what} cannot be read any more")

    def batches(self, size: int, seed: int, *, skip: int = 0) -> Iterator[Batch]:
        """Yield one epoch, shuffled and augmented by `seed`, without its first `skip` batches.

        A last batch of one image is merged into the one before, since batch statistics need two.
        """
        generator = torch.Generator().manual_seed(seed)
        images, labels = self.images, self.labels
        order = torch.randperm(len(labels), generator=generator)
        height, width = images.shape[1:3]
        draws = tuple(draw.to(self.device) for draw in self.view.draw(len(labels), (height, width), generator))
        order = order.to(self.device)
        bounds = batch_bounds(len(labels), size)[skip:]
        several, done = max(1, AHEAD[self.device.type] // (size * 3 * self.view.images.size**2)), 0
        while done < len(bounds):
            some = bounds[done : done + several]
            rows = order[some[0][0] : some[-1][1]]
            made = self.batch(rows, tuple(draw[rows] for draw in draws))
            if several > 1 and len(made.x) != len(rows):  # each of several views of an image has its own order
                several = 1
                continue
            done += len(some)
            if several == 1:
                yield made
            else:
                sizes = [stop - start for start, stop in some]
                yield from map(Batch, *(tensor.split(sizes) for tensor in made))

    def in_order(self, size: int) -> Iterator[Batch]:
        """Yield all images once, in order, with the test transform."""
        rows = torch.arange(len(self), device=self.device)
        for raw, labels, each in zip(self.images.split(size), self.labels.split(size), rows.split(size), strict=True):
            yield Batch(self.view.test(raw.to(self.device)), labels, each)

    def batch(self, rows: Tensor, draws: Draws) -> Batch:
        """Return the images of these rows (B,), augmented by `draws` of as many rows."""
        raw = self.images[rows.to(self.images.device)].to(self.device, non_blocking=True)
        return Batch(self.view.train(raw, draws), self.labels[rows], rows)


def spared_rows(labels: Tensor) -> Tensor:
    """Return a mask (N,) of a tenth of a task's images, evenly over its classes, by their labels (N,); at most SPARED.

    It is a function of the labels' order alone. Classes of fewer than FEWEST images keep all, the others all but one
    at least.
    """
    labels = labels.cpu()
    order = labels.argsort(stable=True)
    order = order[(labels.bincount() >= FEWEST)[labels[order]]]
    step = max(10, -(-len(order) // SPARED))
    return torch.zeros(len(labels), dtype=torch.bool).index_fill(0, order[step // 2 :: step], True)


class Balanced:
    """Images of a task drawn with replacement, each class with equal probability; an epoch has as many as the task."""

    def __init__(self, task: Task) -> None:
        self.task = task

    def __len__(self) -> int:
        return len(self.task)

    def batches(self, size: int, seed: int, *, skip: int = 0) -> Iterator[Batch]:
        """See `Batches.batches`. An image drawn twice is augmented twice, differently."""
        generator, task = torch.Generator().manual_seed(seed), self.task
        labels = task.labels.cpu()
        rows = torch.multinomial(1 / labels.bincount()[labels], len(task), replacement=True, generator=generator)
        height, width = task.images.shape[1:3]
        draws = tuple(draw.to(task.device) for draw in task.view.draw(len(task), (height, width), generator))
        rows = rows.to(task.device)
        for start, stop in batch_bounds(len(task), size)[skip:]:
            yield task.batch(rows[start:stop], tuple(draw[start:stop] for draw in draws))


def batch_bounds(count: int, size: int) -> list[tuple[int, int]]:
    """Return where the batches of `count` images start and stop; a batch of a single image is avoided if possible."""
    bounds = [(start, min(start + size, count)) for start in range(0, count, size)]
    if len(bounds) > 1 and count % size == 1 and size > 1:
        bounds[-2:] = [(bounds[-2][0], count)]
    return bounds


def _on_device(images: Tensor, device: torch.device) -> Tensor:
    """Put images on the device if they take at most half of its free memory, else into host memory.

    It is pinned unless the images are in a file, see `scratch`.
    """
    if device.type != "cuda":
        return images.to(device)
    free, _ = torch.cuda.mem_get_info(device)
    if images.numel() < free / 2:
        return images.to(device)
    return images if is_large(images.numel()) else images.pin_memory()
