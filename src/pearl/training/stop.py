"""Stop requests: signals of users, of lost connections and of schedulers. Does not import torch."""

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

from pearl.training import launch

HEARD = b"\0"  # added to signal numbers after the main thread has handled them


class Stop:
    """Signals that request a stop, see `launch.stopping`. During training they wait for the end of the step.

    A second one from a user (Ctrl-C, SIGTERM) does not wait. A second one from a machine does: a closed terminal sends
    SIGHUP twice, and a scheduler sends SIGTERM after its warning. With `several` processes a signal also ends this one
    while it waits in vain for another, see `ended_if_deaf`.
    """

    def __init__(self, *, several: bool = False) -> None:
        self.requested = self.waits = False
        self.several = several
        self._by_person = False
        self._heard: Callable[[], object] = lambda: None

    @contextmanager
    def caught(self) -> Iterator["Stop"]:
        """Handle the signals within the context; only the main thread can handle them."""
        watched = self.several and threading.current_thread() is threading.main_thread()
        with ended_if_deaf() if watched else nullcontext(self._heard) as self._heard, launch.handled(self._on_signal):
            yield self

    def _on_signal(self, number: int, _: object) -> None:
        self._heard()
        person, first = number in launch.OF_PERSONS, not self.requested
        again = person and self._by_person
        self.requested, self._by_person = True, person or self._by_person
        if again or (not self.waits and (first or person)):
            raise KeyboardInterrupt


@contextmanager
def ended_if_deaf() -> Iterator[Callable[[], object]]:
    """End this process if its main thread does not handle a stop signal for `launch.GRACE` seconds.

    Python handles signals between two operations of the main thread. If it waits in a collective for a lost process, it
    reaches no other operation, and cannot store anything. Files on disk are complete, since they get their names last.

    Yields:
        The function for signal handlers to call.
    """
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    before = signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
    thread = threading.Thread(target=_watch, args=(reads, bytes(launch.stopping())), name="signals", daemon=True)
    thread.start()
    try:
        yield lambda: os.write(writes, HEARD)
    finally:
        signal.set_wakeup_fd(before)
        os.close(writes)
        thread.join()
        os.close(reads)


def _watch(reads: int, kinds: bytes) -> None:
    deadline: float | None = None
    poll = select.poll()
    poll.register(reads, select.POLLIN)
    while True:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        if not poll.poll(left and 1000 * left):
            end(launch.INTERRUPTED, "interrupted while waiting for another process")
        if not (numbers := os.read(reads, 256)):
            return
        if numbers.endswith(HEARD):
            deadline = None
        elif deadline is None and not {*kinds}.isdisjoint(numbers):  # a program may handle other signals too
            deadline = time.monotonic() + launch.GRACE


def end(code: int, why: str) -> None:
    """End this process from a thread, whatever the main thread waits for, with a message."""
    try:
        print(f"pearl: {why}; stored steps are complete; run the same command to continue", file=sys.stderr, flush=True)
    finally:
        os._exit(code)
