"""What a run would do, without doing it: settings, tasks, targets, parameters, memory."""

import torch
from torch import nn

from pearl.lifecycle.runs import Prepared, ready
from pearl.methods.base import Method
from pearl.methods.pearl import Pearl
from pearl.nn.lowrank import matrix_shape
from pearl.settings.config import RunConfig
from pearl.training.engine import Engine
from pearl.training.world import enough, kind_of

_GB = 1e9


def plan(config: RunConfig, *, device: str = "auto", devices: int = 1) -> str:
    """The dry run of a configuration as text, as it would be on `device`. Data and weights are read.

    Raises:
        PearlError: what the run itself would raise before its first step.
    """
    enough(kind_of(device), devices)
    made = ready(config, devices=devices)
    lines = [config.to_yaml().rstrip(), "", f"run directory: {config.id}", ""]
    if made is None:
        return "\n".join([*lines, "it is done; nothing is left to do"])
    method, prepared = made.method, made.prepared
    engine = Engine(config, device=device, precision=made.precision)
    lines += _tasks(prepared)
    if isinstance(method, Pearl):
        lines += ["", *_targets(method)]
    lines += ["", *_sizes(config, prepared, method, engine)]
    return "\n".join(lines)


def _tasks(prepared: Prepared) -> list[str]:
    lines = [f"{len(prepared.stream.tasks)} tasks, evaluated on the {prepared.stream.test_from} images:"]
    for t, task in enumerate(prepared.stream.tasks):
        classes = prepared.stream.shown(t)
        names = ", ".join(classes[:5]) + (", ..." if len(classes) > 5 else "")
        lines.append(
            f"  {task.name}: {len(classes)} classes ({names}), {len(task.train)} training and {len(task.test)} test "
            f"images"
        )
    return lines


def _targets(method: Pearl) -> list[str]:
    lines = [f"{len(method.targets)} targets, fold {method.fold}:"]
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
