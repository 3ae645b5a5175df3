"""Thousands of bad inputs: none may cause a traceback, a hang, a wrong prediction or a changed model.

    python benchmarks/attack/fuzz.py                          all kinds, written to docs/results/reliability.md
    python benchmarks/attack/fuzz.py --cases 20 --print       20 of each kind, printed
    python benchmarks/attack/fuzz.py --kinds images --first 7 --cases 1 --print    one case again

Case i of a kind is a function of the seed, so that a failure can be reproduced by its number. Finished cases are in a
file (`--log`), after which the same command continues. Each case is `pearl` in a separate fork, with limits of memory
and 20 seconds. It must end with a documented exit code; standard error must have printable `pearl: ` lines; the files
of the model must be unchanged; and with exit code 0, the result must be correct.
"""

import argparse
import hashlib
import json
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import sklearn.datasets
import sklearn.model_selection  # noqa: F401
import torch

import pearl.cli
import pearl.lifecycle.learning
import pearl.lifecycle.runs
import pearl.nn.resnet
import pearl.reports.page
import pearl.reports.plan
import pearl.reports.progress
from attack.inputs import KINDS
from attack.stage import LEARN, RUN, Case, Stage, answer_of, asked, write_photos

RESULT = Path(__file__).parents[2] / "docs" / "results" / "reliability.md"
HEAD = "# Bad inputs"  # marks of the section
LIMIT = 20.0  # seconds
BAD = ("traceback", "hang", "killed", "wrong", "touched", "unclear")
CODES = {0, 1, 2, 69, 130}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=320, help="of each kind")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--kinds", nargs="+", default=[*KINDS], choices=[*KINDS])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path, help="a line per case; cases in it are not repeated")
    parser.add_argument("--print", action="store_true", help="print the table; write nothing")
    options = parser.parse_args()
    torch.set_num_threads(1)
    done = read_log(options.log)
    # a file system in memory, if any: a case has a few hundred small files
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        stage = build(Path(folder) / "stage")
        for kind in options.kinds:
            for number in range(options.first, options.first + options.cases):
                if (kind, number) not in done:
                    done[kind, number] = case(stage, kind, number, options.seed, Path(folder) / "case")
                    if options.log:
                        with options.log.open("a") as log:
                            log.write(json.dumps(done[kind, number]) + "\n")
    asked_for = [
        done[kind, number] for kind in options.kinds for number in range(options.first, options.first + options.cases)
    ]
    table = summary(asked_for)
    print(table)
    for line in asked_for:
        if line["end"] in BAD:
            print(
                f"{line['kind']} {line['number']}: {line['end']}: {line['what'][:300]}: {line['said'][-600:]}",
                file=sys.stderr,
            )
    if not options.print:
        write(table)
    if any(line["end"] in BAD for line in asked_for):
        sys.exit(1)


def read_log(log: Path | None) -> dict[tuple[str, int], dict[str, Any]]:
    """Read the results of an earlier call."""
    lines = [json.loads(line) for line in log.read_text().splitlines()] if log and log.exists() else []
    return {(line["kind"], line["number"]): line for line in lines}


def build(root: Path) -> Stage:
    """Create the originals in child processes: this process computes nothing, so that it can be forked."""
    stage = Stage(root)
    root.mkdir(parents=True)
    write_photos(stage.photos)
    env = {"PEARL_RUNS": str(stage.runs), "PEARL_DATA": str(root / "data")}
    for task in ("first", "second"):
        backbone = ["--backbone", "resnet18", *LEARN] if task == "first" else []
        sound(
            Case(task, ["learn", str(stage.model), "--data", str(stage.photos / task), *backbone, "-q"], env=env), root
        )
    answers: dict[str, Any] = {"page": answer_of(["run"], sound(Case("run", RUN, env=env), root))}
    for name, target in (("model", stage.model), ("run", stage.run)):
        for verb, question in asked(target, stage.photos).items():
            if (name, verb) != ("run", "evaluate"):
                answers[f"{name} {verb}"] = answer_of(question, sound(Case(verb, question, env=env), root))
    (root / "answers.json").write_text(json.dumps(answers))
    return stage


def sound(asked_for: Case, folder: Path) -> str:
    """Return the output of a command that must succeed."""
    code, out, err, _ = call(asked_for, folder)
    if code:
        raise RuntimeError(f"{asked_for.arguments}: {err}")
    return out


