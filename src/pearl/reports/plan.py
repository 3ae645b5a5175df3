"""The plan of a run without training: tasks, targets, steps, estimated time and memory."""

import time
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from pearl.errors import counted
from pearl.lifecycle.runs import Prepared, ready
from pearl.methods.base import Method
from pearl.methods.pearl import Pearl
from pearl.nn.layout import placed
from pearl.nn.lowrank import matrix_shape
from pearl.reports.text import duration
from pearl.settings.config import RunConfig
from pearl.settings.declared import declared, upcoming
from pearl.training.engine import Engine
from pearl.training.optimizers import Course
from pearl.training.world import enough, kind_of

_GB = 1e9
_LINES = 7  # maximum lines for tasks, targets or phases in the short form
_TIMED = 32  # maximum images of a timed pass; larger batches are extrapolated
_PATIENCE = 5.0  # maximum seconds of a timed pass on a CPU


class PlannedPhase(NamedTuple):
    """One occurrence of a phase: its task, images per epoch, and steps."""

    task: int
    images: int
    course: Course


PlannedPhases = dict[str, list[PlannedPhase]]  # by phase name


def plan(
    config: RunConfig, *, device: str = "auto", devices: int = 1, long: bool = False, timing: bool = True
) -> Iterator[str]:
    """Return the dry run of a configuration, line by line, as it would be on `device`. Reads data, but no weights.

    At most 25 lines; if `long`, with every setting, task and target. With `timing`, a pass is timed for the last line.

    Raises:
        PearlError: the errors of the run before its first step, except for its weights.
    """
    enough(kind_of(device), devices)
    made = ready(config, devices=devices, weights=False)
    if long:
        yield from (*config.to_yaml().rstrip().splitlines(), "")
    yield from (f"run directory: {config.id}", "")
    if made is None:
        yield "it is already done"
        return
    method, prepared = made.method, made.prepared
    engine = Engine(config, device=device, precision=made.precision)
    yield from _shortened(_tasks(prepared), long)
    if isinstance(method, Pearl):
        yield from ("", *_shortened(_targets(method), long))
    phases = _trainings(config, prepared, method)
    yield from ("", *_sizes(config, prepared, method, engine, phases), *_steps(config, method, phases, long))
    yield _time(config, method, engine, phases) if timing else "time: not estimated (--no-timing)"


def _shortened(lines: list[str], long: bool) -> list[str]:
    if long or len(lines) <= _LINES:
        return lines
    return [*lines[: _LINES - 1], f"  ... and {len(lines) - _LINES + 1} more (--long shows all)"]


def _tasks(prepared: Prepared) -> list[str]:
    lines = [f"{counted(len(prepared.stream.tasks), 'task')}, evaluated on the {prepared.stream.test_from} images:"]
    for t, task in enumerate(prepared.stream.tasks):
        classes = prepared.stream.shown(t)
        names = ", ".join(classes[:5]) + (", ..." if len(classes) > 5 else "")
        lines.append(
            f"  {task.name}: {counted(len(classes), 'class')} ({names}), {len(task.train)} training and "
            f"{counted(len(task.test), 'test image')}"
        )
    return lines


def _targets(method: Pearl) -> list[str]:
    lines = [f"{counted(len(method.targets), 'target')}, fold {method.fold}:"]
    for target in method.targets:
        rows, columns = matrix_shape(target.shape, method.fold)
        form = "dense copy" if target.dense else f"matrix {rows} x {columns}, full rank {min(rows, columns)}"
        lines.append(f"  {target.label}: {'x'.join(map(str, target.shape))}, {form}")
    return lines


def _trainings(config: RunConfig, prepared: Prepared, method: Method) -> PlannedPhases:
    """Return the training that the method declares; a phase that may not occur has an empty list."""
    labels = np.asarray(prepared.source.train.labels)
    counts = [np.unique(labels[task.train], return_counts=True)[1].tolist() for task in prepared.stream.tasks]
    specs = declared(method)
    trainings: PlannedPhases = {name: [] for name, spec in specs.items()}
    for task, phases in upcoming(method, counts, method.options, pretrained=method.backbone.pretrained):
        for name, epochs in phases.items():
            for images in epochs:
                course = Course.of(config.train.phase(name), images, config.engine.max_steps)
                trainings[name].append(PlannedPhase(task.id, images, course))
    return {name: times for name, times in trainings.items() if times or specs[name].at_least}


