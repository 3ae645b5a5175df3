"""Threads and memory by what this process may use, not by what the machine has."""

import os
import threading
import time
from pathlib import Path

import pytest

from pearl.data import resources
from pearl.data.resources import MOST, Budget, budget, threads


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Control groups of both versions, in which this process is somewhere below; the machine has 64 processors."""
    monkeypatch.setattr(resources, "GROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(resources, "MEMBERSHIP", tmp_path / "membership")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    (tmp_path / "membership").write_text("4:memory:/job/task\n1:cpu,cpuacct:/job/task\n0::/slice/job\n")
    return tmp_path / "cgroup"


def write(groups: Path, name: str, text: str) -> None:
    file = groups / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{text}\n")


def test_threads_follow_affinity_and_quotas(groups: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert threads() == 64
    write(groups, "slice/job/cpu.max", "max 100000")
    assert threads() == 64
    write(groups, "slice/cpu.max", "850000 100000")  # of a group above
    assert threads() == 9
    write(groups, "cpu,cpuacct/job/task/cpu.cfs_quota_us", "-1")
    write(groups, "cpu,cpuacct/job/task/cpu.cfs_period_us", "100000")
    assert threads() == 9
    write(groups, "cpu,cpuacct/job/task/cpu.cfs_quota_us", "50000")
    assert threads() == 1
    monkeypatch.setattr(resources, "MEMBERSHIP", groups / "none")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5})
    assert threads() == 2


def test_images_take_a_quarter_of_little_memory(groups: Path) -> None:
    before = budget()
    assert before <= MOST
    write(groups, "slice/job/memory.max", "max")
    write(groups, "memory/job/task/memory.limit_in_bytes", "9223372036854771712")
    assert budget() == before
    write(groups, "memory/job/memory.limit_in_bytes", str(400 * 2**20))
    assert budget() == 100 * 2**20
    write(groups, "slice/memory.max", str(200 * 2**20))
    assert budget() == 50 * 2**20


def test_threads_share_bytes() -> None:
    """Two of 40 fit into 100, a third waits; one of more than all waits until it is alone."""
    shared, lock, inside, most = Budget(100), threading.Lock(), [0], [0]

    def work(count: int) -> None:
        for _ in range(20):
            with shared.taken(count):
                with lock:
                    inside[0] += min(count, 100)
                    most[0] = max(most[0], inside[0])
                time.sleep(0.001)
                with lock:
                    inside[0] -= min(count, 100)

    workers = [threading.Thread(target=work, args=(count,)) for count in (40, 40, 40, 40, 1000)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(30)
    assert not any(worker.is_alive() for worker in workers)
    assert most[0] <= 100 and shared.left == 100
    with pytest.raises(ZeroDivisionError), shared.taken(60):
        1 / 0  # noqa: B018
    assert shared.left == 100
