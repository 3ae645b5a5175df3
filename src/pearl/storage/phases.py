"""Finished phases, kept by what decides their result: FOLDER/KEY/{weights.safetensors, manifest.json}. No torch.

The folder is $PEARL_CACHE (default: phases/ in the data folder), `off` for none. It never holds more than
$PEARL_CACHE_GB gigabytes (default: 10), nor more than it leaves free on its disk; what was not used for longest goes
first. All in it is derived: whatever is removed or damaged is trained again.
"""

import os
import re
import shutil
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pearl.errors import ConfigError
from pearl.storage.paths import as_path, data_root
from pearl.storage.stored_task import MANIFEST

STALE = 24 * 3600.0  # seconds after which what a killed process left may go
_ASIDE = re.compile(r"[0-9a-f]{64}\.[0-9a-f]{32}\.tmp")
_ENTRY = re.compile(r"[0-9a-f]{64}")
_LOCK = re.compile(r"[0-9a-f]{64}\.(lock|holder\.json)")


@dataclass(frozen=True)
class Entry:
    """A phase on disk."""

    path: Path
    bytes: int
    used: float  # when, in seconds since 1970


def folder() -> Path | None:
    """Where phases are kept; None where they are not.

    Raises:
        ConfigError: PEARL_CACHE is no path.
    """
    text = os.environ.get("PEARL_CACHE", "")
    if text == "off":
        return None
    return as_path(text, what="PEARL_CACHE") if text else data_root() / "phases"


def limit() -> int:
    """Most bytes that phases may take.

    Raises:
        ConfigError: PEARL_CACHE_GB is no number of gigabytes.
    """
    text = os.environ.get("PEARL_CACHE_GB") or "10"
    with suppress(ValueError, OverflowError):  # infinity is none either
        if (found := int(float(text) * 1e9)) >= 0:
            return found
    raise ConfigError(f"PEARL_CACHE_GB={text}: no number of gigabytes; give one, as 10, or set PEARL_CACHE=off")


def entries(root: Path) -> list[Entry]:
    """All phases of a folder, that used longest ago first; none if it is not there."""
    found = []
    for place in root.iterdir() if root.is_dir() else ():
        with suppress(OSError):  # another process removes it just now
            if _ENTRY.fullmatch(place.name):
                size = sum(file.stat().st_size for file in place.iterdir())
                manifest = place / MANIFEST  # is gone where a process was killed as it removed a phase
                found.append(Entry(place, size, (manifest if manifest.exists() else place).stat().st_mtime))
    return sorted(found, key=lambda entry: entry.used)


def touch(entry: Path) -> None:
    """Note that a phase is used."""
    with suppress(OSError):  # of others, whose folder may be read only
        os.utime(entry / MANIFEST)


def aside(entry: Path) -> Path:
    """A new name beside that of a phase, for one that is being written."""
    return entry.with_name(f"{entry.name}.{uuid.uuid4().hex}.tmp")


def make_room(root: Path, size: int) -> bool:
    """Remove what was not used for longest until so many bytes more may be kept; False if that can never be.

    Raises:
        OSError: the folder cannot be looked into.
    """
    _remove_leftovers(root)
    there = entries(root)
    used = sum(entry.bytes for entry in there)
    allowed = min(limit(), (used + shutil.disk_usage(root).free) // 2)
    if size > allowed:
        return False
    for entry in there:
        if used + size <= allowed:
            break
        shutil.rmtree(entry.path, ignore_errors=True)
        used -= entry.bytes
    return True


def empty(root: Path) -> None:
    """Remove all phases, and nothing else that may lie there. A process that trains one keeps its lock."""
    for place in [*root.iterdir()] if root.is_dir() else ():
        if _ENTRY.fullmatch(place.name) or _ASIDE.fullmatch(place.name):
            shutil.rmtree(place, ignore_errors=True)
    _remove_leftovers(root)


def _remove_leftovers(root: Path) -> None:
    """What was left long ago by processes that were killed. Whose lock goes while he still trains is not waited for."""
    for place in [*root.iterdir()] if root.is_dir() else ():
        with suppress(OSError):
            old = time.time() - place.stat().st_mtime > STALE
            if old and _ASIDE.fullmatch(place.name):
                shutil.rmtree(place, ignore_errors=True)
            elif old and _LOCK.fullmatch(place.name):
                place.unlink()
