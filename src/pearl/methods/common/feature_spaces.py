"""The predictor of class statistics: from raw features to a feature space, to scores, to probabilities."""

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from pearl.errors import RunError

TRIED = 40  # candidate temperatures
WHOLE = ("created_at", "freedom", "images", "samples", "classes", "counts", "measured")  # tensors of numbers >= 0
DEAD = 1e-3  # relative to the mean standard deviation: dimensions below are ignored


class FeatureSpace(nn.Module):
    """Maps the raw features (B, p_raw) of a sub-network to a feature space (B, p), and these to scores (B, prototypes).

    Raw and projected features are standardised by the task that created the space and scaled to length
    sqrt(dimensions); the random projection between them is optional.
    """

    parts = ("mean", "std", "projected_mean", "projected_std")
    mean: Tensor
    std: Tensor
    projected_mean: Tensor
    projected_std: Tensor
    projection: Tensor | None

    def __init__(self, tensors: Mapping[str, Tensor], projection: Tensor | None) -> None:
        super().__init__()
        for name in self.parts:
            self.register_buffer(name, tensors[name])
        self.register_buffer("projection", projection)

    def forward(self, raw: Tensor) -> Tensor:
        """See the class."""
        return _length((self.projected(raw) - self.projected_mean) / (self.projected_std + 1e-6))

    def projected(self, raw: Tensor) -> Tensor:
        """Return the raw features standardised and projected.

        Raises:
            RunError: the features differ in width from the statistics.
        """
        if raw.shape[1] != len(self.mean):
            raise RunError(
                f"class statistics: for {len(self.mean)} features, but the sub-network has {raw.shape[1]}; restore the "
                f"model from a copy"
            )
        rows = _length((raw - self.mean) / (self.std + 1e-6))
        return rows if self.projection is None else rows @ self.projection.to(rows)


class Discriminants(nn.Module):
    """Linear scores in a feature space: maps features (B, p) to (B, prototypes), for the known ones from `first` on.

    A score is the log-likelihood of a prototype without the common terms, see `Background`.
    """

    weight: Tensor
    bias: Tensor

    def __init__(self, mu: Iterable[Tensor], inverse: Tensor, first: int, dtype: torch.dtype) -> None:
        """Compute from prototypes, in chunks (some, p), and the inverse covariance (p, p) within them; stored in its
        dtype.
        """
        super().__init__()
        weights, biases = [], []
        for rows in mu:
            weight = rows @ inverse
            weights.append(weight.to(dtype))  # Sigma^-1 mu
            biases.append((-0.5 * (weight * rows).sum(1)).to(dtype))  # -1/2 mu' Sigma^-1 mu
        self.register_buffer("weight", torch.cat(weights))
        self.register_buffer("bias", torch.cat(biases))
        self.first = first

    def forward(self, features: Tensor) -> Tensor:
        """See the class."""
        return features @ self.weight.T + self.bias


class Background(nn.Module):
    """The common terms of all prototypes' log-likelihoods in a feature space: maps features (B, p) to (B,).

    A score plus this term is the log-likelihood of a prototype minus that of the normal distribution of all images: a
    measure of fit.
    """

    quadratic: Tensor
    linear: Tensor
    constant: Tensor

    def __init__(self, inverse: Tensor, centre: Tensor, inverse_of_all: Tensor) -> None:
        """Compute from inverse covariances (p, p): within prototypes, and of all images around `centre` (p,)."""
        super().__init__()
        self.register_buffer("quadratic", (0.5 * (inverse_of_all - inverse)).contiguous())  # as exports store it
        self.register_buffer("linear", -inverse_of_all @ centre)
        self.register_buffer("constant", 0.5 * centre @ inverse_of_all @ centre)

    def forward(self, features: Tensor) -> Tensor:
        """See the class."""
        return ((features @ self.quadratic) * features).sum(1) + features @ self.linear + self.constant


