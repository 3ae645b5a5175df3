"""Choices by images that are held out of a task's own training part."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from pearl.data.batches import Batch, Task
from pearl.nn.growing import TaskTensors


def held_out(task: Task, share: float) -> tuple[Task, Task]:
    """A task's images for training and those for choices; with a single image a class, the same are both."""
    kept, held = task.hold_out(share)
    return (kept, held) if len(held) else (task, task)


@torch.no_grad()
def accuracy(answer: Callable[[Tensor], Tensor], part: Task, batch: int = 256) -> float:
    """Percent of images, not augmented, that are right, by logits (B, k) of a task's own classes."""
    right = 0
    for x, y, _ in part.in_order(batch):
        right += int((answer(x).argmax(1) == y - part.first_class).sum())
    return 100 * right / len(part)


class Best(nn.Module):
    """The best of a phase's epochs; `extra` of the phase, as an earlier epoch must survive a restart."""

    def __init__(self, network: nn.Module, score: Callable[[], float], images: int) -> None:
        """`score` says how good the network is now; an epoch has so many `images`."""
        super().__init__()
        self._network, self._score, self._images = (network,), score, images  # a tuple: not a part of this
        self.tensors = TaskTensors(buffers=True)
        for name, value in network.state_dict().items():
            self.tensors.add(name, value)
        self.seen: Tensor
        self.score: Tensor
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("score", torch.tensor(-1.0, dtype=torch.float64))

    def after_step(self, batch: Batch) -> None:
        """Count images; at the end of an epoch, look."""
        self.seen += len(batch.y)
        if int(self.seen) % self._images == 0:
            self.look()

    def look(self) -> None:
        """Keep the network as it is now if none was better."""
        (score, (network,)) = self._score(), self._network
        if score > self.score:
            self.score.fill_(score)
            for name, value in network.state_dict().items():
                self.tensors[name].copy_(value)

    def restore(self) -> float:
        """Make the network again what it was at its best, and say how good that is."""
        if self.score < 0:  # not a single epoch was whole
            self.look()
        (network,) = self._network
        network.load_state_dict({name: self.tensors[name] for name in network.state_dict()})
        return float(self.score)
