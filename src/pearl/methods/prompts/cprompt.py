"""CPrompt: Consistent Prompting for Rehearsal-Free Continual Learning (Gao, Cen and Chang, CVPR 2024).

Prompts and head of each task are frozen after it. During a task, its head is also trained with the prompts of earlier
tasks, so that a wrong choice of prompts does little harm; its prompts are trained to keep earlier heads unconfident.
"""

from collections.abc import Iterator
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from pearl.data.batches import Batch, Task
from pearl.methods.base import Phase
from pearl.methods.common.draws import ImageDraws
from pearl.methods.prompts.coda_prompt import orthonormal
from pearl.methods.prompts.dualprompt import NotNegative, on_cifar
from pearl.methods.prompts.identity import tasks_of_classes
from pearl.methods.prompts.pool import PromptMethod, TaskPrompts
from pearl.methods.prompts.prefixes import check_blocks
from pearl.nn import vit
from pearl.nn.task_modules import CosineHeads

Count = Annotated[int, Field(ge=1)]
Blocks = Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)]


class CPrompt(PromptMethod):
    """A frozen ViT, with prompts, a head and a key per class for every task.

    Defaults are the authors': SGD at 0.01 with momentum 0.9 and a cosine, weight decay 5e-4, batches of 16; 10 epochs
    on ImageNet-R, 18 on CIFAR-100. Queries and features are taken before the last norm layer. A new class's key is
    initialised orthogonal to existing ones, where possible; earlier keys do not decay, as they are not trained.

    Options:
        length: prompts inserted before each of the blocks.
        blocks: blocks before which prompts are inserted, from 0; they stay in the sequence.
        tau: temperature that flattens the output of an earlier head that is too confident on a new task's image; `auto`
            is 1.2 on CIFAR-100 and 1.15 elsewhere.
        margin: margin by which the new head must be more confident; `auto` is 0 on CIFAR-100 and 0.1 elsewhere.
        alpha: weight of this consistency of classifiers.
    """

    task_local_loss = True
    may_not_matter = ("margin",)  # if no image is so near to it
    phases = ("cprompt",)

    def __init__(
        self,
        backbone: nn.Module,
        *,
        length: Count = 50,
        blocks: Blocks = (0, 5),
        tau: Annotated[Annotated[float, Field(ge=1)] | Literal["auto"], on_cifar(1.2, 1.15)] = "auto",
        margin: Annotated[NotNegative | Literal["auto"], on_cifar(0.0, 0.1)] = "auto",
        alpha: NotNegative = 1.0,
    ) -> None:
        super().__init__(backbone)
        check_blocks(backbone, blocks, "blocks")
        self.length, self.blocks, self.alpha = length, blocks, alpha
        self.tau, self.margin = 1.15 if tau == "auto" else tau, 0.1 if margin == "auto" else margin
        self.prompts = TaskPrompts()  # (blocks, length, dim)
        self.keys = CosineHeads(self.dim, scale=1.0)

    def learn(self, task: Task) -> Iterator[Phase]:
        """Train prompts, head and keys of the task, and an auxiliary head that is discarded."""
        t, classes = task.id, len(task.classes)
        head, passing = (module.to(self.device) for module in (self.heads.grow(classes), self.heads.block(classes)))
        for new in (head, passing):
            nn.init.kaiming_uniform_(new.weight, nonlinearity="linear")
            nn.init.zeros_(new.bias)
        old = torch.cat([key.weight.detach() for key in self.keys]) if t else torch.empty(0, self.dim)
        keys = self.keys.grow(classes).to(self.device)
        keys.weight.data = orthonormal(classes, old).to(self.device)
        start = torch.empty(len(self.blocks), self.length, self.dim, device=self.device).uniform_(-1, 1) / self.dim**0.5
        prompt = self.prompts.grow(self.prompts[t - 1] if t else start)
        params = [*self.only([prompt, *head.parameters(), *keys.parameters()]), *passing.parameters()]
        draws = ImageDraws(task)

        def loss(batch: Batch) -> Tensor:
            labels = batch.y - task.first_class
            features = self.read(batch.x, prompt[None])
            total = F.cross_entropy(passing(features), labels)
            if t:
                total = total + self.alpha * self.consistency(features)
            drawn = self.read(batch.x, self.prompts.of(draws.below(t + 1, phase.done, batch.rows)))
            identity = F.cross_entropy(self.keys(self.query(batch.x)), batch.y)
            return total + identity + F.cross_entropy(head(drawn), labels)

        phase = Phase("cprompt", params, loss, extra=passing)
        yield phase
        self.requires_grad_(False)

    def consistency(self, features: Tensor) -> Tensor:
        """Return the distance of earlier heads from a flatter output where they are more confident than the newest
        head.

        The gradient of a logit is p - softmax(z / T), which is zero if T is 1.
        """
        *earlier, newest = [head(features) for head in self.heads]
        total = features.new_zeros(())
        for logits in earlier:
            surer = newest.amax(1, keepdim=True) > logits.amax(1, keepdim=True) + self.margin
            flatter = logits.detach() / torch.where(surer, 1.0, self.tau)
            total = total + F.cross_entropy(logits, flatter.softmax(1))
        return total / len(earlier)

    def query(self, x: Tensor) -> Tensor:
        """Return features (B, dim) of the unmodified ViT, before the last norm."""
        with torch.no_grad():
            return vit.unnormalised(self.backbone, x)

    def features(self, x: Tensor) -> Tensor:
        """Return features (B, dim), each image with the prompts of the task whose class key is nearest to its query."""
        nearest = self.keys(self.query(x)).argmax(1)
        return self.read(x, self.prompts.of(tasks_of_classes(self.keys.sizes(), nearest)[nearest]))

    def read(self, x: Tensor, prompts: Tensor) -> Tensor:
        """Return features (B, dim) with prompts (B or 1, blocks, length, dim)."""
        return vit.unnormalised(self.backbone, x, prompts=dict(zip(self.blocks, prompts.unbind(1), strict=True)))
