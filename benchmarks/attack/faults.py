"""Make a command's N-th file operation fail, for every N, repeat the command, and compare all bits.

    python benchmarks/attack/faults.py                          all of them, written to docs/results/reliability.md
    python benchmarks/attack/faults.py --verbs refit --every 10 --print    each tenth of one verb, printed

An operation is a file that is opened to be written, a write, fsync, rename, new folder or removal below the folder of
the command. It fails with ENOSPC or EIO, or the process is killed there: in turn, or as given by `--kinds`. A failing
command must print the reason, in lines that begin with `pearl: `, and if its output exists nevertheless, it must report
that too. The same command, repeated, must end like an undisturbed one.
"""

import argparse
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path

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
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=[*KINDS])
    parser.add_argument("--every", type=int, default=1, help="only every N-th operation")
    parser.add_argument("--print", action="store_true", help="print the table; write nothing")
    options = parser.parse_args()
    rows, wrong = [], 0
    with tempfile.TemporaryDirectory() as place:
        os.environ |= {"OMP_NUM_THREADS": "1", "PEARL_DATA": "data", "PEARL_RUNS": "runs", "PEARL_CACHE": "off"}
        os.environ |= {zygote.PLACE: f"{place}/zygote", zygote.SESSION: str(os.getpid())}
        for verb in options.verbs:
            (Path(place) / f"disk-{verb}").mkdir()
            stage = Stage(Path(place) / f"disk-{verb}", verb, Path(place))
            count, ends = int(stage.count.read_text()), Counter()
            for number, at in enumerate(range(1, count + 1, options.every)):
                kind = options.kinds[number % len(options.kinds)]
                problems = fault(stage, at, kind, ends)
                for line in problems:
                    print(f"{verb}, operation {at} of {count}, {kind}: {line}", file=sys.stderr)
                wrong += bool(problems)
                ends["wrong"] += bool(problems)
            tried = sum(ends[end] for end in ("ended well", "refused", "killed"))
            cells = [tried, count, ends["ended well"], ends["refused"], ends["stored"], ends["killed"], ends["wrong"]]
            rows.append(f"| {verb} | {' | '.join(map(str, cells))} |")
            print(rows[-1], flush=True)
    head = ["command", "faults", "operations", "ended well", "refused", "of which stored", "killed", "wrong"]
    table = "\n".join([f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *rows])
    if not options.print:
        write_section("faults", text(table))
    sys.exit(bool(wrong))


def fault(stage: Stage, at: int, kind: str, ends: Counter[str]) -> list[str]:
    """Make one operation fail and repeat the command; return the errors, if any."""
    stage.fresh()
    code, _, error = stage.go(at, kind)
    wrong = []
    there = stage.found() == stage.expected
    if kind == "SIGKILL" and code == -9:
        ends["killed"] += 1
    elif code == 0:
        ends["ended well"] += 1
    else:
        ends["refused"] += 1
        ends["stored"] += there
        if code not in CODES or "Traceback" in error:
            wrong.append(f"ended with {code}: {error}")
        elif not error.strip() or not all(line.startswith("pearl: ") for line in error.splitlines()):
            wrong.append(f"said {error!r}")
        elif there and "stored" not in error and stage.verb.result == "new":
            wrong.append(f"did not report that everything is stored: {error!r}")
    again, _, error = stage.go()
    if again:
        wrong.append(f"the same command ended with {again}: {error}")
    found = stage.found()
    names = found.keys() | stage.expected.keys()
    return wrong + [f"{name} differs" for name in sorted(names) if found.get(name) != stage.expected.get(name)]


def text(table: str) -> str:
    """Return the section of the page."""
    return (
        f"## Operations on files that failed\n\n"
        f"`python benchmarks/attack/faults.py`: one operation on a file (opened to be written, written, synced, "
        f"renamed, made, removed) fails with ENOSPC or EIO, or the process is killed there, in turn; then the same "
        f"command is repeated. Its files must equal those of an undisturbed command, bit by bit; a failing command "
        f"must print the reason in separate lines, and report if everything is stored nevertheless.\n\n{table}\n"
    )


if __name__ == "__main__":
    main()
