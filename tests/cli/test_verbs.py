"""learn, predict, evaluate, inspect and resume on the command line, as a user meets them."""

import csv
import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

import pearl
import pearl.cli
import zygote
from pearl.errors import printable
from pearl.lifecycle.saved import build_method, load_method, read_config
from photos import files_of, folders, weights_of, write_class, write_photos

pytestmark = pytest.mark.slow

TINY = ["backbone.width=8", "images.size=8", "images.pad=1", "images.flip=false", "train.batch_size=8"]
TASK = "../evil/a\nb"
TINY += ["train.epochs=2", "train.phases.probe.epochs=1", "engine.earlier_states=true"]
# a folder may be called so
NAMES = [
    "'quoted' \"twice\"",
    "a,b;c",
    "tab\there",
    "two\nlines",
    "größe 日本 🐈",
    "-leading",
    "x" * 200,
    "\x1b[31mred",
]


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    """Photos, and a model of two tasks, the second with strange names; tests must not change it."""
    root = tmp_path_factory.mktemp("shop")
    write_photos(root / "first", {"zero": 0, "one": 1})
    write_photos(root / "second", {"two": 2, "three": 3})
    write_photos(root / "odd", {name: i for i, name in enumerate(NAMES)}, 4)
    with folders(root):
        done = call("learn", root / "model", "--data", root / "first", "-q", "--backbone", "resnet18", *TINY)
        assert done.returncode == 0, done.stderr
        shutil.copytree(root / "model", root / "one")
        pearl.learn(root / "model", root / "odd", task=TASK, quiet=True)
    return root


def call(*arguments, **how):
    """`pearl` as another process."""
    return zygote.run(arguments, text=True, **how)


def tree(*roots):
    """Every path there is, with the bytes of files."""
    return {target: target.is_file() and target.read_bytes() for root in roots for target in root.rglob("*")}


# --------------------------------------------------------------------------------------------------- learn


def test_learn_again_in_another_process(shop, one, cli):
    before = files_of(one)
    done = call("learn", one, "--data", shop / "second")
    assert done.returncode == 0
    assert done.stdout.startswith("learnt task second: 2 classes, 4 in all; stored in ")
    assert "task 2/2: 2 classes (three, two), 32 images" in done.stderr
    after = files_of(one)
    assert {name: after[name] for name in before} == before
    other = shutil.copytree(shop / "one", one.with_name("other"))
    cli("learn", other, "--data", shop / "second", "-q")
    assert weights_of(one) == weights_of(other)


def test_learn_with_test_images_evaluates(one, cli, tmp_path):
    write_photos(tmp_path / "more" / "train", {"two": 2, "three": 3}, 4)
    write_photos(tmp_path / "more" / "test", {"two": 2, "three": 3}, 3, start=9)
    out, _ = cli("learn", one, "--data", tmp_path / "more", "-q")
    assert "task more" in out
    assert "class-IL" in out
    write_photos(tmp_path / "last" / "train", {"four": 4}, 4)
    write_photos(tmp_path / "last" / "test", {"fuor": 4}, 3)
    _, err = cli("learn", one, "--data", tmp_path / "last", "-q", code=1)
    assert "pearl: the task is learnt, but not evaluated: " in err
    assert "'fuor' (did you mean 'four'?)" in err
    assert pearl.load(one).classes[-1] == "four"


def test_learn_from_a_model(shop, cli, tmp_path):
    cli("learn", tmp_path / "new", "--data", shop / "second", "--from", shop / "one", "-q")
    assert [task.name for task in pearl.load(tmp_path / "new").tasks] == ["first", "second"]


def test_only_training_changes_from_task_to_task(shop, one, cli):
    cli("learn", one, "--data", shop / "second", "-q", "train.epochs=1", "--task", "short")
    manifest = json.loads((one / "tasks" / "001-short" / "manifest.json").read_text())
    assert manifest["train"]["epochs"] == 1
    assert read_config(one).train.epochs == 2


