"""Break essential lines of the methods, one at a time, and check that the tests notice.

    python benchmarks/mutants.py                       every fault of mutants.yaml: about ten seconds each
    python benchmarks/mutants.py sprompts hide         those whose names start so
    python benchmarks/mutants.py --list

A fault replaces one piece of text in a copy of the package; its tests then run against the copy and have to fail. They
run on an unbroken copy first: tests that fail there notice nothing. The exit code is 1 if a fault is not noticed.
`tests/test_mutants.py` checks that every fault still applies.
"""

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import yaml

ROOT = Path(__file__).parents[1]
FAULTS = Path(__file__).with_suffix(".yaml")
FAILED = 1  # exit code of pytest


class Fault(NamedTuple):
    """One broken line: in `file` (below src/pearl) the text `old`, which occurs once, becomes `new`."""

    name: str
    file: str
    old: str
    new: str
    tests: str  # arguments of pytest

    def apply(self, package: Path) -> None:
        """Break the line in a copy of the package.

        Raises:
            ValueError: the text does not occur exactly once, or nothing would change.
        """
        path = package / self.file
        text = path.read_text(encoding="utf-8")
        if text.count(self.old) != 1 or self.old == self.new:
            raise ValueError(
                f"{self.name}: {self.file} has {text.count(self.old)} times {self.old!r}; correct {FAULTS.name}"
            )
        path.write_text(text.replace(self.old, self.new), encoding="utf-8")


def faults() -> list[Fault]:
    """Read mutants.yaml: a list of faults for each group of tests."""
    groups = yaml.safe_load(FAULTS.read_text(encoding="utf-8"))
    return [Fault(tests=group["tests"], **fault) for group in groups for fault in group["faults"]]


def tested(tests: str, fault: Fault | None = None) -> tuple[int, str]:
    """Run tests against a copy of the package, broken if a fault is given: pytest's exit code and output."""
    with tempfile.TemporaryDirectory() as folder:
        package = Path(shutil.copytree(ROOT / "src" / "pearl", Path(folder) / "pearl"))
        if fault:
            fault.apply(package)
        environment = {**os.environ, "PYTHONPATH": folder, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-n0", "-p", "no:cacheprovider", *shlex.split(tests)]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout


@cache
def not_usable(tests: str) -> str:
    """Return why tests cannot show anything: they do not pass on the unbroken package. Empty if they do."""
    code, output = tested(tests)
    return f"not run: without a fault, pytest exits with {code}: {last_line(output)}" if code else ""


def outcome(fault: Fault) -> str:
    """Run the tests of a fault against a broken copy: "killed", "survived", or why neither can be said."""
    if problem := not_usable(fault.tests):
        return problem
    code, output = tested(fault.tests, fault)
    if code == FAILED and "ImportError" not in output and "SyntaxError" not in output:
        return "killed"
    return "survived" if code == 0 else f"not run: pytest exits with {code}: {last_line(output)}"


def last_line(output: str) -> str:
    """Return the last line of pytest's output."""
    return (output.strip().splitlines() or ["no output"])[-1]


def chosen(starts: Sequence[str]) -> Iterator[Fault]:
    """The faults whose names start with one of `starts`; all without any."""
    return (fault for fault in faults() if not starts or fault.name.startswith(tuple(starts)))


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="starts of names; default: all")
    parser.add_argument("--list", action="store_true", help="run nothing")
    options = parser.parse_args(arguments)
    results = []
    for fault in chosen(options.names):
        results.append("listed" if options.list else outcome(fault))
        print(f"{results[-1]:9} {fault.name}: {fault.file}", flush=True)
    if options.list:
        return 0
    print(f"{results.count('killed')} of {len(results)} faults are noticed")
    return int(results.count("killed") < len(results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
