"""Files that a directory removes: an interrupted task on request, and statistics that later tasks replaced."""

import json
import os
import shutil
from pathlib import Path

import pytest

import pearl
from pearl.data import scratch
from pearl.errors import Interrupted, RunError
from pearl.lifecycle import session
from pearl.lifecycle.learning import resume
from pearl.lifecycle.saved import verify
from pearl.reports.text import inspection
from pearl.storage.checkpoint import RUNNING
from pearl.storage.run_directory import RunDirectory
from photos import SETTINGS, StopAt, digit, files_of, learn, weights_of, write_photos

SHORT = {**SETTINGS, "backbone": {"name": "convnet", "width": 2}, "method": "finetune", "train": {"epochs": 2}}
STATISTICS = {**SHORT, "method": "pearl", "train": {"epochs": 1}, "engine": {"max_steps": 1}}


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    root = tmp_path_factory.mktemp("photos")
    for name, first in (("first", 0), ("second", 2), ("third", 4)):
        write_photos(root / name, {f"{name} {i}": first + i for i in (0, 1)}, 4)
    return root


@pytest.fixture(scope="module")
def half(photos, tmp_path_factory):
    """A model of one task, in the middle of its second."""
    path = tmp_path_factory.mktemp("half") / "model"
    learn(path, photos / "first", overrides=SHORT)
    with pytest.raises(Interrupted, match="its state is stored; resume with: pearl resume"):
        learn(path, photos / "second", show=StopAt("finetune", 1))
    return path


@pytest.fixture
def model(half, tmp_path):
    return Path(shutil.copytree(half, tmp_path / "model"))


def flip(file):
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)


def contents(path):
    return {file.relative_to(path): file.read_bytes() for file in path.rglob("*") if file.is_file()}


# ------------------------------------------------------------------------------------------------ interrupted tasks


@pytest.mark.parametrize("other", ["data", "settings"])
def test_an_interrupted_task_is_discarded_only_on_request(other, model, photos):
    before = {name: data for name, data in contents(model).items() if "resume" in name.parts}
    assert before
    what = {"data": (photos / "third", {}), "settings": (photos / "second", {"overrides": {"train": {"epochs": 3}}})}
    data, how = what[other]
    fix = rf"task 'second' was interrupted; resume it with: pearl resume {model}; or discard it with --discard"
    with pytest.raises(RunError, match=fix):
        learn(model, data, **how)
    assert {name: data for name, data in contents(model).items() if "resume" in name.parts} == before
    resume(model)
    assert [task.name for task in pearl.load(model).tasks] == ["first", "second"]


def test_other_images_of_the_same_names_do_not_throw_it_away(model, photos, tmp_path):
    """Their pixels say it, which are read last."""
    other = write_photos(tmp_path / "second", {"second 0": 2, "second 1": 3}, 4, start=5)
    with pytest.raises(RunError, match="was interrupted"):
        learn(model, other)
    assert RunDirectory(model).checkpoints


def test_it_is_thrown_away_when_asked_to(model, photos, tmp_path):
    learn(model, photos / "third", discard=True)
    assert [task.name for task in pearl.load(model).tasks] == ["first", "third"]
    assert not (model / "resume").exists()
    pearl.load(model).learn(photos / "second", discard=True, quiet=True)  # there is none: no mistake


def test_the_same_task_begins_anew_when_asked_to(model, photos, cli):
    (model / "resume" / "task.json").write_text("{")  # a damaged note can be thrown away, too
    _, text = inspection(model)
    assert "resume/task.json: damaged" in text and "--discard" in text
    cli("learn", model, "--data", photos / "second", "-q", code=2)
    cli("learn", model, "--data", photos / "second", "-q", "--discard")
    assert len(RunDirectory(model).finished) == 2 and not (model / "resume").exists()


def test_inspect_shows_it(model, half, cli):
    out, _ = cli("inspect", model)
    assert f"task second: interrupted; resume with: pearl resume {model}; or discard it with --discard" in out
    facts = json.loads(cli("inspect", model, "--json")[0])["interrupted"]
    assert facts["task"] == "second" and facts["checkpoints"] == [
        target.name for target in RunDirectory(half).checkpoints
    ]
    shutil.rmtree(model / "resume")
    assert inspection(model)[0]["interrupted"] is None


