"""The contract of a method as a list of checks, for pearl's own and for yours.

Every check takes a function that makes a fresh method, and raises AssertionError where the method breaks the contract.
With pytest, in a file beside your method's:

import pytest
from pearl.testing import checks, maker

@pytest.mark.parametrize("check", checks())
def test_contract(check):
    check(maker("my_method.py:MyMethod"))

A method is made on a network of a few thousand parameters and learns random images of 8 x 8 pixels, on the CPU
and on a device that is not the CPU, see `fake_device`.
"""

import copy
import tempfile
from collections.abc import Callable, Sequence
from operator import le
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pearl.data.batches import Task
from pearl.errors import Interrupted, TrainingError
from pearl.evaluation.evaluate import count
from pearl.methods.base import Method, Phase
from pearl.nn.layout import placed
from pearl.nn.precision import computes_bf16
from pearl.settings.declared import declared, upcoming
from pearl.settings.parts import METHODS
from pearl.testing.ablation import shows_options_that_matter, shows_phases_that_matter  # noqa: F401 - checks
from pearl.testing.fake_device import shows_the_same_on_another_device  # noqa: F401 - one of the checks
from pearl.testing.tiny import (
    CLASSES,
    PER_CLASS,
    Make,
    config,
    images,
    learn,
    logits,
    make_task,
    on_threads,
    reload,
    small_resnet,
    small_vit,
)
from pearl.testing.watched import Watch, after, course, hold  # noqa: F401 - for tests of methods
from pearl.training.engine import Engine
from pearl.training.resume import Resume


def checks() -> list[Callable[[Make], None]]:
    """Return all checks, by name."""
    return [value for name, value in globals().items() if name.startswith("shows_")]


def maker(name: str, **options: Any) -> Make:
    """Return a function that creates a method by name, or "path/to/file.py:Class", on a small ResNet or ViT.

    `options` are the method's own, as in a recipe.

    Raises:
        ConfigError: no such method or option; a file or class that cannot be used.
    """
    spec = METHODS.resolve({"name": METHODS.admit(name), **options}, "method")
    network = small_vit if METHODS.load(spec["name"]).backbones == "vit" else small_resnet  # type: ignore[attr-defined]
    return lambda: METHODS.build(spec, network())


def same_state(one: Method, other: Method, when: str) -> None:
    """Check that all tensors of two methods have the same bits."""
    state = other.state_dict()
    hold(one.state_dict().keys() == state.keys(), f"other tensors {when}")
    for name, value in one.state_dict().items():
        hold(torch.equal(state[name], value), f"{name} differs {when}")


# -------------------------------------------------------------------------------------------------------- the contract


def shows_logits_in_order_of_arrival(make: Make) -> None:
    """Logits are of exactly the classes seen; `columns` selects those of a task."""
    for tasks in (1, 2, 3):
        _one_logit_a_class(after(make, tasks), [CLASSES] * tasks)


def _one_logit_a_class(method: Method, sizes: Sequence[int]) -> None:
    every = logits(method)
    hold(every.shape == (6, sum(sizes)), f"logits {tuple(every.shape)} of 6 images and {sum(sizes)} classes")
    hold(every.isfinite().all(), "logits are not finite")
    parts = [logits(method, t) for t in range(len(sizes))]
    for t, (part, size) in enumerate(zip(parts, sizes, strict=True)):
        hold(part.shape == (6, size), f"logits {tuple(part.shape)} of task {t}, which has {size} classes")
    assert_close(torch.cat(parts, 1), every, rtol=1e-5, atol=1e-5)


def shows_strict_reload(make: Make) -> None:
    """A new object loads the state and gives the same logits, bit by bit; in channels_last up to rounding."""
    method = after(make, 3)
    again = reload(method, make)
    hold(torch.equal(logits(again), logits(method)), "a reloaded method gives other logits")
    assert_close(logits(placed(again, "cpu", channels_last=True)), logits(method), rtol=1e-3, atol=1e-4)


def shows_experts_equal_forward(make: Make) -> None:
    """The concatenated logits of the experts are those of the method."""
    method = after(make, 3)
    with torch.no_grad():
        side_by_side = torch.cat([expert.forward(images()) for expert in method.eval().experts()], 1)
    assert_close(side_by_side, logits(method), rtol=1e-5, atol=1e-5)


def shows_answers_change_nothing(make: Make) -> None:
    """Repeated predictions, also from several threads at once, have the same bits and change no state."""
    method = after(make, 2)
    before, answer = copy.deepcopy(method), logits(method)
    for again in (logits(method), *on_threads(lambda: logits(method))):
        hold(
            torch.equal(again, answer),
            "repeated predictions, or those of several threads, give other logits",
        )
    same_state(before, method, "after an answer")