def test_strange_names_stay_where_they_belong(shop):
    paths = [target.relative_to(shop / "model").as_posix() for target in (shop / "model").glob("tasks/*")]
    assert sorted(paths) == ["tasks/000-first", "tasks/001-evil-a-b"]
    assert {target.name for target in shop.iterdir()} == {"first", "second", "odd", "one", "model"}
    second = pearl.load(shop / "model").tasks[1]
    assert second.name == TASK
    assert set(second.classes) == set(NAMES)


@pytest.mark.parametrize("name", ["..", ".", "/", "a/b", "-x", "é\n\x1b[0m", 'x"y', "n" * 5000, "\udcff"])
def test_task_names(shop, one, cli, name):
    before = tree(shop)
    out, _ = cli("learn", one, "--data", shop / "second", "-q", "train.epochs=1", f"--task={name}")
    assert len(out.splitlines()) == 1
    assert out.rstrip("\n").isprintable()
    assert pearl.load(one).tasks[1].name == name
    (folder,) = (one / "tasks").glob("001*")
    assert folder.parent == one / "tasks"
    assert {target.name for target in one.parent.iterdir()} == {"one"}
    assert tree(shop) == before
    for verb in (
        ["inspect", one],
        ["predict", one, shop / "first" / "one"],
        ["evaluate", one, "--data", shop / "first"],
    ):
        out, _ = cli(*verb)
        assert all(line.isprintable() for line in out.split("\n"))


def test_phases_that_are_kept(cli, tmp_path, monkeypatch):
    """Seen, taken by another run, which says so, and removed."""
    assert cli("cache")[0] == "off (PEARL_CACHE=off): finished phases are neither stored nor reused\n"
    monkeypatch.setenv("PEARL_CACHE", str(tmp_path / "kept"))
    assert cli("cache")[0] == f"{tmp_path / 'kept'}: 0 finished phases, 0.00 of at most 10 GB\n"
    small = ["digits", "--smoke", "backbone.width=4", "stream.classes=4", "stream.tasks=2"]
    cli("run", *small)
    head, *rows = cli("cache")[0].splitlines()
    assert "2 finished phases" in head and "training them took" in head
    assert {row.split()[1] for row in rows} == {"reference", "probe"} and "1 steps" in rows[0]
    _, err = cli("run", *small, "method.rank=energy")
    assert err.count("; loaded from the phase cache, trained in") == 2
    (run,) = (tmp_path / "runs").glob(f"*{err.partition('->')[2].split()[0].rpartition('-')[2]}")
    assert '"reused": [\n    "probe"' in cli("inspect", run, "--json")[0]
    cli("report", run, "-o", tmp_path / "page.html")
    assert "trained by another run" in (tmp_path / "page.html").read_text()
    next((tmp_path / "kept").iterdir()).joinpath("manifest.json").write_text("{")
    assert "damaged" in cli("cache")[0]
    assert "0 finished phases" in cli("cache", "--empty")[0] and [*(tmp_path / "kept").iterdir()] == []
    monkeypatch.setenv("PEARL_CACHE_GB", "much")
    for command in (["run", "digits", "seed=7"], ["run", "digits", "seed=7", "--dry-run"], ["cache"]):
        assert "PEARL_CACHE_GB=much: not a number of gigabytes" in cli(*command, code=2)[1]


# ------------------------------------------------------------------------------------------------- predict


def test_predict_as_a_table(shop, cli):
    out, _ = cli("predict", shop / "model", shop / "odd", "--top", 11)
    lines = out.split("\n")[:-1]
    unknown = sum(line.endswith("unknown; nearest:") for line in lines)
    assert len(lines) == 8 * 4 * 10 + unknown, "a line for each, whatever the names are"
    assert all(line.isprintable() for line in lines)
    assert all(" %  " in line for line in lines if not line.endswith("unknown; nearest:"))
    percent = [line.partition(" %  ")[0].split()[-1] for line in lines if " %  " in line]
    assert all(len(one.partition(".")[2]) == 1 and float(one) < 100 for one in percent)


