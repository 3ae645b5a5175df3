"""Compare the results and speed of several processes with those of one, on the same batches.

    python benchmarks/speed/ddp.py                          DeiT-Tiny at 32 pixels, 50 steps a phase, 2 processes
    python benchmarks/speed/ddp.py --model test_vit --steps 5

Random images, float32 on the CPU, one thread per process. It prints the largest differences from one process, in the
losses of all steps and the final logits, relative to the largest value.
"""

import argparse
import os
import pickle
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pearl.data.augment import View
from pearl.data.batches import Task
from pearl.methods.base import Method
from pearl.methods.bounds.finetune import Finetune
from pearl.methods.pearl import Pearl
from pearl.nn.timm import timm_backbone
from pearl.settings.config import check_config
from pearl.training.engine import Engine, Observer
from pearl.training.world import World

METHODS: dict[str, Any] = {"pearl": Pearl, "finetune": Finetune}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="deit_tiny_patch16_224")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--optimizer", default="adam")
    options = parser.parse_args()
    print("| method | optimizer | steps | losses differ by | logits differ by | s/step, 1 process | s/step, all |")
    print(f"|{'---|' * 7}")
    for method in METHODS:
        settings = (method, options.model, options.steps, options.batch, options.optimizer)
        (one,) = fork(1, follow, *settings)
        several = fork(options.processes, follow, *settings)
        losses, logits = (max(difference(one[key], rank[key]) for rank in several) for key in ("losses", "logits"))
        speeds = " | ".join(f"{result['seconds'] / len(one['losses']):.3f}" for result in (one, several[0]))
        print(f"| {method} | {options.optimizer} | {len(one['losses'])} | {losses:.1e} | {logits:.1e} | {speeds} |")


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest value."""
    return float((one - other).abs().max() / one.abs().max())


def follow(method: str, model: str, steps: int, batch: int, optimizer: str = "adam") -> dict[str, Any]:
    """Learn two tasks of random images; return the losses of all steps, and the final logits."""
    torch.manual_seed(0)
    learner = METHODS[method](timm_backbone(model, 32))
    train = {"optimizer": optimizer, "lr": 0.001, "batch_size": batch, "epochs": -(-steps // 3)}
    started = time.perf_counter()
    losses = learn(learner, range(2), 3 * batch - 3, train=train, engine={"max_steps": steps, "precision": "fp32"})
    return {"losses": losses, "logits": logits(learner), "seconds": time.perf_counter() - started}


class Keep(Engine):
    """An engine that records the losses of all steps."""

    def learn_all(self, method: Method, tasks: range, count: int, **how: Any) -> torch.Tensor:
        kept: list[torch.Tensor] = []
        mean = self.world.mean
        self.world.mean = lambda value: kept.append(mean(value)) or kept[-1]  # type: ignore[method-assign]
        for t in tasks:
            self.learn(method, make_task(self, t, count), **how)
        self.world.mean = mean  # type: ignore[method-assign]
        return torch.stack(kept)


def learn(method: Method, tasks: range, count: int, *, resume: Any = None, **changes: Any) -> torch.Tensor:
    """Learn tasks of `count` random images each with the existing ranks; return the losses of all steps."""
    raw = {"recipe": "ddp", "data": "digits", "stream": {"tasks": 2}, "images": {"size": 32, "augment": "crop"}}
    raw |= {"backbone": "resnet18", "method": "finetune", **changes}
    devices = int(os.environ.get("WORLD_SIZE", 1))
    engine = Keep(check_config(raw), device="cpu", world=World.join("cpu", devices), observer=Observer())
    how = {"resume": resume(engine.world)} if resume else {}
    return engine.learn_all(engine.to_device(method), tasks, count, **how)


def make_task(engine: Engine, index: int, count: int, classes: int = 2) -> Task:
    rng, size = np.random.default_rng(index), engine.config.images.size
    pixels = rng.integers(0, 256, (count, size, size, 3), dtype=np.uint8)
    labels = index * classes + np.arange(count) % classes
    names = tuple(f"class {index * classes + c}" for c in range(classes))
    view = View(engine.config.images, channels_last=False)
    return Task(index, f"task{index + 1}", names, index * classes, pixels, labels, view, torch.device("cpu"))


@torch.no_grad()
def logits(method: Method, size: int = 32) -> torch.Tensor:
    return method.eval()(torch.randn(8, 3, size, size, generator=torch.Generator().manual_seed(5)))


def fork(world: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Return a function's results in each of several processes, connected as by torchrun.

    This process must have computed nothing yet: threads do not survive a fork.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    sys.stdout.flush()
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(world):
            if child := os.fork():
                children.append(child)
                continue
            facts = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
            os.environ |= {key: str(value) for key, value in facts.items()}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCH_CPP_LOG_LEVEL": "ERROR"}
            try:
                torch.set_num_threads(1)
                Path(folder, str(rank)).write_bytes(pickle.dumps(function(*arguments)))
            except BaseException:
                sys.excepthook(*sys.exc_info())
                os._exit(1)
            os._exit(0)
        failed = [os.waitpid(child, 0)[1] for child in children]
        if any(failed):
            raise RuntimeError(f"{function.__name__}: ended with {failed}")
        return [pickle.loads(Path(folder, str(rank)).read_bytes()) for rank in range(world)]


if __name__ == "__main__":
    main()
