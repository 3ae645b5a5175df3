"""What docs/serve.md says of other servers fits an exported model, as far as it can be seen without them."""

import re
import sys
from asyncio import run
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import yaml

import pearl
from photos import SETTINGS, digit, folders, write_photos
from served import png

pytestmark = pytest.mark.slow

PAGE = (Path(__file__).parents[2] / "docs" / "serve.md").read_text(encoding="utf-8")


def block(language, having):
    (actual,) = (text for text in re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL) if having in text)
    return actual


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    root = tmp_path_factory.mktemp("shop")
    write_photos(root / "first", {"zero": 0, "one": 1}, 12)
    with folders(root):
        return pearl.learn(root / "shop", root / "first", quiet=True, **SETTINGS)


def test_triton_finds_what_its_file_says(model, tmp_path):
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package, reason='pip install "pearl[onnx]"')
    import onnxruntime

    text = block("protobuf", "platform").replace("224", str(model.config.images.size)).replace("81", "2")
    assert text.count("{") == text.count("}") and text.count("[") == text.count("]")
    name, command = re.search(r'name: "(\w+)"', text).group(1), re.search(r"--out models/(\w+)/1/model.onnx", PAGE)
    assert command.group(1) == name and 'platform: "onnxruntime_onnx"' in text
    model.export("onnx", tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    for kind, ports in (("input", session.get_inputs()), ("output", session.get_outputs())):
        (section,) = re.findall(rf"^{kind} \[ (.*?) \]$", text, re.DOTALL | re.MULTILINE)
        actual = re.findall(
            r'name: "(\w+)" data_type: (\w+) dims: \[ ([\d, ]+) \](?: reshape: { shape: \[ ([\d, ]*)\] })?', section
        )
        assert len(actual) == len(ports)
        for (name, data, dims, reshaped), port in zip(actual, ports, strict=True):
            assert (name, data, port.type) == (port.name, "TYPE_FP32", "tensor(float)")
            batch, *expected = port.shape  # with a max_batch_size Triton adds the first one, which has to be free
            shape = reshaped if dims == "1 " or (dims == "1" and not expected) else dims
            assert isinstance(batch, str) and expected == [int(number) for number in shape.split(",") if number.strip()]
    assert int(re.search(r"max_batch_size: (\d+)", text).group(1)) > 0


def test_kserve_gets_the_fields_that_it_asks_for():
    actual = yaml.safe_load(block("yaml", "kserve"))
    assert (actual["apiVersion"], actual["kind"]) == ("serving.kserve.io/v1beta1", "InferenceService")
    assert re.fullmatch("[a-z]([-a-z0-9]*[a-z0-9])?", actual["metadata"]["name"])
    predictor = actual["spec"]["predictor"]
    assert predictor["model"]["modelFormat"] == {"name": "triton"} and predictor["model"]["protocolVersion"] == "v2"
    assert predictor["model"]["storageUri"].startswith("s3://") and predictor["minReplicas"] > 0


def test_ray_would_run_a_class_that_predicts(model, monkeypatch):
    """Ray's decorator is taken for one that keeps the class."""

    def deployment(num_replicas):
        return lambda kind: type(kind.__name__, (kind,), {"bind": classmethod(lambda cls: cls)})

    ray = ModuleType("ray")
    ray.serve = SimpleNamespace(deployment=deployment)
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.chdir(model.path.parent)
    scope = {}
    exec(compile(block("python", "ray"), "serve.md", "exec"), scope)

    async def body():
        return png(digit(0)[20])

    actual = run(scope["app"]()(SimpleNamespace(body=body)))
    assert actual[0]["label"] == "zero" and actual[0]["unknown"] is False and actual[0]["score"] > 0.5
