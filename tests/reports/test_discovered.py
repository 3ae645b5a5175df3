"""The page about unknown images: contact sheets, the command to learn them, and no name that breaks it."""

import base64
import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from test_report import EVIL, Reader

from pearl.lifecycle.discovery import Discovery, Group
from pearl.reports.discovered import page


def shades(count: int) -> tuple[np.ndarray, ...]:
    return tuple(np.full((8, 8, 3), 10 * i, np.uint8) for i in range(count))


@pytest.fixture
def actual() -> Discovery:
    """Fourteen images of one group, three of another, two in none, two known, a duplicate and a near-duplicate."""
    groups = Group("group 1", tuple(range(14))), Group("group 2", (14, 15, 16))
    return Discovery(
        images=shades(22),
        groups=groups,
        alone=(17, 18),
        known=(19, 20),
        learnt=(19,),
        nearest=("apple",) * 22,
        duplicates=((0, 21),),
        near_duplicates=((14, 15),),
        unknown_rate=0.05,
    )


def test_a_group_shows_its_most_typical_and_its_most_doubtful_images(actual: Discovery) -> None:
    pictures = [attributes for tag, attributes in Reader(page(actual, "t", model="m", groups="g")).tags if tag == "img"]
    kinds = [picture["alt"].partition(":")[0] for picture in pictures]
    assert kinds == ["typical"] * 8 + ["doubtful"] * 4 + ["typical"] * 2 + ["doubtful"] + ["in no group"] * 2
    colours = [
        np.asarray(Image.open(io.BytesIO(base64.b64decode(picture["src"].partition("base64,")[2])))).mean()
        for picture in pictures
    ]
    expected = [*range(8), 13, 12, 11, 10, 14, 15, 16, 17, 18]
    assert np.allclose(colours, [10 * i for i in expected], atol=2)


def test_it_has_the_numbers_of_images_and_the_copies(actual: Discovery) -> None:
    files = Reader(page(actual, "t", model="m", groups="g")).files
    assert [row[:2] for row in files["images.csv"][1:]] == [
        ["group 1", "14"],
        ["group 2", "3"],
        ["in no group", "2"],
        ["known", "2"],
    ]
    assert files["duplicates.csv"][1:] == [["image 0", "image 21"]]
    assert files["near-duplicates.csv"][1:] == [["image 14", "image 15"]]


def test_no_name_breaks_it(tmp_path: Path) -> None:
    file = tmp_path / f"{EVIL.replace('/', '')}.png"
    Image.new("RGB", (8, 8)).save(file)
    one = Discovery((file,), (Group(EVIL, (0,)),), (), (), (), (EVIL,), (), (), 0.05, (EVIL,))
    reader = Reader(page(one, EVIL, model=EVIL, groups=EVIL))
    assert EVIL in reader.text and file.name in reader.text
    for tag, attributes in reader.tags:
        assert tag not in {"script", "link", "iframe", "object"}
        assert all(not key.startswith("on") for key in attributes)
        assert (attributes.get("src") or "data:").startswith("data:")