def test_predict_as_json(shop, cli):
    out, _ = cli("predict", shop / "model", shop / "odd", "--json", "--top", 3)
    rows = [json.loads(line) for line in out.splitlines()]
    assert {Path(row["file"]).parent.name for row in rows} == set(NAMES)
    model = pearl.load(shop / "model")
    for row, said in zip(rows, model.predict([row["file"] for row in rows], top=3), strict=True):
        assert tuple(best["class"] for best in row["predictions"]) == said.classes
        assert tuple(best["task"] for best in row["predictions"]) == said.tasks
        assert [best["probability"] for best in row["predictions"]] == pytest.approx(said.probabilities, abs=1e-5)


def test_predict_as_csv(shop, cli):
    out, _ = cli("predict", shop / "model", shop / "odd", "--csv", "-k", 2)
    rows = list(csv.DictReader(io.StringIO(out, newline="")))
    assert list(rows[0]) == ["file", "rank", "class", "task", "probability", "known", "in_distribution"]
    assert all((row["known"] == "true") == (float(row["in_distribution"]) >= 0.05) for row in rows)
    plain = io.StringIO(cli("predict", shop / "model", shop / "odd", "--csv", "-k", 2, "--no-unknown")[0], newline="")
    assert [{**row, "known": ..., "in_distribution": ...} for row in csv.DictReader(plain)] == [
        {**row, "known": ..., "in_distribution": ...} for row in rows
    ]
    shown = {printable(name) for name in NAMES} - {"-leading"} | {"'-leading"}
    assert {Path(row["file"]).parent.name for row in rows} == {printable(name) for name in NAMES}
    assert {row["class"] for row in rows} <= {*shown, "zero", "one"}
    assert [row["rank"] for row in rows] == ["1", "2"] * 32
    assert all(0 <= float(row["probability"]) <= 1 for row in rows)


def test_predict_among_one_task(shop, cli):
    out, _ = cli("predict", shop / "model", shop / "odd", "--json", "--task", "first", "-k", 9)
    for line in out.splitlines():
        assert {best["class"] for best in json.loads(line)["predictions"]} == {"zero", "one"}
    _, err = cli("predict", shop / "model", shop / "odd", "--task", "frist", code=2)
    assert err.endswith("no task 'frist'; did you mean 'first'?\n")


def test_predict_files_folders_and_a_list(shop, cli, tmp_path):
    deep = write_class(tmp_path / "a" / "b" / "c", 0, 2)
    (deep / "notes.txt").write_text("no image")
    named = shop / "first" / "one" / "000.png"
    listed = tmp_path / " a name\u2028with spaces .png"
    shutil.copy(named, listed)
    out, err = cli("predict", shop / "model", named, tmp_path / "a", "-", "--json", stdin=f"{listed}\n\n{named}\n")
    expected = [named, deep / "000.png", deep / "001.png", listed, named]
    assert [json.loads(line)["file"] for line in out.splitlines()] == [str(file) for file in expected]
    assert "1 .txt" in err and err.count("\n") == 1  # what was left out, counted


def test_predict_the_rest_when_some_cannot_be_read(shop, cli, tmp_path):
    good = write_class(tmp_path / "photos", 0, 3)
    (good / "000a.png").write_bytes(b"not an image")
    (good / "two\nlines.png").write_bytes(b"neither")
    lost = tmp_path / "lost.jpg"
    for form in ("--json", "--csv", "--verbose"):
        out, err = cli("predict", shop / "model", lost, good, form, code=1)
        assert sum(f"00{i}.png" in out for i in range(3)) == 3
        wrong = [line for line in err.splitlines() if line.startswith("pearl: ")]
        assert len(wrong) == 3
        assert all(sum(part in line for line in wrong) == 1 for part in ("lost.jpg", "000a.png", r"two\nlines.png"))
    cli("predict", shop / "model", lost, code=1)


def test_predict_says_where_the_time_went(shop, cli):
    _, err = cli("predict", shop / "model", shop / "first" / "one", "-v")
    assert [part.split()[0] for part in err.split(", ")] == ["import", "load", "compute"]


