"""scikit-learn's digits, which every installation includes."""

from functools import cache

import numpy as np

from pearl.data.sources.source import Source, Split, checked, three_channels
from pearl.errors import DataError


def digits(*, seed: int = 0, test_share: float = 0.2) -> Source:
    """scikit-learn's 1,797 handwritten digits, 8 x 8 grey in three equal channels, split by seed within each class.

    Raises:
        DataError: `test_share` leaves a class without training or test images.
    """
    from sklearn.model_selection import train_test_split

    grey, labels = _arrays()
    try:
        rows = train_test_split(np.arange(len(labels)), test_size=test_share, stratify=labels, random_state=seed)
    except ValueError as error:
        raise DataError(f"digits cannot be split with test_share={test_share}: {error}") from None
    train, test = (Split(three_channels(grey[part]), labels[part]) for part in rows)
    return checked(Source("digits", tuple(str(digit) for digit in range(10)), train, test))


@cache
def _arrays() -> tuple[np.ndarray, np.ndarray]:
    """Return all images, uint8 (1797, 8, 8), and their labels; parsing the text takes longer than splitting."""
    from sklearn.datasets import load_digits

    data = load_digits()
    return np.rint(data.images * (255 / 16)).astype(np.uint8), data.target.astype(np.int64)
