"""A model that answers while its task is trained: at once, whole, and without a trace in the trained model."""

import os
import shutil
import signal
from statistics import mode

import pytest
import torch

import pearl
from pearl.errors import ConfigError, Interrupted, RunError
from pearl.lifecycle import learning
from pearl.lifecycle.choices import LearnOptions
from pearl.lifecycle.saved import verify
from pearl.lifecycle.undo import undo
from pearl.storage.run_directory import RunDirectory
from pearl.training.engine import Observer
from photos import SETTINGS, StopAt, digit, weights_of, write_photos

PLAIN = {key: SETTINGS[key] for key in ("images", "train")}


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    """Photos of two tasks, a network that others have trained, and the model that learnt both without first answers."""
    root = tmp_path_factory.mktemp("shop")
    write_photos(root / "other", {"eight": 8, "nine": 9})
    write_photos(root / "first", {"zero": 0, "one": 1})
    write_photos(root / "second", {"two": 2, "three": 3})
    pearl.learn(root / "base", root / "other", quiet=True, **SETTINGS)
    for task in ("first", "second"):
        pearl.learn(root / "whole", root / task, quiet=True, first_answer=False, **settings(root, task))
        shutil.copytree(root / "whole", root / f"whole {task}")
    return root


def settings(root, task="first"):
    backbone = {"name": "resnet18", "width": 8, "weights": str(root / "base")}
    return {**PLAIN, "backbone": backbone} if task == "first" else {}


def begin(path, shop, task="first", show=None, **options):
    more = {key: value for key, value in settings(shop, task).items() if key != "backbone"}
    backbone = settings(shop, task).get("backbone")
    chosen = LearnOptions(backbone=backbone, overrides=more, **options)
    learning.learn(path, shop / task, chosen, device="cpu", show=show)


class Watch(Observer):
    """Calls a function at the first training step."""

    def __init__(self, look):
        self.look, self.events = look, []

    def event(self, kind, **facts):
        self.events.append(kind)

    def step(self, done, total):
        if self.look and "phase" in self.events:
            look, self.look = self.look, None
            look()


def named(path, *labels):
    """The most frequent name of seven photos of each digit."""
    model = pearl.load(path, device="cpu")
    return [mode(one.name for one in model.predict([*digit(label)[30:37]])) for label in labels]


@pytest.mark.parametrize("task", ["first", "second"])
def test_it_answers_before_the_first_step_and_leaves_no_trace(task, shop, tmp_path):
    path, actual = tmp_path / "m", {}
    if task == "second":
        shutil.copytree(shop / "whole first", path)

    def look():
        model = pearl.load(path, device="cpu")
        actual.update(classes=model.classes, first=model.first_answer, outcome=model.outcome)
        actual["names"] = named(path, *((0, 1) if task == "first" else (2, 3)))
        actual["ranks"] = [model.method.is_adapted(t) for t in range(len(model.tasks))]
        actual["problems"] = verify(path)

    show = Watch(look)
    begin(path, shop, task, show)
    expected = ("one", "zero") if task == "first" else ("one", "zero", "three", "two")
    assert sorted(actual["classes"]) == sorted(expected) and f"task {task} is not trained yet" in actual["first"]
    assert actual["names"] == (["zero", "one"] if task == "first" else ["two", "three"])
    assert actual["ranks"][-1] is False and actual["problems"] == []
    assert actual["outcome"].images == 32 and actual["outcome"].spared is None, "the network was not trained on these"
    assert show.events.count("first_answer") == 1
    assert show.events.index("first_answer") < show.events.index("phase")
    whole = shop / f"whole {task}"
    assert weights_of(path) == weights_of(whole)
    assert manifests(path) == manifests(whole)
    assert not (path / "resume").exists() and pearl.load(path).first_answer == ""
    assert pearl.load(path, device="cpu").outcome == pearl.load(whole, device="cpu").outcome


def manifests(path):
    return [{**manifest, "seconds": 0} for _, manifest in RunDirectory(path).manifests()]


def test_it_is_what_fast_gives(shop, tmp_path):
    """Byte for byte; a pretrained network can begin like that, another one cannot."""
    kept = {}
    path = tmp_path / "m"
    begin(path, shop, show=Watch(lambda: kept.update(weights_of(path / "resume" / "first-answer"))))
    model = pearl.learn(tmp_path / "fast", shop / "first", fast=True, quiet=True, **settings(shop))
    assert kept == weights_of(model.tasks[0].folder) and len(kept) == 3
    assert model.method.class_statistics.created_at == [0] and not model.method.is_adapted(0)
    frozen = model.method.backbone.state_dict()
    other = pearl.load(shop / "base").method.backbone.state_dict()
    assert all(torch.equal(frozen[name].cpu(), other[name].cpu()) for name in frozen)
    grown = model.learn(shop / "second", quiet=True)
    assert grown.method.class_statistics.created_at == [0, 1], "the next task is trained"
    with pytest.raises(ConfigError, match="after its first task or to a pretrained network"):
        pearl.learn(tmp_path / "new", shop / "first", fast=True, quiet=True, **SETTINGS)
    plain = Watch(None)
    learning.learn(tmp_path / "new", shop / "first", LearnOptions(overrides=SETTINGS), device="cpu", show=plain)
    assert "first_answer" not in plain.events, "random features are no answer"


