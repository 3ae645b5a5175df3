"""2-D views, factors and targets: what they mean for the layer's output, and which layers a specification names."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pearl.errors import ConfigError
from pearl.nn.bsconv import SeparableResNet, bsc
from pearl.nn.lowrank import (
    Fold,
    Init,
    Target,
    from_matrix,
    kaiming_factors,
    matrix_shape,
    select_targets,
    svd_factors,
    task_norms,
    to_matrix,
)
from pearl.nn.resnet import ResNet, resnet18
from pearl.nn.timm import timm_backbone
from pearl.testing.tiny import small_vit

FOLDS: list[Fold] = ["spatial", "view", "unfold"]
SHAPES = [
    (5, 7),
    (7, 5),
    (4, 3, 3, 3),
    (3, 4, 1, 1),
    (6, 2, 1, 5),
    (5, 4, 3, 1),
    (3, 2, 7, 7),
    (2, 5, 4, 3),
    (9, 1, 3, 3),
]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# --------------------------------------------------------------------------------------------------- 2-D views


@pytest.mark.parametrize("fold", FOLDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_views_can_be_undone(shape: tuple[int, ...], fold: Fold) -> None:
    weight = normal(*shape)
    matrix = to_matrix(weight, fold)
    assert matrix.shape == matrix_shape(shape, fold)
    assert torch.equal(from_matrix(matrix, shape, fold), weight)
    other = normal(*matrix.shape, seed=1)
    assert torch.equal(to_matrix(from_matrix(other, shape, fold), fold), other)


@pytest.mark.parametrize(
    ("shape", "fold", "expected"),
    [
        ((5, 7), "spatial", (5, 7)),
        ((5, 7), "unfold", (5, 7)),
        ((64, 3, 3, 3), "spatial", (192, 9)),  # the stem of the paper's ResNet-18 saturates at rank 9
        ((64, 3, 3, 3), "view", (192, 9)),
        ((64, 3, 3, 3), "unfold", (64, 27)),
        ((2, 5, 4, 3), "spatial", (8, 15)),
        ((2, 5, 4, 3), "view", (8, 15)),
        ((2, 5, 4, 3), "unfold", (2, 60)),
    ],
)
def test_shapes_of_views(shape: tuple[int, ...], fold: Fold, expected: tuple[int, int]) -> None:
    assert matrix_shape(shape, fold) == expected


@pytest.mark.parametrize("fold", ["view", "unfold"])
@pytest.mark.parametrize("shape", SHAPES)
def test_view_and_unfold_keep_the_order_in_memory(shape: tuple[int, ...], fold: Fold) -> None:
    weight = normal(*shape)
    assert torch.equal(to_matrix(weight, fold).flatten(), weight.flatten())


KERNELS = [(3, 3), (1, 1), (1, 5), (5, 1), (7, 7), (4, 3), (2, 5)]
STEPS = [((1, 1), (0, 0)), ((1, 1), (1, 1)), ((2, 2), (1, 1)), ((2, 3), (0, 2)), ((3, 1), (2, 0))]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("stride", "padding"), STEPS)
def test_spatial_is_a_row_convolution_then_a_column_convolution(
    kernel: tuple[int, int], stride: tuple[int, int], padding: tuple[int, int]
) -> None:
    (kh, kw), out, into, rank = kernel, 6, 4, 3
    a, b, x = normal(rank, into * kw), normal(out * kh, rank, seed=1), normal(2, into, 11, 13, seed=2)
    weight = from_matrix(b @ a, (out, into, kh, kw), "spatial")
    rows = a.reshape(rank, into, 1, kw)
    columns = b.reshape(out, kh, rank).transpose(1, 2)[..., None]
    inner = F.conv2d(x, rows, stride=(1, stride[1]), padding=(0, padding[1]))
    outer = F.conv2d(inner, columns, stride=(stride[0], 1), padding=(padding[0], 0))
    torch.testing.assert_close(outer, F.conv2d(x, weight, stride=stride, padding=padding))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("stride", "padding"), STEPS)
def test_unfold_is_a_convolution_then_a_pointwise_one(
    kernel: tuple[int, int], stride: tuple[int, int], padding: tuple[int, int]
) -> None:
    (kh, kw), out, into, rank = kernel, 6, 4, 3
    a, b, x = normal(rank, into * kh * kw), normal(out, rank, seed=1), normal(2, into, 11, 13, seed=2)
    weight = from_matrix(b @ a, (out, into, kh, kw), "unfold")
    inner = F.conv2d(x, a.reshape(rank, into, kh, kw), stride=stride, padding=padding)
    torch.testing.assert_close(
        F.conv2d(inner, b[:, :, None, None]), F.conv2d(x, weight, stride=stride, padding=padding)
    )


# ----------------------------------------------------------------------------------------------------- factors


def product(a: Tensor, b: Tensor, scale: float = 1.0) -> np.ndarray:
    """scale * B A, in float64."""
    return scale * (b.double() @ a.double()).numpy()


@pytest.mark.parametrize("shape", [(9, 6), (6, 9), (7, 7)])
@pytest.mark.parametrize("rank", [1, 2, 5, 6])
@pytest.mark.parametrize("scale", [2.0, 0.25])
def test_svd_factors_are_the_best_approximation(shape: tuple[int, int], rank: int, scale: float) -> None:
    matrix = normal(*shape)
    a, b = svd_factors(matrix, rank, scale, "svd")
    assert (a.shape, b.shape) == ((rank, shape[1]), (shape[0], rank))
    s = np.linalg.svd(matrix.numpy(), compute_uv=False)
    error = matrix.numpy() - product(a, b, scale)
    assert np.sum(error**2) == pytest.approx(np.sum(s[rank:] ** 2), rel=1e-5, abs=1e-10)  # Eckart and Young
    assert np.linalg.norm(error, 2) == pytest.approx(s[rank] if rank < min(shape) else 0, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("shape", [(9, 6), (6, 9)])
@pytest.mark.parametrize("rank", [1, 4, 6])
def test_svd_paper_has_the_singular_values_in_both_factors(shape: tuple[int, int], rank: int) -> None:
    matrix = normal(*shape)
    a, b = svd_factors(matrix, rank, 2.0, "svd_paper")
    u, s, v = np.linalg.svd(matrix.numpy(), full_matrices=False)
    np.testing.assert_allclose(a.norm(dim=1), s[:rank], rtol=1e-5)
    np.testing.assert_allclose(b.norm(dim=0), s[:rank], rtol=1e-5)
    np.testing.assert_allclose(product(a, b), (u[:, :rank] * s[:rank] ** 2) @ v[:rank], atol=1e-4)


@pytest.mark.parametrize("shape", [(9, 6), (6, 9)])
def test_svd_shares_the_singular_values_between_the_factors(shape: tuple[int, int]) -> None:
    matrix = normal(*shape)
    a, b = svd_factors(matrix, 4, 2.0, "svd")
    s = np.linalg.svd(matrix.numpy(), compute_uv=False)[:4]
    np.testing.assert_allclose(2 * a.norm(dim=1), np.sqrt(s), rtol=1e-5)
    np.testing.assert_allclose(b.norm(dim=0), np.sqrt(s), rtol=1e-5)


@pytest.mark.parametrize("init", ["svd", "svd_paper"])
def test_a_task_vector_of_zeros_gives_factors_of_zeros(init: Init) -> None:
    a, b = svd_factors(torch.zeros(5, 4), 1, 2.0, init)
    assert not a.any()
    assert not product(a, b).any()


@pytest.mark.parametrize(("shape", "rank"), [((30, 400), 20), ((400, 30), 20), ((8, 8), 1)])
def test_kaiming_factors_start_at_no_update(shape: tuple[int, int], rank: int) -> None:
    torch.manual_seed(0)
    a, b = kaiming_factors(shape, rank, like=torch.zeros(1))
    assert (a.shape, b.shape) == ((rank, shape[1]), (shape[0], rank))
    assert a.dtype == b.dtype == torch.float32
    assert not b.any()
    bound = 1 / math.sqrt(shape[1])  # of a linear layer with that many inputs, torch's own start
    assert a.abs().max() <= bound
    if a.numel() > 100:
        assert a.min() < -0.9 * bound
        assert a.max() > 0.9 * bound
        assert float(a.std()) == pytest.approx(bound / math.sqrt(3), rel=0.1)


def test_factors_are_made_on_the_device_of_the_weight() -> None:
    a, b = kaiming_factors((4, 3), 2, like=torch.zeros(4, 3, device="meta"))
    assert (a.device.type, b.device.type) == ("meta", "meta")


# ------------------------------------------------------------------------------------------------ one target


@pytest.mark.parametrize("rows", [(0, 4), (4, 8), (8, 12), (3, 5), (0, 12)])
@pytest.mark.parametrize("width", [(), (5,), (5, 3, 3)])  # a bias, a linear weight, a convolution
def test_an_update_of_some_rows_touches_no_other(rows: tuple[int, int], width: tuple[int, ...]) -> None:
    first, last = rows
    weight, delta = normal(12, *width), normal(last - first, *width, seed=1)
    target = Target("w", tuple(delta.shape), rows, "key")
    expected = weight.clone()
    for i in range(first, last):
        expected[i] = weight[i] + delta[i - first]
    assert torch.equal(target.add(weight, delta), expected)
    assert torch.equal(target.read({"w": weight}), weight[first:last])


def test_an_update_without_rows_is_of_the_whole_weight() -> None:
    weight, delta = normal(4, 3), normal(4, 3, seed=1)
    target = Target("w", (4, 3))
    assert torch.equal(target.add(weight, delta), weight + delta)
    assert target.read({"w": weight}) is weight


def test_labels_of_the_parts_of_a_fused_weight_differ() -> None:
    labels = [target.label for target in select_targets(deit(), ["query", "key", "value"])]
    assert len(set(labels)) == len(labels) == 36


# ------------------------------------------------------------------------------------------- which layers: CNNs


def resnet() -> ResNet:
    return resnet18(32, width=8)


def separable() -> SeparableResNet:
    return bsc(32, width=8)


def names(backbone: nn.Module, spec: str | list[str] = "auto") -> list[str]:
    return [target.label for target in select_targets(backbone, spec)]


BLOCK, WIDER = ["conv1", "conv2"], ["conv1", "conv2", "downsample.0"]
RESNET = [
    "conv1",
    *[f"layer1.{block}.{conv}" for block in (0, 1) for conv in BLOCK],
    *[f"layer{s}.{block}.{conv}" for s in (2, 3, 4) for block in (0, 1) for conv in (BLOCK if block else WIDER)],
]
SEPARABLE = ["conv1", *[f"layer{s}.{block}.{conv}" for s in (1, 2, 3) for block in (0, 1) for conv in BLOCK]]


def test_resnet18_has_20_convolutions_in_order() -> None:
    assert len(RESNET) == 20
    assert names(resnet()) == names(resnet(), "conv") == [f"{layer}.weight" for layer in RESNET]
    assert names(resnet(), "pointwise") == [f"layer{s}.0.downsample.0.weight" for s in (2, 3, 4)]
    assert not any(target.dense for target in select_targets(resnet()))


def test_the_separable_network_has_13_pairs_and_a_shortcut() -> None:
    assert len(SEPARABLE) == 13
    pointwise, depthwise = ([f"{layer}.{kind}.weight" for layer in SEPARABLE] for kind in ("pointwise", "depthwise"))
    shortcut = "layer1.0.downsample.0.weight"
    low_rank = [*pointwise[:3], shortcut, *pointwise[3:]]
    assert names(separable(), "pointwise") == names(separable(), "conv") == low_rank
    assert names(separable(), "depthwise") == depthwise
    assert sorted(names(separable())) == sorted([*low_rank, *depthwise])
    dense = [target.label for target in select_targets(separable()) if target.dense]
    assert dense == depthwise


def test_grouped_convolutions_are_targets_by_name_only() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 8, 3, groups=4))
    assert names(net, "^1") == ["1.weight"] and not select_targets(net, "^1")[0].dense
    assert names(net, "conv") == ["0.weight"]


def test_depthwise_means_one_filter_per_channel() -> None:
    net = nn.Sequential(
        nn.Conv2d(4, 4, 3, groups=4),
        nn.Conv2d(4, 8, 3, groups=4),  # two filters per channel
        nn.Conv2d(8, 8, 3, groups=2),
        nn.Conv2d(8, 1, 1),
        nn.Conv2d(4, 8, 1, groups=2),
        nn.Conv2d(1, 1, 3),  # one channel: depthwise and dense are the same, low-rank is allowed
    )
    assert names(net, "depthwise") == ["0.weight"]
    assert names(net, "conv") == ["3.weight", "5.weight"]
    assert names(net, "pointwise") == ["3.weight"]


def test_targets_know_the_shapes_of_their_weights() -> None:
    for net in (resnet(), separable(), deit()):
        weights = dict(net.named_parameters())
        for target in select_targets(net):
            assert target.shape == tuple(target.read(weights).shape)


def test_a_timm_cnn_offers_its_convolutions() -> None:
    net = timm_backbone("mobilenetv3_small_100", 64)
    convolutions = [name for name, weight in net.named_parameters() if weight.ndim == 4]
    depthwise = [name for name in convolutions if "conv_dw" in name]
    others = [name for name in convolutions if "conv_dw" not in name]
    assert (len(depthwise), len(others)) == (11, 42)
    assert names(net, "depthwise") == depthwise
    assert names(net, "conv") == others
    assert names(net) == convolutions
    assert names(net, "pointwise") == [name for name in others if name != "conv_stem.weight"]


# ------------------------------------------------------------------------------------- which layers: transformers


def deit() -> nn.Module:
    return timm.create_model("deit_tiny_patch16_224", num_classes=0, img_size=32)


@pytest.mark.parametrize(("part", "rows"), [("query", (0, 192)), ("key", (192, 384)), ("value", (384, 576))])
def test_projections_are_slices_of_a_fused_layer(part: str, rows: tuple[int, int]) -> None:
    expected = [Target(f"blocks.{block}.attn.qkv.weight", (192, 192), rows, part, dense=False) for block in range(12)]
    assert list(select_targets(deit(), part)) == expected


def test_a_transformer_adapts_its_keys_unless_told_otherwise() -> None:
    assert names(deit()) == names(deit(), "key") == [f"blocks.{block}.attn.qkv.weight:key" for block in range(12)]


@pytest.mark.parametrize(
    ("part", "changed"), [("query", [True, False]), ("key", [False, True]), ("value", [False, False])]
)
def test_a_slice_is_the_projection_it_is_named_after(part: str, changed: list[bool]) -> None:
    net, x = deit().eval(), normal(1, 3, 32, 32).float()
    attention = net.blocks[0].attn
    seen: dict[str, Tensor] = {}
    for name in ("q_norm", "k_norm"):  # identities that timm puts behind queries and keys
        getattr(attention, name).register_forward_hook(lambda _, inputs, __, name=name: seen.update({name: inputs[0]}))
    features = net(x)
    before = dict(seen)
    target = select_targets(net, part)[0]
    with torch.no_grad():
        attention.qkv.weight.copy_(target.add(attention.qkv.weight, normal(*target.shape).float()))
    assert not torch.allclose(net(x), features, atol=1e-3)
    assert [not torch.allclose(seen[name], before[name], atol=0.1) for name in ("q_norm", "k_norm")] == changed


@pytest.mark.parametrize(
    "layers", [["query", "key", "value"], ["q_proj", "k_proj", "v_proj"], ["to_q", "to_k", "to_v"]]
)
def test_separate_projections_are_found_by_their_names(layers: list[str]) -> None:
    net = nn.ModuleDict({name: nn.Linear(4, 6) for name in layers})
    query, key, value = (f"{name}.weight" for name in layers)
    assert select_targets(net) == select_targets(net, "key") == (Target(key, (6, 4)),)
    assert names(net, ["value", "query"]) == [query, value]


# ---------------------------------------------------------------------------------------- words, lists, patterns


def blocks(*layers: str) -> list[str]:
    """Those layers in each block of the transformer."""
    return [f"blocks.{block}.{layer}" for block in range(12) for layer in layers]


@pytest.mark.parametrize(
    ("net", "spec", "expected"),
    [
        (deit, ["value", "query", "value"], blocks("attn.qkv.weight:query", "attn.qkv.weight:value")),
        (deit, ["mlp.fc1", "key"], blocks("attn.qkv.weight:key", "mlp.fc1.weight")),
        (deit, r"^blocks\.(0|11)\.attn\.proj", ["blocks.0.attn.proj.weight", "blocks.11.attn.proj.weight"]),
        (deit, "conv", ["patch_embed.proj.weight"]),
        (deit, "linear", blocks("attn.qkv.weight", "attn.proj.weight", "mlp.fc1.weight", "mlp.fc2.weight")),
        (resnet, ["pointwise", "^conv1"], ["conv1.weight", *[f"layer{s}.0.downsample.0.weight" for s in (2, 3, 4)]]),
        (resnet, ["layer1", "layer1.0"], [f"layer1.{b}.{c}.weight" for b in (0, 1) for c in BLOCK]),
        (separable, "layer1.*depthwise", [f"layer1.{b}.{c}.depthwise.weight" for b in (0, 1) for c in BLOCK]),
    ],
)
def test_words_and_patterns_combine_in_the_order_of_the_network(
    net: Callable[[], nn.Module], spec: str | list[str], expected: list[str]
) -> None:
    assert names(net(), spec) == expected


def test_a_depthwise_filter_is_dense_by_whatever_word() -> None:
    assert all(target.dense for target in select_targets(separable(), r"\.depthwise\."))


@pytest.mark.parametrize(
    ("net", "spec", "says"),
    [
        (resnet, "pointwize", "'pointwize' matches no layer; did you mean 'pointwise'?"),
        (resnet, ["conv", "poinwise"], "'poinwise' matches no layer; did you mean 'pointwise'?"),
        (resnet, "key", "'key' matches no layer; choose from conv, pointwise"),
        (resnet, ["conv", "depthwise"], "'depthwise' matches no layer"),
        (deit, "kay", "'kay' matches no layer; did you mean 'key'?"),
        (deit, "layer4", "names such as patch_embed.proj.weight ... blocks.11.mlp.fc2.weight"),
        (deit, "(", "'(': not a valid regular expression"),
    ],
)
def test_a_word_that_matches_no_layer_is_an_error(
    net: Callable[[], nn.Module], spec: str | list[str], says: str
) -> None:
    with pytest.raises(ConfigError) as error:
        select_targets(net(), spec)
    assert str(error.value).startswith("method.targets=")
    assert says in str(error.value)


def test_all_is_every_linear_layer_of_a_vit_and_auto_elsewhere() -> None:
    assert names(small_vit(), "all") == names(small_vit(), "linear") != names(small_vit(), "auto")
    assert names(resnet(), "all") == names(resnet(), "auto")


@pytest.mark.parametrize("spec", [["auto"], ["auto", "pointwise"]])
def test_auto_may_stand_in_a_list(spec: list[str]) -> None:
    assert names(resnet(), spec) == names(resnet(), "auto")


# ------------------------------------------------------------------------------------------------- norm layers


@pytest.mark.parametrize(
    ("net", "layers"), [(resnet, 20), (separable, 15)]
)  # separable: stem, 2 in each of 6 blocks, 2 shortcuts
def test_a_cnn_has_its_norm_layers_per_task(net: Callable[[], nn.Module], layers: int) -> None:
    backbone = net()
    parameters, statistics = task_norms(backbone)
    vectors = [name for name, weight in backbone.named_parameters() if weight.ndim == 1]
    other = {"layer1.0.downsample.0.bias"}  # a convolution's
    assert parameters == [name for name in vectors if name not in other]
    assert len(parameters) == 2 * layers
    assert statistics == [name for name, _ in backbone.named_buffers()]
    assert len(statistics) == 3 * layers


def test_norm_layers_of_any_kind_count() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.GroupNorm(2, 4), nn.BatchNorm2d(4, affine=False), nn.LayerNorm(4))
    parameters, statistics = task_norms(net)
    assert parameters == ["1.weight", "1.bias", "3.weight", "3.bias"]
    assert statistics == ["2.running_mean", "2.running_var", "2.num_batches_tracked"]


def test_a_transformer_shares_its_norm_layers() -> None:
    assert task_norms(deit()) == ([], [])
