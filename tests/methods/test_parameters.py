"""Every parameter count that the paper prints and that needs no training, from our own models.

The paper's isolation cells are truncated to two decimals for ResNet-18 and for ViT and rounded for BSC; the cells of
fixed ranks are rounded.
"""

from collections.abc import Callable, Sequence
from decimal import ROUND_DOWN, ROUND_HALF_UP, Decimal
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pearl.data.augment import View
from pearl.data.batches import Task
from pearl.methods.base import Method
from pearl.methods.bounds.finetune import Finetune
from pearl.methods.bounds.isolation import Isolation
from pearl.methods.bounds.joint import Joint
from pearl.methods.pearl import Pearl
from pearl.nn.bsconv import bsc
from pearl.nn.lowrank import Fold
from pearl.nn.rank_rules import FixedRule
from pearl.nn.resnet import resnet18
from pearl.nn.timm import timm_backbone
from pearl.settings.sections import ImagesConfig

UNUSED = 4_758_528  # parameters in the paper's ViT that its forward pass never read; ours has none of them

# ----------------------------------------------------------------------------------- models without any storage


@cache
def r18() -> nn.Module:
    with torch.device("meta"):
        return resnet18(32)


@cache
def separable() -> nn.Module:
    with torch.device("meta"):
        return bsc(32)


@cache
def vit() -> nn.Module:
    with torch.device("meta"):
        return timm_backbone("vit_base_patch16_224", 224)


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def learn(method: Method, classes: Sequence[int]) -> Method:
    """All that the method makes for tasks of so many classes; the training itself is left out."""
    first = 0
    for t, number in enumerate(classes):
        names = tuple(f"class {label}" for label in range(first, first + number))
        images, labels = np.zeros((0, 32, 32, 3), np.uint8), np.zeros(0, np.int64)
        task = Task(t, f"{t}", names, first, images, labels, View(ImagesConfig(size=32)), torch.device("meta"))
        for _ in method.learn(task):
            pass
        first += number
    return method


