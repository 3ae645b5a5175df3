import hashlib
import inspect
import shutil
import tarfile
import tempfile
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import layouts
from pearl.data.sources import Source, Split, cifar100, digits, folder, imagenet_r, imagenets, npz, tinyimagenet
from pearl.data.sources.folder_scan import draw
from pearl.errors import DataError


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty data folder, and no network."""
    target = tmp_path / "data"
    monkeypatch.setenv("PEARL_DATA", str(target))

    def unreachable(*_: object, **__: object) -> None:
        raise OSError("no route to host")

    monkeypatch.setattr("urllib.request.urlopen", unreachable)
    return target


def paths(split: Split) -> tuple[Path, ...]:
    assert isinstance(split.images, tuple)
    return split.images


def pictures(split: Split) -> np.ndarray:
    assert isinstance(split.images, np.ndarray)
    return split.images


def fails(match: str) -> pytest.RaisesExc[DataError]:
    """A DataError of one line with that in it."""
    return pytest.RaisesExc(DataError, match=match, check=lambda error: "\n" not in str(error))


def check_labels(source: Source) -> None:
    """Labels are int64, one per image, each class in training and test; files carry their class's folder."""
    for split in (source.train, source.test, source.validation):
        if split is not None:
            assert split.labels.dtype == np.int64
            assert len(split.labels) == len(split.images)
            assert set(split.labels.tolist()) <= set(range(len(source.classes)))
    assert set(source.train.labels.tolist()) == set(source.test.labels.tolist()) == set(range(len(source.classes)))


def test_hyper_parameters_are_keywords_with_defaults_or_a_path() -> None:
    for function in (digits, cifar100, npz, tinyimagenet, imagenet_r, folder):
        for name, parameter in inspect.signature(function).parameters.items():
            assert parameter.kind is inspect.Parameter.KEYWORD_ONLY
            assert parameter.annotation is not inspect.Parameter.empty
            assert parameter.default is not inspect.Parameter.empty or name == "path"


# digits


def test_digits() -> None:
    from sklearn.datasets import load_digits

    source = digits()
    check_labels(source)
    assert source.classes == tuple("0123456789")
    images = np.concatenate([pictures(source.train), pictures(source.test)])
    assert images.shape == (1797, 8, 8, 3) and images.dtype == np.uint8
    assert len(source.test.labels) == 360
    assert (images[..., 0] == images[..., 1]).all() and (images[..., 0] == images[..., 2]).all()
    scaled = {tuple(round(x * 255 / 16) for x in image.ravel()) for image in load_digits().images}
    assert {tuple(image[..., 0].ravel().tolist()) for image in images} == scaled
    shares = np.bincount(source.test.labels) / np.bincount(source.train.labels)
    assert np.abs(shares - 0.25).max() < 0.02


def test_digits_split_follows_the_seed() -> None:
    first, again, other = digits(seed=1), digits(seed=1), digits(seed=2)
    assert np.array_equal(pictures(first.test), pictures(again.test))
    assert not np.array_equal(pictures(first.test), pictures(other.test))


@pytest.mark.parametrize("share", [0.0, 1.5, 0.001])
def test_digits_share_that_cannot_be(share: float) -> None:
    with fails(f"digits cannot be split with test_share={share}"):
        digits(test_share=share)


# npz


def write(target: Path, changes: dict[str, object] | None = None, **settings: int) -> str:
    """An .npz of three classes with some arrays replaced, or, where the change is None, left out."""
    content = {**layouts.arrays(**{"classes": 3, "size": 4, **settings}), **(changes or {})}
    np.savez(target / "some.npz", **{key: value for key, value in content.items() if value is not None})  # type: ignore
    return str(target / "some.npz")


def test_npz(tmp_path: Path) -> None:
    path = write(tmp_path, validation_per_class=2)
    source = npz(path=path)
    check_labels(source)
    assert source.name == "some" and source.classes == ("kind 0", "kind 1", "kind 2")
    made = layouts.arrays(classes=3, size=4, validation_per_class=2)
    assert source.validation is not None
    for name, split in (("train", source.train), ("test", source.test), ("validation", source.validation)):
        assert np.array_equal(pictures(split), made[f"{name}_images"])
        assert np.array_equal(split.labels, made[f"{name}_labels"])


