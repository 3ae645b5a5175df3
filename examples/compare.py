"""Compare your own method with pearl's: runs with two seeds, a line per method.

python examples/compare.py [RECIPE]      (digits, if none is given: some minutes on 2 cores)
"""

import sys
from pathlib import Path
from statistics import mean
from typing import Any

import pearl

METHODS = ["finetune", str(Path(__file__).with_name("slow_backbone.py")) + ":SlowBackbone", "pearl"]
SHOWN = ("class_il.final", "task_il.final", "parameters_million")


def main(recipe: str = "digits", seeds: tuple[int, ...] = (0, 1), **settings: Any) -> None:
    """Run each method with each seed, or reuse finished runs, and print means over the seeds."""
    print(f"{'':14}", *(f"{name:>20}" for name in SHOWN))
    for method in METHODS:
        runs = [pearl.run(recipe, method=method, seed=seed, quiet=True, **settings) for seed in seeds]
        cells = (mean(run.summary[name] for run in runs) for name in SHOWN)
        print(f"{method.rpartition(':')[2]:14}", *(f"{cell:20.2f}" for cell in cells))


if __name__ == "__main__":
    main(*sys.argv[1:2])
