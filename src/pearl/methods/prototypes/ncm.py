"""Nearest class mean (Mensink et al., TPAMI 2013) on a frozen extractor: the baseline of every method."""

from collections.abc import Iterator
from typing import Literal

from torch import Tensor, nn

from pearl.data.batches import Task
from pearl.methods.base import Phase
from pearl.methods.common.class_moments import cosines
from pearl.methods.prototypes.closed_form import nearest_mean
from pearl.methods.prototypes.extractor import FrozenExtractor


class NearestMean(FrozenExtractor):
    """A class is the mean of its features; the prediction is the nearest mean.

    Options:
        extractor: `given` - the backbone is pretrained and stays frozen; `first_task` - task 1 trains it, with a linear
            head; `auto` - the first if it was pretrained.
        distance: `euclidean`; or `cosine`, by the angle between feature and mean.
    """

    def __init__(
        self,
        backbone: nn.Module,
        *,
        extractor: Literal["auto", "given", "first_task"] = "auto",
        distance: Literal["euclidean", "cosine"] = "euclidean",
    ) -> None:
        super().__init__(backbone, extractor=extractor)
        self.distance = distance

    def learn(self, task: Task) -> Iterator[Phase]:
        """Train the extractor in its task; then run one pass over the images."""
        yield from self.train_extractor(task)
        self.observe(task)

    def score(self, features: Tensor) -> Tensor:
        """Return minus the squared distance to each mean, or the cosine."""
        means = self.statistics.means()
        if self.distance == "cosine":
            return cosines(features, means)
        return nearest_mean(features.double(), means).float()
