"""LAE: A Unified Continual Learning Framework with General Parameter-Efficient Tuning (Gao et al., ICCV 2023).

Learning, accumulation, ensemble: one module is trained on one task after another; a second one is its moving average
and preserves earlier tasks. Both form classifiers with the same head, and the prediction is the class with the highest
probability of either.
"""

from collections.abc import Iterator
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from pearl.data.batches import Task
from pearl.methods.adapters.bottleneck import Adapters, Bottleneck
from pearl.methods.base import Method, Phase, own_loss
from pearl.methods.common.average import Average
from pearl.methods.prompts.prefixes import check_blocks
from pearl.nn import lowrank, vit
from pearl.nn.functional import functional_call
from pearl.nn.lowrank import Target
from pearl.nn.precision import outside_autocast
from pearl.nn.task_modules import TaskHeads, TaskTensors
from pearl.settings.declared import PhaseSpec

Count = Annotated[int, Field(ge=1)]
Blocks = Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)]


class ParallelAdapters(Adapters):
    """Adapters with the input of attention and a learnt factor."""

    def __init__(self, net: nn.Module, blocks: Blocks, width: int) -> None:
        super().__init__(blocks, lambda: Bottleneck(int(net.dim), width, learnable=True, activation="gelu"))  # type: ignore[arg-type]

    def forward(self, net: nn.Module, x: Tensor) -> Tensor:
        """Map images (B, 3, H, W) to features (B, dim)."""
        return vit.features(net, x, attention_adapters=self.by_block())


class LearnablePrefixes(nn.Module):
    """Compensated prefixes whose keys and values have a learnt factor each."""

    def __init__(self, net: nn.Module, blocks: Blocks, length: int) -> None:
        super().__init__()
        self.blocks = blocks
        self.prefixes = nn.Parameter(torch.empty(len(blocks), 2, length, int(net.dim)).uniform_(0, 0.01))  # type: ignore[arg-type]
        self.scale = nn.Parameter(torch.ones(len(blocks), 2))

    def forward(self, net: nn.Module, x: Tensor) -> Tensor:
        """Map images (B, 3, H, W) to features (B, dim)."""
        scaled = self.scale[..., None, None] * self.prefixes
        prefixes = {
            block: vit.Compensated(*vectors[:, None]) for block, vectors in zip(self.blocks, scaled, strict=True)
        }
        return vit.features(net, x, prefixes=prefixes)


class ScaledLoRA(nn.Module):
    """Low-rank updates s * B A with a learnt s."""

    def __init__(self, net: nn.Module, targets: list[Target], rank: int) -> None:
        super().__init__()
        self.targets = targets
        self.factors = TaskTensors()  # "A.target", "B.target", "s.target"
        for target in targets:
            shape, like = lowrank.matrix_shape(target.shape, "spatial"), net.get_parameter(target.parameter)
            a, b = lowrank.kaiming_factors(shape, min(rank, *shape), like)
            for name, start in {"A": a, "B": b, "s": torch.ones(())}.items():
                self.factors.add(f"{name}.{target.label}", start)

    def forward(self, net: nn.Module, x: Tensor) -> Tensor:
        """Map images (B, 3, H, W) to features (B, dim)."""
        changed: dict[str, Tensor] = {}
        with outside_autocast(x):  # updates are merged in float32, then cast once
            for target in self.targets:
                A, B, s = (self.factors[f"{name}.{target.label}"] for name in "ABs")
                weight = changed.get(target.parameter, net.get_parameter(target.parameter))
                update = lowrank.from_matrix(s * (B @ A), target.shape, "spatial")
                changed[target.parameter] = target.add(weight, update)
        return functional_call(net, changed, (x,))


