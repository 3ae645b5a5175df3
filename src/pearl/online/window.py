"""The newest images of a stream, and the classes among them that the feature spaces do not separate."""

import torch
from torch import Tensor

from pearl.online.learner import Resizable


class Window(Resizable):
    """The newest images, at most `size`: raw (n, H, W, 3) uint8, labels (n,), and features (n, p) of all spaces joined.

    What leaves the window is never seen again.
    """

    images: Tensor
    labels: Tensor
    features: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.register_buffer("images", torch.zeros(0, 0, 0, 3, dtype=torch.uint8))
        self.register_buffer("labels", torch.zeros(0, dtype=torch.int64))
        self.register_buffer("features", torch.zeros(0, 0))

    def __len__(self) -> int:
        return len(self.labels)

    def add(self, images: Tensor, labels: Tensor, features: Tensor) -> None:
        """Add images, and drop the oldest ones beyond the size."""
        for name, new in (("images", images), ("labels", labels), ("features", features)):
            old = getattr(self, name)
            setattr(self, name, (torch.cat([old, new.to(old)]) if len(old) else new.clone())[-self.size :])

    def bytes(self) -> int:
        """Return the bytes of everything in it."""
        return sum(buffer.nbytes for buffer in self.buffers())


def confused_classes(scores: Tensor, labels: Tensor, share: float) -> Tensor:
    """Return the classes that are not separated, given scores (N, classes) and labels (N,) of N images, ascending.

    Images are compared among the classes that occur in `labels`, since only those can be trained. If at most this share
    of all images is wrong, there are none. Otherwise, these are the classes that lose more than this share of their
    images, and those that get as many wrong ones.
    """
    there, class_index = labels.unique(return_inverse=True)
    predicted = scores[:, there].argmax(1)
    wrong = predicted != class_index
    if wrong.sum() <= share * len(labels):
        return there[:0]
    lost, gained = (each[wrong].bincount(minlength=len(there)) for each in (class_index, predicted))
    return there[torch.maximum(lost, gained) > share * class_index.bincount()]
