"""What version 0.1 wrote opens, says the same, is resumed and goes on learning; people's files import what they did.

written_by_0.1/ was made by that version on another machine: a model of two tasks (`pearl learn`), a run of three, the
same run cut off in its third task, the model cut off in a third one, and a run of a method in a file, of whose three
tasks two are learnt. said.json holds what they said of four random images.
"""

import json
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

import pearl
from pearl.lifecycle.learning import learn, resume
from pearl.lifecycle.runs import Run, execute
from pearl.lifecycle.saved import read_config
from pearl.moved import NOW
from pearl.settings.parts import METHODS
from photos import write_photos

WRITTEN = Path(__file__).parent / "written_by_0.1"
SAID = json.loads((WRITTEN / "said.json").read_text())


@pytest.fixture
def old(tmp_path, monkeypatch):
    """Copies; no file has been named in this process."""
    monkeypatch.setattr(METHODS, "_files", {})
    return Path(shutil.copytree(WRITTEN, tmp_path / "old"))


def code(path):
    return f"{path / 'method.py'}:Replayed" if path.name == "file" else None


@pytest.mark.parametrize("name", SAID)
def test_it_opens_and_says_the_same(old, name):
    pixels = np.random.default_rng(0).integers(0, 256, (4, 8, 8, 3), dtype=np.uint8)
    logits = pearl.load(old / name, method=code(old / name)).logits(pixels)
    np.testing.assert_allclose(logits.numpy(), SAID[name], rtol=1e-3, atol=1e-3)


def test_a_run_is_found_done(old):
    run = Run.open(old / "run")
    assert execute(run.config, path=run.path).done
    assert run.config.id == "digits-pearl-seed0-caeb74e3"


@pytest.mark.parametrize(("name", "done"), [("half", 2), ("file", 2)])
def test_it_is_resumed(old, name, done):
    """From the moment that was stored, not from the start of the task."""
    path, before = old / name, json.loads((old / name / "results.json").read_text())
    assert len(before["stages"]) == done
    if name == "file":
        METHODS.admit(code(path))
    run = execute(read_config(path), path=path)
    assert run.done and len(run.results["stages"]) == 3
    assert run.results["stages"][:done] == before["stages"]
    events = [json.loads(line) for line in (path / "events.jsonl").read_text().splitlines()]
    begun = [event["done"] for event in events if event["event"] == "phase"]
    assert (begun[-2] > 0) == (name == "half")
    if name == "half":  # it was to become this one; on another CPU it does up to rounding
        assert run.config.decides == read_config(old / "run").decides
        assert [m["parameters"] for m in run.manifests[:2]] == [
            m["parameters"] for m in Run.open(old / "run").manifests[:2]
        ]


def test_a_model_goes_on_learning(old, tmp_path):
    kept = {file: file.read_bytes() for file in (old / "model" / "tasks").rglob("*.*")}
    write_photos(tmp_path / "third", {"four": 4, "five": 5}, 8)
    learn(old / "model", tmp_path / "third")
    model = pearl.load(old / "model")
    assert model.classes == ("one", "zero", "three", "two", "five", "four")
    assert all(file.read_bytes() == content for file, content in kept.items())
    pixels = np.random.default_rng(0).integers(0, 256, (4, 8, 8, 3), dtype=np.uint8)
    np.testing.assert_allclose(model.logits(pixels)[:, :4].numpy(), SAID["model"], rtol=1e-3, atol=1e-3)


def test_a_half_learnt_task_is_resumed(old, tmp_path):
    path = old / "half-model"
    write_photos(tmp_path / "third", {"four": 4, "five": 5}, 8)
    note = json.loads((path / "resume" / "task.json").read_text())
    (path / "resume" / "task.json").write_text(json.dumps({**note, "data": str(tmp_path / "third")}))
    resume(path)
    assert pearl.load(path).classes == ("one", "zero", "three", "two", "five", "four")
    events = [json.loads(line) for line in (path / "events.jsonl").read_text().splitlines()]
    assert [event["done"] for event in events if event["event"] == "phase"][-2:] == [2, 2]


@pytest.mark.parametrize("old_name", NOW)
def test_an_old_path_gives_what_lies_elsewhere_now(old_name):
    module = import_module(f"pearl.{old_name}")
    places = [import_module(f"pearl.{place}") for place in NOW[old_name]]
    for place in places:
        for name in [name for name in vars(place) if not name.startswith("_")]:
            assert getattr(module, name) is getattr(next(one for one in places if hasattr(one, name)), name)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        module.nothing  # noqa: B018


def test_a_path_that_never_was_is_an_import_error():
    said = subprocess.run([sys.executable, "-c", "import pearl.novel"], capture_output=True, text=True)
    assert "No module named 'pearl.novel'" in said.stderr