def shows_batch_invariance(make: Make) -> None:
    """The logits of image i depend only on image i."""
    method = after(make, 2)
    together = logits(method)
    with torch.no_grad():
        alone = torch.cat([method(image[None]) for image in images()])
        reverse = method(images().flip(0)).flip(0)
    assert_close(alone, together, rtol=1e-4, atol=1e-5)
    assert_close(reverse, together, rtol=1e-4, atol=1e-5)


def shows_past_data_closed(make: Make) -> None:
    """The images of a task that is over cannot be read, unless the method is an oracle."""
    oracle = make().oracle
    for task in course(make).tasks:
        try:
            next(iter(task.batches(2, 0)))
        except RuntimeError:
            continue
        hold(oracle, "data of a task that is over could be read")


def shows_resume_after_a_task_bit_exact(make: Make) -> None:
    """A new process that loads the state learns the third task with the same bits."""
    whole = after(make, 3)
    resumed = reload(after(make, 2), make)
    learn(resumed, range(2, 3))
    hold(torch.equal(logits(resumed), logits(whole)), "a resumed method gives other logits")
    same_state(whole, resumed, "after a resumed task")


class Cut(Resume):
    """Stops a task after so many steps, as Ctrl-C would."""

    def __init__(self, folder: Path, steps: int) -> None:
        super().__init__(folder)
        self.left = steps

    def due(self) -> bool:
        """Count a step."""
        self.left -= 1
        self.stop.requested = self.left <= 0
        return super().due()


def shows_resume_inside_a_task_bit_exact(make: Make) -> None:
    """A task that is interrupted, and interrupted again after resuming, ends like an uninterrupted one."""
    whole, before = after(make, 2), after(make, 1)
    engine = Engine(config(), device="cpu")
    with tempfile.TemporaryDirectory() as folder:
        for steps in (2, 3, 5) * 100:  # in the midst of an epoch, at its end, and in later phases
            cut = reload(before, make)
            try:
                engine.learn(cut, make_task(1, all_so_far=cut.oracle), Cut(Path(folder), steps))
                break
            except Interrupted:
                continue
    same_state(whole, cut, "in a task that was cut off again and again")


def shows_later_extension(make: Make) -> None:
    """A reloaded method learns another task, with other seeds."""
    extended = reload(after(make, 2), make)
    learn(extended, range(2, 3), Engine(config(seed=7), device="cpu"))
    _one_logit_a_class(extended, [CLASSES] * 3)


def shows_only_the_phase_changes(make: Make) -> None:
    """Only the parameters of a phase change in it, no other has a gradient, and it reads only the declared modules."""
    wrong = course(make).wrong
    hold(not wrong, "; ".join(wrong))


def shows_all_parameters_train(make: Make) -> None:
    """Every parameter of a phase moves in it, and every parameter except the backbone's is trained at some point.

    No loss has gradients for a parameter that its phase does not train. Averages of weights follow the network and
    differ from it. `may_rest` of the method lists phases whose parameters may stay unchanged, unless they have masks or
    projections.
    """
    idle = dict.fromkeys(course(make).idle)
    hold(not idle, "; ".join(idle))


def shows_the_phases_that_it_declares(make: Make) -> None:
    """Phases occur in the tasks, as often and on as many images as the method's `phases` declare."""
    learnt = course(make)
    method, counts = learnt.methods[0], [[PER_CLASS] * CLASSES] * len(learnt.methods)
    for task, phases in upcoming(method, counts, method.options, pretrained=method.backbone.pretrained):
        for name, spec in declared(method).items():
            sizes = phases.get(name, [])
            trained_images = [images for t, phase, images in learnt.trained if (t, phase) == (task.id, name)]
            first = trained_images[: len(sizes)]
            fits = first == sizes or (spec.at_most and len(first) == len(sizes) and all(map(le, first, sizes)))
            fits = fits and (spec.at_least or len(trained_images) == len(sizes))
            hold(
                fits,
                f"phase {name} of task {task.id + 1} trains on {trained_images} images an epoch, and is declared "
                f"with {sizes}; "
                f"declare it as PhaseSpec({name!r}, ...) in {type(method).__name__}.phases",
            )