def _sizes(config: RunConfig, prepared: Prepared, method: Method, engine: Engine, phases: PlannedPhases) -> list[str]:
    counts = [len(task.train) for task in prepared.stream.tasks]
    images = sum(counts) if method.oracle else max(counts)
    data = images * prepared.train.pixels[0].nbytes
    weights = 4 * sum(p.numel() for p in method.parameters())
    backbone = sum(p.numel() for p in method.backbone.parameters())
    per_image = activation_bytes(method.backbone, config.images.size, engine.precision)
    needs = []
    for phase, times in phases.items():
        settings = config.train.phase(phase)
        # a trained copy of the backbone: weights, gradients, optimizer states
        training = 4 * backbone * (2 + {"adam": 2, "adamw": 2, "sgd": 1}[settings.optimizer])
        batch = min(settings.batch_size, max((each.images for each in times), default=images))
        needs.append((training + per_image * batch, training, batch, phase))
    most, training, batch, phase = max(needs, default=(0, 0, 0, "none"))
    total = data + weights + most
    return [
        f"backbone: {backbone:,} parameters, features of {method.heads.dim}",
        f"estimated memory on {engine.device.type} in {engine.precision}: {total / _GB:.2f} GB (images of "
        f"{'all tasks' if method.oracle else 'the largest task'} {data / _GB:.2f}, weights {weights / _GB:.2f}; phase "
        f"{phase}: copy in training with gradients and optimizer {training / _GB:.2f}, activations at batch {batch} "
        f"{per_image * batch / _GB:.2f}); plus what each task adds to the method",
    ]


def _steps(config: RunConfig, method: Method, phases: PlannedPhases, long: bool) -> list[str]:
    """Return the number of steps, in total and per phase."""
    lines, total, specs = [], 0, declared(method)
    for phase, times in phases.items():
        steps, tasks = sum(each.course.steps for each in times), len({each.task for each in times})
        more = f", {len(times)} times" if len(times) > tasks else ""
        more += ", or more, depending on training" if specs[phase].at_least else ""
        batch = config.train.phase(phase).batch_size
        lines.append(f"  {phase}: {counted(steps, 'step')} in {counted(tasks, 'task')}{more}, batches of {batch}")
        total += steps
    return [f"steps: {total:,}", *_shortened(lines, long)]


def _time(config: RunConfig, method: Method, engine: Engine, phases: PlannedPhases) -> str:
    """Return the estimated time of these steps, from a pass timed now."""
    timed: dict[int, tuple[int, float]] = {}
    specs, seconds = declared(method), 0.0
    for phase, times in phases.items():
        passes = sum(each.course.steps * each.images / each.course.per_epoch for each in times)
        if specs[phase].features_only or not times:
            continue
        wanted = min(config.train.phase(phase).batch_size, max(each.images for each in times), _TIMED)
        if wanted not in timed:
            timed[wanted] = timed_pass(method.backbone, config.images.size, wanted, engine)
        batch, took = timed[wanted]
        seconds += passes * took / batch
    conditions = ", ".join(
        f"a pass of {counted(batch, 'image')} forward and backward took {took:.3f} s" for batch, took in timed.values()
    )
    return (
        f"time: about {duration(seconds)} of training on {engine.device.type}, plus evaluation and data "
        f"(timed just now: {conditions or 'nothing to train'}; what a method adds to a pass is not in it)"
    )


def timed_pass(backbone: nn.Module, size: int, wanted: int, engine: Engine) -> tuple[int, float]:
    """Return images and seconds of a forward and backward pass: `wanted` images, or as few as take seconds on a CPU."""
    batch = wanted
    if engine.device.type == "cpu" and wanted > 2:
        few = step_seconds(backbone, size, 2, engine)
        batch = min(wanted, int(_PATIENCE / few))  # each pass runs twice
        if batch <= 2:
            return 2, few
    return batch, step_seconds(backbone, size, batch, engine)


def step_seconds(backbone: nn.Module, size: int, batch: int, engine: Engine) -> float:
    """Return the seconds of a forward and backward pass of the whole backbone, the second of two, on the engine's
    device.
    """
    device = engine.device
    placed(backbone, device, channels_last=engine.config.engine.channels_last).requires_grad_(True).train()
    x = torch.zeros(batch, 3, size, size, device=device).to(memory_format=engine.memory_format)
    started = 0.0
    for _ in range(2):
        started = time.perf_counter()
        with engine.fabric.autocast(), engine.kernels(backbone)():
            loss = backbone(x).float().square().mean()
        loss.backward()
        loss.item()  # waits for the device
    return time.perf_counter() - started


def activation_bytes(backbone: nn.Module, size: int, precision: str) -> int:
    """Return the bytes per image that a forward pass stores for the backward pass."""

    def kept(images: int) -> int:
        bytes_at: dict[int, int] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            bytes_at[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with (
            torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"),
            torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        ):
            backbone(torch.zeros(images, 3, size, size))
        return sum(bytes_at.values())

    was = [p.requires_grad for p in backbone.parameters()]
    backbone.requires_grad_(True).train()
    per_image = kept(3) - kept(2)  # weights are stored too, equally often for three images as for two
    for parameter, required in zip(backbone.parameters(), was, strict=True):
        parameter.requires_grad_(required)
    return per_image
