"""Models of prompts and prefixes, which choose for each image what it passes through with, as programs."""

import pytest
from test_statistics_programs import PICTURES

from pearl.export.trained import Trained
from pearl.export.verbs import export
from pearl.testing.tiny import config, learn
from zoo import ZOO


def taught(kind: str) -> Trained:
    method = ZOO[kind]()
    named = [{"name": task.name, "classes": list(task.classes)} for task in learn(method, range(3))]
    return Trained(method.eval(), config().images, named, {"name": "timm/test_vit"})


@pytest.mark.parametrize("kind", ["l2p", "dualprompt", "sprompts", "hide", "evoprompt"])
def test_a_torch_program_says_the_same(kind, tmp_path):
    assert "differ from the model's by at most" in export(taught(kind), "torch", tmp_path / "model.pt2", PICTURES)


def test_an_onnx_file_says_the_same(tmp_path):
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package)
    assert "differ from the model's by at most" in export(
        taught("convprompt"), "onnx", tmp_path / "model.onnx", PICTURES
    )
