"""Find the recipe of the paper's ResNet-18 numbers on one GPU within a quarter of an hour, and run it in full.

    python benchmarks/gpu/paper_numbers.py --out OUT --minutes 10
    python benchmarks/gpu/paper_numbers.py --out OUT --smoke            one step a phase, on any machine

Lanes of processes run side by side (start NVIDIA's MPS first). Three lanes, one for each seed, train the reference and
the probe of task 2 with Mammoth's multistep schedule, wait until the candidates' ranks are known, and run the 5-task
stream in full with the candidate that comes nearest to the paper's mean rank. The other lanes scan further candidates
of `paper_recipe.py` with seed 0, and the probes of a DeiT-Tiny as many steps long as the paper's. They have a lower
priority on the GPU. Phases are cached and runs are resumable: a second call continues where the first ended.
"""

import json
import math
import sys
import threading
import time
from pathlib import Path

from lanes import call, candidates, queue, with_options

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
from paper_recipe import CANDIDATES, RANKS_ONLY  # noqa: E402 - a program beside this one's folder

MEAN_RANK = 14.0  # what the paper's total of 12.56 M parameters implies
FULL = ["multistep, view", "multistep, spatial", "cosine, view", "cosine, spatial"]
OTHERWISE = "constant, 15 epochs, spatial; adapt multistep"  # its ranks are known to fit
CLASS_STATISTICS = "method.classifier.name=statistics method.classifier.train=all"
SCANS = [
    ["cosine, spatial", "cosine, view", "cosine, cosine probe, spatial", "cosine, cosine probe, view",
     OTHERWISE, "constant, L2 1e-4, spatial", "multistep, L2 5e-4, spatial"],
    ["multistep, view, 10 tasks", "multistep, view, 20 tasks", "constant, 15 epochs, spatial; adapt cosine",
     "cosine, decoupled decay .01, spatial", "constant, L2 5e-4, spatial"],
]  # fmt: skip
STREAM = "stream.tasks=4 stream.classes=40 stream.per_class=240 stream.test_per_class=100"  # 470 steps a phase
PROBES = [
    "method.probe=targets",
    "method.probe=full",
    "method.rank.name=fixed method.rank.r=8",
    "method.rank.name=fixed method.rank.r=32",
]


def main() -> None:
    options = with_options(__doc__).parse_args()
    lanes = Lanes(options.out, time.monotonic() + 60 * options.minutes, options.smoke, options.full_data)
    work = [
        *(threading.Thread(target=lanes.seed, args=(seed,)) for seed in (0, 1, 2)),
        *(threading.Thread(target=lanes.scan, args=(f"scan{i}", names)) for i, names in enumerate(SCANS)),
        threading.Thread(target=lanes.probes),
    ]
    for thread in work:
        thread.start()
    for thread in work:
        thread.join()


class Lanes:
    """Lanes of processes side by side. A lane's figures and output are in a folder of its own."""

    def __init__(self, out: Path, deadline: float, smoke: bool, full_data: Path | None) -> None:
        self.out, self.deadline, self.smoke, self.full_data = out, deadline, smoke, full_data
        self.decision = threading.Lock()
        self.chosen: str | None = None

    def seed(self, seed: int) -> None:
        """The candidates' ranks, then the full stream with heads and with class statistics."""
        lane = f"seed{seed}"
        self.recipe(lane, FULL[:2], seed)
        settings = " ".join(part for part in CANDIDATES[self.choose()] if part not in RANKS_ONLY)
        while self.full_data and not self.full_data.exists() and time.monotonic() < self.deadline:
            time.sleep(0.5)
        self.queue(lane, "cifar100-5t-resnet18", seed, [settings, f"{settings} {CLASS_STATISTICS}"])

    def scan(self, lane: str, names: list[str]) -> None:
        """Further candidates, with seed 0."""
        for name in names:
            self.recipe(lane, [name], 0, first=name in FULL)
        if lane == "scan1":
            isolated = "method=isolation stream.tasks=2 stream.classes=40"
            self.queue(lane, "cifar100-5t-resnet18", 0, [isolated], first=False)

    def probes(self) -> None:
        """A DeiT-Tiny's ranks and accuracies with both probes and with fixed ranks."""
        for seed in (0, 1, 2):
            variants = [f"{STREAM} {probe}" for probe in PROBES]
            self.queue(f"vit{seed}", "schedule-deit_tiny", seed, variants, first=False)

    def choose(self) -> str:
        """The candidate whose mean rank is nearest to the paper's, by all that is known of it once each is known."""
        with self.decision:
            while self.chosen is None:
                rows = [row for file in self.out.glob("*/paper_recipe.json") for row in _read(file).items()]
                ranks = {name: [row["mean_rank"] for key, row in rows if f" {name} " in key] for name in FULL}
                late = time.monotonic() > self.deadline - 470  # seconds that a full run needs at least
                if (all(ranks.values()) and len(ranks[FULL[0]]) == 3) or late or self.smoke:
                    away = {name: abs(math.log(sum(r) / len(r) / MEAN_RANK)) for name, r in ranks.items() if r}
                    nearest = min(away, key=lambda name: away[name], default=OTHERWISE)
                    self.chosen = nearest if away.get(nearest, 1) < math.log(1.25) else OTHERWISE
                    (self.out / "chosen.json").write_text(json.dumps({"chosen": self.chosen, "ranks": ranks}) + "\n")
                else:
                    time.sleep(1)
            return self.chosen

    def recipe(self, lane: str, names: list[str], seed: int, *, first: bool = True) -> None:
        """Candidates of `paper_recipe.py` at the paper's width."""
        self.call(lane, candidates(names, seed, self.out / lane, smoke=self.smoke), first=first)

    def queue(self, lane: str, recipe: str, seed: int, variants: list[str], *, first: bool = True) -> None:
        """Variants of a recipe, by `run_queue.py`."""
        width = " backbone.width=8" if self.smoke and "resnet18" in recipe else ""
        made, minutes = [each + width for each in variants], (self.deadline - time.monotonic() - 10) / 60
        command = queue(recipe, seed, made, self.out / lane, minutes=minutes, smoke=self.smoke)
        self.call(lane, command, first=first)

    def call(self, lane: str, command: list[str], *, first: bool) -> None:
        """Run a program until it ends or the time is up."""
        call(command, self.out / lane, seconds=max(1.0, self.deadline - time.monotonic()), first=first)


def _read(file: Path) -> dict:
    try:
        return json.loads(file.read_text())
    except ValueError:  # being written at this moment
        return {}


if __name__ == "__main__":
    main()
