"""Find the most accurate recipe for CIFAR-100 from scratch on one GPU within ten minutes, and run it on three seeds.

    python benchmarks/gpu/accuracy.py --out OUT --minutes 10
    python benchmarks/gpu/accuracy.py --out OUT --smoke             one step a phase, on any machine

Six processes run side by side (start NVIDIA's MPS first). First they train six variants of the recipe, with equally
many passes of images, on the first 50 classes (tasks of 20, 20 and 10) without a tenth of the training images, and are
evaluated on these. The best policy, rotations or none, and the better optimizer are chosen by them, one after the
other. Then the chosen recipe runs in full: 5 tasks with three seeds, 10 and 20 tasks, with and without rotations, and
EFC++ and FeCAM with the same images. All of these have the same number of epochs, which follows from the measured
speed and the time left. What remains of the time goes to readings of the paper's recipe. Runs are resumable.
"""

import json
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from lanes import call, candidates, queue, with_options

LANES = 6
RECIPE = "accurate-cifar100-5t-resnet18"
STARTUP = 20.0  # seconds of a process before its first step and after its last one
TURNS = 4
PROBE = 15  # epochs
SPACES = 3
TASK = 10_000  # images of a task of 5

PILOT = "stream.tasks=[20,20,10] stream.classes=50 stream.validation=0.1 stream.evaluate_on=validation"
PILOT += " method.classifier.spaces=2"
PILOT_IMAGES, PILOT_EPOCHS = 9_000, 60  # of a task's phase
VARIANTS = {  # policy, rotations, optimizer of task 1
    "autoaugment": ("autoaugment", False, "sgd"),
    "autoaugment, rotations": ("autoaugment", True, "sgd"),
    "no policy": ("none", False, "sgd"),
    "no policy, rotations": ("none", True, "sgd"),
    "trivialaugment": ("trivialaugment", False, "sgd"),
    "autoaugment, adamw": ("autoaugment", False, "adamw"),
}
ADAMW = " ".join(f"train.phases.reference.{each}" for each in ("optimizer=adamw", "lr=0.002", "weight_decay=0.05"))
SMOKE = "backbone.width=8 stream.per_class=20 stream.test_per_class=5"
DECAYS = ["multistep, L2 5e-4, view", "multistep, decoupled decay .01, view"]  # of `paper_recipe.py`


@dataclass(frozen=True)
class Choice:
    """A recipe: the policy, whether rotations are classes, the optimizer of task 1."""

    policy: str
    rotations: bool
    optimizer: str

    def settings(self, epochs: int) -> str:
        """Return the overrides for as many passes of images as `epochs` without rotations have."""
        length = round(epochs / TURNS) if self.rotations else epochs
        found = [f"images.policy={self.policy}", f"method.rotations={str(self.rotations).lower()}"]
        for phase in ("reference", "adapt"):
            found.append(f"train.phases.{phase}.epochs={length}")
            found += [f"train.phases.{phase}.batch_size=32"] * self.rotations  # 128 images with their rotations
        return " ".join([*found, ADAMW] if self.optimizer == "adamw" else found)


@dataclass(frozen=True)
class Job:
    """Runs of a process, one after the other: variants of a recipe with a seed, or candidates of `paper_recipe.py`."""

    name: str
    recipe: str
    variants: tuple[str, ...]
    seed: int = 0
    first: bool = True  # has priority on the GPU


def main() -> None:
    options = with_options(__doc__).parse_args()
    lanes = Lanes(options.out, time.monotonic() + 60 * options.minutes, options.smoke)
    chosen, epochs = lanes.pilot()
    while options.full_data and not options.full_data.exists() and lanes.left > 0:
        time.sleep(0.5)
    lanes.run([*jobs(chosen, epochs), *leftovers()])