class Operations(TorchDispatchMode):
    """A list of all operations of the device while it is active, with shapes and numbers."""

    READS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "_unique2")

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[str, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """Record an operation, and run it."""
        name = func.overloadpacket.__name__
        hold(name not in self.READS, f"{name} waits for the device")
        leaves = tree_leaves((args, kwargs or {}))
        facts = (str(tuple(x.shape)) if isinstance(x, torch.Tensor) else repr(x) for x in leaves)
        self.operations.append((str(func), *facts))
        return func(*args, **(kwargs or {}))


class Listen(Engine):
    """An engine that compares the device's operations for two batches of a capturable phase."""

    def train(self, method: Method, task: Task, phase: Phase, position: int, resume: Resume) -> None:
        """Train, and then compare two batches of one size."""
        super().train(method, task, phase, position, resume)
        if not phase.capturable:
            return
        asked = []
        for batch in [batch for batch in (phase.data or task).batches(8, 0) if len(batch.x) == 8][:2]:
            with Operations() as operations:
                phase.loss(batch).backward()
                if phase.after_backward:
                    phase.after_backward()
            asked.append(operations.operations)
            for parameter in phase.trained:
                parameter.grad = None
        hold(asked[0] == asked[1], f"phase {phase.name} is not capturable: two batches run different operations")


def shows_capturable_phases_do_the_same_for_every_batch(make: Make) -> None:
    """A capturable phase reads no tensor, and runs the same operations for every batch of one size."""
    learn(make(), range(2), Listen(config(train={"epochs": 1, "batch_size": 8}), device="cpu"))


def shows_frozen_experts_never_move(make: Make) -> None:
    """The logits of experts marked `frozen` keep their bits during later tasks."""
    kept: dict[str, torch.Tensor] = {}
    for tasks in (1, 2, 3):
        with torch.no_grad():
            now = {e.key: e.forward(images()) for e in after(make, tasks).eval().experts() if e.frozen}
        for key, value in kept.items():
            hold(key in now and torch.equal(now[key], value), f"the frozen expert {key!r} has changed")
        kept = now


def shows_task_il_at_least_class_il(make: Make) -> None:
    """Task-IL accuracy is at least as high as class-IL accuracy."""
    method = after(make, 2)
    targets = [torch.arange(6) % CLASSES + t * CLASSES for t in range(2)]
    stage = count([logits(method)] * 2, targets, [np.arange(CLASSES) + t * CLASSES for t in range(2)])
    hold((stage.class_il <= stage.task_il).all(), "more images are right among all classes than among their task's")


def shows_size_counts_parameters(make: Make) -> None:
    """`size` is positive, and at most the number of parameters."""
    method = after(make, 2)
    there = sum(p.numel() for p in method.parameters())
    hold(0 < method.size() <= there, f"size() is {method.size()}; there are {there} parameters")
    hold(isinstance(method.backbone, nn.Module), "a method's network is its `backbone`")


def _learns(make: Make, classes: int, engine: Engine | None = None, **shape: int) -> Method:
    method = make()
    learn(method, range(2), engine, classes=classes, **shape)
    _one_logit_a_class(method, [classes] * 2)
    again = reload(method, make)
    hold(torch.equal(logits(again), logits(method)), "a reloaded method gives other logits")
    assert_close(logits(placed(again, "cpu", channels_last=True)), logits(method), rtol=1e-3, atol=1e-4)
    return method


def shows_tasks_of_one_class(make: Make) -> None:
    """A method learns tasks of a single class."""
    _learns(make, 1)


def shows_classes_of_one_image(make: Make) -> None:
    """A method learns classes of a single image."""
    _learns(make, CLASSES, per_class=1)


def shows_tasks_of_one_image(make: Make) -> None:
    """A method learns from a single image, or one line reports that BatchNorm cannot."""
    try:
        _learns(make, 1, per_class=1)
    except TrainingError as error:
        hold("BatchNorm cannot train on a single image" in str(error), str(error))


def shows_a_last_batch_of_one(make: Make) -> None:
    """17 images in batches of 8: a single image has no batch statistics."""
    _learns(make, CLASSES, per_class=8, extra=1)


def shows_bfloat16(make: Make) -> None:
    """After training in bfloat16, if this CPU supports it, all tensors have the types that they have in float32."""
    if not computes_bf16("cpu"):
        return
    method = _learns(make, CLASSES, Engine(config(), device="cpu", precision="bf16"), per_class=4)
    types = {name: value.dtype for name, value in after(make, 2).state_dict().items()}
    for name, value in method.state_dict().items():
        hold(value.dtype == types.get(name, value.dtype), f"{name} is {value.dtype}, in float32 {types.get(name)}")
