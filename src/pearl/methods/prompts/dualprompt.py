"""DualPrompt: Complementary Prompting for Rehearsal-free Continual Learning (Wang et al., ECCV 2022).

Prefixes of the first blocks are shared by all tasks (general), those of later blocks belong to one task (expert). The
key of an expert prefix is trained towards the queries of its task; at test time an image uses the prefix whose key is
nearest to its query.
"""

from collections.abc import Iterator
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from pearl.data.batches import Batch, Task
from pearl.methods.base import Phase
from pearl.methods.prompts.identity import TaskKeys
from pearl.methods.prompts.pool import PromptMethod
from pearl.methods.prompts.prefixes import TaskPrefixes, by_block, check_blocks
from pearl.nn import vit
from pearl.settings.derived_defaults import on_cifar

Length = Annotated[int, Field(ge=0)]
Blocks = tuple[Annotated[int, Field(ge=0)], ...]
NotNegative = Annotated[float, Field(ge=0)]


class DualPrompt(PromptMethod):
    """A frozen ViT with general prefixes, and expert prefixes that each image selects by its query.

    Defaults are those of the PyTorch port, which the published comparisons used: Adam, 50 epochs at 4.69e-4 on
    ImageNet-R, 5 epochs at 2.81e-3 on CIFAR-100, batches of 24, gradients clipped at norm 1. In training, all images
    use the prefix of their task. As in the paper, keys come from the key half of an image's prefix and values from the
    value half; the port, and thus its published numbers, mixes halves, and at test time images. Here batches do not
    vote for one prefix, and only tasks seen so far are candidates: in the port, random keys of later tasks are too. The
    number of tasks is unlimited.

    Options:
        g_prompt_layer_idx: blocks with a general prefix, from 0.
        g_prompt_length: keys of a general prefix, and as many values.
        e_prompt_layer_idx: blocks with an expert prefix.
        length: keys of an expert prefix, and as many values; `auto` is 5 on CIFAR-100 and 20 elsewhere.
        pull: weight of the cosine between queries and their task's key.
    """

    task_local_loss = True
    phases: tuple[str, ...] = ("dualprompt",)

    def __init__(
        self,
        backbone: nn.Module,
        *,
        g_prompt_layer_idx: Blocks = (0, 1),
        g_prompt_length: Length = 5,
        e_prompt_layer_idx: Blocks = (2, 3, 4),
        length: Annotated[Length | Literal["auto"], on_cifar(5, 20)] = "auto",
        pull: NotNegative = 1.0,
    ) -> None:
        super().__init__(backbone)
        check_blocks(backbone, [*g_prompt_layer_idx, *e_prompt_layer_idx], "g_prompt_layer_idx, e_prompt_layer_idx")
        self.g_blocks, self.pull = g_prompt_layer_idx, pull
        self.g_prompt = nn.Parameter(torch.empty(len(self.g_blocks), 2, g_prompt_length, self.dim).uniform_(-1, 1))
        self.e_prompts = TaskPrefixes(e_prompt_layer_idx, 20 if length == "auto" else length, self.dim)
        self.keys = TaskKeys(self.dim)

    def learn(self, task: Task) -> Iterator[Phase]:
        """Train the general prefixes, and expert prefixes, key and head of the new task."""
        head = self.heads.grow(len(task.classes)).to(self.device)
        key = self.keys.grow().to(self.device)
        params = self.only([self.g_prompt, self.e_prompts.start(self.device), *key.parameters(), *head.parameters()])
        phase = Phase(self.phases[0], params, lambda batch: self.loss(task, batch, phase.done))
        yield phase
        self.requires_grad_(False)

    def loss(self, task: Task, batch: Batch, step: int) -> Tensor:
        """Return cross-entropy among the task's classes, minus the cosine of key and queries."""
        query, t = self.query(batch.x), task.id
        features = self.prompted(batch.x, by_block(self.e_prompts[t][None], self.e_prompts.blocks))
        task_loss = F.cross_entropy(self.heads[t](features), batch.y - task.first_class)
        return task_loss - self.pull * self.keys[t](query).mean() + self.guidance(task, batch, features, step)

    def guidance(self, task: Task, batch: Batch, features: Tensor, step: int) -> Tensor | float:
        """Return the terms that subclasses add to the loss."""
        return 0.0

    def features(self, x: Tensor) -> Tensor:
        """Return features (B, dim), each image with the expert prefixes of the task with the nearest key."""
        return self.prompted(x, self.e_prompts.by_block(self.keys.nearest(self.query(x))))

    def prompted(self, x: Tensor, expert: dict[int, vit.Prefix]) -> Tensor:
        """Return features (B, dim) with general and these expert prefixes."""
        return vit.features(self.backbone, x, prefixes=by_block(self.g_prompt[None], self.g_blocks) | expert)
