"""In-distribution scores: how well an image fits a prototype, beside how well the images of its task fit theirs.

The fit is a relative Mahalanobis distance (Ren et al., 2021), averaged over the feature spaces that know the prototype.
Sketches fit their prototypes less well than photos do, so that no single threshold is right for all tasks. A task
therefore keeps where the fits of its own images lie, and how far apart, measured with each image left out of the
statistics (in closed form, Sherman and Morrison, 1950).

Fits move when the covariance does, after the images are gone. Two traces of the covariance give the mean fit of all
images so far, so that each task can measure by how much it moved the fits of the earlier ones. Scores move when
prototypes arrive, too; see `scores_and_shift`.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pearl.methods.common.feature_spaces import Background, ByClass, ClassStatisticsHead
from pearl.methods.common.scatter import inverse, moment, root, shrinkage, shrunk

DOUBT = 0.5  # weight of the entropy over classes
ROWS = 1024  # images that are left out at once
ENOUGH = 400  # images whose scores set the threshold: those of the newest tasks, whose images met the most prototypes


class Known(NamedTuple):
    """Moments of all images that a feature space's covariance is computed from."""

    scatter: Tensor  # (p, p) within prototypes
    total: Tensor  # (p, p) around the centre
    centre: Tensor  # (p,)
    freedom: int  # images less prototypes
    images: int
    views: float  # of an image, on average

    @property
    def share(self) -> float:
        """The shrinkage of the covariances."""
        return shrinkage(len(self.centre), self.freedom, self.views)

    def within(self) -> tuple[Tensor, float]:
        """The covariance (p, p) within prototypes, and its shrinkage."""
        return self.scatter / max(1, self.freedom), self.share

    def of_all(self, without: int = 0) -> Tensor:
        """The covariance (p, p) of images of whatever class; over the degrees of freedom that fewer images have."""
        return self.total / max(1, self.images - 1 - without)


