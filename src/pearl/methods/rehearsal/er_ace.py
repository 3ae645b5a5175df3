"""ER-ACE: experience replay with asymmetric cross-entropy (Caccia et al., ICLR 2022).

To keep new classes from displacing old ones, the loss of new images covers only their batch's classes; only remembered
images separate old classes from new ones.
"""

from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from pearl.data.batches import Batch, Task
from pearl.methods.common.memory import Policy
from pearl.methods.rehearsal.er import Er, Images
from pearl.nn.task_modules import CosineHeads


class ErAce(Er):
    """ER with two losses; the first task has no rehearsal, as in Mammoth, whose head has all classes (see `Er`).

    Options:
        buffer_size: stored images; 200 and 500 are usual.
        minibatch_size: rehearsed images per step.
        policy: rule for storing images, see `Memory`.
        head: `linear`, as in the other rehearsal methods; or `cosine`, with the scale 10, as in the authors' code.
    """

    phases = ("er_ace",)

    def __init__(
        self,
        backbone: nn.Module,
        *,
        buffer_size: Images = 200,
        minibatch_size: Annotated[int, Field(ge=1, strict=True)] = 32,
        policy: Policy = "reservoir",
        head: Literal["linear", "cosine"] = "linear",
    ) -> None:
        super().__init__(backbone, buffer_size=buffer_size, minibatch_size=minibatch_size, policy=policy)
        if head == "cosine":
            self.heads = CosineHeads(self.heads.dim, scale=10.0)

    def loss(self, task: Task, batch: Batch) -> Tensor:
        """Return the cross-entropy of new images over their batch's classes, plus that of remembered ones over all
        classes seen.
        """
        logits = self(batch.x)
        if task.id == 0:
            return F.cross_entropy(logits, batch.y)
        loss = F.cross_entropy(among(logits, batch.y), batch.y)
        if (old := self.memory.draw(self.minibatch_size, task.view)) is not None:
            loss = loss + F.cross_entropy(self(old.x), old.y)
        return loss


def among(logits: Tensor, labels: Tensor) -> Tensor:
    """Return logits (B, classes) with -inf for classes that are not among the labels (B,)."""
    absent = torch.ones(logits.shape[1], dtype=torch.bool, device=logits.device)
    absent[labels] = False
    return logits.masked_fill(absent, -torch.inf)
