"""Training speed: the engine against a bare PyTorch loop, and against what a user would write.

python benchmarks/speed/training.py [--json FILE]
"""

import argparse
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from common import Ratio, compare, write
from torch import nn

from pearl.config import check_config
from pearl.data.augment import View
from pearl.data.batches import Batch, Task
from pearl.engine import Engine, Observer, make_optimizer
from pearl.methods.base import Phase
from pearl.methods.pearl import Pearl
from pearl.nn.ranks import FixedRule
from pearl.registry import BACKBONES
from pearl.replay import Replay

NETWORKS = {"resnet18": 32, "bsc": 32, "timm/deit_tiny_patch16_224": 112}
BATCH, STEPS = 32, 6


def config(backbone: str, size: int):
    return check_config(
        {
            "recipe": "speed",
            "data": "digits",
            "stream": {"tasks": 5},
            "images": {"size": size, "augment": "crop"},
            "backbone": backbone,
            "method": "pearl",
            "train": {"batch_size": BATCH, "epochs": 1000},
            "engine": {"max_steps": STEPS},
        }
    )


def make_task(settings, index: int = 1) -> Task:
    rng = np.random.default_rng(index)
    size, count = settings.images.size, BATCH * STEPS
    images = rng.integers(0, 256, (count, size, size, 3), dtype=np.uint8)
    labels = 10 * index + rng.integers(0, 10, count)
    view = View(settings.images)
    return Task(index, "task", tuple(map(str, range(10))), 10 * index, images, labels, view, torch.device("cpu"))


class Clock(Observer):
    """Seconds from step to step."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def step(self, done: int, total: int) -> None:
        self.at.append(time.perf_counter())

    def take(self) -> list[float]:
        durations = [b - a for a, b in zip(self.at, self.at[1:], strict=False)]
        self.at = []
        return durations


def overhead() -> list[Ratio]:
    """Each phase by the engine, against the same loss, optimizer and network on a batch that is ready."""
    results = []
    for backbone, size in NETWORKS.items():
        settings = config(backbone, size)
        clock = Clock()
        engine = Engine(settings, device="cpu", observer=clock)
        network = BACKBONES.build(settings.backbone, size)
        method = engine.place(Pearl(network, rank=FixedRule(r=8), init="svd", reference="first_task"))
        for task in (make_task(settings, 0), make_task(settings, 1)):
            for phase in method.learn(task):
                phase.params = list(phase.params)
                name = f"{backbone.removeprefix('timm/').split('_patch')[0]}, {phase.name}"
                results.append(overhead_of(name, engine, clock, method, task, phase))
    return results


def overhead_of(name: str, engine: Engine, clock: Clock, method: Pearl, task: Task, phase: Phase) -> Ratio:
    def ours() -> list[float]:
        engine.train(method, task, phase, 0, Replay())
        return clock.take()

    def peer() -> list[float]:
        return bare_loop(phase, engine, next(task.batches(BATCH, 0)))

    return compare(name, ours, peer, peer_is="bare loop", goal=1.03)


def bare_loop(phase: Phase, engine: Engine, batch: Batch) -> list[float]:
    """Forward, backward, step, and nothing else."""
    optimizer = make_optimizer(engine.config.train, list(phase.params), torch.device("cpu"))
    durations = []
    for _ in range(STEPS):
        started = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        with engine.fabric.autocast():
            loss = phase.loss(batch)
        loss.backward()
        optimizer.step()
        durations.append(time.perf_counter() - started)
    return durations[1:]


def usual() -> list[Ratio]:
    """ResNet-18 on 32x32 by the engine, against torchvision transforms on PIL images, a DataLoader, float32."""
    from torch.utils.data import DataLoader, Dataset
    from torchvision import transforms

    settings = config("resnet18", 32)
    clock = Clock()
    engine = Engine(settings, device="cpu", observer=clock)
    method = engine.place(Pearl(BACKBONES.build(settings.backbone, 32), reference="first_task"))
    task = make_task(settings, 0)
    raw, labels = task.images.numpy(), task.labels
    phase = next(method.learn(task))
    phase.params = list(phase.params)

    class Images(Dataset):
        view = transforms.Compose(
            [transforms.ToPILImage(), transforms.RandomCrop(32, 4), transforms.RandomHorizontalFlip()]
            + [transforms.ToTensor(), transforms.Normalize((0.5,) * 3, (0.25,) * 3)]
        )

        def __len__(self) -> int:
            return len(raw)

        def __getitem__(self, row: int):
            return self.view(raw[row]), int(labels[row])

    torch.manual_seed(0)
    plain = nn.Sequential(BACKBONES.build(settings.backbone, 32), nn.Linear(512, 10))
    optimizer = torch.optim.Adam(plain.parameters(), 1e-3)

    def ours() -> list[float]:
        engine.train(method, task, phase, 0, Replay())
        return clock.take()

    def peer() -> list[float]:
        plain.train()
        durations, started = [], time.perf_counter()
        for x, y in DataLoader(Images(), BATCH, shuffle=True, num_workers=0):
            optimizer.zero_grad()
            loss = F.cross_entropy(plain(x), y)
            loss.backward()
            optimizer.step()
            _ = loss.item()  # as progress bars do
            durations.append(time.perf_counter() - started)
            started = time.perf_counter()
        return durations[1:]

    facts = {"precision": engine.precision}
    result = compare("resnet18, 32x32, batch 32", ours, peer, peer_is="DataLoader loop, float32", goal=0.5, **facts)
    return [result]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = [*usual(), *overhead()]
    if options.json:
        write(results, options.json)


if __name__ == "__main__":
    main()
