"""Inputs for learning and evaluation, from any source, as images with class names."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from pearl.data.csv_list import SUFFIXES, read_list
from pearl.data.decoding import Decoding
from pearl.data.images import Picture, is_one, one_of, pixels_of, read_all
from pearl.data.sources import Files, class_names, columns, is_from_hub, labelled, left_out, some, tree
from pearl.errors import DataError, counted, printable
from pearl.names import class_name
from pearl.settings.parts import SOURCES
from pearl.settings.registry import nearest

WHAT = (
    "give a folder with a folder per class, a .csv of paths and labels, (images, labels), or a data set of (image, "
    "label) pairs"
)
_LIBRARIES = ("torchvision/", "hf/")
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Inputs:
    """Images with their classes: paths of files, pictures that a library reads, or pixels.

    `labels` (N,) int64 are indices into `classes`, which `in_order` has sorted. `source` is the path or name of the
    source, None for data in memory. `notes` list the images left out.
    """

    source: str | None
    name: str  # default name of a task made of them
    classes: tuple[str, ...]
    images: Any  # as Split.images; arrays are (N, size, size, 3) uint8
    labels: np.ndarray
    notes: tuple[str, ...] = ()
    decoding: Decoding = field(default_factory=Decoding)

    def __len__(self) -> int:
        return len(self.labels)

    def pixels(self, start: int, stop: int, size: int) -> tuple[np.ndarray, list[str]]:
        """Return the readable ones of images `start` to `stop`, (n, size, size, 3) uint8, and a line for each other."""
        if isinstance(self.images, tuple):
            _, pixels, problems = read_all(self.images[start:stop], size, self.decoding)
            return pixels, problems
        if isinstance(self.images, np.ndarray) and self.images.shape[1:3] == (size, size):
            return self.images[start:stop], []
        return pixels_of(self.images, np.arange(start, min(stop, len(self))), size, self.decoding), []

    def where(self, index: int) -> str:
        """Return the name of an image: its file, or its number from 0."""
        return printable(str(self.images[index])) if isinstance(self.images, tuple) else f"image {index}"

    def renamed(self, names: Mapping[str, str]) -> "Inputs":
        """Return the images with some classes renamed; classes that get the same name are merged."""
        names = by_class_name(names)
        named = [names.get(name, name) for name in self.classes]
        merged = in_order({*named})
        return replace(
            self, classes=tuple(merged), labels=np.array([merged.index(name) for name in named])[self.labels]
        )


def given(
    data: Any,
    size: int,
    *,
    part: Literal["train", "test"],
    nested: bool = False,
    decoding: Decoding | None = None,
    on_progress: Progress | None = None,
) -> Inputs:
    """Read images with classes from any supported input.

    A folder holds a folder of images per class, or a folder `part` of this layout; if `nested`, classes are the
    innermost folders. A .csv file has a line PATH,LABEL for each image. `torchvision/NAME` and `hf/NAME` are data sets
    of these libraries, unless a file has that name. In memory: a `datasets.Dataset`, `(images, labels)`, `(images,
    labels, names)`, or any iterable of (image, label) pairs, such as a torch data set; these images are read once,
    immediately, at `size` pixels. A label is a name, or an integer index into the names.

    Raises:
        DataError: names the unusable item.
    """
    decoding = decoding or Decoding()
    if not isinstance(data, str | Path):
        if nested:
            raise DataError("nested is for folders; leave it out")
        return _in_memory(data, size, decoding, on_progress)
    root = Path(data)
    if str(data).startswith(_LIBRARIES) and not root.exists():
        source = SOURCES.build(SOURCES.resolve(str(data), "data"))
        split = source.train if part == "train" else source.test
        inputs = Inputs(str(data), source.name, source.classes, split.images, split.labels, decoding=decoding)
        return _sorted(inputs)
    if root.is_file() and root.suffix.lower() in SUFFIXES:
        return _of_files(root, *read_list(root), decoding)
    folder = root / part if (root / part).is_dir() else root
    return _of_files(root, tree(folder, nested=nested), left_out(folder, nested=nested), decoding)


def in_order(names: Iterable[str]) -> list[str]:
    """Sort names: alphabetically, or numerically if all are integers."""
    ordered = sorted(names)
    return sorted(ordered, key=int) if all(name.isascii() and name.isdigit() for name in ordered) else ordered


def check_aliases(aliases: Mapping[str, str], parts: Sequence[Inputs]) -> None:
    """Raise if an alias names a folder that none of the inputs has, since a typing error would create another class.

    Raises:
        DataError: names the alias and the most similar folder.
    """
    names = sorted({name for part in parts for name in part.classes})
    if strange := sorted(by_class_name(aliases).keys() - {*names}):
        sources, hint = ", ".join(part.source or part.name for part in parts), nearest(strange[0], names)
        raise DataError(f"{sources}: no folder {printable(strange[0])!r} that could be an alias; {hint}")


def by_class_name(aliases: Mapping[str, str]) -> dict[str, str]:
    """Return aliases with both names in normal form."""
    return {class_name(folder): class_name(name) for folder, name in aliases.items()}


def name_of(data: Any) -> str:
    """Return the name of a task: that of its folder or file, or of its classes for images in memory.

    A folder `train` is a part of its parent, see `given`, and gets the parent's name.
    """
    if not isinstance(data, str | Path):
        return ""
    path = Path(data).resolve()
    if path.is_file():
        return class_name(Path(data).stem)
    return class_name(path.parent.name or path.name if path.name == "train" else path.name)


def _of_files(path: Path, files: Files, notes: Iterable[str], decoding: Decoding) -> Inputs:
    classes, notes = tuple(in_order(files)), tuple(notes)
    split = labelled(files, classes)
    return Inputs(str(path.absolute()), name_of(path), classes, split.images, split.labels, notes, decoding)


def _sorted(inputs: Inputs) -> Inputs:
    """Return the images with only the classes that have some, sorted."""
    present = {inputs.classes[label]: label for label in np.unique(inputs.labels)}
    names = in_order(present)
    index_of = np.zeros(len(inputs.classes), dtype=np.int64)
    index_of[[present[name] for name in names]] = np.arange(len(names))
    return replace(inputs, classes=tuple(names), labels=index_of[inputs.labels])


def _in_memory(data: Any, size: int, decoding: Decoding, on_progress: Progress | None) -> Inputs:
    pairs, names = _pairs(data)
    count = len(data) if isinstance(data, Sized) and not isinstance(data, tuple) else 0
    pixels, labels = bytearray(), []
    for index, (picture, label) in enumerate(pairs):
        labels.append(_class_of(label, names, index))
        pixels += one_of(index, picture, size, decoding).tobytes()
        if on_progress and count:
            on_progress(index + 1, count)
    if not labels:
        raise DataError("the data set is empty; give one with images")
    if len({type(label) for label in labels}) > 1:
        raise DataError("some labels are whole numbers, others names; give all of them as one or the other")
    classes = tuple(in_order({str(label) for label in labels}))
    images = np.frombuffer(pixels, np.uint8).reshape(len(labels), size, size, 3)
    rows = {name: row for row, name in enumerate(classes)}
    ordered = np.array([rows[str(label)] for label in labels])
    return Inputs(None, some(classes, 3), classes, images, ordered, decoding=decoding)


def _pairs(data: Any) -> tuple[Iterable[tuple[Picture, Any]], tuple[str, ...]]:
    """Return the images with their labels, and the names that labels index, if any."""
    what = type(data).__name__
    if isinstance(data, tuple) and len(data) in (2, 3):
        return _of_arrays(*data)
    if is_from_hub(data):
        if isinstance(data, Mapping):
            raise DataError(f"a {what} of several splits; give one of them, as data[{next(iter(data), 'train')!r}]")
        image, label, names = columns(data, f"this {what}")
        plain = data.with_format(None)  # without transforms: pearl augments in training
        return ((row[image], row[label]) for row in plain), names
    if what == "DataLoader":
        raise DataError("a DataLoader gives batches; give its data set, as loader.dataset")
    mapped = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    if is_one(data) or isinstance(data, Mapping | bytes) or not (mapped or hasattr(data, "__iter__")):
        raise DataError(f"{what}: nothing to learn from; {WHAT}")
    return _items(data, mapped), class_names(data)


def _of_arrays(images: Any, labels: Any, names: Any = ()) -> tuple[Iterable[tuple[Picture, Any]], tuple[str, ...]]:
    if isinstance(images, str | Path | Mapping) or isinstance(labels, str | Mapping):
        raise DataError(f"(images, labels) are two arrays, tensors or lists of one length; {WHAT}")
    try:
        counts = len(images), len(labels)
    except TypeError:  # a generator, number or zero-dimensional tensor
        raise DataError("(images, labels) need a length; give arrays, tensors or lists") from None
    if counts[0] != counts[1]:
        raise DataError(
            f"{counted(counts[0], 'image')}, but {counted(counts[1], 'label')}; give one label for each image"
        )
    names = tuple(class_name(name) if isinstance(name, str) else name for name in names)
    if not all(isinstance(name, str) for name in names) or len({*names}) != len(names):
        raise DataError("the names in (images, labels, names) must be different strings; fix them")
    return zip(images, labels, strict=True), names


def _items(data: Any, mapped: bool) -> Iterator[tuple[Picture, Any]]:
    """Yield the pairs of a data set."""

    def pair(index: int, item: Any) -> tuple[Picture, Any]:
        if not isinstance(item, tuple | list) or len(item) != 2:
            form = f"{type(item).__name__} of {len(item)}" if isinstance(item, Sized) else type(item).__name__
            raise DataError(f"item {index} of the data set: expected an (image, label) pair, got {form}; {WHAT}")
        return item[0], item[1]

    if not mapped:
        for index, item in enumerate(data):
            yield pair(index, item)
        return
    for index in range(len(data)):
        try:
            item = data[index]
        except Exception as error:  # a damaged file can raise nearly any exception
            raise DataError(f"item {index} of the data set cannot be read ({error!r}); fix or remove it") from error
        if index == 0 and not np.array_equal(_numbers(pair(0, item)[0]), _numbers(pair(0, data[0])[0])):
            raise DataError(
                "the data set returns a different first image each time; remove its random transforms, since pearl "
                "augments images itself (images.augment)"
            )
        yield pair(index, item)


def _numbers(picture: Any) -> Any:
    return picture if isinstance(picture, str | Path) else np.asarray(picture)


def _class_of(label: Any, names: tuple[str, ...], index: int) -> str | int:
    """Return a label as a class name; a number if there are no names to index."""
    value = label
    if getattr(value, "shape", None) in ((), (1,)) and hasattr(value, "item"):
        value = value.item()
    if isinstance(value, str) and (name := class_name(value)).strip() and (not names or name in names):
        return name
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0 and (not names or value < len(names)):
        return names[value] if names else value
    shape = f" of shape {tuple(value.shape)}" if getattr(value, "shape", None) else f" {value!r}"[:80]
    known = (
        f"one of the {counted(len(names), 'class')}, by name or counted from 0"
        if names
        else ("a name, or a whole number from 0")
    )
    raise DataError(f"image {index}: its label, a {type(label).__name__}{shape}, must be {known}")
