"""Models whose images choose a gate, or that answer with an average of themselves, as programs."""

import pytest
from test_statistics_programs import PICTURES

from pearl.export.trained import Trained
from pearl.export.verbs import export
from pearl.testing.conformance import after
from pearl.testing.tiny import config
from zoo import ZOO


@pytest.mark.parametrize("kind", ["tamil", "agile", "ocdnet", "trire"])
def test_a_torch_program_says_the_same(kind, tmp_path):
    method = after(ZOO[kind], 2)
    named = [{"name": f"task{t + 1}", "classes": [f"{t} {c}" for c in range(2)]} for t in range(2)]
    model = Trained(method.eval(), config().images, named, {"name": "resnet18"})
    assert "differ from the model's by at most" in export(model, "torch", tmp_path / "model.pt2", PICTURES)
