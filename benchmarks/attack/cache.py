"""Disturb the caches of runs, of phases and of decoded images, and compare each run with one that has no cache.

    python benchmarks/attack/cache.py                   60 trials, counts written to docs/results/reliability.md
    python benchmarks/attack/cache.py --trials 5        a few, printed

In turn: one bit of a cache is flipped; the run that trains a phase is killed while another waits for it; three runs
share a cache smaller than they need; the cache is read-only; all its times are years off, as after a jump of the clock.
Every run must succeed, with the bits of an undisturbed one. Needs Linux, and `unshare`.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "benchmarks"), str(ROOT / "benchmarks" / "attack")]

from kills import RUN  # noqa: E402

import zygote  # noqa: E402
from photos import write_photos  # noqa: E402
from reliability import contents, write_section  # noqa: E402

OWN = "PEARL_CACHE_ATTACK"  # set in the process with a mount namespace of its own
KINDS = ("bit flipped", "trainer killed", "over the limit", "read-only", "clock jumped")
CACHES = ("data/phases", "data/cache")
FOLDER = ["run", "digits", "data={name: folder, path: photos}", *RUN, "-q", "--store-every", "0.002"]
ENERGY, SECOND = "method.rank=energy", "method.rank=fixed"  # variants that train the same reference and probe


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if OWN not in os.environ:
        sys.exit(subprocess.call(["unshare", "-rm", sys.executable, *sys.argv], env={**os.environ, OWN: "1"}))
    tried, cut, wrong = Counter(), Counter(), Counter()
    with tempfile.TemporaryDirectory() as target:
        os.environ |= {"OMP_NUM_THREADS": "1", "PEARL_DATA": "data", "PEARL_CACHE": "data/phases"}
        os.environ |= {zygote.PLACE: f"{target}/zygote", zygote.SESSION: str(os.getpid())}
        stage = Stage(Path(target))
        for number in range(options.trials):
            kind = KINDS[number % len(KINDS)]
            noticed, problems = stage.trial(kind, random.Random(f"{options.seed}-{number}"))
            tried[kind] += 1
            cut[kind] += noticed
            wrong[kind] += bool(problems)
            for line in problems:
                print(f"trial {number}, {kind}: {line}", file=sys.stderr)
    rows = [f"| {kind} | {tried[kind]} | {cut[kind]} | {wrong[kind]} |" for kind in KINDS]
    head = "| what happened to the cache | trials | a phase was trained again | ended otherwise |"
    text = (
        f"## Disturbed caches\n\n`python benchmarks/attack/cache.py --trials {options.trials} --seed "
        f"{options.seed}`: runs that load their first phases from a cache, or wait for another run that trains "
        f"them. Compared with a run without a cache: the bytes of every weight file, and all JSON except seconds "
        f"and marks of reuse.\n\n" + "\n".join([head, f"|{'---|' * 4}", *rows]) + "\n"
    )
    print(text)
    if options.trials >= 60:
        write_section("caches", text)
    sys.exit(bool(sum(wrong.values())))


class Stage:
    """Photos, caches filled by one run, and the results of other runs without them."""

    def __init__(self, root: Path) -> None:
        self.origin, self.folder = root / "origin", root / "here"  # decoded images are identified by their files' paths
        for part, first in (("train", 0), ("test", 40)):
            write_photos(self.folder / "photos" / part, {str(i): i for i in range(4)}, 16, start=first)
        self.expected = {}
        for variant in (ENERGY, SECOND):
            _ended(start(self.folder, f"alone-{variant}", variant, PEARL_CACHE="off"))
            self.expected[variant] = results(self.folder / f"alone-{variant}")
            shutil.rmtree(self.folder / f"alone-{variant}")
        _ended(start(self.folder, "first"))
        shutil.rmtree(self.folder / "first")
        self.bytes = sum(file.stat().st_size for file in (self.folder / CACHES[0]).rglob("*"))
        self.folder.rename(self.origin)

    def trial(self, kind: str, rng: random.Random) -> tuple[bool, list[str]]:
        """Disturb the caches of a copy; return whether a phase was trained again, and the errors, if any."""
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.copytree(self.origin, self.folder)
        caches, more = [self.folder / cache for cache in CACHES], {}
        runs = {"one": ENERGY}
        files = sorted(file for cache in caches for file in cache.rglob("*") if file.is_file())
        mounted = []
        if kind == "bit flipped":
            file = rng.choice(files)
            data = bytearray(file.read_bytes())
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            file.write_bytes(data)
        elif kind == "clock jumped":
            then = time.time() + rng.choice([-1, 1]) * rng.uniform(1, 10) * 365 * 24 * 3600
            for target in [*files, *{file.parent for file in files}]:
                os.utime(target, (then, then))
        elif kind == "read-only":
            for cache in caches:
                subprocess.run(["mount", "--bind", cache, cache], check=True)
                subprocess.run(["mount", "-o", "remount,ro,bind", cache], check=True)
                mounted.append(cache)
            shutil.rmtree(rng.choice(sorted(caches[0].iterdir())), ignore_errors=True)  # is refused
        elif kind == "over the limit":
            more = {"PEARL_CACHE_GB": str(self.bytes * rng.uniform(0.3, 1.2) / 1e9)}
            runs |= {"two": SECOND, "three": ""}
        else:
            shutil.rmtree(caches[0])
            killed = start(self.folder, "killed")
            runs |= {"two": SECOND}
        try:
            processes = {name: start(self.folder, name, variant, **more) for name, variant in runs.items()}
            if kind == "trainer killed":
                time.sleep(rng.uniform(0.1, 2))
                killed.send_signal(signal.SIGKILL)
                killed.wait(timeout=60)
            problems = [problem for name in runs for problem in _problems(processes[name])]
        finally:
            for cache in mounted:
                subprocess.run(["umount", cache], check=True)
        for name, variant in runs.items():
            if variant and not problems and results(self.folder / name) != self.expected[variant]:
                problems.append(f"{name} has other bits")
        reused = [manifest.get("reused") for manifest in _manifests(self.folder / "one")]
        return not all(reused), problems


def start(folder: Path, runs: str, variant: str = "", **environment: str) -> zygote.Process:
    """Start a run in a separate process, with its directory below `runs`."""
    env = {**os.environ, "PEARL_RUNS": runs, **environment}
    log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with its process
    process = zygote.Process([*FOLDER, *([variant] if variant else [])], stderr=log, stdout=log, cwd=folder, env=env)
    process.log = log  # type: ignore[attr-defined]
    return process


def _problems(process: zygote.Process) -> list[str]:
    code = process.wait(timeout=300)
    process.log.seek(0)  # type: ignore[attr-defined]
    said = process.log.read().decode()  # type: ignore[attr-defined]
    process.log.close()  # type: ignore[attr-defined]
    return [] if code == 0 and "Traceback" not in said else [f"ended with {code}: {said[-1000:]}"]


def _ended(process: zygote.Process) -> None:
    if problems := _problems(process):
        raise RuntimeError(problems[0])


def results(runs: Path) -> dict[str, object]:
    """Return the files of the one run in a folder that must be equal."""
    (run,) = (target for target in runs.iterdir() if target.is_dir())
    return {name: _without_marks(value) for name, value in contents(run).items() if name != "environment.json"}


def _without_marks(value: object) -> object:
    if isinstance(value, dict):
        return {key: _without_marks(item) for key, item in value.items() if key != "reused"}
    return value


def _manifests(runs: Path) -> list[dict]:
    return [json.loads(file.read_text()) for file in sorted(runs.glob("*/tasks/*/manifest.json"))]


if __name__ == "__main__":
    main()