class LeftOut:
    """A space's covariances for images that are in its statistics, to be left out one at a time.

    They have the shrinkage and the degrees of freedom of one image less. The trace, towards which they are shrunk,
    changes with the image that is left out; here it is the mean over images. An image is left out with all its views,
    and scored by the first one.
    """

    def __init__(self, space: Known, dtype: torch.dtype = torch.float64) -> None:
        self.space, self.freedom = space, max(1, space.freedom - 1)
        self.share = shrinkage(len(space.centre), self.freedom, space.views)
        trace = float(space.scatter.trace()) / max(1, space.freedom)
        self.root = root(shrunk(space.scatter / self.freedom, self.share, trace))
        self.inverse = torch.cholesky_inverse(self.root)
        self.of_all = inverse(shrunk(space.of_all(without=1), self.share, float(space.of_all().trace())))
        self.dtype = dtype
        self.lighter = (1 - self.share) / self.freedom  # what an image weighs in the covariance
        self.lighter_of_all = (1 - self.share) / max(1, space.images - 2)

    def within(self, square: Tensor, count: Tensor | float, counted: bool = True) -> Tensor:
        """Convert squared distances to a prototype's mean of `count` images to those with the image left out.

        For means over all views: the views of an image are taken to lie in different directions, which keeps the
        result finite and is exact for one view.
        """
        wider = count / (count - 1)
        return wider**2 * square / (1 - counted * self.lighter * wider / self.space.views * square)

    def around(self, square: Tensor) -> Tensor:
        """Convert squared distances to the centre of all images to those with the image left out."""
        wider = self.space.images / max(1, self.space.images - 1)
        return wider**2 * square / (1 - self.lighter_of_all * wider / self.space.views * square)

    def distances(
        self, rows: Tensor, prototype: Tensor, means: Tensor, counts: Tensor, *, counted: bool
    ) -> tuple[Tensor, Tensor]:
        """Return squared distances (N, prototypes) to all means, and (N,) to the centre, each image left out.

        Args:
            rows: features (N, views, p) of images in the statistics.
            own: the prototype (N,) that each of them is of, with two images or more.
            means: (prototypes, p).
            counts: images (prototypes,) that the means are of.
            counted: whether these images are in the covariance.
        """
        parts = [
            self._distances(x, at, means, counts, counted)
            for x, at in zip(rows.split(ROWS), prototype.split(ROWS), strict=True)
        ]
        inside, away = zip(*parts, strict=True)
        return torch.cat(inside), torch.cat(away)

    def _distances(
        self, rows: Tensor, prototype: Tensor, means: Tensor, counts: Tensor, counted: bool
    ) -> tuple[Tensor, Tensor]:
        def white(x: Tensor) -> Tensor:
            flat = x.to(self.dtype).flatten(0, -2)
            return torch.linalg.solve_triangular(self.root.to(self.dtype), flat.T, upper=False).T.unflatten(
                0, x.shape[:-1]
            )

        count, mean = counts[prototype].double(), means[prototype].to(self.dtype)
        x, mu = white(rows[:, 0]), white(means)
        # the mean of an image's prototype moves away from it when it is left out
        mine = x - mu[prototype] + white(_moved(rows.to(self.dtype), mean, count))
        squares = (x.square().sum(1, keepdim=True) - 2 * x @ mu.T + mu.square().sum(1)).double()
        squares.scatter_(1, prototype[:, None], mine.square().sum(1, keepdim=True).double())
        if counted:  # Woodbury
            out = white(_outer(rows.to(self.dtype), mean, count))
            along = out @ x[:, :, None] - out @ mu.T
            along.scatter_(2, prototype[:, None, None].expand(-1, out.shape[1], 1), out @ mine[:, :, None])
            squares += _gain(out @ out.mT, along, self.lighter)
        return squares, self._to_centre_left_out(rows)

    def own_fits(self, rows: Tensor, means: Tensor, count: Tensor, *, counted: bool) -> Tensor:
        """Return the fits (N,) of images (N, views, p) to their own prototypes, (N, p) and of `count` (N,) images, each
        image left out.
        """
        parts = zip(rows.split(ROWS), means.split(ROWS), count.split(ROWS), strict=True)
        return torch.cat([self._own_fits(*part, counted=counted) for part in parts])

    def _own_fits(self, rows: Tensor, means: Tensor, count: Tensor, *, counted: bool) -> Tensor:
        square = _left_out(rows.double(), means.double(), count, self.inverse, self.lighter * counted)
        return 0.5 * (self._to_centre_left_out(rows) - _fresh(square, count))

    def levels(self, rows: Tensor, scatter: Tensor, classes: int, *, counted: bool) -> Tensor:
        """Return mean fit and spread of all images in the covariance, and of those of earlier tasks, (4,).

        The spread of fits is taken to be proportional to how much farther images are from their prototypes than, along
        the same directions, from the centre. Of the newest task: features (N, views, p), their scatter (p, p) within
        classes, and whether they are in the covariance.
        """
        space = self.space
        pairs = (self.inverse, space.scatter), (self.of_all, space.scatter), (self.of_all, space.total)
        sums = torch.stack([(inverse * of).sum() for inverse, of in pairs])
        every = self._level(sums, space.images, space.freedom)
        if not counted:
            return torch.cat([every, every])
        totals = [(inverse * scatter).sum() for inverse in (self.inverse, self.of_all)]
        sums = sums - torch.stack([*totals, self._to_centre(rows)])
        images = space.images - len(rows)
        return torch.cat([every, self._level(sums, images, space.freedom - len(rows) + classes)])

    def _level(self, sums: Tensor, images: int, freedom: int) -> Tensor:
        if images <= 0 or freedom <= 0:
            return sums.new_full((2,), torch.nan)
        inside, along, away = sums / images
        count = images / max(1, images - freedom)
        inside = _fresh(self.within(inside, count), count)
        return 0.5 * torch.stack([self.around(away) - inside, (inside - along).clamp(min=1e-6)])

    def _to_centre(self, rows: Tensor) -> Tensor:
        """Return the sum over images (N, views, p) of the mean squared distance of their views to the centre, ()."""
        return (self.of_all * moment(rows.double() - self.space.centre)).sum()

    def _to_centre_left_out(self, rows: Tensor) -> Tensor:
        images = self.space.images
        return _left_out(rows.double(), self.space.centre, images, self.of_all, self.lighter_of_all)


def _left_out(rows: Tensor, mean: Tensor, count: Tensor | int, inverse: Tensor, lighter: float) -> Tensor:
    """Return squared distances (N,) of images (N, views, p) to a mean of `count` images, each image left out.

    `lighter` is the weight of an image in the covariance, whose inverse is given: 0 if it is not in it.
    """
    away = rows[:, 0] - mean + _moved(rows, mean, count)
    out = _outer(rows, mean, count)
    turned = out @ inverse
    square = ((away @ inverse) * away).sum(1)
    return square + _gain(turned @ out.mT, turned @ away[:, :, None], lighter)[:, 0]


