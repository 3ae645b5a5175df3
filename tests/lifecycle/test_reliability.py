"""Runs survive kills, faults of the disk, signals and each other, and end with the same bits."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

import zygote
from pearl.errors import Busy, Interrupted, RunError
from pearl.lifecycle.learning import resume
from pearl.lifecycle.runs import execute
from pearl.lifecycle.saved import verify
from pearl.reports.records import read
from pearl.settings.config import load_config
from pearl.storage.aside import beside
from pearl.storage.locks import locked
from pearl.storage.run_directory import RunDirectory
from pearl.training.engine import Engine, Observer
from pearl.training.launch import BUSY
from pearl.training.stop import Stop
from photos import SETTINGS, learn, write_photos
from reliability import contents

pytestmark = [pytest.mark.slow, pytest.mark.long]

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def tiny(*overrides):
    """Two tasks, two steps a phase."""
    shape = ["stream.classes=4", "stream.tasks=2", "stream.per_class=8", "stream.test_per_class=2"]
    fast = ["backbone.width=2", "engine.channels_last=false", "engine.max_steps=2", "train.batch_size=8"]
    return load_config("digits", [*shape, *fast, *overrides])


def test_killed_runs_end_with_the_same_bits():
    """The benchmark in small: its own process, since a child must be forked before torch has threads."""
    command = [sys.executable, str(BENCHMARKS / "reliability.py"), "--kills", "6", "--methods", "pearl", "--print"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "| pearl | 6 |" in done.stdout and "| yes |" in done.stdout


def test_commands_that_are_disturbed_and_given_again_end_with_the_same_bits():
    """The other benchmark in small: a kill, a signal and a full disk."""
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode:
        pytest.skip("no file system of its own can be mounted here")
    command = [sys.executable, str(BENCHMARKS / "attack" / "kills.py"), "--moments", "3", "--verbs", "learn"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "| learn | 1 | 1 | 1 |" in done.stdout


@pytest.mark.parametrize("verb", ["run", "sweep"])
def test_commands_whose_operations_on_files_fail_end_with_the_same_bits(verb, tmp_path):
    """The third benchmark in small: errors at a few operations, and kills there; each command is repeated.

    Its output goes to files: a pipe would stay open in the process that it forks from, which ends with it.
    """
    command = [sys.executable, str(BENCHMARKS / "attack" / "faults.py"), "--cases", "3", "--verbs", verb]
    with (tmp_path / "out").open("w") as out, (tmp_path / "err").open("w") as err:
        done = subprocess.run(command, stdout=out, stderr=err, timeout=600)
    assert done.returncode == 0, (tmp_path / "err").read_text()
    lines = (tmp_path / "out").read_text().splitlines()
    (row,) = (line.split("|")[1:-1] for line in lines if line.startswith(f"| {verb} "))
    operations, cases, *ends, wrong = map(int, row[1:])
    assert operations > 20 and cases == 3 and sum(ends) >= 3 and wrong == 0


# ----------------------------------------------------------------------------------------------- faults of the disk


class Faults:
    """Counts what reaches the disk through `pearl.storage.files`, and lets one of it fail."""

    def __init__(self, fail_at=None, error=lambda: OSError(28, "No space left on device")):
        self.count, self.fail_at, self.error = 0, fail_at, error

    def check(self):
        self.count += 1
        if self.count == self.fail_at:
            raise self.error()


@contextmanager
def faulty_disk(monkeypatch, faults, *, removals=False):
    """Every new file, write, fsync, rename and new folder is counted, and may fail; if `removals`, those too."""
    real_open, real_write, real_fdopen = os.open, os.write, os.fdopen

    def watch(real):
        def call(*args, **kwargs):
            faults.check()
            return real(*args, **kwargs)

        return call

    def opened(path, flags, *args, **kwargs):
        if flags & os.O_CREAT:
            faults.check()
        return real_open(path, flags, *args, **kwargs)

    def written(descriptor, data):
        try:
            faults.check()
        except OSError:
            real_write(descriptor, data[: len(data) // 2])
            raise
        return real_write(descriptor, data)

    def wrapped(descriptor, mode="r", *args, **kwargs):
        file = real_fdopen(descriptor, mode, *args, **kwargs)
        return Written(file, faults) if "a" in mode else file

    with monkeypatch.context() as patch:
        for name in ("fsync", "replace", "rename", "mkdir", *(("unlink", "rmdir") if removals else ())):
            patch.setattr(os, name, watch(getattr(os, name)))
        patch.setattr(os, "open", opened)
        patch.setattr(os, "write", written)
        patch.setattr(os, "fdopen", wrapped)
        yield


class Written:
    """A file whose writes are counted; one that fails has written half of what it was given."""

    def __init__(self, file, faults):
        self.file, self.faults = file, faults

    def write(self, data):
        try:
            self.faults.check()
        except OSError:
            self.file.write(data[: len(data) // 2])
            raise
        return self.file.write(data)

    def __enter__(self):
        self.file.__enter__()
        return self

    def __exit__(self, *args):
        return self.file.__exit__(*args)

    def __getattr__(self, name):
        return getattr(self.file, name)


@pytest.mark.parametrize("task", [1, 2])
@pytest.mark.parametrize("method", ["pearl", "finetune"])
def test_every_write_may_fail_once(method, task, tmp_path, monkeypatch):
    """Whichever it is: one clear error, finished tasks as they were, and the next attempt ends with the same bits.

    The second task's writes begin where the first one's end, each from a copy of that. Of a network with few layers,
    since there are hundreds of runs.
    """
    settings, count = tiny(f"method={method}", "backbone.name=convnet", "engine.max_steps=1"), Faults()
    begun = tmp_path / "begun"
    if task > 1:
        execute(settings, path=begun, stop_after=task - 1)

    def copy(name):
        path = tmp_path / name
        if begun.exists():
            shutil.copytree(begun, path)
        return path

    whole = copy("whole")
    with faulty_disk(monkeypatch, count):
        execute(settings, path=whole, stop_after=task)
    expected = contents(whole)
    assert count.count > 40
    for n in range(1, count.count + 1):
        path = copy(f"fault{n}")
        with faulty_disk(monkeypatch, Faults(n)), pytest.raises(RunError, match="No space left on device"):
            execute(settings, path=path, stop_after=task)
        before = {file: file.read_bytes() for folder in RunDirectory(path).finished for file in folder.iterdir()}
        execute(settings, path=path, stop_after=task)
        assert contents(path) == expected, n
        assert all(file.read_bytes() == data for file, data in before.items()), n
        assert not list(path.rglob("*.tmp"))


SHORT = {**SETTINGS, "backbone": {"name": "convnet", "width": 2}, "method": "finetune", "train": {"epochs": 1}}


class Killed(BaseException):
    """Nobody catches it."""


@pytest.mark.parametrize("first", [True, False], ids=["first task", "copied model's task"])
def test_learning_that_is_killed_at_its_end_is_done_or_not(first, tmp_path, monkeypatch):
    """Wherever the last writes end: the same command goes on, `resume` and the report say the same of the task."""
    data, how = write_photos(tmp_path / "data", {"two": 2, "three": 3}, 4), {"overrides": SHORT}
    if not first:
        learn(tmp_path / "start", write_photos(tmp_path / "before", {"zero": 0, "one": 1}, 4), overrides=SHORT)
        how = {"start": tmp_path / "start"}
    count = Faults()
    with faulty_disk(monkeypatch, count, removals=True):
        learn(tmp_path / "whole", data, **how)
    expected = contents(tmp_path / "whole")
    states = []
    for n in range(count.count - 22, count.count + 1):  # from within the manifest
        path = tmp_path / f"killed{n}"
        with faulty_disk(monkeypatch, Faults(n, Killed), removals=True), pytest.raises(Killed):
            learn(path, data, **how)
        resumed = Path(shutil.copytree(path, tmp_path / f"resumed{n}"))
        there = len(RunDirectory(path).finished) == len(RunDirectory(tmp_path / "whole").finished)
        assert bool(RunDirectory(path).interrupted_task) != there
        states.append((there, (path / "resume").exists()))
        if there:
            assert not read(path).pending
        learn(path, data, **how)
        assert contents(path) == expected, n
        if (resumed / "resume" / "task.json").exists():
            resume(resumed)
            assert contents(resumed) == expected, n
        with pytest.raises(RunError, match="no interrupted task"):
            resume(resumed)
    assert {*states} == {(False, True), (True, True), (True, False)}


def test_two_that_make_one_model_from_another_at_once(tmp_path):
    """One makes it, the other has a line to say; nothing lies about afterwards."""
    learn(tmp_path / "start", write_photos(tmp_path / "before", {"zero": 0, "one": 1}, 4), overrides=SHORT)
    data = [write_photos(tmp_path / name, {f"{name} {i}": i for i in (2, 3)}, 4) for name in ("first", "second")]
    before = {location.name for location in tmp_path.iterdir()}
    for attempt in range(2):
        new = tmp_path / f"new{attempt}"
        command = ["learn", new, "--from", tmp_path / "start", "-q", "--data"]
        both = [zygote.Process([*command, each], stderr=subprocess.PIPE, text=True) for each in data]
        said = [process.communicate()[1] for process in both]
        codes = [process.wait() for process in both]
        winner = codes.index(0)
        assert codes[1 - winner] in (2, BUSY), said
        assert said[winner] == "" and said[1 - winner].count("\n") == 1, said
        assert [info.name for info in RunDirectory(new).tasks] == ["before", data[winner].name]
        assert verify(new) == []
        assert {location.name for location in tmp_path.iterdir()} - before == {f"new{i}" for i in range(attempt + 1)}


def test_a_copy_that_is_being_made_is_not_made_twice(tmp_path):
    learn(tmp_path / "start", write_photos(tmp_path / "before", {"zero": 0, "one": 1}, 4), overrides=SHORT)
    data = write_photos(tmp_path / "data", {"two": 2, "three": 3}, 4)
    with beside(tmp_path / "new") as folder:
        (folder / "new" / "reference").mkdir(parents=True)
        with pytest.raises(Busy, match="is working on it"):
            learn(tmp_path / "new", data, start=tmp_path / "start")
        assert (folder / "new" / "reference").exists()
        killed = Path(shutil.copytree(folder, folder.with_name(f".new.{'0' * 32}.new")))
    (killed / ".holder.json").unlink()
    learn(tmp_path / "new", data, start=tmp_path / "start")  # what is left of a copy that was killed is no hindrance
    assert verify(tmp_path / "new") == []
    assert {location.name for location in tmp_path.iterdir()} == {"before", "data", "start", "new"}


# ------------------------------------------------------------------------------------------------- damaged files


@pytest.mark.parametrize("harm", ["truncated", "missing", "bit-flipped"])
def test_a_damaged_task_is_named_and_earlier_tasks_stay_usable(harm, tmp_path):
    import pearl

    path = execute(tiny(), path=tmp_path / "run").path
    file = RunDirectory(path).finished[1] / "weights.safetensors"
    data = file.read_bytes()
    if harm == "missing":
        file.unlink()
    else:
        file.write_bytes(data[: len(data) // 2] if harm == "truncated" else data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(
        RunError, match=r"001-task2/weights\.safetensors: (cannot be read|checksum differs).*restore it"
    ):
        _ = pearl.load(path).method
    assert len(pearl.load(path, tasks=1).method.heads) == 1


def test_a_lost_manifest_is_not_learnt_over(tmp_path):
    path = execute(tiny(), path=tmp_path / "run").path
    whole = contents(path)
    lost = [folder / "manifest.json" for folder in RunDirectory(path).finished]
    lost[1].rename(tmp_path / "kept")
    with pytest.raises(
        RunError, match=r"001-task2/manifest\.json: missing, though classes\.json lists the task; restore"
    ):
        execute(tiny(), path=path)
    (tmp_path / "kept").rename(lost[1])
    lost[0].unlink()
    with pytest.raises(RunError, match=r"000-task1/manifest\.json: missing, though 001-task2 is there; restore it"):
        execute(tiny(), path=path)
    # as the message says
    shutil.rmtree(path / "tasks")
    (path / "classes.json").unlink()
    execute(tiny(), path=path)
    assert contents(path) == whole


def test_a_damaged_moment_costs_time_but_no_bit(tmp_path):
    execute(tiny(), path=tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        execute(tiny(), path=tmp_path / "cut", show=Press(at=5, minutes=None), minutes=0)
    moments = sorted((tmp_path / "cut" / "resume").iterdir())
    assert moments
    newest = moments[-1] / "weights.safetensors"
    newest.write_bytes(newest.read_bytes()[:-9])
    execute(tiny(), path=tmp_path / "cut")
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")


# ------------------------------------------------------------------------------------------------------- signals


class Press(Observer):
    """Presses Ctrl-C (or sends another signal) at a step of training."""

    def __init__(self, at, kind=signal.SIGINT, minutes=0.0):
        self.at, self.kind, self.times, self.seen = at, kind, 1 if minutes is not None else 2, 0

    def step(self, done, total):
        self.seen += 1
        if self.seen == self.at:
            for _ in range(self.times):  # the second one does not wait
                os.kill(os.getpid(), self.kind)
                time.sleep(0.01)


OF_PERSONS, OF_MACHINES = (signal.SIGINT, signal.SIGTERM), (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


@pytest.mark.parametrize(
    ("kind", "at"), [*((kind, at) for kind in OF_PERSONS for at in (1, 2, 3, 5)), *((kind, 3) for kind in OF_MACHINES)]
)
def test_a_signal_waits_for_the_step_and_the_run_goes_on(kind, at, tmp_path):
    execute(tiny(), path=tmp_path / "whole")
    handler = signal.getsignal(kind)
    with pytest.raises(Interrupted, match=r"interrupted in phase .* resume with: pearl resume "):
        execute(tiny(), path=tmp_path / "cut", show=Press(at, kind))
    assert signal.getsignal(kind) == handler
    before = len(RunDirectory(tmp_path / "cut").finished)
    steps = Count()
    execute(tiny(), path=tmp_path / "cut", show=steps)
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")
    assert steps.seen == 6 - at, f"trained again what was stored; {before} tasks were finished"


@pytest.mark.parametrize(
    ("first", "second"), [(kind, kind) for kind in OF_MACHINES] + [(signal.SIGUSR1, signal.SIGTERM)]
)
def test_a_second_signal_of_a_machine_shows_no_impatience(first, second):
    """A terminal that closes sends two, of the system and of its shell; a scheduler warns, and then ends."""
    stop = Stop()
    with stop.caught():
        stop.waits = True
        for kind in (first, second):
            os.kill(os.getpid(), kind)
            time.sleep(0.01)
        assert stop.requested
        if second in OF_PERSONS:  # a person asks again
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), second)
                time.sleep(1)


def test_what_a_process_was_started_to_ignore_it_ignores():
    """As by nohup; a run goes on when its terminal is closed."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Stop().caught() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            time.sleep(0.01)
            assert not stop.requested
    finally:
        signal.signal(signal.SIGHUP, before)


