"""Joint training, a reference: each stage trains a new network on the data of all tasks so far."""

import copy
from collections.abc import Iterator

import torch.nn.functional as F
from torch import Tensor, nn

from pearl.data.batches import Batch, Task
from pearl.methods.base import Method, Phase


class Joint(Method):
    """Trains on all data at once, which a continual learner may not; each stage restarts from the initial network."""

    oracle = True
    allows_repeated_classes = True
    phases = ("joint",)

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__(backbone.requires_grad_(False))
        self.network = copy.deepcopy(backbone).requires_grad_(True)

    def learn(self, task: Task) -> Iterator[Phase]:
        """Train network and heads from their initial values on all data."""
        self.heads.grow(len(task.classes)).to(self.device)
        self.network.load_state_dict(self.backbone.state_dict())
        for head in self.heads:
            if head.out_features:  # otherwise it belongs to a task that has only known classes
                head.reset_parameters()
        yield Phase("joint", [*self.network.parameters(), *self.heads.parameters()], self.loss, capturable=True)

    def loss(self, batch: Batch) -> Tensor:
        """Return the cross-entropy over all classes seen so far."""
        return F.cross_entropy(self(batch.x), batch.y)

    def features(self, x: Tensor) -> Tensor:
        """Return features (B, dim) of the trained network, not the initial one."""
        return self.network(x)

    def size(self) -> int:
        """Count network and heads; the initial network is stored for later stages only."""
        return super().size() - sum(parameter.numel() for parameter in self.backbone.parameters())
