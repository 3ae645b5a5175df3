"""Forgetting a task of a model with class statistics: the model equals one that never learnt it."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import pearl
from pearl.errors import RunError
from pearl.lifecycle import certificate
from pearl.lifecycle.saved import verify
from pearl.storage.checkpoint import FEATURES, RUNNING, STATISTICS
from pearl.storage.run_directory import RunDirectory
from photos import SMALL, digit, write_photos

TASKS = {"a": {"a0": 0, "a1": 1}, "b": {"b0": 2, "b1": 3}, "c": {"c0": 4}, "d": {"d0": 5, "d1": 6}}


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    """Photos of four tasks, and a network that others have trained."""
    root = tmp_path_factory.mktemp("shop")
    for task, classes in TASKS.items():
        write_photos(root / task, classes, 7)
    write_photos(root / "other", {"eight": 8, "nine": 9}, 6)
    pearl.learn(root / "base", root / "other", quiet=True, **SMALL)
    for spaces in (2, 3):
        grow(root / f"all {spaces}", root, TASKS, spaces)
    return root


def grow(path, root, tasks, spaces=2, fast=(), **options):
    backbone = {"name": "convnet", "width": 2, "weights": str(root / "base")}
    classifier = {"name": "statistics", "spaces": spaces, "keep_features": True, **options}
    for number, task in enumerate(tasks):
        new = {} if number else {**SMALL, "backbone": backbone, "method": {"classifier": classifier}}
        pearl.learn(path, root / task, quiet=True, first_answer=False, fast=task in fast, **new)
    return path


def contents(path, without=("events.jsonl", "environment.json", "manifest.json", "000.json", "001.json", ".lock")):
    files = [file for file in Path(path).rglob("*") if file.is_file() and file.name not in without]
    return {str(file.relative_to(path)): file.read_bytes() for file in files}


def manifests(path):
    return [{**manifest, "seconds": 0} for _, manifest in RunDirectory(path).manifests()]


def same(model, other):
    """All files, and all entries of the manifests but for times."""
    ours, theirs = contents(model), contents(other)
    assert {*ours} == {*theirs}
    assert [name for name in ours if ours[name] != theirs[name]] == []
    assert manifests(model) == manifests(other)


@pytest.mark.parametrize(
    ("spaces", "forgotten", "fast"),
    [
        (2, "d", ()),  # the last
        (2, "c", ()),  # of one class
        (2, "b", "d"),  # a feature space; d would have been trained instead
        (2, "a", "d"),  # the first feature space
        (3, "b", ()),  # all are feature spaces but for c, and stay it
        (3, "d", ()),
    ],
)
def test_it_is_the_model_that_never_learnt_it(spaces, forgotten, fast, shop, tmp_path):
    """Byte for byte, also after the task that it learns next, and after taking that back."""
    path = Path(shutil.copytree(shop / f"all {spaces}", tmp_path / "m"))
    rest = [task for task in TASKS if task != forgotten]
    never = grow(tmp_path / "never", shop, rest, spaces, fast)
    model = pearl.load(path).forget(task=forgotten)
    assert model.classes == tuple(name for task in rest for name in TASKS[task])
    same(path, never)
    assert verify(path) == []
    photos = [digit(label)[9] for label in range(7)]
    assert model.predict(photos, top=9) == pearl.load(never).predict(photos, top=9)
    for each in (path, never):
        pearl.learn(each, shop / "other", quiet=True, first_answer=False, fast=True)
    same(path, never)
    for each in (path, never):
        pearl.load(each).undo()
    same(path, never)


def scatter_of_features(path):
    """An independent calculation from the stored features: the scatter within the classes of every task."""
    space = pearl.load(path).method.class_statistics.spaces()[0]
    total = 0.0
    for folder in RunDirectory(path).finished:
        features = load_file(folder / FEATURES)
        rows = space(features["raw.0"][:, 0]).double()
        for label in features["labels"].unique():
            own = rows[features["labels"] == label]
            total += (own - own.mean(0)).T @ (own - own.mean(0))
    upper = torch.triu_indices(*total.shape)
    return total[upper[0], upper[1]]


def stored_scatter(path):
    return load_file(RunDirectory(path).finished[-1] / RUNNING)["class_statistics.tensors.space/0/scatter"]


def test_the_covariance_is_that_of_the_other_images(shop, tmp_path):
    path = Path(shutil.copytree(shop / "all 2", tmp_path / "m"))
    pearl.load(path).forget(task="c")
    torch.testing.assert_close(stored_scatter(path), scatter_of_features(path), rtol=1e-9, atol=1e-9)


def test_a_class_leaves_no_share_of_the_covariance(shop, tmp_path, cli):
    """The weights that its images trained stay, and the certificate says so."""
    path = Path(shutil.copytree(shop / "all 2", tmp_path / "m"))
    before = stored_scatter(path)
    out, _ = cli("forget", path, "--class", "b0")
    assert "its share of all statistics is removed" in out and "; the weights computed with its images stay" in out
    scatter = scatter_of_features(path)
    assert not torch.allclose(before, scatter, rtol=0.01)
    torch.testing.assert_close(stored_scatter(path), scatter, rtol=1e-9, atol=1e-9)
    weights = "weights.safetensors"
    old, new = (load_file(RunDirectory(model).finished[1] / weights) for model in (shop / "all 2", path))
    assert len(new.pop("heads.blocks.1.weight")) == 1 and len(new.pop("heads.blocks.1.bias")) == 1
    assert all(torch.equal(value, old[name]) for name, value in new.items())
    ((state, line),) = certificate.certificate_checks(path)
    assert state == "ok" and "forgotten except the weights computed" in line and verify(path) == []
    method = pearl.load(path).method
    manifest = RunDirectory(path).tasks[-1].manifest
    assert all(manifest[key] == method.facts(3)[key] for key in ("statistics", "temperature", "refused"))
    whole = RunDirectory(shop / "all 2").tasks[-1].manifest
    assert whole["parameters"] - manifest["parameters"] == pearl.load(shop / "all 2").method.size() - method.size()
    assert sum(RunDirectory(path).tasks[1].manifest["estimate"]["total"]) == 7


def test_a_class_that_trained_nothing_is_forgotten_exactly(shop, tmp_path, cli):
    """All statistics and thresholds are those of a model that never had its images."""
    path, never = tmp_path / "m", tmp_path / "never"
    shutil.copytree(shop / "d", tmp_path / "less" / "d")
    shutil.rmtree(tmp_path / "less" / "d" / "d0")
    grow(path, shop, ["a", "d"], 1, fast="d")
    grow(never, shop, ["a"], 1)
    pearl.learn(never, tmp_path / "less" / "d", quiet=True, fast=True)
    out, _ = cli("forget", path, "--class", "d0")
    assert "nothing of its images stays, since its tasks were learnt without training" in out
    ((state, line),) = certificate.certificate_checks(path)
    assert state == "ok" and "class d0 forgotten exactly" in line and verify(path) == []
    for name in (STATISTICS, RUNNING, FEATURES):
        ours, theirs = (load_file(RunDirectory(model).finished[1] / name) for model in (path, never))
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert pearl.load(path).outcome == pearl.load(never).outcome
    pearl.load(path).undo()
    assert pearl.load(path).classes == ("a0", "a1")


def test_images_that_were_spared_from_training_are_the_same_ones_afterwards(shop, tmp_path):
    """Of the 14 images of task b one was spared, the sixth of b0; without b0 none is left, in later changes neither."""
    model = pearl.load(grow(tmp_path / "m", shop, ["a", "b", "c"]))

    def spared():
        return {one["name"]: one["estimate"]["expected"]["spared"] for one in manifests(model.path)[:2]}

    assert spared() == {"a": 1, "b": 1}
    without_b1 = pearl.load(shutil.copytree(model.path, tmp_path / "b1")).forget("b1")
    model = without_b1
    assert spared() == {"a": 1, "b": 1}
    model = pearl.load(tmp_path / "m").forget("b0")
    assert spared() == {"a": 1, "b": 0}
    model = model.forget(task="a")
    assert [one["estimate"]["expected"]["spared"] for one in manifests(model.path)[:1]] == [0]


def test_without_features_the_share_of_the_covariance_stays(shop, tmp_path, cli):
    path = Path(shutil.copytree(shop / "all 2", tmp_path / "m"))
    (RunDirectory(path).finished[0] / FEATURES).unlink()
    before = stored_scatter(path)
    out, _ = cli("forget", path, "--class", "b0")
    assert "the weights and the covariance computed with its images stay" in out
    assert torch.equal(stored_scatter(path), before)
    assert "except the weights and the covariance computed" in certificate.certificate_checks(path)[0].line


def test_what_it_costs_is_said_before(shop, tmp_path, cli):
    path = Path(shutil.copytree(shop / "all 2", tmp_path / "m"))
    before = contents(path, ())
    out, _ = cli("forget", path, "--task", "a", "--dry-run")
    assert contents(path, ()) == before
    assert "its feature space goes, so that 1 feature space of 2 remain, and no other takes its place" in out
    assert "of the images of task d " in out and "% with it (cross-validation)" in out
    made, _ = cli("forget", path, "--task", "a")
    assert made == out.replace("dry run, nothing is changed: ", "")
    other = Path(shutil.copytree(shop / "all 2", tmp_path / "o"))
    assert "feature space" not in cli("forget", other, "--task", "c", "--dry-run")[0]


def test_the_certificate(shop, tmp_path, cli):
    path = Path(shutil.copytree(shop / "all 2", tmp_path / "m"))
    pearl.load(path).forget(task="a")
    checks = certificate.certificate_checks(path)
    assert [state for state, _ in checks] == ["ok"] and "task a forgotten exactly" in checks[0].line
    files = certificate.read_json(RunDirectory(path).certificates[0])["files"]
    entries = {each["file"]: each for each in files}
    entry = entries["tasks/000-b/weights.safetensors"]
    assert entry["from"] == "tasks/001-b/weights.safetensors"
    assert all(row["before"] == row["after"] for row in entry["tensors"].values()), "sub-networks keep their bits"
    names = {row["from"] for row in entry["tensors"].values()}
    assert "heads.blocks.1.weight" in names
    rows = {
        name: row["from"]
        for name in (RUNNING, "statistics.safetensors", FEATURES)
        for name, row in (entries[f"tasks/002-d/{name}"]["tensors"].items())
    }
    own = "class_statistics.tensors."
    assert rows[f"{own}space/0/scatter"] == f"{own}space/1/scatter"
    assert rows[f"{own}task/2/classes"] == f"{own}task/3/classes"
    assert rows[f"{own}task/2/means/0"] == f"{own}task/3/means/1" and rows["raw.0"] == "raw.1"
    file = RunDirectory(path).finished[0] / FEATURES
    assert "raw.1" not in load_file(file) and "raw.0" in load_file(file), "features of the removed sub-network go, too"
    assert f"{file.relative_to(path)}: sha256" in cli("verify", path)[0]
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    assert any(FEATURES in line for line in verify(path))


def test_a_class_takes_its_features_with_it(shop, tmp_path):
    path = Path(shutil.copytree(shop / "all 2", tmp_path / "m"))
    pearl.load(path).forget("b0")
    assert verify(path) == []
    labels = [load_file(folder / FEATURES)["labels"] for folder in RunDirectory(path).finished]
    assert [len(each) for each in labels] == [14, 7, 7, 14]
    assert torch.cat(labels).unique().tolist() == list(range(6))
    assert len(load_file(RunDirectory(path).finished[1] / FEATURES)["raw.1"]) == 7
    left = pearl.load(path).forget(task="c")
    assert left.classes == ("a0", "a1", "b1", "d0", "d1") and verify(path) == []
    assert left.predict(digit(3)[3])[0].name in left.classes
    left.forget("b1")
    with pytest.raises(RunError, match="task b has no classes left; forget that task first"):
        pearl.load(path).forget(task="d")
    assert pearl.load(path).forget(task="b").classes == ("a0", "a1", "d0", "d1") and verify(path) == []
    assert pearl.load(path).forget(task="d").classes == ("a0", "a1") and verify(path) == []


def refused(cli, words, path, task):
    before = contents(path, ())
    _, err = cli("forget", path, "--task", task, code=2)
    assert words in err and err.count("\n") == 1
    assert contents(path, ()) == before


def test_tasks_that_cannot_be_forgotten(shop, tmp_path, cli):
    path = Path(shutil.copytree(shop / "all 2", tmp_path / "m"))
    pearl.learn(path, write_photos(tmp_path / "again", {"c0": 4, "new": 7}, 5, start=20), quiet=True, fast=True)
    refused(cli, "task again has more images of c0, a class of task c; forget task again first", path, "c")
    (RunDirectory(path).finished[1] / FEATURES).unlink()
    assert verify(path) == [], "the user may remove them"
    refused(cli, "method.classifier.keep_features=true", path, "d")
    late = grow(tmp_path / "late", shop, ["c", "a"], 2, fast="a")
    refused(cli, "task a has no feature space but that of task c", late, "c")
    trained = tmp_path / "trained"
    method = {"classifier": {"name": "statistics", "keep_features": True}}
    for task, new in (("a", {**SMALL, "method": method}), ("b", {})):
        pearl.learn(trained, shop / task, quiet=True, **new)
    refused(cli, "task a trained weights that other tasks use", trained, "a")
    assert pearl.load(trained).forget(task="b").classes == ("a0", "a1")


def test_without_the_option_nothing_of_an_image_is_kept(shop, tmp_path):
    grow(tmp_path / "m", shop, ["a"], keep_features=False)
    assert not [*(tmp_path / "m").rglob(FEATURES)]


def test_copies_have_features_and_views_are_kept(shop, tmp_path):
    path = grow(tmp_path / "views", shop, ["a", "b", "c"], 2, views=2)
    raw = load_file(RunDirectory(path).finished[0] / FEATURES)["raw.0"]
    assert raw.shape[:2] == (14, 3) or raw.shape[:2] == (14, 1)
    made = pearl.learn(tmp_path / "copy", shop / "d", start=path, quiet=True, first_answer=False)
    never = grow(tmp_path / "never", shop, ["a", "c", "d"], 2, fast="d", views=2)
    assert made.forget(task="b").classes == pearl.load(never).classes
    assert manifests(tmp_path / "copy") == manifests(never)
