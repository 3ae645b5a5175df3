"""Task inference by class statistics in the feature spaces of frozen sub-networks, compared task after task.

Logits of separately trained heads are not comparable. But during a task, its images can be passed through every
sub-network frozen so far: in each of these feature spaces a class has a mean, and all classes share a covariance. Two
classes can thus be compared in every space that existed when the later one arrived.

This is our own method, not part of the PEARL paper. A single space with linear discriminants of pooled covariance is
known (first-session adaptation, Panos et al., ICCV 2023; RanPAC, McDonnell et al., NeurIPS 2023); here there are
several, joined by a chain of decisions over the tasks.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pearl.errors import RunError
from pearl.methods.classifier import Predictions
from pearl.methods.common import calibration
from pearl.methods.common.calibration import ENOUGH, LeftOut, OODScorer, Scores, measured, stored
from pearl.methods.common.feature_spaces import (
    TRIED,
    Background,
    ClassStatisticsHead,
    Discriminants,
    FeatureSpace,
    alive,
    digest_of,
    fits,
    log_p_of,
    projection,
)
from pearl.methods.common.optimism import TrainedOn
from pearl.methods.common.scatter import (
    MANY,
    drawn,
    inverse,
    moment,
    pack,
    pieces,
    root,
    shrunk,
    statistics,
)
from pearl.methods.common.statistics_options import StatisticsOptions
from pearl.methods.common.stored_statistics import COUNTED, UNCALIBRATED, StoredStatistics

# Pairs of an image and a prototype: so many are scored, at most, when a task is learnt; and at each of 40 temperatures.
PAIRS, TEMPERED = 2**22, 2**19
GRID = torch.logspace(math.log10(0.02), math.log10(1.5), TRIED, dtype=torch.float64)


class ClassStatistics(StoredStatistics):
    """Class statistics: computed from features, and used for predictions and in-distribution scores."""

    def __init__(self, options: StatisticsOptions) -> None:
        super().__init__()
        self.options = options
        self._head: list[ClassStatisticsHead] = []  # in lists, so that they are not part of the state
        self._scorer: list[OODScorer] = []
        # neither, of the task observed last; `observed`: raw features in every space, and labels, of some of its images
        self.cross_validated: Predictions | None = None
        self.trained_on: TrainedOn | None = None  # of these images
        self.observed: tuple[list[Tensor], Tensor] | None = None
        # with `keep_features`, those of all images and views; and those of the images that are `spared`, see `observe`
        self.kept: tuple[list[Tensor], Tensor, Tensor | None] | None = None

    def wants_space(self) -> bool:
        """Return True if the next task's sub-network becomes a feature space."""
        return self.options.spaces == "all" or len(self.created_at) < self.options.spaces

    # --------------------------------------------------------------------------------------------------------- learning

    @torch.no_grad()
    def add_space(self, created: int, raw: Tensor) -> None:
        """Add a space, from the raw features (N, p_raw) of the images that its sub-network learnt."""
        v, raw_dim = len(self.created_at), raw.shape[1]
        dim = self.options.projection
        made = projection(v, raw_dim, dim).to(raw.device) if dim is not None and dim < raw_dim else None
        facts = {"mean": raw.double().mean(0).to(raw), "std": alive(raw.double().std(0, unbiased=False)).to(raw)}
        none = raw.new_zeros(1)
        rows = FeatureSpace(facts | {"projected_mean": none, "projected_std": none}, made).projected(raw).double()
        p = rows.shape[1]
        facts |= {"projected_mean": rows.mean(0).to(raw), "projected_std": alive(rows.std(0, unbiased=False)).to(raw)}
        if made is not None:
            facts["projection"] = digest_of(made).to(raw.device)
        for name, size in (("scatter", p * (p + 1) // 2), ("moment", p * (p + 1) // 2), ("sum", p)):
            facts[name] = torch.zeros(size, dtype=torch.float64, device=raw.device)
        facts |= {name: torch.zeros((), dtype=torch.long, device=raw.device) for name in COUNTED}
        facts["created_at"] = torch.tensor(created, device=raw.device)
        for name, value in facts.items():
            self.tensors.add(f"space.{v}.{name}", value)
        self._forget()

    @torch.no_grad()
    def check(self, raw: Sequence[Tensor]) -> None:
        """Check that these sub-networks fit the statistics, by the raw features (B, p_raw) of an image in every space.

        Raises:
            RunError: statistics of other features, or an invalid covariance.
        """
        for v, (space, rows) in enumerate(zip(self.spaces(), raw, strict=True)):
            space(rows)
            root(shrunk(*self.covariance(v)))

    def observe_raw(
        self, raws: Sequence[Tensor], labels: Tensor, *, adds_space: bool, spared: Tensor | None = None
    ) -> None:
        """Add a task by raw features (N, views, p_raw) of every space, and logit indices (N,); see `observe`.

        With `adds_space` the last of these features are those of a new space.
        """
        if adds_space:
            self.add_space(len(self), raws[-1][:, 0])
        features = [
            space(raw.flatten(0, 1)).unflatten(0, raw.shape[:2]) for space, raw in zip(self.spaces(), raws, strict=True)
        ]
        self.observe(features, labels, spared)

    @torch.no_grad()
    def observe(self, features: Sequence[Tensor], labels: Tensor, spared: Tensor | None = None) -> None:
        """Add a task: features in every space there is, and the classes' logit indices (N,).

        Features are (N, p), or (N, views, p) of several views of an image, the test view first. `spared` (N,) is False
        for images that the newest space's sub-network was trained on; None if it was on none. Then each image is scored
        by statistics without it, which gives the temperature, the distribution of in-distribution scores, and
        `cross_validated`. For the temperature, images of earlier tasks weigh as much as new ones; images that are never
        confused, as those of a single class, hardly matter.
        """
        self._forget()
        features = [rows if rows.ndim == 3 else rows[:, None] for rows in features]
        t = len(self)
        classes, class_index = labels.unique(return_inverse=True)
        counts = class_index.bincount(minlength=len(classes))
        scatters = []
        for v, rows in enumerate(features):
            means, scatter = statistics(rows, class_index, len(classes))
            self.tensors.add(f"task.{t}.means.{v}", means.to(rows))
            scatters.append(scatter)
            if self._updates(v, t):
                x = rows.double()
                more = {"scatter": pack(scatter), "moment": pack(moment(x)), "sum": x.mean(1).sum(0)}
                numbers = len(x), len(x) - len(classes), x.shape[0] * x.shape[1]
                more |= dict(zip(COUNTED, map(torch.tensor, numbers), strict=True))
                for name, value in more.items():
                    known = self.tensors[f"space.{v}.{name}"]
                    self.tensors.add(f"space.{v}.{name}", known + value.to(known.device))
        self.tensors.add(f"task.{t}.counts", counts)
        self.tensors.add(f"task.{t}.classes", classes)
        precise = torch.float64 if len(self.class_of) <= MANY else torch.float32
        metrics = [LeftOut(self.known(v), precise) for v in range(len(features))]
        levels = [
            metric.levels(rows, scatter, len(classes), counted=self._updates(v, t))
            for v, (metric, rows, scatter) in enumerate(zip(metrics, features, scatters, strict=True))
        ]
        self.tensors.add(f"task.{t}.levels", stored(torch.stack(levels)))
        rows = self._calibrate(metrics, features, classes, class_index)
        self.trained_on = None if spared is None else TrainedOn(~spared[rows].cpu().numpy(), len(features))

    def _updates(self, v: int, t: int) -> bool:
        """Return True if task t's images are included in the covariance of space v."""
        return self.options.covariance == "updated" or t < 2 or t == self.created_at[v]

    def _calibrate(
        self, metrics: Sequence[LeftOut], features: Sequence[Tensor], classes: Tensor, class_index: Tensor
    ) -> Tensor:
        """Measure, on the newest task's images, the temperature and the scores of images of known classes.

        The temperature is that of the least negative log-likelihood of images among all classes. Return the rows of the
        images that are predicted.
        """
        t, like = len(self) - 1, metrics[0].inverse
        # an image that is its class's only one cannot be left out
        rows = (class_index.bincount()[class_index] > 1).nonzero()[:, 0]
        if not len(rows):  # classes of one image each: nothing is measured, and nothing strange
            self._note(t, *like.new_full((2,), torch.nan))
            return rows
        counts = self.tensors[f"task.{t}.counts"][class_index[rows]].double()
        known = [
            metric.own_fits(x[rows], self._means(v)[-1][class_index[rows]], counts, counted=self._updates(v, t))
            for v, (metric, x) in enumerate(zip(metrics, features, strict=True))
        ]
        own_fits = torch.stack(known).mean(0)
        self._note(t, own_fits.mean(), own_fits.std().clamp(min=1e-6))
        at = drawn(torch.arange(len(rows), device=rows.device), max(1, PAIRS // len(self.class_of)))
        some = rows[at]
        scores, common = [], []
        for v, (metric, x) in enumerate(zip(metrics, features, strict=True)):
            means = torch.cat(self._means(v))
            sizes = torch.cat([self.tensors[f"task.{u}.counts"] for u in range(self.created_at[v], t + 1)])
            column = class_index[some] + len(means) - len(classes)
            inside, away = metric.distances(x[some], column, means, sizes, counted=self._updates(v, t))
            scores.append(-0.5 * inside)
            common.append(0.5 * away)
        # among the others it meets means of as many images as a new one does; of its own, of one less
        every = fits(scores, common).scatter(1, column[:, None], own_fits[at, None])
        self._scores(t, every, (own_fits.sum() - own_fits[at]) / (len(own_fits) - 1))
        # features of training images in their own sub-network are biased; the first task has no other
        created_at = [created for created in self.created_at if created < t or t == 0]
        few = drawn(torch.arange(len(some), device=some.device), max(1, TEMPERED // len(self.class_of)))
        self._temper([each[few] for each in scores], created_at, classes, classes[class_index[some][few]])
        return some[few]

    def _note(self, t: int, location: Tensor, spread: Tensor) -> None:
        """Store mean and spread of the fits of task t's images, () each; no scores yet."""
        facts = {"location": stored(location), "spread": stored(spread), "scores": location.new_full((101,), torch.inf)}
        facts |= {"measured": torch.zeros_like(location, dtype=torch.long), "score_shift": torch.zeros_like(location)}
        for name, value in facts.items():
            self.tensors.add(f"task.{t}.{name}", value)
        self.cross_validated = None

    def _scores(self, t: int, all_fits: Tensor, without: Tensor) -> None:
        """Keep the percentiles of in-distribution scores of task t's images left out: their fits (N, prototypes).

        The location (N,) of their task's fits is the one without each image.
        """
        location, spread = (part.to(all_fits) for part in self.usual())
        location = torch.where((self.task_of == t).to(all_fits.device), without[:, None], location)
        every, shift = calibration.scores_and_shift(all_fits, location, spread, self.task_of, self.class_of)
        share = torch.linspace(0, 1, 101, dtype=every.dtype, device=every.device)
        self.tensors.add(f"task.{t}.scores", every.quantile(share))
        self.tensors.add(f"task.{t}.measured", torch.tensor(len(every), device=every.device))
        self.tensors.add(f"task.{t}.score_shift", shift)

    def _temper(self, scores: Sequence[Tensor], created_at: Sequence[int], classes: Tensor, labels: Tensor) -> None:
        """Measure the temperature, in the spaces `created_at`, and predict, by scores in all spaces and labels (N,)."""
        t, log_p = len(self) - 1, log_p_of(self.task_of, self.class_of, labels.device)
        tried = (log_p(scores, created_at, float(each)) for each in GRID)
        losses = torch.stack([-each.gather(1, labels[:, None]).sum() for each in tried]).cpu()
        best = UNCALIBRATED
        if t:
            earlier = [f"task.{u}.losses" for u in range(t) if f"task.{u}.losses" in self.tensors]
            vague = (GRID / UNCALIBRATED).log().square() / 2  # decides if no image was ever confused
            pooled = sum((self.tensors[name].cpu() for name in earlier), losses + vague)
            best = float(GRID[pooled.argmin()])
            self.tensors.add("temperature", torch.tensor(best, dtype=torch.float64, device=labels.device))
            self.tensors.add(f"task.{t}.losses", losses.to(labels.device))
        logp = log_p(scores, self.created_at, best)
        among = torch.isin(torch.arange(logp.shape[1], device=classes.device), classes)
        self.cross_validated = Predictions.of(logp, labels, among.expand_as(logp))

    def usual(self) -> tuple[Tensor, Tensor]:
        """Return the mean and spread of the fits of each prototype's images: (prototypes,) each, on the CPU.

        A task without measurements gets the mean of all others.
        """
        levels, locations, spreads = (
            [measured(self.tensors[f"task.{t}.{name}"].cpu()) for t in range(len(self))]
            for name in ("levels", "location", "spread")
        )
        location, spread = calibration.usual(levels, locations, spreads, self.created_at)
        return location[self.task_of], spread[self.task_of]

    def scores(self) -> Scores:
        """Return in-distribution scores of images of known classes.

        They are of the newest tasks, whose images were compared with the most prototypes: as many tasks as are needed
        for enough images.
        """
        chosen: list[tuple[Tensor, int]] = []
        later = 0.0
        for t in reversed(range(len(self))):
            if sum(images for _, images in chosen) < ENOUGH and (images := int(self.tensors[f"task.{t}.measured"])):
                chosen.append((self.tensors[f"task.{t}.scores"].cpu() + later, images))
            later += float(self.tensors[f"task.{t}.score_shift"])
        return Scores(chosen)

    # ---------------------------------------------------------------------------------------------------------- scoring

    def spaces(self) -> list[FeatureSpace]:
        """Return the maps from raw features to features, in every space.

        Raises:
            RunError: this torch draws other random numbers than the one that made a projection.
        """
        feature_spaces = []
        for v in range(len(self.created_at)):
            tensors = {name: self.tensors[f"space.{v}.{name}"] for name in FeatureSpace.parts}
            made = None
            if f"space.{v}.projection" in self.tensors:
                made = projection(v, len(tensors["mean"]), len(tensors["projected_mean"]))
                if not torch.equal(digest_of(made), self.tensors[f"space.{v}.projection"].cpu()):
                    raise RunError(
                        f"the random projection of space {v + 1} cannot be reproduced: torch {torch.__version__} draws "
                        f"other numbers; use the version that environment.json names"
                    )
                made = made.to(tensors["mean"].device)
            feature_spaces.append(FeatureSpace(tensors, made))
        return feature_spaces

    @torch.no_grad()
    def head(self) -> ClassStatisticsHead:
        """Return the predictor, created once per task; in the features' dtype, float32."""
        if not self._head:
            self._make_head([inverse(shrunk(*self.covariance(v))) for v in range(len(self.created_at))])
        return self._head[0]

    def _make_head(self, within: Sequence[Tensor]) -> None:
        """Create the predictor from the inverse covariances within prototypes, float64."""
        first = [int((self.task_of < created).sum()) for created in self.created_at]
        means = (pieces(self._means(v)) for v in range(len(first)))
        dtype = self.tensors["space.0.mean"].dtype
        made = [Discriminants(*parts, dtype) for parts in zip(means, within, first, strict=True)]
        of_classes = self.created_at, self.task_of, self.class_of, self.temperature
        self._head.append(ClassStatisticsHead(self.spaces(), made, *of_classes).to(self.tensors["space.0.mean"]))

    @torch.no_grad()
    def ood_scorer(self) -> OODScorer:
        """Return the OOD scorer; created once until a task is observed, since with many classes this is slow."""
        if not self._scorer:
            known = [self.known(v) for v in range(len(self.created_at))]
            within = [inverse(shrunk(*space.within())) for space in known]  # once, for predictor and scores
            if not self._head:
                self._make_head(within)
            every = [inverse(shrunk(space.of_all(), space.share)) for space in known]
            parts = zip(within, (space.centre for space in known), every, strict=True)
            backgrounds = [Background(*of_space) for of_space in parts]
            self._scorer.append(OODScorer(self.head(), backgrounds, *self.usual()).to(self.tensors["space.0.mean"]))
        return self._scorer[0]

    @torch.no_grad()
    def logits_and_scores(self, raw: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return log P (B, classes) and in-distribution scores (B,) of raw features."""
        return self.ood_scorer().forward(raw)

    @torch.no_grad()
    def fits(self, raw: Sequence[Tensor]) -> Tensor:
        """See `feature_spaces.fits`, for raw features: (B, prototypes)."""
        return self.ood_scorer().fits(raw)[1]

    def _forget(self) -> None:
        self._head.clear()
        self._scorer.clear()

    def _apply(self, *args: Any, **kwargs: Any) -> "ClassStatistics":
        self._forget()  # the tensors go elsewhere
        super()._apply(*args, **kwargs)
        return self

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        self._forget()
        super()._load_from_state_dict(state_dict, prefix, *args)
