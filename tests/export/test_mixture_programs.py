"""Models whose adapters are mixed, pooled, or asked beside their average, as programs."""

import pytest
from test_prompt_programs import taught
from test_statistics_programs import PICTURES

from pearl.export.verbs import export


@pytest.mark.parametrize("kind", ["lae", "lae, prefixes", "dia", "ada"])
def test_a_torch_program_says_the_same(kind, tmp_path):
    assert "differ from the model's by at most" in export(taught(kind), "torch", tmp_path / "model.pt2", PICTURES)


def test_an_onnx_file_says_the_same(tmp_path):
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package)
    assert "differ from the model's by at most" in export(taught("sema"), "onnx", tmp_path / "model.onnx", PICTURES)