def test_predict_with_a_run(cli, shop):
    cli("run", "digits", "backbone.width=4", "train.epochs=1", "engine.max_steps=1", "stream.per_class=4", "-q")
    (run,) = Path(os.environ["PEARL_RUNS"]).iterdir()
    out, _ = cli("predict", run, shop / "first", "--json")
    assert {json.loads(line)["predictions"][0]["class"] for line in out.splitlines()} <= set("0123456789")
    assert "all checksums hold" in cli("inspect", run)[0]
    _, err = cli("learn", run, "--data", shop / "first", code=2)
    assert "pearl learn NEW --from" in err


def test_names_that_are_no_text(shop, tmp_path):
    """A file name of bytes that are not UTF-8, in the arguments, in a folder and on standard input."""
    folder = write_class(tmp_path / "photos", 0, 1)
    odd = os.fsencode(folder) + b"/\xff\xfe.png"
    os.rename(folder / "000.png", odd)  # noqa: PTH104
    model = str(shop / "model")
    for form in ("--json", "--csv"):
        done = zygote.run(["predict", model, odd, folder, "-", form], input=odd + b"\n")
        assert done.returncode == 0, done.stderr
        assert done.stdout.decode().count("udcff") == 3


def test_a_terminal_that_knows_no_unicode(shop):
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = call("predict", shop / "model", shop / "odd", env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert r"gr\xf6\xdfe" in done.stdout


@pytest.mark.parametrize("form", ["--json", "--csv"])
def test_a_reader_that_leaves(shop, tmp_path, form):
    """`pearl predict ... | head -1`, of which head ends at once."""
    write_class(tmp_path / "photos", 0, 2)
    read, write = os.pipe()
    os.close(read)
    done = zygote.run(["predict", shop / "model", tmp_path / "photos", form], stdout=write, text=True)
    os.close(write)
    assert done.stderr == ""


# --------------------------------------------------------------------------------------- evaluate and inspect


def test_evaluate(shop, cli):
    text, _ = cli("evaluate", shop / "model", "--data", shop / "odd")
    assert "task first" in text
    assert all(line.isprintable() for line in text.split("\n"))
    counts = json.loads(cli("evaluate", shop / "model", "--data", shop / "odd", "--json")[0])
    assert [task["name"] for task in counts["tasks"]] == ["first", TASK]
    assert counts["total"] == [0, 0] + [4] * 8
    assert [sum(row) for row in counts["confusion"]] == counts["total"]
    rows = [json.loads(line) for line in cli("predict", shop / "model", shop / "odd", "--json")[0].splitlines()]
    right = sum(Path(row["file"]).parent.name == row["predictions"][0]["class"] for row in rows)
    assert sum(counts["class_il"]) == right
    (line,) = [line for line in text.split("\n") if line.startswith("all ")]
    assert f" 32  {100 * right / 32:7.2f}%" in line


def test_inspect(shop, cli):
    path = shop / "model"
    text, _ = cli("inspect", path)
    facts = json.loads(cli("inspect", path, "--json")[0])
    assert "all checksums hold" in text
    assert facts["damaged"] == []
    assert facts["reference_bytes"] == (path / "reference" / "weights.safetensors").stat().st_size
    before = sum(p.numel() for p in build_method(read_config(path)).parameters())
    for t, (task, folder) in enumerate(zip(facts["tasks"], sorted((path / "tasks").iterdir()), strict=True)):
        method = load_method(path, read_config(path), t + 1)
        size = sum(parameter.numel() for parameter in method.parameters())
        stored = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        assert (task["parameters"], task["bytes"]) == (size, stored)
        assert f"{size - before:+,} parameters, {stored:,} bytes" in text
        before = size
        for layer in task["layers"]:
            assert layer["rank"] == method.tensors[f"{t}.A.{layer['layer']}"].shape[0]
    assert len(facts["tasks"][1]["layers"]) == 20
    assert facts["tasks"][1]["classes"] == list(pearl.load(path).tasks[1].classes)
    class_statistics = pearl.load(path).method.class_statistics
    assert (
        [task["spaces"] for task in facts["tasks"]]
        == [[0], [0, 1]]
        == [class_statistics.created_at[:1], class_statistics.created_at]
    )
    assert facts["tasks"][1]["temperature"] == class_statistics.temperature
    assert f"statistics in the sub-networks of tasks 1, 2, at temperature {class_statistics.temperature:.3f}\n" in text


def flip(file):
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)


