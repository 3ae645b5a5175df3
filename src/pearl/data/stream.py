"""A data source cut into a sequence of tasks with classes in order of arrival."""

import hashlib
import json
from dataclasses import dataclass, field

import numpy as np

from pearl.data.cache import Images
from pearl.data.domains import seen_as
from pearl.data.sources import Source, Split
from pearl.errors import DataError, counted
from pearl.settings.sections import Domain, StreamConfig

KEPT = 1 << 30  # bytes of test images kept in another style


@dataclass(frozen=True)
class TaskSplit:
    """The images of one task: rows of the decoded arrays, and their logit indices.

    `classes` are the new ones, with logit indices from `first_class`.
    """

    name: str
    classes: tuple[str, ...]
    first_class: int
    train: np.ndarray  # rows (n,) int64
    train_labels: np.ndarray  # logit indices (n,) int64
    test: np.ndarray
    test_labels: np.ndarray
    domain: Domain = "plain"

    @property
    def shown(self) -> np.ndarray:
        """Return the logit indices of all its classes, ascending."""
        return np.unique(self.train_labels)

    def train_images(self, images: Images) -> np.ndarray:
        """Return the training images (n, H, W, 3) uint8, in the style of the task's domain."""
        return seen_as(self.domain, images[self.train], self.train)

    def test_images(self, images: Images) -> np.ndarray:
        """Return the test images, as `train_images` does."""
        return seen_as(self.domain, images[self.test], self.test)


@dataclass(frozen=True)
class Stream:
    """The tasks of a run. Test rows index the validation images if those are evaluated."""

    tasks: tuple[TaskSplit, ...]
    test_from: str  # "train", "test" or "validation": the split of the source that test rows index
    digest: str  # SHA-256 of all rows, labels and class names; the pixels have a separate one
    _kept: dict[int, np.ndarray] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def classes(self) -> tuple[str, ...]:
        """Return all class names in order of arrival."""
        return tuple(name for task in self.tasks for name in task.classes)

    def shown(self, t: int) -> list[str]:
        """Return the names of all classes of a task, new or known, by logit index."""
        return [self.classes[c] for c in self.tasks[t].shown]

    def test_images(self, t: int, images: Images) -> np.ndarray:
        """Return a task's test images (n, H, W, 3) uint8 in the style of its domain; cached, since each stage reads
        them.

        `images` must be the same in every call.
        """
        if t in self._kept:
            return self._kept[t]
        images_of_task = self.tasks[t].test_images(images)
        if (
            self.tasks[t].domain != "plain"
            and sum(kept.nbytes for kept in self._kept.values()) + images_of_task.nbytes <= KEPT
        ):
            self._kept[t] = images_of_task
        return images_of_task

    @property
    def train_rows(self) -> np.ndarray:
        """Return all training rows, ascending."""
        return np.unique(np.concatenate([task.train for task in self.tasks]))

    @property
    def test_rows(self) -> np.ndarray:
        """Return all test rows, ascending."""
        return np.unique(np.concatenate([task.test for task in self.tasks]))


def class_order(count: int, order: str | int | list[int]) -> np.ndarray:
    """Return source labels in order of arrival: natural, permuted by a numpy seed (such as PyCIL's 1993), or listed.

    Raises:
        DataError: a listed label that the source does not have.
    """
    if isinstance(order, list):
        wrong = [label for label in order if not 0 <= label < count]
        if wrong:
            raise DataError(f"stream.order: no class {wrong[0]} in a source of {count}; list labels 0 to {count - 1}")
        return np.array(order)
    if order == "natural":
        return np.arange(count)
    return np.random.RandomState(int(order)).permutation(count)  # published class orders used the legacy generator


