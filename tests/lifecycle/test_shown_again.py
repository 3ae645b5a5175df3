"""Models that tell tasks apart by class statistics: single classes, known classes again, other names, no training."""

import hashlib
import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

import pearl
from pearl.errors import ConfigError, DataError, RunError
from pearl.lifecycle.refit import refit, refitted
from pearl.lifecycle.runs import execute
from pearl.lifecycle.saved import load_method, verify
from pearl.settings.config import load_config
from photos import SETTINGS, digit, folders, write_class, write_photos


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    """A model of zero and one, then of two alone; and what comes next."""
    root = tmp_path_factory.mktemp("shop")
    write_photos(root / "first", {"zero": 0, "one": 1}, count=40)
    write_class(root / "single" / "two", 2, count=40)
    write_photos(root / "again", {"zero": 6, "three": 3}, count=40)  # a zero that looks like a six
    write_photos(root / "test", {"zero": 0, "one": 1, "two": 2}, count=30, start=60)
    with folders(root):
        pearl.learn(root / "one", root / "first", quiet=True, **SETTINGS)
        shutil.copytree(root / "one", root / "model")
        pearl.learn(root / "model", root / "single", quiet=True)
    return root


@pytest.fixture
def two(shop, tmp_path):
    return shutil.copytree(shop / "model", tmp_path / "model")


def right(model, folder, name):
    said = model.predict(sorted((folder / name).iterdir()))
    return np.mean([prediction.classes[0] == name for prediction in said])


def test_new_models_have_it_and_may_leave_it(shop, tmp_path):
    assert pearl.load(shop / "one").config.method["classifier"]["name"] == "statistics"
    method = {"classifier": {"name": "heads"}}
    made = pearl.learn(tmp_path / "m", shop / "first", quiet=True, **SETTINGS, method=method)
    assert made.config.method["classifier"] == {"name": "heads"}


def test_a_class_alone_is_named(shop):
    model = pearl.load(shop / "model")
    assert model.classes == ("one", "zero", "two")
    for name in model.classes:
        assert right(model, shop / "test", name) > 0.6, name


def test_probabilities_are_probabilities(shop):
    (said,) = pearl.load(shop / "model").predict(next((shop / "test" / "one").iterdir()), top=3)
    assert sum(said.probabilities) == pytest.approx(1)


def test_a_known_class_of_another_look_keeps_its_name(shop, two):
    six = write_class(two.parent / "test" / "zero", 6, count=30, start=60).parent
    before = right(pearl.load(two), six, "zero")
    model = pearl.learn(two, shop / "again", allow_new_style=True, quiet=True)
    assert model.classes == ("one", "zero", "two", "three")
    assert model.tasks[-1].names == ("zero", "three")
    assert right(model, six, "zero") > max(0.6, before)
    assert right(model, shop / "test", "zero") > 0.6
    (said,) = model.predict(next((shop / "test" / "zero").iterdir()), task="again", top=2)
    assert {*said.classes} == {"zero", "three"}
    assert model.evaluate(six).class_il[1] > 0


def test_known_classes_alone_are_a_task(shop, two):
    more = write_class(two.parent / "more" / "zero", 6, count=20).parent
    model = pearl.learn(two, more, allow_new_style=True, quiet=True)
    assert model.classes == ("one", "zero", "two")
    assert (model.tasks[-1].classes, model.tasks[-1].also) == ((), ("zero",))
    reopened = pearl.load(two)
    image = next((shop / "test" / "zero").iterdir())
    assert reopened.predict(image) == model.predict(image)
    grown = pearl.learn(two, write_photos(two.parent / "next", {"four": 4, "five": 5}), quiet=True)
    assert grown.classes == ("one", "zero", "two", "five", "four")


def test_folders_of_other_names(shop, two):
    root = write_photos(two.parent / "sketches", {"null": 0, "seven": 7}, count=20, start=60)
    write_class(root / "naught", 0, count=20, start=80)
    model = pearl.learn(two, root, aliases={"null": "zero", "naught": "zero"}, quiet=True)
    assert model.tasks[-1].names == ("zero", "seven")
    assert model.method.class_statistics.tensors["task.2.counts"].tolist() == [40, 20]
    with pytest.raises(DataError, match="no folder 'nul' that could be an alias; did you mean 'null'"):
        pearl.learn(two, root, task="other", aliases={"nul": "zero"}, quiet=True)


def test_without_training(shop, one_copy):
    new = write_photos(one_copy.parent / "x", {"four": 4, "five": 5}, 40)
    model = pearl.learn(one_copy, new, fast=True, quiet=True)
    assert not model.method.is_adapted(1)
    assert model.method.class_statistics.created_at == [0]
    assert right(model, write_photos(one_copy.parent / "t", {"four": 4}, 30, start=60), "four") > 0.6


@pytest.fixture
def one_copy(shop, tmp_path):
    return shutil.copytree(shop / "one", tmp_path / "one")