def rename(file):
    file.write_text(file.read_text().replace('"zero"', '"zerp"'))


DAMAGE = {
    "weights flipped": ("tasks/000-first/weights.safetensors", flip),
    "weights cut": ("tasks/001-evil-a-b/weights.safetensors", lambda file: file.write_bytes(file.read_bytes()[:99])),
    "weights lost": ("tasks/001-evil-a-b/weights.safetensors", Path.unlink),
    "manifest cut": ("tasks/001-evil-a-b/manifest.json", lambda file: file.write_bytes(file.read_bytes()[:99])),
    "manifest empty": ("tasks/000-first/manifest.json", lambda file: file.write_text('{"format": 1}')),
    "manifest flipped": ("tasks/000-first/manifest.json", rename),
    "manifest lost": ("tasks/000-first/manifest.json", Path.unlink),
    "last manifest lost": ("tasks/001-evil-a-b/manifest.json", Path.unlink),
    "reference flipped": ("reference/weights.safetensors", flip),
    "reference lost": ("reference/weights.safetensors", Path.unlink),
    "reference's manifest lost": ("reference/manifest.json", Path.unlink),
    "names lost": ("classes.json", Path.unlink),
    "names cut": ("classes.json", lambda file: file.write_text("{")),
    "names flipped": ("classes.json", rename),
    "settings lost": ("config.yaml", Path.unlink),
    "settings cut": ("config.yaml", lambda file: file.write_bytes(file.read_bytes()[:50])),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_inspect_names_damage(two, cli, damage):
    name, break_it = DAMAGE[damage]
    break_it(two / name)
    out, err = cli("inspect", two, code=1)
    told = out + err
    assert "all checksums hold" not in told
    if damage == "last manifest lost":
        assert "manifest.json: missing, though classes.json lists the task" in told
    elif damage == "names flipped":
        assert "classes.json in name or classes" in told
    else:
        assert name in told
    if not err:
        assert json.loads(cli("inspect", two, "--json", code=1)[0])["damaged"]


def test_earlier_tasks_stay_usable(shop, two, cli):
    flip(two / "tasks" / "001-evil-a-b" / "weights.safetensors")
    _, err = cli("predict", two, shop / "first", code=2)
    assert "checksum differs" in err
    assert cli("predict", two, shop / "first", "--tasks", 1) == cli("predict", shop / "one", shop / "first")
    assert cli("evaluate", two, "--data", shop / "first", "--tasks", 1)[0]


# ------------------------------------------------------------------------------------------------- resume


def test_a_killed_task_is_resumed_by_another_process(shop, one):
    whole = shutil.copytree(one, one.with_name("whole"))
    pearl.load(whole).learn(shop / "second")
    stop = (
        "import os, signal, sys, pearl.cli\n"
        "from pearl.reports.progress import Lines\n"
        "def step(self, done, total): self.phase == 'adapt' and done == 5 and os.kill(os.getpid(), signal.SIGTERM)\n"
        "Lines.step = step\n"
        "pearl.cli.main()"
    )
    done = zygote.run(["learn", one, "--data", shop / "second"], program=["-c", stop], text=True)
    assert done.returncode == 130
    assert done.stderr.endswith(f"resume with: pearl resume {one}\n")
    done = call("resume", one, "-q")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"learnt; stored in {one}\n", "")
    assert weights_of(one) == weights_of(whole)


# ------------------------------------------------------------------------------------- ten mistakes for each

