"""Data sets of torchvision and Hugging Face, by name."""

import socket
import struct
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pearl.data.cache import decode_rows
from pearl.data.inputs import given
from pearl.data.sources import Source, hugging_face, vision
from pearl.errors import DataError
from pearl.settings.parts import SOURCES
from pearl.storage import network
from photos import digit, write_photos


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The data folder, and no network."""
    monkeypatch.setenv("PEARL_DATA", str(tmp_path))
    monkeypatch.setattr(network, "SECONDS", 0.2)
    monkeypatch.setattr(socket, "create_connection", refuse)
    return tmp_path


def refuse(*_: object, **__: object) -> socket.socket:
    raise OSError("no route to host")


def pixels(source: Source, part: str) -> np.ndarray:
    split = getattr(source, part)
    return decode_rows(split, np.arange(len(split.labels)), 8).pixels


def idx(path: Path, array: np.ndarray) -> None:
    """A file in MNIST's format."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes())


def test_torchvision_with_train_and_test(data: Path) -> None:
    for name, row in (("train", 0), ("t10k", 4)):
        idx(data / f"MNIST/raw/{name}-images-idx3-ubyte", np.stack([digit(label)[row] for label in range(10)]))
        idx(data / f"MNIST/raw/{name}-labels-idx1-ubyte", np.arange(10, dtype=np.uint8))
    source = SOURCES.build(SOURCES.resolve("torchvision/MNIST", "data"))
    assert source.classes[:2] == ("0 - zero", "1 - one")
    assert np.array_equal(pixels(source, "test")[7, ..., 1], digit(7)[4])
    assert source.train.labels.tolist() == source.test.labels.tolist() == [*range(10)]
    learnt = given("torchvision/MNIST", 8, part="train")
    assert (learnt.source, learnt.name, len(learnt)) == ("torchvision/MNIST", "MNIST", 10)
    assert np.array_equal(learnt.pixels(0, 10, 8)[0], pixels(source, "train"))


def test_torchvision_with_named_splits_and_without(data: Path) -> None:
    for split, start in (("train", 0), ("valid", 4), ("test", 8)):
        write_photos(data / "country211" / split, {"AT": 0, "CH": 1}, 4, start=start)
    source = vision("Country211", test="valid")
    assert source.classes == ("AT", "CH") and len(source.train.labels) == len(source.test.labels) == 8
    assert np.array_equal(pixels(source, "test")[0, ..., 0], digit(0)[4])
    with pytest.raises(DataError, match=r"torchvision/Country211 cannot be obtained \(Unknown value 'all'"):
        vision("Country211", test="all")

    write_photos(data / "eurosat/2750", {"Forest": 0, "River": 1}, 5)
    first, again = vision("EuroSAT", seed=1, test_share=0.4), vision("EuroSAT", seed=1, test_share=0.4)
    assert first.test.labels.tolist() == [0, 0, 1, 1] and first.train.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert np.array_equal(pixels(first, "test"), pixels(again, "test"))
    every = np.concatenate([pixels(first, "train"), pixels(first, "test")])[..., 0]
    assert {image.tobytes() for image in every} == {digit(label)[row].tobytes() for label in (0, 1) for row in range(5)}


def test_torchvision_without_internet_says_where_to_put_it(data: Path) -> None:
    with pytest.raises(
        DataError, match=rf"torchvision/CIFAR10 cannot be obtained .*put its official files into {data}"
    ) as caught:
        vision("CIFAR10")
    assert "\n" not in str(caught.value)
    with pytest.raises(DataError, match="did you mean 'CIFAR10'"):
        vision("CIFAR11")
    with pytest.raises(DataError, match="not a readable data set of torchvision"):
        vision("LSUN")


def test_hugging_face_needs_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(DataError, match=r"hf/beans: needs the package datasets; .* pip install 'pearl\[hf\]'"):
        hugging_face("beans")


@pytest.fixture
def hub(data: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    datasets = pytest.importorskip("datasets", reason="needs pearl[hf]")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", data / "hub")
    return data


def table(labels: list[int], row: int):
    import datasets

    features = datasets.Features({"img": datasets.Image(), "fine": datasets.ClassLabel(names=["zero", "one", "two"])})
    images = [Image.fromarray(digit(label)[row]) for label in labels]
    return datasets.Dataset.from_dict({"img": images, "fine": labels}, features=features)


def test_hugging_face_in_memory(hub: Path) -> None:
    made = table([1, 0, 1], 3)
    for data in (made, made.with_format("torch"), made.with_transform(lambda row: 1 / 0), made.to_iterable_dataset()):
        actual = given(data, 8, part="train")
        assert actual.classes == ("one", "zero") and actual.labels.tolist() == [0, 1, 0]
        assert np.array_equal(actual.images[1, ..., 0], digit(0)[3])
    with pytest.raises(DataError, match=r"give one of them, as data\['train'\]"):
        given(__import__("datasets").DatasetDict(train=made), 8, part="train")
    with pytest.raises(DataError, match=r"needs one column of type ClassLabel, 0 fit \(columns: img \(Image\)\)"):
        given(made.remove_columns("fine"), 8, part="train")


@pytest.mark.parametrize("form", ["parquet", "saved", "folder", "file"])
def test_hugging_face_of_local_files(hub: Path, form: str) -> None:
    import datasets

    train, test = table([0, 1, 2], 0), table([2, 1, 0], 5)
    name = "hf/mine"
    if form == "parquet":
        (hub / "mine").mkdir()
        train.to_parquet(hub / "mine/train-0.parquet")
        test.to_parquet(hub / "mine/validation-0.parquet")
    elif form == "saved":
        datasets.DatasetDict(train=train, validation=test).save_to_disk(hub / "mine")
    elif form == "folder":
        for split, row in (("train", 0), ("validation", 5)):
            write_photos(hub / "mine" / split, {"zero": 0, "one": 1, "two": 2}, 1, start=row)
    else:
        datasets.concatenate_datasets([train, test]).to_parquet(hub / "mine.parquet")
        name = "hf/mine.parquet"
    source = SOURCES.build(SOURCES.resolve(name, "data"))
    assert {*source.classes} == {"zero", "one", "two"}
    if form == "file":
        assert sorted(source.test.labels) == [0, 1, 2], "a share of each class"
        return
    assert source.notes == {"test": "the split validation, as there is no test"}
    zero = source.classes.index("zero")
    assert np.array_equal(pixels(source, "test")[source.test.labels == zero][0, ..., 0], digit(0)[5])
    with pytest.raises(DataError, match="hf/mine: has no split 'all', but train, validation"):
        hugging_face("mine", train="all")


def test_hugging_face_without_internet_says_where_to_put_it(hub: Path) -> None:
    with pytest.raises(
        DataError, match=rf"hf/some/set cannot be obtained .*put its files .* into {hub / 'some/set'}"
    ) as caught:
        hugging_face("some/set")
    assert "\n" not in str(caught.value)
