"""What a run would do, without doing it: settings, tasks, targets, parameters, memory."""

import torch
from torch import nn

from pearl.config import RunConfig
from pearl.methods.base import Method
from pearl.methods.pearl import Pearl
from pearl.nn.lowrank import matrix_shape
from pearl.runs import Prepared, prepare
from pearl.saved import build_method


def plan(config: RunConfig) -> str:
    """The dry run of a configuration as text. Data is read, weights are not.

    Raises:
        PearlError: what the run itself would raise before its first step.
    """
    prepared = prepare(config)
    method = build_method(config, structure_only=True)
    lines = [config.to_yaml().rstrip(), "", f"run directory: {config.id}", ""]
    lines += _tasks(prepared)
    if isinstance(method, Pearl):
        lines += ["", *_targets(method)]
    lines += ["", *_sizes(config, prepared, method)]
    return "\n".join(lines)


def _tasks(prepared: Prepared) -> list[str]:
    lines = [f"{len(prepared.stream.tasks)} tasks, evaluated on the {prepared.stream.test_from} images:"]
    for task in prepared.stream.tasks:
        names = ", ".join(task.classes[:5]) + (", ..." if len(task.classes) > 5 else "")
        lines.append(
            f"  {task.name}: {len(task.classes)} classes ({names}), {len(task.train)} training and {len(task.test)} "
            f"test images"
        )
    return lines


def _targets(method: Pearl) -> list[str]:
    lines = [f"{len(method.targets)} targets, fold {method.fold}:"]
    for target in method.targets:
        rows, columns = matrix_shape(target.shape, method.fold)
        form = "dense copy" if target.dense else f"matrix {rows} x {columns}, full rank {min(rows, columns)}"
        lines.append(f"  {target.label}: {'x'.join(map(str, target.shape))}, {form}")
    return lines


def _sizes(config: RunConfig, prepared: Prepared, method: Method) -> list[str]:
    weights = sum(p.numel() for p in method.backbone.parameters())
    batch = max(config.train.phase(phase).batch_size for phase in method.phases)
    activations = _activation_bytes(method.backbone, config.images.size) * batch
    optimizer = {"adam": 2, "adamw": 2, "sgd": 1}[config.train.optimizer]
    data = max(len(task.train) for task in prepared.stream.tasks) * prepared.train.pixels[0].nbytes
    weight_bytes = 4 * sum(p.numel() for p in method.parameters())
    # a copy of the backbone in training: weights, gradients, optimizer states
    training = 4 * weights * (2 + optimizer)
    total = data + weight_bytes + training + activations
    return [
        f"backbone: {weights:,} parameters, features of {method.heads.dim}",
        f"estimated memory: {total / 1e9:.2f} GB (images of a task {data / 1e9:.2f}, weights {weight_bytes / 1e9:.2f}, "
        f"copy in training with gradients and optimizer {training / 1e9:.2f}, activations at batch {batch} "
        f"{activations / 1e9:.2f})",
    ]


def _activation_bytes(backbone: nn.Module, size: int) -> int:
    """Bytes that one image's forward pass keeps for the backward pass, in float32; weights not counted."""
    own = {p.data_ptr() for p in backbone.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in own:
            kept[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    was = [p.requires_grad for p in backbone.parameters()]
    backbone.requires_grad_(True).train()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        backbone(torch.zeros(2, 3, size, size))
    for parameter, required in zip(backbone.parameters(), was, strict=True):
        parameter.requires_grad_(required)
    return sum(kept.values()) // 2
