"""ER: experience replay (Robins, 1995; Riemer et al., ICLR 2019).

Every batch is extended by images of a memory, drawn and augmented in each step.
"""

from collections.abc import Iterator
from functools import partial
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from pearl.data.batches import Batch, Task
from pearl.methods.base import Method, Phase
from pearl.methods.common.memory import Memory, Policy

Images = Annotated[int, Field(ge=0, strict=True)]


class Er(Method):
    """Cross-entropy over all classes seen, on new and remembered images.

    As in Mammoth, except for the head: there it has all classes of the stream from the start, so that future classes
    are suppressed before they are seen; here it grows.

    Options:
        buffer_size: stored images; 200 and 500 are usual.
        minibatch_size: rehearsed images per step.
        policy: rule for storing images, see `Memory`.
        passes: `together` - new and remembered images pass the network in one batch; `separate` - in two, as in DER++,
            TAMiL, AGILE, OCDNet and TriRE. The loss is the same mean over all images, so the two differ only in batch
            statistics: separate batches of different classes are each normalised by their own.
    """

    allows_repeated_classes = True
    rehearsal = True
    phases = ("er",)

    def __init__(
        self,
        backbone: nn.Module,
        *,
        buffer_size: Images = 200,
        minibatch_size: Annotated[int, Field(ge=1, strict=True)] = 32,
        policy: Policy = "reservoir",
        passes: Literal["together", "separate"] = "together",
    ) -> None:
        super().__init__(backbone)
        self.minibatch_size, self.passes = minibatch_size, passes
        self.memory = Memory(buffer_size, policy)

    def learn(self, task: Task) -> Iterator[Phase]:
        """Train all parameters on the new task and the memory; each batch is offered to the memory after its step."""
        self.heads.grow(len(task.classes)).to(self.device)
        self.memory.open(task, sum(self.heads.sizes()))
        remember = partial(self.memory.offer, task)
        yield Phase(self.phases[0], self.parameters(), partial(self.loss, task), after_step=remember)

    def loss(self, task: Task, batch: Batch) -> Tensor:
        """Return the mean cross-entropy of both kinds of images."""
        parts = [(batch.x, batch.y)]
        if (old := self.memory.draw(self.minibatch_size, task.view)) is not None:
            parts.append((old.x, old.y))
        if self.passes == "together":
            parts = [(torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts]))]
        logits = torch.cat([self(x) for x, _ in parts])
        return F.cross_entropy(logits, torch.cat([y for _, y in parts]))

    def facts(self, task: int) -> dict[str, Any]:
        """Return records of the memory."""
        return {"memory": self.memory.facts()}
