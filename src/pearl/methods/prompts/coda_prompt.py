"""CODA-Prompt: COntinual Decomposed Attention-based Prompting (Smith et al., CVPR 2023).

A prompt is a sum of components, each weighted by the cosine of its key and the query under its attention. A task adds
components, trains them with its head, and freezes them. Prompts are prefixes of the first blocks' keys and values.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from pearl.data.batches import Batch, Task
from pearl.errors import ConfigError
from pearl.methods.base import Phase
from pearl.methods.prompts.pool import PromptMethod
from pearl.nn import vit
from pearl.nn.precision import full
from pearl.nn.task_modules import TaskTensors
from pearl.settings.derived_defaults import AUTO, DerivedDefault, tasks_of

COMPONENTS = 100  # in total over the tasks of a stream

_KINDS = "PKA"  # of a component: prompt, key, attention; the paper's names


def _share(config: Any) -> int | str:
    tasks = tasks_of(config)
    return max(1, COMPONENTS // tasks) if tasks else AUTO


class CodaPrompt(PromptMethod):
    """A frozen ViT and components of prompts, weighted for each image; a task adds some and freezes them.

    Defaults are the authors' for ImageNet-R: 100 components over 10 tasks, 8 tokens each (4 keys, 4 values) in the
    first 5 blocks, no penalty, since new components are initialised orthogonal to all others; Adam 1e-3,
    `quarter_cosine`, 50 epochs. Keys and attentions have the ViT's width: components beyond that number are initialised
    as random unit vectors.

    Options:
        per_task: components that a task adds; `auto` divides the authors' 100 by the tasks of the stream (20 for 5
            tasks, 5 for 20), and is 10 for a model without a stream.
        length: tokens of a prompt, half of them keys and half values.
        blocks: number of blocks, from the first, with a prompt.
        ortho: weight of the penalty on components that are not orthonormal (equation 7), as the mean over all entries,
            as in the authors' code, where the paper has the sum; one version of that code has another factor of 1e-6.
    """

    task_local_loss = True
    phases = ("coda_prompt",)

    def __init__(
        self,
        backbone: nn.Module,
        *,
        per_task: Annotated[Annotated[int, Field(ge=1)] | Literal["auto"], DerivedDefault(_share)] = "auto",
        length: Annotated[int, Field(ge=2, multiple_of=2)] = 8,
        blocks: Annotated[int, Field(ge=1)] = 5,
        ortho: Annotated[float, Field(ge=0)] = 0.0,
    ) -> None:
        super().__init__(backbone)
        depth = len(backbone.blocks)  # type: ignore[arg-type]
        if blocks > depth:
            raise ConfigError(f"method.blocks={blocks}: this backbone has {depth} blocks; use at most that many")
        self.per_task = 10 if per_task == "auto" else per_task
        self.length, self.blocks, self.ortho = length, blocks, ortho
        self.components = (
            TaskTensors()
        )  # "t.P.block" (per_task, length * dim), "t.K.block", "t.A.block" (per_task, dim)

    def learn(self, task: Task) -> Iterator[Phase]:
        """Add components that are orthogonal to the old ones; train them and the new head."""
        self.requires_grad_(False)
        head = self.heads.grow(len(task.classes)).to(self.device)
        for block in range(self.blocks):
            for kind in _KINDS:
                size = self.dim * (self.length if kind == "P" else 1)
                old = self.all(kind, block) if task.id else torch.empty(0, size)
                start = orthonormal(self.per_task, old).to(self.device)
                self.components.add(f"{task.id}.{kind}.{block}", start)

        def loss(batch: Batch) -> Tensor:
            task_loss = F.cross_entropy(head(self.features(batch.x)), batch.y - task.first_class)
            return task_loss + self.ortho * self.penalty() if self.ortho else task_loss

        yield Phase("coda_prompt", [*self.components.in_order(f"{task.id}."), *head.parameters()], loss)
        self.requires_grad_(False)

    def all(self, kind: str, block: int) -> Tensor:
        """Return the components of all tasks so far, one per row."""
        tasks = len(self.components) // (self.blocks * len(_KINDS))
        return torch.cat([self.components[f"{t}.{kind}.{block}"] for t in range(tasks)])

    def features(self, x: Tensor) -> Tensor:
        """Return features (B, dim), each image with the prompt that its query weights."""
        query = self.query(x)
        return vit.features(
            self.backbone, x, prefixes={block: self.prefix(query, block) for block in range(self.blocks)}
        )

    def prefix(self, query: Tensor, block: int) -> vit.Prefix:
        """Return the sum of a block's components, weighted by cos(query * attention, key) (equation 4)."""
        P, K, A = (self.all(kind, block) for kind in _KINDS)
        with torch.autocast(query.device.type, enabled=False):
            query = full(query)
            # norm of each query under each attention, without a tensor (images, components, dim)
            norms = (query.square() @ A.square().T).sqrt().clamp_min(1e-12)
            weights = query @ (A * F.normalize(K, dim=1)).T / norms
            prompt = (weights @ P).unflatten(1, (self.length, self.dim))
        keys, values = prompt.chunk(2, dim=1)
        return keys, values

    def penalty(self) -> Tensor:
        """Return the mean square of C C^T - I, summed over blocks and kinds: the distance of components from
        orthonormality.
        """
        total = torch.zeros((), device=self.device)
        for block in range(self.blocks):
            for kind in _KINDS:
                rows = self.all(kind, block)
                total = total + (rows @ rows.T - torch.eye(len(rows), device=self.device)).square().mean()
        return total


def orthonormal(count: int, old: Tensor) -> Tensor:
    """Return random unit rows (count, size), orthogonal to each other and to the rows `old` (m, size) where possible.

    At most `size` rows can be orthogonal; further ones are random unit vectors. The dtype is torch's default, the
    generator its global one.
    """
    drawn = torch.randn(count, old.shape[1], dtype=torch.float64)
    room = max(0, old.shape[1] - len(old))
    basis = torch.linalg.qr(old.detach().cpu().double().T).Q
    inside = drawn[:room].T
    for _ in range(2):  # again, against rounding errors of the first pass
        inside = inside - basis @ (basis.T @ inside)
    inside = torch.linalg.qr(inside).Q
    return torch.cat([inside.T, F.normalize(drawn[room:], dim=1)]).to(torch.get_default_dtype())
