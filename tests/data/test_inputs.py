"""What people give to be learnt: folders, lists, data sets, arrays. Each gives the same images, or one line."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset

from pearl.data.images import to_pixels
from pearl.data.inputs import Inputs, given, name_of
from pearl.errors import DataError, PearlError
from photos import digit, write_photos

SIZE = 8
NAMES = {"zero": 0, "one": 1, "ten": 2}
COUNT = 3


class Pairs(Dataset):
    """As torchvision's: Pillow images, whole numbers, `classes`."""

    classes = ("zero", "one", "ten")

    def __init__(self, change: Callable[[np.ndarray], Any] = Image.fromarray) -> None:
        self.change = change

    def __len__(self) -> int:
        return COUNT * len(NAMES)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        if index >= len(self):
            raise IndexError
        label, row = divmod(index, COUNT)
        return self.change(digit(label)[row]), label


def arrays() -> tuple[np.ndarray, np.ndarray]:
    return np.concatenate([digit(label)[:COUNT] for label in NAMES.values()]), np.repeat([0, 1, 2], COUNT)


def take(data: Any, **options: Any) -> Inputs:
    return given(data, SIZE, part="train", **options)


def images_of(actual: Inputs) -> dict[str, list[bytes]]:
    """The images of each class, whatever their order."""
    pixels, wrong = actual.pixels(0, len(actual), SIZE)
    assert wrong == [] and pixels.shape == (len(actual), SIZE, SIZE, 3) and pixels.dtype == np.uint8
    assert actual.labels.dtype == np.int64
    return {
        name: sorted(image.tobytes() for image in pixels[actual.labels == row])
        for row, name in enumerate(actual.classes)
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_photos(tmp_path / "photos", NAMES, COUNT)


def as_list(folder: Path, *, sign: str = ",", head: str = "path{}label\n", start: bytes = b"") -> Path:
    path = folder.parent / "photos.csv"
    rows = "".join(f'"photos/{file.parent.name}/{file.name}"{sign} {file.parent.name}\n' for file in folder.glob("*/*"))
    path.write_bytes(start + (head.format(sign) + rows).encode())
    return path


def rewritten(path: Path, encoding: str, old: str, new: str) -> Path:
    path.write_bytes(path.read_text().replace(old, new).encode(encoding))
    return path


def tensors(dtype: torch.dtype) -> torch.Tensor:
    images = torch.from_numpy(arrays()[0])
    return images if dtype == torch.uint8 else (images / 255).to(dtype)


KINDS: dict[str, Callable[[Path], Any]] = {
    "list": as_list,
    "list without a head": lambda folder: as_list(folder, head=""),
    "list of semicolons, with a BOM": lambda folder: as_list(folder, sign=";", start=b"\xef\xbb\xbf"),
    "list of tabs": lambda folder: as_list(folder, sign="\t", head=""),
    "list of Hugging Face": lambda folder: as_list(folder, head="file_name{}Category\n"),
    "list of a spreadsheet": lambda folder: rewritten(as_list(folder, sign="\t"), "utf-16", "/", "\\"),
    "data set": lambda _: Pairs(),
    "data set of arrays": lambda _: Pairs(lambda image: image),
    "data set of tensors": lambda _: Pairs(lambda image: torch.from_numpy(image)[None] / 255),
    "part of a data set": lambda _: Subset(Pairs(), range(COUNT * 3)),
    "several data sets": lambda _: ConcatDataset([Subset(Pairs(), range(4)), Subset(Pairs(), range(4, 9))]),
    "list of pairs": lambda _: [(image, Pairs.classes[label]) for image, label in zip(*arrays(), strict=True)],
    "generator": lambda _: ((image, Pairs.classes[label]) for image, label in zip(*arrays(), strict=True)),
    "arrays": lambda _: (*arrays(), Pairs.classes),
    "arrays, lists": lambda _: (list(arrays()[0]), [Pairs.classes[label] for label in arrays()[1]]),
    "bytes, channels first": lambda _: (tensors(torch.uint8)[:, None], torch.from_numpy(arrays()[1]), Pairs.classes),
    "float32": lambda _: (tensors(torch.float32), torch.from_numpy(arrays()[1])[:, None], list(Pairs.classes)),
    "float64": lambda _: (tensors(torch.float64).numpy(), arrays()[1], Pairs.classes),
    "RGB": lambda _: (np.repeat(arrays()[0][..., None], 3, axis=3), arrays()[1], Pairs.classes),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_gives_the_same(folder: Path, kind: str) -> None:
    actual = take(KINDS[kind](folder))
    assert actual.classes == ("one", "ten", "zero")
    assert images_of(actual) == images_of(take(folder))


def test_files_know_where_they_are_and_memory_has_the_names_of_its_classes(folder: Path) -> None:
    assert (take(folder).source, take(folder).name) == (str(folder), "photos")
    assert (take(str(as_list(folder))).source, take(as_list(folder)).name) == (f"{folder}.csv", "photos")
    many = take((np.zeros((5, 8, 8), np.uint8), list("edcba")))
    assert (many.source, many.name) == (None, "a, b, c and 2 more")


def test_labels_without_names_are_numbers_and_classes_without_images_are_none() -> None:
    images, labels = arrays()
    assert take((images, labels + 7)).classes == ("7", "8", "9")
    assert take((images[:4], labels[:4], Pairs.classes)).classes == ("one", "zero")
    assert take((images[:1], [2])).classes == ("2",)


def test_nested_folders(tmp_path: Path) -> None:
    write_photos(tmp_path / "deep/animals", {"cat": 0, "dog": 1}, COUNT)
    write_photos(tmp_path / "deep", {"car": 2}, COUNT)
    (tmp_path / "deep/animals/up").symlink_to(tmp_path / "deep")
    actual = take(tmp_path / "deep", nested=True)
    assert actual.classes == ("animals/cat", "animals/dog", "car") and actual.notes == ()
    (tmp_path / "deep/animals/up").unlink()
    (tmp_path / "deep/train").mkdir()
    (tmp_path / "deep/animals").rename(tmp_path / "deep/train/animals")
    assert take(tmp_path / "deep", nested=True).classes == ("animals/cat", "animals/dog")
    Image.fromarray(digit(0)[0]).save(tmp_path / "deep/train/animals/stray.png")
    with pytest.raises(DataError, match="animals has images beside folders of classes: move them"):
        take(tmp_path / "deep", nested=True)


def test_a_folder_of_a_part_is_read_if_it_is_there(folder: Path) -> None:
    for part in ("train", "test"):
        write_photos(folder / part, {part: 0}, 1)
        assert given(folder, SIZE, part=part).classes == (part,)  # type: ignore[arg-type]
    assert name_of(folder / "train") == name_of(str(folder)) == "photos", "of each month its own, not `train`"
    assert name_of("/train") == "train"


class Shifting(Pairs):
    def __getitem__(self, index: int) -> tuple[Any, int]:
        return np.random.randint(255, size=(8, 8), dtype=np.uint8), 0  # noqa: NPY002


class Broken(Pairs):
    def __getitem__(self, index: int) -> tuple[Any, int]:
        raise OSError("image file is\ntruncated")


WHITE = np.full((8, 8), 255, np.uint8)
WRONG: dict[str, tuple[Any, str]] = {
    "a number": (3, "int: nothing to learn from; give a folder"),
    "nothing": (None, "NoneType: nothing to learn from"),
    "a picture": (WHITE, "ndarray: nothing to learn from"),
    "a mapping": ({"cat": [WHITE]}, "dict: nothing to learn from"),
    "no pairs": ([WHITE, WHITE], "item 0 of the data set: expected an .image, label. pair, got ndarray of 8"),
    "triples": ([(WHITE, 0, 1)], "pair, got tuple of 3"),
    "batches": (DataLoader(Pairs(), 2), "give its data set, as loader.dataset"),
    "empty": ([], "the data set is empty"),
    "empty arrays": ((np.zeros((0, 8, 8)), []), "the data set is empty"),
    "a generator that ends": ((pair for pair in ()), "the data set is empty"),
    "other lengths": ((np.zeros((3, 8, 8)), [1, 2]), "3 images, but 2 labels"),
    "a path": (("photos", ["a"]), "are two arrays, tensors or lists"),
    "no length": ((iter([WHITE]), [0]), "need a length"),
    "a label beyond": (([WHITE], [3], ["a", "b"]), "image 0: its label, a int 3, must be one of the 2 classes"),
    "a label below": (([WHITE], [-1]), "its label, a int -1, must be a name, or a whole number from 0"),
    "a name that is none": (([WHITE], ["c"], ["a", "b"]), "its label, a str 'c', must be one of the 2 classes"),
    "a float": (([WHITE], [1.0]), "its label, a float 1.0, must be a name, or a whole number"),
    "true": (([WHITE], [True]), "its label, a bool True"),
    "one of n": (([WHITE], np.eye(4)[:1]), r"its label, a ndarray of shape \(4,\)"),
    "no name": (([WHITE], [" "]), "its label, a str ' '"),
    "names and numbers": (([WHITE, WHITE], ["1", 1]), "give all of them as one or the other"),
    "names twice": (([WHITE], [0], ["a", "a"]), "must be different strings"),
    "floats to 255": (
        ([WHITE.astype(np.float32)], [0]),
        "image 0: floating-point pixels must lie between 0 and 1, .*255",
    ),
    "normalised": (([torch.randn(3, 8, 8) - 3], [0]), "leave out what normalises them"),
    "no numbers": (([np.full((8, 8), np.nan)], [0]), "go from nan to nan"),
    "whole numbers": (([WHITE.astype(np.int64)], [0]), "must be uint8 .0 to 255. or floats .0 to 1., not int64"),
    "an array, channels first": (([np.zeros((3, 8, 8))], [0]), r"turn it with transpose\(1, 2, 0\)"),
    "a tensor, channels last": (([torch.zeros(8, 8, 3)], [0]), r"turn it with permute\(2, 0, 1\)"),
    "two channels": (([np.zeros((8, 8, 2))], [0]), "with 1, 3 or 4 channels"),
    "no pixels": (([np.zeros((0, 8))], [0]), "has no pixels"),
    "not a picture": (([{"bytes": b""}], [0]), "image 0: a dict is not a picture"),
    "a file that is not there": ((["/nowhere.png"], [0]), "/nowhere.png: No such file"),
    "random transforms": (Shifting(), "remove its random transforms"),
    "damaged": (Broken(), "item 0 of the data set cannot be read"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_learnt_is_one_line(case: str) -> None:
    data, words = WRONG[case]
    with pytest.raises(DataError, match=words) as caught:
        take(data)
    assert "\n" not in str(caught.value)


LISTS: dict[str, tuple[str | bytes, str]] = {
    "empty": ("", "lists no image"),
    "a head alone": ("path,label\n", "lists no image"),
    "one column": ("0.png\n1.png\n", "not every line has two columns"),
    "missing": ("0.png,a\nb.png,a\n", r"1 of 2 files missing \(line 2: b.png\)"),
    "another header": ("photo,breed\n0.png,a\n", "line 1 is a header without the columns path and label"),
    "twice": ("0.png,a\n./0.png,b\n", "line 2 names the image of line 1 again"),
    "no label": ("0.png,\n1.png,\n", "no line has a label"),
    "no path": ("0.png,a\n,b\n", "line 2 has no path"),
    "an open quote": ('0.png,"a\n1.png,b\n', r"not every line has two columns, PATH,LABEL \(unexpected end of data\)"),
    "another encoding": ("path,label\n0.png,Açaí\n".encode("latin-1"), "is not UTF-8 text"),
    "a NUL": ("0.png\0,a\n", "NUL|lines? contain"),
    "short": ("x,path,label\n1,0.png,a\n2,1.png\n", "line 3 has fewer columns"),
    "a long name": (f"{'x' * 5000},a\n", "1 of 1 file missing"),
    "either sign": ("0;1.png,0;a\n", "the column separator is ambiguous; add the header path,label"),
}


@pytest.mark.parametrize("case", LISTS)
def test_a_list_that_cannot_be_read_is_one_line(tmp_path: Path, case: str) -> None:
    for row in range(2):
        Image.fromarray(digit(0)[row]).save(tmp_path / f"{row}.png")
    text, words = LISTS[case]
    (tmp_path / "list.csv").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(DataError, match=words) as caught:
        take(tmp_path / "list.csv")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 6000


def test_a_list_of_odd_names(tmp_path: Path) -> None:
    for name in ("a b.png", "c,d.png", "e\nf.png", " g.png"):
        Image.fromarray(digit(0)[0]).save(tmp_path / name)
    (tmp_path / "list.csv").write_text(
        'LABEL,number,Path\n"two\nlines",1,"e\nf.png"\n"a, ""b""",2,"c,d.png"\nx y,3,a b.png\n', newline=""
    )
    actual = take(tmp_path / "list.csv")
    assert actual.classes == ('a, "b"', "two\nlines", "x y")
    assert [file.name for file in actual.images] == ["c,d.png", "e\nf.png", "a b.png"]


def test_nested_is_for_folders() -> None:
    with pytest.raises(PearlError, match="nested is for folders"):
        take(Pairs(), nested=True)


def test_floats_are_the_bytes_that_they_were_made_of() -> None:
    image = np.arange(192, dtype=np.uint8).reshape(8, 8, 3)
    as_float = torch.from_numpy(image).permute(2, 0, 1) / 255
    for given_as in (as_float, as_float.double(), as_float.permute(1, 2, 0).numpy(), Image.fromarray(image)):
        assert np.array_equal(to_pixels(given_as, 8), image)
    assert np.array_equal(to_pixels(as_float.bfloat16() * 0 + 1, 8), np.full((8, 8, 3), 255))
    clear = np.concatenate([image, np.zeros((8, 8, 1), np.uint8)], axis=2)
    assert np.array_equal(to_pixels(clear, 8), np.full((8, 8, 3), 255)), "transparent is white"
