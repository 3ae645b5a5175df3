"""Backbones against other libraries' and plain convolutions, weight files, and sub-networks merged by hand."""

import copy
import io
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import timm
import torch
import torch.nn.functional as F
import torchvision
from timm.models.vision_transformer import checkpoint_filter_fn
from torch import Tensor, nn

from pearl.data.augment import View
from pearl.data.batches import Batch, Task
from pearl.errors import ConfigError, PearlError, WeightsError
from pearl.methods.base import Method, Phase
from pearl.methods.bounds.finetune import Finetune
from pearl.methods.bounds.isolation import Isolation
from pearl.methods.bounds.joint import Joint
from pearl.methods.pearl import Pearl
from pearl.nn.bsconv import SeparableBlock
from pearl.nn.lowrank import Fold
from pearl.nn.rank_rules import EnergyRule, FixedRule
from pearl.nn.resnet import resnet18
from pearl.nn.timm import timm_backbone
from pearl.nn.weights import load_weights
from pearl.settings.parts import BACKBONES
from pearl.settings.sections import ImagesConfig
from pearl.storage.checkpoint import snapshot, write_part

NARROW: dict[str, dict[str, Any]] = {
    "resnet": {"name": "resnet18", "width": 8},
    "bsc": {"name": "bsc", "width": 8},
    "deit": {"name": "timm/deit_tiny_patch16_224"},
    "vit": {"name": "timm/test_vit"},  # 6 blocks of width 64
    "convnext": {"name": "timm/test_convnext"},
    "mobilenet": {"name": "timm/mobilenetv3_small_050"},
    "mobilevit": {"name": "timm/mobilevit_xxs"},  # attention, and BatchNorm
}


def build(net: str, seed: int = 0, size: int = 32) -> nn.Module:
    torch.manual_seed(seed)
    return BACKBONES.build(NARROW[net], size)


def images(count: int = 4, height: int = 32, width: int = 32, seed: int = 0) -> Tensor:
    return torch.randn(count, 3, height, width, generator=torch.Generator().manual_seed(seed))


