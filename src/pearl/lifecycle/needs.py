"""The needs of a task, before anything is decoded: images, where they are decoded to, and steps of training."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from pearl.data import scratch
from pearl.data.batches import spared_rows
from pearl.data.inputs import Inputs
from pearl.errors import counted, printable
from pearl.lifecycle.choices import has_statistics
from pearl.methods.base import Method
from pearl.settings.config import ModelConfig
from pearl.settings.declared import upcoming
from pearl.storage.run_directory import RunDirectory
from pearl.training.optimizers import Course


def needs(
    method: Method,
    config: ModelConfig,
    before: RunDirectory,
    inputs: Inputs,
    name: str,
    new: Sequence[str],
    *,
    fast: bool,
) -> Iterator[str]:
    """Yield lines on a task of the images `inputs`, of which classes `new` are new, after those of `before`."""
    classes, side = counted(len(inputs.classes), "class"), config.images.stored
    known = f", {len(inputs.classes) - len(new)} of them known" if len(new) < len(inputs.classes) else ""
    yield f"task {printable(name)}: {classes}{known}, {counted(len(inputs), 'image')}"
    yield f"decoded images: {scratch.described((len(inputs), side, side, 3))}"
    counts = [list(task.manifest.get("images_per_class", ())) for task in before.tasks]
    spared = (
        spared_rows(torch.from_numpy(inputs.labels)).numpy() if has_statistics(config) else np.zeros(len(inputs), bool)
    )
    counts.append(np.bincount(inputs.labels[~spared]).tolist())
    phases: dict[str, list[int]] = {}
    for task, of_task in upcoming(method, counts, method.options, pretrained=method.backbone.pretrained):
        phases = of_task if task.id == len(counts) - 1 and not fast else {}
    lines = []
    for phase, times in phases.items():
        settings = config.train.phase(phase)
        if steps := sum(Course.of(settings, images, config.engine.max_steps).steps for images in times):
            lines.append(f"{phase} {counted(steps, 'step')} of {settings.batch_size} images")
    yield f"training: {', '.join(lines) or 'none'}"
