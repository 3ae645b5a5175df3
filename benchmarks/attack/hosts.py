"""Two machines that train one run lose their connection: all processes must end with a reason, and the same command
resumes.

    python benchmarks/attack/hosts.py                                       all, written to docs/actual/reliability.md
    python benchmarks/attack/hosts.py --silence 5 --attacks "link down"     one, sooner, printed

The machines are network namespaces with a cable between them (a veth pair) and host names of their own; their disk is
shared. In the middle of a phase the cable is disconnected or a process is disturbed. Each process must then end by
itself, with a nonzero exit code and one line; afterwards the same commands must end with the bits of an uninterrupted
run. Needs Linux, root, and `ip` of iproute2.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from pearl.training.launch import GRACE, INTERRUPTED, UNREACHABLE
from reliability import contents, write_section

HOSTS = ("left", "right")
CABLE = ("pearl-left", "pearl-right")  # its ends, each in a namespace of the same name
ADDRESSES = ("10.213.7.1", "10.213.7.2")
RUN = ["run", "digits", "backbone={name: convnet, width: 2}", "engine.channels_last=false", "engine.precision=fp32"]
RUN += ["stream.classes=4", "stream.tasks=2", "stream.per_class=16", "stream.test_per_class=4", "train.batch_size=8"]
RUN += ["train.epochs=20", "train.phases.probe.epochs=2", "--device", "cpu", "--store-every", "0.02", "-q"]


EPOCH = '"event": "epoch"'


class Pair:
    """A process on each machine, training one run."""

    def __init__(self, folder: Path, silence: float) -> None:
        self.folder, self.silence = folder, silence
        self.said = [(folder / f"{host}.err").open("w+") for host in HOSTS]
        self.processes = [self._start(rank) for rank in range(2)]

    def _start(self, rank: int) -> subprocess.Popen[bytes]:
        own = {"RANK": rank, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 1, "PEARL_SILENCE": self.silence}
        own |= {"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": 29517, "GLOO_SOCKET_IFNAME": CABLE[rank]}
        own |= {"PEARL_RUNS": self.folder, "PEARL_DATA": self.folder.parent, "PEARL_CACHE": "off", "OMP_NUM_THREADS": 1}
        named = [
            "ip",
            "netns",
            "exec",
            CABLE[rank],
            "unshare",
            "--uts",
            "sh",
            "-c",
            'hostname $0; exec "$@"',
            HOSTS[rank],
        ]
        return subprocess.Popen(
            [*named, sys.executable, "-P", "-m", "pearl", *RUN],
            env=os.environ | {key: str(value) for key, value in own.items()},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self.said[rank],
        )

    def wait(self, limit: float) -> list[tuple[int | None, float, str]]:
        """Return exit code, seconds and last output of each process; those beyond the limit are killed and have no
        code.
        """
        began, ended = time.monotonic(), [0.0, 0.0]
        while any(process.poll() is None for process in self.processes) and time.monotonic() - began < limit:
            time.sleep(0.05)
            now = time.monotonic() - began
            ended = [now if process.poll() is None else at for process, at in zip(self.processes, ended, strict=True)]
        codes = [process.poll() for process in self.processes]
        for process, file in zip(self.processes, self.said, strict=True):
            process.kill()
            process.wait()
            file.seek(0)
        words = [file.read().strip() for file in self.said]
        for file in self.said:
            file.close()
        return [*zip(codes, ended, words, strict=True)]

    def until_training(self) -> None:
        """Wait for the third epoch."""
        while not any(log.read_text().count(EPOCH) >= 3 for log in self.folder.glob("*/events.jsonl")):
            assert all(process.poll() is None for process in self.processes), self.wait(0)
            time.sleep(0.02)


def pull(_: Pair) -> None:
    """Take the link down: packets are lost, without notice to either side."""
    subprocess.run(["ip", "-n", CABLE[1], "link", "set", CABLE[1], "down"], check=True)


def pull_and_ask(pair: Pair) -> None:
    """Take the link down, and send SIGTERM to both processes, which then wait in a collective."""
    pull(pair)
    time.sleep(3)
    for process in pair.processes:
        process.send_signal(signal.SIGTERM)


def stop(rank: int) -> Callable[[Pair], None]:
    """Stop a process (SIGSTOP), as if its machine hung."""
    return lambda pair: pair.processes[rank].send_signal(signal.SIGSTOP)


def kill(rank: int) -> Callable[[Pair], None]:
    """Kill one process (SIGKILL); the other machine must end the other one."""
    return lambda pair: pair.processes[rank].send_signal(signal.SIGKILL)


# the disturbance, and the correct exit codes, by rank, of the processes that end by themselves
ATTACKS: dict[str, tuple[Callable[[Pair], None], dict[int, int]]] = {
    "link down": (pull, {0: UNREACHABLE, 1: UNREACHABLE}),
    "link down, then SIGTERM to both": (pull_and_ask, {0: INTERRUPTED, 1: INTERRUPTED}),
    "the first machine hangs": (stop(0), {1: UNREACHABLE}),
    "the second machine hangs": (stop(1), {0: UNREACHABLE}),
    "SIGKILL of the first process": (kill(0), {1: 2}),
    "SIGKILL of the second process": (kill(1), {0: 2}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--silence", type=float, default=60.0)
    parser.add_argument("--attacks", nargs="+", choices=ATTACKS, default=[*ATTACKS])
    options = parser.parse_args()
    lines, failed = [], False
    with tempfile.TemporaryDirectory() as target, machines():
        left_alone = Path(target) / "alone"
        left_alone.mkdir()
        ended = Pair(left_alone, options.silence).wait(600)
        assert [code for code, *_ in ended] == [0, 0], ended
        expected = contents(run_of(left_alone))
        for name in options.attacks:
            line, wrong = attack(name, Path(target), expected, options.silence)
            failed |= bool(wrong)
            lines.append(line)
            for problem in wrong:
                print(f"{name}: {problem}", file=sys.stderr)
    text = table(lines, options.silence)
    print(text)
    if len(options.attacks) == len(ATTACKS):
        write_section("hosts", text)
    sys.exit(failed)


def attack(name: str, target: Path, expected: dict[str, object], silence: float) -> tuple[str, list[str]]:
    """Return a row of the table, and the errors."""
    act, right = ATTACKS[name]
    if silence < GRACE + 10:  # after that, an unanswered signal ends the process
        right = {rank: UNREACHABLE if code == INTERRUPTED else code for rank, code in right.items()}
    folder, wrong = target / name.replace(" ", "-"), []
    folder.mkdir()
    pair = Pair(folder, silence)
    pair.until_training()
    act(pair)
    ended = pair.wait(silence + GRACE + 10)
    cells = []
    for rank, (code, seconds, words) in enumerate(ended):
        if rank not in right:
            cells.append("-")
            continue
        cells.append(f"{code} after {seconds:.0f} s")
        if code != right[rank]:
            wrong.append(f"{HOSTS[rank]} ended with {code}, not {right[rank]}: {words}")
        if words.count("\n") or not words.startswith("pearl: "):
            wrong.append(f"{HOSTS[rank]} said {words!r}")
        if code == UNREACHABLE and HOSTS[1 - rank] not in words:
            wrong.append(f"{HOSTS[rank]} names no machine: {words}")
    subprocess.run(["ip", "-n", CABLE[1], "link", "set", CABLE[1], "up"], check=True)
    again = Pair(folder, silence).wait(600)
    if any(code for code, *_ in again):
        wrong.append(f"the same command ended so: {again}")
    actual = contents(run_of(folder))
    wrong += [
        f"{key} differs" for key in sorted(actual.keys() | expected.keys()) if actual.get(key) != expected.get(key)
    ]
    return f"| {name} | {' | '.join(cells)} | {'no' if wrong else 'yes'} |", wrong


def run_of(folder: Path) -> Path:
    """Return the only run."""
    (log,) = folder.glob("*/events.jsonl")
    return log.parent


@contextmanager
def machines() -> Iterator[None]:
    """Create two namespaces connected by a cable."""
    for name in CABLE:
        subprocess.run(["ip", "netns", "delete", name], capture_output=True)  # left by a killed attempt
        subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        cable = ["ip", "link", "add", CABLE[0], "netns", CABLE[0], "type", "veth"]
        subprocess.run([*cable, "peer", "name", CABLE[1], "netns", CABLE[1]], check=True)
        for name, address in zip(CABLE, ADDRESSES, strict=True):
            subprocess.run(["ip", "-n", name, "address", "add", f"{address}/24", "dev", name], check=True)
            for device in ("lo", name):
                subprocess.run(["ip", "-n", name, "link", "set", device, "up"], check=True)
        yield
    finally:
        for name in CABLE:
            subprocess.run(["ip", "netns", "delete", name], check=True)


def table(lines: list[str], silence: float) -> str:
    """Return the actual as Markdown."""
    return (
        f"## Lost connections between machines\n\n"
        f"`python benchmarks/attack/hosts.py --silence {silence:g}`: two network namespaces with a cable between them "
        f"train one run, and are disturbed in the middle of a phase. Exit codes: {UNREACHABLE} a machine is lost, "
        f"{INTERRUPTED} interrupted, 2 another process has ended. A process that is stopped or killed has none. "
        f"The last column is yes if all ended correctly, and the same commands then ended with the bits of an "
        f"uninterrupted run.\n\n"
        f"| disturbance | first machine | second machine | as it should be |\n|---|---|---|---|\n"
        + "\n".join(lines)
        + "\n"
    )


if __name__ == "__main__":
    main()
