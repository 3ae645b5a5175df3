"""A model in Python: learns task by task, survives failures and interruptions, and says what is in an image."""

import json
import re
import shutil
import struct
import tracemalloc
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import pearl
from pearl.data.augment import View
from pearl.errors import ConfigError, DataError, Interrupted, PearlError, RunError, TrainingError
from pearl.export import export_directory
from pearl.lifecycle.learning import resume
from pearl.lifecycle.model import StoredModel
from pearl.lifecycle.runs import execute, prepare
from pearl.lifecycle.saved import load_method
from pearl.nn.weights import read_weights
from pearl.reports.records import read
from pearl.reports.text import evaluation_page
from pearl.settings.config import load_config
from photos import SETTINGS as PHOTOS
from photos import StopAt, digit, files_of, folders, learn, weights_of, write_class, write_photos

pytestmark = pytest.mark.slow

SETTINGS = {**PHOTOS, "engine": {"earlier_states": True}}
DIVERGES = {"train": {"phases": {"adapt": {"lr": 1e30, "optimizer": "sgd"}}}}


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    """Photos, and a model of two tasks; tests must not change it."""
    root = tmp_path_factory.mktemp("shop")
    write_photos(root / "first", {"zero": 0, "one": 1})
    write_photos(root / "second", {"two": 2, "three": 3})
    write_photos(root / "third", {"four": 4, "five": 5})
    with folders(root):
        pearl.learn(root / "model", root / "first", quiet=True, **SETTINGS)
        shutil.copytree(root / "model", root / "one")
        pearl.learn(root / "model", root / "second", quiet=True)
    return root


@pytest.fixture(scope="module")
def model(shop):
    return pearl.load(shop / "model", device="cpu")


# ------------------------------------------------------------------------------------------------ learning


def test_tasks_and_classes(model):
    assert [task.name for task in model.tasks] == ["first", "second"]
    assert model.classes == ("one", "zero", "three", "two")
    assert [task.first_class for task in model.tasks] == [0, 2]
    assert not (model.path / "resume").exists()


def test_earlier_files_are_never_written_again(shop, one):
    before = files_of(one)
    pearl.load(one).learn(shop / "second").learn(shop / "third", train={"epochs": 2})
    after = files_of(one)
    assert {name: after[name] for name in before} == before
    assert {name.split("/")[1] for name in after if name.startswith("tasks")} == {
        "000-first",
        "001-second",
        "002-third",
    }
    assert weights_of(one).items() >= weights_of(shop / "model").items()


def test_a_task_does_not_change_what_was_said_before(shop, tmp_path):
    """By its heads; and by class statistics, opened as it was."""
    pixels = digit(0)[:20, :, :, None].repeat(3, axis=3)
    before = pearl.load(shop / "one").logits(pixels)
    assert torch.equal(pearl.load(shop / "model", tasks=1).logits(pixels), before)
    method = {"classifier": {"name": "heads"}}
    made = pearl.learn(tmp_path / "heads", shop / "first", quiet=True, **SETTINGS, method=method)
    before = made.logits(pixels)
    assert torch.equal(made.learn(shop / "second").logits(pixels)[:, :2], before)


def test_it_learns(shop, tmp_path):
    more = {**SETTINGS, "train": {"epochs": 20, "batch_size": 8}}
    grown = pearl.learn(tmp_path / "m", shop / "first", quiet=True, **more)
    test = write_photos(tmp_path / "test", {"zero": 0, "one": 1}, 40, start=100)
    assert grown.evaluate(test).class_il.sum() > 60


def test_from_a_run_or_a_model(shop, tmp_path):
    with pytest.raises(RunError, match="exists; leave out --from"):
        learn(shop / "model", shop / "third", start=shop / "one")
    before = files_of(shop / "one")
    grown = pearl.learn(tmp_path / "new", shop / "second", start=shop / "one", quiet=True)
    assert files_of(shop / "one") == before
    assert weights_of(grown.path) == weights_of(shop / "model")

    run = execute(load_config("digits", ["backbone.width=4", "stream.per_class=4", "engine.max_steps=1"]), stop_after=1)
    write_photos(tmp_path / "other", {"nine": 9, "eight": 8})
    with pytest.raises(RunError, match=r"a run of `pearl run`.* --from"):
        learn(run.path, tmp_path / "other")
    grown = pearl.learn(tmp_path / "on", tmp_path / "other", start=run.path, quiet=True, train={"epochs": 1})
    assert grown.classes == ("0", "1", "eight", "nine")


