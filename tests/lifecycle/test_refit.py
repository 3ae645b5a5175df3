"""Models that were made without class statistics get them of images at hand."""

import errno
import shutil

import pytest
import torch

import pearl
from pearl.errors import ConfigError, DataError, RunError
from pearl.lifecycle import copying
from pearl.lifecycle.copying import LOCK
from pearl.lifecycle.runs import execute
from pearl.lifecycle.saved import load_method
from pearl.settings.config import load_config
from pearl.storage.checkpoint import load_state
from pearl.storage.run_directory import RunDirectory
from photos import SETTINGS, digit, files_of, folders, write_class, write_photos


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    """The same two tasks with heads, and with statistics from the start; both trained on all images."""
    root = tmp_path_factory.mktemp("shop")
    write_photos(root / "first", {"zero": 0, "one": 1}, count=40)
    write_photos(root / "second", {"two": 2, "three": 3}, count=40)
    with folders(root), pytest.MonkeyPatch.context() as patch:
        patch.setattr("pearl.data.batches.FEWEST", 1_000)  # statistics would spare some for the estimate
        for name, classifier in (("heads", {"name": "heads"}), ("whole", {"name": "statistics", "train": "all"})):
            pearl.learn(root / name, root / "first", quiet=True, **SETTINGS, method={"classifier": classifier})
            pearl.learn(root / name, root / "second", quiet=True)
    return root


def test_it_is_the_model_that_would_have_been(shop, tmp_path):
    before, old = files_of(shop / "heads"), pearl.load(shop / "heads")
    made = old.refit([shop / "first", shop / "second"], tmp_path / "new")
    assert files_of(shop / "heads") == before
    expected, state = load_state(shop / "whole"), load_state(made.path)
    assert expected.keys() == state.keys()
    assert all(torch.equal(expected[name], state[name]) for name in state)
    assert made.config.method["classifier"]["train"] == "spaces"  # of tasks to come
    image = digit(2)[100]
    assert made.predict(image, top=4) == pearl.load(shop / "whole").predict(image, top=4)
    grown = pearl.learn(made.path, write_class(tmp_path / "more" / "four", 4).parent, fast=True, quiet=True)
    assert grown.classes == ("one", "zero", "three", "two", "four")
    assert {target.name for target in tmp_path.iterdir()} == {"new", "more"}


def test_folders_of_other_names_and_in_other_places(shop, tmp_path, cli):
    for start, name in enumerate(("zero", "one", "three", "zwei")):
        write_class(tmp_path / f"at{start}" / name, {"zero": 0, "one": 1, "three": 3, "zwei": 2}[name])
    data = [word for at in range(4) for word in ("--data", tmp_path / f"at{at}")]
    out, _ = cli("refit", shop / "heads", *data, "--alias", "zwei=two", "--to", tmp_path / "new")
    assert f"wrote {tmp_path / 'new'}" in out
    assert pearl.load(tmp_path / "new").predict(digit(3)[100])[0].name == "three"
    _, err = cli("refit", shop / "heads", "--to", tmp_path / "x", code=2)
    assert "give the model's images with --data" in err


def test_sub_networks_after_the_last_space_are_no_part_of_an_answer():
    """Not even of PackNet, whose tasks share weights."""
    shape = ["stream.tasks=[4,3,3]", "train.epochs=1", "backbone.width=4"]
    shape += ["stream.per_class=12", "stream.test_per_class=2"]
    class_statistics = "method.classifier={name: statistics, spaces: 1, train: all, layers: final}"
    run = execute(load_config("digits", ["method=packnet", *shape, class_statistics]))
    whole = load_method(run.path, run.config)
    for folder in RunDirectory(run.path).finished[1:]:
        (folder / "weights.safetensors").unlink()
    asked, x = load_method(run.path, run.config, to_ask=True), torch.rand(8, 3, 8, 8)
    with torch.no_grad():
        assert torch.equal(whole(x), asked(x))


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda root: ["first"], DataError, "no images of 'three', 'two': a class without statistics could never"),
        (lambda root: [write_class(root / "x" / "for", 4).parent], DataError, "'for' is not a class of the model"),
        (lambda root: [(write_photos(root / "x", {"two": 2, "three": 3}) / "two" / "bad.png").write_bytes(b"x") and
                       root / "x", "first"], DataError, "bad.png"),
    ],
)  # fmt: skip
def test_what_is_refused_leaves_nothing(shop, tmp_path, change, error, words):
    root = tmp_path / "data"
    data = [shop / folder for folder in change(root)]
    with pytest.raises(error, match=words):
        pearl.load(shop / "heads").refit(data, tmp_path / "made" / "new")
    assert not (tmp_path / "made").exists() or not any((tmp_path / "made").iterdir())


def test_models_that_cannot_be_refitted(shop, tmp_path):
    model = pearl.load(shop / "heads")
    with pytest.raises(ConfigError, match="already has class statistics"):
        pearl.load(shop / "whole").refit(shop / "first", tmp_path / "new")
    with pytest.raises(ConfigError, match="a model is refitted to class statistics"):
        model.refit(shop / "first", tmp_path / "new", "heads")
    with pytest.raises(ConfigError, match=r"was trained with linear heads; remove classifier\.head"):
        model.refit(shop / "first", tmp_path / "new", {"name": "statistics", "head": "cosine"})
    with pytest.raises(RunError, match=r"exists; choose another name$"):
        model.refit([shop / "first", shop / "second"], shop / "whole")
    damaged = shutil.copytree(shop / "heads", tmp_path / "damaged", ignore=shutil.ignore_patterns(*LOCK))
    (damaged / "tasks" / "001-second" / "weights.safetensors").write_bytes(b"short")
    with pytest.raises(RunError, match="damaged"):
        pearl.load(damaged).refit([shop / "first", shop / "second"], tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_learning_on_without_statistics_says_so(shop, tmp_path, cli):
    path = shutil.copytree(shop / "heads", tmp_path / "model", ignore=shutil.ignore_patterns(*LOCK))
    _, err = cli("learn", path, "--data", write_photos(tmp_path / "more", {"four": 4, "five": 5}))
    assert err.count("pearl refit") == 1


def test_a_model_that_has_its_name_is_called_stored(tmp_path, monkeypatch):
    """Where only the last sync fails; and the next command removes what a maker left that was killed just then."""

    def fail(folder):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(copying, "sync_folder", fail)
    with pytest.raises(RunError, match="is made and stored"), copying.made_aside(tmp_path / "model") as aside:
        (aside / "config.yaml").touch()
    assert (tmp_path / "model" / "config.yaml").exists()
    left = tmp_path / f".model.{'0' * 32}.new"
    left.mkdir()
    with pytest.raises(RunError, match="exists; choose another name"):
        copying.check_target(tmp_path / "model", tmp_path / "base")
    assert not left.exists()
