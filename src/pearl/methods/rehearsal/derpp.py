"""DER++: dark experience replay (Buzzega et al., NeurIPS 2020).

Images are stored with the network's logits at that time. In rehearsal, the network is trained on these logits and on
the labels.
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
from pearl.settings.derived_defaults import DerivedDefault, data_of

Weight = Annotated[float, Field(ge=0)]


def beta_of(config: Any) -> float:
    """Return the weight of labels in Mammoth, and works based on it, for the data."""
    return 1.0 if data_of(config) == "tinyimagenet" else 0.5


class DerPlusPlus(Method):
    """Cross-entropy + alpha * distance to stored logits + beta * cross-entropy, each on separate images.

    The paper's network and Mammoth's have logits of all classes from the start, so that an image's stored logits
    include those of future classes, which are thereby kept low. Here the head has only the classes seen: for later
    classes, an image's lowest stored logit is used instead.

    Options:
        alpha: weight of the logits; 0.1 is the authors' choice for 200 and 500 images.
        beta: weight of the labels; `auto` is the authors' for the data, 1.0 for TinyImageNet and 0.5 otherwise.
        buffer_size: stored images; 200 and 500 are usual.
        minibatch_size: rehearsed images per step, for either term.
        policy: rule for storing images, see `Memory`.
    """

    rehearsal = True
    phases = ("derpp",)

    def __init__(
        self,
        backbone: nn.Module,
        *,
        alpha: Weight = 0.1,
        beta: Annotated[Weight | Literal["auto"], DerivedDefault(beta_of)] = "auto",
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
        """Train all parameters on the new task and the memory; each batch is offered to the memory after its step."""
        self.heads.grow(len(task.classes)).to(self.device)
        self.memory.open(task, sum(self.heads.sizes()))
        remember = lambda batch: self.memory.offer(task, batch, self._logits)  # noqa: E731
        yield Phase("derpp", self.parameters(), partial(self.loss, task), after_step=remember)
        self._logits = None

    def loss(self, task: Task, batch: Batch) -> Tensor:
        """Return equation 6 of the paper over the classes seen; a term of weight 0 is skipped, including its images."""
        logits = self(batch.x)
        self._logits = logits.detach()
        loss = F.cross_entropy(logits, batch.y)
        if self.alpha and (old := self.memory.draw(self.minibatch_size, task.view)) is not None:
            loss = loss + self.alpha * distance(self(old.x), old.logits)
        if self.beta and (old := self.memory.draw(self.minibatch_size, task.view)) is not None:
            loss = loss + self.beta * F.cross_entropy(self(old.x), old.y)
        return loss

    def facts(self, task: int) -> dict[str, Any]:
        """Return records of the memory."""
        return {"memory": self.memory.facts()}


def distance(logits: Tensor, stored: Tensor | None) -> Tensor:
    """Return the mean squared distance of logits (B, classes seen) to stored ones, over all classes seen; a scalar."""
    if stored is None:
        raise ValueError("the memory stores no logits")
    return (logits - stored).square().mean()
