"""L2P: Learning to Prompt for Continual Learning (Wang et al., CVPR 2022).

A frozen ViT looks at an image, its features are the query, and the prompts with the nearest keys stand before the
patches of a second look. Prompts, keys and the new task's head are trained; all tasks share the pool.
"""

from collections.abc import Iterator
from typing import Annotated

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from pearl.data.batches import Batch, Task
from pearl.errors import ConfigError
from pearl.methods.base import Phase
from pearl.methods.prompts.pool import PromptMethod, PromptPool
from pearl.nn import vit

Count = Annotated[int, Field(ge=1)]


class L2P(PromptMethod):
    """A frozen ViT and a pool of prompts for all tasks; each image takes those whose keys it is near to.

    Defaults are those of LAMDA-PILOT: 10 prompts of 5 tokens, 5 of them at a time, keys drawn to the queries with
    weight 0.1; Adam 1.875e-3 for 10 epochs. The paper's penalty on prompts that were chosen often is left out, as in
    the authors' configurations. They let a batch vote for one choice, at test time too; here each image has its own.

    Options:
        pool: prompts in the pool.
        length: tokens of a prompt.
        top_k: prompts that an image takes.
        pull: weight of the cosine distance between queries and chosen keys.
        prompt_readout: the head sees the mean of the prompts' last tokens, as the authors do; else what the ViT itself
            gives out.
    """

    own_classes = True
    phases: tuple[str, ...] = ("l2p",)

    def __init__(
        self,
        backbone: nn.Module,
        *,
        pool: Count = 10,
        length: Count = 5,
        top_k: Count = 5,
        pull: Annotated[float, Field(ge=0)] = 0.1,
        prompt_readout: bool = True,
    ) -> None:
        super().__init__(backbone)
        if top_k > pool:
            raise ConfigError(f"method.top_k={top_k}: the pool has {pool} prompts; lower it, or raise method.pool")
        self.pool = PromptPool(pool, length, self.dim, top_k)
        self.pull, self.prompt_readout = pull, prompt_readout and length > 0

    def learn(self, task: Task) -> Iterator[Phase]:
        """Train the pool and the new head; earlier heads stay as they are."""
        self.requires_grad_(False)
        head = self.heads.grow(len(task.classes)).to(self.device)
        self.pool.requires_grad_(True)

        def loss(batch: Batch) -> Tensor:
            prompts, cosines = self.pool(self.query(batch.x))
            logits = head(self.read(batch.x, prompts))
            distance = (1 - cosines).sum(1).mean()
            return F.cross_entropy(logits, batch.y - task.first_class) + self.pull * distance

        yield Phase(self.phases[0], [*self.pool.parameters(), *head.parameters()], loss)
        self.requires_grad_(False)

    def features(self, x: Tensor) -> Tensor:
        """Each image with its own prompts."""
        return self.read(x, self.pool(self.query(x))[0])

    def read(self, x: Tensor, prompts: Tensor) -> Tensor:
        """What the head sees of the prompted ViT: (B, dim)."""
        own, prompted = vit.tokens(self.backbone, x, prompts=prompts)
        return prompted.mean(1) if self.prompt_readout else vit.pool(self.backbone, own)