class ClassStatisticsHead(nn.Module):
    """Predictor: raw features (B, p_raw) of every space's sub-network -> log P (B, classes), float32."""

    def __init__(
        self,
        spaces: Sequence[FeatureSpace],
        discriminants: Sequence[Discriminants],
        created_at: Sequence[int],
        task_of: Tensor,
        class_of: Tensor,
        temperature: float,
    ) -> None:
        super().__init__()
        self.spaces, self.discriminants = nn.ModuleList(spaces), nn.ModuleList(discriminants)
        self.created_at, self.temperature = tuple(created_at), temperature
        self.first = [made.first for made in discriminants]
        self.begins, self.by_class = begins_of(task_of, created_at), ByClass(class_of)

    def forward(self, raw: Sequence[Tensor]) -> Tensor:
        """See the class."""
        return self._answer(self._scores(raw)[1])

    def logits_and_scores(self, raw: Sequence[Tensor], backgrounds: Sequence[Background]) -> tuple[Tensor, Tensor]:
        """Return log P (B, classes), and the fit to each prototype (B, prototypes); see `fits`."""
        features, scores = self._scores(raw)
        common = [shared(x) for shared, x in zip(backgrounds, features, strict=True)]
        return self._answer(scores), fits(scores, common)

    def _scores(self, raw: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        features = [space(x) for space, x in zip(self.spaces, raw, strict=True)]
        return features, [made(rows) for made, rows in zip(self.discriminants, features, strict=True)]

    def _answer(self, scores: Sequence[Tensor]) -> Tensor:
        return self.by_class(chain_rule(scores, self.first, self.begins, self.created_at, self.temperature))


def chain_rule(
    scores: Sequence[Tensor], first: Sequence[int], begins: Sequence[int], created_at: Sequence[int], temperature: float
) -> Tensor:
    """Combine scores (B, prototypes from `first` on) in each feature space to log P (B, prototypes).

    For each task u, q_u is the distribution over its prototypes and later ones: a softmax of the mean score over the
    spaces that existed when task u arrived, since those have all of these prototypes. Then log P(c) = log q_u(c) + sum
    over tasks t < u of log q_t(later than t), for a prototype c of task u. From the last space's task on there is a
    single softmax. `begins` are the first prototypes of the tasks up to that one.
    """
    parts: list[Tensor] = []
    later = scores[0].new_zeros(scores[0].shape[0], 1)  # log of the probability that no earlier task has the image
    last = len(begins) - 1
    for u, begin in enumerate(begins):
        known = [
            rows[:, begin - start :]
            for rows, start, created in zip(scores, first, created_at, strict=True)
            if created <= u
        ]
        logq = (temperature * sum(known[1:], known[0]) / len(known)).log_softmax(1)
        if u == last:
            parts.append(later + logq)
        else:
            in_this_space = begins[u + 1] - begin
            parts.append(later + logq[:, :in_this_space])
            later = later + logq[:, in_this_space:].logsumexp(1, keepdim=True)
    return torch.cat(parts, dim=1)


def log_p_of(
    task_of: Tensor, class_of: Tensor, device: torch.device
) -> Callable[[Sequence[Tensor], Sequence[int], float], Tensor]:
    """Return a function from scores in feature spaces, the tasks at whose end these were created, and a temperature to
    log P (B, classes). Scores in more spaces are ignored.
    """
    by_class = ByClass(class_of).to(device)

    def log_p(scores: Sequence[Tensor], created_at: Sequence[int], temperature: float) -> Tensor:
        first = [int((task_of < created).sum()) for created in created_at]
        some = scores[: len(created_at)]
        return by_class(chain_rule(some, first, begins_of(task_of, created_at), created_at, temperature))

    return log_p


def fits(scores: Sequence[Tensor], common: Sequence[Tensor]) -> Tensor:
    """Return the fit of each image to each prototype (B, prototypes): a mean over the spaces that have the prototype.

    In a space it is the log-likelihood of the prototype minus that of all images, up to a constant: a relative
    Mahalanobis distance (Ren et al., 2021).
    """
    width = scores[0].shape[1]
    total, count = torch.zeros_like(scores[0]), scores[0].new_zeros(width)
    for rows, shared in zip(scores, common, strict=True):
        total[:, width - rows.shape[1] :] += rows + shared[:, None]
        count[width - rows.shape[1] :] += 1
    return total / count


def begins_of(task_of: Tensor, created_at: Sequence[int]) -> list[int]:
    """Return the first prototypes of the tasks up to the last space's."""
    return torch.searchsorted(task_of, torch.arange(max(created_at) + 1)).tolist()


class ByClass(nn.Module):
    """Sums probabilities over a class's prototypes: log P (B, prototypes) -> (B, classes)."""

    order: Tensor
    position: Tensor

    def __init__(self, class_of: Tensor) -> None:
        super().__init__()
        counts = class_of.bincount()
        # prototypes grouped by the number in their class: each group takes one operation
        self.register_buffer("order", (counts[class_of] * len(counts) + class_of).argsort(stable=True))
        self.register_buffer("position", counts.argsort(stable=True).argsort())
        self.sizes = [(count, int((counts == count).sum())) for count in counts.unique().tolist()]

    def forward(self, logp: Tensor) -> Tensor:
        """See the class."""
        parts = logp[:, self.order].split([count * classes for count, classes in self.sizes], dim=1)
        sums = [
            part if count == 1 else part.unflatten(1, (classes, count)).logsumexp(2)
            for part, (count, classes) in zip(parts, self.sizes, strict=True)
        ]
        return sums[0] if self.sizes[-1][0] == 1 else torch.cat(sums, dim=1)[:, self.position]


def alive(std: Tensor) -> Tensor:
    """Return deviations (p,) to divide by: infinite for a nearly constant dimension, so that it is ignored.

    New images may change such a dimension, and division by almost 0 would make it outweigh all others. If all
    dimensions are constant, all deviations are 1.
    """
    moved = std > DEAD * std.mean()
    return torch.where(moved, std, torch.inf) if moved.any() else torch.ones_like(std)


def projection(v: int, raw: int, dim: int) -> Tensor:
    """Return the random projection (raw, dim) of space v, N(0, 1/raw), float32: equal on every machine."""
    generator = torch.Generator().manual_seed(20_261 + v)
    return torch.randn(raw, dim, generator=generator) / math.sqrt(raw)


def digest_of(tensor: Tensor) -> Tensor:
    """Return the SHA-256 of a tensor's bytes, (32,) uint8."""
    digest = hashlib.sha256(tensor.cpu().contiguous().numpy().tobytes()).digest()
    return torch.tensor(list(digest), dtype=torch.uint8)


def misfit(tensors: Mapping[str, Tensor]) -> str | None:
    """Return the first tensor of the class statistics, by state_dict name, that is missing or has impossible values."""
    shapes = {name: tuple(value.shape) for name, value in tensors.items()}
    size = {name: math.prod(shape) for name, shape in shapes.items()}
    spaces, tasks = (
        range(len({name.split("/")[1] for name in shapes if name.startswith(f"{kind}/")})) for kind in ("space", "task")
    )
    expected: dict[str, tuple[int, ...]] = {}
    optional: dict[str, tuple[int, ...]] = {"temperature": ()}
    for v in spaces:
        raw, p = size.get(f"space/{v}/mean", 0), size.get(f"space/{v}/projected_mean", 0)
        of = {
            "created_at": (),
            "mean": (raw,),
            "std": (raw,),
            "projected_mean": (p,),
            "projected_std": (p,),
            "freedom": (),
        }
        of |= {"sum": (p,), "images": (), "samples": ()}
        expected |= {f"space/{v}/{name}": shape for name, shape in of.items()}
        expected |= {f"space/{v}/{name}": (p * (p + 1) // 2,) for name in ("scatter", "moment")}
        optional[f"space/{v}/projection"] = (32,)
    created_at = [tensors.get(f"space/{v}/created_at") for v in spaces]
    made = [int(created) for created in created_at if created is not None and created.numel() == 1]
    for t in tasks:
        classes = size.get(f"task/{t}/classes", 0)
        seen = sum(created <= t for created in made)
        of = {"classes": (classes,), "counts": (classes,), "location": (), "spread": (), "scores": (101,)}
        of |= {"measured": (), "levels": (seen, 4), "score_shift": ()}
        expected |= {f"task/{t}/{name}": shape for name, shape in of.items()}
        optional |= {f"task/{t}/losses": (TRIED,)}
        for v, created in enumerate(created_at):
            if created is not None and created.numel() == 1 and created <= t:
                expected[f"task/{t}/means/{v}"] = (classes, size.get(f"space/{v}/projected_mean", 0))
    expected |= {name: shape for name, shape in optional.items() if name in shapes}
    wrong = (name for name, shape in expected.items() if shapes.get(name) != shape or not possible(name, tensors[name]))
    return next(wrong, None)


def possible(name: str, value: Tensor) -> bool:
    """Return True if a tensor of the class statistics has possible values.

    Tensors on other devices are not read, nor means, which takes seconds for very many classes.
    """
    kind = name.split("/")[2 if "/" in name else 0]
    if value.device.type != "cpu" or kind == "means":
        return True
    if kind in WHOLE or kind in ("std", "projected_std"):  # a deviation may be infinite
        return bool((value >= 0).all())
    if kind in ("location", "spread", "scores", "levels"):  # infinite if not measured
        return not bool(value.isnan().any())
    return bool(value.isfinite().all()) and (kind != "temperature" or bool(value > 0))


def _length(rows: Tensor) -> Tensor:
    """Scale rows to length sqrt(dimensions)."""
    return nn.functional.normalize(rows, dim=1) * math.sqrt(rows.shape[1])
