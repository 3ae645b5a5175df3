"""An engine that observes what each phase of a method changes, reads and is trained on."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from pearl.data.batches import Task
from pearl.errors import TrainingError
from pearl.lifecycle.small import config
from pearl.methods.base import Method, Phase
from pearl.settings.declared import declared
from pearl.training.content import digest, together
from pearl.training.engine import Engine
from pearl.training.replay import Replay


def hold(condition: object, otherwise: str) -> None:
    """Raise AssertionError with these words unless the condition holds."""
    if not condition:
        raise AssertionError(otherwise)


class Watch(Engine):
    """An engine that sees, phase by phase, that no parameter but the phase's changes, and that it reads what it says.

    While a phase with `reads` is trained, all else that the method has learnt is not a number.
    """

    def __init__(self) -> None:
        super().__init__(config(), device="cpu")
        self.wrong: list[str] = []
        self.trained: list[tuple[int, str, int]] = []  # of each phase the task, its name, and the images of an epoch

    def train(self, method: Method, task: Task, phase: Phase, position: int, replay: Replay) -> None:
        """Train, and compare before and after."""
        if not phase.trained:
            self.wrong.append(f"phase {phase.name} has nothing to train")
        spec = declared(method).get(phase.name)
        if spec is None:
            self.wrong.append(f"{phase.name!r} is not among the phases of {type(method).__name__}")
        elif not phase.groups.keys() - {""} <= {*spec.groups}:
            self.wrong.append(f"a group of {phase.name} is not among the groups of {type(method).__name__}")
        self.trained.append((task.id, phase.name, len(phase.data or task)))
        own = {id(p) for p in phase.trained}
        before = {n: p.detach().clone() for n, p in method.named_parameters() if id(p) not in own}
        with self._hidden(method, task, phase):
            super().train(method, task, phase, position, replay)
        for name, parameter in method.named_parameters():
            if name in before and not torch.equal(before[name], parameter):
                self.wrong.append(f"{name} changed in phase {phase.name}, which does not train it")
            if name in before and parameter.grad is not None:
                self.wrong.append(f"{name} is frozen in phase {phase.name} and has a gradient")

    @contextmanager
    def _hidden(self, method: Method, task: Task, phase: Phase) -> Iterator[None]:
        """What the phase does not read, by its own words."""
        if not phase.reads:
            yield
            return
        if not digest(phase, task, {}):
            self.wrong.append(f"nobody can say what phase {phase.name} depends on, though it has `reads`")
        whole = together(phase.reads)
        own = {id(tensor) for tensor in (*whole.parameters(), *whole.buffers())}
        rest = [tensor for tensor in (*method.parameters(), *method.buffers()) if id(tensor) not in own]
        rest = [tensor for tensor in rest if tensor.is_floating_point()]
        before = [tensor.detach().clone() for tensor in rest]
        with torch.no_grad():
            for tensor in rest:
                tensor.fill_(torch.nan)
        try:
            yield
        except TrainingError as error:
            raise AssertionError(f"phase {phase.name} depends on more than its `reads`: {error}") from error
        with torch.no_grad():
            for tensor, value in zip(rest, before, strict=True):
                if not tensor.isnan().all():
                    self.wrong.append(f"phase {phase.name} changes more than its `reads`")
                tensor.copy_(value)
        if not all(tensor.isfinite().all() for tensor in (*whole.parameters(), *whole.buffers())):
            self.wrong.append(f"phase {phase.name} depends on more than its `reads`")