def case(stage: Stage, kind: str, number: int, seed: int, folder: Path) -> dict[str, Any]:
    """Create one input, try it, and judge the result."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with warnings.catch_warnings(action="ignore"):  # only here: a user would see pearl's own warnings
        asked_for = KINDS[kind](random.Random(f"{seed}/{kind}/{number}"), stage, folder)
    before = digests(asked_for.model, asked_for.learns)
    code, out, err, seconds = call(asked_for, folder)
    if code == -signal.SIGALRM:  # on a shared machine, wall-clock time alone is unreliable
        code, out, err, seconds = call(asked_for, folder, 3 * LIMIT)
    end, why = verdict(asked_for, code, out, err)
    after = digests(asked_for.model, asked_for.learns)
    if end not in BAD and (before.items() - after.items() or (asked_for.sealed and before != after)):
        end = "touched"
    facts = {"kind": kind, "number": number, "end": end, "seconds": round(seconds, 2)}
    return {**facts, "what": f"{asked_for.what}: {' '.join(asked_for.arguments)[:300]}", "said": f"{why} {err[-800:]}"}


def digests(model: Path | None, learns: bool) -> dict[str, str]:
    """Return digests of what must not change: all files of a model, or its finished tasks."""
    if model is None or not model.is_dir():
        return {}
    paths = [model / "config.yaml", *(model / "reference").glob("*"), *(model / "tasks").glob("*/*")] if learns else []
    return {
        str(target): hashlib.sha256(target.read_bytes()).hexdigest()
        for target in paths or model.rglob("*")
        if target.is_file() and target.name not in {".lock", ".holder.json"} and target.stat().st_size < 2**24
    }


def verdict(asked_for: Case, code: int, out: str, err: str) -> tuple[str, str]:
    """Return a verdict on a case in one word, and the reason."""
    if code == -signal.SIGALRM:
        return "hang", ""
    if "Traceback" in err or "Traceback" in out:
        return "traceback", ""
    if code < 0 or code not in CODES:
        return "killed", f"exit code {code}"
    lines = err.splitlines()
    usage = bool(lines) and lines[0].startswith("Usage: ")
    allowed = ("pearl: ", "Try ", "") if usage else ("pearl: ",)
    # other lines are progress
    if "-q" in asked_for.arguments or asked_for.arguments[0] not in ("run", "learn", "resume"):
        timed = "import " if "-v" in asked_for.arguments else "pearl: "  # the timings that -v prints
        strange = [line for line in lines if not usage and not line.startswith((*allowed, timed))]
        if strange:
            return "unclear", strange[0]
    if code == 2 and not err.strip():
        return "unclear", "no word"
    for text in (out, err):
        if odd := [line for line in text.split("\n") if not line.isprintable()]:
            return "unclear", repr(odd[0][:200])
    if max(map(len, lines), default=0) > 10_000:
        return "unclear", "a line of 10,000 characters or more"
    if code == 0 and asked_for.answer is not None:
        try:
            answer = json.loads(json.dumps(answer_of(asked_for.arguments, out)))
        except ValueError as error:
            return "wrong", f"no answer at all ({error}): {out[:200]}"
        if answer != asked_for.answer:
            return "wrong", f"{str(answer)[:300]} instead of {str(asked_for.answer)[:300]}"
    return ("answered" if code == 0 else "refused"), ""


def call(asked_for: Case, folder: Path, limit: float = LIMIT) -> tuple[int, str, str, float]:
    """Run `pearl` with these arguments in a fork; return exit code (negative for a signal), output and seconds."""
    out, err = folder / ".out", folder / ".err"
    started = time.monotonic()
    child = os.fork()
    if not child:
        enter(asked_for, folder, out, err)
    deadline = started + limit
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() > deadline:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return -signal.SIGALRM, "", "", limit
        time.sleep(0.002)
    said = [file.read_bytes()[:5_000_000].decode("utf-8", "backslashreplace") for file in (out, err)]
    return os.waitstatus_to_exitcode(ended[1]), said[0], said[1], time.monotonic() - started


def enter(asked_for: Case, folder: Path, out: Path, err: Path) -> None:
    """Become `pearl`, with limits of resources."""
    code = 70
    try:
        os.setpgid(0, 0)
        for number, (name, flags) in enumerate(
            (
                (os.devnull, os.O_RDONLY),
                (out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
                (err, os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
            )
        ):
            fd = os.open(name, flags)
            os.dup2(fd, number)
            os.close(fd)
        if asked_for.stdin:
            read, write = os.pipe()
            os.write(write, asked_for.stdin[:60_000])
            os.close(write)
            os.dup2(read, 0)
        os.environ.update({"PEARL_RUNS": str(folder / "runs"), "PEARL_DATA": str(folder / "data"), "COLUMNS": "100"})
        os.environ.update(asked_for.env)
        os.chdir(folder)
        now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        most = now + int(asked_for.memory * 2**30)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        kept = sys.stdin, sys.stdout, sys.stderr  # garbage collection would close its descriptor
        sys.stdin, sys.stdout, sys.stderr = (
            os.fdopen(fd, how, encoding="utf-8", errors=errors, buffering=-1 if how == "r" else 1)
            for fd, how, errors in ((0, "r", "strict"), (1, "w", "strict"), (2, "w", "backslashreplace"))
        )
        sys.argv = [
            "pearl",
            *(os.fsdecode(argument.encode("utf-8", "surrogateescape")) for argument in asked_for.arguments),
        ]
        pearl.cli.main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(bool(end.code))
    except BaseException:
        traceback.print_exc()
        code = 71
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
            del kept
        finally:
            os._exit(code)


def summary(lines: Sequence[dict[str, Any]]) -> str:
    """Return a table of counts: a row per kind, and one for all."""
    heads = ["inputs", "answered", "refused", *BAD, "slowest"]
    rows = []
    for kind in [*dict.fromkeys(line["kind"] for line in lines), "all"]:
        own = [line for line in lines if kind in (line["kind"], "all")]
        ends = Counter(line["end"] for line in own)
        cells = [len(own), *(ends[end] for end in ("answered", "refused", *BAD))]
        rows.append([kind, *map(str, cells), f"{max(line['seconds'] for line in own):.1f} s"])
    return "\n".join(
        [
            "| kind | " + " | ".join(heads) + " |",
            f"|{'---|' * (len(heads) + 1)}",
            *(f"| {' | '.join(row)} |" for row in rows),
        ]
    )


def write(table: str) -> None:
    """Write the table into its section of the page, replacing the last one."""
    text = RESULT.read_text()
    start = text.index(HEAD)
    RESULT.write_text(text[:start] + re.sub(r"(\|.*\n)+", lambda _: f"{table}\n", text[start:], count=1))


if __name__ == "__main__":
    main()
