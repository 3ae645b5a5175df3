"""Online EWC: elastic weight consolidation (Kirkpatrick et al., PNAS 2017) with one running Fisher matrix for all past
tasks (Schwarz et al., ICML 2018).

The diagonal of the Fisher matrix after each task is the importance of each parameter: the larger, the less later tasks
may move it.
"""

from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from pearl.data.batches import Batch, Task
from pearl.methods.base import Method, Phase
from pearl.methods.regularization.penalty import Anchor
from pearl.settings.declared import Phases
from pearl.settings.derived_defaults import DerivedDefault, data_of, pretrained


def weight_in(phase: str) -> Callable[[Any], float]:
    """Return the rule for the penalty's weight in a method that trains in this phase, see `OnlineEwc`."""

    def rule(config: Any) -> float:
        if config.train.phase(phase).optimizer != "sgd":
            return 1e3 if pretrained(config) else 1e5
        return 25.0 if data_of(config) == "tinyimagenet" else 10.0

    return rule


ELambda = Annotated[float, Field(ge=0)] | Literal["auto"]
Gamma = Annotated[float, Field(ge=0, le=1)]


class OnlineEwc(Method):
    """Cross-entropy over all classes seen + e_lambda * sum of Fisher * (parameter - old parameter)^2.

    Options:
        e_lambda: weight of the penalty, without the customary 1/2. `auto` is Mammoth's with SGD, 10 for CIFAR-10 and 25
            for TinyImageNet. With Adam it is larger: the length of Adam's steps does not depend on the gradient's, so
            that a penalty matters only where it exceeds the cross-entropy, and the Fisher matrix of a well-learnt task
            is small. It is 1e5 for random initial weights (digits, two seeds: task-IL 65 % with 10, 73 with 1e3, 87
            with 1e5, 85 with 1e6) and 1e3 for pretrained ones, which larger values hardly let move (DeiT-Tiny, held-out
            images, one seed: 35 % with 100 and with 1e3, 21 with 1e4, 15 with 1e5).
        gamma: factor of the earlier tasks' Fisher matrix when a task's is added.
    """

    phases: Phases = ("ewc",)

    def __init__(
        self,
        backbone: nn.Module,
        *,
        e_lambda: Annotated[ELambda, DerivedDefault(weight_in("ewc"))] = "auto",
        gamma: Gamma = 1.0,
    ) -> None:
        super().__init__(backbone)
        self.e_lambda, self.gamma = 10.0 if e_lambda == "auto" else e_lambda, gamma
        self.anchor = Anchor()

    def learn(self, task: Task) -> Iterator[Phase]:
        """Train all parameters on the new task, then compute their importance."""
        self.heads.grow(len(task.classes)).to(self.device)
        yield Phase("ewc", self.parameters(), self.loss, capturable=True)
        self.anchor.move(dict(self.named_parameters()), self.fisher(task), self.gamma)

    def loss(self, batch: Batch) -> Tensor:
        """Return cross-entropy plus penalty."""
        return self.cross_entropy(batch) + self.penalty()

    def cross_entropy(self, batch: Batch) -> Tensor:
        """Return the cross-entropy of labels among all classes seen."""
        return F.cross_entropy(self(batch.x), batch.y)

    def penalty(self) -> Tensor:
        """Return the penalty for the current distance."""
        return self.e_lambda * self.anchor(dict(self.named_parameters()))

    def fisher(self, task: Task) -> dict[str, Tensor]:
        """Return the mean over single images of the task of p(label) * (gradient of log p(label))^2.

        The matrix is an expectation over the network's predictions; as in Mammoth, only the term of the true label is
        used. Batch statistics of one image would differ from training, so the running ones are used.
        """
        self.eval()
        parameters = {name: p for name, p in self.named_parameters() if p.requires_grad}
        total = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
        for batch in task.batches(1, seed=int(torch.randint(2**62, ()))):
            loss = self.cross_entropy(batch)
            gradients = torch.autograd.grad(loss, [*parameters.values()], materialize_grads=True, allow_unused=True)
            p = torch.exp(-loss.detach())
            for name, gradient in zip(parameters, gradients, strict=True):
                total[name].addcmul_(gradient, p * gradient)
        return {name: value / len(task) for name, value in total.items()}
