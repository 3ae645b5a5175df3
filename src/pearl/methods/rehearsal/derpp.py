"""DER++: dark experience replay (Buzzega et al., NeurIPS 2020).

Images are remembered with the logits that the network gave them when it saw them. Shown again, the network is held to
these logits, and to the labels.
"""

from collections.abc import Iterator
from functools import partial
from typing import Annotated, Any, Literal

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from pearl.data.batches import Batch, Task
from pearl.methods.base import Method, Phase
from pearl.methods.common.memory import Memory, Policy
from pearl.methods.rehearsal.er import Images
from pearl.settings.follow import Follows, data_of

Weight = Annotated[float, Field(ge=0)]


def beta_of(config: Any) -> float:
    """The weight of labels that Mammoth, and who built on it, have for the data."""
    return 1.0 if data_of(config) == "tinyimagenet" else 0.5


class DerPlusPlus(Method):
    """Cross-entropy + alpha * distance to stored logits + beta * cross-entropy, each on images of its own.

    The paper's network and Mammoth's have the logits of all classes from the start, so that an image is remembered with
    those of classes that are still to come, and these are held down. Here the head has the classes seen: a class that
    came after an image was remembered has that image's lowest known logit in their place.

    Options:
        alpha: weight of the logits; 0.1 is the authors' choice for 200 and 500 images.
        beta: weight of the labels; `auto` is the authors' for the data, 1.0 for TinyImageNet and 0.5 else.
        buffer_size: images kept; 200 and 500 are usual.
        minibatch_size: images shown again in each step, for either term.
        policy: which images are kept, see `Memory`.
    """

    rehearsal = True
    phases = ("derpp",)

    def __init__(
        self,
        backbone: nn.Module,
        *,
        alpha: Weight = 0.1,
        beta: Annotated[Weight | Literal["auto"], Follows(beta_of)] = "auto",
        buffer_size: Images = 200,
        minibatch_size: Annotated[int, Field(ge=1, strict=True)] = 32,
        policy: Policy = "reservoir",
    ) -> None:
        super().__init__(backbone)
        self.alpha, self.beta = alpha, 0.5 if beta == "auto" else beta
        self.minibatch_size = minibatch_size
        self.memory = Memory(buffer_size, policy, logits=True)
        self._logits: Tensor | None = None  # of the step's new images, from its loss to its end

    def learn(self, task: Task) -> Iterator[Phase]:
        """Train everything on the new task and the memory; each batch is offered to the memory after its step."""
        self.heads.grow(len(task.classes)).to(self.device)
        self.memory.open(task, sum(self.heads.sizes()))
        remember = lambda batch: self.memory.offer(task, batch, self._logits)  # noqa: E731
        yield Phase("derpp", self.parameters(), partial(self.loss, task), after_step=remember)
        self._logits = None

    def loss(self, task: Task, batch: Batch) -> Tensor:
        """Equation 6 of the paper, over the classes seen; a term of weight 0 is left out, its images too."""
        logits = self(batch.x)
        self._logits = logits.detach()
        loss = F.cross_entropy(logits, batch.y)
        if self.alpha and (old := self.memory.draw(self.minibatch_size, task.view)) is not None:
            loss = loss + self.alpha * distance(self(old.x), old.logits)
        if self.beta and (old := self.memory.draw(self.minibatch_size, task.view)) is not None:
            loss = loss + self.beta * F.cross_entropy(self(old.x), old.y)
        return loss

    def facts(self, task: int) -> dict[str, Any]:
        """What the memory holds."""
        return {"memory": self.memory.facts()}


def distance(logits: Tensor, stored: Tensor | None) -> Tensor:
    """Mean squared distance of logits (B, classes seen) to stored ones, over all classes seen; a scalar."""
    if stored is None:
        raise ValueError("the memory keeps no logits")
    return (logits - stored).square().mean()
