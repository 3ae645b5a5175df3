"""Groups of images by their whitened features; the number of groups is found by the data."""

import numpy as np

SMALLEST = 3  # images of a group
LIMIT = 1.5  # that a merge may add; chosen from 1.25 to 2 on classes that `benchmarks/discover.py` does not report


def group(features: np.ndarray) -> np.ndarray:
    """Return the group (N,) of each image from 0, -1 for none, by features (N, p) of length 1.

    Ward's method (1963) merges the two groups that add least to the sum of squared distances between images and the
    mean of their group, until that is more than `LIMIT`. Features of a few dozen dimensions, or hundreds of images of
    a class, are rather split into several groups than mixed. Memory is 4 N^2 bytes.
    """
    from scipy.cluster.hierarchy import fcluster, linkage  # slow to import

    if len(features) < SMALLEST:
        return np.full(len(features), -1)
    tree = linkage(features, "ward")  # its distance d of two groups means that merging them adds d^2 / 2
    _, group_of, sizes = np.unique(
        fcluster(tree, np.sqrt(2 * LIMIT), "distance"), return_inverse=True, return_counts=True
    )
    there = sizes >= SMALLEST
    return np.where(there, there.cumsum() - 1, -1)[group_of]
