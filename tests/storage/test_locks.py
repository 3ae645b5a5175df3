"""One holder at a time, with the locks that a file system has, or none."""

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from pearl.errors import Busy, RunError
from pearl.storage import locks
from pearl.storage.locks import Held, Lock, is_held, locked

NO_LOCKS = (38, 524, 37, 95, 5)  # ENOSYS, ENOTSUPP of the kernel, ENOLCK, EOPNOTSUPP, EIO
HOLD = """
import sys, time, pathlib, types, fcntl
from pearl.storage import locks
number, path = int(sys.argv[1]), pathlib.Path(sys.argv[2])
if number:
    def refuse(*_):
        raise OSError(number, "refused")
    locks.fcntl = types.SimpleNamespace(**{**vars(fcntl), "flock": refuse, "lockf": refuse})
locks.RENEW = 0.05
with locks.locked(path):
    print("held", flush=True)
    time.sleep(60)
"""


def refusing(monkeypatch, number, calls=("flock", "lockf")):
    """A file system on which these calls fail so."""

    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(locks, "fcntl", SimpleNamespace(**{**vars(fcntl), **dict.fromkeys(calls, refuse)}))


def lock_of(path):
    path.mkdir(exist_ok=True)
    return Lock(path / ".lock", path / ".holder.json")


