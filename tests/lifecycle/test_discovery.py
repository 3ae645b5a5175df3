"""Unknown images in groups: groups of two unseen digits, copies are found, and the list goes back into learn."""

import csv
import io
import shutil

import numpy as np
import pytest
from PIL import Image

import pearl
import zygote
from pearl.errors import ConfigError, DataError
from pearl.lifecycle.discovery import near_duplicates, thumbnails
from photos import SETTINGS, digit, folders, write_photos

UNSEEN = {"four": 4, "six": 6}
COUNT = 24


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    """A model of four digits, and a folder of photos of two others and of known ones."""
    root = tmp_path_factory.mktemp("shop")
    write_photos(root / "first", {"zero": 0, "one": 1, "two": 2, "three": 3}, 40)
    write_photos(root / "photos", UNSEEN, COUNT)
    write_photos(root / "photos", {"zero": 0}, 12, start=60)
    (root / "photos" / "four" / "copy.png").write_bytes((root / "photos" / "four" / "000.png").read_bytes())
    (root / "photos" / "broken.png").write_bytes(b"no image")
    with folders(root):
        pearl.learn(root / "model", root / "first", quiet=True, **SETTINGS)
    return root


@pytest.fixture(scope="module")
def actual(shop):
    return pearl.load(shop / "model").discover(shop / "photos")


def names(actual, rows):
    return [actual.images[i].parent.name for i in rows]


def test_groups_are_of_one_unseen_class(actual):
    shares = {}
    for one in actual.groups:
        own = names(actual, one.images)
        shares.setdefault(max({*own}, key=own.count), []).append(max(own.count(name) for name in {*own}))
    assert shares.keys() >= UNSEEN.keys()
    assert sum(map(sum, shares.values())) > 0.7 * sum(map(len, actual.groups))
    assert names(actual, actual.known).count("zero") > 12 / 2


def test_every_image_is_once_in_one_place(actual):
    copies = [i for same in actual.duplicates for i in same[1:]]
    placed = [*(i for one in actual.groups for i in one.images), *actual.alone, *actual.known, *copies]
    assert sorted(placed) == [*range(len(actual.images))]
    assert [len(one) for one in actual.groups] == sorted((len(one) for one in actual.groups), reverse=True)


def test_copies_and_broken_files_are_reported(actual, shop):
    (same,) = actual.duplicates
    assert [actual.images[i].name for i in same] == ["000.png", "copy.png"]
    (line,) = actual.unreadable
    assert line.startswith(f"{shop / 'photos' / 'broken.png'}: ")


def test_near_duplicates_are_the_same_photo_again():
    face = Image.fromarray(digit(3)[0]).resize((64, 64), Image.Resampling.BICUBIC)
    other = Image.fromarray(digit(3)[1]).resize((64, 64), Image.Resampling.BICUBIC)
    file = io.BytesIO()
    face.save(file, "JPEG", quality=40)
    brighter = face.point(lambda value: min(255, value // 2 + 90))
    pixels = np.stack([np.asarray(one.convert("RGB")) for one in (face, other, Image.open(file), brighter)])
    assert [*near_duplicates(thumbnails(pixels).numpy(), np.arange(4))] == [(0, 2), (0, 3)]


def test_the_list_goes_back_into_learn(shop, tmp_path):
    """On the command line: discover writes a list, the user names two groups and dismisses the rest, learn learns."""
    new, page = tmp_path / "new.csv", tmp_path / "new.html"
    done = zygote.run(["discover", shop / "model", shop / "photos", "-o", page, "--csv", new], text=True)
    assert done.returncode == 1, done.stderr  # for the broken file
    assert "broken.png" in done.stderr and "images with duplicates: 1" in done.stdout
    assert f"--data {new}" in page.read_text()
    rows = list(csv.DictReader(io.StringIO(new.read_text())))
    assert {"group 1", "group 2"} <= {row["label"] for row in rows}
    again = zygote.run(["discover", shop / "model", shop / "photos", "--csv", new], text=True)
    assert again.returncode == 2 and "exists already" in again.stderr
    chosen = {"group 1": "new a", "group 2": "new b"}
    with new.open("w", newline="") as file:
        csv.writer(file).writerows([["path", "label"], *([row["path"], chosen.get(row["label"], "")] for row in rows)])
    model = pearl.load(shutil.copytree(shop / "model", tmp_path / "model"))
    before = model.classes
    assert model.learn(new, fast=True, quiet=True).classes == (*before, "new a", "new b")


def test_images_in_memory_have_groups_and_no_list(shop):
    images = np.concatenate([digit(4)[:8], digit(6)[:8]])
    actual = pearl.load(shop / "model").discover([*images])
    assert len(actual.images) == 16 and isinstance(actual.images[0], np.ndarray)
    with pytest.raises(DataError, match="is in memory"):
        actual.as_csv()


def test_a_model_with_heads_is_refused(shop, tmp_path):
    heads = pearl.learn(
        tmp_path / "m",
        shop / "first",
        quiet=True,
        **SETTINGS | {"train": {"epochs": 1}},
        method={"classifier": "heads"},
    )
    with pytest.raises(ConfigError, match="pearl refit"):
        heads.discover(shop / "photos")
    with pytest.raises(DataError, match="not several images"):
        pearl.load(shop / "model").discover(digit(0)[0])
