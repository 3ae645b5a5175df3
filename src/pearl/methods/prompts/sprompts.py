"""S-iPrompts: S-Prompts Learning with Pre-trained Transformers (Wang, Huang and Hong, NeurIPS 2022), image version.

Each task trains its own prompts and head, and stores a few centroids of its images' queries. The nearest centroid
determines an image's task, whose prompts and head make the prediction.
"""

from collections.abc import Iterator
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from pearl.data.batches import Task
from pearl.methods.base import Phase, own_loss
from pearl.methods.prompts.identity import TaskCentroids, tasks_of_classes
from pearl.methods.prompts.pool import PromptMethod, TaskPrompts
from pearl.nn import vit

APART = 30.0  # distance of other tasks' logits below the chosen one's: their probability is 0 in a softmax

Count = Annotated[int, Field(ge=1)]


class SiPrompts(PromptMethod):
    """A frozen ViT, with prompts, head and centroids per task, which other tasks do not change.

    Defaults are the authors': SGD at 0.01 with momentum 0.9 and a cosine, weight decay 2e-4, batches of 128, 30 epochs.
    Their first task has a decay of 5e-4, here 2e-4 as well. Their tasks are domains with the same classes, and a
    prediction is correct if its class is, in any domain: here that is `place.final`, an extra metric in addition to
    class-IL and task-IL, meaningful only if class i is the same in every task. In class-IL the logits of other tasks,
    computed with the chosen task's prompts in one pass, are moved below those of the chosen one. Centroids are of
    images without augmentation, while the authors augment.

    Options:
        prompt_length: tokens of a task's prompt, between class token and patches.
        centroids: centroids per task, by k-means.
    """

    task_local_loss = True
    domains = True
    phases = ("sprompts",)

    def __init__(self, backbone: nn.Module, *, prompt_length: Count = 10, centroids: Count = 5) -> None:
        super().__init__(backbone)
        self.length, self.count = prompt_length, centroids
        self.prompts = TaskPrompts()  # (length, dim)
        self.centroids = TaskCentroids()

    def learn(self, task: Task) -> Iterator[Phase]:
        """Train prompts and head of the task; then compute its centroids."""
        head = self.heads.grow(len(task.classes)).to(self.device)
        start = torch.empty(self.length, self.dim, device=self.device).uniform_(-1, 1) / self.dim**0.5
        prompt = self.prompts.grow(start)
        params = self.only([prompt, *head.parameters()])
        yield Phase("sprompts", params, own_loss(lambda x: self.prompted(x, prompt[None]), head, task))
        self.requires_grad_(False)
        self.centroids.grow(self.of_images(task, self.query), self.count)

    def prompted(self, x: Tensor, prompts: Tensor) -> Tensor:
        """Return features (B, dim) with prompts (B or 1, length, dim)."""
        return vit.features(self.backbone, x, prompts=prompts)

    def forward(self, x: Tensor, task: int | None = None) -> Tensor:
        """See `Method.forward`: the chosen task's logits are unchanged, all others are below them."""
        chosen = self.centroids.nearest(self.query(x))
        logits = self.heads(self.prompted(x, self.prompts.of(chosen)))
        in_task = tasks_of_classes(self.heads.sizes(), logits) == chosen[:, None]
        logits = others_below(logits, in_task)
        return logits if task is None else logits[:, self.columns(task)]


def others_below(logits: Tensor, in_task: Tensor) -> Tensor:
    """Shift the logits (B, classes) outside `in_task` (B, classes) together below all that are inside."""
    lowest = logits.masked_fill(~in_task, torch.inf).amin(1, keepdim=True)
    highest = logits.masked_fill(in_task, -torch.inf).amax(1, keepdim=True)
    return torch.where(in_task, logits, logits - (highest - lowest).clamp(min=0) - APART)
