"""The contract of a method. Import `check_method` to hold your own method against it.

from conformance import check_method
check_method(lambda: MyMethod(my_backbone()), tmp_path)
"""

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load, save
from torch import nn

from pearl.config import RunConfig, check_config
from pearl.data.augment import View
from pearl.data.batches import Task
from pearl.engine import Engine
from pearl.errors import Interrupted
from pearl.methods.base import Method, Phase
from pearl.replay import Replay

CLASSES, SIZE = 2, 8


def config(**changes: object) -> RunConfig:
    raw = {
        "recipe": "conformance",
        "data": "digits",
        "stream": {"tasks": 5},
        "images": {"size": SIZE, "augment": "crop", "pad": 1},
        "backbone": "resnet18",
        "method": "finetune",
        "train": {"epochs": 2, "batch_size": 8},
        "engine": {"precision": "fp32", "channels_last": False},
    }
    return check_config(raw | changes)


def make_task(index: int, per_class: int = 12, classes: int = CLASSES, *, all_so_far: bool = False) -> Task:
    """Random images; for an oracle those of all tasks so far."""
    settings = config()
    parts = range(index + 1) if all_so_far else [index]
    images, labels = [], []
    for t in parts:
        rng = np.random.default_rng(t)
        images.append(rng.integers(0, 256, (per_class * classes, SIZE, SIZE, 3), dtype=np.uint8))
        labels.append(np.repeat(np.arange(t * classes, (t + 1) * classes), per_class))
    names = tuple(f"class {index * classes + c}" for c in range(classes))
    view = View(settings.images, channels_last=False)
    return Task(
        index,
        f"task{index + 1}",
        names,
        index * classes,
        np.concatenate(images),
        np.concatenate(labels),
        view,
        torch.device("cpu"),
    )


def learn(method: Method, tasks: range, engine: Engine | None = None) -> list[Task]:
    engine = engine or Engine(config(), device="cpu")
    done = []
    for t in tasks:
        task = make_task(t, all_so_far=method.oracle)
        engine.learn(method, task)
        done.append(task)
    return done


def images(count: int = 6) -> torch.Tensor:
    return torch.randn(count, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(5))


@torch.no_grad()
def logits(method: Method, task: int | None = None) -> torch.Tensor:
    return method.eval()(images(), task)


def reload(method: Method, make: Callable[[], Method]) -> Method:
    """Through bytes on disk's terms into a fresh object, strictly."""
    fresh = make()
    fresh.load_state_dict(load(save({k: v.contiguous() for k, v in method.state_dict().items()})), strict=True)
    return fresh.eval()


class Watch(Engine):
    """An engine that checks, phase by phase, that nothing but the phase's parameters changes."""

    def train(self, method: Method, task: Task, phase: Phase, position: int, replay: Replay) -> None:
        phase = replace(phase, params=list(phase.params))
        if not phase.params:
            raise AssertionError(f"phase {phase.name} has nothing to train")
        if phase.name not in method.phases:
            raise AssertionError(f"phase {phase.name!r} is not declared in {type(method).__name__}.phases")
        own = {id(p) for p in phase.params}
        before = {n: p.detach().clone() for n, p in method.named_parameters() if id(p) not in own}
        super().train(method, task, phase, position, replay)
        for name, parameter in method.named_parameters():
            if name in before and not torch.equal(before[name], parameter):
                raise AssertionError(f"{name} changed in phase {phase.name}, which does not train it")
            if name in before and parameter.grad is not None:
                raise AssertionError(f"{name} is frozen in phase {phase.name} and has a gradient")


def check_method(make: Callable[[], Method]) -> None:
    """Everything below, one after the other."""
    for _, check in checks():
        check(make)


def checks() -> Iterator[tuple[str, Callable[[Callable[[], Method]], None]]]:
    for name, value in list(globals().items()):
        if name.startswith("shows_"):
            yield name.removeprefix("shows_"), value


def shows_logits_in_order_of_arrival(make: Callable[[], Method]) -> None:
    method = make()
    for t in range(3):
        learn(method, range(t, t + 1))
        assert logits(method).shape == (6, (t + 1) * CLASSES)
    parts = [logits(method, t) for t in range(3)]
    assert all(part.shape == (6, CLASSES) for part in parts)
    torch.testing.assert_close(torch.cat(parts, 1), logits(method), rtol=1e-5, atol=1e-5)