def _moved(rows: Tensor, mean: Tensor, count: Tensor | int) -> Tensor:
    """Return by how much (N, p) the mean of `count` images moves, away from each image that is left out."""
    return (rows.mean(1) - mean) / _others(count).to(rows)


def _outer(rows: Tensor, mean: Tensor, count: Tensor | int) -> Tensor:
    """Return rows (N, k, p) whose outer products are what each image (N, views, p) adds to the scatter."""
    centre = rows.mean(1)
    wider = (1 + 1 / _others(count)).sqrt().to(rows)
    difference = (wider * (centre - mean))[:, None]
    views = rows.shape[1]
    return difference if views == 1 else torch.cat([difference, (rows - centre[:, None]) / math.sqrt(views)], dim=1)


def _others(count: Tensor | int) -> Tensor:
    """Return the number of other images as a column (N, 1) or (1, 1), at least 1."""
    return torch.as_tensor(count, dtype=torch.float64).reshape(-1, 1).sub(1).clamp(min=1)


def _gain(gram: Tensor, along: Tensor, lighter: float) -> Tensor:
    """Return by how much (N, m) squared distances grow when `lighter` U'U is taken from the covariance (Woodbury).

    `gram` is U S^-1 U' (N, k, k), `along` is U S^-1 of each direction (N, k, m).
    """
    left = torch.eye(gram.shape[1], dtype=torch.float64, device=gram.device) - lighter * gram.double()
    return lighter * (along.double() * torch.linalg.solve(left, along.double())).sum(1)


def _fresh(square: Tensor, count: Tensor | float) -> Tensor:
    """Convert squared distances to means of count - 1 images to their average for means of `count` images.

    An image is (1 + 1/n) times as far, squared, from the mean of n others as from that of the class.
    """
    return square * (1 - 1 / count**2)


def score(fits: Tensor, location: Tensor, spread: Tensor, by_class: Callable[[Tensor], Tensor]) -> Tensor:
    """Return in-distribution scores (B,): the higher, the likelier that an image (B, prototypes) is of a known class.

    The fit to the prototype that the image fits best, in standard deviations from where its task's images lie, less the
    entropy over classes. `by_class`: log P (B, prototypes) -> (B, classes).
    """
    away = (fits - location) / spread
    logp = by_class(away.log_softmax(1))
    return away.max(1).values + DOUBT * (logp.exp() * logp).sum(1)


def scores_and_shift(
    fits: Tensor, location: Tensor, spread: Tensor, task_of: Tensor, class_of: Tensor
) -> tuple[Tensor, Tensor]:
    """Return scores (N,) of the newest task's images (N, prototypes), and the shift that the task caused.

    The more prototypes there are, the higher is the best of an image's fits, and the entropy. So the scores of older
    tasks' images move with every task; by how much, on average, the newest images show: with and without one task.
    """
    newest = int(task_of.max())
    every = score(fits, location, spread, ByClass(class_of).to(fits.device))
    if not newest:
        return every, every.new_zeros(())
    rest = task_of != newest - 1
    by_class = ByClass(class_of[rest].unique(return_inverse=True)[1]).to(fits.device)
    return every, (every - score(fits[:, rest], location[:, rest], spread[rest], by_class)).mean()