def test_an_attempt_of_which_nothing_is_stored_is_no_loss(model, photos):
    """Such as one that ran out of memory in its first step: what is mended is often a setting."""
    for target in RunDirectory(model).checkpoints:
        shutil.rmtree(target)
    learn(model, photos / "second", overrides={"train": {"epochs": 3}})
    assert len(RunDirectory(model).finished) == 2


def test_a_folder_that_is_called_resume_is_somebodys(photos, tmp_path):
    letters = tmp_path / "applications" / "resume"
    letters.mkdir(parents=True)
    (letters / "cv.pdf").write_bytes(b"x")
    with pytest.raises(RunError, match="a folder with other contents, not a model"):
        learn(tmp_path / "applications", photos / "first", overrides=SHORT)
    assert (letters / "cv.pdf").exists()


@pytest.mark.parametrize(("kind", "step"), [(RunDirectory, "list_classes"), (session.Session, "_thin_out")])
def test_an_error_after_the_task_is_stored_says_so(kind, step, model, photos, monkeypatch):
    usual = getattr(kind, step)

    def fails(self):
        if len(RunDirectory(self.path).finished) == 2:
            raise RunError("disk: cannot be written (No space left on device)")
        usual(self)

    with monkeypatch.context() as patch:
        patch.setattr(kind, step, fails)
        with pytest.raises(RunError, match=r"No space.*; task 'second' is learnt and stored nevertheless$"):
            learn(model, photos / "second")
    learn(model, photos / "second")  # nothing is left to do but that
    assert len(json.loads((model / "classes.json").read_text())["tasks"]) == 2 and not (model / "resume").exists()


# -------------------------------------------------------------------------------------------------- earlier states


@pytest.fixture(scope="module")
def grown(photos, tmp_path_factory):
    """The same model twice, of which the second keeps its earlier states; and as it was after its first task."""
    root = tmp_path_factory.mktemp("grown")
    for name, keep in (("newest", False), ("all", True)):
        settings = {**STATISTICS, "engine": {**STATISTICS["engine"], "earlier_states": keep}}
        pearl.learn(root / name, photos / "first", quiet=True, **settings)
        if not keep:
            shutil.copytree(root / name, root / "one")
        for task in ("second", "third"):
            pearl.learn(root / name, photos / task, quiet=True)
    return root


def kept(path):
    return [(folder / RUNNING).exists() for folder in RunDirectory(path).finished]


def answer(path, tasks=None):
    return pearl.load(path, tasks=tasks).predict(digit(1)[0], top=9)


def test_the_statistics_of_the_last_two_states_are_kept_alone(grown):
    assert kept(grown / "newest") == [False, True, True] and kept(grown / "all") == [True] * 3
    assert verify(grown / "newest") == [] == verify(grown / "all")
    assert answer(grown / "newest") == answer(grown / "all")
    newest = weights_of(grown / "newest")
    assert newest.items() < weights_of(grown / "all").items()
    task = inspection(grown / "newest")[0]["tasks"][0]
    files = (grown / "newest" / "tasks" / task["folder"]).glob("*.safetensors")
    assert task["bytes"] == sum(file.stat().st_size for file in files)


def test_an_earlier_state_is_there_or_one_line_says_why(grown, cli):
    assert answer(grown / "all", 1) == answer(grown / "one")
    line = r"its state after 1 task is not stored, since a later task has replaced 000-first/running\.safetensors; use "
    with pytest.raises(RunError, match=line):
        answer(grown / "newest", 1)
    assert answer(grown / "newest", 2) == answer(grown / "all", 2)  # kept for `pearl undo`
    _, err = cli("predict", grown / "newest", "x.jpg", "--tasks", 1, code=2)
    assert err.count("\n") == 1 and "engine.earlier_states=true" in err


@pytest.mark.parametrize("harm", ["lost", "flipped"])
def test_damage_of_the_newest_is_reported(harm, grown, tmp_path):
    path = Path(shutil.copytree(grown / "newest", tmp_path / "model"))
    file = RunDirectory(path).finished[-1] / RUNNING
    file.unlink() if harm == "lost" else flip(file)
    with pytest.raises(RunError, match=r"002-third/running\.safetensors: (cannot be read|checksum differs)"):
        answer(path)
    (line,) = verify(path)
    assert "002-third/running.safetensors" in line