def randomise(net: nn.Module, seed: int = 0) -> nn.Module:
    """Other values in every parameter and statistic, so that none of them can be left out unnoticed."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, tensor in net.state_dict().items():
            if name.endswith("running_var"):
                tensor.uniform_(0.5, 1.5)
            elif tensor.is_floating_point():
                tensor.add_(0.1 * torch.randn_like(tensor))
    return net


def same(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


# ------------------------------------------------------------------------------------------------------- shapes


@pytest.mark.parametrize(
    ("net", "dim", "height", "width"),
    [
        *[(net, 64, *size) for net in ("resnet", "bsc") for size in ((32, 32), (33, 47), (9, 8), (1, 1))],
        ("deit", 192, 32, 32),
        ("mobilenet", 1024, 61, 75),
    ],
)
def test_features_are_one_row_an_image(net: str, dim: int, height: int, width: int) -> None:
    backbone = build(net).eval()
    features = backbone(images(3, height, width))
    assert features.shape == (3, dim)
    assert backbone.dim == dim
    assert features.isfinite().all()
    assert not torch.allclose(features[0], features[1])


@pytest.mark.parametrize(("size", "entry", "end"), [(32, 32, 4), (33, 33, 5), (64, 64, 8)])
def test_the_cifar_stem_keeps_the_size(size: int, entry: int, end: int) -> None:
    assert sides(resnet18(size, width=8, stem="cifar"), size) == (entry, end)


@pytest.mark.parametrize(("size", "entry", "end"), [(32, 8, 1), (33, 9, 2), (64, 16, 2), (224, 56, 7)])
def test_the_imagenet_stem_divides_it_by_4(size: int, entry: int, end: int) -> None:
    assert sides(resnet18(size, width=8, stem="imagenet"), size) == (entry, end)


def sides(net: nn.Module, size: int) -> tuple[int, int]:
    """Sides of the feature maps that enter the first stage and leave the last."""
    seen = []
    net.layer1.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0].shape[-1]))
    net.layer4.register_forward_hook(lambda _, __, output: seen.append(output.shape[-1]))
    net(images(2, size, size))
    return seen[0], seen[1]


# ------------------------------------------------------------------------------------- against other implementations


@pytest.fixture(scope="module")
def torchvision_net() -> nn.Module:
    return randomise(torchvision.models.resnet18()).eval()


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_resnet18_is_torchvision_s(torchvision_net: nn.Module, suffix: str, tmp_path: Path) -> None:
    file = tmp_path / f"resnet18{suffix}"
    state = torchvision_net.state_dict()
    assert "fc.weight" in state
    if suffix == ".pth":
        torch.save(state, file)
    else:
        safetensors.torch.save_file(state, file)
    ours = BACKBONES.build({"name": "resnet18", "stem": "imagenet", "weights": str(file)}, 64).eval()
    theirs = copy.deepcopy(torchvision_net)
    theirs.fc = nn.Identity()
    assert ours.pretrained
    ours, theirs = ours.double(), theirs.double()  # other kernels round differently, and these features are large
    for size in ((64, 64), (75, 51)):
        x = images(2, *size).double()
        same(ours(x), theirs(x))


def normed(x: Tensor, norm: nn.BatchNorm2d) -> Tensor:
    """Batch normalisation in eval mode, from its formula."""
    mean, var, gamma, beta = (v[:, None, None] for v in (norm.running_mean, norm.running_var, norm.weight, norm.bias))
    return (x - mean) / torch.sqrt(var + norm.eps) * gamma + beta


def separable(x: Tensor, pointwise: Tensor, depthwise: Tensor, stride: int) -> Tensor:
    """1x1 as a matrix, then every channel with its own 3x3 filter."""
    mixed = torch.einsum("oi,bihw->bohw", pointwise[:, :, 0, 0], x)
    channels = [F.conv2d(mixed[:, [c]], depthwise[[c]], stride=stride, padding=1) for c in range(mixed.shape[1])]
    return torch.cat(channels, dim=1)


@pytest.mark.parametrize(("inputs", "outputs", "stride"), [(6, 6, 1), (4, 8, 1), (4, 8, 2)])
def test_the_separable_block_is_its_convolutions(inputs: int, outputs: int, stride: int) -> None:
    block = randomise(SeparableBlock(inputs, outputs, stride)).double().eval()
    x = torch.randn(2, inputs, 9, 8, dtype=torch.float64)
    ours = block(x)
    out = separable(x, block.conv1.pointwise.weight, block.conv1.depthwise.weight, stride)
    out = normed(out, block.bn1).clamp(min=0)
    out = normed(separable(out, block.conv2.pointwise.weight, block.conv2.depthwise.weight, 1), block.bn2)
    if stride == 2:
        x = normed(x[:, [0, 1, 2, 3, 0, 1, 2, 3], ::2, ::2], block.downsample[1])
    elif inputs != outputs:
        weight, bias = block.downsample[0].weight[:, :, 0, 0], block.downsample[0].bias
        x = torch.einsum("oi,bihw->bohw", weight, x) + bias[:, None, None]
    torch.testing.assert_close(ours, (out + x).clamp(min=0))


@pytest.mark.parametrize(("stored", "size"), [(224, 64), (32, 96), (64, 64)])
def test_position_embeddings_are_resampled_as_timm_does(stored: int, size: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    state = timm.create_model("deit_tiny_patch16_224", img_size=stored).state_dict()
    state["pos_embed"] = torch.randn_like(state["pos_embed"])
    safetensors.torch.save_file(state, tmp_path / "deit.safetensors")
    ours = timm_backbone("deit_tiny_patch16_224", size, weights=str(tmp_path / "deit.safetensors")).eval()
    theirs = timm.create_model("deit_tiny_patch16_224", img_size=size).eval()
    theirs.load_state_dict(checkpoint_filter_fn(state, theirs))
    theirs.reset_classifier(0)
    assert torch.equal(ours.pos_embed, theirs.pos_embed)
    x = images(2, size, size)
    same(ours(x), theirs(x))


def small_vit(**options: Any) -> nn.Module:
    return timm.create_model("test_vit", **options)


def test_position_embeddings_without_a_class_token_are_resampled(tmp_path: Path) -> None:
    state = small_vit(img_size=64, no_embed_class=True).state_dict()
    safetensors.torch.save_file(state, tmp_path / "vit.safetensors")
    ours = small_vit(img_size=32, no_embed_class=True, num_classes=0)
    load_weights(ours, str(tmp_path / "vit.safetensors"))
    assert torch.equal(ours.pos_embed, checkpoint_filter_fn(state, ours)["pos_embed"])


def test_position_embeddings_of_no_square_grid_are_misshapen(tmp_path: Path) -> None:
    state = small_vit(img_size=64).state_dict()
    state["pos_embed"] = state["pos_embed"][:, :-1].contiguous()
    safetensors.torch.save_file(state, tmp_path / "vit.safetensors")
    with pytest.raises(WeightsError, match=r"pos_embed is \(1, 16, 64\)"):
        load_weights(small_vit(img_size=32, num_classes=0), str(tmp_path / "vit.safetensors"))


def test_a_norm_layer_in_the_head_is_not_a_classifier(tmp_path: Path) -> None:
    theirs = randomise(timm.create_model("test_convnext")).eval()
    safetensors.torch.save_file(theirs.state_dict(), tmp_path / "convnext.safetensors")
    ours = timm_backbone("test_convnext", 32, weights=str(tmp_path / "convnext.safetensors")).eval()
    theirs.reset_classifier(0)
    same(ours(images()), theirs(images()))


def test_a_weight_file_takes_the_place_of_pretrained_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = randomise(timm.create_model("test_vit", img_size=32))
    safetensors.torch.save_file(theirs.state_dict(), tmp_path / "vit.safetensors")
    monkeypatch.setattr("pearl.nn.timm.hub", lambda: pytest.fail("nothing is to be downloaded"))
    ours = timm_backbone("test_vit", 32, pretrained=True, weights=str(tmp_path / "vit.safetensors"))
    assert torch.equal(ours.state_dict()["cls_token"], theirs.state_dict()["cls_token"]) and ours.pretrained


# ----------------------------------------------------------------------------------------- what timm cannot provide


@pytest.mark.parametrize(
    ("model", "size", "options", "says"),
    [
        ("deit_tiny_patch16_22", 32, {}, "did you mean 'deit_tiny_patch16_224'?"),
        ("deit_tiny_patch16_224", 40, {}, "images.size=40: deit_tiny_patch16_224 cuts patches of 16 pixels; use 32"),
        ("deit_tiny_patch16_224", 7, {}, "images.size=7: deit_tiny_patch16_224 cuts patches of 16 pixels; use 16"),
        ("test_convnext", 2, {}, "images.size=2: test_convnext cannot take it"),
    ],
)  # fmt: skip
def test_networks_that_timm_cannot_build(model: str, size: int, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as error:
        timm_backbone(model, size, **options)
    assert says in str(error.value)


def test_weights_that_cannot_be_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    client = logging.getLogger("huggingface_hub.utils")

    def offline(*_: Any, pretrained: bool, **__: Any) -> nn.Module:
        assert client.isEnabledFor(logging.WARNING) is not pretrained  # it would tell every attempt
        raise OSError("no route to host")

    monkeypatch.setattr(timm, "create_model", offline)
    with pytest.raises(WeightsError, match=r"cannot be downloaded.*give a local file: backbone.weights=FILE"):
        timm_backbone("deit_tiny_patch16_224", 32, pretrained=True)
    with pytest.raises(OSError, match="no route"):  # not a matter of weights
        timm_backbone("deit_tiny_patch16_224", 32)


# --------------------------------------------------------------------------------------------------- weight files


@pytest.fixture
def state() -> dict[str, Tensor]:
    return randomise(build("resnet"), seed=1).state_dict()


def test_everything_is_loaded(state: dict[str, Tensor], tmp_path: Path) -> None:
    safetensors.torch.save_file(state, tmp_path / "w.safetensors")
    net = build("resnet")
    assert not net.pretrained
    load_weights(net, str(tmp_path / "w.safetensors"))
    assert net.pretrained
    assert all(torch.equal(tensor, state[name]) for name, tensor in net.state_dict().items())


def test_each_tensor_that_does_not_fit_is_named(state: dict[str, Tensor], tmp_path: Path) -> None:
    del state["layer2.0.conv1.weight"], state["bn1.bias"]
    state |= {"layer5.weight": torch.zeros(2), "neck": torch.zeros(1), "conv1.weight": torch.zeros(8, 3, 7, 7)}
    safetensors.torch.save_file(state, tmp_path / "w.safetensors")
    net = build("resnet")
    before = snapshot(net.state_dict())
    with pytest.raises(WeightsError) as error:
        load_weights(net, str(tmp_path / "w.safetensors"))
    for says in (
        str(tmp_path / "w.safetensors"),
        "layer2.0.conv1.weight is missing",
        "bn1.bias is missing",
        "layer5.weight is not in the network",
        "neck is not in the network",
        "conv1.weight is (8, 3, 7, 7), the network needs (8, 3, 3, 3)",
    ):
        assert says in str(error.value)
    assert str(error.value).count(" is ") == 5
    assert not net.pretrained
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())


@pytest.mark.parametrize("head", ["fc", "head", "classifier", "head_dist"])
def test_a_classifier_and_missing_counters_do_not_matter(head: str, state: dict[str, Tensor], tmp_path: Path) -> None:
    state = {name: tensor for name, tensor in state.items() if not name.endswith("num_batches_tracked")}
    state |= {f"{head}.weight": torch.zeros(5, 64), f"{head}.bias": torch.zeros(5)}
    safetensors.torch.save_file(state, tmp_path / "w.safetensors")
    load_weights(net := build("resnet"), str(tmp_path / "w.safetensors"))
    assert torch.equal(net.layer4[1].bn2.running_var, state["layer4.1.bn2.running_var"])


@pytest.mark.parametrize("key", ["state_dict", "model"])
def test_training_checkpoints_hold_their_weights_one_level_down(
    key: str, state: dict[str, Tensor], tmp_path: Path
) -> None:
    torch.save({"epoch": 7, key: state}, tmp_path / "w.pth")
    load_weights(net := build("resnet"), str(tmp_path / "w.pth"))
    assert torch.equal(net.conv1.weight, state["conv1.weight"])


def test_a_run_directory_gives_its_reference(tmp_path: Path) -> None:
    method = taught(Pearl(build("resnet", seed=3)))
    write_part(tmp_path / "run" / "reference", snapshot(method.state_dict()), {})
    with pytest.raises(WeightsError, match="no task is finished"):
        load_weights(build("resnet"), str(tmp_path / "run"))
    write_part(tmp_path / "run" / "tasks" / "000-task1", {}, {})
    load_weights(net := build("resnet"), str(tmp_path / "run"))
    same(net.eval()(images()), method.backbone.eval()(images()))
    with pytest.raises(PearlError, match="neither a model nor a run"):
        load_weights(net, str(tmp_path))


@pytest.mark.parametrize("kind", [Isolation, Joint])
def test_a_run_without_a_reference_network_is_refused(kind: type[Method], tmp_path: Path) -> None:
    write_part(tmp_path / "reference", snapshot(taught(kind(build("resnet"))).state_dict()), {})
    write_part(tmp_path / "tasks" / "000-task1", {}, {})
    with pytest.raises(WeightsError, match="its method has no reference network"):
        load_weights(build("resnet"), str(tmp_path))


def test_files_are_looked_for_in_two_places(
    state: dict[str, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PEARL_DATA", str(tmp_path / "store"))
    with pytest.raises(WeightsError) as error:
        load_weights(build("resnet"), "nets/w.pth")
    assert f"tried nets/w.pth and {tmp_path / 'store' / 'nets' / 'w.pth'}" in str(error.value)
    with pytest.raises(WeightsError, match=r"tried /nowhere/w\.pth;"):
        load_weights(build("resnet"), "/nowhere/w.pth")
    (tmp_path / "store" / "nets").mkdir(parents=True)
    torch.save(state, tmp_path / "store" / "nets" / "w.pth")
    load_weights(net := build("resnet"), "nets/w.pth")
    assert torch.equal(net.conv1.weight, state["conv1.weight"])


class Code:
    """Makes a directory when it is unpickled."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.directory),)


