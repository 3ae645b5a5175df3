"""The paper's classifier: the raw logits of all tasks' heads, concatenated."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pearl.methods.base import Expert
from pearl.methods.common.classifiers import Classifier, SubNetworkClassifier

if TYPE_CHECKING:
    from pearl.methods.common.subnetworks import SubNetworks


@dataclass(frozen=True, kw_only=True)
class Heads(Classifier):
    """The concatenated raw logits of the heads, as in the PEARL paper."""

    def of(self, method: "SubNetworks") -> SubNetworkClassifier:
        """See `Classifier.of`."""
        return HeadsClassifier(method)


class HeadsClassifier(SubNetworkClassifier):
    """Concatenated logits. Heads are trained apart, so their scales need not agree."""

    def logits(self, outputs: Sequence[Tensor]) -> Tensor:
        """See `SubNetworkClassifier.logits`; outputs are features (B, dim)."""
        return torch.cat([head(own) for head, own in zip(self.method.heads, outputs, strict=True)], dim=1)

    def forward(self, x: Tensor, task: int | None = None) -> Tensor:
        """See `Method.forward`."""
        method = self.method
        tasks = range(len(method.heads)) if task is None else [task]
        return torch.cat([method.heads[t](method.task_features(x, t)) for t in tasks], dim=1)

    def experts(self) -> Iterable[Expert]:
        """Return an expert per task."""
        method = self.method
        return [method.expert(t, partial(method.evaluated_network, t)) for t in range(len(method.heads))]
