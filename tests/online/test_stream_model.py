"""Models that learn from a stream, in Python and on the command line."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import pearl
from pearl.errors import ConfigError, DataError, RunError
from pearl.online.arriving import listed
from pearl.online.stream_model import Intake, StreamModel
from pearl.storage.run_directory import RunDirectory

COLOURS = {"red": (200, 30, 30), "green": (30, 200, 30), "blue": (30, 30, 200)}
SMALL: dict[str, Any] = {
    "backbone": {"name": "resnet18", "width": 4},
    "images": {"size": 16, "resize": None},
    "train": {"epochs": 1, "phases": {"probe": {"epochs": 1}}},
}


def photos(seed: int = 0, count: int = 30) -> tuple[np.ndarray, list[str]]:
    rng = np.random.default_rng(seed)
    names = [[*COLOURS][i % (2 if i < 12 else 3)] for i in range(count)]
    pixels = np.array([COLOURS[name] for name in names])[:, None, None] + rng.normal(0, 25, (count, 16, 16, 3))
    return np.clip(pixels, 0, 255).astype(np.uint8), names


def stream(path: Path, **options: Any) -> StreamModel:
    return pearl.stream(path, device="cpu", **{**SMALL, **options})


def test_it_learns_at_once_and_is_stored(tmp_path: Path) -> None:
    images, names = photos()
    model = stream(tmp_path / "shop", learner="slda")
    model.observe(images[0], names[0])
    model.observe(torch.from_numpy(images[1]).permute(2, 0, 1), names[1])
    assert [actual.name for actual in model.predict(images[:2])] == names[:2]
    model.observe(images[2:], names[2:])
    assert model.seen == 30 and model.classes == ["red", "green", "blue"]
    again = pearl.stream(tmp_path / "shop", device="cpu")
    assert again.classes == model.classes and again.seen == 30
    actual, same = model.predict(images, top=3), again.predict(images, top=3)
    assert actual == same
    assert np.mean([one.name == name for one, name in zip(actual, names, strict=True)]) > 0.9
    assert sum(actual[0].probabilities) == pytest.approx(1)


def test_pieces_give_the_same_bits_as_a_model_that_stays_open(tmp_path: Path) -> None:
    """With PEARL, whose sub-networks are trained on the way; each piece by a new object, as by a new process."""
    images, names = photos()
    learner = {"name": "pearl", "window": 12, "confused": 0.0, "projection": 32}
    whole, pieces = stream(tmp_path / "whole", learner=learner), tmp_path / "pieces"
    stream(pieces, learner=learner)
    for start in range(0, 30, 5):
        part = slice(start, start + 5)
        whole.observe(images[part], names[part])
        opened = StreamModel(pieces, whole.config, device="cpu")
        opened.observe(images[part], names[part])
    assert [target.name for target in RunDirectory(pieces).online_states] == ["000000030"]
    same_bits(whole, opened)


def same_bits(one: StreamModel, other: StreamModel) -> None:
    first, second = one.learner.state_dict(), other.learner.state_dict()
    assert first.keys() == second.keys() and all(torch.equal(value, second[key]) for key, value in first.items())


def test_nothing_is_learnt_from_an_unusable_label(tmp_path: Path) -> None:
    images, names = photos()
    model = stream(tmp_path / "shop", learner="ncm")
    model.observe(images[:4], names[:4])
    with pytest.raises(DataError, match="image 1: its label"):
        model.observe(images[4:6], ["red", 1.5])
    assert model.seen == 4


def test_errors_of_users(tmp_path: Path) -> None:
    images, names = photos()
    model = stream(tmp_path / "shop", learner="ncm")
    with pytest.raises(RunError, match="has seen no image yet"):
        model.predict(images[0])
    model.observe(images[:2], names[:2])
    with pytest.raises(ConfigError, match="fixed since it was created"):
        stream(tmp_path / "shop", learner="slda")
    with pytest.raises(ConfigError, match="did you mean 'slda'"):
        stream(tmp_path / "other", learner="sldaa")
    assert not (tmp_path / "other").exists()
    (state,) = RunDirectory(tmp_path / "shop").online_states
    (state / "weights.safetensors").write_bytes(b"")
    with pytest.raises(RunError, match="its stored state is damaged"):
        pearl.stream(tmp_path / "shop", device="cpu")


# Files


def on_disk(folder: Path) -> list[tuple[Path, str]]:
    """Images in a folder per class, whose time stamps are in their order."""
    images, names = photos()
    files = []
    for i, (pixels, name) in enumerate(zip(images, names, strict=True)):
        file = folder / name / f"{997 * i % 1000}.png"
        save(file, pixels, seconds=10**9 + i)
        files.append((file, name))
    return files


def in_order(data: Path) -> list[tuple[Path, str]]:
    return [(Path(one.file), one.name) for one in listed(data)]


def test_files_come_in_the_order_of_their_time_stamps_or_lines(tmp_path: Path) -> None:
    files = on_disk(tmp_path / "photos")
    assert in_order(tmp_path / "photos") == files
    shown = files[::-1]
    (tmp_path / "list.csv").write_text("".join(f"photos/{f.parent.name}/{f.name},{name}\n" for f, name in shown))
    assert in_order(tmp_path / "list.csv") == shown


def test_the_command_line_takes_up_new_images_and_predicts(cli: Any, tmp_path: Path) -> None:
    files = on_disk(tmp_path / "photos")
    lines = [f"photos/{f.parent.name}/{f.name},{name}\n" for f, name in files]
    settings = ["images.size=16", "images.resize=null", "backbone.width=4", "--backbone", "resnet18", "-q"]
    listed, shop = tmp_path / "list.csv", tmp_path / "shop"
    listed.write_text("".join(lines[:20]))
    out, _ = cli("learn", shop, "--data", listed, "--stream", *settings, "--device", "cpu")
    assert out == f"learnt 20 images; 3 classes from 20 images in all; stored in {shop}\n"
    listed.write_text("".join(lines))
    out, _ = cli("learn", shop, "--data", listed, "--stream", "-q", "--device", "cpu")
    assert out.startswith("learnt 10 images; 3 classes from 30 images in all")
    out, _ = cli("predict", shop, *(file for file, _ in files[:9]), "--device", "cpu")
    assert sum(name in line for line, (_, name) in zip(out.splitlines(), files, strict=False)) >= 7
    for option, complaint in ((["--task", "one"], "without tasks"), (["--tasks", "1"], "without tasks")):
        _, err = cli("predict", shop, files[0][0], *option, code=2)
        assert complaint in err and err.count("\n") == 1
    for option in ("--fast", "--dry-run"):
        _, err = cli("learn", shop, "--data", listed, "--stream", option, code=2)
        assert err.startswith("pearl: --stream: goes with") and err.count("\n") == 1
    out, _ = cli("inspect", shop)
    assert "30 images of a stream, 3 classes (red, green, blue)" in out and "all checksums hold" in out
    for verb in (["resume", shop], ["report", shop], ["evaluate", shop, "--data", tmp_path], ["undo", shop]):
        _, err = cli(*verb, code=2)
        assert err.count("\n") == 1 and ("stream" in err or verb[0] == "undo")
    (state,) = RunDirectory(shop).online_states
    (state / "weights.safetensors").write_bytes(b"")
    out, _ = cli("inspect", shop, code=1)
    assert f"{state.name}/weights.safetensors: checksum differs" in out


def test_an_unreadable_file_is_named_and_the_others_are_learnt(cli: Any, tmp_path: Path) -> None:
    files = on_disk(tmp_path / "photos")
    files[3][0].write_bytes(b"no image")
    settings = ["images.size=16", "images.resize=null", "backbone.width=4", "--backbone", "resnet18", "-q"]
    out, err = cli("learn", tmp_path / "shop", "--data", tmp_path / "photos", "--stream", *settings, code=1)
    assert out.startswith("learnt 29 images") and files[3][0].name in err


def test_a_late_file_is_learnt_after_the_others_and_none_twice(tmp_path: Path) -> None:
    """A photo that is copied later keeps its older time stamp. By their count alone, another would be learnt twice."""
    images, names = photos(count=8)
    for i, (image, name) in enumerate(zip(images, names, strict=True)):
        save(tmp_path / "photos" / name / f"{i}.png", image, seconds=1000 + i)
    model = stream(tmp_path / "shop", learner="ncm")
    assert model.observe_files(tmp_path / "photos") == Intake(learnt=8)
    save(tmp_path / "photos" / "blue" / "late.png", images[0], seconds=1003)
    again = pearl.stream(tmp_path / "shop", device="cpu")
    assert again.observe_files(tmp_path / "photos") == Intake(learnt=1)
    assert again.seen == 9 and again.classes == ["red", "green", "blue"]
    assert again.observe_files(tmp_path / "photos") == Intake()  # nothing is new
    os.utime(tmp_path / "photos" / "blue" / "late.png", (2000, 2000))
    assert again.observe_files(tmp_path / "photos") == Intake() and again.seen == 9
    (tmp_path / "photos" / "blue" / "late.png").rename(tmp_path / "photos" / "red" / "late.png")
    assert again.observe_files(tmp_path / "photos") == Intake(learnt=1)  # with its right class


def save(file: Path, image: np.ndarray, *, seconds: int) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(image).save(file)
    os.utime(file, (seconds, seconds))
