"""Use one model from many threads at once, and compare every result with that of a single thread.

    python benchmarks/attack/threads.py                     50 rounds of each, written to docs/results/reliability.md
    python benchmarks/attack/threads.py --rounds 5 --print  a few, printed

In each round a model is loaded and eight threads send it their first requests: different numbers of images, half of
them for unknown detection. By kind, also running are:

- requests: nothing else;
- foreign: forward passes of a network of timm's and of one of PyTorch's own modules;
- learn: another model learns a task; its weights are compared with those learnt without other threads;
- load: the same model is loaded repeatedly, and other networks are created.

After all rounds `nn.Module.__call__`, the filters of Python's warnings, PyTorch's default dtype and the networks must
be unchanged. Exit code 1 if anything differs, 0 otherwise.
"""

import argparse
import hashlib
import shutil
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "benchmarks")]

import numpy as np  # noqa: E402
import timm  # noqa: E402
import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402

import pearl  # noqa: E402
from pearl.lifecycle.model import StoredModel  # noqa: E402
from pearl.testing.tiny import on_threads  # noqa: E402
from photos import SETTINGS, digit, folders, weights_of, write_photos  # noqa: E402
from reliability import write_section  # noqa: E402

THREADS = 8
FAST = {"engine": {"max_steps": 6}}
MODELS: dict[str, dict[str, Any]] = {
    "PEARL, ResNet, statistics": {"backbone": {"name": "resnet18", "width": 4}},
    "PEARL, BSC, heads": {"backbone": {"name": "bsc", "width": 4}, "method": {"name": "pearl", "classifier": "heads"}},
    "PEARL, timm's ResNet": {"backbone": {"name": "timm/test_resnet", "pretrained": False}, "images": {"size": 32}},
    "PEARL, ViT": {"backbone": {"name": "timm/test_vit", "pretrained": False}, "images": {"size": 32}},
    "SeqLoRA, ResNet": {"backbone": {"name": "resnet18", "width": 4}, "method": "seqlora"},
    "OCD-Net, ResNet": {"backbone": {"name": "resnet18", "width": 4}, "method": "ocdnet"},
    "progressive, ResNet": {"backbone": {"name": "resnet18", "width": 4}, "method": "pnn"},
}
ParallelLora = Callable[[threading.Event], str | None]  # runs until the event is set; collects errors


class Stage:
    """Models of two tasks, their results in a single thread, and a model that learns at the same time."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for task, names in {"first": {"zero": 0, "one": 1}, "second": {"two": 2, "three": 3}}.items():
            write_photos(root / task, names, 6)
        self.pixels: dict[str, np.ndarray] = {}
        self.answers: dict[str, list[tuple[int, str, Tensor]]] = {}
        for name, settings in MODELS.items():
            pearl.learn(self.target(name), root / "first", quiet=True, **{**SETTINGS, **FAST, **settings})
            if name == next(iter(MODELS)):
                shutil.copytree(self.target(name), root / "before")
            pearl.learn(self.target(name), root / "second", quiet=True)
            model = pearl.load(self.target(name))
            self.pixels[name] = pixels(model.config.images.stored)
            self.answers[name] = [(n, kind, ask(model, self.pixels[name][:n], kind)) for n, kind in questions(model)]
        self.learnt = digest(self.target(next(iter(MODELS))))

    def target(self, name: str) -> Path:
        """Return the directory of a model."""
        return self.root / hashlib.sha256(name.encode()).hexdigest()[:8]


def pixels(size: int) -> np.ndarray:
    """Return digits (8, size, size, 3) uint8."""
    images = np.concatenate([digit(label)[:2] for label in range(4)]).repeat(size // 8, 1).repeat(size // 8, 2)
    return images[..., None].repeat(3, 3)


def questions(model: StoredModel) -> list[tuple[int, str]]:
    """Return the requests of eight threads: numbers of images, and kinds."""
    kinds = ["logits", "judge" if model.has_ood_scores else "task"]
    return [(count, kind) for count in (1, 2, 5, 8) for kind in kinds]


def ask(model: StoredModel, images: np.ndarray, kind: str) -> Tensor:
    """Return the model's prediction."""
    if kind == "judge":
        return torch.cat([part.view(len(images), -1) for part in model.logits_and_scores(images)], 1)
    return model.logits(images, 1 if kind == "task" else None)


def digest(model: Path) -> dict[str, bytes]:
    """Return the digests of all weights, by file."""
    return {name: hashlib.sha256(content).digest() for name, content in weights_of(model).items()}


