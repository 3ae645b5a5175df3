"""Every method on another device than the CPU: nothing is left behind on the host, and the same is learnt."""

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elsewhere import CROSSED, ELSEWHERE, elsewhere
from pearl.data import augment as augmentation
from pearl.data import batches
from pearl.data.augment import View
from pearl.data.batches import Task
from pearl.evaluation.evaluate import Ensemble
from pearl.lifecycle.small import Make, config, images, make_task
from pearl.methods.base import Method
from pearl.nn.fast import stacking
from pearl.training import engine as engine_of
from pearl.training.engine import Engine
from pearl.training.optimizers import make_optimizers
from zoo import ZOO

AMPLIFIED = 2e-3  # what a few methods make of the rounding of other kernels


class Bare:
    """As much of Lightning Fabric as the engine asks for, elsewhere."""

    device = ELSEWHERE
    autocast = staticmethod(nullcontext)

    def setup(self, module: nn.Module, *optimizers: torch.optim.Optimizer) -> tuple[Any, ...]:
        return module, *optimizers

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def clip_gradients(self, module: nn.Module, optimizer: object, max_norm: float, error_if_nonfinite: bool) -> None:
        nn.utils.clip_grad_norm_(module.parameters(), max_norm, foreach=False)


def learnt(make: Make, device: torch.device) -> list[Tensor]:
    """What a method says of some images after two tasks, and how familiar they are to it; on the host."""
    method, engine = make(), Engine(config(train={"epochs": 1, "batch_size": 8}), device="cpu")
    method.fast = False
    if device == ELSEWHERE:
        engine.fabric = Bare()  # type: ignore[assignment]
    method.to(device)
    for t in range(2):
        engine.learn(method, on(device, make_task(t, all_so_far=method.oracle)))
    method.fast = True  # of a ViT all sub-networks are asked at once
    return answers(method, images().to(device))


def on(device: torch.device, task: Task, view: View | None = None) -> Task:
    """The same task with its images on a device."""
    place = task.id, task.name, task.classes, task.first_class
    return Task(*place, task.images.numpy(), task.labels.numpy(), view or task.view, device)


@torch.no_grad()
def answers(method: Method, x: Tensor) -> list[Tensor]:
    ensemble = Ensemble(method)
    found = [ensemble(x), ensemble(x, 0), *(ensemble.judge(x) if ensemble.judge else ())]
    assert all(type(part) is type(x) for part in found)
    return [part.cpu() for part in found]


@pytest.mark.parametrize("method", list(ZOO))
def test_a_method_learns_elsewhere_what_it_learns_here(method, monkeypatch):
    """With batches made two at a time, as a GPU has them made."""
    monkeypatch.setitem(batches.AHEAD, ELSEWHERE.type, 2 * 8 * 3 * 8**2)
    monkeypatch.setitem(stacking.ROWS, ELSEWHERE.type, 1000)
    unfused = partial(make_optimizers, device=ELSEWHERE)
    monkeypatch.setattr(engine_of, "make_optimizers", lambda settings, groups, device, **how: unfused(settings, groups))
    with elsewhere():
        there = learnt(ZOO[method], ELSEWHERE)
    for ours, its in zip(there, learnt(ZOO[method], torch.device("cpu")), strict=True):
        torch.testing.assert_close(ours, its, rtol=AMPLIFIED, atol=AMPLIFIED)


@pytest.mark.parametrize("method", ["finetune", "isolation", "pearl", "lwf", "seqlora", "inflora"])
@pytest.mark.parametrize("augment", ["crop", "resized_crop"])
def test_no_step_of_a_steady_phase_waits_for_the_device(method, augment, monkeypatch):
    """As much crosses between host and device in two steps of a phase as in six."""
    monkeypatch.setitem(batches.AHEAD, ELSEWHERE.type, 1)
    assert crossings(method, augment, 2) == crossings(method, augment, 6)


def crossings(name: str, augment: str, steps: int) -> list[str]:
    settings = config(train={"epochs": 1, "batch_size": 4}, engine={"max_steps": steps, "precision": "fp32"})
    view = View(settings.images.model_copy(update={"augment": augment}))
    with elsewhere():
        method, engine = ZOO[name]().to(ELSEWHERE), Engine(settings, device="cpu")
        engine.fabric = Bare()  # type: ignore[assignment]
        augmentation._scale_and_shift.cache_clear()  # it may have crossed before
        CROSSED.clear()
        for t in range(2):
            engine.learn(method, on(ELSEWHERE, make_task(t), view))
    return [*CROSSED]