class Count(Observer):
    def __init__(self):
        self.seen, self.decoding = 0, True

    def event(self, kind, **facts):
        self.decoding = kind == "decode"

    def step(self, done, total):
        self.seen += not self.decoding


def test_the_command_line_says_how_to_go_on(tmp_path):
    arguments = ["run", "digits", "train.epochs=2000", "backbone.width=4"]
    with zygote.Process(arguments, stderr=subprocess.PIPE, text=True) as run:
        assert run.stderr is not None
        for line in run.stderr:
            if "reference: " in line:
                break
        time.sleep(0.5)
        run.send_signal(signal.SIGTERM)
        said = run.stderr.read().strip().splitlines()[-1]
        assert run.wait(timeout=60) == 130
    (path,) = (tmp_path / "runs").iterdir()
    assert said.startswith("pearl: interrupted in phase reference after ")
    assert said.endswith(f"resume with: pearl resume {path}")
    assert len(list((path / "resume").iterdir())) == 1


# --------------------------------------------------------------------------------------------------------- locks


def test_the_second_process_is_told_who_holds_the_directory(tmp_path):
    with locked(tmp_path / "run"), pytest.raises(RunError, match=rf"process {os.getpid()} on .* is working on it"):
        execute(tiny(), path=tmp_path / "run")
    execute(tiny(), path=tmp_path / "run")


def test_a_lock_dies_with_its_process(tmp_path):
    path = tmp_path / "run"
    code = "import os, pathlib; from pearl.storage.locks import locked\n"
    code += f"with locked(pathlib.Path({str(path)!r})): os._exit(9)"
    assert zygote.run([], program=["-c", code]).returncode == 9
    assert json.loads((path / ".holder.json").read_text())["pid"] != os.getpid()
    assert execute(tiny(), path=path).done
    assert not (path / ".holder.json").exists()


def test_runs_work_in_threads(tmp_path):
    """Signals cannot be handled there; nothing else is different."""
    done = []
    thread = threading.Thread(target=lambda: done.append(execute(tiny(), path=tmp_path / "run").done))
    thread.start()
    thread.join()
    assert done == [True]


def test_a_wrong_device_leaves_nothing(tmp_path, monkeypatch):
    def broken(*args, **kwargs):
        raise RunError("no")

    monkeypatch.setattr(Engine, "__init__", broken)
    with pytest.raises(RunError):
        execute(tiny(), path=tmp_path / "run")
    assert not (tmp_path / "run").exists()
