"""A script of no torch in the place of `pearl run`, where only what starts it is tested."""

import json
import sys

from pearl.sweeps import jobs
from pearl.sweeps.jobs import Job
from pearl.training import launch

FAKE = """
import fcntl, json, os, pathlib, sys, time
run, behaviour = json.loads(os.environ["FAKE"])[" ".join(sys.argv[3:])]
run = pathlib.Path(run)
run.mkdir(parents=True, exist_ok=True)
if behaviour == "busy once" and not (run / "busy").exists():
    (run / "busy").touch()
    sys.exit(69)
lock = (run / ".lock").open("a")
try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
except OSError:
    sys.exit(69)
if (run / "results.json").exists():
    sys.exit()  # already done
with open(os.environ["LEDGER"], "a") as file:
    file.write(f"start {run.name} {os.getpid()}\\n")
if behaviour.startswith("stop") and not (run / "resume").exists():
    if behaviour == "stop once":
        (run / "resume" / "000-00-00000001").mkdir(parents=True)
    sys.exit(130)
if behaviour == "fail once" and not (run / "failed").exists():
    (run / "failed").touch()
    sys.exit("Traceback ...\\nValueError: no such luck")
if behaviour == "refuse":
    sys.exit("pearl: images are missing\\npearl: so are labels")
if behaviour == "die":
    os.kill(os.getpid(), 9)
if behaviour == "wait" or (behaviour == "wait once" and not (run / "resume").exists()):
    sys.stdin.read()
    (run / "resume" / "000-00-00000001").mkdir(parents=True, exist_ok=True)
    sys.exit(130)
time.sleep(0.3)
(run / "tasks" / "000-one").mkdir(parents=True, exist_ok=True)
(run / "tasks" / "000-one" / "manifest.json").write_text('{"format": 1}')
tasks = '[{"name": "one", "classes": []}]'
(run / "results.json").write_text('{"format": 1, "complete": true, "stages": [], "tasks": ' + tasks + '}')
with open(os.environ["LEDGER"], "a") as file:
    file.write(f"end {run.name}\\n")
"""


class Fake:
    """What stands for `pearl run`: job n behaves as it is told."""

    def __init__(self, tmp_path, monkeypatch):
        self.ledger, self.monkeypatch = tmp_path / "ledger", monkeypatch
        (tmp_path / "fake.py").write_text(FAKE)
        monkeypatch.setattr(launch, "COMMAND", (sys.executable, "-S", "-E", str(tmp_path / "fake.py")))
        monkeypatch.setattr(jobs, "LOOK", 0.01)
        monkeypatch.setattr(jobs, "LOOK_AT_LOCKS", 0.1)
        monkeypatch.setenv("LEDGER", str(self.ledger))

    def jobs(self, *behaviours):
        made = [Job("digits", (f"seed={n}",)) for n in range(len(behaviours))]
        told = {job.overrides[0]: (str(job.run), what) for job, what in zip(made, behaviours, strict=True)}
        self.monkeypatch.setenv("FAKE", json.dumps(told))
        return made

    def lines(self, kind):
        actual = self.ledger.read_text().splitlines() if self.ledger.exists() else []
        return [line.split()[1] for line in actual if line.startswith(kind)]

    def most_at_once(self):
        now = most = 0
        for line in self.ledger.read_text().splitlines():
            now += 1 if line.startswith("start") else -1
            most = max(most, now)
        return most


def states(outcomes):
    """How each ended."""
    return [outcome.state for outcome in outcomes]
