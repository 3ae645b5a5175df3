"""Orders in which labelled images arrive when task boundaries are hidden: every image once, classes may return.

Two protocols are published. Si-Blurry (Moon et al., ICCV 2023, arXiv 2308.09303): each stage has classes of its own
and shares blurry ones with the others. Gaussian (Koh et al., ICLR 2023, "SDP"): each class peaks at its own time,
once or periodically. `in_class_order` is the hardest order; `in_tasks` is that of a run of tasks.

Every function maps the labels (n,) of the images to their row numbers in order of arrival. All random draws come from
one generator, in the order of the text, so that a stream is a function of its seed.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from pearl.settings.online import OnlineStreamConfig


def arrival_order(labels: np.ndarray, classes: int, config: OnlineStreamConfig, seed: int) -> np.ndarray:
    """Return the rows of the images with these labels (n,), from 0 to `classes` - 1, in order of arrival."""
    return np.concatenate(arrival_stages(labels, classes, config, seed))


def arrival_stages(labels: np.ndarray, classes: int, config: OnlineStreamConfig, seed: int) -> list[np.ndarray]:
    """Return the rows of each stage, see `arrival_order`; a stream without stages has one."""
    draws = np.random.default_rng(seed)
    if config.protocol == "si_blurry":
        return si_blurry(
            labels,
            classes,
            draws,
            stages=config.stages,
            disjoint=config.disjoint,
            blurry=config.blurry,
            varying=config.varying,
        )
    if config.protocol == "tasks":
        return in_tasks(labels, classes, draws, stages=config.stages)
    if config.protocol == "gaussian":
        sigma, periods, at_start = config.sigma, config.periods, config.at_start
        return [gaussian(labels, classes, draws, sigma=sigma, periods=periods, at_start=at_start)]
    return [in_class_order(labels, classes, draws) if config.protocol == "sorted" else draws.permutation(len(labels))]


def si_blurry(
    labels: np.ndarray,
    classes: int,
    draws: np.random.Generator,
    *,
    stages: int = 5,
    disjoint: float = 50,
    blurry: float = 10,
    varying: bool = True,
) -> list[np.ndarray]:
    """Return the rows of each stage; the stream is their concatenation.

    Args:
        disjoint: percentage of the classes that occur in a single stage (N of the paper).
        blurry: percentage of the other classes' images that are redistributed among the stages (M of the paper).
        varying: the numbers of classes and of redistributed images per stage are drawn (Si-Blurry); otherwise they are
            equal (i-Blurry; Koh et al., ICLR 2022).

    A few classes never occur, if the numbers are not multiples of `stages`. The redistributed images are the first of
    each stage in data-set order, as in the authors' code.
    """
    disjoint_count = int(classes * disjoint / 100) // stages * stages
    shared = (classes - disjoint_count) // stages * stages
    order = draws.permutation(classes)

    def parts(total: int) -> list[int]:
        """Return where each stage's part of `total` things begins, and the end."""
        if not varying:
            return [t * (total // stages) for t in range(stages + 1)]
        return [0, *(np.sort(draws.integers(total, size=stages - 1)).tolist() if total else [0] * (stages - 1)), total]

    def images(of: np.ndarray, bounds: Sequence[int]) -> list[list[int]]:
        return [np.flatnonzero(np.isin(labels, of[start:stop])).tolist() for start, stop in pairwise(bounds)]

    in_one_stage = images(order[:disjoint_count], parts(disjoint_count))
    at_home = images(order[disjoint_count : disjoint_count + shared], parts(shared))
    if varying:
        moved = np.diff(parts(int(sum(map(len, at_home)) * blurry / 100))).tolist()
    else:
        moved = [int(len(home) * blurry / 100) for home in at_home]
    away = [row for home, count in zip(at_home, moved, strict=True) for row in home[:count]]
    away = [away[i] for i in draws.permutation(len(away))]
    arriving = moved if varying else [len(away) // stages] * stages
    stages_of_rows, begin = [], 0
    for own_rows, home, left, count in zip(in_one_stage, at_home, moved, arriving, strict=True):
        rows = np.array([*own_rows, *home[left:], *away[begin : begin + count]], dtype=np.int64)
        stages_of_rows.append(rows[draws.permutation(len(rows))])
        begin += count
    return stages_of_rows


def gaussian(
    labels: np.ndarray,
    classes: int,
    draws: np.random.Generator,
    *,
    sigma: float = 0.1,
    periods: int = 1,
    at_start: float = 1.0,
) -> np.ndarray:
    """Return the rows in order of arrival.

    Class i of C arrives around time i/C with standard deviation `sigma`, and again one later in each further period,
    with an equal share of its images. A share `at_start` of the classes may occur from the first period on; the others
    begin with later ones, and their images of earlier periods are left out.
    """
    order = draws.permutation(classes)
    seen = [round(classes * (at_start + (1 - at_start) * (r + 1) / periods)) for r in range(periods)]
    begins = np.empty(classes, dtype=np.int64)
    begins[draws.permutation(classes)] = np.searchsorted(seen, np.arange(classes), side="right")
    rows, times = [], []
    for position, label in enumerate(order):
        of_class = np.flatnonzero(labels == label)
        offsets, period = draws.normal(size=len(of_class)), draws.integers(periods, size=len(of_class))
        kept = period >= begins[label]
        rows.append(of_class[kept])
        times.append((position / classes + sigma * offsets + period)[kept])
    every, when = np.concatenate(rows), np.concatenate(times)
    mixed = draws.permutation(len(every))  # of images with equal times
    return every[mixed][np.argsort(when[mixed], kind="stable")]


def in_class_order(labels: np.ndarray, classes: int, draws: np.random.Generator) -> np.ndarray:
    """Return the rows class by class, classes and the images of each in random order."""
    mixed = draws.permutation(len(labels))
    position = np.argsort(draws.permutation(classes))
    return mixed[np.argsort(position[labels[mixed]], kind="stable")]


def in_tasks(labels: np.ndarray, classes: int, draws: np.random.Generator, *, stages: int) -> list[np.ndarray]:
    """Return the rows of each stage: of the next equally many classes by number, as in a run of tasks."""
    rows = [np.flatnonzero(np.isin(labels, some)) for some in np.array_split(np.arange(classes), stages)]
    return [some[draws.permutation(len(some))] for some in rows]
