"""Disturb run, learn, sweep, export and refit at random moments, repeat the same command, and compare all bits.

    python benchmarks/attack/kills.py                    200 moments, counts written to docs/results/reliability.md
    python benchmarks/attack/kills.py --moments 8        a few, printed
    python benchmarks/attack/kills.py --state FILE       resumes from FILE

A moment is SIGKILL, SIGTERM or a full disk: a file system in memory with a random amount of free space. Kind and time
follow from the seed and its number. Processes are forks (tests/zygote.py). Needs Linux, and `unshare` to mount a file
system of its own.
"""

import argparse
import io
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
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "benchmarks")]

import zygote  # noqa: E402
from photos import write_photos  # noqa: E402
from reliability import contents, write_section  # noqa: E402

OWN = "PEARL_KILLS_FOLDER"  # the file system of this process
SIZE = 48 * 2**20  # its size
KINDS = ("SIGKILL", "SIGTERM", "full disk")
TINY = ["backbone.width=4", "engine.channels_last=false", "engine.precision=fp32", "train.batch_size=8"]
RUN = [*TINY, "stream.classes=4", "stream.tasks=2", "stream.per_class=16", "stream.test_per_class=4"]
RUN += ["train.epochs=3", "train.phases.probe.epochs=2"]
LEARN = ["--backbone", "resnet18", *TINY, "images.size=8", "images.pad=1", "images.flip=false", "train.epochs=3"]


@dataclass(frozen=True)
class Verb:
    """A command, and the folder whose bits are compared."""

    arguments: tuple[str, ...]
    result: str
    ended: tuple[int, ...] = (2,)  # exit codes on a full disk


VERBS = {
    "run": Verb(("run", "digits", *RUN, "-q", "--store-every", "0.002"), "runs"),
    "learn": Verb(("learn", "new", "--from", "base", "--data", "second", "-q", "--store-every", "0.002"), "new"),
    "sweep": Verb(("sweep", "digits", *RUN, "method=[finetune,ncm]", "--workers", "2", "-q"), "runs", (1, 2)),
    "export": Verb(("export", "base", "--to", "peft", "-o", "out/shop", "--force"), "out"),
    "refit": Verb(("refit", "base", "--data", "first", "--to", "new", "-q"), "new"),
}
HEADS = ("export", "refit")  # of a model with heads


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moments", type=int, default=200)
    parser.add_argument("--verbs", nargs="+", choices=VERBS, default=[*VERBS])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--state", type=Path, help="a line per moment; moments in it are not repeated")
    options = parser.parse_args()
    if OWN not in os.environ:
        os.environ[OWN] = tempfile.mkdtemp(prefix="pearl-kills-")
        code = subprocess.call(["unshare", "-rm", sys.executable, *sys.argv])
        Path(os.environ[OWN]).rmdir()
        sys.exit(code)
    disk = Path(os.environ[OWN])
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", disk], check=True)
    lines = options.state.read_text().splitlines() if options.state and options.state.exists() else []
    known = {line["moment"]: line for line in map(json.loads, lines)}
    with tempfile.TemporaryDirectory() as target:
        os.environ |= {"OMP_NUM_THREADS": "1", "PEARL_DATA": "data", "PEARL_RUNS": "runs", "PEARL_CACHE": "off"}
        os.environ |= {zygote.PLACE: f"{target}/zygote", zygote.SESSION: str(os.getpid())}
        stages = {name: Stage(disk, name, Path(target)) for name in options.verbs}
        for number in range(options.moments):
            if number not in known:
                known[number] = {"moment": number, **moment(stages, number, options.seed)}
                if options.state:
                    with options.state.open("a") as file:
                        file.write(json.dumps(known[number]) + "\n")
            if known[number]["wrong"]:
                print(json.dumps(known[number]), file=sys.stderr)
    told = [known[number] for number in range(options.moments)]
    text = table(told, options.seed)
    print(text)
    if options.moments >= 200:
        write_section("kills", text)
    sys.exit(any(one["wrong"] for one in told))


