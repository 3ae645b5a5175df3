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

from lanes import call, candidates, parsed, queue

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
    left, to, smoke = max(1.0, deadline - time.monotonic()), options.out / lane.name, options.smoke
    if lane.recipe:
        variants = [f"{each} backbone.width=8".strip() if smoke else each for each in lane.variants]
        command = queue(lane.recipe, 0, variants, to, minutes=(left - 10) / 60, smoke=smoke)
    else:
        command = candidates(lane.variants, 0, to, smoke=smoke)
    call(command, to, seconds=left, first=lane.first)


if __name__ == "__main__":
    main()