@pytest.mark.parametrize("task", ["first", "second"])
def test_an_interrupted_task_keeps_answering(task, shop, tmp_path, cli):
    path = tmp_path / "m"
    if task == "second":
        shutil.copytree(shop / "whole first", path)
    with pytest.raises(Interrupted, match="the model answers without this training until then; resume with"):
        begin(path, shop, task, StopAt("adapt", 2))
    held = pearl.load(path, device="cpu")  # reads its weights after the task is finished
    out, err = cli("predict", path, shop / task)
    assert f"note: task {task} is not trained yet" in err and len(out.splitlines()) >= 32
    assert f"note: task {task} is not trained yet" in cli("evaluate", path, "--data", shop / task)[1]
    assert f"task {task}: its first answer is in use, without training; resume with" in cli("inspect", path)[0]
    show = Watch(None)
    learning.resume(path, device="cpu", show=show)
    assert "first_answer" not in show.events, "it is there"
    assert weights_of(path) == weights_of(shop / f"whole {task}")
    assert held.predict(digit(0)[30])[0].name == "zero"
    assert "not trained" not in cli("predict", path, shop / task)[1] + cli("evaluate", path, "--data", shop / task)[1]


def test_first_answers_can_be_left_out_also_on_resuming(shop, tmp_path):
    path = tmp_path / "m"
    with pytest.raises(Interrupted):
        begin(path, shop, "first", StopAt("adapt", 2), first_answer=False)
    with pytest.raises(RunError, match="no task is finished; resume it with"):
        pearl.load(path)
    show = Watch(None)
    learning.resume(path, device="cpu", show=show)
    assert "first_answer" not in show.events


class Killed(Observer):
    """Ends its process without notice at an event."""

    def __init__(self, kind):
        self.kind = kind

    def event(self, kind, **facts):
        if kind == self.kind:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(("kind", "usable"), [("task", False), ("first_answer", True), ("epoch", True)])
def test_killed_at_any_time(kind, usable, shop, tmp_path):
    path = tmp_path / "m"
    child = os.fork()
    if not child:
        try:
            begin(path, shop, "first", Killed(kind))
        finally:
            os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    if usable:
        assert named(path, 0, 1) == ["zero", "one"]
    else:
        with pytest.raises(RunError, match="no task is finished"):
            pearl.load(path)
    learning.resume(path, device="cpu")
    assert weights_of(path) == weights_of(shop / "whole first")


def test_what_a_kill_leaves_while_it_is_removed_goes(shop, tmp_path):
    """The note of the task was removed first; the task itself is stored."""
    path = tmp_path / "m"
    with pytest.raises(Interrupted):
        begin(path, shop, "first", StopAt("probe", 1))
    shutil.copytree(path / "resume" / "first-answer", tmp_path / "left")
    learning.resume(path, device="cpu")
    shutil.copytree(tmp_path / "left", path / "resume" / "first-answer")
    begin(path, shop, "first")
    assert not (path / "resume").exists() and weights_of(path) == weights_of(shop / "whole first")


def test_it_can_be_taken_back_and_is_not_lost_silently(shop, tmp_path, cli):
    path = tmp_path / "m"
    shutil.copytree(shop / "whole first", path)
    with pytest.raises(Interrupted):
        begin(path, shop, "second", StopAt("probe", 1))
    shutil.rmtree(next((path / "resume").glob("001-*")))  # only the first answer is left
    _, err = cli("learn", path, "--data", shop / "other", code=2)
    assert "task 'second' was interrupted; resume it with" in err
    _, err = cli("rename", path, "one", "eins", code=2)
    assert "pearl resume" in err
    out, _ = cli("undo", path, "--dry-run")
    assert out.startswith("dry run") and named(path, 2) == ["two"]
    out, _ = cli("undo", path)
    assert "the first answer of task second, which is not trained yet, is taken back; 1 task left" in out
    assert not (path / "resume").exists() and weights_of(path) == weights_of(shop / "whole first")
    with pytest.raises(RunError, match="it has no task before its last one"):
        undo(path)


def test_a_damaged_first_answer_is_found(shop, tmp_path):
    path = tmp_path / "m"
    with pytest.raises(Interrupted):
        begin(path, shop, "first", StopAt("probe", 1))
    file = path / "resume" / "first-answer" / "statistics.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    assert any("first-answer/statistics.safetensors: checksum differs" in line for line in verify(path))
