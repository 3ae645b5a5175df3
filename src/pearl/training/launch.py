"""Processes of pearl that other processes start. No torch.

Those of `--devices N` are started and watched here, or there already (torchrun, SLURM).

The process that starts the others trains nothing: it cannot hang with them. It passes signals to stop on, once, and
when one of them dies it ends the others and says in one line which it was and why.
"""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import IO, Any

from pearl.errors import ConfigError, counted

MODULE = (sys.executable, "-P", "-m")  # without -P, Python files of the current folder would be imported
COMMAND = (*MODULE, "pearl")
INTERRUPTED = 130  # exit code of a process that was told to stop
LOST = 75  # exit code of a process that ends because another one has
BUSY = 69  # exit code of a process that found another one at work on its directory
UNREACHABLE = 68  # exit code of a process that ends because a machine has been lost
GRACE = 15.0  # seconds that the others have to end by themselves, once one has failed
OF_PERSONS = (signal.SIGINT, signal.SIGTERM)
OF_MACHINES = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)  # of a lost connection, and of schedulers
_WATCHED = "PEARL_WATCHED"


@dataclass(frozen=True)
class Place:
    """Which of the processes this is."""

    rank: int
    world: int  # processes in all
    local_world: int  # processes on this machine
    slurm: bool = False

    @property
    def nodes(self) -> int:
        """How many machines there are."""
        return self.world // self.local_world


