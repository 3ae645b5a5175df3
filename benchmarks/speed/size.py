"""A thousand tasks of a hundred classes: the cost of opening, using and extending class statistics of random features.

    python benchmarks/speed/size.py --out docs/results/speed/size.json      some minutes, and 4 GB of disk meanwhile

ResNet-18 of width 32 with three sub-networks, of which the second and third are PEARL's at rank 2, and no training: the
statistics are of random features. The model is written by pearl's own classes and opened by `pearl.load`. Each part is
a separate process, to measure its peak memory.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from PIL import Image
from timing import Row, show

import pearl
from pearl.lifecycle.saved import build_method
from pearl.lifecycle.session import session
from pearl.methods.common.class_statistics import UNCALIBRATED
from pearl.methods.common.feature_spaces import TRIED
from pearl.methods.pearl import Pearl
from pearl.reports.text import inspection
from pearl.settings.config import ModelConfig, check_config
from pearl.storage.checkpoint import snapshot, write_part
from pearl.storage.run_directory import RunDirectory
from pearl.storage.stored_task import folder_name

SPACES, DIMENSIONS = 3, 512


@torch.no_grad()
def write(path: Path, tasks: int, classes: int) -> None:
    """Write a model of this many tasks and classes."""
    classifier = {"name": "statistics", "spaces": SPACES, "projection": DIMENSIONS}
    config = check_config(
        {
            "backbone": {"name": "resnet18", "width": 32},
            "images": {"size": 32},
            "method": {"name": "pearl", "rank": {"name": "fixed", "r": 2}, "classifier": classifier},
        },
        ModelConfig,
    )
    method = build_method(config)
    assert isinstance(method, Pearl)
    class_statistics = method.class_statistics
    # random features need no calibration
    facts = {
        "location": torch.zeros(classes, dtype=torch.float64),
        "spread": torch.ones((), dtype=torch.float64),
        "scores": torch.linspace(-3, 3, 101, dtype=torch.float64),
        "measured": torch.tensor(2 * classes),
        "losses": torch.zeros(TRIED, dtype=torch.float64),
    }

    def made_up(*_: object) -> None:
        for name, value in facts.items():
            class_statistics.tensors.add(f"task.{len(class_statistics) - 1}.{name}", value.clone())
        class_statistics.tensors.add("temperature", torch.tensor(UNCALIBRATED, dtype=torch.float64))

    with session(path, config, again="") as work, mock.patch.object(class_statistics, "_calibrate", made_up):
        work.begin(method)
        known = dict(method.state_dict())
        for t in range(tasks):
            method.heads.grow(classes)
            if 0 < t < SPACES:
                method.start_updates(t, method.backbone, method.choose_ranks(method.backbone))
            if t < SPACES:
                class_statistics.add_space(
                    t, torch.randn(400, method.spaces([t])(torch.zeros(1, 3, 32, 32))[0].shape[1])
                )
            own = torch.arange(classes).repeat(2)
            rows = (len(own), DIMENSIONS)
            features = [
                torch.randn(classes, DIMENSIONS).repeat(2, 1) + torch.randn(rows) for _ in class_statistics.created_at
            ]
            class_statistics.observe(features, own + t * classes)
            state = dict(method.state_dict())
            # only the changed part: comparing all bits would take longer with every task
            new = {k: v for k, v in state.items() if k not in known or v.data_ptr() != known[k].data_ptr()}
            facts = {
                "task": t,
                "name": f"task{t + 1}",
                "classes": [f"class{c}" for c in range(t * classes, (t + 1) * classes)],
                "images": len(own),
                "parameters": method.size(),
                "seconds": {},
                **method.facts(t),
            }
            write_part(path / "tasks" / folder_name(t, f"task{t + 1}"), snapshot(new), facts, method.file_of)
            known = state
        work.list_classes()


def manifests(path: Path) -> Row:
    """Read and check all manifests."""
    return {"read all manifests (s)": timed(lambda: RunDirectory(path).tasks)}


def answers(path: Path) -> Row:
    """Open the model, and predict one photo and 64."""
    pixels = np.random.default_rng(0).integers(0, 256, (64, 32, 32, 3), dtype=np.uint8)
    model = pearl.load(path)
    results: Row = {
        "open: all tensors that answer read and checked (s)": timed(lambda: model.method),
        "the first answer, for which discriminants are made (s)": timed(lambda: model.predict_pixels(pixels[:1])),
        "one photo (ms)": round(1e3 * timed(lambda: model.predict_pixels(pixels[:1]))),
        "64 photos (ms)": round(1e3 * timed(lambda: model.predict_pixels(pixels))),
    }
    results["peak memory of answering (MB)"] = peak()
    results["the first question of what is unknown (s)"] = timed(lambda: model.logits_and_scores(pixels[:1]))
    return results


def learning(path: Path) -> Row:
    """Learn one more class of 20 photos, by class statistics only."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "new" / "stranger").mkdir(parents=True)
        for i, pixels in enumerate(np.random.default_rng(0).integers(0, 256, (20, 32, 32, 3), dtype=np.uint8)):
            Image.fromarray(pixels).save(Path(folder) / "new" / "stranger" / f"{i}.png")
        # learning, without the opening that `pearl.learn` does afterwards
        with mock.patch("pearl.lifecycle.model.StoredModel.open"):
            seconds = timed(lambda: pearl.learn(path, Path(folder) / "new", fast=True, quiet=True))
    return {"add a class of 20 photos (s)": seconds, "peak memory of adding (MB)": peak()}


