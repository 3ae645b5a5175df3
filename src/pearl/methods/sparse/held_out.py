"""Choices by images held out from a task's training images."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from pearl.data.batches import Batch, Task
from pearl.nn.task_modules import TaskTensors


def held_out(task: Task, share: float) -> tuple[Task, Task]:
    """Split a task's images into those for training and for choices; with one image per class, both are equal."""
    kept, held = task.hold_out(share)
    return (kept, held) if len(held) else (task, task)


@torch.no_grad()
def accuracy(answer: Callable[[Tensor], Tensor], part: Task, batch: int = 256) -> float:
    """Return the percentage of images, not augmented, that logits (B, k) of a task's own classes predict correctly."""
    right = 0
    for x, y, _ in part.in_order(batch):
        right += int((answer(x).argmax(1) == y - part.first_class).sum())
    return 100 * right / len(part)


class Best(nn.Module):
    """The best of a phase's epochs; `extra` of the phase, since an earlier epoch must be stored in checkpoints."""

    def __init__(self, network: nn.Module, score: Callable[[], float], images: int) -> None:
        """`score` evaluates the network; an epoch has this many `images`."""
        super().__init__()
        self._network, self._score, self._images = (network,), score, images  # a tuple, so that it is not a submodule
        self.tensors = TaskTensors(buffers=True)
        for name, value in network.state_dict().items():
            self.tensors.add(name, value)
        self.seen: Tensor
        self.score: Tensor
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("score", torch.tensor(-1.0, dtype=torch.float64))

    def after_step(self, batch: Batch) -> None:
        """Count images; evaluate at the end of an epoch."""
        self.seen += len(batch.y)
        if int(self.seen) % self._images == 0:
            self.look()

    def look(self) -> None:
        """Store the network if it is the best so far."""
        (score, (network,)) = self._score(), self._network
        if score > self.score:
            self.score.fill_(score)
            for name, value in network.state_dict().items():
                self.tensors[name].copy_(value)

    def restore(self) -> float:
        """Restore the best network, and return its score."""
        if self.score < 0:  # no epoch was completed
            self.look()
        (network,) = self._network
        network.load_state_dict({name: self.tensors[name] for name in network.state_dict()})
        return float(self.score)
