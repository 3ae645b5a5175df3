"""Data sets of the Hugging Face library `datasets`: from its hub, local files or Python objects."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from pearl.data.sources.rows import divided
from pearl.data.sources.source import Rows, Source, Split, checked, reason, some, unique
from pearl.errors import DataError
from pearl.storage import network
from pearl.storage.paths import as_path, data_root

_FILES = {".parquet": "parquet", ".arrow": "arrow", ".csv": "csv", ".json": "json", ".jsonl": "json"}
_TESTS = ("test", "validation", "valid", "val")


def hugging_face(
    dataset: str,
    *,
    subset: str | None = None,
    train: str = "train",
    test: str | None = None,
    image: str | None = None,
    label: str | None = None,
    seed: int = 0,
    test_share: float = 0.2,
    download: bool = True,
) -> Source:
    """A data set of Hugging Face, as hf/USER/NAME on the hub or hf/PATH of local files. Needs pearl[hf].

    A local path, here or in the data folder, is a folder of images or of parquet files, such a file, or a folder
    written by `save_to_disk`. `subset` is one of the data set's configurations; `train` and `test` are names of splits:
    `test` is by default the split of this name, else validation, else a random share of each class. `image` and `label`
    are columns, needed if several have the right type.

    Raises:
        DataError: the package is missing, the data set cannot be obtained, or has no such split or column.
    """
    what = f"hf/{dataset}"
    splits = _load(dataset, what, subset, download)
    if train not in splits or (test is not None and test not in splits):
        wrong = train if train not in splits else test
        raise DataError(f"{what}: has no split {wrong!r}, but {some(splits)}; set data.train and data.test")
    test = test or next((name for name in _TESTS if name in splits and name != train), None)
    image, label, names = columns(splits[train], what, image=image, label=label)
    parts = []
    for part in [splits[train], *([splits[test]] if test else [])]:
        plain = part.with_format(None)  # without transforms, which may be random
        labels = np.array(plain[label][:] if len(plain) else [], dtype=np.int64)
        if labels.min(initial=0) < 0 or labels.max(initial=0) >= len(names):
            raise DataError(f"{what}: rows without a label, or with a label that is not a class; choose another split")
        parts.append(Split(Rows(lambda row, plain=plain: plain[row][image], np.arange(len(plain))), labels))  # type: ignore[misc]
    notes = {} if test in (None, "test") else {"test": f"the split {test}, as there is no test"}
    if len(parts) == 1:
        parts = [*divided(parts[0], test_share, seed)]
    return checked(Source(Path(dataset).name, names, parts[0], parts[1], notes=notes))


def columns(
    data: Any, what: str, *, image: str | None = None, label: str | None = None
) -> tuple[str, str, tuple[str, ...]]:
    """Return the columns of images and labels of a `datasets.Dataset`, and its class names.

    Raises:
        DataError: no column, or several, have the right type.
    """
    kinds = {name: type(feature).__name__ for name, feature in (data.features or {}).items()}
    chosen = []
    for key, given, kind in (("image", image, "Image"), ("label", label, "ClassLabel")):
        fitting = [name for name, kind_of_column in kinds.items() if kind_of_column == kind and given in (None, name)]
        if len(fitting) != 1:
            there = (
                ", ".join(f"{name} ({kind_of_column})" for name, kind_of_column in kinds.items())
                or "none that it names"
            )
            fix = f"name one by data.{key}" if len(fitting) > 1 else f"make one a {kind} with `cast_column`"
            raise DataError(
                f"{what}: needs one column of type {kind}, {len(fitting)} fit (columns: {there}); {fix}, or keep "
                f"one with `select_columns`"
            )
        chosen += fitting
    words = list(data.features[chosen[1]].names)
    ids = [str(index) for index in range(len(words))]
    return chosen[0], chosen[1], unique(ids, dict(zip(ids, words, strict=True)))


def is_from_hub(data: Any) -> bool:
    """Return True if this is an object of the library `datasets`, without importing it."""
    return type(data).__module__.partition(".")[0] == "datasets"


def _load(dataset: str, what: str, subset: str | None, download: bool) -> dict[str, Any]:
    """Load the splits of a data set by name."""
    try:
        import datasets
    except ImportError:
        raise DataError(f"{what}: needs the package datasets; install it with: pip install 'pearl[hf]'") from None
    given = as_path(dataset, what=what, error=DataError)
    local = next((candidate for candidate in (given, data_root() / given) if candidate.exists()), None)
    try:
        with _calm(datasets, offline=local is not None or not download):
            if local is None:
                loaded = datasets.load_dataset(dataset, subset)
            elif local.is_file():
                if local.suffix.lower() not in _FILES:
                    raise DataError(
                        f"{local}: not a type of file that `datasets` reads; give {some(_FILES)}, or a folder"
                    )
                loaded = datasets.load_dataset(_FILES[local.suffix.lower()], data_files=str(local))
            elif any((local / name).exists() for name in ("dataset_dict.json", "state.json")):
                loaded = datasets.load_from_disk(str(local))
            else:
                loaded = datasets.load_dataset(str(local), subset)
    except DataError:
        raise
    except Exception as error:  # the library raises many types of errors for missing or damaged data
        raise DataError(
            f"{what} cannot be obtained ({reason(error)}): without internet, put its files (parquet, or a folder of "
            f"images "
            f"per class) into {data_root() / given}"
        ) from None
    return dict(loaded) if isinstance(loaded, dict) else {"train": loaded}


@contextmanager
def _calm(datasets: Any, *, offline: bool) -> Iterator[None]:
    """Silence the progress bars of `datasets`, and let it fail at once if its hub does not respond."""
    from huggingface_hub import constants

    before, bars = datasets.config.HF_HUB_OFFLINE, datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        with network.hub(offline=offline):
            datasets.config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE
            yield
    finally:
        datasets.config.HF_HUB_OFFLINE = before
        if bars:
            datasets.enable_progress_bars()