def test_from_leaves_nothing_behind_when_it_fails(shop, tmp_path):
    wrong = [("third", {"task": "first"}), ("third", {"device": "warp"}), ("nowhere", {})]
    for data, mistake in wrong:
        with pytest.raises(PearlError):
            learn(tmp_path / "new", shop / data, start=shop / "one", **mistake)
        assert not [*tmp_path.iterdir()]
    damaged = Path(shutil.copytree(shop / "one", tmp_path / "damaged"))
    flip(damaged / "reference" / "weights.safetensors")
    with pytest.raises(RunError, match=r"reference/weights\.safetensors: checksum differs"):
        learn(tmp_path / "new", shop / "third", start=damaged)
    assert not (tmp_path / "new").exists()


def test_from_can_be_repeated_after_an_interruption(shop, tmp_path):
    with pytest.raises(Interrupted, match="pearl resume"):
        learn(tmp_path / "new", shop / "second", start=shop / "one", show=StopAt("adapt", 3))
    learn(tmp_path / "new", shop / "second", start=shop / "one")
    assert weights_of(tmp_path / "new") == weights_of(shop / "model")


def test_reference_from_a_weight_file(shop, tmp_path, monkeypatch):
    from safetensors.torch import load_file, save_file

    state = {**load_file(shop / "one/reference/weights.safetensors")}
    state |= load_file(shop / "one/tasks/000-first/weights.safetensors")
    names = {name.removeprefix("backbone."): value for name, value in state.items() if name.startswith("backbone.")}
    save_file(names, tmp_path / "net.safetensors")
    monkeypatch.chdir(tmp_path)
    settings = {**SETTINGS, "backbone": {"name": "resnet18", "width": 8, "weights": "net.safetensors"}}
    whole = pearl.learn("whole", shop / "second", quiet=True, **settings)
    assert "probe" in (tmp_path / "whole/tasks/000-second/manifest.json").read_text(), "the first task is adapted too"
    assert torch.equal(whole.method.backbone.conv1.weight, names["conv1.weight"])

    with pytest.raises(Interrupted):
        learn("broken", shop / "second", overrides=settings, show=StopAt("probe", 3))
    (tmp_path / "net.safetensors").unlink()
    monkeypatch.chdir(shop)
    resume(tmp_path / "broken")
    assert weights_of(tmp_path / "broken") == weights_of(tmp_path / "whole")


@pytest.mark.parametrize(("phase", "step"), [("probe", 2), ("adapt", 5)])
def test_an_interrupted_task_goes_on_with_the_same_bits(shop, one, phase, step):
    before, said = files_of(one), pearl.load(one).predict(list(digit(1)[:20]))
    with pytest.raises(Interrupted, match=r"its state is stored, and the .* until then; resume with: pearl resume"):
        learn(one, shop / "second", show=StopAt(phase, step))
    assert files_of(one) == before
    assert pearl.load(one, tasks=1).predict(list(digit(1)[:20])) == said
    assert pearl.load(one).classes == pearl.load(shop / "model").classes, "the first answer, see test_first_answer"
    resume(one)
    assert weights_of(one) == weights_of(shop / "model")
    assert not (one / "resume").exists()
    with pytest.raises(RunError, match="no interrupted task"):
        resume(one)


def test_an_interrupted_first_task_goes_on(shop, tmp_path):
    path = tmp_path / "a model; of 'mine'"
    with pytest.raises(Interrupted) as caught:
        learn(path, shop / "first", overrides=SETTINGS, show=StopAt("reference", 3))
    assert str(caught.value).endswith(f"""pearl resume '{tmp_path}/a model; of '"'"'mine'"'"''""")
    with pytest.raises(RunError, match="no task is finished; resume it with"):
        pearl.load(path)
    resume(path)
    assert weights_of(path) == weights_of(shop / "one")