def test_npz_below_the_data_folder(data: Path) -> None:
    data.mkdir()
    write(data)
    assert npz(path="some.npz").classes[0] == "kind 0"


def test_npz_grey_unnamed_small_labels(tmp_path: Path) -> None:
    grey = layouts.pixels(np.random.default_rng(0), 9, 5, 7)
    labels = np.repeat(np.arange(3, dtype=np.uint8), 3)
    changes = {"train_images": grey, "train_labels": labels, "test_images": grey, "test_labels": labels}
    source = npz(path=write(tmp_path, {**changes, "class_names": None}))
    check_labels(source)
    assert source.classes == ("0", "1", "2") and source.validation is None
    assert pictures(source.train).shape == (9, 5, 7, 3)
    assert all(np.array_equal(pictures(source.train)[..., channel], grey) for channel in range(3))


IMAGES, LABELS = np.zeros((9, 4, 4, 3), np.uint8), np.repeat(np.arange(3), 3)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"train_images": None}, r"some\.npz: train_images is missing; the file has class_names, train_labels, test_"),
        ({"test_labels": None}, r"some\.npz: test_labels is missing"),
        ({"validation_labels": LABELS}, r"some\.npz: validation_images is missing"),
        ({"train_images": IMAGES.astype(np.float32)}, "train_images must be uint8 .*, not float32"),
        ({"train_images": IMAGES.transpose(0, 3, 1, 2)}, r"train_images must have shape .*, not \(9, 3, 4, 4\)"),
        ({"train_images": IMAGES[0, 0]}, "train_images must have shape"),
        ({"test_images": np.zeros((3, 8, 8, 3), np.uint8)}, r"test_images must be \(4, 4\) pixels .* not \(8, 8\)"),
        ({"train_labels": LABELS * 1.0}, "train_labels must be integers .*, not float64"),
        ({"train_labels": LABELS[:, None]}, r"train_labels must be integers of shape \(N,\), not int64 \(9, 1\)"),
        ({"train_labels": LABELS[:-1]}, "train_labels is of length 8, for 9 images in train_images"),
        ({"train_labels": LABELS + 1}, "train_labels has values from 1 to 3, which must lie in 0 to 2"),
        ({"train_labels": LABELS - 1}, "train_labels has values from -1 to 1"),
        ({"train_labels": LABELS - 1, "class_names": None}, "train_labels has values from -1 to 1"),
        ({"train_labels": LABELS * 1.0, "class_names": None}, "train_labels must be integers"),
        (
            {"train_labels": LABELS + 2_000_000_000, "class_names": None},
            r"labels up to 2000000002, but 9 training images",
        ),
        ({"train_labels": np.full(9, 2**63 + 5, np.uint64), "class_names": None}, "labels up to 9223372036854775813"),
        ({"train_labels": np.full(9, 2**64 - 1, np.uint64)}, "train_labels has values from 18446744073709551615 to"),
        ({"train_images": IMAGES[:, :0]}, r"train_images has no pixels: its shape is \(9, 0, 4, 3\)"),
        ({"train_labels": None, "class_names": None}, "train_labels is missing"),
        ({"class_names": np.array([1, 2, 3])}, "class_names must be a list of str, not int64"),
        ({"class_names": np.array(["a", "b", "a"])}, "class_names repeats a; give each class a name of its own"),
        ({"class_names": np.array(["a", "b", "c"], object)}, "class_names cannot be read .*Object arrays"),
        ({"class_names": np.array(list("abcd"))}, "some has no training image of class d: add some, or remove"),
        ({"test_labels": np.array([0, 1, 1])}, "some has no test image of class kind 2"),
        (
            {"train_images": IMAGES[:0], "train_labels": LABELS[:0], "test_images": IMAGES[:0]}
            | {"test_labels": LABELS[:0], "class_names": None},
            "no training image of class 0",
        ),
    ],
)
def test_npz_that_does_not_fit(tmp_path: Path, changes: dict[str, object], match: str) -> None:
    with fails(match):
        npz(path=write(tmp_path, changes))


