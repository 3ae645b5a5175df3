"""Checks that options and phases matter: with another weight of a loss term, or without a phase, results differ."""

from collections.abc import Iterator, Set
from contextlib import suppress
from typing import Any, get_type_hints

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from pearl.data.batches import Task
from pearl.methods.base import Method, Phase
from pearl.settings.declared import declared
from pearl.testing.tiny import Make, config, images, learn, reload
from pearl.testing.watched import course, hold
from pearl.training.engine import Engine
from pearl.training.resume import Resume

TASKS = 3


def shows_options_that_matter(make: Make) -> None:
    """A numeric option that may be 0, such as the weight of a loss term, changes what is learnt when it is halved.

    It is halved and not 0, as without a term fewer random numbers may be drawn, which alone changes what is learnt.
    Two numbers stand for `auto`. Options in `may_not_matter` of the method are exempt.
    """
    for name, value in _weights(make()):
        as_given = course(make).methods if value != "auto" else _learning(_with(make, {name: 0.5}), 0)
        halved = _learning(_with(make, {name: 0.25 if value == "auto" else value / 2}), 0)
        differences = (_differ(one, other) for one, other in zip(as_given, halved, strict=True))
        hold(any(differences), f"the option {name} has no effect: halved, the method learns the same in {TASKS} tasks")


def shows_phases_that_matter(make: Make) -> None:
    """Without the steps of a phase, the logits or anything but the parameters that it trains are different.

    Phases in `may_not_matter` of the method are exempt, such as one that only finds out whether more is needed.
    """
    whole = course(make)
    for name in declared(make()).keys() - {*make().may_not_matter}:
        first = next((t for t, phase, _ in whole.trained if phase == name), TASKS)
        without = Without(name)
        method = reload(whole.methods[first - 1], make) if 0 < first < TASKS else make()
        pairs = zip(whole.methods[first:], _learning(method, first, without), strict=True)
        differences = (_differ(one, other, without.names) for one, other in pairs)
        hold(
            first == TASKS or any(differences),
            f"phase {name} has no effect: without its steps the method learns the same in {TASKS} tasks",
        )


class Without(Engine):
    """An engine that leaves out the steps of one phase."""

    def __init__(self, name: str) -> None:
        super().__init__(config(), device="cpu")
        self.name = name
        self.names: set[str] = set()  # of the method's parameters that the phase would have trained

    def train(self, method: Method, task: Task, phase: Phase, position: int, resume: Resume) -> None:
        """Train other phases."""
        if phase.name == self.name:
            trained = {id(parameter) for parameter in phase.trained}
            self.names |= {name for name, parameter in method.named_parameters() if id(parameter) in trained}
            self._handed = []
        else:
            super().train(method, task, phase, position, resume)


def _weights(method: Method) -> Iterator[tuple[str, Any]]:
    """Yield names and values of options that may be 0 but are not: numbers, or `auto`."""
    hints = get_type_hints(type(method).__init__, include_extras=True)
    for name, value in method.options.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if name not in method.may_not_matter and (value == "auto" or (number and value)):
            with suppress(ValidationError):
                TypeAdapter(hints[name]).validate_python(0.0, strict=True)
                yield name, value


def _with(make: Make, options: dict[str, Any]) -> Method:
    """Return a method with other options and the same start."""
    method = make()
    other = type(method)(make().backbone, **method.options | options)
    with suppress(RuntimeError):  # tensors of other shapes have another start
        other.load_state_dict(method.state_dict())
    return other


def _learning(method: Method, first: int, engine: Engine | None = None) -> Iterator[Method]:
    """Yield the method after each task from `first` on; a task is learnt when its value is requested."""
    for t in range(first, TASKS):
        learn(method, range(t, t + 1), engine)
        yield method


def _differ(one: Method, other: Method, apart: Set[str] = frozenset()) -> bool:
    """Return True if logits differ, or a tensor that is not named in `apart`, in shape or in any bit."""
    ours, theirs = _learnt(one), _learnt(other)
    return ours.keys() != theirs.keys() or any(
        not torch.equal(value, theirs[name]) for name, value in ours.items() if name not in apart
    )


@torch.no_grad()
def _learnt(method: Method) -> dict[str, Tensor]:
    """Return all tensors of a method, and the logits of 64 images."""
    return method.state_dict() | {"logits": method.eval()(images(64))}
