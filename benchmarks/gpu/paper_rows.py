"""Run the rows of the paper's CIFAR-100 tables beside its main one, with seed 0, on one GPU within twelve minutes.

    python benchmarks/gpu/paper_rows.py --out OUT --minutes 12
    python benchmarks/gpu/paper_rows.py --out OUT --smoke           one step a phase, on any machine

All run side by side (start NVIDIA's MPS first): 10 and 20 tasks with priority on the GPU, a network per task, the fixed
ranks 2, 8 and 32, and readings of the recipe that `paper_numbers.py` did not reach. The fixed ranks wait for task 1 of
one another, which they share. Runs are resumable: a second call continues where the first ended.
"""

import argparse
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from lanes import call, parsed

HERE = Path(__file__).parent
STATISTICS = "method.classifier.name=statistics method.classifier.train=all"
COSINE = " ".join(f"train.phases.{phase}.schedule=cosine" for phase in ("reference", "adapt", "isolation"))
FIRST_TWO = "stream.tasks=2 stream.classes=40"


@dataclass(frozen=True)
class Lane:
    """Variants of a recipe, or candidates of `paper_recipe.py` if it has no recipe, one after the other."""

    name: str
    recipe: str
    variants: tuple[str, ...]
    first: bool = False  # has priority on the GPU
    all_classes: bool = True


LANES = [
    Lane("decays", "", ("multistep, L2 5e-4, view", "multistep, decoupled decay .01, view"), all_classes=False),
    Lane("bsc", "cifar100-5t-bsc", (FIRST_TWO,), all_classes=False),
    Lane("20t", "cifar100-20t-resnet18", ("", STATISTICS), first=True),
    Lane("10t", "cifar100-10t-resnet18", ("", STATISTICS), first=True),
    Lane("isolation", "cifar100-5t-resnet18", ("method=isolation",)),
    *(Lane(f"rank{r}", "cifar100-5t-resnet18", (f"method.rank.name=fixed method.rank.r={r}",)) for r in (8, 2, 32)),
    Lane("cosine", "cifar100-5t-resnet18", (f"method=isolation {COSINE}", COSINE)),
]


def main() -> None:
    options = parsed(__doc__)
    deadline = time.monotonic() + 60 * options.minutes
    work = [threading.Thread(target=run, args=(lane, options, deadline)) for lane in LANES]
    for thread in work:
        thread.start()
    for thread in work:
        thread.join()


def run(lane: Lane, options: argparse.Namespace, deadline: float) -> None:
    """Run a lane in a process of its own, until it ends or the time is up."""
    while lane.all_classes and options.full_data and not options.full_data.exists() and time.monotonic() < deadline:
        time.sleep(0.5)
    left = max(1.0, deadline - time.monotonic())
    to = str(options.out / lane.name)
    if lane.recipe:
        command = [str(HERE / "run_queue.py"), "--out", to, "--recipes", lane.recipe, "--seeds", "0"]
        command += ["--minutes", str((left - 10) / 60), "--smoke" if options.smoke else "--graphs", "--variants"]
        command += [f"{each} backbone.width=8".strip() if options.smoke else each for each in lane.variants]
    else:
        command = [str(HERE.parent / "paper_recipe.py"), "--to", to, "--candidates", *lane.variants]
        command += ["--width", "8", "--smoke"] if options.smoke else ["--width", "64", "--precision", "auto"]
        command += [] if options.smoke else ["--cuda-graphs"]
    call(command, options.out / lane.name, seconds=left, first=lane.first)


if __name__ == "__main__":
    main()
