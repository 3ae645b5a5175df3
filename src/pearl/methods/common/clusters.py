"""Classes as clusters of features, from which features are sampled when the images are gone."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pearl.data.batches import Batch, batch_bounds
from pearl.nn.task_modules import TaskTensors

STARTS = 10  # of k-means; the tightest clusters are kept
ROUNDS = 300
FLOOR = 1e-4  # added to variances: a cluster of one image has zero variance


class FeatureClusters(nn.Module):
    """Up to `count` clusters per class, each stored as mean and variances of its features."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count
        self.tensors = TaskTensors(buffers=True)  # "t.mean", "t.variance" (M, dim), "t.label" (M,) logit indices

    def __len__(self) -> int:
        """Return the number of tasks."""
        return len(self.tensors) // 3

    def grow(self, features: Tensor, labels: Tensor) -> None:
        """Add a task's classes, from features (N, dim) with labels (N,)."""
        grown: dict[str, list[Tensor]] = {"mean": [], "variance": [], "label": []}
        for label in labels.unique():
            rows = features[labels == label]
            centroids, cluster_of = kmeans(rows, self.count)
            for cluster in range(len(centroids)):
                grown["mean"].append(centroids[cluster].to(rows))
                grown["variance"].append(rows[cluster_of == cluster].double().var(0, correction=0).to(rows))
                grown["label"].append(label)
        t = len(self)
        for name, values in grown.items():
            self.tensors.add(f"{t}.{name}", torch.stack(values))

    def all(self, name: str) -> Tensor:
        """Return means, variances or labels of the clusters of all tasks."""
        return torch.cat([self.tensors[f"{t}.{name}"] for t in range(len(self))])

    def draws(self, count: int) -> "FeatureDraws":
        """Return batches of `count` sampled features of all classes per epoch."""
        return FeatureDraws(self.all("mean"), self.all("variance") + FLOOR, self.all("label"), count)


class FeatureDraws:
    """Batches of features sampled from normal distributions with equal probability; see `data.Batches`.

    Means and variances are (M, dim), labels (M,); an epoch has `count` features, which the rows of batches index.
    """

    def __init__(self, means: Tensor, variances: Tensor, labels: Tensor, count: int) -> None:
        self.means, self.deviations, self.labels, self.count = means, variances.sqrt(), labels, count

    def __len__(self) -> int:
        return self.count

    def batches(self, size: int, seed: int, *, skip: int = 0) -> Iterator[Batch]:
        """Yield one epoch, sampled by `seed`, without its first `skip` batches."""
        generator = torch.Generator().manual_seed(seed)
        chosen = torch.randint(len(self.labels), (self.count,), generator=generator).to(self.labels.device)
        noise = torch.randn(self.count, self.means.shape[1], generator=generator).to(self.means)
        rows = torch.arange(self.count, device=self.labels.device)
        for start, stop in batch_bounds(self.count, size)[skip:]:
            of_batch = chosen[start:stop]
            x = self.means[of_batch] + self.deviations[of_batch] * noise[start:stop]
            yield Batch(x, self.labels[of_batch], rows[start:stop])


def kmeans(rows: Tensor, count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return centroids (k, dim) of rows (N, dim) in float64, and the index (N,) of each row's centroid.

    Lloyd's algorithm after k-means++ (Arthur and Vassilvitskii, 2007), the best of `STARTS`. With fewer than `count`
    different rows, each is a centroid. Sums are matrix products, so that results are bit-reproducible.
    """
    rows, generator = rows.double(), torch.Generator().manual_seed(seed)
    attempts = [_lloyd(rows, _spread(rows, count, generator)) for _ in range(STARTS)]
    _, centroids, cluster_of = min(attempts, key=lambda one: one[0])
    return centroids, cluster_of


def _spread(rows: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """k-means++: each further centroid is a row, drawn with probability proportional to its squared distance."""
    chosen = torch.randint(len(rows), (1,), generator=generator).to(rows.device)
    while len(chosen) < count:
        apart = torch.cdist(rows, rows[chosen], compute_mode="donot_use_mm_for_euclid_dist").amin(1).square()
        if not apart.any():
            break
        drawn = torch.multinomial(apart.cpu(), 1, generator=generator).to(rows.device)
        chosen = torch.cat([chosen, drawn])
    return rows[chosen]


def _lloyd(rows: Tensor, centroids: Tensor) -> tuple[float, Tensor, Tensor]:
    """Return the sum of squared distances, the centroids and each row's centroid after convergence."""
    for _ in range(ROUNDS):
        cluster_of = torch.cdist(rows, centroids).argmin(1)
        members = F.one_hot(cluster_of, len(centroids)).to(rows)
        counts = members.sum(0)[:, None]
        moved = torch.where(counts > 0, members.T @ rows / counts.clamp(min=1), centroids)
        if torch.equal(moved, centroids):
            break
        centroids = moved
    distances = torch.cdist(rows, centroids)
    return float(distances.amin(1).square().sum()), centroids, distances.argmin(1)