def test_other_images_are_not_resumed(shop, one, tmp_path):
    data = Path(shutil.copytree(shop / "second", tmp_path / "second"))
    with pytest.raises(Interrupted):
        learn(one, data, show=StopAt("adapt", 5))
    (data / "two" / "000.png").rename(data / "three" / "zzz.png")  # the pixels in order are the same, the labels not
    with pytest.raises(RunError, match="the images of the interrupted task 'second' have changed"):
        resume(one)
    (data / "three" / "zzz.png").rename(data / "two" / "000.png")
    resume(one)
    assert weights_of(one) == weights_of(shop / "model")


def test_a_failed_task_leaves_the_model_as_it_was(shop, one):
    before, said = files_of(one), pearl.load(one).predict(list(digit(1)[:20]))
    with pytest.raises(
        TrainingError,
        match=r"lower train\.phases\.adapt\.lr.*; to start the task again with other settings, use --discard$",
    ):
        pearl.load(one).learn(shop / "second", **DIVERGES)
    assert files_of(one) == before
    assert pearl.load(one).predict(list(digit(1)[:20])) == said
    with pytest.raises(RunError, match="task 'second' was interrupted"):  # its first phases are stored
        pearl.load(one).learn(shop / "second")
    pearl.load(one).learn(shop / "second", discard=True)
    assert weights_of(one) == weights_of(shop / "model")


def test_one_image_a_class_and_one_class_a_task(shop, one, tmp_path):
    write_class(tmp_path / "lonely" / "six", 6, 1)
    assert pearl.load(one).learn(tmp_path / "lonely").classes[-1] == "six"
    write_class(tmp_path / "single" / "seven", 7, 4)
    assert pearl.load(one).learn(tmp_path / "single").classes[-1] == "seven"


def test_a_lost_manifest_is_not_learnt_again(shop, two):
    (two / "tasks" / "000-first" / "manifest.json").unlink()
    before = files_of(two)
    with pytest.raises(RunError, match=r"000-first/manifest\.json: missing, though 001-second is there; restore it"):
        pearl.load(two)
    with pytest.raises(RunError, match=r"000-first/manifest\.json: missing"):
        pearl.load(two, tasks=1)
    with pytest.raises(RunError, match=r"000-first/manifest\.json: missing"):
        learn(two, shop / "third")
    assert files_of(two) == before


# --------------------------------------------------------------------------------------------- predictions


def test_predictions_are_those_of_a_run_on_its_own_data(tmp_path):
    """Same transforms as in training: files through `predict` as the cached images of a run through its view."""
    rng = np.random.default_rng(0)
    for name in ("ant", "bee", "cow"):
        for split in ("train", "test"):
            (tmp_path / "tree" / split / name).mkdir(parents=True)
            for i, size in enumerate([(31, 18), (16, 40), (12, 12)]):
                image = Image.fromarray(rng.integers(0, 256, (*size, 3), dtype=np.uint8))
                image.save(tmp_path / "tree" / split / name / f"{i}.png")
    raw = [f"data.path={tmp_path / 'tree'}", "data.name=folder", "stream.tasks=[2,1]", "backbone.width=4"]
    config = load_config("digits", [*raw, "images.resize=12", "images.augment=resized_crop", "engine.max_steps=2"])
    run = execute(config)
    prepared = prepare(config)
    method, view, model = load_method(run.path, config), View(config.images), pearl.load(run.path)
    for split in prepared.stream.tasks:
        files = [prepared.source.test.images[row] for row in split.test]
        with torch.no_grad():
            scores = method(view.test(torch.from_numpy(prepared.test[split.test])))
        for said, row in zip(model.predict(files, top=3), scores.softmax(1), strict=True):
            best = row.argsort(descending=True).tolist()
            assert said.classes == tuple(model.classes[c] for c in best)
            np.testing.assert_allclose(said.probabilities, row[best], atol=1e-5)