class Stage:
    """The start of a verb, and its undisturbed result."""

    def __init__(self, disk: Path, name: str, aside: Path) -> None:
        self.verb, self.folder, self.origin = VERBS[name], disk / "here", aside / name
        self.origin.mkdir()
        if name in ("learn", *HEADS):
            for data, classes in (("first", {"zero": 0, "one": 1}), ("second", {"two": 2, "three": 3})):
                write_photos(self.origin / data, classes)
            commands = [["learn", "base", "--data", "first", "-q", *LEARN]]
            if name in HEADS:
                commands[0].append("method.classifier=heads")
            if name == "export":  # a second task with an exportable update; and an older export, to be replaced
                commands.append(["learn", "base", "--data", "second", "-q"])
                (self.origin / "out").mkdir()
                commands.append([*self.verb.arguments])
            for command in commands:
                done = zygote.run(command, text=True, cwd=self.origin)
                assert done.returncode == 0, done.stderr
        self.fresh()
        before, started = used(disk), time.monotonic()
        code, self.said, error = self.go()
        assert code == 0, error
        self.seconds, self.bytes = time.monotonic() - started, used(disk) - before
        self.expected = self.results()

    def fresh(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.copytree(self.origin, self.folder)

    def go(self, disturb=lambda process: None) -> tuple[int, str, str]:
        """Run the command; return its exit code, output and complaints."""
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            process = zygote.Process(self.verb.arguments, stdout=out, stderr=err, cwd=self.folder)
            disturb(process)
            process.wait(timeout=300)
            said = []
            for file in (out, err):
                file.seek(0)
                said.append(io.TextIOWrapper(file, "utf-8", "replace").read())
        return process.returncode, *said

    def results(self) -> dict[str, object]:
        """Return all files except the inputs, logs and lock holders, including empty folders."""
        folders = (target.relative_to(self.folder) for target in self.folder.rglob("*") if target.is_dir())
        results = {f"{folder}/": "folder" for folder in folders} | contents(self.folder)
        inputs = ("first/", "second/", "base/") if (self.folder / "base").exists() else ("data/",)
        results = {name: value for name, value in results.items() if not name.startswith(inputs)}
        return {name: value for name, value in results.items() if "/logs/" not in name and not name.endswith(IGNORED)}


IGNORED = ("events.jsonl", ".lock", ".holder.json", "environment.json")


def moment(stages: dict[str, Stage], number: int, seed: int) -> dict[str, object]:
    """Disturb one command and repeat it; return the errors, if any."""
    rng = random.Random(f"{seed}-{number}")
    name, kind = [*stages][number % len(stages)], KINDS[number // len(stages) % len(KINDS)]
    stage, wrong = stages[name], []
    stage.fresh()
    ballast = stage.folder.parent / "ballast"
    after = rng.uniform(0, stage.seconds)
    if kind == "full disk":
        rest = int(rng.uniform(0, stage.bytes))
        ballast.write_bytes(bytes(max(0, SIZE - used(stage.folder.parent) - rest)))
        code, _, error = stage.go()
        ballast.unlink()
        allowed = (0, *stage.verb.ended)
    else:

        def disturb(process):
            time.sleep(after)
            process.send_signal(signal.Signals[kind])

        code, _, error = stage.go(disturb)
        allowed = (0, -9) if kind == "SIGKILL" else (0, 130, -15)
    if code not in allowed:
        wrong.append(f"ended with {code}")
    if "Traceback" in error:
        wrong.append(error)
    again, said, error = stage.go()
    for _ in range(3):  # processes of the first attempt may still be storing their state
        if again == 69:
            time.sleep(1)
            again, said, error = stage.go()
    results = stage.results()
    if again or "Traceback" in error:
        wrong.append(f"the same command ended with {again}: {error}")
    names = results.keys() | stage.expected.keys()
    wrong += [f"{name} differs" for name in sorted(names) if results.get(name) != stage.expected.get(name)]
    if name != "export" and said != stage.said:
        wrong.append(f"it said {said!r}")
    return {"verb": name, "kind": kind, "cut": code != 0, "wrong": wrong}


def used(disk: Path) -> int:
    """Return its used bytes."""
    return shutil.disk_usage(disk).used


def table(told: list[dict[str, object]], seed: int) -> str:
    """Return the counts as Markdown."""
    kinds = Counter((one["verb"], one["kind"]) for one in told)
    cut = Counter(one["verb"] for one in told if one["cut"])
    bad = Counter(one["verb"] for one in told if one["wrong"])
    lines = [f"| command | {' | '.join(KINDS)} | cut short | ended otherwise than undisturbed |", f"|{'---|' * 6}"]
    for verb in dict.fromkeys(one["verb"] for one in told):
        counts = " | ".join(str(kinds[verb, kind]) for kind in KINDS)
        lines.append(f"| {verb} | {counts} | {cut[verb]} | {bad[verb]} |")
    return (
        f"## Commands disturbed at random moments\n\n"
        f"`python benchmarks/attack/kills.py --moments {len(told)} --seed {seed}`: {len(told)} random moments, "
        f"after each of which the same command was repeated. Compared with an undisturbed command: all its files "
        f"except logs and seconds, and its output. A moment after the end, or enough free space, interrupted "
        f"nothing.\n\n" + "\n".join(lines) + "\n"
    )


if __name__ == "__main__":
    main()
