"""What Python gets: objects that show themselves, verbs on a model, and words where an argument is of a wrong type."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import pearl
from pearl.errors import ConfigError, ExportError, counted, typed
from pearl.settings.config import recipe_names
from photos import SETTINGS, folders, write_photos

EVIL = "<b>&"


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    """A model of two classes, one of which would be HTML."""
    root = tmp_path_factory.mktemp("shop")
    write_photos(root / "first", {"zero": 0, EVIL: 1}, 12)
    with folders(root):
        pearl.learn(root / "model", root / "first", quiet=True, **SETTINGS)
    return root


@pytest.fixture(scope="module")
def model(shop):
    return pearl.load(shop / "model")


def test_a_model_is_exported_as_it_was_opened(model, monkeypatch, tmp_path):
    asked = {}
    monkeypatch.setattr("pearl.export.export_directory", lambda name, **how: asked.update(how, name=name) or "done")
    assert model.export("onnx", str(tmp_path / "m.onnx"), images=["a.png"], force=True) == "done"
    same = {"name": str(model.path), "to": "onnx", "out": tmp_path / "m.onnx", "images": [Path("a.png")]}
    assert asked == {**same, "upto": 1, "force": True}


def test_a_model_does_what_the_command_line_does(model, tmp_path, capsys):
    assert "Tasks of model" in model.report(tmp_path / "page.html").read_text()
    facts = model.inspect()
    assert facts["tasks"][0]["classes"] == [EVIL, "zero"] and facts["damaged"] == []
    with pytest.raises(ExportError, match="unknown format 'trch'; did you mean 'torch'"):
        model.export("trch")
    grown = model.learn(write_photos(tmp_path / "x", {"two": 2}, 4), fast=True, quiet=True)
    assert type(grown) is type(model) and grown.classes[-1] == "two"
    assert capsys.readouterr().err == ""


def test_objects_show_themselves(shop, model):
    assert repr(pearl.load(model.path, tasks=1)) == f"Model({model.path}: pearl on resnet18, 1 task, 2 classes)"
    assert repr(model.outcome).startswith("Outcome(new classes ") and len(repr(model.outcome)) < 90
    evaluation = model.evaluate(shop / "first")
    rows = [line.split() for line in repr(evaluation).splitlines()]
    assert rows[0] == ["images", "class-IL", "task-IL"]
    assert rows[-1] == ["all", "24", f"{evaluation.accuracy:.2f}%", f"{evaluation.task_accuracy:.2f}%"]
    assert evaluation.accuracy == pytest.approx(100 * evaluation.class_il.sum() / 24)
    for html in (model._repr_html_(), evaluation._repr_html_()):
        assert "&lt;b&gt;&amp;" in html and EVIL not in html
        assert html.count("<tr>") == html.count("</tr>") > 1


def test_a_run_shows_itself():
    small = {"backbone": {"width": 4}, "engine": {"max_steps": 1}, "stream": {"tasks": 2, "per_class": 4}}
    run = pearl.run("digits", quiet=True, **small)
    accuracy = f"{run.summary['class_il.final']:.2f} %"
    assert repr(run) == f"Run({run.path}: 2 tasks, class-IL {accuracy})"
    cells = re.findall(r"<td>(.*?)</td>", run._repr_html_())
    assert np.mean([float(cells[1]), float(cells[4])]) == pytest.approx(run.summary["class_il.final"], abs=0.01)
    (run.path / "results.json").unlink()
    assert repr(pearl.show(run.path)) == f"Run({run.path}: 0 tasks so far)"


def test_names_with_a_line_about_each():
    assert pearl.recipes().keys() == {*recipe_names()}
    assert all(pearl.recipes().values())
    import pearl.methods as package  # takes the function's place, and is one

    assert package is pearl.methods and issubclass(package.Method, torch.nn.Module)
    code = "import pearl, json; print(json.dumps(pearl.methods()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == pearl.methods()
    assert pearl.methods()["pearl"].startswith("A sub-network per task") and all(pearl.methods().values())


WRONG = {
    "learn: backbone must be str, dict or None, not list": lambda model: pearl.learn("x", "y", backbone=["resnet18"]),
    "learn: aliases must be Mapping or None, not list": lambda model: pearl.learn("x", "y", aliases=["a=b"]),
    "learn: holdout must be float, not str": lambda model: pearl.learn("x", "y", holdout="0.1"),
    "learn: fast must be bool, not str": lambda model: model.learn("x", fast="yes"),
    "load: model must be str or Path, not NoneType": lambda model: pearl.load(None),
    "load: tasks must be int or None, not str": lambda model: pearl.load("x", tasks="2"),
    "load: tasks must be int or None, not bool": lambda model: pearl.load("x", tasks=True),
    "run: recipe must be str or Path, not dict": lambda model: pearl.run({}),
    "show: directory must be str or Path, not int": lambda model: pearl.show(1),
    "table: seeds must be int or None, not str": lambda model: pearl.table("growth", seeds="3"),
    "predict: unknown_rate must be float, 'auto' or None, not str": lambda model: model.predict("x", unknown_rate="no"),
    "evaluate: unknown_rate must be float, not str": lambda model: model.evaluate("x", unknown_rate="0.1"),
    "predict: images must be": lambda model: model.predict(3),
    "predict: task must be str or None, not int": lambda model: model.predict([], task=1),
    "predict: top must be int, not float": lambda model: model.predict([], top=1.5),
    "export: out must be str, Path or None, not int": lambda model: model.export("torch", 3),
    "report: output must be str, Path or None, not int": lambda model: model.report(3),
}


@pytest.mark.parametrize("words", WRONG)
def test_arguments_of_wrong_types(model, words):
    with pytest.raises(ConfigError) as caught:
        WRONG[words](model)
    assert str(caught.value).startswith(words)
    assert "\n" not in str(caught.value)


def test_one_is_no_plural():
    said = [
        counted(*given) for given in ((0, "task"), (1, "class"), (2, "class"), (2, "process"), (1000, "test image"))
    ]
    assert said == ["0 tasks", "1 class", "2 classes", "2 processes", "1,000 test images"]


def test_typed_lets_through_what_fits():
    @typed
    def f(a: int, b: float = 0.5, *, c: list[int] | None = None, **more: int) -> str:
        """Doc."""
        return f"{a} {b} {c} {more}"

    assert f(np.int64(3), np.float32(1), c=[], d="x") == "3 1.0 [] {'d': 'x'}"
    assert f(1, 2) == "1 2 None {}"
    assert (f.__name__, f.__doc__) == ("f", "Doc.")
    with pytest.raises(TypeError, match="missing"):
        f()
    with pytest.raises(ConfigError, match=r"f: a must be int, not str; .*\nf: b must be float, not NoneType"):
        f("1", None)


def test_importing_pearl_brings_no_torch():
    code = "import sys, pearl, json; print(json.dumps([m in sys.modules for m in ('torch', 'numpy', 'pydantic')]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [False, False, False]


PREDICTED = """
import json, sys
from pearl.cli import app
app(sys.argv[1:], standalone_mode=False)
slow = ("timm", "torchvision", "torch._dynamo", "sympy", "lightning_fabric")
print(json.dumps([m for m in slow if m in sys.modules]))
"""


@pytest.mark.parametrize("backbone", ["resnet18", "timm/deit_tiny_patch16_224"])
def test_a_prediction_imports_no_slow_library(backbone, tmp_path):
    write_photos(tmp_path / "first", {"zero": 0, "one": 1}, 4)
    images = {"images": {"size": 16, "resize": 16, "augment": "none"}} if "timm" in backbone else {}
    spec = {"name": backbone, **({"width": 8} if not images else {"pretrained": False})}
    pearl.learn(
        tmp_path / "model", tmp_path / "first", quiet=True, **{**SETTINGS, **images, "backbone": spec, "smoke": True}
    )
    file = next((tmp_path / "first" / "one").iterdir())
    command = [sys.executable, "-c", PREDICTED, "predict", str(tmp_path / "model"), str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "%" in done.stdout and json.loads(done.stdout.splitlines()[-1]) == []
    write_photos(tmp_path / "more", {"two": 2}, 4)
    command[3:] = ["learn", str(tmp_path / "model"), "--data", str(tmp_path / "more"), "--fast", "-q"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "1 class, 3 in all" in done.stdout and json.loads(done.stdout.splitlines()[-1]) == []
