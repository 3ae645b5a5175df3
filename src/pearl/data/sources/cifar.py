"""CIFAR-100, from the official archive or from an .npz."""

import warnings
from dataclasses import replace
from http.client import HTTPException

import numpy as np

from pearl.data.sources.arrays import npz
from pearl.data.sources.source import Source, Split, checked, reason
from pearl.errors import DataError
from pearl.storage.network import short_waits
from pearl.storage.paths import data_root, find


def cifar100(*, path: str | None = None, download: bool = True) -> Source:
    """CIFAR-100 (https://www.cs.toronto.edu/~kriz/cifar.html): 60,000 images of 32 x 32 in the 100 fine classes.

    `path` is an .npz in the layout of `npz`, or a folder that holds the official `cifar-100-python`. Without it, the
    data folder is searched for either, `cifar100.npz` first; else the official archive is downloaded into it.

    Raises:
        DataError: the data is missing and cannot be downloaded, or a checksum is wrong.
    """
    if path is None:
        source = data_root() / "cifar100.npz"
        source = source if source.exists() else data_root()
    else:
        source = find(path, what="CIFAR-100", error=DataError)
    if source.is_file():
        return replace(npz(path=str(source)), name="cifar100")

    from torchvision.datasets import CIFAR100

    try:
        # The official files are pickles: torchvision opens them only after checking their checksums.
        with short_waits(), warnings.catch_warnings(action="ignore", category=np.exceptions.VisibleDeprecationWarning):
            train = CIFAR100(source, train=True, download=download and path is None)
            test = CIFAR100(source, train=False)
    except (OSError, RuntimeError, HTTPException) as error:
        raise DataError(
            f"CIFAR-100 cannot be obtained from {source} ({reason(error)}): put the official {CIFAR100.filename} or a "
            f"cifar100.npz into {data_root()}, or pass data.path=FILE.npz"
        ) from None
    return checked(
        Source(
            "cifar100",
            tuple(train.classes),
            Split(train.data, np.array(train.targets, dtype=np.int64)),
            Split(test.data, np.array(test.targets, dtype=np.int64)),
        )
    )
