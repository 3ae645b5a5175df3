"""S-iPrompts: S-Prompts Learning with Pre-trained Transformers (Wang, Huang and Hong, NeurIPS 2022), of images alone.

Each task trains prompts and a head by itself, and leaves a few centroids of its images' queries. An image belongs to
the task of the nearest centroid, and is asked of that task's prompts and head alone.
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

APART = 30.0  # how far the logits of other tasks lie below those of the chosen one: in a softmax they are nothing

Count = Annotated[int, Field(ge=1)]


class SiPrompts(PromptMethod):
    """A frozen ViT, and prompts, head and centroids of each task, which no other task touches.

    Defaults are the authors': SGD at 0.01 with momentum 0.9 and a cosine, weight decay 2e-4, batches of 128, 30 epochs.
    Their first task has a decay of 5e-4, here that of the others.
    They learn domains, in each of which all classes come again, and count an answer as right if its class is, in
    whatever domain: here that is `place.final`, an extra metric beside class-IL and task-IL, which says something only
    where class i of every task is the same thing. In class-IL the logits of tasks that were not chosen are moved below
    those of the chosen one; they are of its prompts, as there is one prompted pass. Centroids are of images without
    augmentation, where the authors augment.

    Options:
        prompt_length: tokens of a task's prompt, between class token and patches.
        centroids: of a task, found by k-means.
    """

    own_classes = True
    domains = True
    phases = ("sprompts",)

    def __init__(self, backbone: nn.Module, *, prompt_length: Count = 10, centroids: Count = 5) -> None:
        super().__init__(backbone)
        self.length, self.count = prompt_length, centroids
        self.prompts = TaskPrompts()  # (length, dim)
        self.centroids = TaskCentroids()

    def learn(self, task: Task) -> Iterator[Phase]:
        """Train prompts and head of the task; then find its centroids."""
        head = self.heads.grow(len(task.classes)).to(self.device)
        start = torch.empty(self.length, self.dim, device=self.device).uniform_(-1, 1) / self.dim**0.5
        prompt = self.prompts.grow(start)
        params = self.only([prompt, *head.parameters()])
        yield Phase("sprompts", params, own_loss(lambda x: self.prompted(x, prompt[None]), head, task))
        self.requires_grad_(False)
        self.centroids.grow(self.of_images(task, self.query), self.count)

    def prompted(self, x: Tensor, prompts: Tensor) -> Tensor:
        """Features (B, dim) with prompts (B or 1, length, dim)."""
        return vit.features(self.backbone, x, prompts=prompts)

    def forward(self, x: Tensor, task: int | None = None) -> Tensor:
        """See `Method.forward`: the chosen task's logits as they are, all others below them."""
        chosen = self.centroids.nearest(self.query(x))
        logits = self.heads(self.prompted(x, self.prompts.of(chosen)))
        own = tasks_of_classes(self.heads.sizes(), logits) == chosen[:, None]
        logits = others_below(logits, own)
        return logits if task is None else logits[:, self.columns(task)]


def others_below(logits: Tensor, own: Tensor) -> Tensor:
    """Logits (B, classes) with those that are not `own` (B, classes) moved together below all that are."""
    lowest = logits.masked_fill(~own, torch.inf).amin(1, keepdim=True)
    highest = logits.masked_fill(own, -torch.inf).amax(1, keepdim=True)
    return torch.where(own, logits, logits - (highest - lowest).clamp(min=0) - APART)
