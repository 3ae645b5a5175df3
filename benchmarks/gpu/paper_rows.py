"""Run rows of the CIFAR-100 tables beside the paper's main one on one GPU within twelve minutes.

    python benchmarks/gpu/paper_rows.py --out OUT --minutes 12
    python benchmarks/gpu/paper_rows.py --out OUT --lanes cosine bsc rank2 rank8 longer-10t longer-20t --seed 0
    python benchmarks/gpu/paper_rows.py --out OUT --smoke           one step a phase, on any machine

All run side by side (start NVIDIA's MPS first): 10 and 20 tasks with priority on the GPU, a network per task, the fixed
ranks 2, 8 and 32, readings of the recipe that `paper_numbers.py` did not reach, and the accurate recipes of 10 and 20
tasks with as many steps a phase as 5 tasks have. The fixed ranks wait for task 1 of one another, which they share. Runs
are resumable: a second call continues where the first ended.
"""

import argparse
import threading
import time
from dataclasses import dataclass

from lanes import call, candidates, queue, with_options

STATISTICS = "method.classifier.name=statistics method.classifier.train=all"
COSINE = " ".join(f"train.phases.{phase}.schedule=cosine" for phase in ("reference", "adapt", "isolation"))


@dataclass(frozen=True)
class Lane:
    """Variants of a recipe, or candidates of `paper_recipe.py` if it has no recipe, one after the other."""

    name: str
    recipe: str
    variants: tuple[str, ...]
    first: bool = False  # has priority on the GPU
    all_classes: bool = True


def longer(epochs: int) -> str:
    """Return the overrides for so many epochs of an accurate recipe's long phases."""
    return " ".join(f"train.phases.{phase}.epochs={epochs}" for phase in ("reference", "adapt"))


LANES = [
    Lane("decays", "", ("multistep, L2 5e-4, view", "multistep, decoupled decay .01, view"), all_classes=False),
    Lane("bsc", "cifar100-5t-bsc", ("",)),
    Lane("20t", "cifar100-20t-resnet18", ("", STATISTICS), first=True),
    Lane("10t", "cifar100-10t-resnet18", ("", STATISTICS), first=True),
    Lane("isolation", "cifar100-5t-resnet18", ("method=isolation",)),
    *(Lane(f"rank{r}", "cifar100-5t-resnet18", (f"method.rank.name=fixed method.rank.r={r}",)) for r in (8, 2, 32)),
    Lane("cosine", "cifar100-5t-resnet18", (f"method=isolation {COSINE}", COSINE)),
    Lane("longer-10t", "accurate-cifar100-10t-resnet18", (longer(120),)),
    Lane("longer-20t", "accurate-cifar100-20t-resnet18", (longer(240),)),
]


def main() -> None:
    parser = with_options(__doc__)
    parser.add_argument("--lanes", nargs="+", choices=[lane.name for lane in LANES], help="all by default")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    deadline = time.monotonic() + 60 * options.minutes
    chosen = [lane for lane in LANES if not options.lanes or lane.name in options.lanes]
    work = [threading.Thread(target=run, args=(lane, options, deadline)) for lane in chosen]
    for thread in work:
        thread.start()
    for thread in work:
        thread.join()


def run(lane: Lane, options: argparse.Namespace, deadline: float) -> None:
    """Run a lane in a process of its own, until it ends or the time is up."""
    while lane.all_classes and options.full_data and not options.full_data.exists() and time.monotonic() < deadline:
        time.sleep(0.5)
    left, to, smoke = (
        max(1.0, deadline - time.monotonic()),
        options.out / f"{lane.name}-seed{options.seed}",
        options.smoke,
    )
    if lane.recipe:
        variants = [f"{each} backbone.width=8".strip() if smoke else each for each in lane.variants]
        command = queue(lane.recipe, options.seed, variants, to, minutes=(left - 10) / 60, smoke=smoke)
    else:
        command = candidates(lane.variants, options.seed, to, smoke=smoke)
    call(command, to, seconds=left, first=lane.first)


if __name__ == "__main__":
    main()
