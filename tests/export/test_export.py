"""What is exported gives the model's logits, says what it is, and is either whole or not there."""

import io
import json
import re
import subprocess
import sys
import zipfile
from dataclasses import replace
from functools import cache, partial
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from layouts import write_images
from pearl.data.augment import View
from pearl.errors import ExportError, PearlError
from pearl.export import adapters, export, export_directory, programs
from pearl.export.adapters import unfolded
from pearl.export.programs import network, pickles
from pearl.export.trained import Trained
from pearl.export.verbs import check_images
from pearl.lifecycle.runs import execute
from pearl.methods.bounds.finetune import Finetune
from pearl.methods.bounds.isolation import Isolation
from pearl.methods.bounds.joint import Joint
from pearl.methods.pearl import Pearl
from pearl.nn import lowrank
from pearl.nn.rank_rules import FixedRule
from pearl.settings.config import load_config
from pearl.settings.parts import BACKBONES
from pearl.settings.sections import ImagesConfig
from pearl.storage.aside import MARKER, WORDS

pytestmark = pytest.mark.slow

SIZES = (3, 2)  # classes of the tasks
RESNET = {"name": "resnet18", "width": 4}
BSC = {"name": "bsc", "width": 4}
VIT = {"name": "timm/test_vit"}


def needs(*packages: str) -> None:
    for package in packages:
        pytest.importorskip(package, reason=f'{package} is missing: pip install "pearl[onnx,peft]"')


def learnt(
    kind: type = Pearl,
    spec: dict = RESNET,
    *,
    size: int = 8,
    given: bool = False,
    shape: dict | None = None,
    **options: object,
) -> Trained:
    """A method after two tasks that "trained" every parameter to something random; `shape` is for timm."""
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timm, "create_model", partial(timm.create_model, **shape or {}))
        backbone = BACKBONES.build(spec, size)
    backbone.pretrained = given
    if kind is Pearl:
        options = {"rank": FixedRule(r=2), **options}
    method = kind(backbone, **options)
    for t, count in enumerate(SIZES):
        target = {"id": t, "classes": tuple(range(count)), "first_class": sum(SIZES[:t])}
        task = SimpleNamespace(**target, shows_known_classes=False)
        task.to_train_on = lambda same=task: same
        for phase in method.learn(task):
            for parameter in phase.trained:
                parameter.data += 0.1 * torch.randn_like(parameter)
    for name, buffer in method.named_buffers():  # running statistics
        if name.endswith("running_mean"):
            buffer += 0.1 * torch.randn_like(buffer)
        elif name.endswith("running_var"):
            buffer *= 0.1 + 0.2 * torch.rand_like(buffer)
    images = ImagesConfig(size=size, mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4))
    tasks = [{"name": f"task {t}/é", "classes": [f"{t}.{c}" for c in range(n)]} for t, n in enumerate(SIZES)]
    model = Trained(method.eval(), images, tasks, BACKBONES.resolve(spec, "backbone"))
    for t, head in enumerate(method.heads):
        largest = logits(model, pictures(model), task=t).abs().max()
        for parameter in head.parameters():
            parameter.data /= largest  # logits of the size that trained ones have
    assert (logits(model, pictures(model)).std(0) > 0.01).all(), "a network that does not look at its images"
    return model


def pictures(model: Trained, count: int = 5) -> torch.Tensor:
    side = model.images.size
    return torch.randint(256, (count, side, side, 3), generator=torch.Generator().manual_seed(1)).to(torch.uint8)


def logits(model: Trained, raw: torch.Tensor, task: int | None = None) -> torch.Tensor:
    with torch.no_grad():
        return model.method(View(model.images).test(raw), task=task)


def unit(raw: torch.Tensor) -> torch.Tensor:
    return raw.permute(0, 3, 1, 2).float().div(255).contiguous()


MODELS = {
    "resnet": lambda: learnt(),
    "resnet, given": lambda: learnt(given=True),
    "bsc": lambda: learnt(spec=BSC),
    "vit": lambda: learnt(spec=VIT, size=32, given=True),
}
TABLES = {  # with buffers that no state_dict has
    "swin": lambda: learnt(
        spec={"name": "timm/swin_tiny_patch4_window7_224"},
        size=16,
        given=True,
        shape={"embed_dim": 8, "depths": (1,), "num_heads": (1,), "window_size": 2},
    ),
    "eva02": lambda: learnt(
        spec={"name": "timm/eva02_tiny_patch14_224"},
        size=28,
        given=True,
        shape={"embed_dim": 16, "depth": 1, "num_heads": 2},
    ),
}
WHOLE = {
    **TABLES,
    **{kind: MODELS[kind] for kind in ("resnet", "bsc", "vit")},
    "finetune": lambda: learnt(Finetune),
    "joint": lambda: learnt(Joint),
}


