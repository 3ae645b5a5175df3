"""Copies of images are found and counted once; new images of known classes have to look like these."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import pearl
from pearl.data import copies
from pearl.errors import DataError
from pearl.lifecycle.learning import resume
from pearl.lifecycle.recognition import recognised, unlearnt
from pearl.lifecycle.saved import learnt_images
from pearl.methods.base import Expert
from pearl.storage.run_directory import RunDirectory
from pearl.training.engine import Observer
from photos import SETTINGS, StopAt, digit, folders, learn, write_class, write_photos

COUNT = 30


class Notes(Observer):
    def __init__(self) -> None:
        self.said: list[str] = []

    def event(self, kind: str, **facts: Any) -> None:
        self.said += [facts["text"]] if kind == "note" else []


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of zero and one, learnt from a folder with a copy in a class, and an image in both."""
    root = tmp_path_factory.mktemp("shop")
    write_photos(root / "first", {"zero": 0, "one": 1}, COUNT)
    shutil.copy(root / "first/zero/000.png", root / "first/zero/copy.png")
    Image.open(root / "first/one/001.png").save(root / "first/zero/wrong.bmp")
    with folders(root):
        pearl.learn(root / "model", root / "first", quiet=True, **SETTINGS)
    return root


@pytest.fixture
def model(shop: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(shop / "model", tmp_path / "model"))


