"""Exclusive locks between processes: by flock, else by lockf, else by a lease that its holder renews. No torch.

The operating system's locks end with their process. On file systems without locks (Lustre and NFS may have none), the
holder's file is the lease: created by exactly one process, and renewed while it lives. A holder on this machine is
alive if its process is, one on another machine as long as it renews.
"""

import errno
import fcntl
import json
import os
import secrets
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pearl.errors import Busy, RunError, reason, remedy
from pearl.storage.inside import create_file, make_folder, replace_file, temporary_name

LOCK = (".lock", ".holder.json")  # files in a directory while a process holds it
RENEW = 10.0  # seconds between two renewals of a lease
LEASE = 60.0  # seconds without renewal after which a holder on another machine may be dead,
WATCH = 25.0  # and after this many more is dead: clocks may jump
LOOK = 0.2  # seconds between two polls while waiting

_TAKEN = {errno.EAGAIN, errno.EWOULDBLOCK, errno.EACCES}
# not implemented, not supported (user-space and kernel numbers), no locks, refused by the server
_NO_LOCKS = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, 524, errno.ENOLCK, errno.EINVAL, errno.EIO}
_HELD: set[tuple[int, int]] = set()  # device and inode; lockf does not exclude the process that holds it
_GUARD = threading.Lock()


class Held(Exception):
    """Another process holds the lock. Names it, as far as known, and the fix if it is gone."""

    def __init__(self, holder: dict[str, Any] | None = None, fix: str = "") -> None:
        try:
            known = holder or {}
            self.who = f"process {known['pid']} on {known['host']} since {known['since']}"
        except (LookupError, TypeError):
            self.who = "another process"
        self.fix = fix
        super().__init__(self.who)


