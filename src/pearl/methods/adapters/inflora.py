"""InfLoRA: Interference-Free Low-Rank Adaptation for Continual Learning (Liang and Li, CVPR 2024).

Each task adds a LoRA to keys and values. The factor A (the paper's B) is not trained but computed: it lies in the span
of the task's inputs and is orthogonal to those of earlier tasks, so that the update is 0 for them.
"""

import math
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from pearl.data.batches import Task
from pearl.errors import ConfigError
from pearl.methods.base import Method, Phase, own_loss
from pearl.methods.common.subspace import Subspaces, input_matrices
from pearl.nn import lowrank
from pearl.nn.functional import functional_call
from pearl.nn.lowrank import Target
from pearl.nn.task_modules import TaskTensors
from pearl.settings.derived_defaults import DerivedDefault, stream_length

Share = Annotated[float, Field(gt=0, le=1)]
Count = Annotated[int, Field(ge=1)]


class InfLoRA(Method):
    """One network; the LoRAs of all tasks are added to its keys and values.

    Defaults are the authors' for ImageNet-R in 10 tasks: rank 10, energy from 0.98 to 1.0 (CIFAR-100: from 0.95); Adam
    5e-4, `quarter_cosine`, 50 epochs (20), batch 128. As in their code, the energy is that of the inputs' second
    moments and A is divided by sqrt(3). Unlike there, these moments are of images without augmentation, and the number
    of directions is the smallest that reaches the share at the first task as well.

    Options:
        rank: rank of a task's updates.
        energy: stored share of the energy of the first task's inputs, per layer.
        energy_end: final value of that share if it rises from task to task.
        tasks: number of tasks over which it rises; the share is constant after them. `auto` is the stream's length, as
            in the authors' configurations, and 10 for a model without a stream.
    """

    backbones = "vit"
    task_local_loss = True
    phases = ("inflora",)

    def __init__(
        self,
        backbone: nn.Module,
        *,
        rank: Count = 10,
        energy: Share = 0.98,
        energy_end: Share = 1.0,
        tasks: Annotated[Count | Literal["auto"], DerivedDefault(stream_length)] = "auto",
    ) -> None:
        if not lowrank.has_attention(backbone):
            raise ConfigError(
                f"this method needs a ViT, such as backbone=timm/vit_base_patch16_224; here is a "
                f"{type(backbone).__name__}"
            )
        super().__init__(backbone.requires_grad_(False))
        self.targets = lowrank.select_targets(backbone, ["key", "value"])
        self.rank, self.energy, self.energy_end = rank, energy, energy_end
        self.tasks = 10 if tasks == "auto" else tasks
        self.designed = TaskTensors(buffers=True)  # A: "t.layer" (rank, inputs); keys and values of a layer share it
        self.trained = TaskTensors()  # B: "t.target" (outputs, rank)
        self.memory = Subspaces()

    def learn(self, task: Task) -> Iterator[Phase]:
        """Compute A, train B and the head, store the subspace of the inputs."""
        self.requires_grad_(False)
        head = self.heads.grow(len(task.classes)).to(self.device)
        for layer, inputs in self.inputs(task).items():
            directions = self.memory.directions(layer, inputs, self.rank)
            self.designed.add(f"{task.id}.{layer}", directions.T.to(head.weight) / math.sqrt(3))
        for target in self.targets:
            start = torch.zeros(target.shape[0], self.rank, device=self.device)
            self.trained.add(f"{task.id}.{target.label}", start)
        params = [*self.trained.in_order(f"{task.id}."), *head.parameters()]
        yield Phase("inflora", params, own_loss(self.features, head, task), capturable=True)
        self.requires_grad_(False)
        for layer, inputs in self.inputs(task).items():
            self.memory.remember(layer, inputs, self.share(task.id))

    def inputs(self, task: Task) -> dict[str, Tensor]:
        """Return second moments of the inputs of keys and values over a task's images, by layer."""
        layers = dict.fromkeys(_layer(target) for target in self.targets)
        return input_matrices(self.backbone, self.features, layers, task)

    def share(self, task: int) -> float:
        """Return the share of energy to store after a task (epsilon in the paper)."""
        return self.energy + (self.energy_end - self.energy) * min(task, self.tasks - 1) / self.tasks

    def weights(self) -> dict[str, Tensor]:
        """Return keys and values with the updates of all tasks so far, by the backbone's names."""
        changed: dict[str, Tensor] = {}
        tasks = range(len(self.trained) // len(self.targets))
        with torch.autocast(self.device.type, enabled=False):  # updates are merged in float32, then cast once
            for target in self.targets if tasks else ():
                A = torch.cat([self.designed[f"{t}.{_layer(target)}"] for t in tasks])
                B = torch.cat([self.trained[f"{t}.{target.label}"] for t in tasks], dim=1)
                weight = changed.get(target.parameter, self.backbone.get_parameter(target.parameter))
                changed[target.parameter] = target.add(weight, B @ A)
        return changed

    def features(self, x: Tensor) -> Tensor:
        """Return features (B, dim) with all updates."""
        return functional_call(self.backbone, self.weights(), (x,))

    def size(self) -> int:
        """Count backbone and heads: updates are merged into the weights."""
        return sum(p.numel() for module in (self.backbone, self.heads) for p in module.parameters())

    def facts(self, task: int) -> dict[str, Any]:
        """Return the dimension of every layer's stored subspace after a task."""
        return {
            "remembered": {layer: self.memory.dimension(layer) for layer in dict.fromkeys(map(_layer, self.targets))}
        }


def _layer(target: Target) -> str:
    return target.parameter.removesuffix(".weight")