# ---------------------------------------------------------------------------------------------------------- programs


FILES = {"torch": "model.pt2", "onnx": "model.onnx", "peft": "adapters"}


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A model, what it was exported to in a folder of its own, and what was said; several tests look at it."""

    @cache
    def made(kind: str, to: str) -> tuple[Trained, Path, str]:
        model, out = (WHOLE | ADAPTED)[kind](), tmp_path_factory.mktemp("exported") / FILES[to]
        return model, out, export(model, to, out, pictures(model))

    return made


@pytest.mark.parametrize("kind", WHOLE)
def test_a_torch_program_gives_the_logits(kind, exported):
    model, out, line = exported(kind, "torch")
    raw = pictures(model)
    assert "differ from the model's by at most" in line
    told = {"pearl.json": ""}
    program = torch.export.load(out, extra_files=told).module()
    for count in (1, 2, 5):
        with torch.no_grad():
            torch.testing.assert_close(program(unit(raw[:count])), logits(model, raw[:count]), rtol=0, atol=1e-4)
    assert json.loads(told["pearl.json"]) == model.facts
    assert model.facts["classes"][:4] == ["0.0", "0.1", "0.2", "1.0"]
    assert [entry.name for entry in out.parent.iterdir()] == ["model.pt2"]


@pytest.mark.parametrize("kind", ["resnet", "vit", "eva02"])
def test_an_onnx_file_gives_the_logits(kind, exported):
    needs("onnx", "onnxscript", "onnxruntime")
    import onnxruntime

    model, out, _ = exported(kind, "onnx")
    raw = pictures(model)
    session = onnxruntime.InferenceSession(out, providers=["CPUExecutionProvider"])
    for count in (1, 5):
        (actual,) = session.run(None, {"images": unit(raw[:count]).numpy()})
        torch.testing.assert_close(torch.from_numpy(actual), logits(model, raw[:count]), rtol=0, atol=1e-4)
    told = session.get_modelmeta().custom_metadata_map
    assert {key: json.loads(value) for key, value in told.items()} == model.facts
    assert session.get_inputs()[0].shape == ["batch", 3, model.images.size, model.images.size]
    assert [entry.name for entry in out.parent.iterdir()] == ["model.onnx"]


ALONE = """
import json, os, re, sys
from pathlib import Path

sys.modules["pearl"] = None  # as where it is not installed

import onnxruntime
import torch
from safetensors.torch import load_file

torch.set_grad_enabled(False)
for asked, program, file, folder in json.load(sys.stdin):
    asked = load_file(asked)
    images = asked["images"]
    found = {"torch": torch.export.load(program).module()(images)}
    found["onnx"] = torch.from_numpy(onnxruntime.InferenceSession(file).run(None, {"images": images.numpy()})[0])
    os.chdir(folder)
    facts = json.loads(Path("pearl.json").read_text())["input"]
    mean, std = (torch.tensor(facts[key])[:, None, None] for key in ("mean", "std"))
    (code,) = re.findall(r"```python\\n(.*?)```", Path("README.md").read_text(), re.DOTALL)
    exec(code, scope := {})
    parts = [scope["load"](task)((images - mean) / std) for task in scope["TASKS"]]
    found["peft"] = torch.cat(parts, dim=1)
    print(json.dumps({to: float((logits - asked["logits"]).abs().max()) for to, logits in found.items()}))