class Lae(Method):
    """A frozen network with a small module in two versions: the trained one and its moving average.

    Defaults are the authors': batches of 24, Adam at a constant rate, 4.69e-4 on ImageNet-R and 2.81e-3 on CIFAR-100.
    The first task has 50 epochs (5); of a later one, the head alone is trained in 30 (3), head and module in 20 (2),
    with one optimizer. The average starts at the second task with the module's values after the first. Logits are
    logarithms of the larger of two probabilities. Heads have small initial weights, as in the authors' code: heads are
    never trained against each other, so that initial weights remain in their logits for other tasks' images.

    On networks that are not plain ViTs the module is LoRA on all targets of `lowrank.select_targets` except depthwise
    filters; the authors have special adapters for Swin and ConvNeXt. Their norm layers do not change after the
    reference task.

    Options:
        pet: `adapter` beside attention, `lora` on keys and values, or `prefix`; `auto` is adapters, the authors'
            default, in a plain ViT, and LoRA in others.
        size: width of an adapter, rank of LoRA, or length of a prefix; `auto` is 5, 5 and 10.
        adapt_blocks: blocks of the ViT that have the module, from 0.
        ema_decay: decay of the average at each step.
        head_std: standard deviation of a new head's weights, whose biases are 0; null for PyTorch's initialisation.
        reference: as PEARL's: `given` - the backbone comes with weights; `first_task` - task 1 trains it; `auto` - the
            first if it was pretrained.
    """

    task_local_loss = True
    may_rest = ("lae_head",)  # the average of the module is used later
    phases = (
        PhaseSpec("reference", "reference"),
        PhaseSpec("lae_first", lambda task: task.id == task.first_adapted),
        PhaseSpec("lae_head", lambda task: task.id > task.first_adapted),
        PhaseSpec("lae", lambda task: task.id > task.first_adapted),
    )

    def __init__(
        self,
        backbone: nn.Module,
        *,
        pet: Literal["auto", "adapter", "lora", "prefix"] = "auto",
        size: Count | Literal["auto"] = "auto",
        adapt_blocks: Blocks = (0, 1, 2, 3, 4),
        ema_decay: Annotated[float, Field(ge=0, le=1)] = 0.9999,
        head_std: Annotated[float, Field(ge=0)] | None = 0.001,
        reference: Literal["auto", "given", "first_task"] = "auto",
    ) -> None:
        super().__init__(backbone.requires_grad_(False))
        if pet == "auto":
            pet = "adapter" if vit.is_plain(backbone) else "lora"
        if size == "auto":
            size = 10 if pet == "prefix" else 5
        if reference == "auto":
            reference = "given" if backbone.pretrained else "first_task"
        self.first_adapted = 0 if reference == "given" else 1
        self.decay = ema_decay
        self.heads = TaskHeads(self.heads.dim, head_std)
        self.pet: nn.Module
        if pet == "lora":
            self.pet = ScaledLoRA(backbone, targets_in(backbone, adapt_blocks), size)
        else:
            vit.require_plain(backbone)
            check_blocks(backbone, adapt_blocks, "adapt_blocks")
            self.pet = (ParallelAdapters if pet == "adapter" else LearnablePrefixes)(backbone, adapt_blocks, size)
        self.average = Average()  # of the module; empty until the second task that trains it

    def train(self, mode: bool = True) -> "Lae":
        """Set the mode; frozen parts stay in evaluation mode and keep their running statistics."""
        super().train(mode)
        self.backbone.train(mode and any(p.requires_grad for p in self.backbone.parameters()))
        return self

    def learn(self, task: Task) -> Iterator[Phase]:
        """Train the module in the first task; in later ones first the head alone, then both with the moving average."""
        self.requires_grad_(False)
        head = self.heads.grow(len(task.classes)).to(self.device)
        if task.id < self.first_adapted:
            yield self.phase("reference", task, self.backbone, head)
        elif task.id == self.first_adapted:
            yield self.phase("lae_first", task, self.pet, head)
        else:
            if not len(self.average.tensors):
                self.average.update(self.pet, self.decay)
            yield self.phase("lae_head", task, head)
            yield self.phase("lae", task, head, self.pet)
        self.requires_grad_(False)

    def phase(self, name: str, task: Task, *trained: nn.Module) -> Phase:
        """Return a phase that trains these modules with the task's own classes."""
        params = [parameter for module in trained for parameter in module.requires_grad_(True).parameters()]
        phase = Phase(name, params, own_loss(self.features, self.heads[task.id], task), capturable=True)
        phase.keep_optimizer = name == "lae_head"
        if len(self.average.tensors):
            phase.after_step = lambda _: self.average.update(self.pet, self.decay)
        return phase

    def features(self, x: Tensor) -> Tensor:
        """Return features (B, dim) with the trained module."""
        return self.backbone(x) if len(self.heads) <= self.first_adapted else self.pet(self.backbone, x)

    def forward(self, x: Tensor, task: int | None = None) -> Tensor:
        """Return logits (B, classes seen): the larger log-probability of two networks."""
        logits = F.log_softmax(self.heads(self.features(x)), dim=1)
        if len(self.average.tensors):
            slow = F.log_softmax(self.heads(self.average(self.pet, self.backbone, x)), dim=1)
            logits = torch.maximum(logits, slow)
        return logits if task is None else logits[:, self.columns(task)]

    def forward_passes(self) -> int:
        """See `Method.forward_passes`."""
        return 2 if len(self.average.tensors) else 1


def targets_in(net: nn.Module, blocks: Blocks) -> list[Target]:
    """Return keys and values of these blocks; in a network without a list of blocks, all adapted layers."""
    if not lowrank.has_attention(net):
        return [target for target in lowrank.select_targets(net) if not target.dense]
    every = lowrank.select_targets(net, ["key", "value"])
    if not hasattr(net, "blocks"):
        return [*every]
    check_blocks(net, blocks, "adapt_blocks")
    chosen = tuple(f"blocks.{block}." for block in blocks)
    return [target for target in every if target.parameter.startswith(chosen)]