def images(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(256, size=(count, 4, 4, 3), dtype=np.uint8)


def test_an_image_is_counted_once() -> None:
    pixels = images(0, 10)
    pixels[1], pixels[6] = pixels[0], pixels[2]
    labels, actual = np.repeat([0, 1], 5), copies.hashes(pixels)
    known = {actual[3]: "a", actual[9]: "b", actual[8]: "a"}
    stay, notes = copies.without_copies(actual, labels, ["a", "b"], known, "image {}".format)
    assert np.flatnonzero(~stay).tolist() == [1, 2, 3, 6, 9], "what another class has shown is not the same image"
    assert [note.partition(":")[0] for note in notes] == [
        "1 image repeated within a class; counted once",
        "1 image in several classes, as image 2 (a) and image 6 (b)",
        "2 images learnt before",
    ]
    assert copies.read(copies.written(actual, labels, ["a", "b"]))[actual[9]] == "b"


def test_no_class_is_left_without_images() -> None:
    pixels = images(0, 3)[[0, 0, 1, 2, 0]]
    stay, _ = copies.without_copies(copies.hashes(pixels), np.array([0, 0, 1, 1, 1]), ["a", "b"], {}, str)
    assert stay.tolist() == [True, False, True, True, False]


def test_a_model_learns_an_image_once_and_keeps_its_hash(shop: Path) -> None:
    (info,) = RunDirectory(shop / "model").tasks
    assert info.images == 2 * COUNT - 1, "without the copy, and the one in both classes"
    assert len(learnt_images([info])) == 2 * COUNT - 1


def test_images_that_were_learnt_are_left_out_of_an_evaluation(shop: Path, tmp_path: Path) -> None:
    test = write_photos(tmp_path / "test", {"zero": 0, "one": 1}, 20, start=COUNT)
    opened = pearl.load(shop / "model")
    clean = opened.evaluate(test)
    for name in ("005", "006"):
        shutil.copy(shop / f"first/zero/{name}.png", test / "zero" / f"learnt {name}.png")
    (test / "three").mkdir()
    shutil.copy(shop / "first/zero/007.png", test / "three")
    shutil.copy(test / "one/000.png", test / "one/copy.png")
    actual = opened.evaluate(test)
    assert np.array_equal(actual.confusion, clean.confusion) and clean.notes == ()
    assert any("3 images that the model was trained on, such as " in note for note in actual.notes)
    assert any("1 image repeated within a class" in note for note in actual.notes)
    learnt = opened.evaluate(shop / "first")
    assert learnt.total.tolist() == [COUNT - 1, COUNT]
    assert any("the accuracy on new images may be lower" in note for note in learnt.notes)


def test_copies_are_not_held_out(model: Path, tmp_path: Path) -> None:
    """Of 20 images, 10 twice, half are held out: drawn of the files, some would be of the images that were learnt."""
    for name, label in {"two": 2, "three": 3}.items():
        path = write_class(tmp_path / "next" / name, label, 10)
        for file in [*path.iterdir()]:
            shutil.copy(file, path / f"copy {file.name}")
    show = Notes()
    learn(model, tmp_path / "next", holdout=0.5, show=show, overrides={"train": {"epochs": 1}})
    manifest = RunDirectory(model).tasks[-1].manifest
    assert (manifest["images"], sum(manifest["estimate"]["total"])) == (10, 10)
    assert len(learnt_images(RunDirectory(model).tasks[-1:])) == 10, "an image that is held out may be evaluated on"
    assert any(note.startswith("20 images repeated within a class") for note in show.said)


def test_what_was_learnt_of_a_class_is_not_learnt_again(shop: Path, model: Path, tmp_path: Path) -> None:
    more = write_photos(tmp_path / "more", {"zero": 0}, COUNT + 5)
    show = Notes()
    learn(model, more, fast=True, show=show)
    assert RunDirectory(model).tasks[-1].manifest["images"] == 5
    assert any(note.startswith("no new class") for note in show.said)
    assert any(note.startswith(f"{COUNT} images learnt before") for note in show.said)


@pytest.mark.parametrize("fast", [False, True])
def test_a_known_class_that_shows_something_else_is_refused(model: Path, tmp_path: Path, fast: bool) -> None:
    wrong, show = write_photos(tmp_path / "wrong", {"one": 0, "five": 5}, 14, start=40), Notes()
    before = pearl.load(model).tasks
    words = r"0 of 14 images of one are recognised as one: a new style, or something else\? Learn them with --allow"
    with pytest.raises(DataError, match=words):
        learn(model, wrong, fast=fast)
    assert pearl.load(model).tasks == before and not (model / "resume/task.json").exists()
    if fast:
        learn(model, wrong, fast=fast, allow_new_style=True, show=show)
        assert any(note.startswith("0 of 14 images of one") for note in show.said)


def test_more_of_the_same_needs_no_word_and_few_images_are_only_noted(model: Path, tmp_path: Path) -> None:
    show = Notes()
    learn(model, write_photos(tmp_path / "same", {"one": 1}, 10, start=60), fast=True, show=show)
    assert not any("recognised" in note for note in show.said)
    learn(model, write_photos(tmp_path / "few", {"one": 0}, 4, start=40), fast=True, show=show)
    assert any(note.startswith("0 of 4 images of one are recognised") for note in show.said)


def test_a_new_style_that_was_allowed_is_resumed(model: Path, tmp_path: Path) -> None:
    wrong = write_photos(tmp_path / "wrong", {"one": 0, "five": 5}, 14, start=40)
    with pytest.raises(pearl.errors.Interrupted):
        learn(model, wrong, allow_new_style=True, show=StopAt("probe", 1))
    resume(model)
    assert pearl.load(model).classes == ("one", "zero", "five")


def test_numbers_that_begin_anew_meet_the_classes_that_have_them(tmp_path: Path) -> None:
    def numbers(*labels: int) -> tuple[np.ndarray, np.ndarray]:
        return np.concatenate([digit(label)[:12] for label in labels]), np.repeat([0, 1], 12)

    pearl.learn(tmp_path / "m", numbers(0, 1), quiet=True, **SETTINGS)
    with pytest.raises(DataError, match=r"0 of 12 images of 0 .*, or give other numbers, or names$"):
        pearl.learn(tmp_path / "m", numbers(1, 0), task="next", quiet=True)
    grown = pearl.load(tmp_path / "m").learn(numbers(1, 0), task="next", fast=True, allow_new_style=True, quiet=True)
    assert [task.names for task in grown.tasks] == [("0", "1")] * 2


def test_names_are_compared_in_one_form(model: Path, tmp_path: Path) -> None:
    pixels = np.concatenate([digit(5)[:8], digit(6)[:8]])
    learn(model, (pixels, ["Ac\u0327ai\u0301 ", "lima"] * 4 + ["lima"] * 8), task="a", fast=True)
    assert pearl.load(model).classes[2:] == ("A\u00e7a\u00ed", "lima")
    show = Notes()
    learn(model, (pixels, ["A\u00e7a\u00ed"] * 8 + ["acai"] * 8), fast=True, show=show, allow_new_style=True)
    assert pearl.load(model).classes[4:] == ("acai",)
    assert any("use --alias 'acai=A\u00e7a\u00ed'" in note for note in show.said)
    aliased = write_photos(tmp_path / "more", {"sketch": 5}, 6)
    actual = pearl.load(model).evaluate(aliased, aliases={"sketch ": "Ac\u0327ai\u0301"})
    assert actual.total.tolist()[2] == 6


def test_whole_numbers_are_in_the_order_in_which_they_count(model: Path) -> None:
    labels = [10, 2, 0, 11, 1]
    learn(model, (np.concatenate([digit(d)[:3] for d in range(5)]), np.repeat(labels, 3)), task="n", fast=True)
    assert pearl.load(model).classes[2:] == ("0", "1", "2", "10", "11")


def test_training_that_fails_is_noted(shop: Path, tmp_path: Path) -> None:
    show, settings = Notes(), {**SETTINGS, "train": {"epochs": 3, "batch_size": 8, "lr": 30.0}, "method": "finetune"}
    learn(tmp_path / "m", shop / "first", overrides=settings, show=show)
    assert any(
        "of the task's training images are classified correctly among its 2 classes, near chance" in n
        for n in show.said
    )
    opened = pearl.load(shop / "model")
    pixels, labels = torch.from_numpy(np.stack([*digit(1)[:20], *digit(0)[:20]])), torch.arange(2).repeat_interleave(20)
    pixels, view = pixels[..., None].expand(-1, -1, -1, 3), opened.view
    assert not [*unlearnt(opened.method, view, pixels, labels, np.arange(2), 0)]
    assert [*unlearnt(opened.method, view, pixels, 1 - labels, np.arange(2), 0)]


def test_only_the_sub_network_of_the_task_is_evaluated_for_it(shop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {**SETTINGS, "method": {"name": "pearl", "classifier": "heads"}, "train": {"epochs": 1}}
    learn(shop / "heads", shop / "first", overrides=settings)
    learn(shop / "heads", write_photos(shop / "later", {"c": 2, "d": 3}, 8))
    opened, used = pearl.load(shop / "heads"), []
    pixels = torch.from_numpy(np.stack([*digit(2)[:8], *digit(3)[:8]]))[..., None].expand(-1, -1, -1, 3)
    labels, shown = torch.arange(2, 4).repeat_interleave(8), np.arange(2, 4)
    experts = opened.method.experts

    def counted() -> list[Expert]:
        return [replace(one, forward=lambda x, one=one: used.append(one.task) or one.forward(x)) for one in experts()]

    monkeypatch.setattr(opened.method, "experts", counted)
    among_all = recognised(opened.method, opened.view, pixels, labels, shown)
    assert used == [0, 1]
    assert (recognised(opened.method, opened.view, pixels, labels, shown, 1) == among_all).all()
    assert used == [0, 1, 1]
