"""One process at a time: by flock, else by lockf, else by a lease that its holder renews. No torch.

The operating system's locks end with their process. Where a file system has none (Lustre and NFS may not), the file
that names the holder is the lease: made by one process alone, renewed while that lives. A holder of this machine is
alive if its process is, one of another machine as long as it renews.
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

LOCK = (".lock", ".holder.json")  # what a directory has in it while a process holds it
RENEW = 10.0  # seconds between two renewals of a lease
LEASE = 60.0  # seconds without one after which a holder of another machine may be dead,
WATCH = 25.0  # and is, if it does not renew in so many more: clocks may jump
LOOK = 0.2  # seconds between two looks at what is waited for

_TAKEN = {errno.EAGAIN, errno.EWOULDBLOCK, errno.EACCES}
# not implemented, not supported (of user space, and the kernel's own number), no locks, refused by the server
_NO_LOCKS = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, 524, errno.ENOLCK, errno.EINVAL, errno.EIO}
_HELD: set[tuple[int, int]] = set()  # device and inode; lockf does not exclude the process that holds it
_GUARD = threading.Lock()


class Held(Exception):
    """Another process holds the lock. Says which, as far as is known, and what to do if that is gone."""

    def __init__(self, holder: dict[str, Any] | None = None, fix: str = "") -> None:
        try:
            known = holder or {}
            self.who = f"process {known['pid']} on {known['host']} since {known['since']}"
        except (LookupError, TypeError):
            self.who = "another process"
        self.fix = fix
        super().__init__(self.who)


class Lock:
    """The lock `file`, with `holder` beside it, a JSON file that says who has it."""

    def __init__(self, file: Path, holder: Path) -> None:
        self.file, self.holder = file, holder
        self.lost = False  # a lease that another process has taken over, as this one seemed dead
        self._descriptor = -1
        self._facts: dict[str, Any] = {}
        self._ended = threading.Event()

    def acquire(self) -> None:
        """Take the lock, or leave it.

        Raises:
            Held: another process has it.
            OSError: it cannot be taken, for a reason that has nothing to do with others.
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
                if self._elsewhere():  # a machine that has no locks on this file system
                    self._check_dead(self._read())
                replace_file(self.holder, json.dumps(self._facts).encode())
        except BaseException:
            self._close()
            raise

    def wait(self) -> None:
        """Take the lock once it is free.

        Raises:
            OSError: see `acquire`.
        """
        while True:
            try:
                return self.acquire()
            except Held:
                time.sleep(LOOK)

    def release(self) -> None:
        """Give the lock back; what cannot be removed is left, and tells the next one nothing."""
        self._ended.set()
        try:
            with suppress(OSError):
                if (self._read() or {}).get("token") == self._facts["token"]:
                    self.holder.unlink(missing_ok=True)
        finally:
            self._close()

    def held(self) -> bool:
        """Return True if a process has the lock, without taking it.

        Raises:
            OSError: that cannot be found out.
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
                    raise Held(self._read())  # taken for one that was dead, by a process that looked just before
                return
            known = self._read()
            self._check_dead(known)
            aside = self.holder.with_name(temporary_name(self.holder.name))
            with suppress(FileNotFoundError):  # another process was faster
                self.holder.rename(aside)
                taken = _json(aside)
                if taken != known:  # a lease that another process has just taken in the dead one's place
                    with suppress(OSError):
                        os.link(aside, self.holder)
                with suppress(OSError):
                    aside.unlink()

    def _check_dead(self, known: dict[str, Any] | None) -> None:
        """See that who is named as the holder is dead, which may take a while.

        Raises:
            Held: it is not, or nobody can know.
        """
        remove = f"if that process is gone, remove {self.holder}"
        if known and known.get("by") in ("flock", "lockf") and not _here(known):
            raise Held(known, f"; {remove}")  # on a machine with locks, which nobody renews
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
        """Return True if the holder seems to be alive, judged by its process, or on another machine by its lease."""
        if known and _here(known):
            return _runs(known)
        renewed = self._renewed()
        return bool(renewed) and 0 <= _now(self.holder.parent) - renewed < LEASE * 1e9

    def _elsewhere(self) -> bool:
        """Return True if the holder's file names a lease of another machine."""
        known = self._read()
        return known is not None and known.get("by") == "lease" and not _here(known)

    def _renew(self) -> None:
        while not self._ended.wait(RENEW):
            with suppress(OSError):  # a server that does not answer just now
                if (self._read() or {}).get("token") != self._facts["token"]:
                    self.lost = not self._ended.is_set()
                    return
                os.utime(self.holder, follow_symlinks=False)

    def check(self) -> None:
        """See that nobody has taken the lock over meanwhile; of a lease alone somebody may have.

        Raises:
            Busy: somebody has, since this process had stood still for a minute.
        """
        if self.lost:
            raise Busy(f"{self.file.parent}: {Held(self._read()).who} has taken it over, as this one had stood still")

    def _renewed(self) -> int:
        """When the holder's file was renewed last, in ns of the file system's clock; 0 if it is not there."""
        try:  # opened, since a network's file system may know of a name only what it was a while ago
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
    """Read a holder's file; return None if it is missing or half-written."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    with os.fdopen(descriptor, "rb") as opened, suppress(OSError, ValueError, RecursionError):
        value = json.loads(opened.read(10_000))
        return value if isinstance(value, dict) else None
    return None


def _locked(file: Path) -> tuple[int, str]:
    """A descriptor of a lock's file that holds the operating system's lock, and by which call; `lease` if by none.

    Raises:
        Held: another process has the lock, or this one.
        OSError: the file cannot be opened.
    """
    with _GUARD:
        for last in (*[False] * 9, True):
            with suppress(FileNotFoundError):  # before it is opened: to close a file ends all its locks by lockf
                if _identity(file.lstat()) in _HELD:
                    raise Held
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
            descriptor = os.open(file, flags, 0o666)
            try:
                by = _by(descriptor)
                opened = os.fstat(descriptor)
                with suppress(FileNotFoundError):  # its holder has removed it just now: another one is to be made
                    if last or os.path.samestat(opened, file.lstat()):  # where files keep no numbers it is never so
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
    """This process, so that others can tell it from a later one of the same number."""
    since = datetime.now(UTC).isoformat(timespec="seconds")
    facts = {"pid": os.getpid(), "host": socket.gethostname(), "since": since}
    return {**facts, **_machine(), "started": _started(os.getpid()), "token": secrets.token_hex(8)}


def _machine() -> dict[str, str]:
    """Identify the machine beside its host name: by its boot, and on Linux by the namespace of processes."""
    found = {}
    with suppress(OSError):
        found["boot"] = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        found["processes"] = os.readlink("/proc/self/ns/pid")  # noqa: PTH115
    return found


def _here(known: dict[str, Any] | None) -> bool:
    """Return True if a holder is a process that this one could see."""
    own = {"host": socket.gethostname(), **_machine()}
    return known is not None and all(known.get(key) == value for key, value in own.items())


def _runs(known: dict[str, Any]) -> bool:
    """Return True if a process of this machine is alive, and not a later one with the same number."""
    try:
        pid = int(known["pid"])
        os.kill(pid, 0)
    except PermissionError:
        pass  # it is somebody else's
    except (OSError, LookupError, TypeError, ValueError, OverflowError):
        return False
    return known.get("started") == _started(pid)


def _started(pid: int) -> str:
    """When a process was started, in ticks since the machine was; nothing where Linux does not say it."""
    with suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[19]
    return ""


def _now(folder: Path) -> int:
    """Nanoseconds since 1970 by the clock of the folder's file system, which may be another machine's."""
    with tempfile.TemporaryFile(dir=folder) as file:
        return os.fstat(file.fileno()).st_mtime_ns


# --------------------------------------------------------------------------------------------------------- directories


@contextmanager
def locked(path: Path) -> Iterator[Lock]:
    """Hold a directory for this process. The lock goes with its process, however that ends.

    Raises:
        Busy: another process holds it, and which.
        RunError: it cannot be written to.
    """
    lock = Lock(path / LOCK[0], path / LOCK[1])
    try:
        make_folder(path)
        lock.acquire()
    except Held as held:
        raise Busy(f"{path}: {held} is at work on it; wait for it to end, or stop it{held.fix}") from None
    except OSError as error:
        fix = remedy(error, "choose another place (PEARL_RUNS, for runs)")
        raise RunError(f"{path}: cannot be written ({reason(error)}); {fix}") from None
    try:
        yield lock
    finally:
        lock.release()


def is_held(path: Path) -> bool:
    """Return True if a process is at work on a directory, which is not created.

    Raises:
        OSError: that cannot be found out.
    """
    return (path / LOCK[0]).exists() and Lock(path / LOCK[0], path / LOCK[1]).held()
