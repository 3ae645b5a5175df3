"""Verbs that take something back: each changes a model whole or not at all, and exactly as it says."""

import shutil
from pathlib import Path

import pytest

import pearl
from pearl.lifecycle.saved import verify
from pearl.storage.checkpoint import RUNNING
from pearl.storage.run_directory import RunDirectory
from photos import SETTINGS, digit, write_photos

SMALL = {**SETTINGS, "backbone": {"name": "convnet", "width": 2}, "train": {"epochs": 1}, "engine": {"max_steps": 2}}
TASKS = {"first": 0, "second": 2, "third": 4}


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    """Models with heads and with statistics, each after one, two and three tasks."""
    root = tmp_path_factory.mktemp("shop")
    for task, label in TASKS.items():
        write_photos(root / task, {f"{task} {i}": label + i for i in (0, 1)}, 4)
    for kind in ("heads", "chain"):
        grow(root / "now", root, TASKS, method={"classifier": kind}, copies=root / kind)
        shutil.rmtree(root / "now")
    return root


def grow(path, photos, tasks, *, copies=None, **settings):
    for number, task in enumerate(tasks, 1):
        pearl.learn(path, photos / task, quiet=True, **({} if number > 1 else SMALL | settings))
        if copies:
            shutil.copytree(path, copies / f"{number}")


def copied(model, tmp_path):
    return Path(shutil.copytree(model, tmp_path / "model"))


def contents(path, without=()):
    """The bytes of all files, but for the lock's."""
    files = [file for file in path.rglob("*") if file.is_file() and ".lock" not in file.name]
    return {str(file.relative_to(path)): file.read_bytes() for file in files if file.name not in without}


def answer(path):
    return pearl.load(path).predict([digit(label)[7] for label in range(6)], top=9)


# ------------------------------------------------------------------------------------------------------------ undo


@pytest.mark.parametrize("kind", ["heads", "chain"])
def test_undo_is_the_state_before_byte_for_byte(kind, shop, tmp_path):
    before = {file.name for file in (shop / kind / "1").iterdir()}
    path = copied(shop / kind / "2", tmp_path)
    assert pearl.load(path).undo().classes == ("first 0", "first 1")
    assert contents(path) == contents(shop / kind / "1") and {file.name for file in path.iterdir()} == before
    assert answer(path) == answer(shop / kind / "1") and verify(path) == []
    pearl.learn(path, shop / "second", quiet=True)
    timed = ("events.jsonl", "manifest.json")
    assert contents(path, timed) == contents(shop / kind / "2", timed)


def test_with_statistics_one_task_can_be_taken_back(shop, tmp_path, cli):
    path = copied(shop / "chain" / "3", tmp_path)
    out, _ = cli("undo", path, "--dry-run")
    assert "dry run, nothing is changed" in out and contents(path) == contents(shop / "chain" / "3")
    out, _ = cli("undo", path)
    assert out == f"{path}: task third is taken back; 2 tasks with 4 classes left\n"
    there, expected = contents(path), contents(shop / "chain" / "2")
    assert {*expected} - {*there} == {f"tasks/000-first/{RUNNING}"}  # for another undo alone
    assert there.items() <= expected.items()
    _, err = cli("undo", path, code=2)
    assert err.count("\n") == 1 and "before task second is not stored, since the task has replaced tasks/000" in err
    assert contents(path) == there


def test_with_heads_all_but_the_first_can(shop, tmp_path, cli):
    path = copied(shop / "heads" / "3", tmp_path)
    (RunDirectory(path).finished[-1] / "weights.safetensors").write_bytes(b"damaged")
    for tasks in (2, 1):
        cli("undo", path)
        assert contents(path) == contents(shop / "heads" / f"{tasks}")
    _, err = cli("undo", path, code=2)
    assert "it has no task before its last one; remove the folder" in err