def test_without_training_there_must_be_statistics(shop, tmp_path):
    with pytest.raises(ConfigError, match="after its first task"):
        pearl.learn(tmp_path / "m", shop / "first", fast=True, quiet=True, **SETTINGS)
    method = {"classifier": {"name": "heads"}}
    pearl.learn(tmp_path / "m", shop / "first", quiet=True, **SETTINGS, method=method)
    with pytest.raises(ConfigError, match="class statistics"):
        pearl.learn(tmp_path / "m", shop / "single", fast=True, quiet=True)
    with pytest.raises(DataError, match="without class statistics a class can be learnt only once"):
        pearl.learn(tmp_path / "m", shop / "again", quiet=True)


def test_it_is_said(shop, one_copy, cli):
    _, err = cli("learn", one_copy, "--data", shop / "single")
    assert "learnt by class statistics alone, without training, since a single class" in err
    _, err = cli("learn", one_copy, "--data", shop / "again", "--alias", "three=drei", "--fast")
    assert "without training, as requested" in err
    assert pearl.load(one_copy).classes == ("one", "zero", "two", "drei")
    out, _ = cli(
        "learn",
        one_copy,
        "--data",
        shop / "single",
        "--task",
        "more",
        "--alias",
        "two=drei",
        "--fast",
        "--allow-new-style",
    )
    assert out.startswith("learnt task more: known classes again, 4 in all; stored in ")
    assert "task more: known classes again\n" in cli("inspect", one_copy)[0]
    assert "task more" not in cli("evaluate", one_copy, "--data", shop / "first")[0]  # none of its classes is its own
    assert "give each as FOLDER=CLASS" in cli("learn", one_copy, "--data", shop / "again", "--alias", "x", code=2)[1]


@pytest.mark.parametrize("spaces", [2, "all"])
def test_refitting_a_run_is_the_run_that_would_have_been(spaces, cli):
    overrides = ["stream.tasks=[4,3,3]", "train.epochs=1", "train.phases.probe.epochs=1", "backbone.width=4"]
    trained = execute(load_config("digits", overrides))
    spec = f"{{name: statistics, spaces: {spaces}, train: all}}"
    whole = execute(load_config("digits", [*overrides, f"method.classifier={spec}"]))
    actual = refit(trained.path, {"name": "statistics", "spaces": spaces})
    assert actual.path == whole.path  # of the same configuration; so another path for it
    shutil.move(whole.path, whole.path.with_name("whole"))
    actual = refit(trained.path, {"name": "statistics", "spaces": spaces})
    both = whole.path.with_name("whole"), actual.path
    expected, state = (load_method(path, actual.config).state_dict() for path in both)
    assert expected.keys() == state.keys()
    assert all(torch.equal(expected[name], state[name]) for name in state)
    whole.path = whole.path.with_name("whole")
    counts = [[stage["class_il"] for stage in run.results["stages"]] for run in (actual, whole)]
    assert counts[0] == counts[1]
    took = [manifest["seconds"] for manifest in trained.manifests]
    assert [(task["seconds"], task["reused"]) for task in actual.manifests] == [(each, [*each]) for each in took]


def test_another_classifier_takes_the_place_of_the_one_there_was():
    run = load_config("digits", ["method.classifier={name: statistics, spaces: 2, train: all}"])
    assert refitted(run, "heads").method["classifier"] == {"name": "heads"}
    run = load_config("digits", ["method.classifier={name: statistics, spaces: 2}"])  # of train=spaces
    assert refitted(run, {"name": "statistics", "layers": "final"}).method["classifier"]["spaces"] == 2
    with pytest.raises(ConfigError, match="of all tasks would have been trained, this run has those of 2 tasks"):
        refitted(run, "heads")
    with pytest.raises(ConfigError, match="of 3 tasks would have been trained, this run has those of 2 tasks"):
        refitted(run, {"name": "statistics", "spaces": 3})
    with pytest.raises(ConfigError, match="with a cosine head, this run has a linear one"):
        refitted(run, {"name": "statistics", "head": "cosine"})
    of_cosines = load_config("digits", ["method.classifier={name: statistics, train: all, head: cosine}"])
    assert refitted(of_cosines, {"name": "statistics", "spaces": 1}).method["classifier"]["head"] == "cosine"
    with pytest.raises(ConfigError, match="with a linear head, this run has a cosine one"):
        refitted(of_cosines, "heads")


def test_what_cannot_be_refitted():
    run = execute(load_config("digits", ["method=finetune", "stream.tasks=2", "train.epochs=1", "backbone.width=4"]))
    with pytest.raises(ConfigError, match="has no sub-networks"):
        refit(run.path)


