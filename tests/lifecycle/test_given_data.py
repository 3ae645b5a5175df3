"""Models that learn from what is in memory, in lists and in folders of folders, as from a folder of classes."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import TensorDataset

import pearl
from pearl.errors import ConfigError, DataError, Interrupted, RunError
from pearl.lifecycle.choices import LearnOptions, config_for
from pearl.lifecycle.learning import resume
from pearl.training.engine import Observer
from photos import SETTINGS, StopAt, digit, folders, learn, weights_of, write_photos

COUNT = 12
SHORT = {**SETTINGS, "train": {"epochs": 1, "batch_size": 8}}


def numbers(first: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two digits as tensors (N, 1, 8, 8) of floats, and their labels 0 and 1."""
    images = np.concatenate([digit(first)[:COUNT], digit(first + 1)[:COUNT]])
    return torch.from_numpy(images)[:, None] / 255, torch.arange(2).repeat_interleave(COUNT)


def named(first: int, *names: str) -> tuple[torch.Tensor, torch.Tensor, tuple[str, ...]]:
    return (*numbers(first), names)


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two tasks from a folder, and one of the same images in memory; tests must not change them."""
    root = tmp_path_factory.mktemp("shop")
    write_photos(root / "first", {"one": 1, "zero": 0}, COUNT)
    with folders(root):
        pearl.learn(root / "of_files", root / "first", quiet=True, **SHORT)
        pearl.learn(root / "of_memory", named(0, "zero", "one"), task="first", quiet=True, **SHORT)
    return root


def test_images_in_memory_are_learnt_as_those_of_a_folder(shop):
    files, memory = (pearl.load(shop / name, device="cpu") for name in ("of_files", "of_memory"))
    assert memory.classes == files.classes == ("one", "zero")
    images, labels, names = named(0, "zero", "one")
    actual = memory.evaluate((images, labels, names))
    assert actual.total.tolist() == [COUNT, COUNT]
    assert np.array_equal(actual.confusion, memory.evaluate(shop / "first").confusion)
    turned = memory.evaluate((images, 1 - labels, names))
    assert np.array_equal(turned.confusion, actual.confusion[::-1])


def test_a_model_goes_on_with_a_data_set_named_by_its_classes(shop, tmp_path, monkeypatch):
    model = pearl.load(shutil.copytree(shop / "of_memory", tmp_path / "m"), device="cpu")
    images, labels = numbers(2)
    grown = model.learn(TensorDataset(images, labels))
    assert [task.name for task in grown.tasks] == ["first", "0, 1"]
    weights = weights_of(grown.path)
    model.learn(TensorDataset(images, labels))  # once more, as after a kill: there is nothing to do
    assert weights_of(grown.path) == weights
    with pytest.raises(pearl.PearlError, match=r"task '0, 1' exists"):
        model.learn(TensorDataset(images.flip(0), labels))


def test_what_was_cut_off_goes_on_with_the_same_images(shop, tmp_path):
    path, given = tmp_path / "m", named(0, "zero", "one")
    with pytest.raises(Interrupted, match=r"resume with: the same pearl\.learn, with the same images"):
        learn(path, given, task="first", overrides=SHORT, show=StopAt("reference", 2))
    with pytest.raises(RunError, match=r"used images in memory; give them again: pearl\.learn"):
        resume(path)
    learn(path, given, task="first", overrides=SHORT)
    assert weights_of(path) == weights_of(shop / "of_memory")


def test_other_images_begin_anew(shop, tmp_path):
    path, (images, labels, names) = tmp_path / "m", named(0, "zero", "one")
    with pytest.raises(Interrupted):
        learn(path, (images.flip(3), labels, names), task="first", overrides=SHORT, show=StopAt("reference", 2))
    with pytest.raises(RunError, match=r"interrupted; resume it with: the same pearl\.learn, with the same images"):
        learn(path, (images, labels, names), task="first", overrides=SHORT)
    learn(path, (images, labels, names), task="first", overrides=SHORT, discard=True)
    assert weights_of(path) == weights_of(shop / "of_memory")


def test_nested_folders_and_lists_are_resumed(tmp_path, monkeypatch):
    write_photos(tmp_path / "deep/digits", {"one": 1, "zero": 0}, COUNT)
    (tmp_path / "list.csv").write_text(
        "".join(f"{file.relative_to(tmp_path)},digits/{file.parent.name}\n" for file in tmp_path.glob("deep/*/*/*.png"))
    )
    monkeypatch.chdir(tmp_path)
    made = []
    for data, options in (("deep", {"nested": True}), ("list.csv", {})):
        path = tmp_path / f"of_{data}"
        with pytest.raises(Interrupted, match="resume with: pearl resume"):
            learn(path, data, task="t", overrides=SHORT, show=StopAt("reference", 2), **options)
        monkeypatch.chdir("/")
        resume(path)
        monkeypatch.chdir(tmp_path)
        made.append(weights_of(path))
        assert pearl.load(path, device="cpu").classes == ("digits/one", "digits/zero")
    assert made[0] == made[1]


def test_pictures_of_all_kinds_are_named_together(shop):
    model = pearl.load(shop / "of_files", device="cpu")
    file, image = sorted((shop / "first/zero").iterdir())[0], digit(0)[0]
    rgb = np.repeat(image[..., None], 3, axis=2)
    tensor = torch.from_numpy(image)[None] / 255
    kinds: list[Any] = [file, str(file), Image.open(file), image, rgb, image / 255, tensor, tensor[0], tensor.double()]
    asked = model.predict(file)[0]
    assert [actual.classes for actual in model.predict(iter(kinds))] == [asked.classes] * len(kinds)
    assert model.predict(tensor) == model.predict(file)
    assert len(model.predict(tensor.repeat(3, 1, 1)[None])) == len(model.predict(rgb[None])) == 1
    with pytest.raises(DataError, match="image 2: floating-point pixels must lie between 0 and 1"):
        model.predict([file, image, image.astype(np.float32)])
    with pytest.raises(ConfigError, match="predict: images must be"):
        model.predict(3)  # type: ignore[arg-type]


class Notes(Observer):
    def __init__(self) -> None:
        self.said: list[str] = []

    def event(self, kind: str, **facts: Any) -> None:
        self.said += [facts["text"]] if kind == "note" else []


def test_a_class_called_almost_as_a_known_one_is_a_hint(shop, tmp_path):
    path, show = shutil.copytree(shop / "of_memory", tmp_path / "m"), Notes()
    learn(path, named(2, "One", "two"), task="second", show=show, fast=True)
    (line,) = [line for line in show.said if "is a new class" in line]
    assert line == ("'One' is a new class with a name like the known 'one'; if they are the same, use --alias One=one")
    assert pearl.load(path, device="cpu").classes == ("one", "zero", "One", "two")


def test_options_without_a_name_are_of_the_recipes_network(tmp_path):
    for recipe, overrides, name in (
        ("digits", {"width": 4}, "resnet18"),
        ("photos-vit", {"weights": "file.safetensors"}, "timm/deit_tiny_patch16_224"),
        (None, {"weights": "file.safetensors"}, "timm/deit_tiny_patch16_224"),
    ):
        options = LearnOptions(recipe=recipe, overrides={"backbone": overrides})
        made = config_for(tmp_path / "new", None, options).backbone
        assert {**made, **overrides} == made and made["name"] == name and not made.get("pretrained")


def test_what_a_model_was_made_with_can_be_said_again(shop, tmp_path):
    """Also in part, and with other settings of training: what changes nothing is no mistake."""
    path, second = shutil.copytree(shop / "of_files", tmp_path / "m"), named(2, "two", "three")
    for other in (
        {"images": {"size": 9}},
        {"backbone": {"width": 9}},
        {"engine": {"channels_last": False}},
        {"seed": 3},
    ):
        with pytest.raises(ConfigError, match=rf"{next(iter(other))}: fixed since .* only train\.\* may change"):
            learn(path, second, overrides=other)
    with pytest.raises(ConfigError, match="--backbone: fixed since"):
        learn(path, second, backbone="bsc")
    with pytest.raises(ConfigError, match="--recipe: fixed since"):
        learn(path, second, recipe="photos-vit")
    again = {**SHORT, "train": {"epochs": 2, "batch_size": 8}, "method": "pearl"}
    learn(path, second, recipe="photos-resnet18", backbone="resnet18", overrides=again, fast=True)
    assert len(pearl.load(path, device="cpu").classes) == 4


def test_inspect_and_report_agree_on_what_a_task_added(shop):
    from pearl.reports.records import read
    from pearl.reports.text import inspection

    text = inspection(shop / "of_files")[1]
    (added,) = read(shop / "of_files").added
    assert f"  {added:+,} parameters" in text and added > 0