def equal(classes: int, tasks: int) -> list[int]:
    """Classes per task."""
    return [classes // tasks] * tasks


@cache
def isolation(backbone: Callable[[], nn.Module], classes: int, tasks: int) -> int:
    return learn(Isolation(backbone()), equal(classes, tasks)).size()


@cache
def fixed(backbone: Callable[[], nn.Module], classes: int, tasks: int, r: int, **options: Any) -> int:
    return learn(Pearl(backbone(), rank=FixedRule(r=r), **options), equal(classes, tasks)).size()


def rounded(parameters: int) -> str:
    """In millions, as printed."""
    return str((Decimal(parameters) / 10**6).quantize(Decimal("0.01"), ROUND_HALF_UP))


def truncated(parameters: int) -> str:
    return str((Decimal(parameters) / 10**6).quantize(Decimal("0.01"), ROUND_DOWN))


# ---------------------------------------------------------------------------------------- backbones without heads


@pytest.mark.parametrize(
    ("backbone", "parameters", "dim"), [(r18, 11_168_832, 512), (separable, 1_254_400, 512), (vit, 85_798_656, 768)]
)
def test_backbones(backbone: Callable[[], nn.Module], parameters: int, dim: int) -> None:
    net = backbone()
    assert (count(net), net.dim) == (parameters, dim)


# ------------------------------------------------------------------ complete isolation (paper, Tables 8 and 10)


@pytest.mark.parametrize(
    ("classes", "tasks", "printed"),
    [(100, 5, "55.89"), (100, 10, "111.73"), (100, 20, "223.42"), (200, 10, "111.79")],  # CIFAR-100, TinyImageNet
)
def test_isolation_resnet18(classes: int, tasks: int, printed: str) -> None:
    assert truncated(isolation(r18, classes, tasks)) == printed


@pytest.mark.parametrize(
    ("classes", "tasks", "printed"), [(100, 5, "6.32"), (100, 10, "12.60"), (100, 20, "25.14"), (200, 10, "12.65")]
)
def test_isolation_bsc(classes: int, tasks: int, printed: str) -> None:
    assert rounded(isolation(separable, classes, tasks)) == printed


def test_isolation_vit() -> None:
    assert truncated(isolation(vit, 200, 10) + 10 * UNUSED) == "905.72"  # ImageNet-R


@pytest.mark.parametrize(("tasks", "printed"), [(5, "452.86"), (20, "1811.44")])
def test_isolation_vit_of_5_and_20_tasks_is_printed_as_a_multiple_of_10(tasks: int, printed: str) -> None:
    """Heads of 40 and 10 classes would give 452.93 and 1811.29; the paper scales the cell of 10 tasks."""
    assert Decimal(printed) == Decimal("905.72") * tasks / 10
    ours = isolation(vit, 200, tasks) + tasks * UNUSED
    assert truncated(ours) == {5: "452.93", 20: "1811.29"}[tasks]
    assert ours == pytest.approx(float(printed) * 1e6, rel=2e-4)


# ------------------------------------------------------------------------------------ fixed ranks (paper, Table 4)


@pytest.mark.parametrize(
    ("r", "printed"),
    [(2, "11.44"), (4, "11.63"), (8, "12.00"), (16, "12.74"), (32, "14.21")],  # the paper prints 12.01 at rank 8
)
@pytest.mark.parametrize("fold", ["spatial", "view"])
def test_fixed_rank_resnet18(r: int, printed: str, fold: Fold) -> None:
    assert rounded(fixed(r18, 100, 5, r, fold=fold)) == printed


@pytest.mark.parametrize(("r", "printed"), [(2, "11.44"), (4, "11.63"), (8, "12.01"), (16, "12.74"), (32, "14.21")])
def test_unfolded_kernels_would_not_give_the_printed_counts(r: int, printed: str) -> None:
    matrices = [(w.shape[0], w[0].numel()) for w in r18().parameters() if w.ndim == 4]
    low_rank = sum(min(r, *matrix) * sum(matrix) for matrix in matrices)
    ours = fixed(r18, 100, 5, r, fold="unfold")
    assert ours == 11_168_832 + 5 * 513 * 20 + 4 * (9_600 + low_rank)
    assert ours / 1e6 > float(printed) + 0.1


@pytest.mark.parametrize(("r", "printed"), [(2, "1.86"), (4, "1.98"), (8, "2.23"), (16, "2.73"), (32, "3.72")])
def test_fixed_rank_bsc(r: int, printed: str) -> None:
    assert rounded(fixed(separable, 200, 10, r)) == printed


@pytest.mark.parametrize(
    ("classes", "tasks", "printed"), [(100, 5, 1.63), (100, 10, 1.89), (100, 20, 2.30), (200, 10, 2.30)]
)
def test_ranks_between_1_and_32_can_give_the_printed_counts_of_bsc(classes: int, tasks: int, printed: float) -> None:
    assert fixed(separable, classes, tasks, 1) < printed * 1e6 < fixed(separable, classes, tasks, 32)


@pytest.mark.parametrize(("r", "printed"), [(2, "91.17"), (4, "91.54"), (8, "92.28"), (16, "93.75"), (32, "96.71")])
def test_fixed_rank_vit(r: int, printed: str) -> None:
    ours = fixed(vit, 200, 10, r, lora_bias=True, reference="given")
    assert rounded(ours + UNUSED) == printed


# --------------------------------------------------------------------------------------- what the counts are made of


def test_a_rank_of_resnet18_costs_23241_until_the_stem_saturates() -> None:
    sizes = {r: fixed(r18, 100, 5, r, fold="spatial") for r in (1, 2, 8, 9, 10, 11)}
    assert [(sizes[2] - sizes[1]) / 4, (sizes[9] - sizes[8]) / 4] == [23_241, 23_241]  # task 1 has no updates
    stem = 64 * 3 + 3 * 3
    assert [(sizes[10] - sizes[9]) / 4, (sizes[11] - sizes[10]) / 4] == [23_241 - stem, 23_241 - stem]


def test_a_task_of_resnet18_has_norm_layers_and_a_head_beside_its_ranks() -> None:
    one, two = (fixed(r18, 20 * tasks, tasks, 2) for tasks in (1, 2))
    assert one == 11_168_832 + 513 * 20
    assert two - one == 2 * 23_241 + 9_600 + 513 * 20


@pytest.mark.parametrize(("bias", "per_rank", "constant"), [(False, 1536, 0), (True, 1537, 768)])
@pytest.mark.parametrize("r", [1, 7])
def test_a_task_of_vit_has_its_ranks_and_a_head(bias: bool, per_rank: int, constant: int, r: int) -> None:
    one, two = (fixed(vit, 20 * tasks, tasks, r, lora_bias=bias, reference="given") for tasks in (1, 2))
    assert two - one == 12 * (per_rank * r + constant) + 769 * 20
    assert one - (two - one) == 85_798_656


def test_a_task_of_bsc_has_its_own_depthwise_filters() -> None:
    net = separable()
    pointwise, depthwise, vectors = 0, 0, 0
    for name, weight in net.named_parameters():
        if weight.ndim == 1:
            vectors += weight.numel() * (name != "layer1.0.downsample.0.bias")  # of a convolution, so not per task
        elif "depthwise" not in name:
            pointwise += min(3, *weight.shape[:2]) * (weight.shape[0] + weight.shape[1])
        else:
            depthwise += weight.numel()
    one, two = (fixed(separable, 20 * tasks, tasks, 3) for tasks in (1, 2))
    assert two - one == pointwise + depthwise + vectors + 513 * 20


@pytest.mark.parametrize("method", [Finetune, Joint])
def test_one_network_for_all_tasks_is_counted_once(method: type[Method]) -> None:
    assert learn(method(r18()), [20, 30, 50]).size() == 11_168_832 + 513 * 100


def test_running_statistics_are_not_counted() -> None:
    method = learn(Pearl(r18(), rank=FixedRule(r=1)), [5, 5])
    everything = sum(tensor.numel() for tensor in method.state_dict().values())
    statistics = 2 * (2 * 4_800 + 20) + 20  # mean and variance of 4,800 channels, a counter a layer; 20 thresholds
    assert everything - method.size() == statistics
