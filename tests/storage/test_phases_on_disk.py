"""How much is kept of finished phases, and what goes first."""

import os
import time

import pytest

from pearl.errors import ConfigError
from pearl.storage import phases


def entry(root, name, size=1000, used=0.0):
    target = root / (name * 64)
    target.mkdir(parents=True)
    (target / "weights.safetensors").write_bytes(b"x" * size)
    (target / "manifest.json").write_bytes(b"")
    os.utime(target / "manifest.json", (used, used))
    return target


def there(root):
    return {path.name[0] for path in root.iterdir()}


def test_what_was_not_used_for_longest_goes_first(tmp_path, monkeypatch):
    monkeypatch.setenv("PEARL_CACHE_GB", "3e-6")
    a, _, _ = (entry(tmp_path, name, used=used) for name, used in (("a", 1), ("b", 2), ("c", 3)))
    assert phases.make_room(tmp_path, 0) and there(tmp_path) == {"a", "b", "c"}
    phases.touch(a)
    assert phases.make_room(tmp_path, 1000) and there(tmp_path) == {"a", "c"}
    assert phases.make_room(tmp_path, 2001) and there(tmp_path) == set()


def test_what_a_killed_process_left_of_a_phase_counts_and_goes(tmp_path, monkeypatch):
    monkeypatch.setenv("PEARL_CACHE_GB", "3e-6")
    half, _ = entry(tmp_path, "a"), entry(tmp_path, "b", used=time.time() + 9)
    (half / "manifest.json").unlink()
    assert {actual.path: actual.bytes for actual in phases.entries(tmp_path)}[half] == 1000
    assert phases.make_room(tmp_path, 1001) and there(tmp_path) == {"b"}


def test_a_phase_that_is_larger_than_all_may_be_is_not_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("PEARL_CACHE_GB", "3e-6")
    entry(tmp_path, "a")
    assert not phases.make_room(tmp_path, 3001) and there(tmp_path) == {"a"}


def test_it_leaves_as_much_free_as_it_takes(tmp_path, monkeypatch):
    entry(tmp_path, "a"), entry(tmp_path, "b", used=1)
    monkeypatch.setattr(phases.shutil, "disk_usage", lambda root: Disk(free=3000))
    assert phases.make_room(tmp_path, 500) and there(tmp_path) == {"a", "b"}  # of 5000 in all, 2500 may be taken
    assert phases.make_room(tmp_path, 501) and there(tmp_path) == {"b"}


class Disk:
    def __init__(self, free):
        self.free = free


def test_leftovers_of_killed_processes_go_after_a_day(tmp_path):
    old, new = (phases.aside(tmp_path / (name * 64)) for name in "ab")
    locks = [tmp_path / f"{name * 64}.lock" for name in "cd"]
    for target in (old, new):
        target.mkdir()
    for lock in locks:
        lock.touch()
    long_ago = time.time() - phases.STALE - 1
    for target in (old, locks[0]):
        os.utime(target, (long_ago, long_ago))
    assert phases.make_room(tmp_path, 0) and there(tmp_path) == {"b", "d"}


def test_only_phases_are_removed(tmp_path):
    """Whoever set PEARL_CACHE to his home keeps what is there."""
    (tmp_path / "photos").mkdir()
    (tmp_path / "letter.txt").touch()
    entry(tmp_path, "a")
    phases.aside(tmp_path / ("b" * 64)).mkdir()
    phases.empty(tmp_path)
    assert there(tmp_path) == {"p", "l"}


def test_where_phases_lie(tmp_path, monkeypatch):
    for text, folder in (("", tmp_path / "data" / "phases"), ("off", None), ("~/kept", phases.Path.home() / "kept")):
        monkeypatch.setenv("PEARL_CACHE", text)
        assert phases.folder() == folder


@pytest.mark.parametrize("text", ["much", "-1", "nan", "inf"])
def test_a_limit_that_is_none_is_one_line(text, monkeypatch):
    monkeypatch.setenv("PEARL_CACHE_GB", text)
    with pytest.raises(ConfigError, match=rf"^PEARL_CACHE_GB={text}: not a number of gigabytes; give one, such as 10"):
        phases.limit()
