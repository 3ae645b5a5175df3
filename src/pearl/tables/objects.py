"""What needs no training: parameters counted on models without memory, and about how long runs would take."""

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from pearl.settings.config import RunConfig
from pearl.settings.declared import declared, upcoming
from pearl.settings.follow import pretrained
from pearl.settings.parts import METHODS, RANK_RULES
from pearl.settings.sections import ImagesConfig
from pearl.tables.spec import Request

if TYPE_CHECKING:
    from pearl.methods.base import Method

UNTRAINED = ("pearl", "isolation", "finetune", "joint")  # make all their tensors without looking at an image


@dataclass(frozen=True)
class DataSet:
    """How large a data set is."""

    classes: int
    per_class: int  # training images
    test_per_class: int


DATA_SETS = {
    "cifar100": DataSet(100, 500, 100),
    "tinyimagenet": DataSet(200, 500, 50),
    "imagenet_r": DataSet(200, 120, 30),
    "digits": DataSet(10, 144, 36),
}


def classes_per_task(config: RunConfig) -> list[int]:
    """How many classes each task has."""
    tasks = config.stream.tasks
    count = config.stream.classes or DATA_SETS[config.data["name"]].classes
    return [count // tasks] * tasks if isinstance(tasks, int) else tasks


# ------------------------------------------------------------------------------------------------------ parameters


def parameters(request: Request) -> int | None:
    """Of the whole model after its last task; None if they depend on what is learnt."""
    method = request.config.method
    if method["name"] not in UNTRAINED or ("rank" in method and RANK_RULES.build(method["rank"]).learnt):
        return None
    return _parameters(request)


@cache
def _parameters(request: Request) -> int:
    import torch

    from pearl.lifecycle.saved import build_method, isolation_size

    config = request.config
    with torch.device("meta"):
        method = build_method(config, structure_only=True)
    classes = classes_per_task(config)
    if config.method["name"] == "isolation":  # no need to make all its networks
        return isolation_size(method, classes)
    return learnt(method, classes, config.images).size()


def learnt(method: "Method", classes: list[int], view_of: ImagesConfig) -> "Method":
    """All that a method without memory makes for tasks of so many classes; the training itself is left out."""
    import numpy as np
    import torch

    from pearl.data.augment import View
    from pearl.data.batches import Task

    meta, view = torch.device("meta"), View(view_of)
    first = 0
    for t, count in enumerate(classes):
        names = tuple(f"class {label}" for label in range(first, first + count))
        images, labels = np.zeros((0, 1, 1, 3), np.uint8), np.zeros(0, np.int64)
        for _ in method.learn(Task(t, f"task{t + 1}", names, first, images, labels, view, meta)):
            pass
        first += count
    return method


def implied_rank(request: Request, total: float) -> float:
    """The mean rank that a total of parameters implies, weighted by (rows + columns) as parameters are.

    Parameters grow by the same with each rank until a layer is full.
    """
    one, two = (
        _parameters(Request(request.recipe, (*request.settings, f"method.rank={{name: fixed, r: {r}}}"), request.smoke))
        for r in (1, 2)
    )
    return 1 + (total - one) / (two - one)


# ------------------------------------------------------------------------------------------------- about how long

# Sustained floating-point operations a second, and seconds that a step takes at least: one core of an AMD EPYC with
# AVX-512 BF16 (ResNet-18 at 32 pixels: 110 images/s in training); a GPU of 2024, whose small batches wait for Python.
CPU_CORE = (1.5e11, 0.02)
GPU = (1e14, 0.006)


def seconds(config: RunConfig, machine: tuple[float, float]) -> float:
    """About how long a run takes on a machine: the training that its method declares, and a tenth of it for the rest.

    A phase that comes as often as what is learnt asks for is counted as often as it comes at least.
    """
    from pearl.training.optimizers import Course

    operations, least = machine
    data = DATA_SETS.get(config.data["name"])
    each = config.stream.per_class or (data.per_class if data else 100)
    counts = [[each] * classes for classes in (classes_per_task(config) if data else [10])]
    method: Any = METHODS.load(config.method["name"])
    specs, total = declared(method), 0.0
    for _, phases in upcoming(method, counts, config.method, pretrained=pretrained(config)):
        for name, epochs in phases.items():
            settings = config.train.phase(name)
            for images in epochs:
                course = Course.of(settings, images, config.engine.max_steps)
                passes = 0 if specs[name].features_only else course.steps * images / course.per_epoch
                total += max(course.steps * least, passes * 3 * _operations(config) / operations)
    return 1.1 * total + 10


def _operations(config: RunConfig) -> float:
    """Floating-point operations of a forward pass on one image."""
    options = {key: value for key, value in config.backbone.items() if key not in {"pretrained", "weights"}}
    return _of_backbone(tuple(options.items()), config.images.size)


@cache
def _of_backbone(options: tuple[tuple[str, Any], ...], size: int) -> float:
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from pearl.settings.parts import BACKBONES

    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        net = BACKBONES.build(dict(options), size).eval()
        counter.flop_counts.clear()
        net(torch.zeros(1, 3, size, size))
    return float(counter.get_total_flops())
