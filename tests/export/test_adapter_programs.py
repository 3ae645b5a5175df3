"""Models of adapters, scales and shifts, and of random features, as programs."""

import pytest
from test_prompt_programs import taught
from test_statistics_programs import PICTURES

from pearl.export.verbs import export


@pytest.mark.parametrize("kind", ["ease", "aper", "aper, deep prompts", "loranpac"])
def test_a_torch_program_says_the_same(kind, tmp_path):
    assert "differ from the model's by at most" in export(taught(kind), "torch", tmp_path / "model.pt2", PICTURES)


@pytest.mark.parametrize("kind", ["ssiat", "ranpac"])
def test_an_onnx_file_says_the_same(kind, tmp_path):
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package)
    assert "differ from the model's by at most" in export(taught(kind), "onnx", tmp_path / "model.onnx", PICTURES)