"""


def test_every_export_is_used_without_pearl(exported, tmp_path):
    """Another interpreter, in which pearl is not to be had, gives the model's logits."""
    needs("peft", "onnx", "onnxscript", "onnxruntime")
    asked = []
    for kind in ("resnet", "bsc", "vit"):
        made = [exported(kind, to) for to in FILES]
        raw = pictures(model := made[0][0])
        save_file({"images": unit(raw), "logits": logits(model, raw)}, tmp_path / kind)
        asked.append([str(tmp_path / kind), *(str(out) for _, out, _ in made)])
    command = [sys.executable, "-c", ALONE]
    said = subprocess.run(command, input=json.dumps(asked), cwd=tmp_path, capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
    differ = [json.loads(line) for line in said.stdout.splitlines()]
    assert [set(each) for each in differ] == [{"torch", "onnx", "peft"}] * 3
    assert max(max(each.values()) for each in differ) < 1e-4


def test_no_pickle_and_no_path_in_an_archive(tmp_path):
    out = tmp_path / "model.pt2"
    export(model := learnt(Finetune), "torch", out, pictures(model))
    assert pickles(out) == []
    with zipfile.ZipFile(out) as archive:
        for member in archive.namelist():
            content = archive.read(member)
            if "/weights/weight_" not in member:  # raw numbers may begin with anything
                assert not content.startswith((b"\x80", b"PK\x03\x04")), member
            assert str(Path(torch.__file__).parents[1]).encode() not in content
            assert str(Path(programs.__file__).parent).encode() not in content
    program = torch.export.export(nn.Linear(2, 2), (torch.ones(1, 2),))
    torch.export.save(program, buffer := io.BytesIO())
    assert any(name.endswith("sample_inputs/model.pt") for name in pickles(buffer)), "torch pickles, and it is seen"


def test_only_what_is_used_is_written(tmp_path):
    model = learnt(Isolation, {"name": "resnet18", "width": 8})
    export(model, "torch", tmp_path / "model.pt2", pictures(model))
    with zipfile.ZipFile(tmp_path / "model.pt2") as archive:
        weights = sum(info.file_size for info in archive.infolist() if "/weights/weight_" in info.filename)
    assert weights < 4 * 1.05 * model.method.size(), "without the network that all tasks begin with"


def test_sub_networks_share_what_no_task_changed():
    model = learnt(spec=VIT, size=32, given=True)
    before = {name: value.clone() for name, value in model.method.state_dict().items()}
    net = network(model.method, model.images)
    distinct = {parameter.data_ptr(): parameter.numel() for parameter in net.parameters()}
    backbone = model.method.backbone
    fused = sum(m.weight.numel() for name, m in backbone.named_modules() if name.endswith("qkv"))
    whole = sum(parameter.numel() for parameter in backbone.parameters())
    heads = sum(parameter.numel() for parameter in model.method.heads.parameters())
    assert sum(distinct.values()) == whole + fused + heads
    assert not any(parameter.requires_grad for parameter in net.parameters())
    assert all(torch.equal(before[name], value) for name, value in model.method.state_dict().items())


# ---------------------------------------------------------------------------------------------------------- adapters


@pytest.mark.parametrize("fold", ["spatial", "view", "unfold"])
@pytest.mark.parametrize("shape", [(4, 3, 3, 3), (6, 2, 3, 5), (4, 3, 1, 1), (5, 7)])
@pytest.mark.parametrize("rank", [1, 2, 6])
def test_a_fold_is_exact_as_filters_and_their_mix(fold, shape, rank):
    rows, columns = lowrank.matrix_shape(shape, fold)
    a, b = torch.randn(rank, columns), torch.randn(rows, rank)
    filters, mix = unfolded(a, b, shape, fold)
    assert filters.shape == (mix.shape[1], *shape[1:])
    assert mix.shape[1] <= max(rank, shape[0])
    together = torch.einsum("or,r...->o...", mix, filters)
    torch.testing.assert_close(together, lowrank.from_matrix(b @ a, shape, fold))


ADAPTED = {
    **MODELS,
    "view": lambda: learnt(fold="view"),
    "unfold": lambda: learnt(fold="unfold", rank=FixedRule(r=3)),
    "above full rank": lambda: learnt(rank=FixedRule(r=7)),
    "alpha": lambda: learnt(alpha=3.0),
    "lora_bias": lambda: learnt(spec=VIT, size=32, given=True, lora_bias=True),
    "fused twice": lambda: learnt(spec=VIT, size=32, given=True, targets=["query", "value"], lora_bias=True, alpha=3.0),
    "biased linear and bare conv": lambda: learnt(
        spec={"name": "timm/test_vit"}, size=32, given=True, targets=["linear", "conv"], lora_bias=True
    ),
    "only dense": lambda: learnt(spec=BSC, targets="depthwise"),
}


def follow(out: Path, monkeypatch: pytest.MonkeyPatch) -> dict:
    """What the README's code defines, run in the folder."""
    (code,) = re.findall(r"```python\n(.*?)```", (out / "README.md").read_text(), re.DOTALL)
    monkeypatch.chdir(out)
    monkeypatch.syspath_prepend(out)
    scope: dict = {}
    exec(code, scope)
    return scope


@pytest.mark.parametrize("kind", ADAPTED)
def test_adapters_load_as_the_readme_says(kind, exported, monkeypatch):
    needs("peft")
    model, out, line = exported(kind, "peft")
    raw = pictures(model)
    assert "differ from the model's by at most" in line
    scope = follow(out, monkeypatch)
    facts = json.loads((out / "pearl.json").read_text())
    folders = [task["folder"] for task in facts["tasks"]]
    assert folders == ["000-task-0", "001-task-1"]
    own = () if model.backbone["name"].startswith("timm/") else ("networks.py",)
    written = {entry.name for entry in out.iterdir()} - {"__pycache__"}  # left by following the README
    assert written == {*folders, *own, "base", "pearl.json", "README.md"}
    mean, std = (torch.tensor(facts["input"][key])[:, None, None] for key in ("mean", "std"))
    for t, folder in enumerate(folders):
        network = scope["load"](folder)
        for count in (1, 5):
            with torch.no_grad():
                actual = network((unit(raw[:count]) - mean) / std)
            torch.testing.assert_close(actual, logits(model, raw[:count], task=t), rtol=0, atol=1e-4)


def test_adapters_of_a_package_s_network_are_loaded_with_the_package(tmp_path, monkeypatch):
    needs("peft")
    (tmp_path / "their_package.py").write_text(
        "from pearl.nn.resnet import resnet18\n\n"
        "def narrow(image_size, *, times: int = 1, weights: str | None = None):\n"
        "    return resnet18(image_size, width=4 * times)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    point = EntryPoint("narrow", "their_package:narrow", "pearl.backbones")
    monkeypatch.setitem(BACKBONES.installed, "narrow", point)
    model = learnt(spec={"name": "narrow", "times": 2, "weights": None})
    export(model, "peft", tmp_path / "adapters", pictures(model))
    scope = follow(tmp_path / "adapters", monkeypatch)
    assert scope["their_package"].narrow
    assert not (tmp_path / "adapters" / "networks.py").exists()


def test_an_adapter_that_differs_is_seen(tmp_path, monkeypatch):
    """The check is not blind: with a rank's scale wrong, nothing is kept."""
    needs("peft")
    whole = adapters.adapter

    def doubled(method, t):
        tensors, settings = whole(method, t)
        return tensors, settings | {"alpha_pattern": {}, "lora_alpha": 2}

    monkeypatch.setattr(adapters, "adapter", doubled)
    with pytest.raises(ExportError, match="the written model disagrees with the trained one"):
        export(model := learnt(), "peft", tmp_path / "adapters", pictures(model))
    assert list(tmp_path.iterdir()) == []


def test_adapters_are_written_without_peft(tmp_path, monkeypatch):
    monkeypatch.setattr(adapters, "find_spec", lambda name: None)
    line = export(model := learnt(), "peft", tmp_path / "adapters", pictures(model))
    assert line.endswith('not verified, as peft is not installed: pip install "pearl[peft]"')
    assert len(load_file(tmp_path / "adapters" / "001-task-1" / "adapter_model.safetensors")) > 40


@pytest.mark.parametrize(("to", "package"), [("peft", "peft"), ("onnx", "onnxruntime")])
def test_a_broken_install_is_named(to, package, tmp_path, monkeypatch):
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text("from json import nothing_of_the_kind")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, package, raising=False)
    with pytest.raises(ExportError) as said:
        export(model := learnt(), to, tmp_path / "model", pictures(model))
    start = f"--to {to}: its packages are installed but cannot be imported (ImportError: cannot import name 'nothing_of"
    assert str(said.value).startswith(start)
    assert str(said.value).endswith(f'pip install --upgrade "pearl[{to}]"')
    assert [entry.name for entry in tmp_path.iterdir()] == [package]


# ------------------------------------------------------------------------------------------------- the command line


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """One run on digits that several tests export."""
    root = tmp_path_factory.mktemp("exported")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PEARL_RUNS", str(root / "runs"))
        patch.setenv("PEARL_DATA", str(root / "data"))
        small = ["backbone.width=4", "stream.tasks=[4,3,3]", "stream.per_class=10", "stream.test_per_class=5"]
        return execute(load_config("digits", [*small, "engine.max_steps=2"]), stop_after=2)


@pytest.fixture
def cli(cli, monkeypatch, tmp_path):
    """What `pearl export` says, in a folder of its own: its output, or if it fails its complaint."""
    monkeypatch.chdir(tmp_path)
    return lambda *arguments, code=0: cli("export", *arguments, code=code)[code != 0]


def test_an_unfinished_run_is_exported_by_its_name(cli, run, monkeypatch, tmp_path):
    monkeypatch.setenv("PEARL_RUNS", str(run.path.parent))
    line = cli(run.path.name, "--to", "torch")
    assert f"wrote {run.path.name}.pt2: " in line
    assert "7 classes" in line
    assert "16 of the run's test images" in line
    cli(run.path, "--to", "torch", "--force")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [f"{run.path.name}.pt2", f"{run.path.name}.pt2.md"]


def test_a_folder_is_replaced_by_force(run, tmp_path):
    out = tmp_path / "adapters"
    export_directory(str(run.path), to="peft", out=out)
    (out / "old").write_text("")
    export_directory(str(run.path), to="peft", out=out, force=True)
    assert not (out / "old").exists()
    assert [entry.name for entry in tmp_path.iterdir()] == ["adapters"]


def test_images_to_check_with(run, tmp_path, monkeypatch):
    import numpy as np

    write_images(tmp_path / "photos" / "in" / "here", ["a.png", "b.jpg"], size=20, rng=np.random.default_rng(0))
    raw, origin = check_images(run.config, [tmp_path / "photos"])
    assert raw.shape == (2, 8, 8, 3)
    assert origin == "2 of the given images"
    config = run.config.model_copy(update={"data": {"name": "folder", "path": "nowhere"}})
    raw, origin = check_images(config)
    assert raw.shape == (16, 8, 8, 3)
    assert "random images" in origin


def test_nothing_is_downloaded_to_check_with(run, monkeypatch):
    import torchvision.datasets.utils as utils

    monkeypatch.setattr(utils, "_urlretrieve", lambda *_, **__: pytest.fail("downloads"))
    spec = {"name": "cifar100", "path": None, "download": True}
    _, origin = check_images(run.config.model_copy(update={"data": spec}))
    assert "random images" in origin


def _no_tasks(run, tmp_path):
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "config.yaml").write_text((run.path / "config.yaml").read_text())
    return ["begun", "--to", "torch"]


