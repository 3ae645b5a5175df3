"""Joint training: at every stage a network is trained anew on the data of all tasks so far, as a reference."""

import copy
from collections.abc import Iterator

import torch.nn.functional as F
from torch import Tensor, nn

from pearl.data.batches import Batch, Task
from pearl.methods.base import Method, Phase


class Joint(Method):
    """Sees all data at once, which no continual learner may; each stage starts from the starting network again."""

    oracle = True
    shown_again = True
    phases = ("joint",)

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__(backbone.requires_grad_(False))
        self.network = copy.deepcopy(backbone).requires_grad_(True)

    def learn(self, task: Task) -> Iterator[Phase]:
        """Train network and heads from the start on everything."""
        self.heads.grow(len(task.classes)).to(self.device)
        self.network.load_state_dict(self.backbone.state_dict())
        for head in self.heads:
            if head.out_features:  # else it is of a task that showed known classes alone
                head.reset_parameters()
        yield Phase("joint", [*self.network.parameters(), *self.heads.parameters()], self.loss, steady=True)

    def loss(self, batch: Batch) -> Tensor:
        """Cross-entropy over all classes seen so far."""
        return F.cross_entropy(self(batch.x), batch.y)

    def features(self, x: Tensor) -> Tensor:
        """Features (B, dim) of the network that is trained, not of the starting one."""
        return self.network(x)

    def size(self) -> int:
        """Network and heads; the starting point is kept for later stages only."""
        return super().size() - sum(parameter.numel() for parameter in self.backbone.parameters())
