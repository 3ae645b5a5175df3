"""The threads and the memory for decoding images that this process may use."""

import math
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
MOST = 2 * 2**30  # bytes; 20 photos of 12 megapixels at once
SHARE = 4  # a quarter of the available memory


def threads() -> int:
    """Return the number of threads that can run at once, by CPU affinity and CPU quota of this process."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [math.ceil(quota) for quota in _cpu_quotas()]
    return max(1, min(available, *quotas) if quotas else available)


def budget() -> int:
    """Return the bytes that images may take during decoding: `MOST`, or a quarter of the memory if that is less."""
    return min(MOST, memory() // SHARE)


def memory() -> int:
    """Return the bytes of memory of the machine, or of the control groups that this process is in."""
    limits = _memory_limits()
    with suppress(AttributeError, ValueError, OSError):  # not available on every system
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return min(limits or [SHARE * MOST])


def _cpu_quotas() -> list[float]:
    """Yield the CPU quota of each control group."""
    quotas = []
    for quota, period in [
        *(text.split()[:2] for text in _values("", "cpu.max") if len(text.split()) > 1),
        *zip(_values("cpu", "cpu.cfs_quota_us"), _values("cpu", "cpu.cfs_period_us"), strict=False),
    ]:
        with suppress(ValueError, ZeroDivisionError):  # "max" and -1 mean no limit
            quotas += [int(quota) / int(period)] * (int(quota) > 0)
    return quotas


def _memory_limits() -> list[int]:
    """Yield the memory limit of each control group, in bytes."""
    texts = [*_values("", "memory.max"), *_values("memory", "memory.limit_in_bytes")]
    return [int(text) for text in texts if text.isdecimal()]


def _values(controller: str, name: str) -> list[str]:
    """Yield a file's value in this process's control group and those above; `controller` is "" in version 2."""
    with suppress(OSError, ValueError):
        for line in MEMBERSHIP.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controller in controllers.split(","):
                folder = GROUPS / controllers / path.lstrip("/")
                above = [group for group in folder.parents if group.is_relative_to(GROUPS / controllers)]
                return [text for group in (folder, *above) if (text := _text(group / name))]
    return []


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:  # the root has no limits
        return ""


class Budget:
    """Bytes that threads share: each takes its amount, waiting until it is available."""

    def __init__(self, size: int) -> None:
        self.size = self.left = size
        self._changed = threading.Condition()

    @contextmanager
    def taken(self, count: int) -> Iterator[None]:
        """Hold this many bytes within the context; a larger amount than all takes all, and therefore runs alone."""
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
