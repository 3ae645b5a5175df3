"""Verbs that take something back: each changes a model whole or not at all, and exactly as it says."""

import re
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch

import pearl
from pearl.errors import ConfigError, RunError
from pearl.lifecycle import certificate
from pearl.lifecycle.forget import forget
from pearl.lifecycle.rename import rename
from pearl.lifecycle.saved import verify
from pearl.lifecycle.undo import undo
from pearl.reports.text import inspection
from pearl.storage import change as storage_change
from pearl.storage.checkpoint import RUNNING, load_state
from pearl.storage.run_directory import RunDirectory
from photos import SMALL, TASKS, digit, write_tasks


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    """Models with heads and with statistics, each after one, two and three tasks."""
    root = tmp_path_factory.mktemp("shop")
    write_tasks(root)
    for kind in ("heads", "statistics"):
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


@pytest.mark.parametrize("kind", ["heads", "statistics"])
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
    path = copied(shop / "statistics" / "3", tmp_path)
    out, _ = cli("undo", path, "--dry-run")
    assert "dry run, nothing is changed" in out and contents(path) == contents(shop / "statistics" / "3")
    out, _ = cli("undo", path)
    assert out == f"{path}: task third is taken back; 2 tasks with 4 classes left\n"
    there, expected = contents(path), contents(shop / "statistics" / "2")
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


# ---------------------------------------------------------------------------------------------------------- rename


@pytest.mark.parametrize("kind", ["heads", "statistics"])
def test_rename_is_a_model_that_learnt_the_new_name(kind, shop, tmp_path, cli):
    path = copied(shop / kind / "2", tmp_path)
    cli("rename", path, "second 0", " zwei ", "--dry-run")
    assert contents(path) == contents(shop / kind / "2")
    out, _ = cli("rename", path, "second 0", " zwei ")
    assert out == f"{path}: class second 0 is now called zwei\n"
    expected = {
        name: data.replace(b'"second 0"', b'"zwei"') if name.endswith(("json", "jsonl")) else data
        for name, data in contents(shop / kind / "2").items()
    }
    assert contents(path) == expected and verify(path) == []
    assert b"zwei" in expected["classes.json"] and b"zwei" in expected["events.jsonl"]
    assert pearl.load(path).classes == ("first 0", "first 1", "zwei", "second 1")
    renamed = [one.name.replace("second 0", "zwei") for one in answer(shop / kind / "2")]
    assert [one.name for one in answer(path)] == renamed


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("first 0", "second 1", "class 'second 1' exists"),
        ("first 0", "first 0", "class 'first 0' exists"),
        ("first 9", "nine", "no class 'first 9'; did you mean"),
        ("first 0", " ", "is empty"),
    ],
)
def test_names_that_are_refused(old, new, words, shop, cli):
    refused(cli, words, "rename", shop / "heads" / "2", old, new)


def refused(cli, words, verb, path, *more):
    """One line says why, and nothing has changed."""
    before = contents(path)
    _, err = cli(verb, path, *more, code=2)
    assert err.count("\n") == 1 and words in err
    assert contents(path) == before


# ---------------------------------------------------------------------------------------------------------- forget


@pytest.mark.parametrize(
    ("method", "forgotten"),
    [
        ({"name": "pearl", "classifier": "heads"}, "second"),
        ({"name": "pearl", "classifier": "heads", "reference": "given"}, "first"),
        ({"name": "isolation", "classifier": "heads"}, "first"),
    ],
)
def test_without_a_task_it_is_the_model_that_never_learnt_it(method, forgotten, shop, tmp_path):
    """Bit by bit, but for times and messages: also the task that it learns next."""
    rest = [task for task in TASKS if task != forgotten]
    grow(tmp_path / "model", shop, TASKS, method=method)
    grow(tmp_path / "never", shop, rest, method=method)
    assert pearl.load(tmp_path / "model").forget(task=forgotten).classes == pearl.load(tmp_path / "never").classes
    same(tmp_path / "model", tmp_path / "never")
    if forgotten == "second":
        for name in ("model", "never"):
            pearl.load(tmp_path / name).learn(shop / forgotten, quiet=True)
        same(tmp_path / "model", tmp_path / "never")