def test_a_strangers_photo_is_unknown(shop, cli):
    """Sevens and nines for a model that has seen none."""
    model = pearl.load(shop / "model")
    seen = [digit(label)[100:160] for label in (0, 1, 2)]
    strange = [digit(label)[:60] for label in (7, 9)]
    known, unknown = (
        np.mean([p.known for p in model.predict(list(np.concatenate(images)), unknown_rate=0.1)])
        for images in (seen, strange)
    )
    assert known > 0.6  # other writers than those of the 40 images a class that were learnt
    assert unknown < known - 0.3
    photo = Image.fromarray(strange[0][0])
    assert model.predict(photo)[0] == model.predict(photo, unknown_rate=0.05)[0]
    actual = model.predict(photo)[0]
    assert actual.known == (actual.in_distribution >= 0.05)
    plain = model.predict(photo, unknown_rate=None)[0]
    assert plain.known is None and plain.in_distribution is None
    photo.save(shop / "seven.png")
    out, _ = cli("predict", shop / "model", shop / "seven.png", "--unknown-rate", 0.9)
    assert "unknown; nearest:" in out
    out, _ = cli("predict", shop / "model", shop / "seven.png", "--unknown-rate", 0.9, "--json")
    assert json.loads(out)["known"] is False and 0 <= json.loads(out)["in_distribution"] < 0.9
    assert json.loads(cli("predict", shop / "model", shop / "seven.png", "--json")[0])["known"] is actual.known
    assert "known" not in json.loads(cli("predict", shop / "model", shop / "seven.png", "--json", "--no-unknown")[0])
    _, err = cli("predict", shop / "model", shop / "seven.png", "--no-unknown", "--unknown-rate", 0.1, code=2)
    assert "--no-unknown and --unknown-rate cannot be combined" in err
    assert "will be called unknown" in cli("inspect", shop / "model")[0]
    out, _ = cli("predict", shop / "model", shop / "seven.png", "--unknown-rate", 0.9, "--csv")
    assert out.splitlines()[0].endswith(",known,in_distribution") and ",false,0." in out.splitlines()[1]


def test_what_an_image_is_does_not_hang_on_what_is_asked(shop):
    model, images = pearl.load(shop / "model"), [digit(label)[100] for label in (0, 1, 2)]
    for task in (None, "single"):
        plain, strict = (model.predict(images, task=task, top=2, unknown_rate=rate) for rate in (None, 0.05))
        for one, other in zip(plain, strict, strict=True):
            assert one.classes == other.classes
            assert one.probabilities == pytest.approx(other.probabilities, abs=1e-5)


def test_what_no_answer_needs_is_not_read(shop, two, tmp_path):
    """Weights of tasks after the last space's, and running statistics of older tasks."""
    pearl.learn(two, shop / "again", quiet=True)
    pearl.learn(two, write_photos(tmp_path / "next", {"four": 4, "five": 5}), quiet=True)
    created_at = pearl.load(two).method.class_statistics.created_at
    folders = sorted((two / "tasks").iterdir())
    assert created_at == [0, 2, 3]  # the second task was one class
    expected = pearl.load(two).predict(digit(0)[0], top=6)
    pearl.learn(two, write_photos(tmp_path / "last", {"six": 7, "seven": 8}), fast=True, quiet=True)
    folders = sorted((two / "tasks").iterdir())
    answer = pearl.load(two).predict(digit(0)[0], top=8)
    (folders[-1] / "weights.safetensors").unlink()
    assert [(folder / "running.safetensors").exists() for folder in folders] == [False] * 3 + [True] * 2
    assert pearl.load(two).predict(digit(0)[0], top=8) == answer
    assert {*answer[0].classes} > {*expected[0].classes}
    with pytest.raises(RunError, match="running"):
        pearl.load(two, tasks=3).predict(digit(0)[0])
    with pytest.raises(RunError, match="weights"):
        pearl.learn(two, shop / "single", task="more", quiet=True)
    assert len(verify(two)) == 1


def test_models_with_all_tensors_in_one_file_go_on(shop, two):
    """As they were written at first."""
    for task in sorted((two / "tasks").iterdir()):
        manifest = json.loads((task / "manifest.json").read_text())
        state = {}
        for file in task.glob("*.safetensors"):
            state |= load_file(file)
            file.unlink()
        save_file(state, task / "weights.safetensors")
        data = (task / "weights.safetensors").read_bytes()
        manifest |= {"sha256": {"weights.safetensors": hashlib.sha256(data).hexdigest()}, "bytes": len(data)}
        (task / "manifest.json").write_text(json.dumps(manifest))
    old, new = pearl.load(two), pearl.load(shop / "model")
    assert old.predict(digit(0)[0], top=3) == new.predict(digit(0)[0], top=3)
    grown = [
        pearl.learn(target, shop / "again", quiet=True)
        for target in (two, shutil.copytree(new.path, two.parent / "new"))
    ]
    assert torch.equal(*(model.logits(np.stack([np.stack([digit(3)[0]] * 3, -1)])) for model in grown))


@pytest.mark.parametrize("rate", [-0.1, 1.0, float("nan")])
def test_rates_that_are_none(shop, rate):
    with pytest.raises(ConfigError, match="unknown_rate"):
        pearl.load(shop / "model").predict(digit(0)[0], unknown_rate=rate)


def test_a_model_without_statistics_cannot_say(shop, tmp_path):
    made = pearl.learn(tmp_path / "m", shop / "first", quiet=True, **SETTINGS, method={"classifier": {"name": "heads"}})
    with pytest.raises(ConfigError, match="cannot detect unknown images"):
        made.predict(digit(0)[0], unknown_rate=0.05)
    assert made.predict(digit(0)[0])[0].known is None
