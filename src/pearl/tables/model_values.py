"""Values without training: parameters counted on models without memory, and estimated times of runs."""

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from pearl.settings.config import OnlineRunConfig, RunConfig
from pearl.settings.declared import declared, upcoming
from pearl.settings.derived_defaults import pretrained
from pearl.settings.parts import METHODS, RANK_RULES
from pearl.settings.sections import ImagesConfig
from pearl.tables.spec import Request

if TYPE_CHECKING:
    from pearl.methods.base import Method

UNTRAINED = ("pearl", "isolation", "finetune", "joint")  # methods that create all their tensors without images


@dataclass(frozen=True)
class DataSet:
    """The size of a data set."""

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
    """Return the number of classes of each task."""
    tasks = config.stream.tasks
    count = config.stream.classes or DATA_SETS[config.data["name"]].classes
    return [count // tasks] * tasks if isinstance(tasks, int) else tasks


# ------------------------------------------------------------------------------------------------------ parameters


def parameters(request: Request) -> int | None:
    """Return the parameters of the model after its last task; None if they depend on training."""
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
    if config.method["name"] == "isolation":  # avoids building all its networks
        return isolation_size(method, classes)
    return learnt(method, classes, config.images).size()


def learnt(method: "Method", classes: list[int], view_of: ImagesConfig) -> "Method":
    """Create everything that a method without memory creates for tasks of these classes, without training."""
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
    """Return the mean rank of a total of parameters, weighted by (rows + columns) as parameters are.

    Parameters grow by the same with each rank until a layer is full.
    """
    one, two = (
        _parameters(Request(request.recipe, (*request.settings, f"method.rank={{name: fixed, r: {r}}}"), request.smoke))
        for r in (1, 2)
    )
    return 1 + (total - one) / (two - one)


# -------------------------------------------------------------------------------------------- estimated times

# Sustained floating-point operations per second, and minimum seconds per step: one core of an AMD EPYC with AVX-512
# BF16 (ResNet-18 at 32 pixels: 110 images/s in training); a GPU of 2024, whose small batches wait for Python.
CPU_CORE = (1.5e11, 0.02)
GPU = (1e14, 0.006)


def seconds(config: RunConfig, machine: tuple[float, float]) -> float:
    """Return the estimated seconds of a run on a machine: its declared training plus a tenth for the rest.

    A phase whose number depends on training is counted with its minimum.
    """
    from pearl.training.optimizers import Course

    operations, least = machine
    data = DATA_SETS.get(config.data["name"])
    each = config.stream.per_class or (data.per_class if data else 100)
    counts = [[each] * classes for classes in (classes_per_task(config) if data else [10])]
    method: Any = METHODS.load(config.method["name"])
    forward = 0.0
    if isinstance(config, OnlineRunConfig):  # a pass per image and network; sub-networks are trained on windows
        images, learner = sum(map(sum, counts)), config.online.learner
        networks = learner.get("sub_networks", 0)
        forward = images * (1 + networks + 6 * learner.get("iterations", 0))  # 6: old and new images, and gradients
        counts = [[learner.get("window", 0)]] * networks
    specs, total = declared(method), forward * _operations(config) / operations
    for _, phases in upcoming(method, counts, config.method, pretrained=pretrained(config)):
        for name, epochs in phases.items():
            settings = config.train.phase(name)
            for images in epochs:
                course = Course.of(settings, images, config.engine.max_steps)
                passes = 0 if specs[name].features_only else course.steps * images / course.per_epoch
                total += max(course.steps * least, passes * 3 * _operations(config) / operations)
    return 1.1 * total + 10


def _operations(config: RunConfig) -> float:
    """Return the floating-point operations of a forward pass of one image."""
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
