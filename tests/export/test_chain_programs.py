"""Models that tell tasks apart by class statistics, as programs."""

import pytest
import torch

from pearl.errors import ExportError
from pearl.export.programs import network
from pearl.export.trained import Trained
from pearl.export.verbs import export
from pearl.methods.bounds.isolation import Isolation
from pearl.methods.common.classifiers import Chain
from pearl.methods.pearl import Pearl
from pearl.methods.sparse.packnet import PackNet
from pearl.methods.sparse.pnn import Progressive
from pearl.testing.tiny import SIZE, config, learn, make_task, small_resnet, small_vit
from pearl.training.engine import Engine

MODELS = {
    "resnet": lambda: Pearl(small_resnet(), classifier=Chain(spaces=2)),
    "vit": lambda: Pearl(small_vit(), classifier=Chain(spaces=2, projection=16)),
    "isolation": lambda: Isolation(small_resnet(), classifier=Chain(spaces=2)),
    "packnet": lambda: PackNet(small_resnet(), classifier=Chain(spaces=2)),
    "pnn": lambda: Progressive(small_resnet(), classifier=Chain(spaces=2)),
}
PICTURES = torch.randint(256, (5, SIZE, SIZE, 3), generator=torch.Generator().manual_seed(1)).to(torch.uint8)


def taught(kind: str) -> Trained:
    """Two tasks, and one that shows the first task's classes again: several prototypes a class."""
    method = MODELS[kind]()
    tasks = learn(method, range(2))
    again = make_task(0)
    again.id, again.first_class, again.classes = 2, 2 * len(again.classes), ()
    Engine(config(), device="cpu").learn(method, again)
    named = [{"name": task.name, "classes": list(task.classes)} for task in (*tasks, again)]
    return Trained(method.eval(), config().images, named, {"name": "resnet18"})


@pytest.mark.parametrize("kind", MODELS)
def test_a_torch_program_says_the_same(kind, tmp_path):
    model = taught(kind)
    line = export(model, "torch", tmp_path / "model.pt2", PICTURES)
    assert "differ from the model's by at most" in line


def test_an_onnx_file_says_the_same(tmp_path):
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package)
    assert "differ from the model's by at most" in export(taught("vit"), "onnx", tmp_path / "model.onnx", PICTURES)


def test_adapters_hold_heads_alone(tmp_path):
    with pytest.raises(ExportError, match="--to peft: stores heads"):
        export(taught("vit"), "peft", tmp_path / "adapters", PICTURES)


def test_only_spaces_are_written():
    """A sub-network that nobody asks is not in the program."""
    method = Pearl(small_resnet(), classifier=Chain(spaces=1, train="all"))
    learn(method, range(3))
    made = network(method.eval(), config().images)
    own = sum(p.numel() for p in made.parameters())
    assert own == sum(p.numel() for p in method.backbone.parameters())