class OODScorer(nn.Module):
    """Maps raw features (B, p_raw) of every space to log P (B, classes) and in-distribution scores (B,)."""

    location: Tensor
    spread: Tensor

    def __init__(
        self, head: ClassStatisticsHead, backgrounds: Sequence[Background], location: Tensor, spread: Tensor
    ) -> None:
        """`location` and `spread` (prototypes,) are of the fits of images of each prototype's task."""
        super().__init__()
        self.head, self.backgrounds = head, nn.ModuleList(backgrounds)
        self.register_buffer("location", location)
        self.register_buffer("spread", spread)

    def forward(self, raw: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """See the class."""
        logp, log_fits = self.fits(raw)
        return logp, score(log_fits, self.location, self.spread, self.head.by_class)

    def fits(self, raw: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return log P (B, classes), and the fit to each prototype (B, prototypes)."""
        return self.head.logits_and_scores(raw, cast("Sequence[Background]", self.backgrounds))


class Scores:
    """In-distribution scores of images of known classes: percentiles (101,) of some tasks, of so many images each."""

    def __init__(self, percentiles: Sequence[tuple[Tensor, int]]) -> None:
        self.images = sum(images for _, images in percentiles)
        parts = [
            (values, torch.full((101,), images / 101 / self.images, dtype=torch.float64))
            for values, images in percentiles
        ]
        self._values, order = torch.cat([torch.empty(0), *(values for values, _ in parts)]).sort()
        self._share = torch.cat([torch.empty(0), *(share for _, share in parts)])[order].cumsum(0)

    def threshold(self, rate: float) -> float:
        """Return the score below which a share `rate` of the images lies; minus infinity if there are none."""
        return float(self._values[int((self._share >= rate).int().argmax())]) if self.images else -math.inf

    def shares(self, scores: Tensor) -> Tensor:
        """Return the share of the images that have no higher score than each of `scores` (B,): 1 if there are none.

        A score is at least `threshold(rate)` where this is at least `rate`.
        """
        if not self.images:
            return torch.ones_like(scores)
        below = torch.cat([self._share.new_zeros(1), self._share])
        return below[torch.searchsorted(self._values, scores.to(self._values), right=True)].to(scores)

    def steps(self) -> tuple[Tensor, Tensor]:
        """Return values (K,) and shares (K,) of images, float64: shares of the values up to a score sum to `shares`."""
        if not self.images:
            return torch.tensor([-torch.inf], dtype=torch.float64), torch.ones(1, dtype=torch.float64)
        return self._values.double(), self._share.diff(prepend=self._share.new_zeros(1))

    def expected(self, rate: float) -> tuple[float, float]:
        """Return the range of the share of other known images refused at `rate`, correct in nine of ten cases.

        Of n images the threshold is number k = rate n from below; the share of all images that lies below it has a beta
        distribution (k, n - k + 1), if these images are drawn as those.
        """
        from scipy.special import betaincinv  # slow to import

        if not self.images:
            return 0.0, 1.0
        below = max(1.0, rate * self.images)
        low, high = betaincinv(below, self.images - below + 1, [0.05, 0.95])
        return float(low), float(high)


def stored(values: Tensor) -> Tensor:
    """Replace NaN, where nothing was measured, by infinity: two states with NaN would never be equal."""
    return values.masked_fill(values.isnan(), torch.inf)


def measured(values: Tensor) -> Tensor:
    """Reverse `stored`."""
    return values.masked_fill(values.isinf(), torch.nan)


def usual(
    levels: Sequence[Tensor], locations: Sequence[Tensor], spreads: Sequence[Tensor], created_at: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Return current mean and spread (T,) of the fits of each task's images; for the arguments see `moved`.

    A task without measurements gets the mean of all others.
    """
    shift, wider = moved(levels, created_at)
    location, spread = torch.stack([*locations]) + shift, torch.stack([*spreads]) * wider
    location = location.where(~location.isnan(), location.nanmean().nan_to_num(0.0))
    return location, spread.where(~spread.isnan(), spread.nanmean().nan_to_num(1.0))


def moved(levels: Sequence[Tensor], created_at: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the shift (T,) of the fits of each task's images since it was learnt, and the factor (T,) of their spread.

    `levels`: of each task (spaces that there were, 4), see `LeftOut.levels`. `created_at` are the tasks, rising, at
    whose end each space was made. Of a task it is a mean over the spaces that know it.
    """
    every = torch.stack([F.pad(level, (0, 0, 0, len(created_at) - len(level)), value=torch.nan) for level in levels])
    shift = every[1:, :, 2] - every[:-1, :, 0]
    wider = every[1:, :, 3] / every[:-1, :, 1]
    known = (torch.arange(len(levels))[:, None] >= torch.tensor(created_at)).sum(1)  # spaces that know a task
    parts = []
    for steps, still in ((shift, 0.0), (wider, 1.0)):
        of_known = [steps[:, : n + 1].mean(1).nan_to_num(still) for n in range(len(created_at))]
        parts.append(F.pad(torch.stack(of_known), (0, 1), value=still))  # nothing comes after the last task
    level = known - 1, torch.arange(len(levels))
    return parts[0].flip(1).cumsum(1).flip(1)[level], parts[1].flip(1).cumprod(1).flip(1)[level]
