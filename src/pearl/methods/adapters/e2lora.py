"""E2-LoRA: Energy-Structured Low-Rank Adaptation for Continual Learning (Li et al., 2026).

After a task, its update is rotated so that its output directions are sorted by energy. Every task keeps the directions
with nearly all of it; directions that no task keeps are the fixed outputs of the next update.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated, Any

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from pearl.data.batches import Batch, Task
from pearl.methods.base import Phase
from pearl.methods.common.alignment import Aligned, alignment, draws_of_classes
from pearl.methods.common.frozen_vit import FrozenVit
from pearl.methods.common.subspace import input_matrices
from pearl.methods.common.teacher import distillation
from pearl.nn import lowrank
from pearl.nn.functional import functional_call
from pearl.nn.lowrank import Target
from pearl.nn.task_modules import TaskTensors
from pearl.settings.declared import PhaseSpec

FLOOR = 2e-4  # added to variances
STEP = 1e-5  # step by which the kept share of energy falls, from 1 - STEP
NONE = 1e-12  # relative to all energy: smaller values count as zero


class E2Lora(Aligned, FrozenVit):
    """One network; updates B_i A_i of all tasks are added to fused attention projections and first MLP layers.

    The first task trains A and B of full rank. Later tasks train only A: the columns of B are an orthonormal basis of
    the directions that no earlier task keeps, and A starts at zero. Ranks follow from energies: task i keeps the k_i
    leading directions with a share of its energy. In each layer, the share starts at 0.99999 and falls until sum k_i <=
    t / (t + 1) of the outputs, for t earlier tasks. Old logits are distilled, and heads are aligned at the end.

    Defaults are the authors' (kiddo127/E2-LoRA b4fad49): SGD, decay 5e-4, batches of 64, 5 epochs, updates at 5e-4,
    heads at 0.01, on CIFAR-100 both a tenth of it in the last epoch; alignment 3 epochs at 0.01 with a cosine.

    Departures: a direction's energy is the mean square of its output over all tokens of the task's images without
    augmentation; theirs is the variance on the first batch. Their decomposition of outputs has a null space with
    directions that earlier tasks keep, which later tasks then change. Here a task's update is rotated within its own
    directions, so that those of different tasks stay orthogonal. A task keeps only directions that it has and that
    carry energy. Only kept directions are stored; a basis of the others is computed when needed, which is equivalent
    for SGD.

    Options:
        first_rank: rank of the first task's update; null for the number of the layer's outputs.
        distill: weight of the distillation, times the squared temperature.
        temperature: temperature of the distillation.
        draws: features per class in an epoch of the alignment.
        reset_norm: initialise the network's last norm layer with scale 1 and shift 0, as in the authors' code.
    """

    phases = (
        PhaseSpec("e2lora", groups=("lora", "head")),
        PhaseSpec("e2lora_align", "later", draws_of_classes, features_only=True),
    )

    def __init__(
        self,
        backbone: nn.Module,
        *,
        first_rank: Annotated[int, Field(ge=1)] | None = None,
        distill: Annotated[float, Field(ge=0)] = 0.25,
        temperature: Annotated[float, Field(gt=0)] = 2.0,
        draws: Annotated[int, Field(ge=1)] = 256,
        reset_norm: bool = True,
    ) -> None:
        super().__init__(backbone)
        self.targets = lowrank.select_targets(backbone, [r"attn\.qkv\.weight", r"mlp\.fc1\.weight"])
        self.first_rank, self.distill, self.temperature, self.draws = first_rank, distill, temperature, draws
        self.factors = TaskTensors()  # "t.A.target" (rank, inputs), "t.B.target" (outputs, rank)
        self.energies = TaskTensors(buffers=True)  # "t.target" (rank,) float64, descending
        for norm in (backbone.norm, backbone.fc_norm) if reset_norm else ():
            if isinstance(norm, nn.LayerNorm):
                norm.reset_parameters()

    def learn(self, task: Task) -> Iterator[Phase]:
        """Allocate directions, train, rotate; then statistics and the alignment."""
        t, head = task.id, self.heads.grow(len(task.classes)).to(self.device)
        nn.init.trunc_normal_(head.weight, std=0.02)
        nn.init.zeros_(head.bias)
        for target in self.targets:
            self.start(t, target)
        lora = [*self.factors.in_order(f"{t}.A."), *(self.factors.in_order("0.B.") if not t else ())]
        params = {"lora": lora, "head": [*head.parameters()]}
        self.only([*lora, *head.parameters()])
        yield Phase("e2lora", params, partial(self.loss, task, head, self.weights(t)), capturable=True)
        layers = [target.parameter.removesuffix(".weight") for target in self.targets]
        moments = input_matrices(self.backbone, self.features, layers, task)
        for target, layer in zip(self.targets, layers, strict=True):
            self.turn(t, target, moments[layer])
        self.requires_grad_(False)
        self.remember(task, self.features_of(task))
        if t:
            yield alignment("e2lora_align", self.heads, self.gaussians(self.draws, FLOOR, shrink=True))
            self.requires_grad_(False)

    @torch.no_grad()
    def start(self, t: int, target: Target) -> None:
        """Truncate earlier tasks' factors to the kept directions, and create task t's on the others."""
        outputs, like = target.shape[0], self.backbone.get_parameter(target.parameter)
        if not t:
            rank = min(self.first_rank or outputs, outputs)
            a, b = lowrank.kaiming_factors(target.shape, rank, like)  # type: ignore[arg-type]
        else:
            energies = [self.energies[f"{i}.{target.label}"] for i in range(t)]
            there = [len(self.factors[f"{i}.A.{target.label}"]) for i in range(t)]
            for i, rank in enumerate(kept_ranks(energies, there, t * outputs // (t + 1))[0]):
                self.factors.add(f"{i}.A.{target.label}", self.factors[f"{i}.A.{target.label}"][:rank])
                self.factors.add(f"{i}.B.{target.label}", self.factors[f"{i}.B.{target.label}"][:, :rank])
            kept = torch.cat([self.factors[f"{i}.B.{target.label}"] for i in range(t)], dim=1)
            b = torch.linalg.qr(kept.double(), mode="complete").Q[:, kept.shape[1] :].to(like)
            a = like.new_zeros(b.shape[1], target.shape[1])
        self.factors.add(f"{t}.A.{target.label}", a)
        self.factors.add(f"{t}.B.{target.label}", b)

    @torch.no_grad()
    def turn(self, t: int, target: Target, moment: Tensor) -> None:
        """Sort a task's directions by energy; `moment` (inputs, inputs) is the mean of x x^T over a layer's inputs."""
        A, B = self.factors[f"{t}.A.{target.label}"], self.factors[f"{t}.B.{target.label}"]
        a, b, energies = turned(A.double(), B.double(), moment)
        self.factors.add(f"{t}.A.{target.label}", a.to(A))
        self.factors.add(f"{t}.B.{target.label}", b.to(B))
        self.energies.add(f"{t}.{target.label}", energies)

    def loss(self, task: Task, head: nn.Module, before: Mapping[str, Tensor], batch: Batch) -> Tensor:
        """Return cross-entropy among the task's own classes plus distillation; `before` are the weights without the
        task.
        """
        with torch.autocast(self.device.type, enabled=False):  # updates are merged in float32, then cast once
            updates = {target.parameter: self.update(target, [task.id]) for target in self.targets}
            now = {name: weight + updates[name] for name, weight in before.items()}
        features = functional_call(self.backbone, now, (batch.x,))
        loss = F.cross_entropy(head(features), batch.y - task.first_class)
        if task.id and self.distill:
            old = [*self.heads][:-1]
            with torch.no_grad():
                earlier = functional_call(self.backbone, dict(before), (batch.x,))
                teacher = torch.cat([block(earlier) for block in old], dim=1)
            student = torch.cat([block(features) for block in old], dim=1)
            weight = self.distill * self.temperature**2
            loss = loss + weight * distillation(student, teacher, self.temperature)
        return loss

    def update(self, target: Target, tasks: Sequence[int]) -> Tensor:
        """Return the sum of some tasks' updates of a weight (outputs, inputs)."""
        B = torch.cat([self.factors[f"{t}.B.{target.label}"] for t in tasks], dim=1)
        return B @ torch.cat([self.factors[f"{t}.A.{target.label}"] for t in tasks])

    def weights(self, tasks: int) -> dict[str, Tensor]:
        """Return the adapted weights with the updates of the first `tasks` tasks, by the backbone's names."""
        with torch.autocast(self.device.type, enabled=False):
            if not tasks:
                return {target.parameter: self.backbone.get_parameter(target.parameter) for target in self.targets}
            updates = {target: self.update(target, range(tasks)) for target in self.targets}
            return lowrank.merged(self.backbone, updates)

    def features(self, x: Tensor) -> Tensor:
        """Return features (B, dim) with all updates."""
        return functional_call(self.backbone, self.weights(len(self.heads)), (x,))

    def size(self) -> int:
        """Count backbone and heads: updates are merged into the weights."""
        return sum(p.numel() for module in (self.backbone, self.heads) for p in module.parameters())

    def facts(self, task: int) -> dict[str, Any]:
        """Record, for every layer, the number of directions with nearly all energy of a task's update."""
        layers = []
        for target in self.targets:
            ranks, share = kept_ranks([self.energies[f"{task}.{target.label}"]], [max(target.shape)], max(target.shape))
            facts = {"threshold": share, "rank": ranks[0], "full_rank": min(target.shape)}
            layers.append({"layer": target.label, **facts, "rows_and_columns": sum(target.shape)})
        return {"layers": layers}


