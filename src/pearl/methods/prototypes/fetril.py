"""FeTrIL: Feature Translation for Exemplar-Free Class-Incremental Learning (Petit et al., WACV 2023).

The extractor is frozen after the first task. A linear head is trained on the features of the new classes and, for each
old class, on those of the most similar new class, translated to the old class's mean.
"""

from collections.abc import Iterator
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pearl.data.batches import Batch, Task
from pearl.methods.base import Phase
from pearl.methods.prototypes.extractor import FrozenExtractor
from pearl.settings.declared import PhaseSpec


class FeTril(FrozenExtractor):
    """A head on translated features; the variant with a fully connected head, which continues from its old weights.

    Features are computed once, from images without augmentation. Each represents its own class and every old class
    whose most similar class it is in, so that an epoch has every pseudo-feature once.

    Options:
        extractor: `given` - the backbone is pretrained and stays frozen; `first_task` - task 1 trains it, with a linear
            head; `auto` - the first if it was pretrained.
    """

    phases = (PhaseSpec("extractor", "reference"), PhaseSpec("fetril", "adapted", features_only=True))

    def __init__(self, backbone: nn.Module, *, extractor: Literal["auto", "given", "first_task"] = "auto") -> None:
        super().__init__(backbone, extractor=extractor)

    def learn(self, task: Task) -> Iterator[Phase]:
        """Train extractor and head in task 1; later update statistics, then train the head on features and
        pseudo-features.
        """
        head = self.heads.grow(len(task.classes)).to(self.device)
        yield from self.train_extractor(task, head)
        features = self.observe(task)
        if not self.trains_on(task):
            moves = self.translations(task.first_class)
            # mean number of features per image: converts a mean over images into a mean over features
            each = len(pseudo_features(features, task.labels, *moves)[1]) / len(task)

            def loss(batch: Batch) -> Tensor:
                z, y = pseudo_features(features[batch.rows], batch.y, *moves)
                return F.cross_entropy(self.heads(z), y, reduction="sum") / (each * len(batch.y))

            self.heads.requires_grad_(True)
            yield Phase("fetril", self.heads.parameters(), loss)
            self.requires_grad_(False)

    def translations(self, known: int) -> tuple[Tensor, Tensor]:
        """Return, for each known class, the new class with the most similar mean direction, and the translation from
        it.
        """
        means = self.statistics.means()
        old, new = means[:known], means[known:]
        nearest = (F.normalize(old) @ F.normalize(new).T).argmax(1)
        return nearest + known, (old - new[nearest]).to(self.heads[0].weight)

    def score(self, features: Tensor) -> Tensor:
        """Return the linear head's logits."""
        return self.heads(features)


def pseudo_features(features: Tensor, labels: Tensor, nearest: Tensor, ways: Tensor) -> tuple[Tensor, Tensor]:
    """Return a batch of features with labels, followed by all pseudo-features of old classes made from them."""
    image, old = (labels[:, None] == nearest).nonzero(as_tuple=True)
    return torch.cat([features, features[image] + ways[old]]), torch.cat([labels, old])
