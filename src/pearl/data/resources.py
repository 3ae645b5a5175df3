"""The threads and the memory for decoding images that this process may use."""

import math
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
MOST = 2 * 2**30  # bytes; 20 photos of 12 megapixels at a time
SHARE = 4  # of the memory that there is, a quarter


def threads() -> int:
    """Return how many threads can run at a time, by the CPU affinity of this process and its quota of CPU time."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [math.ceil(quota) for quota in _cpu_quotas()]
    return max(1, min(available, *quotas) if quotas else available)


def budget() -> int:
    """Return how many bytes images may take that are being decoded: `MOST`, or a quarter of the memory if it is less.

    The memory is that of the machine, or of the control groups that this process is in.
    """
    limits = _memory_limits()
    with suppress(AttributeError, ValueError, OSError):  # not on every system
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return min([MOST, *(limit // SHARE for limit in limits)])


def _cpu_quotas() -> list[float]:
    """CPUs that each of the control groups may use."""
    found = []
    for quota, period in [
        *(text.split()[:2] for text in _values("", "cpu.max") if len(text.split()) > 1),
        *zip(_values("cpu", "cpu.cfs_quota_us"), _values("cpu", "cpu.cfs_period_us"), strict=False),
    ]:
        with suppress(ValueError, ZeroDivisionError):  # "max" is no limit, nor is -1
            found += [int(quota) / int(period)] * (int(quota) > 0)
    return found


def _memory_limits() -> list[int]:
    """Bytes that each of the control groups may use."""
    texts = [*_values("", "memory.max"), *_values("memory", "memory.limit_in_bytes")]
    return [int(text) for text in texts if text.isdecimal()]


def _values(controller: str, name: str) -> list[str]:
    """Read a file of the control group of this process and of those above it; `controller` is "" in version 2."""
    with suppress(OSError, ValueError):
        for line in MEMBERSHIP.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controller in controllers.split(","):
                own = GROUPS / controllers / path.lstrip("/")
                above = [place for place in own.parents if place.is_relative_to(GROUPS / controllers)]
                return [text for place in (own, *above) if (text := _text(place / name))]
    return []


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:  # the root has no limits
        return ""


class Budget:
    """Bytes that threads share: each takes what it needs, and waits until that is there."""

    def __init__(self, size: int) -> None:
        self.size = self.left = size
        self._changed = threading.Condition()

    @contextmanager
    def taken(self, count: int) -> Iterator[None]:
        """Hold so many bytes meanwhile. What needs more than all of them holds all, and so is alone."""
        count = min(count, self.size)
        with self._changed:
            self._changed.wait_for(lambda: self.left >= count)
            self.left -= count
        try:
            yield
        finally:
            with self._changed:
                self.left += count
                self._changed.notify_all()