def jobs(chosen: Choice, epochs: int) -> Iterator[Job]:
    """Yield the runs in full, in the order in which they begin."""
    best = chosen.settings(epochs)
    for seed in (0, 1, 2):
        yield Job(f"5t-seed{seed}", RECIPE, (best,), seed)
    yield Job("10t", RECIPE.replace("5t", "10t"), (best,))
    other = Choice(chosen.policy, not chosen.rotations, chosen.optimizer)
    yield Job("5t-other", RECIPE, (other.settings(epochs),))
    policy, half = f"images.policy={chosen.policy}", max(1, epochs // 2)
    efcpp = [f"train.phases.{phase}.epochs={half}" for phase in ("efcpp_first", "efcpp", "efcpp_balance")]
    yield Job("efcpp", RECIPE, (" ".join(["method=efcpp", policy, *efcpp]),), first=False)
    yield Job("20t", RECIPE.replace("5t", "20t"), (best,))
    fecam = f"method=fecam {policy} train.phases.extractor.epochs={epochs}"
    yield Job("fecam", RECIPE, (fecam,), first=False)


def leftovers() -> Iterator[Job]:
    """Yield readings of the paper's recipe."""
    for number, name in enumerate(DECAYS):
        yield Job(f"decay{number}", "", (name,), first=False)
    yield Job("isolation", "cifar100-5t-resnet18", ("method=isolation stream.tasks=2 stream.classes=40",), first=False)
    yield Job("paper-10t", "cifar100-10t-resnet18", ("",), first=False)


def pilot_of(variant: str) -> str:
    """Return the name of the job of a variant."""
    return "pilot-" + variant.replace(", ", "-").replace(" ", "-")


def passes(epochs: float) -> float:
    """Return the images that pass forwards and backwards in all runs in full that `jobs` yields, but FeCAM's."""
    stream = TASK * (SPACES * epochs + (SPACES - 1) * PROBE)
    half = epochs / 2
    efcpp = TASK * half * (TURNS + 4 * (1 + 1 / 3))  # four later tasks, with an old network beside
    return (4 + 1 / 2 + 1 / 4) * stream + efcpp


class Lanes:
    """Processes side by side. A job's figures and output are in a folder of its own."""

    def __init__(self, out: Path, deadline: float, smoke: bool) -> None:
        self.out, self.deadline, self.smoke = out, deadline, smoke
        self.lock = threading.Lock()

    @property
    def left(self) -> float:
        """Return the seconds left."""
        return self.deadline - time.monotonic()

    def pilot(self) -> tuple[Choice, int]:
        """Run the variants; return the chosen one, and the epochs for which the time left suffices."""
        file = self.out / "chosen.json"
        if file.exists():
            found = json.loads(file.read_text())
            return Choice(**found["chosen"]), found["epochs"]
        began = time.monotonic()
        made = {name: Choice(*parts) for name, parts in VARIANTS.items()}
        self.run(
            Job(pilot_of(name), RECIPE, (f"{PILOT} {each.settings(PILOT_EPOCHS)}",)) for name, each in made.items()
        )
        seconds = time.monotonic() - began
        scores = {name: self.score(pilot_of(name)) for name in made}
        chosen = choose(scores)
        each = PILOT_IMAGES * (2 * PILOT_EPOCHS + PROBE)
        rate = sum(map(bool, scores.values())) * each / max(1.0, seconds - STARTUP)  # of those that finished
        epochs = TURNS if self.smoke else epochs_for(0.9 * rate * (self.left - 2 * STARTUP))
        facts = {"chosen": vars(chosen), "epochs": epochs, "held-out class-IL": scores}
        facts |= {"pilot seconds": round(seconds, 1), "images per second": round(rate)}
        file.write_text(json.dumps(facts, indent=1) + "\n")
        return chosen, epochs

    def score(self, job: str) -> float:
        """Return the class-IL accuracy of a job's run, 0 if it has none."""
        try:
            rows = json.loads((self.out / job / "gpu.json").read_text())
            return float(rows[0]["figures"]["class_il.final"])
        except (OSError, ValueError, KeyError, IndexError):
            return 0.0

    def run(self, todo: Iterable[Job]) -> None:
        """Run jobs in order, a few at once, until the time is up."""
        with ThreadPoolExecutor(LANES if not self.smoke else 2) as pool:
            list(pool.map(self.job, todo))

    def job(self, job: Job) -> None:
        """Run a job in a process, until it ends or the time is up."""
        if self.left < STARTUP and not self.smoke:
            return
        folder = self.out / job.name
        if not job.recipe:
            command = candidates(job.variants, job.seed, folder, smoke=self.smoke)
        else:
            variants = [f"{each} {SMOKE if self.smoke else 'engine.precision=auto'}" for each in job.variants]
            minutes = max(1.0, self.left - 8) / 60
            command = queue(job.recipe, job.seed, variants, folder, minutes=minutes, smoke=self.smoke)
        call(command, folder, seconds=None if self.smoke else max(1.0, self.left), first=job.first)


def choose(scores: dict[str, float]) -> Choice:
    """Choose the policy, then rotations with it or with the nearest measured one, then the optimizer of task 1."""
    policies = {"autoaugment": "autoaugment", "trivialaugment": "trivialaugment", "no policy": "none"}
    best = max(policies, key=lambda name: scores[name])
    near = "no policy" if best == "no policy" else "autoaugment"
    rotations = scores[f"{near}, rotations"] > scores[near]
    optimizer = "adamw" if scores["autoaugment, adamw"] > scores["autoaugment"] else "sgd"
    return Choice(policies[best], rotations, optimizer)


def epochs_for(images: float) -> int:
    """Return the epochs, a multiple of 4 from 40 to 200, whose runs pass at most so many images."""
    return max([40, *(epochs for epochs in range(40, 201, TURNS) if passes(epochs) <= images)])


if __name__ == "__main__":
    main()