def test_npz_missing_foreign_damaged(tmp_path: Path) -> None:
    with fails("data file not found: tried nowhere.npz and .*PEARL_DATA"):
        npz(path="nowhere.npz")
    foreign = tmp_path / "some.npz"
    for content in (b"", b"garbage", b"\x93NUMPY"):
        foreign.write_bytes(content)
        with fails(r"some\.npz is not an \.npz archive, or is damaged"):
            npz(path=str(foreign))
    path = Path(write(tmp_path))
    damaged = bytearray(path.read_bytes())
    damaged[damaged.index(b"train_images") + 400] ^= 1
    path.write_bytes(damaged)
    with fails(r"some\.npz: train_images cannot be read \(.*\); write the file again"):
        npz(path=str(path))


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(0, 2))
def test_npz_any_sizes(classes: int, per_class: int, test_per_class: int, validation_per_class: int) -> None:
    with tempfile.TemporaryDirectory() as target:
        path = write(
            Path(target),
            classes=classes,
            per_class=per_class,
            test_per_class=test_per_class,
            validation_per_class=validation_per_class,
        )
        source = npz(path=path)
    check_labels(source)
    assert len(source.classes) == classes
    assert len(source.train.images) == classes * per_class
    assert (source.validation is None) == (validation_per_class == 0)


# CIFAR-100


def test_cifar100_npz_given_or_in_the_data_folder(data: Path, tmp_path: Path) -> None:
    given = cifar100(path=str(layouts.cifar100_npz(tmp_path / "elsewhere")))
    layouts.cifar100_npz(data)
    actual = cifar100()
    for source in (given, actual):
        check_labels(source)
        assert source.name == "cifar100" and len(source.classes) == 100
        assert pictures(source.train).shape == (300, 32, 32, 3)


