"""Heartbeats between the processes that train one model: a lost machine ends them all. Does not import torch.

A collective operation waits for ever for a machine that has lost power or network. A thread of each process therefore
sends a beat to the first process ten times in `silence()` seconds, and receives its beats. Without a beat for that
long, it ends its process with `launch.UNREACHABLE` and the name of the lost machine; the first process notifies the
others before it ends. Threads send beats while their process computes, decodes or waits.

A connection closed without a goodbye message belongs to a process that has ended. In the others a collective fails;
those still running after `launch.GRACE` seconds end with `launch.LOST`.
"""

import hmac
import math
import os
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from pearl.errors import ConfigError, RunError, counted
from pearl.training import launch
from pearl.training.stop import end

BEAT, GOODBYE, ENDED, SILENT = range(4)  # kinds of messages: a kind, and the rank that it concerns
_MESSAGE = struct.Struct(">BI")
_TOKEN = 16  # bytes by which the first process recognises the others
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def silence() -> float:
    """Return the seconds without a beat after which a process counts as lost, from PEARL_SILENCE.

    Raises:
        ConfigError: it is not a number of seconds.
    """
    text = os.environ.get("PEARL_SILENCE", "60")
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ConfigError(f"PEARL_SILENCE={text}: give a number of seconds, such as 60")
    return seconds


@contextmanager
def joined_in_time(world: int) -> Iterator[None]:
    """End this process if it has not met the `world` - 1 others after ten times the silence: one of them is lost."""
    seconds = 10 * silence()
    words = (
        f"of {counted(world, 'process')} some have not started after {seconds:g} s: check their output and the network"
    )
    late = threading.Timer(seconds, end, (launch.UNREACHABLE, words))
    late.daemon = True
    late.start()
    try:
        yield
    finally:
        late.cancel()


@contextmanager
def beating(rank: int, hosts: Sequence[str], address: str, same: Callable[[Any], Any]) -> Iterator[None]:
    """Send and watch beats within the context. All processes call this together.

    Args:
        rank: rank of this process.
        hosts: machine of each process.
        address: address of the first process's machine.
        same: returns the first process's value in all processes.

    Raises:
        RunError: a process cannot reach the first one.
    """
    with ExitStack() as opened:
        links = _links(rank, len(hosts), address, same, opened)
        heart = _Heart(rank, hosts, links)
        heart.start()
        try:
            yield
        except BaseException:
            heart.leave(well=False)
            raise
        heart.leave(well=True)


def _links(
    rank: int, world: int, address: str, same: Callable[[Any], Any], opened: ExitStack
) -> dict[int, socket.socket]:
    """Return connections by rank: from the first process to all others, from any other to the first."""
    wait = silence()
    if rank:
        port, token = same(None)
        try:
            link = opened.enter_context(socket.create_connection((address, port), timeout=wait))
            link.sendall(token + rank.to_bytes(4, "big"))
        except OSError as error:
            raise RunError(f"process {rank + 1} of {world} cannot reach {address} ({error}); open its ports") from None
        return {0: link}
    with _listener(address) as door:
        token = secrets.token_bytes(_TOKEN)
        same((door.getsockname()[1], token))
        links: dict[int, socket.socket] = {}
        deadline = time.monotonic() + wait
        while len(links) < world - 1:
            door.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                link, _ = door.accept()
            except OSError:
                met = f"{len(links)} of {world - 1}"
                raise RunError(f"{met} other processes have reached the first one's machine; open its ports") from None
            said = _greeting(link)
            if hmac.compare_digest(said[:_TOKEN], token):
                links[int.from_bytes(said[_TOKEN:], "big")] = opened.enter_context(link)
            else:  # not one of our processes
                link.close()
    return links


def _greeting(link: socket.socket) -> bytes:
    """Return the token and rank that a new connection sends first, or less."""
    said = b""
    link.settimeout(1.0)
    with suppress(OSError):
        while len(said) < _TOKEN + 4 and (more := link.recv(_TOKEN + 4 - len(said))):
            said += more
    return said


def _listener(address: str) -> socket.socket:
    """Open a port, for this machine only if all processes are here, else on all its addresses: it may have several
    names.
    """
    if address in _LOOPBACK:
        return socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


