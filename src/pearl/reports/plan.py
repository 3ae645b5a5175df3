"""What a run would do, without doing it: tasks, targets, steps, about how much time and memory."""

import time

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
from pearl.training.engine import Engine
from pearl.training.optimizers import Course
from pearl.training.world import enough, kind_of

_GB = 1e9
_LINES = 7  # of tasks, targets or phases that are shown, if not all
_TIMED = 32  # images of a pass that is timed, at most: larger batches take in proportion
_FIRST = {
    "reference",
    "extractor",
    "lwf_first",
    "co2l_first",
    "ssre_first",
}  # phases of the first task; what has one has the others after it


def plan(config: RunConfig, *, device: str = "auto", devices: int = 1, long: bool = False) -> str:
    """The dry run of a configuration as text, as it would be on `device`. Data and weights are read.

    25 lines at most; if `long` with every setting, task and target.

    Raises:
        PearlError: what the run itself would raise before its first step.
    """
    enough(kind_of(device), devices)
    made = ready(config, devices=devices)
    lines = [*([config.to_yaml().rstrip(), ""] if long else []), f"run directory: {config.id}", ""]
    if made is None:
        return "\n".join([*lines, "it is done; nothing is left to do"])
    method, prepared = made.method, made.prepared
    engine = Engine(config, device=device, precision=made.precision)
    lines += _shortened(_tasks(prepared), long)
    if isinstance(method, Pearl):
        lines += ["", *_shortened(_targets(method), long)]
    lines += ["", *_sizes(config, prepared, method, engine), *_steps(config, prepared, method, engine, long)]
    return "\n".join(lines)


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


def _sizes(config: RunConfig, prepared: Prepared, method: Method, engine: Engine) -> list[str]:
    counts = [len(task.train) for task in prepared.stream.tasks]
    images = sum(counts) if method.oracle else max(counts)
    data = images * prepared.train.pixels[0].nbytes
    weights = 4 * sum(p.numel() for p in method.parameters())
    backbone = sum(p.numel() for p in method.backbone.parameters())
    per_image = activation_bytes(method.backbone, config.images.size, engine.precision)
    needs = []
    for phase in method.phases:
        settings = config.train.phase(phase)
        # a copy of the backbone in training: weights, gradients, optimizer states
        training = 4 * backbone * (2 + {"adam": 2, "adamw": 2, "sgd": 1}[settings.optimizer])
        batch = min(settings.batch_size, images)
        needs.append((training + per_image * batch, training, batch, phase))
    most, training, batch, phase = max(needs)
    total = data + weights + most
    return [
        f"backbone: {backbone:,} parameters, features of {method.heads.dim}",
        f"estimated memory on {engine.fabric.device.type} in {engine.precision}: {total / _GB:.2f} GB (images of "
        f"{'all tasks' if method.oracle else 'the largest task'} {data / _GB:.2f}, weights {weights / _GB:.2f}; phase "
        f"{phase}: copy in training with gradients and optimizer {training / _GB:.2f}, activations at batch {batch} "
        f"{per_image * batch / _GB:.2f}); what each task adds to the method comes on top",
    ]


def _steps(config: RunConfig, prepared: Prepared, method: Method, engine: Engine, long: bool) -> list[str]:
    """How many steps there are, and about how long they take: by one that is timed here and now."""
    counts = [len(task.train) for task in prepared.stream.tasks]
    if method.oracle:
        counts = [sum(counts[: t + 1]) for t in range(len(counts))]
    pretrained = getattr(method.backbone, "pretrained", False)
    lines, total, seconds = [], 0, 0.0
    timed: dict[int, float] = {}
    for phase in method.phases:
        settings = config.train.phase(phase)
        mine = counts
        if phase in _FIRST:
            mine = [] if pretrained else counts[:1]
        elif phase in method.once:
            mine = counts[:1]
        elif _FIRST & {*method.phases} and not pretrained:
            mine = counts[1:]
        steps = [Course.of(settings, count, config.engine.max_steps).steps for count in mine]
        batch = min(settings.batch_size, max(counts), _TIMED)
        if steps and batch not in timed:
            timed[batch] = step_seconds(method.backbone, config.images.size, batch, engine)
        total += sum(steps)
        seconds += sum(steps) * timed.get(batch, 0) * min(settings.batch_size, max(counts)) / batch
        size = f"{counted(sum(steps), 'step')} in {counted(len(steps), 'task')}"
        lines.append(f"  {phase}: {size}, batches of {settings.batch_size}")
    how = ", ".join(
        f"a pass of {counted(batch, 'image')} forward and backward took {took:.3f} s" for batch, took in timed.items()
    )
    return [
        f"steps: about {total:,}",
        *_shortened(lines, long),
        f"time: about {duration(seconds)} of training on {engine.fabric.device.type}, evaluation and data come on top "
        f"(timed just now: {how or 'nothing to train'}; what a method adds to a pass is not in it)",
    ]


def step_seconds(backbone: nn.Module, size: int, batch: int, engine: Engine) -> float:
    """Seconds of one pass of the whole backbone forward and backward, the second of two, on the engine's device."""
    device = engine.fabric.device
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
    """Bytes that a forward pass keeps for the backward pass, for each image."""

    def kept(images: int) -> int:
        found: dict[int, int] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            found[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with (
            torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"),
            torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        ):
            backbone(torch.zeros(images, 3, size, size))
        return sum(found.values())

    was = [p.requires_grad for p in backbone.parameters()]
    backbone.requires_grad_(True).train()
    per_image = kept(3) - kept(2)  # weights are kept too, as often for three images as for two
    for parameter, required in zip(backbone.parameters(), was, strict=True):
        parameter.requires_grad_(required)
    return per_image