def test_damage_of_earlier_tasks_is_told_from_what_was_replaced(grown, tmp_path):
    path = Path(shutil.copytree(grown / "newest", tmp_path / "model"))
    (RunDirectory(path).finished[0] / "statistics.safetensors").unlink()
    (line,) = verify(path)
    assert "000-first/statistics.safetensors: cannot be read" in line


def test_killed_before_the_older_go_it_is_made_up_for(grown, photos, tmp_path, monkeypatch):
    path = Path(shutil.copytree(grown / "one", tmp_path / "model"))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):

        def killed(self):
            if len(RunDirectory(self.path).finished) == 2:
                assert kept(path) == [True, True], "the newest is whole before the older go"
                raise KeyboardInterrupt

        patch.setattr(session.Session, "_thin_out", killed)
        learn(path, photos / "second")
    assert kept(path) == [True, True] and len(answer(path)) == 1
    learn(path, photos / "third")
    assert kept(path) == [False, True, True] and answer(path) == answer(grown / "newest")


def test_a_copy_has_what_the_model_has(grown, photos, tmp_path):
    (tmp_path / "outside").write_text("of others")
    start = Path(shutil.copytree(grown / "newest", tmp_path / "start"))
    os.mkfifo(RunDirectory(start).finished[0] / "pipe")  # is no file of a model: it would never end
    (RunDirectory(start).finished[0] / "more").symlink_to("/dev/zero")
    more = write_photos(tmp_path / "more", {"six": 6, "seven": 7}, 4)
    learn(tmp_path / "copy", more, start=start)
    assert kept(tmp_path / "copy") == [False, False, True, True]
    there = {file.name for file in RunDirectory(tmp_path / "copy").finished[0].iterdir()}
    assert there == {"manifest.json", "weights.safetensors", "statistics.safetensors"}


# ------------------------------------------------------------------------------------------- more images than memory


def test_a_task_in_a_file_gives_the_same_bits(photos, tmp_path, monkeypatch):
    again = write_photos(tmp_path / "again", {"first 0": 0, "new": 7}, 6)  # some are copies of what was learnt
    shutil.copy(again / "new" / "000.png", again / "new" / "copy.png")
    room, mapped = scratch.room, []

    def watched(shape):
        made = room(shape)
        mapped.append((scratch.is_large(made.nbytes), len(made)))
        return made

    monkeypatch.setattr(scratch, "room", watched)
    for name, memory in (("in memory", 2**40), ("in a file", 0)):
        monkeypatch.setattr(scratch, "memory", lambda memory=memory: memory)
        (tmp_path / name).mkdir()
        pearl.learn(tmp_path / name / "model", photos / "first", quiet=True, holdout=0.3, **STATISTICS)
        pearl.learn(tmp_path / name / "model", again, quiet=True, allow_new_style=True)
        assert [file.name for file in (tmp_path / name).iterdir()] == ["model"]
    half = len(mapped) // 2
    assert [large for large, _ in mapped] == [False] * half + [True] * half
    assert mapped[:half] == [(False, count) for _, count in mapped[half:]] and half >= 5
    assert weights_of(tmp_path / "in memory" / "model") == weights_of(tmp_path / "in a file" / "model")


def test_a_dry_run_says_what_a_task_needs_and_changes_nothing(photos, tmp_path, cli):
    model, settings = tmp_path / "model", ["train.epochs=3", "train.batch_size=4", "images.size=8", "backbone.width=2"]
    command = ["learn", model, "--data", photos / "first", "--dry-run", "--backbone", "convnet", *settings]
    out, _ = cli(*command, "method=finetune")
    assert out.splitlines() == [
        "task first: 2 classes, 8 images",
        "decoded images: 0.0 MB in memory",
        "training: finetune 6 steps of 4 images",
    ]
    assert not [*tmp_path.iterdir()]
    learn(model, photos / "first", overrides=STATISTICS)
    before = files_of(model)
    write_photos(tmp_path / "more", {"first 1": 3, "third": 4}, 3)
    out, _ = cli("learn", model, "--data", tmp_path / "more", "--dry-run", "--fast")
    assert out.splitlines()[0] == "task more: 2 classes, 1 of them known, 6 images"
    assert out.splitlines()[2] == "training: none" and files_of(model) == before
