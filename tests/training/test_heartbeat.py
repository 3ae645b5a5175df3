"""A machine that is lost ends the others, with its name; a process that waits in vain hears SIGTERM."""

import os
import signal
import socket
import subprocess
import time

import pytest

import zygote
from pearl.errors import ConfigError, RunError
from pearl.training import heartbeat, launch

pytestmark = pytest.mark.slow

RANK = """
import pathlib, sys, time
from pearl.training import heartbeat, launch
launch.GRACE = 1.0
rank, box = int(sys.argv[1]), pathlib.Path(sys.argv[2])
def same(value):
    if rank == 0:
        (box / "value").write_text(repr(value))
        (box / "value").rename(box / "door")
    while not (box / "door").exists():
        time.sleep(0.01)
    return eval((box / "door").read_text())
with heartbeat.beating(rank, ["red", "green", "blue"], sys.argv[3], same):
    (box / f"begun{rank}").touch()
    while not (box / f"leave{rank}").exists():
        time.sleep(0.01)
    if (box / f"leave{rank}").read_text():
        raise SystemExit("pearl: of its own")
"""


class Ranks:
    """Three processes, each on a machine of its own as far as they know."""

    def __init__(self, box, address="127.0.0.1"):
        self.box, env = box, os.environ | {"PEARL_SILENCE": "2"}
        how = {"program": ["-c", RANK], "env": env, "stderr": subprocess.PIPE, "text": True}
        self.processes = [zygote.Process([str(rank), box, address], **how) for rank in range(3)]
        while len([*box.glob("begun*")]) < 3:
            time.sleep(0.01)

    def ends(self, *ranks):
        """Exit codes and last words."""
        said = {self.processes[rank].stderr.read() for rank in ranks}
        return {self.processes[rank].wait() for rank in ranks}, said


@pytest.fixture
def ranks(tmp_path):
    made = Ranks(tmp_path)
    yield made
    for process in made.processes:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(("lost", "host"), [(0, "red"), (2, "blue")])
def test_a_lost_machine_ends_the_others_with_its_name(ranks, lost, host):
    ranks.processes[lost].send_signal(signal.SIGSTOP)
    words = f"pearl: no sign of life from {host} (process {lost + 1} of 3) for 2 s; stored steps are complete;"
    codes, said = ranks.ends(*{0, 1, 2} - {lost})
    assert codes == {launch.UNREACHABLE}
    assert said == {f"{words} run the same command to continue\n"}


@pytest.mark.parametrize("ended", [0, 2])
def test_a_process_that_ends_alone_ends_the_others_after_a_while(ranks, ended):
    """By a collective that fails they notice at once; one of NCCL would wait."""
    began = time.monotonic()
    (ranks.box / f"leave{ended}").write_text("badly")
    codes, (said,) = ranks.ends(*{0, 1, 2} - {ended})
    assert codes == {launch.LOST}
    assert f"(process {ended + 1} of 3) has ended; stored steps are complete" in said
    assert time.monotonic() - began > 0.9


@pytest.mark.parametrize("first", [0, 2])
def test_who_leaves_well_leaves_the_others_at_work(ranks, first):
    (ranks.box / f"leave{first}").touch()
    assert ranks.ends(first) == ({0}, {""})
    time.sleep(2.5)  # longer than the silence, and than the time to notice an end
    for rank in {0, 1, 2} - {first}:
        (ranks.box / f"leave{rank}").touch()
    assert ranks.ends(*{0, 1, 2} - {first}) == ({0}, {""})


def test_all_that_were_stopped_together_go_on(ranks):
    """As a scheduler does to let another job pass; they do not wake up in the same instant."""
    for process in ranks.processes:
        process.send_signal(signal.SIGSTOP)
    time.sleep(2.5)
    for process in ranks.processes:
        process.send_signal(signal.SIGCONT)
        time.sleep(0.3)
    for rank in range(3):
        (ranks.box / f"leave{rank}").touch()
    assert ranks.ends(0, 1, 2) == ({0}, {""})