class _Heart(threading.Thread):
    def __init__(self, rank: int, hosts: Sequence[str], links: Mapping[int, socket.socket]) -> None:
        super().__init__(name="heartbeats", daemon=True)
        self.rank, self.hosts, self.links, self.silence = rank, hosts, dict(links), silence()
        self.heard = dict.fromkeys(links, time.monotonic())
        self.received = dict.fromkeys(links, b"")
        self.well = False
        self.ended: list[int] = []  # processes that have ended without a goodbye
        self.deadline = math.inf  # time limit for this one to notice
        self.woken, self.wake = socket.socketpair()
        self.ready = selectors.DefaultSelector()
        self.ready.register(self.woken, selectors.EVENT_READ)
        for other, link in self.links.items():
            link.setblocking(False)
            self.ready.register(link, selectors.EVENT_READ, other)

    def leave(self, *, well: bool) -> None:
        """End the thread, with a goodbye if the run succeeded."""
        self.well = well
        self.wake.send(b"\0")
        self.join()
        for one in (self.ready, self.woken, self.wake):
            one.close()

    def run(self) -> None:
        """Run the thread; see the module."""
        interval = self.silence / 10
        beat = looked = time.monotonic()
        while True:
            for key, _ in self.ready.select(max(0.0, beat - time.monotonic())):
                if key.fileobj is self.woken:
                    if self.well:
                        self.say_goodbye()
                    return
                self.receive(key.data)
            now = time.monotonic()
            if now - looked > self.silence / 2:  # this process was stopped, and perhaps all of them
                self.heard = dict.fromkeys(self.heard, now)
            looked = now
            if now >= beat:
                self.tell(BEAT, self.rank)
                beat = now + interval
            if now - min(self.heard.values(), default=now) > self.silence:
                late = [other for other, at in self.heard.items() if now - at > self.silence - 2 * interval]
                self.lose(late)
            if now > self.deadline:
                end(launch.LOST, f"{self.named(self.ended)} has ended")

    def tell(self, kind: int, rank: int) -> None:
        """Send a message to all others."""
        for link in self.links.values():
            with suppress(OSError):  # a missing process is noticed when reading from it
                link.send(_MESSAGE.pack(kind, rank))

    def say_goodbye(self) -> None:
        """Tell the others that this process leaves, and read their messages: otherwise the goodbye could be lost."""
        self.tell(GOODBYE, self.rank)
        for link in self.links.values():
            with suppress(OSError):
                link.shutdown(socket.SHUT_WR)
        for link in self.links.values():
            link.settimeout(1.0)
            with suppress(OSError):
                while link.recv(4096):
                    pass

    def receive(self, other: int) -> None:
        """Read the messages from another process."""
        try:
            data = self.links[other].recv(4096)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self.heard[other] = time.monotonic()
        if not data:
            self.drop(other)
            self.note_ended(other)
            return
        data = self.received[other] + data
        whole = len(data) - len(data) % _MESSAGE.size
        self.received[other] = data[whole:]
        for kind, rank in _MESSAGE.iter_unpack(data[:whole]):
            if kind == GOODBYE:
                self.drop(other)
                return
            if kind == ENDED:
                self.note_ended(rank)
            elif kind == SILENT:
                self.lose([rank])

    def drop(self, other: int) -> None:
        """Stop sending to another process and expecting its beats."""
        self.ready.unregister(self.links.pop(other))
        del self.heard[other]

    def note_ended(self, rank: int) -> None:
        """Record that a process has ended without a goodbye, and start the time limit for this one."""
        if rank in self.ended:
            return
        self.ended.append(rank)
        self.deadline = min(self.deadline, time.monotonic() + launch.GRACE)
        self.tell(ENDED, rank)

    def lose(self, ranks: Sequence[int]) -> None:
        """Report lost processes to the others, and end this one."""
        for rank in ranks:
            self.tell(SILENT, rank)
        for link in self.links.values():
            with suppress(OSError):
                link.shutdown(socket.SHUT_WR)
        time.sleep(0.2)  # messages arrive before a connection closed with unread beats is reset
        end(launch.UNREACHABLE, f"no sign of life from {self.named(ranks)} for {self.silence:g} s")

    def named(self, ranks: Sequence[int]) -> str:
        """Return machines, with their processes."""
        of = {host: [f"{rank + 1}" for rank in ranks if self.hosts[rank] == host] for host in self.hosts}
        return " and ".join(
            f"{host} (process {', '.join(numbers)} of {len(self.hosts)})" for host, numbers in of.items() if numbers
        )