def _there(name):
    def prepare(run, tmp_path):
        target = tmp_path / name
        target.mkdir() if name == "folder" else target.write_text("mine")
        return [run.path, "--to", "peft" if name == "folder" else "torch", "-o", target]

    return prepare


def _without(*packages):
    def prepare(run, tmp_path):
        return [run.path, "--to", "onnx"]

    return prepare


WRONG = {
    "no run": (
        lambda run, _: ["nowhere", "--to", "torch"],
        "nowhere: neither a model nor a run, it has no config.yaml",
    ),
    "no task": (_no_tasks, "begun: no task is finished; resume it with: pearl resume"),
    "format": (lambda run, _: [run.path, "--to", "onx"], "--to: unknown format 'onx'; did you mean 'onnx'?"),
    "file there": (_there("file"), "file: exists; choose another path with -o, or replace it with --force"),
    "folder there": (_there("folder"), "folder: exists; choose another path with -o"),
    "another's folder": (
        lambda run, tmp: [*_there("folder")(run, tmp), "--force"],
        "folder: is not an earlier export of this kind; choose another path with -o, or move it away",
    ),
    "no place": (
        lambda run, _: [run.path, "--to", "torch", "-o", "no/where.pt2"],
        "no/where.pt2: cannot be written (no such folder)",
    ),
    "no image": (lambda run, tmp: [run.path, "--to", "torch", "--images", tmp], "--images: no image in"),
    "missing image": (lambda run, _: [run.path, "--to", "torch", "--images", "a.png"], "a.png: No such file"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_input_is_one_line(cli, run, wrong, tmp_path):
    prepare, message = WRONG[wrong]
    arguments = prepare(run, tmp_path)
    before = sorted(tmp_path.rglob("*"))
    (line,) = cli(*arguments, code=2).strip().splitlines()
    assert line.startswith("pearl: ")
    assert message in line
    assert sorted(tmp_path.rglob("*")) == before


def test_onnx_without_its_packages(cli, run, monkeypatch, tmp_path):
    monkeypatch.setattr(programs, "find_spec", lambda name: None if name == "onnxscript" else name)
    (line,) = cli(run.path, "--to", "onnx", code=2).strip().splitlines()
    assert line == 'pearl: --to onnx needs onnxscript, not installed: pip install "pearl[onnx]"'
    assert list(tmp_path.iterdir()) == []


def test_weights_beyond_what_onnx_holds(tmp_path, monkeypatch):
    needs("onnx", "onnxscript", "onnxruntime")
    monkeypatch.setattr(programs, "_ONNX_LIMIT", 1000)
    with pytest.raises(ExportError, match="an ONNX file ends at 2 GB; use --to torch"):
        export(model := learnt(), "onnx", tmp_path / "model.onnx", pictures(model))
    assert list(tmp_path.iterdir()) == []


def test_a_network_that_cannot_be_traced(tmp_path):
    model = learnt(Finetune)

    class Asks(nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else -x

    model.method.backbone.maxpool = Asks()
    with pytest.raises(ExportError, match=r"^torch cannot trace this network \(.*\); choose another format with --to"):
        export(model, "torch", tmp_path / "model.pt2", pictures(model))
    assert list(tmp_path.iterdir()) == []


def test_classes_that_do_not_fit(tmp_path):
    model = replace(learnt(Finetune), tasks=[{"name": "one", "classes": ["a"]}])
    with pytest.raises(ExportError, match="restore classes"):
        export(model, "torch", tmp_path / "model.pt2", pictures(model))


def test_adapters_of_a_method_without_updates(tmp_path):
    with pytest.raises(ExportError, match=r"--to peft: isolation has no low-rank updates; export it --to torch"):
        export(model := learnt(Isolation), "peft", tmp_path / "adapters", pictures(model))
    assert list(tmp_path.iterdir()) == []


def test_adapters_of_a_grouped_convolution(tmp_path):
    shape = {"cardinality": 2, "base_width": 4}  # groups of 4 channels
    model = learnt(spec={"name": "timm/resnet14t"}, size=32, shape=shape, targets=r"layer1\.0\.conv2")
    with pytest.raises(ExportError, match=r"--to peft: PEFT has no exact LoRA for layer1\.0\.conv2, Conv2d\("):
        export(model, "peft", tmp_path / "adapters", pictures(model))
    assert list(tmp_path.iterdir()) == []


def test_adapters_of_a_layer_that_is_not_called(tmp_path):
    model = TABLES["eva02"]()
    said = r"--to peft: the network uses the weight of blocks\.0\.attn\.qkv without calling the layer.*; export it --to"
    with pytest.raises(ExportError, match=said):
        export(model, "peft", tmp_path / "adapters", pictures(model))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("to", ["torch", "peft"])
def test_a_model_that_is_not_finite_is_not_written(to, tmp_path):
    needs(*(["peft"] if to == "peft" else []))
    model = learnt(Pearl if to == "peft" else Finetune)
    model.method.heads[1].bias.data[0] = float("nan")
    with pytest.raises(ExportError, match="disagrees with the trained one"):
        export(model, to, tmp_path / "model", pictures(model))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("to", ["torch", "peft"])
def test_a_full_disk_leaves_nothing_and_keeps_what_was_there(to, tmp_path, monkeypatch):
    model, out = learnt(Pearl if to == "peft" else Finetune), tmp_path / "model"
    raw = pictures(model)
    export(model, to, out, raw)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        with pytest.raises(PearlError, match=r"model: cannot be written \(No space left on device\)"):
            export(model, to, out, raw, force=True)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_an_export_that_was_killed_loses_nothing_and_leaves_nothing(tmp_path):
    """Between its two renames, which is the worst moment."""
    needs("peft")
    model, out, beside = learnt(), tmp_path / "model", tmp_path / f".model.{'0' * 32}.new"
    export(model, "peft", out, pictures(model))
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    beside.mkdir()
    (beside / MARKER).write_bytes(WORDS)
    out.rename(beside / "replaced-model")
    (beside / "model").mkdir()
    (beside / "model" / "half.safetensors").write_bytes(b"")
    with pytest.raises(ExportError, match="model: exists"):
        export(model, "peft", out, pictures(model))
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_a_torch_that_pickles_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(programs, "pickles", lambda _: ["data/weights/model.pt"])
    with pytest.raises(ExportError, match=r"pickles data/weights/model\.pt of a program; install a newer one"):
        export(model := learnt(Finetune), "torch", tmp_path / "model.pt2", pictures(model))
    assert list(tmp_path.iterdir()) == []