def test_strangers_are_not_taken_for_processes(tmp_path):
    """Machines know the first one by a name of its own; whoever else connects has no token."""
    values = []

    def same(value):
        values.append(value)
        with socket.create_connection(("127.0.0.1", value[0])) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\nHost: red\r\n\r\n")
        link = socket.create_connection(("127.0.0.1", value[0]))
        link.sendall(value[1] + (1).to_bytes(4, "big"))
        values.append(link)

    with heartbeat.beating(0, ["red", "green"], "red.example", same):
        (_, token), link = values
        assert len(token) == 16
        link.settimeout(10)
        assert link.recv(5) == bytes([heartbeat.BEAT, 0, 0, 0, 0])
        link.sendall(bytes([heartbeat.GOODBYE, 0, 0, 0, 1]))
        link.shutdown(socket.SHUT_WR)
    link.close()


def test_who_cannot_reach_the_first_machine_says_so(monkeypatch):
    monkeypatch.setenv("PEARL_SILENCE", "0.2")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        beats = heartbeat.beating(1, ["red", "green"], "127.0.0.1", lambda _: (port, b"x" * 16))
        with pytest.raises(RunError, match=r"process 2 of 2 cannot reach 127\.0\.0\.1 \(.*; open its ports"), beats:
            pass
    beats = heartbeat.beating(0, ["red", "green"], "127.0.0.1", lambda _: None)
    with pytest.raises(RunError, match="0 of 1 other processes have reached"), beats:
        pass


def test_a_machine_that_never_comes_is_not_waited_for_for_ever():
    code = "import time\nfrom pearl.training.heartbeat import joined_in_time\nwith joined_in_time(2): time.sleep(60)"
    done = zygote.run([], program=["-c", code], env=os.environ | {"PEARL_SILENCE": "0.05"}, text=True)
    assert done.returncode == launch.UNREACHABLE
    assert done.stderr.startswith("pearl: of 2 processes some have not started after 0.5 s")


@pytest.mark.parametrize("text", ["soon", "0", "-1", "nan", "inf", ""])
def test_a_silence_that_is_no_time(text, monkeypatch):
    monkeypatch.setenv("PEARL_SILENCE", text)
    with pytest.raises(ConfigError, match=f"PEARL_SILENCE={text}: give a number of seconds, such as 60"):
        heartbeat.silence()


# -------------------------------------------------------------------------------------------- signals while it waits

WAITS = """
import ctypes, sys, time
from pearl.training import launch
from pearl.training.stop import Stop
launch.GRACE = 0.5
stop = Stop(several=True)
with stop.caught():
    stop.waits = True
    print("at work", flush=True)
    while "first" in sys.argv and not stop.requested:
        time.sleep(0.01)
    if "stores" in sys.argv:
        time.sleep(1.5)
        print("stored", file=sys.stderr)
        sys.exit(1)
    print("waits", flush=True)
    mutex, lock = ctypes.create_string_buffer(64), ctypes.CDLL(None).pthread_mutex_lock
    while True:
        lock(mutex)  # the second time for ever, and no signal ends it, as in a collective
"""
DEAF = (
    "pearl: interrupted while waiting for another process; stored steps are complete; run the same command to "
    "continue\n"
)


@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize(
    ("how", "code", "words"), [("", 130, DEAF), ("first", 130, DEAF), ("first stores", 1, "stored\n")]
)
def test_a_signal_ends_a_process_that_waits_in_vain(kind, how, code, words):
    """One that heard the signal, and needs a while to store, is left to it."""
    with zygote.Process(
        how.split(), program=["-c", WAITS], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "at work\n"
        if "first" in how:
            process.send_signal(kind)
        if "stores" not in how:
            assert process.stdout.readline() == "waits\n"
            time.sleep(0.8)  # what was heard is no reason to end it, though it waits
            assert process.poll() is None
            process.send_signal(kind)
        assert process.stderr.read() == words
    assert process.returncode == code


def test_signals_that_a_program_handles_otherwise_end_nothing():
    code = "import os, signal, time\nfrom pearl.training import launch\nfrom pearl.training.stop import Stop\n"
    code += "launch.GRACE = 0.2\nsignal.signal(signal.SIGALRM, lambda *_: None)\n"
    code += "with Stop(several=True).caught():\n    os.kill(os.getpid(), signal.SIGALRM)\n    time.sleep(1)"
    assert zygote.run([], program=["-c", code]).returncode == 0