LONG = "x" * 5000
WRONG = {
    "learn": [
        ("M --data nowhere", "nowhere is not a folder"),
        ("M --data empty", "empty has no class folders"),
        ("M --data hollow", "no image in hollow/cat"),
        ("M --data second --task first", "task 'first' exists (M/tasks/000-first); give another one"),
        ("M --data second --task=", "a task needs a name"),
        ("M --data second --backbone bsc", "--backbone: fixed since M was created"),
        ("M --data second images.size=9", "images: fixed since M was created"),
        ("M --data second --backbone resnet18 backbone.width=9", "backbone: fixed since M was created"),
        ("M --data second train.lrr=1", "train.lrr: unknown key; did you mean 'lr'?"),
        ("M --data second train.epochs=0", "train.epochs: input should be greater than or equal to 1"),
        ("M --data second epochs", "'epochs' is not of the form key=value"),
        ("M --data second --device warp", "device 'warp' cannot be used here"),
        ("M --data second --from one", "M: exists; leave out --from"),
        ("M --data one", "one is a model or run: give a folder that holds a folder of images per class"),
        ("new --data second --from nowhere", "nowhere: neither a model nor a run"),
        ("new --data first --from one", "task 'first' exists"),
        ("new --data second --backbone resnet19", "unknown backbone 'resnet19'; did you mean 'resnet18'?"),
        ("new --data second --backbone resnet18 trian.epochs=2", "trian: unknown key; did you mean 'train'?"),
        ("new --data second --backbone resnet18 method=joint", "method=joint needs the data of all tasks"),
        ("new --data second --backbone resnet18 backbone.weights=w.pth", "weights not found: tried w.pth and"),
        ("new --data second --recipe photoz", "unknown recipe 'photoz'"),
        ("first --data second --backbone resnet18", "first: a folder with other contents, not a model"),
        ("site --data second --backbone resnet18", "site/config.yaml: cannot be read"),
        ("note.txt --data second --backbone resnet18", "note.txt: is a file; choose another name"),
        ("new --data broken --backbone resnet18", "broken/cat/cat.png: not an image"),
        (f"{LONG} --data second --backbone resnet18", "File name too long"),
        (f"new --data {LONG} --backbone resnet18", "File name too long"),
        ("new", "missing option '--data'"),
        ("--data second", "missing argument 'MODEL'"),
    ],
    "predict": [
        ("nowhere first", "nowhere: neither a model nor a run"),
        ("first first", "first: neither a model nor a run"),
        ("M empty", "empty: no image in this folder"),
        ("M -", "no image was given"),
        ("M first --task scond", "M: no task 'scond'"),
        ("M first --tasks 3", "M: it has 2 finished tasks, not 3; give 1 to 2"),
        ("M first --tasks 0", "invalid value for '--tasks'"),
        ("M first --top 0", "invalid value for '--top'"),
        ("M first --json --csv", "--json and --csv cannot be combined"),
        ("M first --device warp", "device 'warp' cannot be used here"),
        ("M first --device meta", "device 'meta' cannot be used here"),
        ("M", "missing argument 'PATH...'"),
        ("M first --jsno", "no such option: --jsno"),
        ("unfinished first", "unfinished: no task is finished; resume it with"),
        ("site first", "site/config.yaml: cannot be read"),
    ],
    "evaluate": [
        ("nowhere --data first", "nowhere: neither a model nor a run"),
        ("M --data nowhere", "nowhere is not a folder"),
        ("M --data empty", "empty has no class folders"),
        ("M --data hollow", "no image in hollow/cat"),
        ("M --data M", "M is a model or run: give a folder that holds"),
        ("M --data first --alias zreo=one", "no folder 'zreo' that could be an alias; did you mean 'zero'?"),
        ("M --data second", "unknown classes: 'three'"),
        ("M --data broken", "unknown classes: 'cat'"),
        ("M --data mixed", "1 of 32 images cannot be read"),
        ("M --data first --tasks 9", "M: it has 2 finished tasks, not 9"),
        ("M --data first --device warp", "device 'warp' cannot be used here"),
        ("M", "missing option '--data'"),
        (f"M --data {LONG}", "File name too long"),
        ("site --data first", "site/config.yaml: cannot be read"),
    ],
    "refit": [
        ("M", "M: a model, which stores no images; give images of its classes with --data"),
        ("M --data first --to new", "M: already has class statistics"),
        ("M --to new", "--to: only for models; give the model's images with --data"),
    ],
    "undo": [
        ("nowhere", "nowhere: neither a model nor a run"),
        ("site", "site/config.yaml: cannot be read"),
        ("halfway", "halfway: a task was interrupted; complete it with: pearl resume halfway"),
        ("", "missing argument 'MODEL'"),
    ],
    "rename": [
        ("nowhere one eins", "nowhere: neither a model nor a run"),
        ("M one", "missing argument 'NEW'"),
        ("M oen eins", "M: no class 'oen'; did you mean 'one'?"),
    ],
    "forget": [
        ("M", "forget: give one class with --class, or one task with --task"),
        ("M --class one --task first", "forget: give one class with --class, or one task with --task"),
        ("M --class oen", "M: no class 'oen'; did you mean 'one'?"),
        ("M --task first", "M: with class statistics a task can be removed only if the features of all"),
    ],
    "inspect": [
        ("nowhere", "nowhere: neither a model nor a run"),
        ("first", "first: neither a model nor a run"),
        ("note.txt", "note.txt: neither a model nor a run"),
        ("M/tasks", "M/tasks: neither a model nor a run"),
        ("M/config.yaml", "M/config.yaml: neither a model nor a run"),
        ("site", "site/config.yaml: cannot be read"),
        (LONG, "File name too long"),
        ("", "missing argument 'MODEL'"),
        ("M one", "unexpected extra argument"),
        ("M --josn", "no such option: --josn"),
    ],
    "resume": [
        ("nowhere", "nowhere: neither a model nor a run"),
        ("first", "first: neither a model nor a run"),
        ("note.txt", "note.txt: neither a model nor a run"),
        ("M", "M: no interrupted task; add one with: pearl learn M --data FOLDER"),
        ("site", "site/config.yaml: cannot be read"),
        ("halfway", "halfway/resume/task.json: damaged"),
        ("cut", "cut/resume/task.json: damaged"),
        ("moved", "gone is not a folder"),
        (LONG, "File name too long"),
        ("", "missing argument 'RUN'"),
        ("M one", "unexpected extra argument"),
        ("M --store-every soon", "invalid value for '--store-every'"),
    ],
    "list": [
        ("", "missing argument 'KIND'"),
        ("method", "'method' is not one of"),
        ("recipe", "'recipe' is not one of"),
        ("Methods!", "'Methods!' is not one of"),
        ("../runs", "'../runs' is not one of"),
        ("runs methods", "unexpected extra argument"),
        ("--all", "no such option: --all"),
        ("runs --json", "no such option: --json"),
        ("models", "'models' is not one of"),
        (LONG, "is not one of"),
    ],
    "show": [
        ("", "missing argument 'NAME'"),
        ("perl", "unknown name 'perl'; did you mean 'pearl'?"),
        ("M", "M: a model made by `pearl learn`, not a run; see it with: pearl inspect M"),
        ("first", "unknown name 'first'"),
        ("nowhere.yaml", "recipe file nowhere.yaml not found"),
        ("note.yaml", "recipe note: must be a mapping"),
        ("site", "site/config.yaml: cannot be read"),
        ("timm/*", "timm/* is a family"),
        ("../../etc/passwd", "unknown name '../../etc/passwd'"),
        ("M one", "unexpected extra argument"),
        ("--pearl", "no such option: --pearl"),
        (LONG, ""),
    ],
}