@pytest.mark.parametrize("suffix", [".pth", ".pt", ".bin", ".safetensors"])
def test_code_in_a_file_is_refused_and_does_not_run(suffix: str, state: dict[str, Tensor], tmp_path: Path) -> None:
    file, trace = tmp_path / f"w{suffix}", tmp_path / "trace"
    torch.save({**state, "neck": Code(trace)}, file)
    with pytest.raises(WeightsError, match=f"w{suffix}: .*give an? (intact )?\\.safetensors file"):
        load_weights(build("resnet"), str(file))
    assert not trace.exists()
    torch.load(io.BytesIO(file.read_bytes()), weights_only=False)
    assert trace.exists()  # it would have run


def cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        *[(name, cut) for name in ("w.safetensors", "w.pth")],
        *[(name, lambda _: b"") for name in ("w.safetensors", "w.pth")],
        *[(name, lambda _: b"<html>404</html>\n" * 9) for name in ("w.safetensors", "w.pth")],
        *[(name, lambda _: bytes(range(256)) * 9) for name in ("w.safetensors", "w.pth")],
    ],
)
def test_damaged_files_are_refused(
    name: str, damage: Callable[[bytes], bytes], state: dict[str, Tensor], tmp_path: Path
) -> None:
    file = tmp_path / name
    if file.suffix == ".pth":
        torch.save(state, file)
    else:
        safetensors.torch.save_file(state, file)
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(WeightsError, match=f"{name}: .*give an? (intact )?\\.safetensors file"):
        load_weights(build("resnet"), str(file))


