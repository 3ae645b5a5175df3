"""Retained accuracy of old classes, whose images are gone, estimated from class statistics."""

import math

import torch
from torch import Tensor

from pearl.methods.common.class_statistics import ClassStatistics
from pearl.methods.common.feature_spaces import ByClass, begins_of, chain_rule
from pearl.methods.common.scatter import root, shrunk

DRAWS, WIDTHS = 128, [0.5 * i for i in range(1, 17)]  # sampled images per task, and the largest factor of their spread
FEWEST, PAIRS = 16, 2**17  # limit on pairs of an image and a prototype; with many prototypes fewer images are sampled


@torch.no_grad()
def retained(class_statistics: ClassStatistics, t: int, right: int, images: int) -> float:
    """Return the share of task t's correct images that are still correct among all classes of today.

    It is an estimate, since the images are gone. Features are sampled around the task's means, separately in each
    feature space, from the covariance times a factor. Factors are weighted by the likelihood that `right` of the
    `images` were correct among the classes known then.
    """
    created_at = [created for created in class_statistics.created_at if created <= t]
    draws = max(FEWEST, min(DRAWS, PAIRS // len(class_statistics.class_of)))
    true_class = torch.arange(draws) % len(class_statistics.tensors[f"task.{t}.classes"])
    true = class_statistics.tensors[f"task.{t}.classes"].cpu()[true_class]
    generator = torch.Generator().manual_seed(t)
    # the classifier has them already; with many classes they take seconds
    made = list(class_statistics.head().discriminants)[: len(created_at)]
    means, noise = [], []
    for v in range(len(created_at)):
        factor = root(shrunk(*class_statistics.covariance(v))).cpu()
        noise.append(torch.randn(draws, len(factor), generator=generator, dtype=factor.dtype) @ factor.T)
        means.append(class_statistics.tensors[f"task.{t}.means.{v}"].cpu().double()[true_class])
    first = class_statistics.head().first[: len(created_at)]
    kind = class_statistics.tensors["space.0.mean"]

    def accuracy(scores: list[Tensor], tasks: int) -> float:
        """Return the accuracy among the classes of the first tasks, by number."""
        known = int((class_statistics.task_of < tasks).sum())
        among = [rows[:, : known - start] for rows, start in zip(scores, first, strict=True)]
        begins = begins_of(class_statistics.task_of[:known], created_at)
        logp = ByClass(class_statistics.class_of[:known])(
            chain_rule(among, first, begins, created_at, class_statistics.temperature)
        )
        share = float((logp.argmax(1) == true).double().mean())
        return min(max(share, 0.5 / draws), 1 - 0.5 / draws)

    likely, left = [], []
    for wider in WIDTHS:
        drawn = [(mean + wider * away).to(kind) for mean, away in zip(means, noise, strict=True)]
        scores = [score(x).cpu().double() for score, x in zip(made, drawn, strict=True)]
        then, now = accuracy(scores, t + 1), accuracy(scores, len(class_statistics))
        likely.append(right * math.log(then) + (images - right) * math.log(1 - then))
        left.append(min(now / then, 1))
    return float(torch.tensor(likely).softmax(0) @ torch.tensor(left))
