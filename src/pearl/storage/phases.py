"""Files of the phase cache, by digest: FOLDER/KEY/{weights.safetensors, manifest.json}. No torch.

The folder is $PEARL_CACHE (default: phases/ in the data folder), `off` for none. Its size is limited to $PEARL_CACHE_GB
gigabytes (default: 10), and to the free space of its disk; the least recently used entries are removed first. Removed
or damaged entries are trained again.
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

STALE = 24 * 3600.0  # age in seconds at which leftovers of killed processes are removed
_ASIDE = re.compile(r"[0-9a-f]{64}\.[0-9a-f]{32}\.tmp")
_ENTRY = re.compile(r"[0-9a-f]{64}")
_LOCK = re.compile(r"[0-9a-f]{64}\.(lock|holder\.json)")


@dataclass(frozen=True)
class Entry:
    """A cached phase on disk."""

    path: Path
    bytes: int
    used: float  # time of last use, in seconds since 1970


def folder() -> Path | None:
    """Return the folder of the cache; None if it is disabled.

    Raises:
        ConfigError: PEARL_CACHE is not a path.
    """
    text = os.environ.get("PEARL_CACHE", "")
    if text == "off":
        return None
    return as_path(text, what="PEARL_CACHE") if text else data_root() / "phases"


def limit() -> int:
    """Return the maximum bytes of the cache.

    Raises:
        ConfigError: PEARL_CACHE_GB is not a number of gigabytes.
    """
    text = os.environ.get("PEARL_CACHE_GB") or "10"
    with suppress(ValueError, OverflowError):  # also excludes infinity
        if (most := int(float(text) * 1e9)) >= 0:
            return most
    raise ConfigError(f"PEARL_CACHE_GB={text}: not a number of gigabytes; give one, such as 10, or set PEARL_CACHE=off")


def entries(root: Path) -> list[Entry]:
    """Return all entries of a folder, least recently used first; empty if it does not exist."""
    sized = []
    for folder in root.iterdir() if root.is_dir() else ():
        with suppress(OSError):  # another process is removing it
            if _ENTRY.fullmatch(folder.name):
                size = sum(file.stat().st_size for file in folder.iterdir())
                manifest = folder / MANIFEST  # missing if a process was killed while removing an entry
                sized.append(Entry(folder, size, (manifest if manifest.exists() else folder).stat().st_mtime))
    return sorted(sized, key=lambda entry: entry.used)


def touch(entry: Path) -> None:
    """Record that an entry is used."""
    with suppress(OSError):  # another user's folder, which may be read-only
        os.utime(entry / MANIFEST)


def aside(entry: Path) -> Path:
    """Return a new name beside an entry's, for writing."""
    return entry.with_name(f"{entry.name}.{uuid.uuid4().hex}.tmp")


def make_room(root: Path, size: int) -> bool:
    """Remove the least recently used entries until this many bytes fit; return False if that is impossible.

    Raises:
        OSError: the folder is unreadable.
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
    """Remove all entries, and no other files. A process that trains one keeps its lock."""
    for folder in [*root.iterdir()] if root.is_dir() else ():
        if _ENTRY.fullmatch(folder.name) or _ASIDE.fullmatch(folder.name):
            shutil.rmtree(folder, ignore_errors=True)
    _remove_leftovers(root)


def _remove_leftovers(root: Path) -> None:
    """Remove old leftovers of killed processes."""
    for path in [*root.iterdir()] if root.is_dir() else ():
        with suppress(OSError):
            old = time.time() - path.stat().st_mtime > STALE
            if old and _ASIDE.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)
            elif old and _LOCK.fullmatch(path.name):
                path.unlink()
