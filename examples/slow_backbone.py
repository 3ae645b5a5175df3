# slow_backbone.py
"""Your own method: fine-tuning with a backbone that learns more slowly than its head.

pearl run digits --method slow_backbone.py:SlowBackbone
"""

from collections.abc import Iterator

import torch.nn.functional as F
from torch import Tensor, nn

from pearl.data import Batch, Task
from pearl.methods import Method, Phase, PhaseSpec


class SlowBackbone(Method):
    """Cross-entropy over all classes seen; after the first task the backbone takes only a share of each step."""

    phases = (PhaseSpec("first", "first"), PhaseSpec("later", "later"))  # the tasks of each phase

    def __init__(self, backbone: nn.Module, *, share: float = 0.1) -> None:
        super().__init__(backbone)
        self.share = share

    def learn(self, task: Task) -> Iterator[Phase]:
        """Train all parameters; `project` reverts the rest of the backbone's step."""
        first = len(self.heads) == 0
        self.heads.grow(len(task.classes)).to(self.device)
        body = list(self.backbone.parameters())

        def slower(before: list[Tensor]) -> None:
            for parameter, old in zip(body, before[: len(body)], strict=True):  # in the order of the phase's params
                parameter.data.copy_(old.lerp(parameter.data, self.share))

        params = [*body, *self.heads.parameters()]
        yield Phase("first", params, self.loss) if first else Phase("later", params, self.loss, project=slower)

    def loss(self, batch: Batch) -> Tensor:
        """Return the cross-entropy, a mean over the images."""
        return F.cross_entropy(self(batch.x), batch.y)
