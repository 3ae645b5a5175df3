"""Text features: the outputs of a text encoder for class names, read from a file."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pearl.data.sources.arrays import read_npz
from pearl.errors import ConfigError, counted, printable
from pearl.names import class_name
from pearl.storage.paths import find


class TextFeatures:
    """Features by name from an .npz file: `names` (N,) of str, `features` (N, width) of floats; names may repeat.

    The path is tried as written, then under $PEARL_DATA, at construction. The model stores what it needs, so
    predictions work without the file.

    Raises:
        ConfigError: the file is missing or has another structure.
        DataError: it is not an .npz file.
    """

    def __init__(self, path: str, *, option: str) -> None:
        self.file: Path = find(path, what=option, error=ConfigError)
        arrays = read_npz(self.file)
        names, features = arrays.get("names"), arrays.get("features")
        if (
            names is None
            or features is None
            or names.dtype.kind != "U"
            or features.dtype.kind != "f"
            or features.ndim != 2
            or names.shape != features.shape[:1]
            or not np.isfinite(features).all()
        ):
            raise ConfigError(
                f"{option}: {self.file} needs `names`, N texts, and `features`, N rows of finite floats; write them "
                f"with numpy.savez"
            )
        self.rows: dict[str, list[int]] = {}
        for row, name in enumerate(names.tolist()):
            self.rows.setdefault(_plain(name), []).append(row)
        self.features = torch.from_numpy(features.astype(np.float32))

    def of(self, names: Sequence[str]) -> list[Tensor]:
        """Return the rows (n, width) of each name; underscores count as spaces, case is ignored.

        Raises:
            ConfigError: the file lacks a name.
        """
        missing = [name for name in names if _plain(name) not in self.rows]
        if missing:
            raise ConfigError(
                f"{self.file}: no feature of {printable(missing[0])!r}"
                + (f" and {counted(len(missing) - 1, 'more class')}" if missing[1:] else "")
                + "; make the file with the names of all classes"
            )
        return [self.features[self.rows[_plain(name)]] for name in names]

    def __contains__(self, name: str) -> bool:
        return _plain(name) in self.rows


def _plain(name: str) -> str:
    return " ".join(class_name(name).replace("_", " ").split()).casefold()