def foreign(done: threading.Event) -> str | None:
    """Use networks of other libraries."""
    plain = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.LazyLinear(4)).eval()
    networks, x = [plain, timm.create_model("test_resnet").eval()], torch.rand(2, 3, 32, 32)
    with torch.no_grad():
        expected = [network(x) for network in networks]
        while not done.is_set():
            if not all(torch.equal(network(x), one) for network, one in zip(networks, expected, strict=True)):
                return "a foreign network gave something else"
    return None


def learn(stage: Stage, done: threading.Event) -> str | None:
    """Let a model learn its second task."""
    with tempfile.TemporaryDirectory(dir=stage.root) as folder:
        target = shutil.copytree(stage.root / "before", Path(folder) / "model")
        pearl.learn(target, stage.root / "second", quiet=True)
        if digest(target) != stage.learnt:
            return "another model was learnt"
    return None


def load(stage: Stage, done: threading.Event) -> str | None:
    """Load a model, and create networks, repeatedly."""
    name = next(iter(MODELS))
    count, kind, expected = stage.answers[name][0]
    while not done.is_set():
        timm.create_model("test_resnet")
        if not torch.equal(ask(pearl.load(stage.target(name)), stage.pixels[name][:count], kind), expected):
            return "a model that was loaded meanwhile answered something else"
    return None


@contextmanager
def beside(work: ParallelLora | None) -> Iterator[list[str]]:
    """Run a function in another thread within the context; collect its errors."""
    wrong: list[str] = []
    if work is None:
        yield wrong
        return
    done = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(work, done)
        try:
            yield wrong
        finally:
            done.set()
        try:
            wrong += [said] if (said := result.result()) else []
        except Exception as error:  # any exception is an error
            wrong.append(f"beside: {type(error).__name__}: {error}")


def attack(stage: Stage, name: str, work: ParallelLora | None) -> list[str]:
    """Run one round; return its errors."""
    model, waiting = pearl.load(stage.target(name)), list(stage.answers[name])

    def request() -> str | None:
        count, kind, expected = waiting.pop()
        try:
            same = torch.equal(ask(model, stage.pixels[name][:count], kind), expected)
        except Exception as error:  # as above
            return f"{kind}: {type(error).__name__}: {error}"
        return None if same else f"{kind} of {count} images: other bits"

    with beside(work) as wrong:
        wrong += [said for said in on_threads(request, THREADS) if said]
    return wrong


def process() -> list[Any]:
    """Return the state that must not change."""
    call = [nn.Module.__call__, nn.Module.__getattr__, nn.Module.__setattr__]
    return [*call, torch.get_default_dtype(), torch.is_grad_enabled(), [*warnings.filters]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=50, help="of each kind, over the models in turn")
    parser.add_argument("--print", action="store_true", help="print the table; write nothing")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows, failures = [], 0
    with tempfile.TemporaryDirectory() as folder, folders(Path(folder)):
        stage = Stage(Path(folder))
        kinds: dict[str, ParallelLora | None] = {
            "requests": None,
            "foreign": foreign,
            "learn": lambda done: learn(stage, done),
            "load": lambda done: load(stage, done),
        }
        before = process()
        for kind, work in kinds.items():
            started, wrong = time.perf_counter(), Counter[str]()
            for number in range(options.rounds):
                name = [*MODELS][number % len(MODELS)]
                wrong.update(f"{name}: {line}" for line in attack(stage, name, work))
            for line, count in wrong.most_common(10):
                print(f"{kind}: {count} times {line[:500]}", file=sys.stderr)
            seconds = time.perf_counter() - started
            rows.append(
                f"| {kind} | {options.rounds} | {THREADS * options.rounds} | {wrong.total()} | {seconds:.0f} s |"
            )
            failures += wrong.total()
        if process() != before:
            print("the process is not what it was", file=sys.stderr)
            failures += 1
    table = "\n".join(["| beside | rounds | requests | wrong or failed | time |", f"|{'---|' * 5}", *rows])
    print(table)
    if not options.print:
        text = (
            f"## Threads\n\n`python benchmarks/attack/threads.py --rounds {options.rounds}`: in each round a model is "
            f"loaded and {THREADS} threads send it their first requests, of 1 to 8 images, half of them with "
            f"unknown detection or among one task's classes; {len(MODELS)} models in turn (PEARL on four networks, "
            f"SeqLoRA, "
            f"OCD-Net, progressive networks). A result is correct if its bits are those of a single thread. "
            f"`learn`: the weights learnt at the same time must have the bits of learning alone.\n\n{table}\n"
        )
        write_section("threads", text)
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
