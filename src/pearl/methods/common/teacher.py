"""Networks that teach: a frozen copy, and the loss of distillation."""

import copy
from typing import TypeVar

import torch.nn.functional as F
from torch import Tensor, nn

Network = TypeVar("Network", bound=nn.Module)


def frozen(network: Network) -> Network:
    """A copy in evaluation mode that does not learn.

    Made in `learn` and kept in a local variable it teaches during one task, and needs no place in the state_dict: a
    restart makes it again from the state before the task.
    """
    return copy.deepcopy(network).eval().requires_grad_(False)


def distillation(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """KL divergence of the student's softened probabilities (B, classes) from the teacher's, mean over the batch."""
    student, teacher = (F.log_softmax(logits / temperature, dim=1) for logits in (student, teacher))
    return F.kl_div(student, teacher, reduction="batchmean", log_target=True)