def test_cifar100_official_files(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layouts.cifar100_python(data, monkeypatch)
    shutil.copytree(data, tmp_path / "elsewhere")
    made = layouts.arrays()
    for source in (cifar100(), cifar100(download=False), cifar100(path=str(tmp_path / "elsewhere"))):
        check_labels(source)
        assert source.name == "cifar100" and source.classes == tuple(made["class_names"].tolist())
        assert np.array_equal(pictures(source.train), made["train_images"])
        assert np.array_equal(pictures(source.test), made["test_images"])
        assert np.array_equal(source.train.labels, made["train_labels"])


def test_cifar100_from_its_archive(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchvision.datasets import CIFAR100

    base = layouts.cifar100_python(data, monkeypatch)
    archive = data / CIFAR100.filename
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(base, base.name)
    shutil.rmtree(base)
    monkeypatch.setattr(CIFAR100, "tgz_md5", hashlib.md5(archive.read_bytes()).hexdigest())
    check_labels(cifar100())


def test_cifar100_cannot_be_had(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offline = r"put the official cifar-100-python\.tar\.gz or a cifar100\.npz into .*data, or pass data\.path=FILE\.npz"
    with fails(rf"CIFAR-100 cannot be obtained from .*data \(no route to host\): {offline}"):
        cifar100()
    with fails(offline):
        cifar100(download=False)
    with fails("CIFAR-100 not found: tried elsewhere and"):
        cifar100(path="elsewhere")
    base = layouts.cifar100_python(tmp_path / "elsewhere", monkeypatch)
    (base / "test").write_bytes((base / "test").read_bytes() + b"!")
    with fails("CIFAR-100 cannot be obtained from .*elsewhere"):
        cifar100(path=str(base.parent))


@pytest.mark.parametrize("name", ["train", "test", "meta"])
def test_cifar100_never_unpickles_what_fails_its_checksum(
    name: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = layouts.cifar100_python(data, monkeypatch)
    (base / name).write_bytes(b"cos\nmkdir\n(S'" + str(tmp_path / "harm").encode() + b"'\ntR.")
    with pytest.raises(DataError):
        cifar100()
    assert not (tmp_path / "harm").exists()


# TinyImageNet


def labels_by_file(split: Split, source: Source) -> dict[str, str]:
    return {path.name: source.classes[label] for path, label in zip(paths(split), split.labels, strict=True)}


@pytest.mark.parametrize("order", ["sorted", "wnids"])
def test_tinyimagenet(data: Path, order: str) -> None:
    base = layouts.tiny_imagenet(data)
    source = tinyimagenet(order=order)  # type: ignore[arg-type]
    check_labels(source)
    things = tuple(f"thing {label}" for label in range(4))
    assert source.classes == (things if order == "sorted" else things[::-1])
    assert source.name == "tinyimagenet" and len(source.train.images) == 12 and len(source.test.images) == 8
    thing = dict(zip(layouts.wnids(4), things, strict=True))
    for name, actual in labels_by_file(source.train, source).items():
        assert actual == thing[name.partition("_")[0]]
    lines = (base / "val" / "val_annotations.txt").read_text().splitlines()
    assert labels_by_file(source.test, source) == {line.split("\t")[0]: thing[line.split("\t")[1]] for line in lines}
    assert all(path.is_file() for path in paths(source.train) + paths(source.test))


def test_tinyimagenet_names_are_unique(data: Path) -> None:
    base = layouts.tiny_imagenet(data, words={1: "crane, a bird", 3: "crane, a machine"})
    first, second = layouts.wnids(4)[1], layouts.wnids(4)[3]
    assert tinyimagenet().classes == ("thing 0", f"crane ({first})", "thing 2", f"crane ({second})")
    lines = (base / "words.txt").read_text().splitlines(keepends=True)
    (base / "words.txt").write_text("".join(lines[1:]))
    assert tinyimagenet().classes[0] == layouts.wnids(4)[0]
    (base / "words.txt").unlink()
    assert tinyimagenet().classes == tuple(layouts.wnids(4))


def test_tinyimagenet_by_path(tmp_path: Path) -> None:
    assert tinyimagenet(path=str(layouts.tiny_imagenet(tmp_path)), download=False).classes[0] == "thing 0"


def test_tinyimagenet_from_its_archive(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layouts.tiny_imagenet(tmp_path / "made")
    data.mkdir()
    archive = shutil.make_archive(str(data / "tiny-imagenet-200"), "zip", tmp_path / "made")
    md5 = hashlib.md5(Path(archive).read_bytes()).hexdigest()
    monkeypatch.setattr(imagenets, "_TINYIMAGENET", replace(imagenets._TINYIMAGENET, md5=md5))
    with fails("TinyImageNet not found"):
        tinyimagenet(download=False)
    check_labels(tinyimagenet())
    assert sorted(target.name for target in data.iterdir()) == ["tiny-imagenet-200", "tiny-imagenet-200.zip"]


def test_interrupted_unpacking_leaves_nothing(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(url: str, root: Path, aside: str, md5: str) -> None:
        layouts.tiny_imagenet(Path(aside), classes=1)
        raise RuntimeError("interrupted")

    monkeypatch.setattr("torchvision.datasets.utils.download_and_extract_archive", interrupted)
    with fails("interrupted"):
        tinyimagenet()
    assert list(data.iterdir()) == []


def test_official_sets_offline() -> None:
    with fails(
        r"TinyImageNet cannot be obtained from http://cs231n\S+ \(no route to host\): "
        r"put tiny-imagenet-200\.zip into .*data, or pass data\.path=FOLDER"
    ):
        tinyimagenet()
    with fails(r"ImageNet-R cannot be obtained from https://\S+ \(no route to host\): put imagenet-r\.tar into .*data"):
        imagenet_r()
    with fails("TinyImageNet not found: tried elsewhere and"):
        tinyimagenet(path="elsewhere")


def test_damaged_archive_is_not_unpacked(data: Path) -> None:
    data.mkdir()
    with zipfile.ZipFile(data / "tiny-imagenet-200.zip", "w") as archive:
        archive.writestr("tiny-imagenet-200/wnids.txt", "")
    with fails("TinyImageNet cannot be obtained"):
        tinyimagenet()
    assert not (data / "tiny-imagenet-200").exists()


def test_tinyimagenet_incomplete(data: Path) -> None:
    base = layouts.tiny_imagenet(data)
    annotations = base / "val" / "val_annotations.txt"
    text = annotations.read_text()
    first = text.partition("\t")[0]

    annotations.write_text(text.partition("\n")[2])
    with fails(rf"val_annotations\.txt has no line for {first} of .*images"):
        tinyimagenet()
    annotations.write_text(text + "val_99.JPEG\tn01000000\t0\t0\t1\t1\n")
    with fails(r"val_annotations\.txt: val_99\.JPEG is missing from .*images"):
        tinyimagenet()
    annotations.write_text(text + text)
    with fails(f"{first} is missing from .*, or named twice"):
        tinyimagenet()
    for line in ("val_0.JPEG\tn77777777\t0", "val_0.JPEG", ""):
        annotations.write_text(f"{line}\n{text}")
        with fails(r"val_annotations\.txt: the line '.*' has no class of wnids\.txt"):
            tinyimagenet()
    annotations.unlink()
    with fails(r"val_annotations\.txt cannot be read \(No such file or directory\): unpack the data set again"):
        tinyimagenet()
    annotations.write_text(text)

    images = base / "train" / layouts.wnids(4)[2] / "images"
    for image in images.iterdir():
        image.unlink()
    with fails(rf"no image in {images}: add images, or remove the class"):
        tinyimagenet()
    images.rmdir()
    with fails(rf"the folder {images} is missing"):
        tinyimagenet()
    (base / "wnids.txt").unlink()
    with fails(r"wnids\.txt cannot be read"):
        tinyimagenet()


# ImageNet-R


def relative(split: Split) -> list[str]:
    return [f"{path.parent.name}/{path.name}" for path in paths(split)]


def test_imagenet_r_drawn(data: Path) -> None:
    layouts.imagenet_r(data, per_class=6)
    source = imagenet_r()
    check_labels(source)
    assert source.name == "imagenet_r" and source.classes == ("thing_0", "thing_1", "thing_2", "thing_3")
    assert np.bincount(source.train.labels).tolist() == [5] * 4
    assert np.bincount(source.test.labels).tolist() == [1] * 4
    assert len(set(relative(source.train) + relative(source.test))) == 24
    ids = layouts.wnids(4)
    for split in (source.train, source.test):
        assert [ids[label] for label in split.labels] == [path.parent.name for path in paths(split)]
    assert relative(source.train) == sorted(relative(source.train))
    text = "\n".join(sorted(relative(source.test)))
    assert source.notes == {"split_sha256": hashlib.sha256(text.encode()).hexdigest()}


def test_drawn_split_depends_on_names_and_seed_alone(data: Path, tmp_path: Path) -> None:
    base = layouts.imagenet_r(data, per_class=10)
    elsewhere = layouts.imagenet_r(tmp_path / "elsewhere", per_class=10, seed=7)
    first = imagenet_r()
    # A change of this value splits every data set anew: results no longer compare with those of earlier runs.
    assert first.notes["split_sha256"] == "782acce9ac32bd70ba5a8398557f8cf97ab1f20f50556b90e8af8feeea0ef87b"
    assert imagenet_r(path=str(elsewhere)).notes == first.notes
    assert imagenet_r(seed=1).notes != first.notes
    assert folder(path=str(base)).notes == first.notes


def write_list(target: Path, entries: list[str], form: str) -> str:
    if form == "yaml":
        text = "data:\n" + "".join(f"- {entry}\n" for entry in entries) + "targets:\n" + "- 0\n" * len(entries)
    else:
        text = "".join(f"{entry}{form}\n" for entry in entries)
    target = target.with_suffix(".yaml" if form == "yaml" else ".txt")
    target.write_text(text)
    return str(target)


@pytest.mark.parametrize("form", ["yaml", "", " 17", ",17", "\n"])
@pytest.mark.parametrize("lead", ["", "./", "data/imagenet-r/train/"])
def test_imagenet_r_by_lists(data: Path, tmp_path: Path, form: str, lead: str) -> None:
    layouts.imagenet_r(data)
    drawn = imagenet_r(seed=3)
    lists = {
        name: write_list(tmp_path / name, [lead + entry for entry in reversed(relative(split))], form)
        for name, split in (("train_list", drawn.train), ("test_list", drawn.test))
    }
    listed = imagenet_r(**lists)  # type: ignore[arg-type]
    assert relative(listed.train) == relative(drawn.train) and relative(listed.test) == relative(drawn.test)
    assert np.array_equal(listed.test.labels, drawn.test.labels)
    assert listed.notes == drawn.notes


def test_imagenet_r_list_that_does_not_fit(data: Path, tmp_path: Path) -> None:
    layouts.imagenet_r(data)
    drawn = imagenet_r()
    train, test = relative(drawn.train), relative(drawn.test)

    def load(train: list[str], test: list[str]) -> Source:
        lists = {
            "train_list": write_list(tmp_path / "train", train, ""),
            "test_list": write_list(tmp_path / "test", test, ""),
        }
        return imagenet_r(**lists)  # type: ignore[arg-type]

    with fails(r"test\.txt names 2 files that .*imagenet-r lacks: n01000000/art_77\.jpg, other\.jpg; fix the list"):
        load(train, [*test, "n01000000/art_77.jpg", "other.jpg"])
    with fails(r"train\.txt names 25 files that .* lacks: n5/00\.jpg, .*n5/19\.jpg and 5 more; fix"):
        load([*train, *(f"n5/{i:02}.jpg" for i in range(25))], test)
    with fails(rf"test\.txt lists files twice: {train[0]}; keep each in one list, once"):
        load(train, [*test, train[0]])
    with fails(r"train\.txt lists files twice"):
        load([*train, train[0]], test)
    with fails("imagenet_r has no training image of class thing_0"):
        load([entry for entry in train if not entry.startswith(layouts.wnids(4)[0])], test)
    with fails("only one of data.train_list and data.test_list is given"):
        imagenet_r(train_list=str(tmp_path / "train.txt"))
    with fails("list of images not found: tried nowhere.txt"):
        imagenet_r(train_list="nowhere.txt", test_list="nowhere.txt")


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("data: [", "is not valid YAML"),
        ("- a/b.jpg", "has no list of paths under the key data"),
        ("data: a/b.jpg", "has no list of paths under the key data"),
        ("data: [1, 2]", "has no list of paths under the key data"),
        ("!!python/object/apply:os.getcwd []", "is not valid YAML"),
    ],
)
def test_imagenet_r_yaml_of_another_kind(data: Path, tmp_path: Path, text: str, match: str) -> None:
    layouts.imagenet_r(data)
    (tmp_path / "list.yaml").write_text(text)
    with fails(rf"list\.yaml {match}"):
        imagenet_r(train_list=str(tmp_path / "list.yaml"), test_list=str(tmp_path / "list.yaml"))


def test_imagenet_r_names(data: Path) -> None:
    base = layouts.imagenet_r(data, classes=3)
    first, second, third = layouts.wnids(3)
    (base / "README.txt").write_text(f"About\n\n{first} great_white_shark\r\n{second} crane\n{third}   crane \n")
    assert imagenet_r().classes == ("great_white_shark", f"crane ({second})", f"crane ({third})")
    (base / "README.txt").unlink()
    assert imagenet_r().classes == (first, second, third)


def test_imagenet_r_from_its_archive(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = layouts.imagenet_r(tmp_path)
    data.mkdir()
    with tarfile.open(data / "imagenet-r.tar", "w") as tar:
        tar.add(base, base.name)
    md5 = hashlib.md5((data / "imagenet-r.tar").read_bytes()).hexdigest()
    monkeypatch.setattr(imagenets, "_IMAGENET_R", replace(imagenets._IMAGENET_R, md5=md5))
    check_labels(imagenet_r())


# folder


def test_folder_train_and_test(tmp_path: Path) -> None:
    root = layouts.image_folder(tmp_path / "zoo")
    source = folder(path=str(root))
    check_labels(source)
    assert source.name == "zoo" and source.classes == ("ant", "bee", "cow") and source.validation is None
    assert len(source.train.images) == 12 and len(source.test.images) == 6
    assert all(path.parts[-3] == "train" for path in paths(source.train))
    assert [path.parent.name for path in paths(source.test)] == [source.classes[label] for label in source.test.labels]
    assert set(source.notes) == {"split_sha256"}


@pytest.mark.parametrize("name", ["val", "valid", "validation"])
def test_folder_validation(tmp_path: Path, name: str) -> None:
    both = folder(path=str(layouts.image_folder(tmp_path / "both", splits={"train": 3, name: 2, "test": 1})))
    assert both.validation is not None and len(both.validation.images) == 6 and len(both.test.images) == 3
    assert all(path.parts[-3] == name for path in paths(both.validation))

    root = layouts.image_folder(tmp_path / "only", splits={"train": 4, name: 2})
    only = folder(path=str(root))
    assert only.validation is None and all(path.parts[-3] == name for path in paths(only.test))
    assert only.notes["test"] == f"the folder {name}/, as there is no test/"
    drawn = folder(path=str(root), validation_share=0.25)
    assert drawn.validation is not None and len(drawn.validation.images) == 3 and len(drawn.train.images) == 9
    assert paths(drawn.test) == paths(only.test)


@pytest.mark.parametrize("split", ["", "train"])
def test_folder_drawn(tmp_path: Path, split: str) -> None:
    root = layouts.image_folder(tmp_path / "zoo", splits={split: 10})
    source = folder(path=str(root), test_share=0.3, validation_share=0.5, seed=5)
    check_labels(source)
    assert source.validation is not None
    parts = [paths(source.train), paths(source.test), paths(source.validation)]
    assert [len(part) for part in parts] == [9, 9, 12]
    assert len(set().union(*parts)) == 30
    text = "\n".join(sorted(path.relative_to(root).as_posix() for path in paths(source.test)))
    assert source.notes == {"split_sha256": hashlib.sha256(text.encode()).hexdigest()}
    again = folder(path=str(root), test_share=0.3, seed=5)
    assert paths(again.test) == paths(source.test)


@given(st.integers(2, 40), st.floats(0.001, 0.999), st.integers(0, 9))
def test_draw_parts_every_class(count: int, share: float, seed: int) -> None:
    files = {name: [Path(name, str(i)) for i in range(count + extra)] for extra, name in enumerate("ab")}
    stay, drawn = draw(files, share, np.random.default_rng(seed), "test_share")
    for name, images in files.items():
        assert stay[name] and drawn[name]
        assert sorted(stay[name] + drawn[name]) == sorted(images)
        assert abs(len(drawn[name]) - share * len(images)) <= 1


def test_folder_ignores_what_is_no_image(tmp_path: Path) -> None:
    root = layouts.image_folder(tmp_path / "zoo", suffix=".JPEG")
    (root / "train" / "ant" / "notes.txt").write_text("x")
    (root / "train" / "ant" / "._train_0.JPEG").write_text("x")
    (root / "train" / ".cache").mkdir()
    (root / "train" / "README.md").write_text("x")
    (root / "train" / "bee" / "link.Jpg").symlink_to(root / "train" / "ant" / "train_0.JPEG")
    source = folder(path=str(root))
    assert len(source.train.images) == 13 and source.classes == ("ant", "bee", "cow")


def test_folder_notes_test_images_among_the_training_images(tmp_path: Path) -> None:
    root = layouts.image_folder(tmp_path / "zoo")
    assert "copies" not in folder(path=str(root)).notes
    shutil.copy(root / "train/ant/train_0.png", root / "test/bee/other.png")
    note = folder(path=str(root)).notes["copies"]
    assert "1 test image also among the training images, as " in note and "bee/other.png" in note


def test_folder_that_does_not_fit(tmp_path: Path) -> None:
    root = layouts.image_folder(tmp_path / "zoo")
    (root / "test" / "dog").mkdir()
    with fails(f"no image in {root}/test/dog: add images, or remove the class"):
        folder(path=str(root))
    shutil.copy(root / "test" / "ant" / "test_0.png", root / "test" / "dog" / "dog.png")
    with fails(f"{root}/test has classes that train/ lacks: dog; remove them, or add training images"):
        folder(path=str(root))
    shutil.rmtree(root / "test" / "dog")
    shutil.rmtree(root / "test" / "ant")
    with fails("zoo has no test image of class ant"):
        folder(path=str(root))
    (root / "train" / "elk").mkdir()
    with fails(f"no image in {root}/train/elk"):
        folder(path=str(root))

    single = layouts.image_folder(tmp_path / "single", splits={"": 1})
    with fails("data.test_share needs two images or more in every class, but ant, bee, cow has fewer: add images"):
        folder(path=str(single))
    pair = layouts.image_folder(tmp_path / "pair", splits={"": 2})
    for share in (0.0, 1.0, -1.0):
        with fails(f"data.test_share={share} must lie between 0 and 1"):
            folder(path=str(pair), test_share=share)
    with fails("data.validation_share needs two images or more"):
        folder(path=str(pair), validation_share=0.1)
    both = layouts.image_folder(tmp_path / "both", splits={"train": 3, "val": 2, "test": 1})
    with fails("both has validation images of its own: set data.validation_share=0"):
        folder(path=str(both), validation_share=0.1)
    (both / "valid").mkdir()
    with fails("both holds test, val, valid: keep one of val/, valid/ and validation/"):
        folder(path=str(both))

    (tmp_path / "empty").mkdir()
    with fails("empty has no class folders: put the images of each class into a folder of its own"):
        folder(path=str(tmp_path / "empty"))
    with fails(r"test_0\.png is not a folder"):
        folder(path=str(both / "test" / "ant" / "test_0.png"))
    with fails("image folder not found: tried nowhere"):
        folder(path="nowhere")