def place(devices: int) -> Place | None:
    """Where this process stands among those that were started to train together; None if it is alone.

    With one device a process is alone, unless torchrun started one on each of several machines.

    Raises:
        ConfigError: another number of processes was started here than there are to be devices.
    """
    if devices < 1:
        raise ConfigError(f"--devices {devices}: give 1 or more")
    env = os.environ
    if {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"} <= env.keys():
        here = Place(_number("RANK"), _number("WORLD_SIZE"), _number("LOCAL_WORLD_SIZE"))
        if devices == here.world == 1 or (devices == 1 and here.local_world > 1):
            return None
    elif devices > 1 and (world := _number("SLURM_STEP_NUM_TASKS", 1)) > 1:
        here = Place(_number("SLURM_PROCID"), world, world // max(1, _number("SLURM_STEP_NUM_NODES", 1)), slurm=True)
    else:
        return None
    if not (here.rank < here.world and 0 < here.local_world <= here.world):
        raise ConfigError(
            f"rank {here.rank} of {counted(here.world, 'process')}, {here.local_world} of them on this machine: the "
            f"environment contradicts itself; unset RANK and WORLD_SIZE, or start with torchrun"
        )
    if here.local_world != devices:
        raise ConfigError(
            f"--devices {devices}: {counted(here.local_world, 'process')} started on this machine; start one "
            f"for each device, or give --devices {here.local_world}"
        )
    return here


def _number(name: str, default: int | None = None) -> int:
    """A number from the environment, where torchrun and SLURM write it.

    Raises:
        ConfigError: it is none.
    """
    text = os.environ.get(name, "" if default is None else str(default))
    if not (text.isascii() and text.isdecimal() and len(text) < 7):
        raise ConfigError(f"the environment's {name}={text!r} is no number of processes; unset it, or use torchrun")
    return int(text)


def start(devices: int, arguments: Sequence[str]) -> int:
    """Run pearl with these arguments in one process per device, and wait; the exit code of them all."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": devices, "LOCAL_WORLD_SIZE": devices}
    processes: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory() as folder:
        said = [open(os.path.join(folder, str(rank)), "w+b") for rank in range(devices)]  # noqa: SIM115, PTH118, PTH123

        def forward(number: int, _: object) -> None:
            for process in processes:
                process.send_signal(number)

        with handled(forward):
            try:
                for rank in range(devices):
                    own = {key: str(value) for key, value in {**common, "RANK": rank, "LOCAL_RANK": rank}.items()}
                    processes.append(child(arguments, own, said[rank] if rank else None))  # the first alone speaks
                codes = _wait(processes)
            finally:
                for process in processes:
                    process.kill()
        code, words = _verdict(codes, said)
        for file in said:
            file.close()
    if words:
        print(words, file=sys.stderr)
    return code


def child(
    arguments: Sequence[str], environment: Mapping[str, str], out: IO[bytes] | None = None, *, module: str = ""
) -> subprocess.Popen[bytes]:
    """Start pearl with these arguments. It stops, as on SIGTERM, when its stdin is closed or this process is no more.

    What it says goes to `out`, or where this process speaks. Another `module` may be run instead of the command line;
    it calls `enter` once it has read what it needs from its stdin.
    """
    return subprocess.Popen(
        [*((*MODULE, module) if module else COMMAND), *arguments],
        env={**os.environ, **environment, _WATCHED: "1"},
        stdin=subprocess.PIPE,  # see `enter`
        stdout=out,
        stderr=out,
        process_group=0,  # its own: Ctrl-C in a terminal reaches it through whoever started it alone
    )


def _wait(processes: Sequence[subprocess.Popen[bytes]]) -> dict[int, int]:
    """Exit codes by rank, in the order in which they ended."""
    codes: dict[int, int] = {}
    deadline = float("inf")
    while len(codes) < len(processes):
        time.sleep(0.05)
        for rank, process in enumerate(processes):
            if rank not in codes and (code := process.poll()) is not None:
                codes[rank] = code
                if code:
                    deadline = min(deadline, time.monotonic() + GRACE)
        if time.monotonic() > deadline:
            for rank, process in enumerate(processes):
                if rank not in codes:
                    process.kill()
                    process.wait()
                    codes[rank] = LOST
    return codes


def _verdict(codes: Mapping[int, int], said: Sequence[IO[bytes]]) -> tuple[int, str]:
    """The exit code, and what is left to say beside what the first process has said itself."""
    failed = {rank: code for rank, code in codes.items() if code}
    if not failed:
        return 0, ""
    causes = {rank: code for rank, code in failed.items() if code != LOST} or failed
    if 0 in causes and causes[0] > 0 and causes[0] != LOST:
        return causes[0], ""
    rank, code = next(iter(causes.items()))
    name = f"process {rank + 1} of {len(codes)}"
    if code < 0:
        kind = signal.Signals(-code).name
        return 128 - code, f"pearl: {name} was killed ({kind}); what is stored is kept, the same command goes on"
    if code == LOST:
        return code, "pearl: the processes lost each other; what is stored is kept, the same command goes on"
    said[rank].seek(0)
    lines = said[rank].read().decode(errors="replace").rstrip().splitlines() or [f"ended with exit code {code}"]
    if lines[-1].startswith("pearl: "):
        return code, f"pearl: {name}: {lines[-1].removeprefix('pearl: ')}"
    return code, "\n".join([*lines, f"pearl: {name}: {lines[-1]}"])


def ignored(kind: signal.Signals) -> bool:
    """Whether this process does not hear a signal."""
    return signal.getsignal(kind) == signal.SIG_IGN


def stopping() -> list[signal.Signals]:
    """The signals that ask this process to store what it has learnt and to end.

    Those that it was started to ignore stay ignored: by `nohup`, or by who tells it in another way (`slurm.on_node`).
    """
    return [signal.SIGINT, *(kind for kind in (signal.SIGTERM, *OF_MACHINES) if not ignored(kind))]


@contextmanager
def handled(handler: Callable[[int, Any], object]) -> Iterator[None]:
    """Have a function called on signals to stop; in any thread but the main one they cannot be handled."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {kind: signal.signal(kind, handler) for kind in stopping()}
    try:
        yield
    finally:
        for kind, earlier in before.items():
            signal.signal(kind, earlier)


def enter() -> bool:
    """Begin as what this process is; whether `child` started it, to whose process it can leave the last words.

    If so it stops when that one is gone, as on SIGTERM, so all is stored.
    """
    if os.environ.keys() & {"RANK", "SLURM_PROCID"}:  # before torch is there: warnings of its C++ parts from each rank
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if os.environ.pop(_WATCHED, None) is None:
        return False

    def wait() -> None:
        with suppress(OSError):
            while os.read(0, 1):
                pass
        os.kill(os.getpid(), signal.SIGINT if ignored(signal.SIGTERM) else signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()
    return True