@pytest.mark.parametrize("content", [[1, 2], {"lr": 0.1}, torch.zeros(3), {"state_dict": {"epoch": 3}}, None])
def test_a_file_without_named_tensors_is_refused(content: Any, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "w.pth")
    with pytest.raises(WeightsError, match=r"w.pth: is not a mapping of names to plain tensors"):
        load_weights(build("resnet"), str(tmp_path / "w.pth"))


# ------------------------------------------------------------------------------------------------- after training


def task_of(t: int, classes: tuple[int, ...]) -> Task:
    """The task at that place among tasks of so many classes, its images black."""
    first, count = sum(classes[:t]), classes[t]
    labels, view = np.arange(first, first + count), View(ImagesConfig(size=32))
    raw = np.zeros((count, 32, 32, 3), np.uint8)
    return Task(t, f"{t}", tuple(map(str, labels)), first, raw, labels, view, torch.device("cpu"))


@torch.no_grad()
def move(phase: Phase) -> None:
    for parameter in phase.trained:
        parameter.add_(0.05 * torch.randn_like(parameter))


@torch.no_grad()
def taught(method: Method, classes: tuple[int, ...] = (3, 2, 4), start: int = 0) -> Method:
    """As if trained from task `start` on: a phase moves its parameters at random, its loss the running statistics."""
    torch.manual_seed(start)
    method.train()
    for t in range(start, len(classes)):
        task = task_of(t, classes)
        for phase in method.learn(task):
            move(phase)
            for _ in range(3):
                phase.loss(Batch(0.5 + torch.randn(len(task), 3, 32, 32), task.labels, torch.arange(len(task))))
    return method.eval()


