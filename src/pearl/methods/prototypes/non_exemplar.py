"""Base of methods that train the whole network without stored images and represent old classes by prototypes.

Their heads continue to train on each old class's mean feature, and the features of new images are distilled from the
previous network.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pearl.methods.prototypes.closed_form import mahalanobis
from pearl.methods.prototypes.prototype import PrototypeMethod
from pearl.nn.precision import outside_autocast


class NonExemplar(PrototypeMethod):
    """Heads whose logits are divided by a temperature, in training and predictions."""

    batch_coupled = True  # since the loss has a norm over a whole batch

    def __init__(self, backbone: nn.Module, *, temp: float) -> None:
        super().__init__(backbone)
        self.temp = temp

    def forward(self, x: Tensor, task: int | None = None) -> Tensor:
        """See `Method.forward`. Logits are divided by the temperature of training, so that probabilities match it."""
        return super().forward(x, task) / self.temp

    def cross_entropy(self, logits: Tensor, y: Tensor) -> Tensor:
        """Return the cross-entropy of logits (B, classes) before division by the temperature."""
        return F.cross_entropy(logits / self.temp, y)


def old_classes(like: Tensor, known: int) -> Tensor:
    """Draw as many labels (B,) as in `like` from the `known` ones, uniformly with replacement."""
    return torch.randint(known, like.shape, device=like.device)


def raised_logits(logits: Tensor, weight: Tensor, y: Tensor, covariances: Tensor, ratio: float) -> Tensor:
    """Return logits (B, classes) of means of classes y (B,), each raised by the spread of y's features towards that
    class.

    z_j + ratio / 2 (w_j - w_y)' S_y (w_j - w_y), with weights (classes, dim) and covariances (classes, dim, dim) by
    class. Their cross-entropy is an upper bound of the expected one for features from N(mean, ratio S_y), since then E
    exp(a'f) = exp(a'm + ratio / 2 a'S a) (Wang et al., Implicit Semantic Data Augmentation, NeurIPS 2019).
    """
    with outside_autocast(weight):
        return logits - ratio / 2 * mahalanobis(weight, weight[y], covariances[y]).T
