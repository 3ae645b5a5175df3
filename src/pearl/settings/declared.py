"""Declarations of a method's phases: in which tasks each one comes, how often, and on how many images.

The plan of a run, the times in tables and the checks of settings read the declaration; the conformance suite compares
it with the phases that `learn` yields.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Options = Mapping[str, Any]


@dataclass(frozen=True)
class UpcomingTask:
    """A task before it is learnt.

    `counts` are training images per class, task by task; the last ones are this task's. `options` are the method's, as
    plain values of a recipe or as the objects that they become. `pretrained`: the backbone comes with weights.
    """

    counts: tuple[tuple[int, ...], ...]
    options: Options
    pretrained: bool

    @property
    def id(self) -> int:
        """Its position in the stream, from 0."""
        return len(self.counts) - 1

    @property
    def images(self) -> int:
        """The number of its training images."""
        return sum(self.counts[-1])

    @property
    def earlier_images(self) -> int:
        """The number of training images of all tasks before it."""
        return sum(map(sum, self.counts[:-1]))

    @property
    def classes(self) -> int:
        """The number of its classes."""
        return len(self.counts[-1])

    @property
    def earlier_classes(self) -> int:
        """The number of classes of all tasks before it."""
        return sum(map(len, self.counts[:-1]))

    @property
    def first_adapted(self) -> int:
        """The first task that does not train the reference network: 0 if the backbone is pretrained, else 1."""
        given = self.options.get("reference", self.options.get("extractor", "auto"))
        if given == "auto":
            given = "given" if self.pretrained else "first_task"
        return 0 if given == "given" else 1

    def kept(self, share: float) -> int:
        """Return the number of its images for training after a share of each class is held out (`Task.hold_out`)."""
        return sum(count - min(max(round(share * count), 1), count - 1) for count in self.counts[-1])


_TASKS: dict[str, Callable[[UpcomingTask], bool]] = {
    "all": lambda task: True,
    "first": lambda task: task.id == 0,
    "later": lambda task: task.id > 0,
    "reference": lambda task: task.id < task.first_adapted,
    "adapted": lambda task: task.id >= task.first_adapted,
}


@dataclass(frozen=True)
class PhaseSpec:
    """The declaration of one phase, by its `name`.

    `tasks`: the tasks that have it. These are `all`; the `first`; all `later` ones; the one that trains the
        `reference`, if the backbone does not bring it; those that are `adapted` from the reference; or a function.
    `images`: the number of images in an epoch, by default all of the task's. A list has a number for each time that the
        phase comes in a task.
    `at_least`: the phase may come more often, depending on what was learnt.
    `at_most`: an epoch may have fewer images, depending on what was learnt.
    `features_only`: it trains on features, which pass through heads and not through the network.
    `groups`: names of the groups that its parameters are in.
    `when`: the options of the method with which there is such a phase; by default all.
    """

    name: str
    tasks: Literal["all", "first", "later", "reference", "adapted"] | Callable[[UpcomingTask], bool] = "all"
    images: Callable[[UpcomingTask], int | Sequence[int]] | None = None
    at_least: bool = False
    at_most: bool = False
    features_only: bool = False
    groups: tuple[str, ...] = ()
    when: Callable[[Options], bool] | None = None

    def sizes(self, task: UpcomingTask) -> list[int]:
        """Return the images of an epoch, a number for each occurrence of the phase in this task."""
        comes = self.tasks if callable(self.tasks) else _TASKS[self.tasks]
        if not comes(task) or not self.used(task.options):
            return []
        images = self.images(task) if self.images else task.images
        return [images] if isinstance(images, int) else [*images]

    def used(self, options: Options) -> bool:
        """Return True if a method with these options has such a phase."""
        return self.when is None or self.when(options)


Phases = tuple[str | PhaseSpec, ...]


def are_phases(value: Any) -> bool:
    """Return True if a value declares one phase or more."""
    return isinstance(value, tuple | list) and bool(value) and all(isinstance(each, str | PhaseSpec) for each in value)


def declared(method: Any) -> dict[str, PhaseSpec]:
    """Return the phases of a method, or of its class, by name. A bare name occurs once in every task."""
    specs = (PhaseSpec(phase) if isinstance(phase, str) else phase for phase in method.phases)
    return {spec.name: spec for spec in specs}


def upcoming(
    method: Any, counts: Sequence[Sequence[int]], options: Options, *, pretrained: object
) -> Iterator[tuple[UpcomingTask, dict[str, list[int]]]]:
    """Return the tasks of a stream, each with the phases that a method or its class declares, see `PhaseSpec.sizes`.

    `counts` are images per class, task by task; an oracle has those of all tasks so far.
    """
    for t in range(len(counts)):
        shown = tuple(tuple(task) for task in counts[: t + 1])
        if method.oracle:
            shown = (*shown[:-1], tuple(count for task in shown for count in task))
        task = UpcomingTask(shown, options, bool(pretrained))
        phases = declared(method) if method.has_phases(task) else {}
        yield task, {name: spec.sizes(task) for name, spec in phases.items()}
