"""An engine that observes what each phase of a method changes, reads and is trained on."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from pearl.data.batches import Task
from pearl.errors import TrainingError
from pearl.methods.base import Method, Phase
from pearl.methods.common.average import Average
from pearl.settings.declared import declared
from pearl.testing.tiny import Make, config, learn
from pearl.training.engine import Engine
from pearl.training.fingerprint import digest, together
from pearl.training.resume import Resume


def hold(condition: object, otherwise: str) -> None:
    """Raise AssertionError with these words unless the condition holds."""
    if not condition:
        raise AssertionError(otherwise)


def _leaves(loss: torch.Tensor) -> Iterator[torch.Tensor]:
    """Return the leaf tensors that a loss has gradients for."""
    nodes, seen = [loss.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (variable := getattr(node, "variable", None)) is not None:
            yield variable
        nodes += [following for following, _ in node.next_functions]


def _values(average: Average) -> list[torch.Tensor]:
    """Yield copies of averaged tensors of several numbers, those that move first."""
    return [tensor.clone() for tensor in average.buffers() if tensor.is_floating_point() and tensor.numel() > 1]


def _averaged(average: Average, method: Method, phase: Phase) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the parameters of several numbers that a phase trains, each with its average."""
    trained = {id(parameter) for parameter in phase.trained}
    trained_values = {
        f".{name}": value for name, value in method.named_parameters() if id(value) in trained and value.numel() > 1
    }
    for key, mean in average.tensors.named_buffers():
        end = "." + key.replace("/", ".")
        yield from ((value, mean) for name, value in trained_values.items() if name.endswith(end))