def held_elsewhere(path, number=38):
    """A process that holds a directory."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(number), path], stdout=subprocess.PIPE)
    with process.stdout:
        assert process.stdout.readline() == b"held\n"
    return process


@pytest.mark.parametrize("calls", [(), ("flock",), ("flock", "lockf")], ids=["flock", "lockf", "lease"])
def test_one_holder_at_a_time(calls, tmp_path, monkeypatch):
    refusing(monkeypatch, 38, calls)
    with locked(tmp_path / "run"):
        by = json.loads((tmp_path / "run" / ".holder.json").read_text())["by"]
        assert by == ["flock", "lockf", "lease"][len(calls)]
        assert is_held(tmp_path / "run")
        who = rf"process {os.getpid()} on .* since 20.* is working on it; wait for it to end, or stop it$"
        with pytest.raises(Busy, match=who), locked(tmp_path / "run"):
            pass
        assert is_held(tmp_path / "run"), "whoever was refused has not taken the lock away"
    assert not is_held(tmp_path / "run") and not (tmp_path / "run" / ".holder.json").exists()
    with locked(tmp_path / "run"):
        pass


@pytest.mark.parametrize("number", NO_LOCKS)
def test_what_a_file_system_says_that_has_no_locks(number, tmp_path, monkeypatch):
    refusing(monkeypatch, number)
    (tmp_path / ".lock").touch()  # left by a process that was killed; it says nothing
    with locked(tmp_path), pytest.raises(Busy), locked(tmp_path):
        pass
    with locked(tmp_path):
        pass


@pytest.mark.parametrize("number", [errno.ENOMEM, errno.EDEADLK])
def test_other_errors_are_told_as_they_are(number, tmp_path, monkeypatch):
    refusing(monkeypatch, number)
    with pytest.raises(RunError, match=os.strerror(number)), locked(tmp_path):
        pass


@pytest.mark.parametrize(
    ("number", "fix"),
    [
        (errno.EACCES, "Permission denied); change its permissions, or choose another path"),
        (errno.ENOSPC, "No space left on device); free space there, or choose another path"),
        (errno.EROFS, "Read-only file system); choose another path"),
    ],
)
def test_the_message_names_the_cause_and_its_fix(number, fix, tmp_path, monkeypatch):
    def fails(*_, **__):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "open", fails)
    with pytest.raises(RunError) as caught, locked(tmp_path):
        pass
    assert fix in str(caught.value)


def test_a_link_is_no_lock(tmp_path):
    (tmp_path / "diary.txt").write_text("dear diary")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").symlink_to(tmp_path / "diary.txt")
    with pytest.raises(RunError, match="remove that link"), locked(tmp_path / "run"):
        pass
    (tmp_path / "run" / ".lock").unlink()
    (tmp_path / "run" / ".holder.json").symlink_to(tmp_path / "diary.txt")
    with locked(tmp_path / "run"):
        pass
    assert (tmp_path / "diary.txt").read_text() == "dear diary"


@pytest.mark.parametrize("number", [0, 38], ids=["flock", "lease"])
def test_a_process_that_is_killed_holds_nothing(number, tmp_path, monkeypatch):
    if number:
        refusing(monkeypatch, number)
    process = held_elsewhere(tmp_path, number)
    assert is_held(tmp_path)
    with pytest.raises(Busy, match=f"process {process.pid} on "), locked(tmp_path):
        pass
    waited = []
    waiting = threading.Thread(target=lambda: waited.append(lock_of(tmp_path).wait()))
    waiting.start()
    process.send_signal(signal.SIGKILL)
    process.wait()
    waiting.join(10)
    assert waited == [None], "who waited has it"


def forge(path, **facts):
    """A holder of a file system without locks."""
    path.mkdir(exist_ok=True)
    known = {**locks._self(), "by": "lease", **facts}
    (path / ".holder.json").write_text(json.dumps({key: value for key, value in known.items() if value is not None}))


def test_a_number_that_another_process_got_is_not_the_holder(tmp_path, monkeypatch):
    refusing(monkeypatch, 38)
    forge(tmp_path, started="1", pid=os.getppid())
    with locked(tmp_path):
        assert json.loads((tmp_path / ".holder.json").read_text())["pid"] == os.getpid()


ELSEWHERE = {"host": "another", "boot": "another"}


def test_a_holder_of_another_machine_lives_as_long_as_it_renews(tmp_path, monkeypatch):
    refusing(monkeypatch, 38)
    monkeypatch.setattr(locks, "LOOK", 0.02)
    forge(tmp_path, **ELSEWHERE)
    message = r"on another since .*; if that process is gone, remove .*\.holder\.json, or wait [0-9]+ s"
    with pytest.raises(Busy, match=message), locked(tmp_path):
        pass
    assert is_held(tmp_path)
    for hours in (-1, 1):  # its clock, or this one, has jumped: what is renewed meanwhile is alive all the same
        renewed = time.time() + 3600 * hours
        os.utime(tmp_path / ".holder.json", (renewed, renewed))
        timer = threading.Timer(0.1, os.utime, [tmp_path / ".holder.json", (renewed + 1, renewed + 1)])
        timer.start()
        with pytest.raises(Busy), locked(tmp_path):
            pass
        timer.join()
    old = time.time() - locks.LEASE - 1
    os.utime(tmp_path / ".holder.json", (old, old))
    monkeypatch.setattr(locks, "WATCH", 0.3)
    assert not is_held(tmp_path)
    with locked(tmp_path):
        assert json.loads((tmp_path / ".holder.json").read_text())["pid"] == os.getpid()


def test_a_machine_with_locks_heeds_a_lease_and_the_other_way_round(tmp_path, monkeypatch):
    forge(tmp_path, **ELSEWHERE)
    with pytest.raises(Busy), locked(tmp_path):
        pass
    forge(tmp_path, by="flock", **ELSEWHERE)  # died with its machine, whose lock the server has given back
    with locked(tmp_path):
        pass
    refusing(monkeypatch, 38)
    forge(tmp_path, by="flock", **ELSEWHERE)
    os.utime(tmp_path / ".holder.json", (0, 0))
    with pytest.raises(Busy, match=r"; if that process is gone, remove .*\.holder\.json$"), locked(tmp_path):
        pass


def test_a_lease_of_the_same_instant_is_alive(tmp_path, monkeypatch):
    """In seconds as floats one of two equal times may be a little later."""
    forge(tmp_path, **ELSEWHERE)
    status = SimpleNamespace(st_mtime=1_700_000_000.0000036, st_mtime_ns=1_700_000_000_000_003_800)
    os.utime(tmp_path / ".holder.json", ns=(status.st_mtime_ns, status.st_mtime_ns))
    with monkeypatch.context() as patched:
        patched.setattr(locks.os, "fstat", lambda descriptor: status)
        assert lock_of(tmp_path)._alive({"by": "lease", **ELSEWHERE})


def test_a_lease_is_renewed_and_its_loss_is_noticed(tmp_path, monkeypatch):
    refusing(monkeypatch, 38)
    monkeypatch.setattr(locks, "RENEW", 0.02)
    with locked(tmp_path) as lock:
        os.utime(tmp_path / ".holder.json", (1, 1))
        _until(lambda: (tmp_path / ".holder.json").stat().st_mtime > 2)
        lock.check()
        forge(tmp_path, **ELSEWHERE)
        _until(lambda: lock.lost)
        with pytest.raises(Busy, match=r"on another since .* has taken it over"):
            lock.check()
    assert json.loads((tmp_path / ".holder.json").read_text())["host"] == "another", "not ours to remove"


def _until(there):
    deadline = time.monotonic() + 10
    while not there():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_of_two_that_find_a_dead_holder_one_takes_its_place(tmp_path, monkeypatch):
    """The second one looks before the first one has taken it, and moves the new lease away."""
    refusing(monkeypatch, 38)
    forge(tmp_path, started="1")
    first, second, taken = lock_of(tmp_path), lock_of(tmp_path), []
    usual = second._check_dead

    def late(known):
        usual(known)
        if not taken:
            monkeypatch.setattr(locks, "_HELD", set())  # as in another process
            taken.append(first.acquire())

    monkeypatch.setattr(second, "_check_dead", late)
    with pytest.raises(Held):
        second.acquire()
    assert json.loads((tmp_path / ".holder.json").read_text())["token"] == first._facts["token"]
    first.release()


def test_an_error_while_it_is_given_back_hides_no_other(tmp_path, monkeypatch):
    def fails(*_, **__):
        raise OSError(errno.EIO, "Input/output error")

    with pytest.raises(ValueError, match="the first"), locked(tmp_path):
        monkeypatch.setattr(os, "unlink", fails)
        raise ValueError("the first")
    monkeypatch.undo()
    with locked(tmp_path):
        pass


def test_a_lock_whose_file_its_holder_removes_meanwhile_is_taken_anew(tmp_path, monkeypatch):
    """Of phases that are kept the file goes with the lock: a lock on the old one would exclude nobody."""
    lock, usual, left = lock_of(tmp_path), locks._by, [lambda: lock.file.unlink()]

    def late(descriptor):
        for remove in left[:1]:
            left.clear()
            remove()
        return usual(descriptor)

    monkeypatch.setattr(locks, "_by", late)
    lock.acquire()
    assert lock.file.exists() and is_held(tmp_path)
    lock.release()