def same(model, other):
    timed = ("events.jsonl", "manifest.json", "environment.json", "000.json")  # and the certificate
    assert contents(model, timed) == contents(other, timed) and verify(model) == []
    assert manifests(model) == manifests(other)
    assert events(model) == events(other)


def events(path):
    return [(event["event"], event["task"]) for event in RunDirectory(path).events if event["event"] != "note"]


def manifests(path):
    return [{**manifest, "seconds": 0} for _, manifest in RunDirectory(path).manifests()]


@pytest.mark.parametrize(
    ("kind", "task", "words"),
    [
        ("heads", "first", "task first trained weights that other tasks use (backbone."),
        ("heads", "fifth", "no task 'fifth'"),
        ("statistics", "first", "only if the features of all images are stored, as in models created with method.cl"),
        ("statistics", "second", "take back the last task with `pearl undo"),
    ],
)
def test_tasks_that_cannot_be_forgotten(kind, task, words, shop, cli):
    refused(cli, words, "forget", shop / kind / "2", "--task", task)


@pytest.mark.parametrize("kind", ["heads", "statistics"])
def test_a_forgotten_class_is_never_predicted_again(kind, shop, tmp_path, cli):
    path = copied(shop / kind / "3", tmp_path)
    cli("forget", path, "--class", "first 1", "--dry-run")
    assert contents(path) == contents(shop / kind / "3")
    out, _ = cli("forget", path, "--class", "first 1")
    assert "stay; to remove them too, " in out and out.count("\n") == 1
    left = ("first 0", "second 0", "second 1", "third 0", "third 1")
    assert pearl.load(path).classes == left and verify(path) == []
    before, after = answer(shop / kind / "3"), answer(path)
    if kind == "heads":  # logits of the others are unchanged
        for old, new in zip(before, after, strict=True):
            assert [name for name in old.classes if name != "first 1"] == [*new.classes]
    assert all(sorted(one.classes) == sorted(left) for one in after)
    for folder in RunDirectory(path).finished:
        assert b"first 1" not in (folder / "manifest.json").read_bytes()
    manifest = RunDirectory(path).tasks[-1].manifest
    method = pearl.load(path).method
    assert manifest["parameters"] == method.size()
    if kind == "statistics":
        assert manifest["statistics"] == method.facts(2)["statistics"]
        prototypes, gone = (load_state(target, file_of=method.file_of) for target in (path, shop / kind / "3"))
        name = "class_statistics.tensors.task/{}/{}"
        assert torch.equal(prototypes[name.format(2, "classes")], torch.tensor([3, 4]))
        assert torch.equal(prototypes[name.format(0, "means/0")], gone[name.format(0, "means/0")][:1])
        assert pearl.load(path).outcome is not None
    assert "first 1" not in str([event for event in RunDirectory(path).events if event["event"] != "note"])
    grown = pearl.learn(path, shop / "first", task="again", quiet=True) if kind == "statistics" else None
    assert grown is None or grown.classes == (*left, "first 1")


def test_a_class_of_two_tasks_is_forgotten_in_both(shop, tmp_path):
    path = copied(shop / "statistics" / "1", tmp_path)
    pearl.learn(path, shop / "first", task="again", allow_new_style=True, quiet=True)
    model = pearl.load(path).forget("first 0")
    assert [task.names for task in model.tasks] == [("first 1",), ("first 1",)]
    assert model.method.class_statistics.class_of.tolist() == [0, 0]
    assert model.predict(digit(0)[7], task="again")[0].classes == ("first 1",)