def merged_by_hand(method: Pearl, t: int) -> nn.Module:
    """The backbone with task t's stored tensors put into it, number by number."""
    net, stored = copy.deepcopy(method.backbone), method.state_dict()
    own = net.state_dict()
    for key, value in stored.items():
        container, _, path = key.partition(".")
        if container not in ("tensors", "statistics") or not path.startswith(f"{t}/"):
            continue
        _, kind, *parts = path.split("/")
        name, _, part = ".".join(parts).partition(":")
        if kind in ("norm", "dense"):
            own[name].copy_(value)
            continue
        if kind != "B":
            continue
        a, b = stored[key.replace("/B/", "/A/")].double().numpy(), value.double().numpy()
        scale = 2.0 if method.alpha == "2r" else method.alpha / len(a)
        weight = own[name]
        rows = slice(None)
        if part:
            size = len(weight) // 3
            at = ["query", "key", "value"].index(part) * size
            rows = slice(at, at + size)
        weight[rows] += torch.from_numpy(scale * unfolded(b @ a, tuple(weight[rows].shape), method.fold))
        if method.lora_bias and weight.ndim == 2:
            inner, outer = (stored[key.replace("/B/", f"/{ab}/")].double().numpy() for ab in "ab")
            own[name.replace("weight", "bias")][rows] += torch.from_numpy(scale * (b @ inner + outer))
    return net.eval()


