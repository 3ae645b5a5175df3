"""PackNet: Adding Multiple Tasks to a Single Network by Iterative Pruning (Mallya & Lazebnik, CVPR 2018).

For each task: train the free weights, prune the smallest of them, retrain the others, freeze them. The pruned ones are
free for the next task, which uses all weights of earlier tasks but cannot change them.
"""

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field
from torch import Tensor, nn

from pearl.data.batches import Task
from pearl.methods.base import Phase, own_loss
from pearl.methods.common.subnetworks import HEADS, ClassifierOptions, SubNetworks
from pearl.methods.sparse.masks import Owners, weight_names
from pearl.nn.functional import functional_call
from pearl.settings.parts import CLASSIFIERS


class PackNet(SubNetworks):
    """One network whose weights belong to tasks, and a head per task; biases and norm layers are trained in task 1
    only.

    The paper starts from ImageNet, whose weights are its first task; here the first task is the stream's own. The
    owners (an integer per weight) are not included in `size`.

    Options:
        prune: share of a task's weights pruned in each layer. Task t keeps (1 - prune) prune^(t-1) of a layer. The
            default is the paper's for several tasks. A smaller share preserves more pretrained weights, and leaves few
            for later tasks: on a DeiT-Tiny, after 10 tasks of CIFAR-100 (held-out images, one seed), task-IL is 39.5 %
            with 0.75, 33.9 with 0.5 and 25.5 with 0.25, class-IL on average over stages 14.5, 19.7 and 21.8 %.
        classifier: `heads` or `statistics`, see `common.class_statistics`.
    """

    task_identity = True
    phases = ("packnet", "packnet_retrain")

    def __init__(
        self,
        backbone: nn.Module,
        *,
        prune: Annotated[float, Field(ge=0, lt=1)] = 0.75,
        classifier: Annotated[ClassifierOptions, CLASSIFIERS] = HEADS,
    ) -> None:
        super().__init__(backbone, classifier)
        self.prune = prune
        named = dict(backbone.named_parameters())
        self.owners = Owners({name: named[name] for name in weight_names(backbone)})

    def train(self, mode: bool = True) -> "PackNet":
        """Set the mode; running statistics, like all of norm layers, are those of task 1."""
        super().train(mode)
        if len(self.heads) > 1:
            for module in self.backbone.modules():
                if hasattr(module, "running_mean"):
                    module.eval()
        return self

    @property
    def weights(self) -> dict[str, nn.Parameter]:
        """Return the parameters that have owners, by name."""
        named = dict(self.backbone.named_parameters())
        return {name: named[name] for name in self.owners.names}

    def learn_own(self, task: Task) -> Iterator[Phase]:
        """Train, prune, retrain."""
        self.requires_grad_(False)
        head = self.heads.grow(len(task.classes)).to(self.device)
        trained = [*(self.backbone.parameters() if task.id == 0 else self.weights.values()), *head.parameters()]
        loss = own_loss(self.backbone, head, task)  # weights of neither this task nor older ones are 0
        for parameter in trained:
            parameter.requires_grad_(True)

        self.owners.claim(task.id)
        yield Phase("packnet", trained, loss, **self.owners.held(self.weights, task.id))
        self.owners.prune(self.weights, task.id, self.prune)
        yield Phase("packnet_retrain", trained, loss, **self.owners.held(self.weights, task.id))
        self.requires_grad_(False)

    def task_features(self, x: Tensor, t: int) -> Tensor:
        """See `SubNetworks.task_features`."""
        return functional_call(self.backbone, self.owners.masked(self.weights, t), (x,))

    def sub_network(self, t: int) -> tuple[nn.Module, dict[str, Tensor]]:
        """See `SubNetworks.sub_network`."""
        return self.backbone, self.owners.masked(self.weights, t)
