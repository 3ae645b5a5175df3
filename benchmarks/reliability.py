"""Kill runs with SIGKILL at random moments, resume each time, and compare with an uninterrupted run.

    python benchmarks/reliability.py                      50 kills of pearl and of finetune, written to docs/actual
    python benchmarks/reliability.py --kills 5 --print    a few, printed

A process that has imported everything but computed nothing forks a child per attempt, so that Python starts only once.
The comparison is of the bytes of every weight file, and all JSON except seconds.
"""

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import sklearn.datasets  # noqa: F401 - imported once here, for all children
import torch

from pearl.errors import PearlError
from pearl.lifecycle.runs import execute
from pearl.nn import resnet  # noqa: F401
from pearl.settings.config import RunConfig, load_config
from pearl.training.engine import Observer

RESULT = Path(__file__).parents[1] / "docs" / "actual" / "reliability.md"
TIMES = {"seconds", "evaluation_seconds", "started", "time"}  # permitted differences of two equal runs
SMALL = ["backbone.width=4", "engine.channels_last=false", "stream.per_class=40", "train.epochs=4"]
SMALL += ["train.phases.probe.epochs=3", "stream.test_per_class=20"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--methods", nargs="+", default=["pearl", "finetune"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--print", action="store_true", help="print the table; write nothing")
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["PEARL_CACHE"] = "off"  # a killed run must train its phases itself
    rows = [trial(method, options.kills, random.Random(options.seed)) for method in options.methods]
    table = "\n".join(
        ["| method | kills | where they fell | runs that came to their end | all bits equal |", f"|{'---|' * 5}", *rows]
    )
    if options.print:
        print(table)
    else:
        text = (
            f"## Killed runs\n\n"
            f"`python benchmarks/reliability.py --kills {options.kills}`: SIGKILL at random "
            f"moments of a run on digits (ResNet-18 of width 4, 5 tasks), restarted until it is done; then the next "
            f"run. Compared with an uninterrupted run: the bytes of every weight file, and every JSON and YAML file "
            f"except seconds. A run that cannot resume ends the script.\n\n{table}\n"
        )
        write_section("runs", text)
        print(text)
    if any("NO" in row for row in rows):
        sys.exit(1)


def write_section(name: str, text: str) -> None:
    """Write a section of docs/actual/reliability.md, replacing the one of this name, or at the end."""
    start, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
    before, actual, rest = RESULT.read_text().partition(start)
    after = rest.partition(end)[2] if actual else ""
    RESULT.write_text(f"{before if actual else before.rstrip() + chr(10) * 2}{start}{text}{end}{after}")


def trial(method: str, kills: int, rng: random.Random) -> str:
    """Kill runs of one method until there were enough kills; return a row of the table."""
    config = load_config("digits", [*SMALL, f"method={method}"])
    fallen: dict[str, int] = {}
    runs, equal = 0, True
    with tempfile.TemporaryDirectory() as folder:
        whole, broken = Path(folder) / "whole", Path(folder) / "broken"
        started = time.monotonic()
        attempt(config, whole)
        length = time.monotonic() - started
        expected = contents(whole)
        while sum(fallen.values()) < kills:
            runs += 1
            done = False
            while not done:
                left = kills - sum(fallen.values())
                # at most a third of a run, so that one run is killed several times
                done = attempt(config, broken, kill_after=rng.uniform(0, length / 3) if left else None)
                if not done:
                    phase_name = where(broken)
                    fallen[phase_name] = fallen.get(phase_name, 0) + 1
            actual = contents(broken)
            different = sorted(
                name for name in expected.keys() | actual.keys() if expected.get(name) != actual.get(name)
            )
            if different:
                print(f"{method}, run {runs}: {', '.join(different)} differ", file=sys.stderr)
                equal = False
            shutil.rmtree(broken)
    phase_names = ", ".join(f"{count} {phase_name}" for phase_name, count in sorted(fallen.items()))
    return f"| {method} | {sum(fallen.values())} | {phase_names} | {runs} | {'yes' if equal else 'NO'} |"


def attempt(config: RunConfig, path: Path, kill_after: float | None = None) -> bool:
    """Run in a child, killed after some seconds; return True if it finished.

    Raises:
        RuntimeError: the child failed by itself.
    """
    child = os.fork()
    if not child:
        try:
            execute(config, path=path, device="cpu", show=Observer(), minutes=0.002)
        except PearlError as error:
            print(error, file=sys.stderr)
            os._exit(2)
        os._exit(0)
    deadline = time.monotonic() + (kill_after if kill_after is not None else 1e9)
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            if status:
                raise RuntimeError(f"a run ended by itself with status {status}")
            return True
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def where(path: Path) -> str:
    """Return the activity of a killed run, from its last line of events."""
    file = path / "events.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    for line in reversed(lines):
        try:
            event = json.loads(line)
        except ValueError:
            continue  # an incomplete line
        if event["event"] in {"phase", "epoch"}:
            return f"in {event['phase']}"
        return {"learnt": "evaluating", "task": "starting a task"}.get(event["event"], "between tasks")
    return "before the first line"


def contents(path: Path) -> dict[str, object]:
    """Return the files of a run that must be equal: bytes of weights and settings, JSON without seconds."""
    actual: dict[str, object] = {}
    for file in sorted(path.rglob("*")):
        name = str(file.relative_to(path))
        if not file.is_file() or name in {"events.jsonl", ".lock", ".holder.json"}:
            continue  # the log records kills, and the last lock holder may be a killed process
        actual[name] = timeless(json.loads(file.read_text())) if file.suffix == ".json" else file.read_bytes()
    return actual


def timeless(value: object) -> object:
    """Return JSON without the permitted differences."""
    if isinstance(value, dict):
        return {key: timeless(item) for key, item in value.items() if key not in TIMES}
    return [timeless(item) for item in value] if isinstance(value, list) else value


if __name__ == "__main__":
    main()
