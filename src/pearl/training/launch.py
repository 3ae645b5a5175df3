"""Processes of pearl that other processes start. Does not import torch.

The processes of `--devices N` are started and watched here, or exist already (torchrun, SLURM). The parent process does
not train, so that it cannot hang with the others. It forwards stop signals, once. If a child dies, it ends the others
and prints one line with the process and the reason.
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
INTERRUPTED = 130  # exit code after a stop signal
LOST = 75  # exit code of a process that ends because another one has ended
BUSY = 69  # exit code if another process works on the same directory
UNREACHABLE = 68  # exit code after the loss of a machine
GRACE = 15.0  # seconds for the others to end by themselves after one has failed
OF_PERSONS = (signal.SIGINT, signal.SIGTERM)
OF_MACHINES = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)  # of lost connections and of schedulers
_WATCHED = "PEARL_WATCHED"


@dataclass(frozen=True)
class ProcessRank:
    """The rank of this process."""

    rank: int
    world: int  # number of processes
    local_world: int  # number of processes on this machine
    slurm: bool = False

    @property
    def nodes(self) -> int:
        """Return the number of machines."""
        return self.world // self.local_world


def process_rank(devices: int) -> ProcessRank | None:
    """Return the rank of this process among those that train together; None for a single process.

    With one device there is a single process, unless torchrun started one on each of several machines.

    Raises:
        ConfigError: the number of processes started here differs from the number of devices.
    """
    if devices < 1:
        raise ConfigError(f"--devices {devices}: give 1 or more")
    env = os.environ
    if {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"} <= env.keys():
        here = ProcessRank(_number("RANK"), _number("WORLD_SIZE"), _number("LOCAL_WORLD_SIZE"))
        if devices == here.world == 1 or (devices == 1 and here.local_world > 1):
            return None
    elif devices > 1 and (world := _number("SLURM_STEP_NUM_TASKS", 1)) > 1:
        here = ProcessRank(
            _number("SLURM_PROCID"), world, world // max(1, _number("SLURM_STEP_NUM_NODES", 1)), slurm=True
        )
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
    """Return a number from the environment, as written by torchrun and SLURM.

    Raises:
        ConfigError: it is not a number.
    """
    text = os.environ.get(name, "" if default is None else str(default))
    if not (text.isascii() and text.isdecimal() and len(text) < 7):
        raise ConfigError(f"the environment's {name}={text!r} is not a number of processes; unset it, or use torchrun")
    return int(text)


def start(devices: int, arguments: Sequence[str]) -> int:
    """Run pearl with these arguments in one process per device, and wait; return the common exit code."""
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
                    ranks = {**common, "RANK": rank, "LOCAL_RANK": rank}
                    environment = {key: str(value) for key, value in ranks.items()}
                    output = said[rank] if rank else None  # only the first prints
                    processes.append(child(arguments, environment, output))
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
    """Start pearl with these arguments in a child process, which stops as on SIGTERM when its stdin closes or this
    process ends.

    Its output goes to `out`, or to this process's output. Another `module` may run instead of the command line; it
    calls `enter` once it has read its input from stdin.
    """
    return subprocess.Popen(
        [*((*MODULE, module) if module else COMMAND), *arguments],
        env={**os.environ, **environment, _WATCHED: "1"},
        stdin=subprocess.PIPE,  # see `enter`
        stdout=out,
        stderr=out,
        process_group=0,  # a separate session: the parent forwards Ctrl-C itself
    )


def _wait(processes: Sequence[subprocess.Popen[bytes]]) -> dict[int, int]:
    """Return exit codes by rank, in the order in which processes ended."""
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
    """Return the exit code, and a message in addition to the first process's own."""
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
        return (
            128 - code,
            f"pearl: {name} was killed ({kind}); stored steps are complete; run the same command to continue",
        )
    if code == LOST:
        return code, "pearl: the processes lost each other; stored steps are complete; run the same command to continue"
    said[rank].seek(0)
    lines = said[rank].read().decode(errors="replace").rstrip().splitlines() or [f"ended with exit code {code}"]
    if lines[-1].startswith("pearl: "):
        return code, f"pearl: {name}: {lines[-1].removeprefix('pearl: ')}"
    return code, "\n".join([*lines, f"pearl: {name}: {lines[-1]}"])


def ignored(kind: signal.Signals) -> bool:
    """Return True if this process ignores a signal."""
    return signal.getsignal(kind) == signal.SIG_IGN


def stopping() -> list[signal.Signals]:
    """Return the signals that make this process store its state and end.

    Signals ignored at its start stay ignored: by `nohup`, or by a parent that stops it in another way
    (`slurm.on_node`).
    """
    return [signal.SIGINT, *(kind for kind in (signal.SIGTERM, *OF_MACHINES) if not ignored(kind))]


@contextmanager
def handled(handler: Callable[[int, Any], object]) -> Iterator[None]:
    """Call a function on stop signals within the context; only the main thread can handle them."""
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
    """Initialise this process by its role; return True if `child` started it, whose parent prints the final message.

    It then stops when the parent ends, as on SIGTERM, so that its state is stored.
    """
    if os.environ.keys() & {"RANK", "SLURM_PROCID"}:  # before torch is imported: its C++ parts would warn on each rank
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