def unfolded(matrix: np.ndarray, shape: tuple[int, ...], fold: Fold) -> np.ndarray:
    """The weight whose 2-D view is this matrix."""
    if len(shape) == 2:
        return matrix
    _, into, kh, kw = shape
    o, i, y, x = np.indices(shape)
    memory = ((o * into + i) * kh + y) * kw + x
    rows_and_columns = {
        "spatial": (o * kh + y, i * kw + x),
        "view": (memory // (into * kw), memory % (into * kw)),
        "unfold": (o, (i * kh + y) * kw + x),
    }
    return matrix[rows_and_columns[fold]]


SUBNETWORKS: list[tuple[str, dict[str, Any]]] = [
    ("resnet", {"fold": "spatial"}),
    ("resnet", {"fold": "view"}),
    ("resnet", {"fold": "unfold"}),
    ("resnet", {"alpha": 3.0, "rank": FixedRule(r=4)}),
    ("resnet", {"init": "svd"}),
    ("resnet", {"targets": ["pointwise", "layer1"], "reference": "given"}),
    ("bsc", {}),
    ("bsc", {"targets": ["conv", "depthwise", "downsample"], "fold": "view"}),
    ("mobilenet", {}),
    ("convnext", {}),
    ("deit", {"lora_bias": True}),
    ("vit", {"reference": "given"}),
    ("vit", {"targets": ["query", "value"], "lora_bias": True, "alpha": 1.0}),
    ("vit", {"targets": ["linear", "conv"], "lora_bias": True, "fold": "unfold", "rank": FixedRule(r=3)}),
]


@pytest.mark.parametrize(("net", "options"), SUBNETWORKS, ids=str)
def test_a_subnetwork_is_the_backbone_with_merged_weights(net: str, options: dict[str, Any]) -> None:
    method, x = taught(Pearl(build(net), **options)), images()
    with torch.no_grad():
        experts = [expert.forward(x) for expert in method.experts()]
        for t, expert in enumerate(experts):
            head = method.state_dict()
            weight, bias = head[f"heads.blocks.{t}.weight"], head[f"heads.blocks.{t}.bias"]
            expected = F.linear(merged_by_hand(method, t)(x), weight, bias)
            same(method(x, task=t), expected)
            same(expert, expected)
            if t >= method.first_adapted:
                assert (F.linear(method.backbone(x), weight, bias) - expected).abs().max() > 0.01
        same(method(x), torch.cat(experts, dim=1))


@pytest.mark.parametrize(
    ("method", "network"), [(Isolation, "networks.{t}."), (Joint, "network."), (Finetune, "backbone.")]
)
@torch.no_grad()
def test_other_methods_are_ordinary_networks(method: type[Method], network: str) -> None:
    learnt, x = taught(method(build("resnet"))), images()
    stored = learnt.state_dict()
    for t in range(3):
        prefix = network.format(t=t)
        net = build("resnet", seed=1).eval()
        net.load_state_dict({key.removeprefix(prefix): stored[key] for key in stored if key.startswith(prefix)})
        expected = F.linear(net(x), stored[f"heads.blocks.{t}.weight"], stored[f"heads.blocks.{t}.bias"])
        same(learnt(x, task=t), expected)


@pytest.mark.parametrize(
    ("net", "options"),
    [
        *[("resnet", {"fold": fold}) for fold in ("spatial", "view", "unfold")],
        ("resnet", {"alpha": 5.0}),
        ("bsc", {"targets": ["conv", "depthwise", "downsample"]}),
    ],
    ids=str,
)
@torch.no_grad()
def test_svd_goes_on_from_the_probe(net: str, options: dict[str, Any]) -> None:
    method = Pearl(randomise(build(net)), init="svd", rank=EnergyRule(keep=1), reference="given", **options)
    learning = method.learn(task_of(0, (3,)))
    probe = next(learning)
    move(probe)
    *trained, weight, bias = (parameter.clone() for parameter in probe.trained)
    expected = copy.deepcopy(method.backbone).eval()
    for (name, parameter), value in zip(expected.named_parameters(), trained, strict=True):
        if name != "layer1.0.downsample.0.bias":  # a convolution's bias stays the reference's
            parameter.copy_(value)
    assert next(learning).name == "adapt"
    same(method.eval()(images()), F.linear(expected(images()), weight, bias))


@pytest.mark.parametrize("net", ["resnet", "bsc", "vit"])
@torch.no_grad()
def test_kaiming_starts_at_the_reference_with_fresh_norm_layers_and_head(net: str) -> None:
    method = Pearl(randomise(build(net)), reference="given")
    learning = method.learn(task_of(0, (3,)))
    move(probe := next(learning))
    weight, bias = (parameter.clone() for parameter in probe.trained[-2:])
    reference = copy.deepcopy(method.backbone).eval()
    for module in reference.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.reset_parameters()
    adapt = next(learning)
    head = method.heads[0]
    same(method.eval()(images()), head(reference(images())))
    assert not torch.isclose(head.weight, weight).any()
    assert not torch.isclose(head.bias, bias).any()
    assert set(adapt.trained) == {parameter for parameter in method.parameters() if parameter.requires_grad}
    assert not set(adapt.trained) & set(method.backbone.parameters())


LEARNT: list[tuple[type[Method], str, dict[str, Any]]] = [
    (Pearl, "resnet", {}),
    (Pearl, "resnet", {"fold": "unfold", "init": "svd", "reference": "given"}),
    (Pearl, "bsc", {}),
    (Pearl, "deit", {"lora_bias": True, "reference": "given"}),
    *[(method, net, {}) for method in (Isolation, Finetune, Joint) for net in ("resnet", "vit")],
]


@pytest.fixture(scope="module", params=LEARNT, ids=lambda made: f"{made[0].__name__}-{made[1]}-{made[2]}")
def learnt(request: pytest.FixtureRequest) -> tuple[Method, Callable[[], Method]]:
    """A method that has learnt three tasks, and how to make a fresh one of its kind."""
    method, net, options = request.param
    return taught(method(build(net), **options)), lambda: method(build(net, seed=1), **options)


@torch.no_grad()
def test_the_logits_of_an_image_depend_on_no_other(learnt: tuple[Method, Callable[[], Method]]) -> None:
    method, x = learnt[0], images(5)
    together = method(x)
    assert together.shape == (5, 9)
    assert (together[0] - together[1]).abs().max() > 0.001
    same(torch.cat([method(image[None]) for image in x]), together)
    same(torch.cat([method(x, task=t) for t in range(3)], dim=1), together)
    same(torch.cat([expert.forward(x) for expert in method.experts()], dim=1), together)


@torch.no_grad()
def test_a_fresh_object_loads_what_was_learnt(learnt: tuple[Method, Callable[[], Method]]) -> None:
    (method, make), x = learnt, images()
    stored = safetensors.torch.load(safetensors.torch.save(snapshot(method.state_dict())))
    fresh = make()
    fresh.load_state_dict(stored, strict=True)
    assert torch.equal(fresh.eval()(x), method(x))
    assert fresh.size() == method.size()
    assert [fresh.facts(t) for t in range(3)] == [method.facts(t) for t in range(3)]
    with pytest.raises(RuntimeError, match="nothing"):
        make().load_state_dict({**stored, "backbone.nothing": torch.zeros(1)}, strict=True)


def test_a_method_that_has_learnt_takes_other_ranks_from_a_file() -> None:
    other, method = (taught(Pearl(build("resnet"), rank=FixedRule(r=r)), (3, 2)) for r in (4, 2))
    assert other.size() > method.size()
    method.load_state_dict(other.state_dict(), strict=True)
    assert torch.equal(method(images()), other(images()))
    assert method.size() == other.size()


def test_ranks_differ_from_layer_to_layer_and_are_recorded() -> None:
    learnt = taught(Pearl(build("resnet")))
    layers = learnt.facts(2)["layers"]
    stored = learnt.state_dict()
    assert len({layer["rank"] for layer in layers}) > 3
    for layer in layers:
        key = layer["layer"].replace(".", "/")
        out, into, kh, kw = learnt.backbone.get_parameter(layer["layer"]).shape
        assert stored[f"tensors.2/A/{key}"].shape == (layer["rank"], into * kw)
        assert stored[f"tensors.2/B/{key}"].shape == (out * kh, layer["rank"])
        assert layer["full_rank"] == min(out * kh, into * kw)
        assert layer["rows_and_columns"] == out * kh + into * kw


@pytest.mark.parametrize(
    "net",
    [
        "resnet",
        "bsc",
        "deit",
        "mobilevit",
    ],
)
def test_a_new_task_moves_nothing_of_the_earlier_ones(net: str) -> None:
    method = taught(Pearl(build(net), rank=FixedRule(r=2)), (3, 2))
    before = snapshot(method.state_dict())
    after = taught(method, (3, 2, 4), start=2).state_dict()
    assert len(after) > len(before)
    assert [key for key, value in before.items() if not torch.equal(after[key], value)] == []


def test_biases_need_a_layer_with_one() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 8, bias=False))
    net.dim, net.pretrained = 8, True
    with pytest.raises(ConfigError, match=r"1\.weight has no bias to add to; set lora_bias=false"):
        Pearl(net, targets="linear", lora_bias=True)