def test_alone_in_a_batch_or_in_another_order(model):
    images = [image for label in range(4) for image in digit(label)[:40]]
    together = model.predict(images, top=4)
    order = np.random.default_rng(0).permutation(len(images))
    for said in ([model.predict(image, top=4)[0] for image in images], [None] * len(images)):
        if said[0] is None:
            for position, prediction in zip(order, model.predict([images[i] for i in order], top=4), strict=True):
                said[position] = prediction
        for a, b in zip(together, said, strict=True):
            assert a.name == b.name
            assert dict(zip(a.classes, a.probabilities, strict=True)) == pytest.approx(
                dict(zip(b.classes, b.probabilities, strict=True)), abs=1e-4
            )


def test_what_a_prediction_says(model):
    (said,) = model.predict(digit(2)[0], top=99)
    assert sorted(said.classes) == sorted(model.classes)
    assert sum(said.probabilities) == pytest.approx(1)
    assert list(said.probabilities) == sorted(said.probabilities, reverse=True)
    assert said.name == said.classes[0]
    where = {name: task.name for task in model.tasks for name in task.classes}
    assert said.tasks == tuple(where[name] for name in said.classes)


def test_task_il(model):
    (said,) = model.predict(digit(2)[0], task="second", top=9)
    assert sorted(said.classes) == ["three", "two"]
    assert sum(said.probabilities) == pytest.approx(1)
    with pytest.raises(ConfigError, match="no task 'secnod'; did you mean 'second'"):
        model.predict(digit(2)[0], task="secnod")
    with pytest.raises(ConfigError, match="top=0: give 1 or more"):
        model.predict(digit(2)[0], top=0)


def test_every_kind_of_picture_gives_the_same(model, tmp_path):
    grey = digit(3)[0]
    plain = Image.fromarray(grey)
    rgb = plain.convert("RGB")
    file = tmp_path / "photo.png"
    rgb.save(file)
    turned = Image.fromarray(np.rot90(np.asarray(rgb), 1))  # anticlockwise; the tag says: show it clockwise
    exif = Image.Exif()
    exif[0x0112] = 6
    turned.save(tmp_path / "turned.png", exif=exif)
    deep = Image.fromarray(grey.astype(np.uint16) * 257)
    pictures = [
        grey,
        np.asarray(rgb),
        np.asarray(rgb)[:, ::-1][:, ::-1],  # not contiguous
        np.dstack([np.asarray(rgb), np.full((8, 8), 255, np.uint8)]),
        plain,
        rgb,
        rgb.convert("RGBA"),
        rgb.quantize(256),
        deep,
        file,
        str(file),
        Image.open(file),
        tmp_path / "turned.png",
        Image.open(tmp_path / "turned.png"),
    ]
    said = [model.predict(picture)[0] for picture in pictures]
    said += model.predict(pictures) + model.predict(picture for picture in pictures)
    said += model.predict(np.stack([np.asarray(rgb)] * 3)) + model.predict(tuple(pictures[:2]))
    assert {prediction.name for prediction in said} == {said[0].name}
    assert [prediction.probabilities[0] for prediction in said] == pytest.approx([said[0].probabilities[0]] * len(said))
    assert len(model.predict(rgb.convert("CMYK"))) == 1
    assert model.predict([]) == model.predict(iter([])) == []


def test_transparency_is_white(model):
    empty = Image.new("RGBA", (9, 9), (0, 0, 0, 0))
    white = model.predict(Image.new("RGB", (9, 9), "white"))
    assert model.predict(empty) == white
    assert model.predict(empty.convert("LA")) == white


def test_a_generator_is_not_read_ahead(model):
    alive = 0

    def endless():
        nonlocal alive
        for _ in range(100):
            alive += 1
            yield digit(1)[0]
        yield "nowhere.png"
        raise RuntimeError("read on after the mistake")

    with pytest.raises(DataError, match=r"nowhere\.png: No such file"):
        model.predict(endless())
    assert alive == 100


