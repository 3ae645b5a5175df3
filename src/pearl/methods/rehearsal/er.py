"""ER: experience replay (Robins, 1995; Riemer et al., ICLR 2019).

Every batch is joined by images of a memory, drawn and augmented anew.
"""

from collections.abc import Iterator
from functools import partial
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from pearl.data.batches import Batch, Task
from pearl.methods.base import Method, Phase
from pearl.methods.common.memory import Memory, Policy

Images = Annotated[int, Field(ge=0, strict=True)]


class Er(Method):
    """Cross-entropy over all classes seen, on new and remembered images in one pass.

    Mammoth's, but for the head: there it has all classes of the stream from the start, and those still to come are
    pushed down before they are seen; here it grows.

    Options:
        buffer_size: images kept; 200 and 500 are usual.
        minibatch_size: images shown again in each step.
        policy: which images are kept, see `Memory`.
    """

    shown_again = True
    rehearsal = True
    phases = ("er",)

    def __init__(
        self,
        backbone: nn.Module,
        *,
        buffer_size: Images = 200,
        minibatch_size: Annotated[int, Field(ge=1, strict=True)] = 32,
        policy: Policy = "reservoir",
    ) -> None:
        super().__init__(backbone)
        self.minibatch_size = minibatch_size
        self.memory = Memory(buffer_size, policy)

    def learn(self, task: Task) -> Iterator[Phase]:
        """Train everything on the new task and the memory; each batch is offered to the memory after its step."""
        self.heads.grow(len(task.classes)).to(self.device)
        self.memory.open(task, sum(self.heads.sizes()))
        remember = partial(self.memory.offer, task)
        yield Phase(self.phases[0], self.parameters(), partial(self.loss, task), after_step=remember)

    def loss(self, task: Task, batch: Batch) -> Tensor:
        """One cross-entropy over both kinds of images."""
        x, y = batch.x, batch.y
        if (old := self.memory.draw(self.minibatch_size, task.view)) is not None:
            x, y = torch.cat([x, old.x]), torch.cat([y, old.y])
        return F.cross_entropy(self(x), y)

    def facts(self, task: int) -> dict[str, Any]:
        """What the memory holds."""
        return {"memory": self.memory.facts()}
