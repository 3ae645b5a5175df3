"""The same classes in another look: fixed transforms of images, for streams whose tasks are domains.

A drawing of an apple is an apple. What photographs lack are sets of other domains for any data; a transform makes one.
"""

import numpy as np
from scipy import ndimage

from pearl.settings.sections import Domain

NOISE = 40.0  # standard deviation, of values up to 255


def seen_as(domain: Domain, images: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Images (N, H, W, 3) uint8 in the look of a domain, the same shape and type.

    `edges`: the size of each channel's gradient (Sobel), 4 to the unit. `inverted`: negatives. `noisy`: with normal
    noise of standard deviation 40, drawn anew for each image by its row (N,), the same in every run.
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
    # not `ndimage.sobel`, which smooths over every other axis: over channels and over images
    smooth = ndimage.correlate1d(values, [1.0, 2.0, 1.0], across, mode="nearest")
    return ndimage.correlate1d(smooth, [-1.0, 0.0, 1.0], along, mode="nearest")