def shows_strict_reload(make: Callable[[], Method]) -> None:
    method = make()
    learn(method, range(3))
    assert torch.equal(logits(reload(method, make)), logits(method))


def shows_experts_equal_forward(make: Callable[[], Method]) -> None:
    method = make()
    learn(method, range(3))
    with torch.no_grad():
        side_by_side = torch.cat([expert.forward(images()) for expert in method.eval().experts()], 1)
    torch.testing.assert_close(side_by_side, logits(method), rtol=1e-5, atol=1e-5)


def shows_batch_invariance(make: Callable[[], Method]) -> None:
    method = make()
    learn(method, range(2))
    together = logits(method)
    with torch.no_grad():
        alone = torch.cat([method(image[None]) for image in images()])
        reverse = method(images().flip(0)).flip(0)
    torch.testing.assert_close(alone, together, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(reverse, together, rtol=1e-4, atol=1e-5)


def shows_past_data_closed(make: Callable[[], Method]) -> None:
    method = make()
    for task in learn(method, range(2)):
        try:
            next(iter(task.batches(2, 0)))
        except RuntimeError:
            continue
        assert method.oracle, "data of a task that is over could be read"


def shows_resume_after_a_task_bit_exact(make: Callable[[], Method]) -> None:
    whole = make()
    learn(whole, range(3))
    half = make()
    learn(half, range(2))
    resumed = reload(half, make)
    learn(resumed, range(2, 3))
    assert torch.equal(logits(resumed), logits(whole))
    for name, value in whole.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value), name


class Cut(Replay):
    """Stops a task after so many steps, as Ctrl-C would."""

    def __init__(self, folder: Path, steps: int) -> None:
        super().__init__(folder)
        self.left = steps

    def due(self) -> bool:
        self.left -= 1
        self.stop.requested = self.left <= 0
        return super().due()


def shows_resume_inside_a_task_bit_exact(make: Callable[[], Method]) -> None:
    whole = make()
    learn(whole, range(2))
    before = make()
    learn(before, range(1))
    engine = Engine(config(), device="cpu")
    for steps in (2, 5):
        with tempfile.TemporaryDirectory() as folder:
            for _ in range(100):  # cut, and cut again where it goes on
                cut = reload(before, make)
                try:
                    engine.learn(cut, make_task(1, all_so_far=cut.oracle), Cut(Path(folder), steps))
                    break
                except Interrupted:
                    continue
        for name, value in whole.state_dict().items():
            assert torch.equal(cut.state_dict()[name], value), f"{name}, cut every {steps} steps"


def shows_later_extension(make: Callable[[], Method]) -> None:
    method = make()
    learn(method, range(2))
    extended = reload(method, make)
    engine = Engine(config(seed=7), device="cpu")  # another day, other seeds
    learn(extended, range(2, 3), engine)
    assert logits(extended).shape == (6, 3 * CLASSES)


def shows_only_the_phase_changes(make: Callable[[], Method]) -> None:
    learn(make(), range(3), Watch(config(), device="cpu"))


def shows_frozen_experts_never_move(make: Callable[[], Method]) -> None:
    method = make()
    kept: dict[str, torch.Tensor] = {}
    for t in range(3):
        learn(method, range(t, t + 1))
        with torch.no_grad():
            now = {e.key: e.forward(images()) for e in method.eval().experts() if e.frozen}
        for key, value in kept.items():
            assert torch.equal(now[key], value), key
        kept = now


def shows_task_il_at_least_class_il(make: Callable[[], Method]) -> None:
    from pearl.evaluate import count

    method = make()
    learn(method, range(2))
    targets = [torch.arange(6) % CLASSES + t * CLASSES for t in range(2)]
    stage = count([logits(method)] * 2, targets, [CLASSES] * 2)
    assert (stage.class_il <= stage.task_il).all()


def shows_size_counts_parameters(make: Callable[[], Method]) -> None:
    method = make()
    learn(method, range(2))
    assert 0 < method.size() <= sum(p.numel() for p in method.parameters())
    assert isinstance(method.backbone, nn.Module)
