"""Gates: task-specific weights from 0 to 1 of the features that all tasks share."""

from torch import Tensor


def repulsion(gate: Tensor, others: list[Tensor]) -> Tensor | float:
    """Return minus the L1 distance of the softmax of a task's gates (B, dim) from those of other tasks, which get no
    gradient.

    It is averaged over images and summed over tasks. The distance of two softmaxes is at most 2.
    """
    gate = gate.softmax(1)
    return -sum((other.detach().softmax(1) - gate).abs().sum(1).mean() for other in others)