class Lock:
    """The lock `file`, with `holder`, a JSON file that describes its process."""

    def __init__(self, file: Path, holder: Path) -> None:
        self.file, self.holder = file, holder
        self.lost = False  # a lease that another process has taken over because this one seemed dead
        self._descriptor = -1
        self._facts: dict[str, Any] = {}
        self._ended = threading.Event()

    def acquire(self) -> None:
        """Take the lock, or raise.

        Raises:
            Held: another process has it.
            OSError: it cannot be taken for another reason.
        """
        try:
            self._descriptor, by = _locked(self.file)
        except Held:
            raise Held(self._read()) from None
        try:
            self._facts = {**_self(), "by": by}
            if by == "lease":
                self._take_lease()
                self._ended.clear()
                threading.Thread(target=self._renew, daemon=True).start()
            else:
                if self._elsewhere():  # a machine without locks on this file system
                    self._check_dead(self._read())
                replace_file(self.holder, json.dumps(self._facts).encode())
        except BaseException:
            self._close()
            raise

    def wait(self) -> None:
        """Wait for the lock and take it.

        Raises:
            OSError: see `acquire`.
        """
        while True:
            try:
                return self.acquire()
            except Held:
                time.sleep(LOOK)

    def release(self) -> None:
        """Release the lock; files that cannot be removed are ignored by the next process."""
        self._ended.set()
        try:
            with suppress(OSError):
                if (self._read() or {}).get("token") == self._facts["token"]:
                    self.holder.unlink(missing_ok=True)
        finally:
            self._close()

    def held(self) -> bool:
        """Return True if a process holds the lock, without taking it.

        Raises:
            OSError: that cannot be determined.
        """
        try:
            descriptor, by = _locked(self.file)
        except Held:
            return True
        _unlocked(descriptor)
        known = self._read()
        return (by == "lease" or self._elsewhere()) and self._alive(known)

    def _close(self) -> None:
        if self._descriptor >= 0:
            _unlocked(self._descriptor)
            self._descriptor = -1

    # ------------------------------------------------------------------------------------------------------- leases

    def _take_lease(self) -> None:
        while True:
            with suppress(FileExistsError):
                create_file(self.holder, json.dumps(self._facts).encode())
                if (self._read() or {}).get("token") != self._facts["token"]:
                    raise Held(self._read())  # removed as a dead process's by a process that had checked just before
                return
            known = self._read()
            self._check_dead(known)
            aside = self.holder.with_name(temporary_name(self.holder.name))
            with suppress(FileNotFoundError):  # another process was faster
                self.holder.rename(aside)
                taken = _json(aside)
                if taken != known:  # a lease that another process has just created instead of the dead one's
                    with suppress(OSError):
                        os.link(aside, self.holder)
                with suppress(OSError):
                    aside.unlink()

    def _check_dead(self, known: dict[str, Any] | None) -> None:
        """Check that the named holder is dead, which may take a while.

        Raises:
            Held: it is alive, or that cannot be determined.
        """
        remove = f"if that process is gone, remove {self.holder}"
        if known and known.get("by") in ("flock", "lockf") and not _here(known):
            raise Held(known, f"; {remove}")  # on a machine with locks, where holders do not renew
        if self._alive(known):
            raise Held(known, "" if _here(known) else f"; {remove}, or wait {LEASE + WATCH:.0f} s")
        if _here(known):
            return
        seen, until = self._renewed(), time.monotonic() + WATCH
        while seen and time.monotonic() < until:
            time.sleep(LOOK)
            if self._renewed() != seen:
                raise Held(self._read())

    def _alive(self, known: dict[str, Any] | None) -> bool:
        """Return True if the holder seems to be alive, by its process, or by its lease on another machine."""
        if known and _here(known):
            return _runs(known)
        renewed = self._renewed()
        return bool(renewed) and 0 <= _now(self.holder.parent) - renewed < LEASE * 1e9

    def _elsewhere(self) -> bool:
        """Return True if the holder's file is a lease of another machine."""
        known = self._read()
        return known is not None and known.get("by") == "lease" and not _here(known)

    def _renew(self) -> None:
        while not self._ended.wait(RENEW):
            with suppress(OSError):  # the server does not respond at the moment
                if (self._read() or {}).get("token") != self._facts["token"]:
                    self.lost = not self._ended.is_set()
                    return
                os.utime(self.holder, follow_symlinks=False)

    def check(self) -> None:
        """Check that no process has taken over the lock meanwhile, which is possible for leases.

        Raises:
            Busy: another process has, since this one was suspended for a minute.
        """
        if self.lost:
            raise Busy(f"{self.file.parent}: {Held(self._read()).who} has taken it over, since this one was suspended")

    def _renewed(self) -> int:
        """Return the time of the holder file's last renewal, in ns of the file system's clock; 0 if it is missing."""
        try:  # opened, since a network file system may cache outdated attributes of a name
            descriptor = os.open(self.holder, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            return 0
        try:
            return os.fstat(descriptor).st_mtime_ns
        finally:
            os.close(descriptor)

    def _read(self) -> dict[str, Any] | None:
        return _json(self.holder)


def _json(file: Path) -> dict[str, Any] | None:
    """Read a holder's file; return None if it is missing or incomplete."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    with os.fdopen(descriptor, "rb") as opened, suppress(OSError, ValueError, RecursionError):
        value = json.loads(opened.read(10_000))
        return value if isinstance(value, dict) else None
    return None


def _locked(file: Path) -> tuple[int, str]:
    """Return a descriptor with the operating system's lock on a file, and the call that took it; `lease` if none did.

    Raises:
        Held: another process has the lock, or this one.
        OSError: the file cannot be opened.
    """
    with _GUARD:
        for last in (*[False] * 9, True):
            with suppress(FileNotFoundError):  # before opening: closing a file ends all its lockf locks
                if _identity(file.lstat()) in _HELD:
                    raise Held
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
            descriptor = os.open(file, flags, 0o666)
            try:
                by = _by(descriptor)
                opened = os.fstat(descriptor)
                with suppress(FileNotFoundError):  # its holder has just removed it: create another one
                    # never equal on file systems without inode numbers
                    if last or os.path.samestat(opened, file.lstat()):
                        _HELD.add(_identity(opened))
                        return descriptor, by
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)
        raise AssertionError("the last attempt returns or raises")


def _by(descriptor: int) -> str:
    calls: dict[str, Callable[[int, int], object]] = {"flock": fcntl.flock, "lockf": fcntl.lockf}
    for name, call in calls.items():
        try:
            call(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _TAKEN:
                raise Held from None
            if error.errno not in _NO_LOCKS:
                raise
        else:
            return name
    return "lease"


def _unlocked(descriptor: int) -> None:
    with _GUARD:
        _HELD.discard(_identity(os.fstat(descriptor)))
        os.close(descriptor)


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


# ----------------------------------------------------------------------------------------------------------- processes


def _self() -> dict[str, Any]:
    """Identify this process, also against a later one with the same number."""
    since = datetime.now(UTC).isoformat(timespec="seconds")
    facts = {"pid": os.getpid(), "host": socket.gethostname(), "since": since}
    return {**facts, **_machine(), "started": _started(os.getpid()), "token": secrets.token_hex(8)}


def _machine() -> dict[str, str]:
    """Identify the machine in addition to its host name: by its boot, and on Linux by the namespace of processes."""
    identity = {}
    with suppress(OSError):
        identity["boot"] = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        identity["processes"] = os.readlink("/proc/self/ns/pid")  # noqa: PTH115
    return identity


def _here(known: dict[str, Any] | None) -> bool:
    """Return True if a holder is a process that this one could see."""
    machine = {"host": socket.gethostname(), **_machine()}
    return known is not None and all(known.get(key) == value for key, value in machine.items())


def _runs(known: dict[str, Any]) -> bool:
    """Return True if a process of this machine is alive, and not a later one with the same number."""
    try:
        pid = int(known["pid"])
        os.kill(pid, 0)
    except PermissionError:
        pass  # it belongs to another user
    except (OSError, LookupError, TypeError, ValueError, OverflowError):
        return False
    return known.get("started") == _started(pid)


def _started(pid: int) -> str:
    """Return the start time of a process, in ticks since boot; None if Linux does not provide it."""
    with suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[19]
    return ""


def _now(folder: Path) -> int:
    """Return nanoseconds since 1970 by the clock of the folder's file system, which may be another machine's."""
    with tempfile.TemporaryFile(dir=folder) as file:
        return os.fstat(file.fileno()).st_mtime_ns


# --------------------------------------------------------------------------------------------------------- directories


@contextmanager
def locked(path: Path) -> Iterator[Lock]:
    """Hold a directory for this process. The lock ends with the process.

    Raises:
        Busy: another process holds it; names it.
        RunError: it is not writable.
    """
    lock = Lock(path / LOCK[0], path / LOCK[1])
    try:
        make_folder(path)
        lock.acquire()
    except Held as held:
        raise Busy(f"{path}: {held} is working on it; wait for it to end, or stop it{held.fix}") from None
    except OSError as error:
        fix = remedy(error, "choose another path (PEARL_RUNS, for runs)")
        raise RunError(f"{path}: cannot be written ({reason(error)}); {fix}") from None
    try:
        yield lock
    finally:
        lock.release()


def is_held(path: Path) -> bool:
    """Return True if a process works on a directory, which is not created.

    Raises:
        OSError: that cannot be determined.
    """
    return (path / LOCK[0]).exists() and Lock(path / LOCK[0], path / LOCK[1]).held()
