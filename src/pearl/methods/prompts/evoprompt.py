"""EvoPrompt: Evolving Parameterized Prompt Memory for Continual Learning (Kurniawan et al., AAAI 2024).

A small network per block, the memory, computes an image's prompts from its query. All tasks share it. After a task, the
units of the trained memory are aligned with those of the previous one, and the two are averaged unit by unit, weighted
by their use.
"""

from collections.abc import Iterator
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from pearl.data.batches import Task
from pearl.errors import ConfigError
from pearl.methods.base import Phase, own_loss
from pearl.methods.common.class_moments import ClassMoments
from pearl.methods.common.frozen_vit import IMAGES
from pearl.methods.common.transport import transport
from pearl.methods.prompts.pool import PromptMethod
from pearl.nn import vit

Count = Annotated[int, Field(ge=1)]


class EvoPrompt(PromptMethod):
    """A frozen ViT and a memory that computes `length` prompts before each block, which stay in the sequence.

    Defaults are the authors': Adam at 5e-3, 50 epochs on ImageNet-R and 20 on CIFAR-100, batches of 64, gradients
    clipped at norm 1. Their colour jitter and grey images are not among the augmentations here. They align coordinates
    of prompts as well as hidden units (`align=both`). Coordinates of a prompt have a fixed meaning that a permutation
    changes, so here only hidden units are aligned by default. The use of a unit is measured on correctly predicted
    images; without any, all units have equal weight.

    Options:
        hidden_dim: hidden units of a block's memory.
        length: prompts before each block.
        alpha: weight of the task's memory in the average; 0 keeps that of the first task.
        num_heads: parts of a feature in which a new class's head is composed of old ones; `auto` has four dimensions
            per part, as the authors' 192 parts of a ViT-B; null initialises the head randomly.
        temp: temperature of that composition.
        align: units to align with the previous memory: `hidden`, or `both` hidden units and coordinates of prompts,
            3,840 per block of a ViT-B.
    """

    task_local_loss = True
    phases = ("evoprompt",)
    hidden_use: Tensor
    output_use: Tensor

    def __init__(
        self,
        backbone: nn.Module,
        *,
        hidden_dim: Count = 16,
        length: Count = 5,
        alpha: Annotated[float, Field(ge=0, le=1)] = 0.5,
        num_heads: Count | Literal["auto"] | None = "auto",
        temp: Annotated[float, Field(gt=0)] = 0.05,
        align: Literal["hidden", "both"] = "hidden",
    ) -> None:
        super().__init__(backbone)
        if num_heads == "auto":
            num_heads = self.dim // 4
        if num_heads is not None and self.dim % num_heads:
            raise ConfigError(
                f"method.num_heads={num_heads}: features of {self.dim} numbers cannot be divided into that many "
                f"equal parts; use a divisor"
            )
        depth = len(backbone.blocks)  # type: ignore[arg-type]
        self.length, self.alpha, self.parts, self.temp, self.align = length, alpha, num_heads, temp, align
        self.reader = nn.Parameter(torch.empty(depth, hidden_dim, self.dim).uniform_(-1, 1) / self.dim**0.5)
        self.writer = nn.Parameter(torch.empty(depth, length * self.dim, hidden_dim).uniform_(-1, 1) / hidden_dim**0.5)
        self.register_buffer("hidden_use", torch.zeros(depth, hidden_dim))
        self.register_buffer("output_use", torch.zeros(depth, length * self.dim))
        self.statistics = ClassMoments(self.dim)

    def learn(self, task: Task) -> Iterator[Phase]:
        """Compose the new head, train it and the memory; then align and fuse."""
        before = self.reader.detach().clone(), self.writer.detach().clone()
        head = self.heads.grow(len(task.classes)).to(self.device)
        self.statistics.grow(len(task.classes), self.device)
        self.statistics.update(self.of_images(task, self.query), task.labels - task.first_class)
        if task.id and self.parts:
            head.weight.data = self.composed(task.id)
        params = self.only([self.reader, self.writer, *head.parameters()])
        yield Phase("evoprompt", params, own_loss(self.features, head, task))
        self.requires_grad_(False)
        self.fuse(task, *before)

    def composed(self, t: int) -> Tensor:
        """Return weights (k, dim) for a new task's classes: in each part a mean of old classes', by similarity of class
        means.
        """
        weights = torch.cat([head.weight.detach() for head in list(self.heads)[:t]])
        means = self.statistics.means().to(weights).unflatten(1, (self.parts, -1))
        old, new = F.normalize(means, dim=2).split([len(weights), len(means) - len(weights)])
        alike = torch.einsum("npd,opd->pno", new, old) / self.temp
        return torch.einsum("pno,opd->npd", alike.softmax(2), weights.unflatten(1, (self.parts, -1))).flatten(1)

    def hidden(self, x: Tensor) -> Tensor:
        """Return hidden units (B, blocks, hidden) of the memory for queries: features before the last norm."""
        with torch.no_grad():
            query = vit.unnormalised(self.backbone, x)
        return torch.einsum("bd,lhd->blh", query, self.reader).relu()

    def made(self, hidden: Tensor) -> Tensor:
        """Return the memory's output for hidden units: (B, blocks, length * dim)."""
        return torch.einsum("blh,loh->blo", hidden, self.writer)

    def features(self, x: Tensor) -> Tensor:
        """Return features (B, dim), each image with the prompts of its query."""
        return self.read(x, self.made(self.hidden(x)))

    def read(self, x: Tensor, made: Tensor) -> Tensor:
        """Return features (B, dim) with these outputs of the memory."""
        prompts = made.unflatten(2, (self.length, self.dim)).unbind(1)
        return vit.features(self.backbone, x, prompts=dict(enumerate(prompts)))

    @torch.no_grad()
    def fuse(self, task: Task, reader: Tensor, writer: Tensor) -> None:
        """Align the memory with the previous one, average the two, and store the use of units."""
        hidden, output = self.used(task)
        if task.id:
            for block in range(len(reader)):
                plan = alignment(self.reader[block], reader[block])
                self.reader[block] = plan.T @ self.reader[block]
                weights = self.writer[block].abs().sum(1)  # before alignment, as in the authors' code
                self.writer[block] = self.writer[block] @ plan
                hidden[block] = plan.T @ hidden[block]
                if self.align == "both":
                    plan = alignment(self.writer[block], writer[block], weights)
                    self.writer[block] = plan.T @ self.writer[block]
                    output[block] = plan.T @ output[block]
            for now, was, importance, old in (
                (self.reader, reader, hidden, self.hidden_use),
                (self.writer, writer, output, self.output_use),
            ):
                share = self.alpha * (1 + spread(importance) - spread(old))
                now.copy_(was + share[..., None] * (now - was))
        self.hidden_use.copy_(torch.maximum(self.hidden_use, hidden))
        self.output_use.copy_(torch.maximum(self.output_use, output))

    def used(self, task: Task) -> tuple[Tensor, Tensor]:
        """Return mean sizes of hidden units (blocks, hidden) and outputs (blocks, length * dim) on correctly predicted
        images.
        """
        self.eval()
        hidden_sum, output_sum = torch.zeros_like(self.hidden_use), torch.zeros_like(self.output_use)
        right = 0
        for x, labels, _ in task.in_order(IMAGES):
            hidden = self.hidden(x)
            made = self.made(hidden)
            good = self.heads(self.read(x, made)).argmax(1) == labels
            hidden_sum += hidden[good].sum(0)
            output_sum += made[good].relu().sum(0)
            right += int(good.sum())
        return hidden_sum / max(right, 1), output_sum / max(right, 1)


def alignment(now: Tensor, before: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the transport (now, before) from current to previous units, whose columns sum to 1.

    Units are rows (units, dim), compared by direction; their masses are the sums of absolute values, or `weights`
    (units,) for the rows of `now`.
    """
    cost = torch.cdist(F.normalize(now.double(), dim=1), F.normalize(before.double(), dim=1)).square()
    importance = now.abs().sum(1) if weights is None else weights
    sums = [weight.double() / weight.double().sum() for weight in (importance, before.abs().sum(1))]
    plan = transport(cost, *sums)
    return (plan / plan.sum(0).clamp(min=1e-12)).to(now)


def spread(use: Tensor) -> Tensor:
    """Scale values (blocks, units) to the range 0 to 1 in each block; equal ones become 0."""
    low, high = use.aminmax(dim=1, keepdim=True)
    return (use - low) / (high - low).clamp(min=1e-9)