@pytest.fixture(scope="module")
def target(shop, tmp_path_factory):
    """A folder with all that the mistakes need."""
    root = tmp_path_factory.mktemp("place")
    for name, source in (("M", "model"), ("one", "one"), ("first", "first"), ("second", "second"), ("mixed", "first")):
        shutil.copytree(shop / source, root / name)
    for name in ("empty", "hollow/cat", "broken/cat", "site"):
        (root / name).mkdir(parents=True)
    for file in ("broken/cat/cat.png", "mixed/zero/000.png", "site/config.yaml", "note.txt", "note.yaml"):
        (root / file).write_text("- none of ours")
    for name in ("unfinished", "halfway", "cut", "moved"):
        shutil.copytree(shop / "one", root / name)
    shutil.rmtree(root / "unfinished" / "tasks")
    (root / "unfinished" / "classes.json").unlink()
    raw = read_config(shop / "one").model_dump(mode="json")
    tasks = {"halfway": {"format": 1}, "moved": {"format": 1, "data": "gone", "name": "x", "config": raw}}
    for name in ("halfway", "cut", "moved"):
        (root / name / "resume").mkdir()
        (root / name / "resume" / "task.json").write_text(json.dumps(tasks.get(name, {}))[:-1] + "}" * (name != "cut"))
    return root


