"""Gates: what a task attends to among the features that all tasks share, each a vector of numbers from 0 to 1."""

from torch import Tensor


def repulsion(own: Tensor, others: list[Tensor]) -> Tensor | float:
    """Minus the L1 distance of the softmax of a task's gates (B, dim) from those of other tasks, which stay.

    A mean over images, a sum over tasks. Two softmaxes are 2 apart at most.
    """
    own = own.softmax(1)
    return -sum((other.detach().softmax(1) - own).abs().sum(1).mean() for other in others)
