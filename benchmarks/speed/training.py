"""Training speed: the engine against a bare PyTorch loop, and against what a user would write.

    python benchmarks/speed/training.py
    python benchmarks/speed/training.py --nets bsc --repeats 9 --out training.json

Batches of 32. The bare loop has the same network, precision and layout, and one batch that is ready: what the engine
takes above it is augmentation and everything else. The usual loop is torchvision transforms on Pillow images in a
DataLoader, float32, contiguous, and a loss read at every step.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from timing import Row, ratios, show
from torch import nn

from pearl.config import check_config
from pearl.data.augment import View
from pearl.data.batches import Task
from pearl.engine import Engine, make_optimizer
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


def overhead(backbone: str, repeats: int) -> list[Row]:
    """Each phase by the engine, against the same loss, optimizer and network on a batch that is ready."""
    size, rows = NETWORKS[backbone], []
    settings = config(backbone, size)
    engine = Engine(settings, device="cpu")
    network = BACKBONES.build(settings.backbone, size)
    method = engine.place(Pearl(network, rank=FixedRule(r=8), init="svd", reference="first_task"))  # with a probe
    for task in (make_task(settings, 0), make_task(settings, 1)):
        for phase in method.learn(task):  # handed out untrained: speed does not depend on what was learnt
            phase.params = list(phase.params)
            work = {"engine": ours(engine, method, task, phase), "bare loop": bare(engine, task, phase)}
            facts = {"network": backbone, "phase": phase.name, "precision": engine.precision}
            rows.append({**facts, **ratios(work, repeats), "goal": 1.03})
    return rows


def ours(engine: Engine, method: Pearl, task: Task, phase: Phase) -> Callable[[], None]:
    return lambda: engine.train(method, task, phase, 0, Replay())


def bare(engine: Engine, task: Task, phase: Phase) -> Callable[[], None]:
    """Forward, backward, step, and nothing else."""
    batch = next(task.batches(BATCH, 0))

    def loop() -> None:
        optimizer = make_optimizer(engine.config.train, list(phase.params), torch.device("cpu"))
        for _ in range(STEPS):
            optimizer.zero_grad(set_to_none=True)
            with engine.fabric.autocast():
                loss = phase.loss(batch)
            loss.backward()
            optimizer.step()

    return loop


def usual(repeats: int) -> Row:
    """ResNet-18 on 32x32 by the engine, against what a user would write."""
    from torch.utils.data import DataLoader, Dataset
    from torchvision import transforms

    settings = config("resnet18", 32)
    engine = Engine(settings, device="cpu")
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
    plain = nn.Sequential(BACKBONES.build(settings.backbone, 32), nn.Linear(512, 10)).train()
    optimizer = torch.optim.Adam(plain.parameters(), 1e-3)

    def loop() -> None:
        for x, y in DataLoader(Images(), BATCH, shuffle=True):
            optimizer.zero_grad()
            loss = F.cross_entropy(plain(x), y)
            loss.backward()
            optimizer.step()
            _ = loss.item()  # as progress bars do

    work = {"engine": ours(engine, method, task, phase), "usual loop": loop}
    return {"network": "resnet18", "precision": engine.precision, **ratios(work, repeats), "goal": 0.5}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", nargs="+", default=list(NETWORKS), choices=list(NETWORKS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = [usual(options.repeats)] if "resnet18" in options.nets else []
    for network in options.nets:
        rows += overhead(network, options.repeats)
    show("training", rows, options.out)


if __name__ == "__main__":
    main()