@pytest.mark.parametrize(
    ("verb", "arguments", "message"),
    [
        pytest.param(verb, arguments, message, id=f"{verb} {arguments[:60]}")
        for verb, lines in WRONG.items()
        for arguments, message in lines
    ],
)
def test_wrong_input(target, cli, monkeypatch, verb, arguments, message):
    monkeypatch.chdir(target)
    before = tree(target)
    out, err = cli(verb, *arguments.split(" "), code=2) if arguments else cli(verb, code=2)
    assert out == ""
    assert message in re.sub(r"no such option '(--\w+)'", r"no such option: \1", err)  # as older versions say it
    assert "Traceback" not in err
    assert tree(target) == before
    assert not Path(os.environ["PEARL_RUNS"]).exists()
    lines = err.splitlines()
    if "cannot be read: remove" in err:
        assert len(lines) == 2, "how many there are, and each of them"
    else:
        (line,) = lines
        assert line.startswith("pearl: ")


def test_images_that_cannot_be_read_are_all_listed_before_learning(shop, one, cli, tmp_path):
    data = Path(shutil.copytree(shop / "second", tmp_path / "data"))
    for name in ("two/000.png", "three/005.png"):
        (data / name).write_bytes(b"not an image")
    before = tree(one)
    _, err = cli("learn", one, "--data", data, "-q", code=2)
    assert err.splitlines()[0] == "pearl: 2 of 32 images cannot be read: remove or replace them"
    assert all(name in err for name in ("two/000.png", "three/005.png"))
    assert tree(one) == before


def test_models_among_the_runs(shop, cli, monkeypatch):
    monkeypatch.setenv("PEARL_RUNS", str(shop))
    rows = dict(line.rsplit("/", 1)[1].split("  ", 1) for line in cli("list", "runs")[0].splitlines())
    assert rows["model"].strip() == "2 tasks, see `pearl inspect`"


def test_a_damaged_run_in_the_list(cli, shop, monkeypatch, tmp_path):
    monkeypatch.setenv("PEARL_RUNS", str(tmp_path))
    for number, text in enumerate(("", "[]", '{"format": 1}', '{"format": 1, "stages": [{}]}')):
        path = Path(shutil.copytree(shop / "one", tmp_path / f"run{number}"))
        (path / "results.json").write_text(text)
    assert cli("list", "runs")[0].count("results.json is damaged") == 4


@pytest.mark.parametrize("verb", ["", "learn", "predict", "evaluate", "inspect", "resume"])
def test_help_imports_no_torch(verb):
    code = (
        f"import sys, pearl.cli; sys.argv = {['pearl', *([verb] if verb else []), '--help']}\n"
        "try: pearl.cli.main()\nexcept SystemExit: pass\n"
        "assert not {'torch', 'numpy', 'PIL'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Usage: pearl" in done.stdout


def test_huge_and_odd_photos(shop, cli, tmp_path):
    photos = tmp_path / "photos"
    photos.mkdir()
    for mode in ("1", "L", "LA", "P", "RGBA", "I;16"):
        Image.new(mode, (13, 21), 1).save(photos / f"{mode.replace(';', '')}.png")
    Image.new("CMYK", (21, 13)).save(photos / "cmyk.jpg")
    Image.new("RGB", (3, 2)).save(photos / "SMALL.GIF")
    out, _ = cli("predict", shop / "model", photos, "--json")
    assert len(out.splitlines()) == 8
