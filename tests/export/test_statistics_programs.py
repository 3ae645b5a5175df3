"""Models that tell tasks apart by class statistics, as programs."""

import json

import pytest
import torch

from pearl.data.augment import View
from pearl.errors import ExportError
from pearl.export.programs import network
from pearl.export.trained import Trained
from pearl.export.verbs import export
from pearl.methods.bounds.isolation import Isolation
from pearl.methods.common.by_statistics import Statistics
from pearl.methods.common.calibration import Scores
from pearl.methods.pearl import Pearl
from pearl.methods.sparse.packnet import PackNet
from pearl.methods.sparse.pnn import Progressive
from pearl.testing.tiny import SIZE, config, learn, make_task, small_resnet, small_vit
from pearl.training.engine import Engine

MODELS = {
    "resnet": lambda: Pearl(small_resnet(), classifier=Statistics(spaces=2)),
    "vit": lambda: Pearl(small_vit(), classifier=Statistics(spaces=2, projection=16)),
    "isolation": lambda: Isolation(small_resnet(), classifier=Statistics(spaces=2)),
    "packnet": lambda: PackNet(small_resnet(), classifier=Statistics(spaces=2)),
    "pnn": lambda: Progressive(small_resnet(), classifier=Statistics(spaces=2)),
}
PICTURES = torch.randint(256, (5, SIZE, SIZE, 3), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
IMAGES = (PICTURES / 255).permute(0, 3, 1, 2).contiguous()


def taught(kind: str) -> Trained:
    """Two tasks, and one that shows the first task's classes again: several prototypes a class."""
    method = MODELS[kind]()
    tasks = learn(method, range(2))
    again = make_task(0)
    again.id, again.first_class, again.classes = 2, 2 * len(again.classes), ()
    Engine(config(), device="cpu").learn(method, again)
    named = [{"name": task.name, "classes": list(task.classes)} for task in (*tasks, again)]
    return Trained(method.eval(), config().images, named, {"name": "resnet18"})


def outputs(model: Trained) -> tuple[torch.Tensor, torch.Tensor]:
    """Log P and in-distribution scores of the pictures, as `predict` has them; some are unknown at the usual rate."""
    with torch.no_grad():
        logits, scores = model.method.classifier.ood_scorer()(View(model.images, channels_last=False).test(PICTURES))
    assert len(scores.unique()) == len(scores)
    return logits, model.method.classifier.shares(scores)


def check_facts(facts: dict, model: Trained) -> None:
    """`in_distribution` is a share of known images, so that the rate is the threshold."""
    low, high = facts["unknown"]["of_known_classes"]
    assert facts["unknown"]["in_distribution_below"] == 0.05 and 0 <= low < 0.05 < high < 1
    assert facts == json.loads(json.dumps(model.facts))


@pytest.mark.parametrize("kind", MODELS)
def test_a_torch_program_says_the_same(kind, tmp_path):
    model, path, told = taught(kind), tmp_path / "model.pt2", {"pearl.json": ""}
    line = export(model, "torch", path, PICTURES)
    assert "differ from the model's by at most" in line
    program = torch.export.load(path, extra_files=told).module()
    for actual, expected in zip(program(IMAGES), outputs(model), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    check_facts(json.loads(told["pearl.json"]), model)


def test_an_onnx_file_says_the_same(tmp_path):
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package)
    import onnxruntime

    model, path = taught("vit"), tmp_path / "model.onnx"
    assert "differ from the model's by at most" in export(model, "onnx", path, PICTURES)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    actual = session.run(["logits", "in_distribution"], {"images": IMAGES.numpy()})
    for each, expected in zip(actual, outputs(model), strict=True):
        torch.testing.assert_close(torch.from_numpy(each), expected, rtol=1e-4, atol=1e-4)
    told = session.get_modelmeta().custom_metadata_map
    check_facts({key: json.loads(value) for key, value in told.items()}, model)


def test_a_program_with_other_scores_is_not_kept(tmp_path, monkeypatch):
    steps = Scores.steps
    monkeypatch.setattr(Scores, "steps", lambda self: (steps(self)[0] + 3, steps(self)[1]))
    with pytest.raises(ExportError, match="in-distribution scores"):
        export(taught("resnet"), "torch", tmp_path / "model.pt2", PICTURES)
    assert not [*tmp_path.iterdir()]


def test_adapters_hold_heads_alone(tmp_path):
    with pytest.raises(ExportError, match="--to peft: stores heads"):
        export(taught("vit"), "peft", tmp_path / "adapters", PICTURES)


def test_only_spaces_are_written():
    """A sub-network that nobody asks is not in the program."""
    method = Pearl(small_resnet(), classifier=Statistics(spaces=1, train="all"))
    learn(method, range(3))
    made = network(method.eval(), config().images)
    own = sum(p.numel() for p in made.parameters())
    assert own == sum(p.numel() for p in method.backbone.parameters())


def test_features_in_bfloat16_are_not_exported() -> None:
    method = Pearl(small_vit(), classifier=Statistics(precision="bfloat16"))
    learn(method, range(1))
    with pytest.raises(ExportError, match=r"bfloat16, and programs compute in float32; make a model with method\.clas"):
        network(method, config().images)
