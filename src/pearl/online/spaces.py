"""The feature space of one frozen network, with streaming statistics of all images that arrived since it exists."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pearl.errors import RunError
from pearl.methods.common.feature_spaces import FeatureSpace, alive, chain_rule, digest_of, projection
from pearl.online.learner import Resizable
from pearl.online.streaming_statistics import StreamingStatistics, discriminants

BARE = -1  # the number of the sub-network that is the backbone itself


class StreamingSpace(Resizable):
    """Maps raw features (B, p_raw) of network `task` to a feature space (B, p), and these to scores of its classes.

    Raw features are standardised by the images that opened the space, scaled to equal length, and projected at random.
    """

    task: Tensor  # () the sub-network's number
    mean: Tensor  # (p_raw,)
    std: Tensor
    checksum: Tensor  # (32,) of the projection, empty without one

    def __init__(self, number: int, task: int = BARE, raw: Tensor | None = None, dim: int | None = None) -> None:
        """Open a space in its place among the others from raw features (N, p_raw); without any, for loading a file."""
        super().__init__()
        raw = torch.zeros(1, 0) if raw is None else raw
        width = raw.shape[1]
        self.number, self._map = number, list[FeatureSpace]()
        self.register_buffer("task", torch.tensor(task))
        mean = raw.double().mean(0)
        self.register_buffer("mean", mean.to(raw))
        self.register_buffer("std", alive((raw - mean).square().mean(0).sqrt()).to(raw))
        projected = dim is not None and dim < width
        made = digest_of(projection(number, width, dim)) if projected else torch.zeros(0, dtype=torch.uint8)  # type: ignore[arg-type]
        self.register_buffer("checksum", made)
        self.statistics = StreamingStatistics(dim if projected else width)  # type: ignore[arg-type]

    def forward(self, raw: Tensor) -> Tensor:
        """Return features (B, p)."""
        if not self._map:
            none, made = self.mean.new_zeros(1), None
            if len(self.checksum):
                made = projection(self.number, len(self.mean), self.statistics.means.shape[1])
                if not torch.equal(digest_of(made), self.checksum.cpu()):
                    raise RunError(
                        f"torch {torch.__version__} cannot reproduce the random projection of feature space "
                        f"{self.number + 1}: it draws other numbers; use the version in environment.json"
                    )
                made = made.to(self.mean.device)
            tensors = {"mean": self.mean, "std": self.std, "projected_mean": none, "projected_std": none}
            self._map.append(FeatureSpace(tensors, made))
        return self._map[0].projected(raw)


class Spaces(nn.ModuleList):
    """The feature spaces in order of their creation; a new object takes as many as the file has."""

    def __getitem__(self, number: int) -> StreamingSpace:  # type: ignore[override]
        return super().__getitem__(number)  # type: ignore[return-value]

    def __iter__(self) -> Iterator[StreamingSpace]:
        return super().__iter__()  # type: ignore[return-value]

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        while f"{prefix}{len(self)}.task" in state_dict:
            self.append(StreamingSpace(len(self)))
        super()._load_from_state_dict(state_dict, prefix, *args)


def joint_log_probabilities(
    scores: Sequence[Tensor], known: Sequence[Tensor], classes: int, temperature: float
) -> Tensor:
    """Combine scores (B, some) of every space, which knows some of them (some,), to log P (B, classes).

    A class that is known in a space is known in all earlier ones. Classes are first compared in the spaces that know
    them all; those known in later spaces are then compared there: see `feature_spaces.chain_rule`. A class that is
    unknown in all spaces has log P = -inf.
    """
    depth = sum(F.pad(each.long(), (0, classes - len(each))) for each in known)  # spaces that know a class
    order = depth.argsort(stable=True)  # type: ignore[union-attr]
    begins = [int((depth <= v).sum()) for v in range(len(known))]  # type: ignore[union-attr]
    columns = [
        F.pad(each, (0, classes - each.shape[1]))[:, order[begin:]] for each, begin in zip(scores, begins, strict=True)
    ]
    logp = chain_rule(columns, begins, begins, range(len(known)), temperature)
    return F.pad(logp, (begins[0], 0), value=-torch.inf)[:, order.argsort()]


def left_out_scores(statistics: StreamingStatistics, features: Tensor, labels: Tensor) -> Tensor:
    """Return discriminants (N, classes) of images that are in the statistics, each as if it were not.

    An image leaves the mean of its class and the scatter (Sherman & Morrison, 1950); the shrinkage and the degrees of
    freedom are unchanged. An image that is the only one of its class has -inf for it.
    """
    precision, means, x = statistics.precision(), statistics.means, features.double()
    class_mean, n = means[labels], statistics.counts[labels].double()
    rest = (n / (n - 1).clamp(min=1))[:, None]
    u = x - class_mean
    half = u @ precision
    weight = (1 - statistics.shrinkage) * rest / statistics.freedom
    to_own, to_x = (half * u).sum(1, keepdim=True), (half * x).sum(1, keepdim=True)
    factor = weight / (1 - weight * to_own).clamp(min=1e-6)  # P' = P + factor P u u' P
    along = half @ means.T
    others = discriminants(x, means, precision) + factor * (to_x * along - 0.5 * along.square())
    of_x = ((x @ precision) * x).sum(1, keepdim=True) + factor * to_x.square()
    of_own = rest.square() * (to_own + factor * to_own.square())
    alone = 0.5 * (of_x - of_own).masked_fill((n < 2)[:, None], -torch.inf)
    return others.scatter(1, labels[:, None], alone)
