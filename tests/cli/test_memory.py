"""Memory that is freed, as the system sees it: each page that it has to clear is a fault."""

import ctypes
import os
import platform
import resource
import subprocess
import sys

import pytest

from pearl.cli import memory

PAGES = 128 * 2**20 // resource.getpagesize()
FAULTS = """
import resource, sys
from contextlib import suppress
from pearl.cli import main
sys.argv = ["pearl", "--version"]
with suppress(SystemExit):
    main()
for _ in range(3):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = bytearray(b"1") * 2**27
    del block
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""

needs_glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the allocator is glibc's")


def faults(**env: str) -> list[int]:
    """Of blocks of 128 MiB, one after the other, in a process that has been pearl's."""
    clean = {name: value for name, value in os.environ.items() if "MALLOC" not in name and name != "GLIBC_TUNABLES"}
    actual = subprocess.run(
        [sys.executable, "-c", FAULTS], env=clean | env, capture_output=True, text=True, check=True, timeout=100
    )
    return [int(line) for line in actual.stdout.split("\n")[1:] if line]


@needs_glibc
def test_what_was_freed_is_used_again() -> None:
    first, *rest = faults()
    assert first > PAGES // 1000  # the system may have large pages
    assert all(count < first / 100 for count in rest)


@needs_glibc
@pytest.mark.parametrize(
    "env",
    [
        {"MALLOC_TRIM_THRESHOLD_": "131072"},
        {"MALLOC_MMAP_THRESHOLD_": "131072"},
        {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=131072"},
    ],
)
def test_what_the_environment_says_stays(env: dict[str, str]) -> None:
    first, *rest = faults(**env)
    assert all(count > first / 2 for count in rest)


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment that says nothing of the allocator."""
    for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_", "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("silent")
def test_other_systems_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    assert memory.keep_freed_memory() is False


@pytest.mark.usefixtures("silent")
def test_an_older_glibc_has_no_threshold_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []

    class Old:
        def mallopt(self, what: int, value: int) -> int:
            asked.append((what, value))
            return int(what != memory.M_MMAP_THRESHOLD or value <= 2**25)

    monkeypatch.setattr(ctypes, "CDLL", lambda name: Old())
    assert memory.keep_freed_memory() is True
    assert asked[1:] == [(memory.M_MMAP_MAX, 0), (memory.M_TRIM_THRESHOLD, memory.GIBIBYTE)]
