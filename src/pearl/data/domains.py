"""Fixed transforms of images into other styles, for streams whose tasks are domains.

They take the place of data sets in several domains, which most photographs lack.
"""

import numpy as np
from scipy import ndimage

from pearl.settings.sections import Domain

NOISE = 40.0  # standard deviation for values up to 255


def seen_as(domain: Domain, images: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return images (N, H, W, 3) uint8 in the style of a domain, with the same shape and type.

    `edges`: 4 times the magnitude of each channel's gradient (Sobel). `inverted`: negatives. `noisy`: normal noise of
    standard deviation 40, seeded by each image's row (N,), so that it is the same in every run.
    """
    if domain == "inverted":
        return 255 - images
    if domain == "plain":
        return images
    values = images.astype(np.float32)
    if domain == "edges":
        values = np.hypot(_slope(values, 1, 2), _slope(values, 2, 1)) / 4
    else:
        shape = images.shape[1:]
        for image, row in zip(values, rows, strict=True):
            image += NOISE * np.random.default_rng([int(row), 1]).standard_normal(shape, dtype=np.float32)
    return values.round().clip(0, 255).astype(np.uint8)


def _slope(values: np.ndarray, along: int, across: int) -> np.ndarray:
    # not `ndimage.sobel`, which also smooths over channels and images
    smooth = ndimage.correlate1d(values, [1.0, 2.0, 1.0], across, mode="nearest")
    return ndimage.correlate1d(smooth, [-1.0, 0.0, 1.0], along, mode="nearest")