@pytest.mark.parametrize(
    "picture",
    [
        np.full((8, 8, 3), 2.0),
        np.zeros((8, 8, 2), np.uint8),
        np.zeros((0, 0, 3), np.uint8),
        np.zeros(8, np.uint8),
        np.zeros((1, 5, 8, 8, 3), np.uint8),
        [None],
        [b"bytes"],
        [3],
        [torch.zeros(8, 8, 3)],
        Image.new("F", (8, 8)),
        "nowhere.png",
        Path(),
        "with\0null.png",
    ],
    ids=lambda picture: type(picture).__name__,
)
def test_what_is_no_picture(model, picture):
    with pytest.raises(DataError) as caught:
        model.predict(picture)
    assert len(str(caught.value).splitlines()) == 1


def test_a_truncated_picture(model, tmp_path):
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "whole.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "whole.png").read_bytes()[:2000])
    with pytest.raises(DataError, match=r"cut\.png"):
        model.predict(tmp_path / "cut.png")
    with Image.open(tmp_path / "cut.png") as opened, pytest.raises(DataError, match="an image cannot be used"):
        model.predict(opened)


def bomb(file, width, height):
    """A PNG of a few bytes whose head claims a size."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"\0" * 1000)) + chunk(b"IEND", b"")
    file.write_bytes(b"\x89PNG\r\n\x1a\n" + body)
    return file


@pytest.mark.parametrize("size", [(50000, 50000), (11000, 11000), (100_000_001, 1)])
def test_a_decompression_bomb_is_refused_without_memory(model, tmp_path, size):
    file = bomb(tmp_path / "bomb.png", *size)
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match=r"bomb\.png"):
            model.predict(file)
        assert tracemalloc.get_traced_memory()[1] < 1e7
    finally:
        tracemalloc.stop()


# ----------------------------------------------------------------------------------------------- evaluation


def test_evaluation_equals_a_count_of_predictions(model, tmp_path):
    data = write_photos(tmp_path / "test", {"zero": 0, "one": 1, "three": 3}, 30, start=50)
    evaluation = model.evaluate(data)
    confusion, task_il, sure = np.zeros((4, 4), int), np.zeros(4, int), []
    where = {name: task.name for task in model.tasks for name in task.classes}
    for file in sorted(data.rglob("*.png")):
        truth, best = file.parent.name, model.predict(file)[0]
        sure.append((best.probabilities[0], best.name == truth))
        confusion[model.classes.index(truth), model.classes.index(model.predict(file)[0].name)] += 1
        task_il[model.classes.index(truth)] += model.predict(file, task=where[truth])[0].name == truth
    assert (evaluation.confusion == confusion).all()
    assert (evaluation.task_il == task_il).all()
    assert evaluation.total.tolist() == [30, 30, 30, 0]
    assert (evaluation.class_il == np.diag(confusion)).all()
    bins = [[(p, right) for p, right in sure if int(min(15 * p, 14)) == b] for b in range(15)]
    gaps = [abs(sum(p for p, _ in of_bin) - sum(right for _, right in of_bin)) for of_bin in bins]
    assert evaluation.calibration_error == pytest.approx(100 * sum(gaps) / len(sure), abs=0.5)
    assert f"calibration error {evaluation.calibration_error:.1f} points" in evaluation_page(evaluation)


def test_evaluation_does_not_list_a_whole_catalogue(model, tmp_path):
    data = write_photos(tmp_path, {f"unknown {i:02d}": 0 for i in range(40)}, 1)
    with pytest.raises(DataError) as error:
        model.evaluate(data)
    assert "'unknown 03', 'unknown 04', 35 more; give images of known classes" in str(error.value)


def test_evaluation_names_what_it_does_not_know(model, tmp_path):
    data = write_photos(tmp_path / "test", {"zero": 0, "tow": 2}, 2)
    assert model.evaluate(data).unknown_classes == ("tow",)
    (data / "tow").rename(data / "two")
    assert pearl.load(model.path, tasks=1).evaluate(data).unknown_classes == ("two",)
    broken = [data / "zero" / "000.png", data / "two" / "001.png"]
    for file in broken:
        file.write_bytes(b"not an image")
    with pytest.raises(DataError, match="2 of 4 images cannot be read") as caught:
        model.evaluate(data)
    assert all(str(file) in str(caught.value) for file in broken)


# ------------------------------------------------------------------------------------------------- damage


def flip(file, at=-5):
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


DAMAGE = {
    "flipped": lambda task: flip(task / "weights.safetensors"),
    "truncated": lambda task: (task / "weights.safetensors").write_bytes(b"short"),
    "no weights": lambda task: (task / "weights.safetensors").unlink(),
    "manifest cut": lambda task: (task / "manifest.json").write_text('{"format": 1, "na'),
    "manifest empty": lambda task: (task / "manifest.json").write_text('{"format": 1}'),
    "manifest newer": lambda task: (task / "manifest.json").write_text('{"format": 9}'),
    "no manifest": lambda task: (task / "manifest.json").unlink(),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_earlier_tasks_stay_usable(shop, two, damage):
    DAMAGE[damage](two / "tasks" / "001-second")
    pixels = digit(0)[:5, :, :, None].repeat(3, axis=3)
    assert torch.equal(pearl.load(two, tasks=1).logits(pixels), pearl.load(shop / "one").logits(pixels))
    if damage != "no manifest":  # then it is a task that was never finished
        with pytest.raises(RunError, match="001-second"):
            pearl.load(two).predict(digit(0)[0])


def swap(tasks):
    first, second = tasks / "000-first", tasks / "001-second"
    first.rename(tasks / "x")
    second.rename(first)
    (tasks / "x").rename(second)


def say(folder, **facts):
    file = folder / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | facts))


def without_names(tasks):
    (tasks.parent / "classes.json").unlink()
    say(tasks / "000-first", classes=["one"])
    say(tasks / "001-second", classes=["zero", "three", "two"])  # as many in all


DISORDER = {
    "swapped": (swap, "000-first/manifest.json: has the number 1, not 000"),
    "renamed": (lambda tasks: (tasks / "000-first").rename(tasks / "002-first"), "000/manifest.json: missing"),
    "one copied": (
        lambda tasks: shutil.copytree(tasks / "001-second", tasks / "002-third"),
        "002-third/manifest.json: has the number 1, not 002",
    ),
    "one number twice": (
        lambda tasks: shutil.copytree(tasks / "001-second", tasks / "001-another"),
        "tasks: 001-another and 001-second are both task 001",
    ),
    "other names": (
        lambda tasks: say(tasks / "001-second", classes=["two", "three"]),
        "001-second/manifest.json: differs from classes.json in name or classes",
    ),
    "other number of classes": (without_names, "000-first/manifest.json: lists 1 class, the task's tensors have 2"),
}


@pytest.mark.parametrize("disorder", DISORDER)
def test_disorder_is_refused_and_never_answered_with_wrong_names(shop, two, disorder, tmp_path):
    harm, message = DISORDER[disorder]
    harm(two / "tasks")
    before = files_of(two)
    doors = [
        lambda: pearl.load(two),
        lambda: learn(two, shop / "third"),
        lambda: learn(tmp_path / "new", shop / "third", start=two),
        lambda: export_directory(str(two), to="torch", out=tmp_path / "out"),
    ]
    if not disorder.startswith("other"):  # of what names are, neither a network nor a report knows better
        doors += [lambda: read_weights(two), lambda: read(two)]
    for door in doors:
        with pytest.raises(RunError, match=re.escape(message)):
            door()
    assert files_of(two) == before
    assert not (tmp_path / "new").exists() and not (tmp_path / "out").exists()


def test_a_method_of_other_classes_than_the_manifests_name_does_not_answer(two):
    model = pearl.load(two)
    model.tasks = [replace(task, classes=("all of them",)) for task in model.tasks]
    for task in (None, "first"):
        with pytest.raises(RunError, match=r"list \d class(es)?, its weights give"):
            model.predict(digit(0)[0], task=task)


def test_what_cannot_be_opened(shop, tmp_path):
    with pytest.raises(RunError, match="neither a model nor a run"):
        StoredModel.open(tmp_path)
    for tasks in (0, -1, 3):
        with pytest.raises(RunError, match="give 1 to 2"):
            StoredModel.open(shop / "model", tasks=tasks)
    for device in ("warp", "meta", "cuda:99"):
        with pytest.raises(ConfigError, match="cannot be used here"):
            StoredModel.open(shop / "model", device=device)
