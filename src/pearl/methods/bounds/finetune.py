"""Sequential fine-tuning: one network and a growing head, cross-entropy over all classes seen."""

from collections.abc import Iterator

import torch.nn.functional as F
from torch import Tensor

from pearl.data.batches import Batch, Task
from pearl.methods.base import Method, Phase


class Finetune(Method):
    """The lower bound: each task overwrites the weights of earlier ones."""

    allows_repeated_classes = True
    phases = ("finetune",)

    def learn(self, task: Task) -> Iterator[Phase]:
        """Train all parameters on the new task."""
        self.heads.grow(len(task.classes)).to(self.device)
        yield Phase("finetune", self.parameters(), self.loss, capturable=True)

    def loss(self, batch: Batch) -> Tensor:
        """Return the cross-entropy over all classes seen so far."""
        return F.cross_entropy(self(batch.x), batch.y)
