"""Groups of images by whitened features, the number of groups found by the data."""

import numpy as np
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import pdist

SMALLEST = 3  # images of a group
APART = 0.1  # how much farther than images of one class two groups are, relative


def group(features: np.ndarray) -> np.ndarray:
    """Return the group (N,) of each image from 0, -1 for none, by whitened features (N, p).

    Groups are merged by average linkage, until the mean squared distance between any two exceeds that within a known
    class, which is 2 p.
    """
    if len(features) < SMALLEST:
        return np.full(len(features), -1)
    limit = 2 * features.shape[1] * (1 + APART)
    own = fcluster(linkage(pdist(features, "sqeuclidean"), "average"), limit, "distance")
    _, own, sizes = np.unique(own, return_inverse=True, return_counts=True)
    places = np.where(sizes >= SMALLEST, np.cumsum(sizes >= SMALLEST) - 1, -1)
    return places[own]
