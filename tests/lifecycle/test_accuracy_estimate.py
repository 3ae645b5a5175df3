"""How good a model is once it has learnt: estimated where its images are gone, measured where there are others."""

import json
import shutil

import numpy as np
import pytest
import torch

import pearl
from pearl.data.batches import derive_seed
from pearl.errors import ConfigError, DataError, Interrupted, RunError
from pearl.lifecycle.accuracy_estimate import OLD, estimated, measured
from pearl.lifecycle.learning import resume
from pearl.methods.common.by_statistics import StatisticsClassifier
from pearl.reports.learning_summary import ending
from pearl.storage.files import read_json
from pearl.training.engine import Observer
from photos import SETTINGS, StopAt, folders, learn, weights_of, write_class, write_photos

HEADS = {"method": {"classifier": {"name": "heads"}}}


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    """A model of zero and one, and of two and three; photos that it has not learnt."""
    root = tmp_path_factory.mktemp("shop")
    write_photos(root / "first", {"zero": 0, "one": 1}, count=40)
    write_photos(root / "second", {"two": 2, "three": 3}, count=40)
    write_photos(root / "test", {"zero": 0, "one": 1, "two": 2, "three": 3}, count=60, start=100)
    write_photos(root / "mixed", {"zero": 0, "two": 2, "eight": 8, "thre": 3}, count=20, start=100)
    with folders(root):
        pearl.learn(root / "one", root / "first", quiet=True, **SETTINGS, engine={"earlier_states": True})
        shutil.copytree(root / "one", root / "model")
        pearl.learn(root / "model", root / "second", quiet=True)
        pearl.learn(root / "heads", root / "first", quiet=True, **SETTINGS, **HEADS)
    return root


@pytest.fixture(scope="module")
def model(shop):
    return pearl.load(shop / "model")


@pytest.fixture
def one(shop, tmp_path):
    return shutil.copytree(shop / "one", tmp_path / "one")


def estimate(path, task=-1):
    return read_json(sorted((path / "tasks").iterdir())[task] / "manifest.json").get("estimate")


# ------------------------------------------------------------------------------------------------------ estimated


def test_what_is_estimated_is_near_what_is_measured(shop, model):
    said, actual = model.outcome, measured(model.evaluate(shop / "test"))
    assert (said.how, said.images, said.spared) == ("left out", 80, 8)
    assert said.new == pytest.approx(actual.new, abs=15)
    assert said.old_now == pytest.approx(actual.old_now, abs=15)
    assert said.old_now <= said.old_then
    assert said.new <= said.new_in_task
    assert pearl.load(shop / "model", tasks=1).outcome.spared == 8


def test_a_manifest_has_the_counts(shop):
    entry = estimate(shop / "model")
    assert entry["classes"] == [2, 3] and entry["total"] == [40, 40]
    wrong = sum(times for _, _, times in entry["mistakes"])
    assert sum(entry["class_il"]) == 80 - wrong
    assert sum(images for images, _, _ in entry["reliability"]) == 80
    assert sum(right for _, _, right in entry["reliability"]) == sum(entry["class_il"])


def test_old_tasks_that_nobody_measured_are_left_out(shop, tmp_path):
    path = shutil.copytree(shop / "model", tmp_path / "m")
    for task, key in ((0, "old_then"), (1, None)):
        file = sorted((path / "tasks").iterdir())[task] / "manifest.json"
        facts = read_json(file)
        file.write_text(json.dumps({name: value for name, value in facts.items() if name != "estimate"}))
        said = pearl.load(path).outcome
        assert said is None if key is None else (getattr(said, key), said.old_now) == (None, None)


@pytest.mark.parametrize(
    "harm",
    [
        {"classes": [7, 8]},
        {"total": [40]},
        {"total": [0, 40]},
        {"class_il": [41, 0]},
        {"mistakes": [[2, 9, 1]]},
        {"mistakes": [[0, 1, 1]]},
        {"mistakes": [[2, 3]]},
        {"classes": [], "total": [], "class_il": [], "task_il": []},
        {"how": "guessed"},
        {"expected": {"class_il": 1.1, "task_il": 1.0, "spared": 8}},
    ],
)
def test_a_damaged_estimate_is_refused(shop, tmp_path, harm):
    path = shutil.copytree(shop / "model", tmp_path / "m")
    file = path / "tasks" / "001-second" / "manifest.json"
    facts = read_json(file)
    file.write_text(json.dumps(facts | {"estimate": facts["estimate"] | harm}))
    with pytest.raises(RunError, match=r"001-second/manifest\.json"):
        _ = pearl.load(path).outcome