def inspecting(path: Path) -> Row:
    """Compute all checksums, and make the page."""
    return {"inspect (s)": timed(lambda: inspection(path)), "peak memory of inspecting (MB)": peak()}


def sizes(path: Path) -> Row:
    """Return the bytes on disk, by kind."""
    files = {name: sum(f.stat().st_size for f in path.rglob(name)) for name in ("statistics.*", "running.*", "*.json")}
    return {
        "statistics of a class on disk (bytes)": round(files["statistics.*"] / len(pearl.load(path).classes)),
        "running statistics of a task on disk (MB)": round(files["running.*"] / len(RunDirectory(path).tasks) / 1e6, 2),
        "manifests and classes.json (MB)": round(files["*.json"] / 1e6, 1),
    }


PARTS: dict[str, Callable[[Path], Row]] = {
    part.__name__: part for part in (manifests, answers, learning, inspecting, sizes)
}


def timed(work: Callable[[], object]) -> float:
    """Return seconds."""
    start = time.perf_counter()
    work()
    return round(time.perf_counter() - start, 2)


def peak() -> int:
    """Return the peak memory of this process, in MB."""
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=1000)
    parser.add_argument("--classes", type=int, default=100, help="of a task")
    parser.add_argument("--model", type=Path, help="where the model is kept; by default it is removed")
    parser.add_argument("--part", choices=["write", *PARTS], help="this one alone, on --model")
    parser.add_argument("--out", type=Path, help="a JSON file to write")
    options = parser.parse_args()
    if options.part == "write":
        write(options.model, options.tasks, options.classes)
    elif options.part:
        print(json.dumps(PARTS[options.part](options.model)))
    else:
        with tempfile.TemporaryDirectory() as folder:
            model = options.model or Path(folder) / "model"
            row: Row = {"tasks": options.tasks, "classes": options.tasks * options.classes}
            for part in [*([] if model.is_dir() else ["write"]), *PARTS]:
                sizes_of = ["--tasks", str(options.tasks), "--classes", str(options.classes)]
                command = [sys.executable, __file__, "--model", str(model), "--part", part, *sizes_of]
                done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
                row |= json.loads(done.stdout or "{}")
        show("a model of many classes", [row], options.out)


if __name__ == "__main__":
    main()
