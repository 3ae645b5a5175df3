"""Training speed: the engine against a bare PyTorch loop, and against a typical user's loop.

    python benchmarks/speed/training.py
    python benchmarks/speed/training.py --nets bsc --repeats 9 --out training.json
    python benchmarks/speed/training.py --nets resnet18 --precision fp32
    python benchmarks/speed/training.py --device cuda --steps 300

Batches of 32. The bare loop has the same network, precision and memory format, and one prepared batch: the difference
is the engine's augmentation and overhead. The usual loop is torchvision transforms on Pillow images in a DataLoader,
float32, contiguous, and a loss read at every step. On a GPU, CUDA graphs as well.
"""

import argparse
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from timing import Row, cpu, ratios, show
from torch import nn

from pearl.data.augment import View
from pearl.data.batches import Task
from pearl.methods.base import Phase, own_loss
from pearl.methods.pearl import Pearl
from pearl.nn.rank_rules import FixedRule
from pearl.settings.config import check_config
from pearl.settings.parts import BACKBONES
from pearl.training.engine import Engine
from pearl.training.optimizers import make_optimizers
from pearl.training.resume import Resume

NETWORKS = {"resnet18": 32, "bsc": 32, "timm/deit_tiny_patch16_224": 112}
BATCH, RANK = 32, 8


def config(backbone: str, size: int, steps: int = 6, *, precision: str = "auto", graphs: bool = False):
    return check_config(
        {
            "recipe": "speed",
            "data": "digits",
            "stream": {"tasks": 5},
            "images": {"size": size, "augment": "crop"},
            "backbone": backbone,
            "method": "pearl",
            "train": {"batch_size": BATCH, "epochs": 1000},
            "engine": {"max_steps": steps, "precision": precision, "cuda_graphs": graphs},
        }
    )


def make_task(settings, index: int = 1, device: str = "cpu") -> Task:
    rng = np.random.default_rng(index)
    size, count = settings.images.size, BATCH * settings.engine.max_steps
    images = rng.integers(0, 256, (count, size, size, 3), dtype=np.uint8)
    labels = 10 * index + rng.integers(0, 10, count)
    view = View(settings.images)
    return Task(index, "task", tuple(map(str, range(10))), 10 * index, images, labels, view, torch.device(device))


def engines(backbone: str, size: int, steps: int, device: str, precision: str) -> dict[str, Engine]:
    """Return our engines by name; on a GPU also with CUDA graphs."""
    results = {"engine": Engine(config(backbone, size, steps, precision=precision), device=device)}
    if device == "cuda":
        graphed = config(backbone, size, steps, precision=precision, graphs=True)
        results["engine, graphs"] = Engine(graphed, device=device)
    return results


def overhead(backbone: str, repeats: int, steps: int, device: str, precision: str) -> list[Row]:
    """Measure each phase by the engine, against the same loss, optimizer and network on a prepared batch."""
    size, rows = NETWORKS[backbone], []
    several = engines(backbone, size, steps, device, precision)
    engine = several["engine"]
    settings = engine.config
    network = BACKBONES.build(settings.backbone, size)
    # a method with a probe
    method = engine.to_device(Pearl(network, rank=FixedRule(r=RANK), init="svd", reference="first_task"))
    for task in (make_task(settings, 0, device), make_task(settings, 1, device)):
        for phase in method.learn(task):  # returned untrained: speed does not depend on training
            work = {name: ours(one, method, task, phase) for name, one in several.items()}
            work["bare loop"] = bare(engine, task, phase)
            facts = {"network": backbone, "phase": phase.name, "precision": engine.precision, "steps": steps}
            facts["cpu"] = cpu()
            rows.append({**facts, **ratios(work, repeats, device), "goal": goal(facts)})
            if device == "cuda":
                took = rows[-1]["milliseconds"]
                rows[-1]["engine / engine, graphs"] = round(took["engine"] / took["engine, graphs"], 2)
            if phase.name == "adapt" and backbone == "resnet18":  # others have no parallel branches
                loss = own_loss(partial(method.task_features, t=task.id), method.heads[task.id], task)
                work = {
                    "as trained": bare(engine, task, phase),
                    "updates merged": bare(engine, task, replace(phase, loss=loss)),
                }
                rows.append({**facts, "rank": RANK, **ratios(work, repeats, device)})
    return rows


def goal(facts: Row) -> float:
    """Return the goal for engine / bare loop: lower if `nn/fast` has fewer products for a phase."""
    fewer = facts["precision"] == "fp32" and facts["cpu"] == "AVX2" and facts["phase"] != "adapt"
    return 0.85 if fewer and facts["network"] == "resnet18" else 1.03


def ours(engine: Engine, method: Pearl, task: Task, phase: Phase) -> Callable[[], None]:
    return lambda: engine.train(method, task, phase, 0, Resume())


def bare(engine: Engine, task: Task, phase: Phase) -> Callable[[], None]:
    """Run forward, backward and step only."""
    batch = next(task.batches(BATCH, 0))

    def loop() -> None:
        (optimizer,) = make_optimizers(engine.config.train, phase.groups, task.device)
        for _ in range(engine.config.engine.max_steps):
            optimizer.zero_grad(set_to_none=True)
            with engine.fabric.autocast():
                loss = phase.loss(batch)
            loss.backward()
            optimizer.step()

    return loop


def usual(repeats: int, steps: int, device: str, precision: str) -> Row:
    """Measure ResNet-18 on 32x32 by the engine, against a typical user's loop."""
    from torch.utils.data import DataLoader, Dataset
    from torchvision import transforms

    several = engines("resnet18", 32, steps, device, precision)
    engine = several["engine"]
    settings = engine.config
    method = engine.to_device(Pearl(BACKBONES.build(settings.backbone, 32), reference="first_task"))
    task = make_task(settings, 0, device)
    raw, labels = task.images.cpu().numpy(), task.labels.cpu()
    phase = next(method.learn(task))

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
    plain = nn.Sequential(BACKBONES.build(settings.backbone, 32), nn.Linear(512, 10)).train().to(device)
    optimizer = torch.optim.Adam(plain.parameters(), 1e-3)

    def loop() -> None:
        for x, y in DataLoader(Images(), BATCH, shuffle=True):
            optimizer.zero_grad()
            loss = F.cross_entropy(plain(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
            _ = loss.item()  # as progress bars do

    work = {name: ours(one, method, task, phase) for name, one in several.items()} | {"usual loop": loop}
    most = 0.1 if device == "cuda" else 0.5
    return {"network": "resnet18", "precision": engine.precision, **ratios(work, repeats, device), "goal": most}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", nargs="+", default=list(NETWORKS), choices=list(NETWORKS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6, help="per repeat; a GPU needs more")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="auto", choices=("auto", "fp32", "bf16"))
    parser.add_argument("--out", type=Path, help="a JSON file to write")
    options = parser.parse_args()
    how = (options.repeats, options.steps, options.device, options.precision)
    rows = [usual(*how)] if "resnet18" in options.nets and options.precision == "auto" else []
    for network in options.nets:
        rows += overhead(network, *how)
    show("training", rows, options.out)


if __name__ == "__main__":
    main()
