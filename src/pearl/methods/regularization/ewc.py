"""Online EWC: elastic weight consolidation (Kirkpatrick et al., PNAS 2017) with one running Fisher matrix for all past
tasks (Schwarz et al., ICML 2018).

After each task, the diagonal of the Fisher matrix tells how much each parameter mattered. Later tasks may move it
less the more it did.
"""

from collections.abc import Iterator
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from pearl.data.batches import Batch, Task
from pearl.methods.base import Method, Phase
from pearl.methods.regularization.penalty import Anchor


class OnlineEwc(Method):
    """Cross-entropy over all classes seen + e_lambda * sum of Fisher * (parameter - old parameter)^2.

    Options:
        e_lambda: weight of the penalty, without the customary 1/2; Mammoth's 10 for CIFAR-10, 25 for TinyImageNet.
        gamma: what is left of the earlier tasks' Fisher matrix when a task's is added.
    """

    phases = ("ewc",)

    def __init__(
        self,
        backbone: nn.Module,
        *,
        e_lambda: Annotated[float, Field(ge=0)] = 10.0,
        gamma: Annotated[float, Field(ge=0, le=1)] = 1.0,
    ) -> None:
        super().__init__(backbone)
        self.e_lambda, self.gamma = e_lambda, gamma
        self.anchor = Anchor()

    def learn(self, task: Task) -> Iterator[Phase]:
        """Train everything on the new task, then measure what mattered."""
        self.heads.grow(len(task.classes)).to(self.device)
        yield Phase("ewc", self.parameters(), self.loss, steady=True)
        self.anchor.move(dict(self.named_parameters()), self.fisher(task), self.gamma)

    def loss(self, batch: Batch) -> Tensor:
        """Cross-entropy and penalty."""
        return F.cross_entropy(self(batch.x), batch.y) + self.e_lambda * self.anchor(dict(self.named_parameters()))

    def fisher(self, task: Task) -> dict[str, Tensor]:
        """Mean over the task's images, each on its own, of p(label) * (gradient of log p(label))^2.

        The expectation over the network's own predictions that defines the matrix, cut to the term of the true label,
        as in Mammoth. Batch statistics of one image would not be those of training, so the running ones are used.
        """
        self.eval()
        parameters = {name: p for name, p in self.named_parameters() if p.requires_grad}
        total = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
        for batch in task.batches(1, seed=int(torch.randint(2**62, ()))):
            loss = F.cross_entropy(self(batch.x), batch.y)
            gradients = torch.autograd.grad(loss, [*parameters.values()], materialize_grads=True, allow_unused=True)
            p = torch.exp(-loss.detach())
            for name, gradient in zip(parameters, gradients, strict=True):
                total[name].addcmul_(gradient, p * gradient)
        return {name: value / len(task) for name, value in total.items()}