@pytest.mark.parametrize("kind", ["heads", "statistics"])
def test_the_only_class_of_a_task(kind, shop, tmp_path):
    path = copied(shop / kind / "3", tmp_path)
    forget(path, "second 0")
    if kind == "heads":
        with pytest.raises(ConfigError, match="the only class of its task; remove the task with: pearl forget"):
            forget(path, "second 1")
        return
    forget(path, "second 1")
    model = pearl.load(path)
    assert model.classes == ("first 0", "first 1", "third 0", "third 1")
    assert all(sum(one.probabilities) == pytest.approx(1) and len(one.classes) == 4 for one in answer(path))
    assert "task second: no classes left" in inspection(path)[1]
    with pytest.raises(ConfigError, match="task 'second' has no classes left"):
        model.predict(digit(0)[0], task="second")
    again = model.learn(shop / "second", task="again", quiet=True)
    assert {"second 0", "second 1"} <= {*again.classes}
    assert again.evaluate(shop / "third").total.sum() == 8


@pytest.mark.parametrize("method", ["finetune", "pnn"])  # pnn: of isolated networks, but with connections
def test_methods_that_cannot_forget(method, shop, tmp_path, cli):
    settings = {**SMALL, "backbone": {"name": "resnet18", "width": 2}, "method": method}
    pearl.learn(tmp_path / "model", shop / "first", quiet=True, **settings)
    for what in (("--class", "first 0"), ("--task", "first")):
        _, err = cli("forget", tmp_path / "model", *what, code=2)
        assert f"method {method} cannot forget, since its tensors may belong to several tasks" in err


# --------------------------------------------------------------------------------------------------- interruptions


VERBS = {
    "undo": undo,
    "rename": partial(rename, old="second 0", new="other"),
    "forget --class": partial(forget, name="first 1"),
    "forget --task": partial(forget, task="second"),
}


@pytest.mark.parametrize("verb", VERBS)
def test_killed_anywhere_it_has_happened_whole_or_not_at_all(verb, shop, tmp_path, monkeypatch, cli):
    monkeypatch.setattr(certificate, "now", lambda: "2026-01-01")
    before = contents(shop / "heads" / "3")
    done = copied(shop / "heads" / "3", tmp_path / "done")
    VERBS[verb](done)
    after, counted, kills = contents(done), 0, 0
    assert after != before

    def killed(*args, usual, **kwargs):
        nonlocal counted
        counted += 1
        if counted == kills:
            raise KeyboardInterrupt
        return usual(*args, **kwargs)

    while True:
        kills, counted = kills + (1 if kills < 4 else 4), 0
        path = Path(shutil.copytree(shop / "heads" / "3", tmp_path / f"{kills}"))
        with monkeypatch.context() as patch:
            for name in ("write_file", "remove_file", "remove_empty", "sync_folder", "remove_tree"):
                patch.setattr(storage_change, name, partial(killed, usual=getattr(storage_change, name)))
            try:
                VERBS[verb](path)
                break
            except KeyboardInterrupt:
                pass
        if RunDirectory(path).change_file.is_file():
            with pytest.raises(RunError, match=f"complete it with: pearl resume {path}$"):
                pearl.load(path)
            if kills < 10:
                cli("resume", path)
            else:
                assert "completed the interrupted" in undo(path)  # and nothing is undone
            assert contents(path) == after
        elif (target := contents(path, [file.name for file in RunDirectory(path).change_folder.glob("*")])) != after:
            assert target == before
            VERBS[verb](path)
            assert contents(path) == after
    assert kills > 5


@pytest.mark.parametrize("kind", ["above", "absolute"])
def test_a_change_stays_in_the_directory(kind, shop, tmp_path):
    path = copied(shop / "heads" / "2", tmp_path)
    (tmp_path / "outside").write_text("of others")
    name = "../outside" if kind == "above" else str(tmp_path / "outside")
    change = RunDirectory(path)
    change.write(change.change_file, {"verb": "pearl undo", "files": [], "removed": [name]})
    with pytest.raises(RunError, match=re.escape(f"{name!r} is outside of the directory")):
        undo(path)
    assert (tmp_path / "outside").exists()


def test_an_interrupted_task_comes_first(shop, tmp_path, cli):
    path = copied(shop / "heads" / "2", tmp_path)
    directory = RunDirectory(path)
    directory.write(directory.pending_file, {"index": 2, "data": "", "name": "next", "config": {}})
    _, err = cli("undo", path, code=2)
    assert "a task was interrupted; complete it with: pearl resume" in err