def test_of_very_many_old_tasks_some_are_asked_about(model, monkeypatch):
    asked = []
    monkeypatch.setattr(
        StatisticsClassifier, "retained_accuracy", lambda self, task, right, images: asked.append(task) or 1
    )
    said = estimated([model.tasks[0]] * 200 + [model.tasks[1]], model.method)
    assert said.old_now == pytest.approx(said.old_then, abs=1)
    assert len(set(asked)) == OLD and {0, 199} <= set(asked)


# ------------------------------------------------------------------------------------------------------- held out


def test_what_is_held_out_is_not_learnt_and_measured(shop, tmp_path):
    model = pearl.learn(tmp_path / "m", shop / "first", holdout=0.25, quiet=True, **SETTINGS, **HEADS)
    manifest = read_json(model.tasks[0].folder / "manifest.json")
    assert (manifest["images"], manifest["images_per_class"], manifest["holdout"]) == (60, [40, 40], 0.25)
    entry = manifest["estimate"]
    assert (entry["how"], entry["total"]) == ("held out", [10, 10])
    torch.manual_seed(derive_seed(0, "first", "holdout"))
    right = []
    for name in ("one", "zero"):
        files = sorted((shop / "first" / name).iterdir())
        held = [files[row] for row in torch.randperm(40)[:10].tolist()]
        right.append(sum(said.name == name for said in model.predict(held)))
    assert entry["class_il"] == right
    assert model.outcome.how == "held out" and model.outcome.spared is None


def test_an_interrupted_task_goes_on_with_the_same_images_held_out(shop, tmp_path):
    how = {"holdout": 0.25, "overrides": SETTINGS}
    learn(tmp_path / "whole", shop / "first", **how)
    with pytest.raises(Interrupted):
        learn(tmp_path / "cut", shop / "first", **how, show=StopAt("reference", 3))
    resume(tmp_path / "cut")
    assert estimate(tmp_path / "cut") == estimate(tmp_path / "whole")
    assert weights_of(tmp_path / "cut") == weights_of(tmp_path / "whole")
    learn(tmp_path / "cut", shop / "first", **how)  # there is nothing left to do
    with pytest.raises(ConfigError, match="exists"):
        learn(tmp_path / "cut", shop / "first", overrides=SETTINGS)


@pytest.mark.parametrize("share", [-0.1, 1.0, float("nan")])
def test_shares_that_are_none(shop, tmp_path, share):
    with pytest.raises(ConfigError, match="holdout"):
        pearl.learn(tmp_path / "m", shop / "first", holdout=share, quiet=True)
    assert not (tmp_path / "m").exists()


def test_a_class_of_one_image_has_none_to_hold_out(shop, tmp_path):
    single = write_photos(tmp_path / "single", {"a": 0, "b": 1}, 1)
    with pytest.raises(ConfigError, match="needs a class of two images"):
        pearl.learn(tmp_path / "m", single, holdout=0.5, quiet=True)


def test_heads_alone_say_nothing_of_themselves(shop):
    assert pearl.load(shop / "heads").outcome is None


# --------------------------------------------------------------------------------------------------- in the terminal


def test_learn_ends_with_a_result(shop, one, cli):
    out, _ = cli("learn", one, "--data", shop / "second", "--fast", "--evaluate", shop / "test")
    lines = out.splitlines()
    assert len(lines) <= 15
    assert lines[0].startswith("learnt task second")
    model = pearl.load(one)
    assert "\n".join(lines[1:]) == ending(model, measured(model.evaluate(shop / "test")))
    assert f"about {model.outcome.old_now:.1f} % now (estimated" in out
    assert f"measured on 240 images:\n  new classes  {measured(model.evaluate(shop / 'test')).new:.1f} %" in out
    assert "of images of known classes, about 5 % (" in lines[-2]
    assert f"next: pearl predict {one} PHOTO; pearl export" in lines[-1]


def test_what_a_network_was_trained_on_is_corrected(shop, one, tmp_path):
    """By images that were spared from its training, every tenth of those in the order of their classes."""
    entry = estimate(one)
    right = 80 * entry["expected"]["class_il"]
    assert entry["expected"]["spared"] == 8 and 0.5 * sum(entry["class_il"]) < right < sum(entry["class_il"])
    model = pearl.load(one)
    assert model.outcome.new == pytest.approx(100 * right / 80) and model.outcome.right == model.outcome.new
    assert "  (corrected, since its network was trained on all of these images but 8)" in ending(model)
    assert estimate(shop / "heads") is None
    fast = model.learn(shop / "second", fast=True, quiet=True)
    assert fast.outcome.spared is None and "corrected" not in ending(fast)
    assert fast.outcome.old_then == pytest.approx(100 * right / 80)


