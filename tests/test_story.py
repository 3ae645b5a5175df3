"""What a practitioner does, month by month, through the command line alone; every step is a process of its own."""

import csv
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

import zygote

pytestmark = [pytest.mark.slow, pytest.mark.long]

SMALL = ["backbone.width=8", "images.size=8", "images.pad=1", "images.flip=false", "train.lr=0.003", "train.epochs=12"]
SMALL += ["train.phases.probe.epochs=5"]


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Three folders of digits, two classes each: 60 images to learn from and 20 to test with, per class."""
    root, digits = tmp_path_factory.mktemp("photos"), load_digits()
    for task in range(3):
        for digit in (2 * task, 2 * task + 1):
            rows = np.flatnonzero(digits.target == digit)
            for split, some in (("train", rows[:60]), ("test", rows[60:80])):
                folder = root / f"month{task + 1}" / split / f"digit {digit}"
                folder.mkdir(parents=True)
                for row in some:
                    Image.fromarray((digits.images[row] * 15.9).astype(np.uint8)).save(folder / f"{row}.png")
    return root


def pearl(*arguments, code=0, where):
    """One command; what it printed."""
    done = zygote.run(arguments, cwd=where, text=True)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


def environment():
    return os.environ | {"OMP_NUM_THREADS": "1"}


def rows(text):
    return list(csv.DictReader(io.StringIO(text)))


def accuracy(actual):
    return np.mean([Path(row["file"]).parent.name == row["class"] for row in actual])


def test_three_months(photos, tmp_path):
    # the first task makes the model
    said = pearl("learn", "shop", "--data", photos / "month1", "--backbone", "resnet18", *SMALL, "-q", where=tmp_path)
    assert "learnt task month1: 2 classes, 2 in all; stored in shop" in said
    first = rows(pearl("predict", "shop", photos / "month1" / "test", "--csv", where=tmp_path))
    assert len(first) == 40 and accuracy(first) > 0.9

    # the second is killed midway; its first answer is used, the model before it is as it was, and training goes on
    again = ["learn", "shop", "--data", photos / "month2", "--store-every", "0.001"]
    pipe = subprocess.PIPE
    with zygote.Process(again, cwd=tmp_path, stderr=pipe, stdout=pipe, text=True) as run:
        assert run.stderr is not None
        for line in run.stderr:
            if "adapt: " in line:
                break
        run.send_signal(signal.SIGKILL)
    one = ("--tasks", "1", "--csv")
    assert rows(pearl("predict", "shop", photos / "month1" / "test", *one, where=tmp_path)) == first
    assert accuracy(rows(pearl("predict", "shop", photos / "month2" / "test", "--csv", where=tmp_path))) > 0.6
    pearl(*again, "-q", where=tmp_path)
    files = [file for file in (tmp_path / "shop").rglob("*.safetensors") if file.name != "running.safetensors"]
    kept = {file: (file.read_bytes(), file.stat().st_mtime_ns) for file in files}  # the newest covariance alone stays

    # the third, a month later
    pearl("learn", "shop", "--data", photos / "month3", "--task", "autumn", "-q", where=tmp_path)
    assert all((file.read_bytes(), file.stat().st_mtime_ns) == old for file, old in kept.items())

    # names, by class-IL and by task-IL
    tests = [photos / f"month{month}" / "test" for month in (1, 2, 3)]
    everything = rows(pearl("predict", "shop", *tests, "--csv", where=tmp_path))
    assert len(everything) == 120 and accuracy(everything) > 0.8
    own = rows(pearl("predict", "shop", tests[2], "--task", "autumn", "--csv", where=tmp_path))
    assert accuracy(own) > 0.9
    one = json.loads(pearl("predict", "shop", everything[5]["file"], "--json", where=tmp_path))
    assert one["predictions"][0]["class"] == everything[5]["class"]
    assert one["predictions"][0]["probability"] == pytest.approx(float(everything[5]["probability"]), abs=1e-5)

    # the same counts from evaluate
    counts = json.loads(pearl("evaluate", "shop", "--data", photos / "month3", "--json", where=tmp_path))
    autumn = [row for row in everything if "month3" in row["file"]]
    assert sum(counts["class_il"]) == round(accuracy(autumn) * 40)
    assert sum(counts["task_il"]) == round(accuracy(own) * 40)
    assert "all checksums hold" in pearl("inspect", "shop", where=tmp_path)

    # every export, by its own runtime
    pytest.importorskip("onnxruntime", reason='needs pip install "pearl[onnx]"')
    pytest.importorskip("peft", reason='needs pip install "pearl[peft]"')
    files = [Path(row["file"]) for row in everything[::10]]
    expected = [row["class"] for row in everything[::10]]
    images = np.stack([np.asarray(Image.open(file).convert("RGB")) for file in files])
    x = (images.transpose(0, 3, 1, 2) / 255).astype(np.float32)
    for kind, out in (("torch", "shop.pt2"), ("onnx", "shop.onnx")):
        assert f"wrote {out}" in pearl("export", "shop", "--to", kind, "-o", out, "--images", tests[0], where=tmp_path)
    assert by_torch(tmp_path / "shop.pt2", x) == expected
    assert by_onnx(tmp_path / "shop.onnx", x) == expected

    # adapters are of a model that asks its heads
    plain = [*SMALL, "method.classifier=heads", "-q"]
    pearl("learn", "plain", "--data", photos / "month1", "--backbone", "resnet18", *plain, where=tmp_path)
    export = ["export", "plain", "--to", "peft", "-o", "adapters", "--images", tests[0]]
    assert "wrote adapters" in pearl(*export, where=tmp_path)
    named = [row["class"] for row in rows(pearl("predict", "plain", *files, "--csv", where=tmp_path))]
    assert by_peft(tmp_path / "adapters", x) == named

    # a page about it
    page = Path(tmp_path / pearl("report", "shop", "-o", "shop.html", where=tmp_path).strip().splitlines()[-1])
    assert "autumn" in page.read_text() and "digit 5" in page.read_text()


def by_torch(file, x):
    import torch

    extra = {"pearl.json": ""}
    with file.open("rb") as opened:
        program = torch.export.load(opened, extra_files=extra).module()
    names = json.loads(extra["pearl.json"])["classes"]
    return [names[index] for index in program(torch.from_numpy(x))[0].argmax(1).tolist()]


def by_onnx(file, x):
    import onnxruntime

    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    names = json.loads(session.get_modelmeta().custom_metadata_map["classes"])
    return [names[index] for index in session.run(["logits"], {"images": x})[0].argmax(1).tolist()]


def by_peft(folder, x):
    """As the folder's own README says, in a process that knows nothing else."""
    readme = (folder / "README.md").read_text()
    code = readme.split("```python\n")[1].split("```")[0]
    facts = json.loads((folder / "pearl.json").read_text())
    np.save(
        folder / "x.npy",
        (x - np.reshape(facts["input"]["mean"], (3, 1, 1))) / np.reshape(facts["input"]["std"], (3, 1, 1)),
    )
    code += """
import numpy
x = torch.from_numpy(numpy.load("x.npy")).float()
names = [name for classes in TASKS.values() for name in classes]
with torch.no_grad():
    logits = torch.cat([load(folder)(x) for folder in TASKS], dim=1)
print(json.dumps([names[index] for index in logits.argmax(1).tolist()]))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
