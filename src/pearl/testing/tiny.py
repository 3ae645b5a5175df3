"""Networks of a few thousand parameters and tasks of random images of 8 x 8 pixels, to try methods on."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import timm
import torch
from safetensors.torch import load, save
from torch import nn

from pearl.data.augment import View
from pearl.data.batches import Task
from pearl.methods.base import Method
from pearl.nn.resnet import resnet18
from pearl.settings.config import RunConfig, check_config
from pearl.training.engine import Engine

T = TypeVar("T")
Make = Callable[[], Method]  # makes a method that has learnt nothing, each time in the same way
CLASSES, PER_CLASS, SIZE = 2, 12, 8  # of a task, training images of each of them, and pixels


def small_resnet() -> nn.Module:
    """Return a ResNet-18 of width 4 with one block a stage for images of 8 x 8, always with the same weights."""
    torch.manual_seed(1)
    network = resnet18(SIZE, width=4)
    for stage in (network.layer1, network.layer2, network.layer3, network.layer4):
        del stage[1:]
    return network


def small_vit() -> nn.Module:
    """Return a ViT of 3 blocks and width 16 for images of 8 x 8 with fixed weights; it counts as pretrained."""
    torch.manual_seed(1)
    shape: dict[str, Any] = {"img_size": SIZE, "patch_size": 4, "embed_dim": 16, "depth": 3, "num_heads": 2}
    network: Any = timm.create_model("test_vit", num_classes=0, **shape)
    network.dim, network.pretrained = 16, True
    return network


def config(**changes: object) -> RunConfig:
    """Return settings for a few steps of training on images of 8 x 8."""
    raw = {
        "recipe": "conformance",
        "data": "digits",
        "stream": {"tasks": 5},
        "images": {"size": SIZE, "augment": "crop", "pad": 1},
        "backbone": "resnet18",
        "method": "finetune",
        "train": {"epochs": 2, "batch_size": 8},
        "engine": {"precision": "fp32", "channels_last": False},
    }
    return check_config(raw | changes)


def make_task(
    index: int,
    per_class: int = PER_CLASS,
    classes: int = CLASSES,
    *,
    extra: int = 0,
    all_so_far: bool = False,
    view: View | None = None,
    device: torch.device | None = None,
) -> Task:
    """Return a task of random images, with `extra` more of the last class; for an oracle those of all tasks so far."""
    images, labels = [], []
    for t in range(index + 1) if all_so_far else [index]:
        rng = np.random.default_rng(t)
        task_labels = np.repeat(np.arange(t * classes, (t + 1) * classes), per_class)
        labels.append(np.append(task_labels, task_labels[-1:].repeat(extra)))
        images.append(rng.integers(0, 256, (len(labels[-1]), SIZE, SIZE, 3), dtype=np.uint8))
    names = tuple(f"class {index * classes + c}" for c in range(classes))
    pixels, task_labels = np.concatenate(images), np.concatenate(labels)
    view, device = view or View(config().images, channels_last=False), device or torch.device("cpu")
    return Task(index, f"task{index + 1}", names, index * classes, pixels, task_labels, view, device)


def learn(method: Method, tasks: range, engine: Engine | None = None, **shape: Any) -> list[Task]:
    """Train a method on tasks of a `shape` (see `make_task`); return them, closed."""
    engine = engine or Engine(config(), device="cpu")
    done = []
    for t in tasks:
        task = make_task(t, all_so_far=method.oracle, **shape)
        engine.learn(method, task)
        done.append(task)
    return done


def images(count: int = 6) -> torch.Tensor:
    """Return network inputs (count, 3, 8, 8), always the same."""
    return torch.randn(count, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(5))


@torch.no_grad()
def logits(method: Method, task: int | None = None) -> torch.Tensor:
    """Return a method's logits for these images."""
    return method.eval()(images(), task)


def reload(method: Method, make: Make) -> Method:
    """Load a method's state, converted to bytes as on disk, strictly into a new object."""
    fresh = make()
    fresh.load_state_dict(load(save({k: v.contiguous() for k, v in method.state_dict().items()})), strict=True)
    return fresh.eval()


def on_threads(ask: Callable[[], T], count: int = 8) -> list[T]:
    """Return the results of `ask` from this many threads that call it at the same time."""
    start = threading.Barrier(count)

    def begin(_: int) -> T:
        start.wait()
        return ask()

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(begin, range(count)))