class Watch(Engine):
    """An engine that checks that a phase changes only its own parameters and reads only the modules that it declares.

    While a phase with `depends_on` is trained, all other tensors of the method are NaN.
    """

    def __init__(self) -> None:
        super().__init__(config(), device="cpu")
        self.wrong: list[str] = []
        self.idle: list[str] = []  # parameters and averages that should have moved, and unused gradients
        self.starts: dict[str, torch.Tensor] = {}  # every parameter before its first phase
        self._trains: set[int] = set()
        self._backward: Any = self.fabric.backward
        self.fabric.backward = self._checked_backward  # type: ignore[assignment]
        self.trained: list[tuple[int, str, int]] = []  # of each phase the task, its name, and the images of an epoch

    def train(self, method: Method, task: Task, phase: Phase, position: int, resume: Resume) -> None:
        """Train, and compare before and after."""
        if not phase.trained:
            self.wrong.append(f"phase {phase.name} has nothing to train")
        spec = declared(method).get(phase.name)
        if spec is None:
            self.wrong.append(f"{phase.name!r} is not among the phases of {type(method).__name__}")
        elif not phase.groups.keys() - {""} <= {*spec.groups}:
            self.wrong.append(f"a group of {phase.name} is not among the groups of {type(method).__name__}")
        self.trained.append((task.id, phase.name, len(phase.data or task)))
        trained_ids = {id(p) for p in phase.trained}
        before = {n: p.detach().clone() for n, p in method.named_parameters() if id(p) not in trained_ids}
        self._trains, starts = trained_ids, [p.detach().clone() for p in phase.trained]
        for name, parameter in method.named_parameters():
            self.starts.setdefault(name, parameter.detach().clone())
        averages = {name: part for name, part in method.named_modules() if isinstance(part, Average)}
        earlier = {name: _values(average) for name, average in averages.items()}
        with self._hidden(method, task, phase):
            super().train(method, task, phase, position, resume)
        self._note_idle(method, phase, starts)
        for name, average in averages.items():
            follows = phase.after_step and phase.name not in method.may_rest
            if earlier[name] and follows and torch.equal(earlier[name][0], _values(average)[0]):
                self.idle.append(f"the average {name} did not follow in phase {phase.name}")
            pairs = [*_averaged(average, method, phase)] if follows else []
            if pairs and all(torch.equal(now, mean) for now, mean in pairs):
                self.idle.append(f"the average {name} is the network itself after phase {phase.name}")
        for name, parameter in method.named_parameters():
            if name in before and not torch.equal(before[name], parameter):
                self.wrong.append(f"{name} changed in phase {phase.name}, which does not train it")
            if name in before and parameter.grad is not None:
                self.wrong.append(f"{name} is frozen in phase {phase.name} and has a gradient")

    def finish(self, method: Method) -> None:
        """Record which parameters, except the backbone's, have their initial values after all tasks."""
        for name, parameter in method.named_parameters():
            start = self.starts.get(name)
            drawn = name.startswith("backbone.") or any(part in name for part in method.untrained)
            if start is not None and not drawn and start.numel() and torch.equal(start, parameter):
                self.idle.append(f"no phase has trained {name}")

    def _note_idle(self, method: Method, phase: Phase, starts: list[torch.Tensor]) -> None:
        """Record parameters that a phase without masks or projections does not move."""
        if phase.project or phase.after_backward or phase.name in method.may_rest:
            return
        names = {id(parameter): name for name, parameter in method.named_parameters()}
        for i, (parameter, start) in enumerate(zip(phase.trained, starts, strict=True)):
            if torch.equal(parameter, start):
                name = names.get(id(parameter), f"parameter {i}, which the method does not keep,")
                self.idle.append(f"{name} did not move in phase {phase.name}, which trains it")

    def _checked_backward(self, loss: torch.Tensor, *arguments: Any, **options: Any) -> None:
        """Check that a loss has gradients only for the phase's parameters."""
        if any(id(leaf) not in self._trains for leaf in _leaves(loss)):
            self.idle.append("a loss has gradients for parameters that its phase does not train")
        self._backward(loss, *arguments, **options)

    @contextmanager
    def _hidden(self, method: Method, task: Task, phase: Phase) -> Iterator[None]:
        """Replace all tensors that the phase does not declare by NaN within the context."""
        if not phase.depends_on:
            yield
            return
        if not digest(phase, task, {}):
            self.wrong.append(f"the dependencies of phase {phase.name} are unknown, though it has `depends_on`")
        whole = together(phase.depends_on)
        declared = {id(tensor) for tensor in (*whole.parameters(), *whole.buffers())}
        rest = [tensor for tensor in (*method.parameters(), *method.buffers()) if id(tensor) not in declared]
        rest = [tensor for tensor in rest if tensor.is_floating_point()]
        before = [tensor.detach().clone() for tensor in rest]
        with torch.no_grad():
            for tensor in rest:
                tensor.fill_(torch.nan)
        try:
            yield
        except TrainingError as error:
            raise AssertionError(f"phase {phase.name} depends on more than its `depends_on`: {error}") from error
        with torch.no_grad():
            for tensor, value in zip(rest, before, strict=True):
                if not tensor.isnan().all():
                    self.wrong.append(f"phase {phase.name} changes more than its `depends_on`")
                tensor.copy_(value)
        if not all(tensor.isfinite().all() for tensor in (*whole.parameters(), *whole.buffers())):
            self.wrong.append(f"phase {phase.name} depends on more than its `depends_on`")


@dataclass(frozen=True)
class WatchedLearning:
    """The state of a method after each of three tasks, with observations that several checks share."""

    methods: tuple[Method, ...]
    tasks: tuple[Task, ...]
    wrong: tuple[str, ...]
    idle: tuple[str, ...]
    trained: tuple[tuple[int, str, int], ...]


@lru_cache(maxsize=2)
@torch.enable_grad()  # gradients are enabled whatever the context of the first check that calls this
def course(make: Make) -> WatchedLearning:
    """Learn three tasks, and return the states and observations."""
    engine, method, methods, tasks = Watch(), make(), [], []
    for t in range(3):
        tasks += learn(method, range(t, t + 1), engine)
        methods.append(copy.deepcopy(method))
    engine.finish(method)
    return WatchedLearning(tuple(methods), tuple(tasks), tuple(engine.wrong), tuple(engine.idle), tuple(engine.trained))


def after(make: Make, tasks: int) -> Method:
    """Return a method after a number of tasks, up to three. It must not be trained; reload it for that."""
    return course(make).methods[tasks - 1]
