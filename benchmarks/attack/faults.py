"""Make a command's N-th file operation fail, for every N, repeat the command, and compare all bits.

    python benchmarks/attack/faults.py                              all of them, to docs/results/reliability.md
    python benchmarks/attack/faults.py --verbs refit --cases 10     ten of one command, drawn at random, printed
    python benchmarks/attack/faults.py --state FILE                 continues where it was stopped, by what FILE says

An operation is a file that is opened to be written, a write, fsync, rename, new folder or removal below the folder of
the command. It fails with ENOSPC or EIO, or the process is killed there, in turn. Cases run in random order. A failing
command must print the reason, in lines that begin with `pearl: `, and if its output exists nevertheless, it must report
that too. The same command, repeated, must end like an undisturbed one.
"""

import argparse
import json
import os
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "benchmarks"), str(ROOT / "benchmarks" / "attack")]

import kills  # noqa: E402

import zygote  # noqa: E402
from reliability import write_section  # noqa: E402

KINDS = ("ENOSPC", "EIO", "SIGKILL")
CODES = (0, 1, 2)
# runs in a fork before the command line; the audit hook gets opened, renamed, created and removed files
PROGRAM = """
import errno, os, signal, sys
at, kind, root, said = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]
del sys.argv[1:5]
count = 0

def step():
    global count
    count += 1
    if count == at:
        if kind == "SIGKILL":
            os.kill(os.getpid(), signal.SIGKILL)
        number = getattr(errno, kind)
        raise OSError(number, os.strerror(number))

def below(path):
    return isinstance(path, (str, bytes)) and os.path.abspath(os.fsdecode(path)).startswith(root + os.sep)

def hook(event, arguments):
    if event == "open":
        path, _, flags = arguments
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) and not flags & os.O_DIRECTORY and below(path):
            step()
    elif event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link") and below(arguments[0]):
        step()

def counted(real, half=False):
    def call(descriptor, *rest):
        try:
            step()
        except OSError:
            if half:
                real(descriptor, rest[0][: len(rest[0]) // 2])
            raise
        return real(descriptor, *rest)
    return call

os.fsync, os.write = counted(os.fsync), counted(os.write, half=True)
sys.addaudithook(hook)
import pearl.cli
try:
    pearl.cli.main()
finally:
    at = 0
    if kind == "count":
        with open(said, "w") as file:
            file.write(str(count))
"""


class Stage(kills.Stage):
    """A command whose file operations are counted, and fail."""

    def go(self, at: int = 0, kind: str = "count") -> tuple[int, str, str]:  # type: ignore[override]
        """Run the command with operation number `at` failing; return its exit code, output and complaints."""
        self.count = self.origin.parent / f"{self.origin.name}.count"
        given = [at, kind, self.folder, self.count, *self.verb.arguments]
        done = zygote.run(map(str, given), program=["-c", PROGRAM], text=True, cwd=self.folder)
        return done.returncode, done.stdout, done.stderr


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--verbs", nargs="+", choices=kills.VERBS, default=[*kills.VERBS])
    parser.add_argument("--cases", type=int, help="number of cases, drawn at random; only printed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--state", type=Path, help="file with a line for each case; cases in it are not repeated")
    options = parser.parse_args()
    lines = options.state.read_text().splitlines() if options.state and options.state.exists() else []
    known = {(line["verb"], line["at"]): line for line in map(json.loads, lines)}
    with tempfile.TemporaryDirectory() as target:
        os.environ |= {"OMP_NUM_THREADS": "1", "PEARL_DATA": "data", "PEARL_RUNS": "runs", "PEARL_CACHE": "off"}
        os.environ |= {zygote.PLACE: f"{target}/zygote", zygote.SESSION: str(os.getpid())}
        stages = {}
        for verb in options.verbs:
            (Path(target) / f"disk-{verb}").mkdir()
            stages[verb] = Stage(Path(target) / f"disk-{verb}", verb, Path(target))
        counts = {verb: int(stage.count.read_text()) for verb, stage in stages.items()}
        cases = [(verb, at) for verb, count in counts.items() for at in range(1, count + 1)]
        random.Random(options.seed).shuffle(cases)
        cases = cases[: options.cases]
        for verb, at in cases:
            if (verb, at) not in known:
                kind = KINDS[at % len(KINDS)]
                known[verb, at] = {"verb": verb, "at": at, "kind": kind, **fault(stages[verb], at, kind)}
                if options.state:
                    with options.state.open("a") as file:
                        file.write(json.dumps(known[verb, at]) + "\n")
            if known[verb, at]["wrong"]:
                print(json.dumps(known[verb, at]), file=sys.stderr, flush=True)
    told = [known[case] for case in cases]
    section = text(told, counts)
    print(section)
    if options.cases is None:
        write_section("faults", section)
    sys.exit(any(one["wrong"] for one in told))


def fault(stage: Stage, at: int, kind: str) -> dict[str, object]:
    """Make one operation fail and repeat the command; return how it ended, and the errors."""
    stage.fresh()
    code, _, error = stage.go(at, kind)
    wrong, end = [], "refused"
    there = stage.results() == stage.expected
    if kind == "SIGKILL" and code == -9:
        end = "killed"
    elif code == 0:
        end = "ended well"
    elif code not in CODES or "Traceback" in error:
        wrong.append(f"ended with {code}: {error}")
    elif not error.strip() or not all(line.startswith("pearl: ") for line in error.splitlines()):
        wrong.append(f"said {error!r}")
    elif there and "stored" not in error and stage.verb.result == "new":
        wrong.append(f"did not report that everything is stored: {error!r}")
    again, _, error = stage.go()
    results = stage.results()
    if again and not (results == stage.expected and "new: exists" in error):  # `refit` makes a model once
        wrong.append(f"the same command ended with {again}: {error}")
    names = results.keys() | stage.expected.keys()
    wrong += [f"{name} differs" for name in sorted(names) if results.get(name) != stage.expected.get(name)]
    return {"end": end, "stored": end == "refused" and there, "wrong": wrong}


def text(told: list[dict[str, Any]], counts: dict[str, int]) -> str:
    """Return the section of the page."""
    head = ["command", "operations", "faults", "ended well", "refused", "of which stored", "killed", "wrong"]
    lines = [head, ["---"] * len(head)]
    for verb, count in counts.items():
        of = [one for one in told if one["verb"] == verb]
        ends = Counter(one["end"] for one in of)
        stored, wrong = (sum(bool(one[key]) for one in of) for key in ("stored", "wrong"))
        lines.append([verb, count, len(of), ends["ended well"], ends["refused"], stored, ends["killed"], wrong])
    table = "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
    return (
        f"## Failing file operations\n\n"
        f"`python benchmarks/attack/faults.py`, {len(told)} of {sum(counts.values())} cases: one operation on a file "
        f"(opened to be written, written, synced, renamed, made, removed) fails with ENOSPC or EIO, or the process is "
        f"killed there, in turn; then the same command is repeated. Its files must equal those of an undisturbed one, "
        f"bit by bit; a failing command must print the reason in separate lines, and report if everything is stored "
        f"nevertheless.\n\n{table}\n"
    )


if __name__ == "__main__":
    main()