def turned(A: Tensor, B: Tensor, moment: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return factors A (rank, inputs) and B (outputs, rank) of the same product with B orthonormal, and energies
    (rank,).

    Row i of A x, for inputs x with E x x^T = moment, has the mean square `energies[i]`; energies descend, and rows are
    uncorrelated. The rank is limited to the number of inputs.
    """
    B, triangle = torch.linalg.qr(B)
    A = triangle @ A
    if len(A) > A.shape[1]:
        rotation, A = torch.linalg.qr(A)
        B = B @ rotation
    energies, vectors = torch.linalg.eigh(A @ moment @ A.T)
    vectors = vectors.flip(1)
    return vectors.T @ A, B @ vectors, energies.flip(0).clamp(min=0)


def kept_ranks(energies: Sequence[Tensor], there: Sequence[int], most: int) -> tuple[list[int], float]:
    """Return the directions that each task keeps, `most` in total, and the smallest share of energy that they hold.

    A task keeps one direction more than those that hold at most the share, among directions that are still `there` and
    carry energy.
    """
    totals = [float(energy.sum()) for energy in energies]
    cumulated = [energy.cumsum(0).cpu().numpy() for energy in energies]
    carrying = [int((energy > NONE * total).sum()) for energy, total in zip(energies, totals, strict=True)]
    limits = [max(1, min(pair)) for pair in zip(there, carrying, strict=True)]
    for step in range(1, round(1 / STEP)):
        share = 1 - step * STEP
        ranks = [
            min(int(np.searchsorted(sums, share * total, side="right")) + 1, limit)
            for sums, total, limit in zip(cumulated, totals, limits, strict=True)
        ]
        if sum(ranks) <= most:
            break
    return ranks, share