def test_every_image_is_in_the_statistics_and_nine_of_ten_in_the_training(shop, tmp_path):
    seen = []

    class Watch(Observer):
        def event(self, kind, **facts):
            seen.append((kind, facts))

    learn(tmp_path / "m", shop / "first", overrides=SETTINGS, show=Watch())
    model = pearl.load(tmp_path / "m")
    steps = next(facts["steps"] for kind, facts in seen if kind == "phase")
    assert steps == SETTINGS["train"]["epochs"] * -(-72 // model.config.train.batch_size)
    assert model.method.class_statistics.tensors["task.0.counts"].tolist() == [40, 40]
    assert int(model.method.class_statistics.tensors["space.0.images"]) == 80


def test_the_first_task_ends_with_an_estimate(shop, tmp_path, cli):
    assert "not measured; use --evaluate FOLDER" in ending(pearl.load(shop / "heads"))
    write_photos(tmp_path / "new", {"x": 0, "y": 1}, 12)
    small = ["--backbone=resnet18", "backbone.width=4", "images.size=8", "train.epochs=1"]
    out, _ = cli("learn", tmp_path / "m", "--data", tmp_path / "new", "--holdout", 0.5, *small)
    assert "measured on 12 images of its own, held out" in out


def test_old_classes_alone_are_measured(shop, one, cli, tmp_path):
    old = write_class(tmp_path / "old" / "zero", 0, 10, start=100).parent
    alias = ("--alias", "three=drei")  # of a folder that was learnt, which those to measure on need not have
    out, _ = cli("learn", one, "--data", shop / "second", *alias, "--fast", "--evaluate", old, "-q")
    assert "measured on 10 images:\n  old classes  " in out
    new = write_photos(tmp_path / "x", {"six": 6, "nine": 9})
    _, err = cli("learn", one, "--data", new, "--fast", "--evaluate", "no", code=1)
    assert "pearl: the task is learnt, but not evaluated: no is not a folder" in err


# -------------------------------------------------------------------------------------------------------- strangers


def test_strangers_are_scored_as_unknown(shop, model):
    evaluation = model.evaluate(shop / "mixed", unknown_rate=0.3)
    assert evaluation.unknown_classes == ("eight", "thre")
    assert evaluation.total.tolist() == [0, 20, 0, 20]
    files = sorted((shop / "mixed").rglob("*.png"))
    known = [said.known for said in model.predict(files, unknown_rate=0.3)]
    assert evaluation.refused.tolist() == [not each for each in known]
    assert evaluation.is_known.tolist() == [file.parent.name in ("zero", "two") for file in files]
    (note,) = evaluation.notes
    assert "scored as unknown: 'eight', 'thre' (did you mean 'three'?)" in note
    assert evaluation.auroc > 60
    plain = model.evaluate(shop / "mixed", aliases={"thre": "three"})
    assert plain.unknown_classes == ("eight",) and plain.total.tolist() == [0, 20, 20, 20]
    with pytest.raises(DataError, match="no folder 'thr' that could be an alias; did you mean 'thre'"):
        model.evaluate(shop / "mixed", aliases={"thr": "three"})


def test_several_folders_are_one(shop, model):
    both = model.evaluate([shop / "first", shop / "second"])
    parts = [model.evaluate(shop / name).confusion for name in ("first", "second")]
    assert (both.confusion == sum(parts)).all()


def test_without_statistics_strangers_are_left_out(shop):
    evaluation = pearl.load(shop / "heads").evaluate(shop / "mixed")
    assert evaluation.total.tolist() == [0, 20] and evaluation.unknown_classes == ()
    assert evaluation.coverage == {} and np.isnan(evaluation.auroc)
    assert "left out" in evaluation.notes[0] and "'thre'" in evaluation.notes[0]


def test_a_folder_of_strangers_alone_is_a_mistake(shop, model, tmp_path):
    data = write_photos(tmp_path / "x", {"thre": 3}, 1)
    with pytest.raises(DataError, match=r"only unknown classes: 'thre' \(did you mean 'three'"):
        model.evaluate(data)
