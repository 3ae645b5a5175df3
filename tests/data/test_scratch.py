"""Room for images: memory, or above a quarter of it a file that has no name at any time."""

import errno
import gc
import os
import re
from pathlib import Path

import numpy as np
import pytest

from pearl.data import resources, scratch
from pearl.errors import DataError

SHAPE = (30, 8, 8, 3)


@pytest.fixture
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "memory", lambda: 4 * (30 * 192 - 1))


def mapped(folder: Path) -> list[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in lines if str(folder) in line]


def test_the_limit_is_a_quarter_of_the_memory(little: None) -> None:
    assert scratch.is_large(30 * 192) and not scratch.is_large(30 * 192 - 1)


def test_memory_is_the_least_of_the_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "_memory_limits", lambda: [12345, 99999])
    assert resources.memory() == 12345
    monkeypatch.setattr(resources, "_memory_limits", list)
    assert resources.memory() == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("allocates", [True, False])
def test_a_large_array_is_in_a_file_without_a_name(
    allocates: bool, little: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not allocates:  # as on macOS
        monkeypatch.delattr(os, "posix_fallocate")
    with scratch.beside(tmp_path / "not" / "there"):
        actual = scratch.room(SHAPE)
        (line,) = mapped(tmp_path)
        assert line.endswith("(deleted)") and [*tmp_path.iterdir()] == []
        actual[:] = np.arange(30, dtype=np.uint8)[:, None, None, None]
        again = scratch.taken(actual, np.array([29, 3, 3] * 10))
        assert len(mapped(tmp_path)) == 2
        few = scratch.taken(actual, np.array([5, 7]))
        assert len(mapped(tmp_path)) == 2
    assert again[:3, 0, 0, 0].tolist() == [29, 3, 3] and few[:, 7, 7, 2].tolist() == [5, 7]
    del actual, again, few
    gc.collect()
    assert mapped(tmp_path) == []


def test_without_a_model_the_folder_for_temporary_files_is_used(
    little: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    actual = scratch.room(SHAPE)
    assert mapped(tmp_path) and actual.flags.writeable


def test_a_full_disk_is_one_line_before_anything_is_written(
    little: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    line = rf"{re.escape(str(tmp_path))}: no room for 0\.0 GB of decoded images, .* \(No space left on device\); free "
    with scratch.beside(tmp_path / "model"), pytest.raises(DataError, match=line):
        scratch.room(SHAPE)


def test_it_is_described_before_it_is_made(little: None, tmp_path: Path) -> None:
    assert scratch.described((1, 8, 8, 3)) == "0.0 MB in memory"
    with scratch.beside(tmp_path / "model"):
        words = scratch.described(SHAPE)
    assert words.startswith("0.0 GB, more than a quarter of the memory: in a file without a name in ")
    assert f"in {tmp_path}, where " in words and words.endswith(" GB are free")