def task_sizes(classes: int, tasks: int | list[int]) -> list[int]:
    """Return the number of classes of each task.

    Raises:
        DataError: the tasks do not divide the classes.
    """
    if isinstance(tasks, list):
        if sum(tasks) != classes:
            raise DataError(
                f"stream.tasks: the sizes sum to {sum(tasks)}, the stream has {counted(classes, 'class')}; make the "
                f"two agree"
            )
        return tasks
    if classes % tasks:
        near = [n for n in range(1, classes + 1) if classes % n == 0]
        best = min(near, key=lambda n: abs(n - tasks))
        raise DataError(
            f"stream.tasks={tasks} does not divide {counted(classes, 'class')}; use {best}, or list the size of every "
            f"task"
        )
    return [classes // tasks] * tasks


def make_stream(source: Source, config: StreamConfig, seed: int) -> Stream:
    """Cut a source into tasks.

    Raises:
        DataError: the tasks do not divide the classes, or classes lack training or test images; all are listed.
    """
    order = class_order(len(source.classes), config.order)[: config.classes]
    if config.classes is not None and config.classes > len(order):
        raise DataError(f"stream.classes={config.classes}: the order has {len(order)}; set at most that many")
    sizes = task_sizes(len(order), config.tasks)
    rng = np.random.default_rng([seed, 1])
    train_rows = {label: np.flatnonzero(source.train.labels == label) for label in order}
    test_from, test_rows = _evaluation_rows(source, config, order, train_rows, rng)
    _check_filled(source, order, train_rows, "train")
    _check_filled(source, order, test_rows, test_from if test_from != "train" else "validation")
    of_domains = _apart(source, config, train_rows, rng)
    for rows, limit in (*((rows, config.per_class) for rows in of_domains), (test_rows, config.test_per_class)):
        if limit is not None:
            rows.update({label: np.sort(rng.permutation(of_class)[:limit]) for label, of_class in rows.items()})

    tasks: list[TaskSplit] = []
    domains: list[Domain] = config.domains or ["plain"]
    for domain, rows in zip(domains, of_domains, strict=True):
        first = 0
        for index, size in enumerate(sizes):
            labels = order[first : first + size]
            name = f"{domain}{index + 1}" if len(sizes) > 1 else domain
            if not config.domains:
                name = f"task{index + 1}"
            again = len(tasks) >= len(sizes)  # known from another domain
            new = () if again else tuple(source.classes[label] for label in labels)
            images = (*_gather(labels, rows, first), *_gather(labels, test_rows, first))
            tasks.append(TaskSplit(name, new, len(order) if again else first, *images, domain))
            first += size
    return Stream(tuple(tasks), test_from, _digest(tasks, test_from))


def _apart(
    source: Source, config: StreamConfig, rows: dict[int, np.ndarray], rng: np.random.Generator
) -> list[dict[int, np.ndarray]]:
    """Split the training rows among domains, so that no image is in two."""
    if not config.domains:
        return [rows]
    count = len(config.domains)
    few = [source.classes[label] for label, of_class in rows.items() if len(of_class) < count]
    if few:
        raise DataError(
            f"stream.domains: {count} domains, but fewer training images of {', '.join(few)}; domains share no "
            f"image, so set fewer domains, or leave the class out of stream.order"
        )
    parts = {label: np.array_split(rng.permutation(of_class), count) for label, of_class in rows.items()}
    return [{label: np.sort(part[d]) for label, part in parts.items()} for d in range(count)]


def _evaluation_rows(
    source: Source,
    config: StreamConfig,
    order: np.ndarray,
    train_rows: dict[int, np.ndarray],
    rng: np.random.Generator,
) -> tuple[str, dict[int, np.ndarray]]:
    """Hold out the validation share (removed from `train_rows`), and choose the evaluation rows."""
    held_out: dict[int, np.ndarray] = {}
    if config.validation:
        for label in order:
            shuffled = rng.permutation(train_rows[label])
            count = max(1, round(config.validation * len(shuffled)))
            held_out[label], train_rows[label] = np.sort(shuffled[:count]), np.sort(shuffled[count:])
    if config.evaluate_on == "test":
        return "test", _rows(source.test, order)
    if held_out:
        return "train", held_out
    if source.validation is None:
        raise DataError(
            "stream.evaluate_on=validation: the source has no validation images; set stream.validation=0.1 to hold "
            "some out"
        )
    return "validation", _rows(source.validation, order)


def _rows(split: Split, order: np.ndarray) -> dict[int, np.ndarray]:
    return {label: np.flatnonzero(split.labels == label) for label in order}


def _check_filled(source: Source, order: np.ndarray, rows: dict[int, np.ndarray], split: str) -> None:
    empty = [source.classes[label] for label in order if not len(rows[label])]
    if empty:
        raise DataError(
            f"data {source.name}: no {split} image of {', '.join(empty)}; add some, hold out a smaller "
            f"stream.validation, or leave the class out of stream.order"
        )


def _gather(labels: np.ndarray, rows: dict[int, np.ndarray], first: int) -> tuple[np.ndarray, np.ndarray]:
    counts = [len(rows[label]) for label in labels]
    return np.concatenate([rows[label] for label in labels]), first + np.repeat(np.arange(len(labels)), counts)


def _digest(tasks: list[TaskSplit], test_from: str) -> str:
    digest = hashlib.sha256(test_from.encode())
    for task in tasks:
        digest.update(json.dumps(task.classes).encode())
        if task.domain != "plain":
            digest.update(task.domain.encode())
        for array in (task.train, task.train_labels, task.test, task.test_labels):
            digest.update(np.ascontiguousarray(array, dtype="<i8").tobytes())
    return digest.hexdigest()
