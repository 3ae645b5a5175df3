"""L2P: Learning to Prompt for Continual Learning (Wang et al., CVPR 2022).

The features of a frozen ViT are an image's query; the prompts with the nearest keys are inserted before the patches in
a second pass. Prompts, keys and the new task's head are trained; all tasks share the pool.
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
    """A frozen ViT and a pool of prompts for all tasks; each image uses those with the nearest keys.

    Defaults are those of LAMDA-PILOT: 10 prompts of 5 tokens, 5 of them per image, keys trained towards the queries
    with weight 0.1; Adam 1.875e-3 for 10 epochs. The paper's penalty on frequently chosen prompts is left out, as in
    the authors' configurations. There a batch votes for one choice, at test time too; here each image chooses
    separately.

    Options:
        pool: prompts in the pool.
        length: tokens of a prompt.
        top_k: prompts per image.
        pull: weight of the cosine distance between queries and chosen keys.
        prompt_readout: the input of the head is the mean of the prompts' last tokens, as in the authors' code;
            otherwise the ViT's own output.
    """

    task_local_loss = True
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
        """Train the pool and the new head; earlier heads are unchanged."""
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
        """Return features (B, dim), each image with its own prompts."""
        return self.read(x, self.pool(self.query(x))[0])

    def read(self, x: Tensor, prompts: Tensor) -> Tensor:
        """Return the input of the head from the prompted ViT: (B, dim)."""
        bare, prompted = vit.tokens(self.backbone, x, prompts=prompts)
        return prompted.mean(1) if self.prompt_readout else vit.pool(self.backbone, bare)
