"""Models of sparse methods, and of the plain network, as programs and adapters."""

import pytest
from test_statistics_programs import PICTURES

from pearl.export.adapters import _base
from pearl.export.trained import Trained
from pearl.export.verbs import export
from pearl.methods.pearl import Pearl
from pearl.testing.conformance import after
from pearl.testing.tiny import config
from zoo import ZOO, small_convnet


def model(make) -> Trained:
    named = [{"name": f"task{t + 1}", "classes": [f"{t} {c}" for c in range(2)]} for t in range(2)]
    return Trained(after(make, 2).eval(), config().images, named, {"name": "convnet", "width": 4})


@pytest.mark.parametrize("kind", ["cpg", "nispa"])
def test_a_torch_program_says_the_same(kind, tmp_path):
    assert "differ from the model's by at most" in export(model(ZOO[kind]), "torch", tmp_path / "model.pt2", PICTURES)


def test_adapters_of_the_plain_network_know_the_size_of_its_images():
    make, facts = _base(model(lambda: Pearl(small_convnet())))
    assert facts["options"] == {"width": 4, "image_size": 8}
    assert make(**facts["options"]).linear.weight.shape == (64, 8 * 4)
