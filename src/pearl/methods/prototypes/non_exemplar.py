"""What methods share that train the whole network, keep no image, and stand in for old classes with their prototypes.

Their heads go on seeing each old class as its mean feature, and the features of new images are held to what the network
before the task made of them.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pearl.methods.prototypes.closed_form import mahalanobis
from pearl.methods.prototypes.prototype import PrototypeMethod
from pearl.nn.precision import outside_autocast


class NonExemplar(PrototypeMethod):
    """Heads whose logits are divided by a temperature, in training and in answers."""

    couples = True  # by a norm over a whole batch

    def __init__(self, backbone: nn.Module, *, temp: float) -> None:
        super().__init__(backbone)
        self.temp = temp

    def forward(self, x: Tensor, task: int | None = None) -> Tensor:
        """See `Method.forward`. Divided by the temperature they say how sure the network was trained to be."""
        return super().forward(x, task) / self.temp

    def cross_entropy(self, logits: Tensor, y: Tensor) -> Tensor:
        """Of logits (B, classes) that are not divided yet."""
        return F.cross_entropy(logits / self.temp, y)


def old_classes(like: Tensor, known: int) -> Tensor:
    """As many labels (B,) as there are in `like`, drawn from the `known` ones, each as likely, with replacement."""
    return torch.randint(known, like.shape, device=like.device)


def raised_logits(logits: Tensor, weight: Tensor, y: Tensor, covariances: Tensor, ratio: float) -> Tensor:
    """Logits (B, classes) of means of classes y (B,), each raised by how far its features reach towards the others.

    z_j + ratio / 2 (w_j - w_y)' S_y (w_j - w_y), with weights (classes, dim) and covariances (classes, dim, dim) by
    class. Their cross-entropy is an upper bound of that expected of features drawn from N(mean, ratio S_y), since
    E exp(a'f) = exp(a'm + ratio / 2 a'S a) of these (Wang et al., Implicit Semantic Data Augmentation, NeurIPS 2019).
    """
    with outside_autocast(weight):
        return logits - ratio / 2 * mahalanobis(weight, weight[y], covariances[y]).T
