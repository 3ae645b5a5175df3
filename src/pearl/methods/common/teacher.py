"""Teacher networks: a frozen copy, and the distillation loss."""

import copy
from typing import TypeVar

import torch.nn.functional as F
from torch import Tensor, nn

Network = TypeVar("Network", bound=nn.Module)


def frozen(network: Network) -> Network:
    """Return a frozen copy in evaluation mode.

    As a local variable of `learn` it teaches during one task and need not be stored: a restart creates it again from
    the state before the task.
    """
    return copy.deepcopy(network).eval().requires_grad_(False)


def distillation(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """Return the KL divergence of the student's softened probabilities (B, classes) from the teacher's, averaged over
    the batch.
    """
    student, teacher = (F.log_softmax(logits / temperature, dim=1) for logits in (student, teacher))
    return F.kl_div(student, teacher, reduction="batchmean", log_target=True)
