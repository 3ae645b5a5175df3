"""The phase cache: a phase that another run has trained, bit by bit the same, is loaded instead of trained.

A cached phase has the form of a run's checkpoint (see `replay`): tensors with checksums, the events of its epochs, and
its duration in seconds. Entries are complete or absent; damaged ones are trained again. While one process trains a
phase, others that need the same phase wait for it.
"""

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from pearl.errors import RunError
from pearl.settings.config import ModelConfig
from pearl.storage import phases
from pearl.storage.checkpoint import read_part, snapshot, write_part
from pearl.storage.locks import Held, Lock
from pearl.storage.schemas import CheckpointManifest
from pearl.training.fingerprint import together
from pearl.training.resume import Progress
from pearl.training.world import World

Tell = Callable[[str], object]  # a message for the user


class PhaseCache:
    """A phase cache in a folder. With several ranks, the first one locks, searches and writes; each one reads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._told = False

    @classmethod
    def of(cls, config: ModelConfig, world: World) -> "PhaseCache | None":
        """Return the cache of the settings and the environment; None if it is disabled. The first rank decides for all.

        Raises:
            ConfigError: an environment variable has an invalid value.
        """
        folder = phases.folder() if config.engine.reuse and world.first else None
        if folder:
            phases.limit()  # report problems before training
        folder = world.same(folder)
        return cls(folder) if folder else None

    @contextmanager
    def claimed(
        self, key: str, modules: Sequence[nn.Module], steps: int, world: World, tell: Tell
    ) -> Iterator[Progress | None]:
        """Return what `find` finds; if nothing, lock the phase so that no other process trains it meanwhile."""
        cached = self.find(key, modules, steps, world, tell)
        with self._alone(key, tell) if cached is None and world.first else nullcontext():
            yield cached or self.find(key, modules, steps, world, tell)

    @contextmanager
    def _alone(self, key: str, tell: Tell) -> Iterator[None]:
        """Exclude other processes with the same key; read-only folders have no lock."""
        with ExitStack() as held:
            with suppress(OSError):  # read-only folder
                self.folder.mkdir(parents=True, exist_ok=True)
                lock = Lock(self.folder / f"{key}.lock", self.folder / f"{key}.holder.json")
                try:
                    lock.acquire()
                except Held:
                    tell("another process is training the same phase; waiting for its result")
                    lock.wait()
                held.callback(lock.release)
                held.callback(_remove, lock.file)  # a waiting process finds the file gone and creates another one
            yield

    def find(self, key: str, modules: Sequence[nn.Module], steps: int, world: World, tell: Tell) -> Progress | None:
        """Load a phase's result into its modules, on all ranks; return None, without changes, if it is not cached."""
        there = self._there(key, modules, steps, tell) if world.first else None
        folder = world.same(self.folder / key if there else None)
        if folder is None:
            return None
        if not world.first:
            with suppress(RunError):
                there = _read(folder, key, modules, steps)
        (missing,) = world.any(there is None)
        if missing or there is None:
            return None
        tensors, manifest = there
        together(modules).load_state_dict(tensors, strict=True)
        return replace(Progress.of(manifest, []), reused=True)

    def _there(self, key: str, modules: Sequence[nn.Module], steps: int, tell: Tell) -> Any:
        folder = self.folder / key
        try:
            if not folder.exists():
                return None
        except OSError:  # another user's folder, or a failing disk; `keep` reports it
            return None
        try:
            cached = _read(folder, key, modules, steps)
        except RunError as error:
            if not folder.exists():  # another process has just made space
                return None
            tell(f"a cached phase is damaged and is trained again ({str(error).partition(';')[0]})")
            shutil.rmtree(folder, ignore_errors=True)
            return None
        phases.touch(folder)
        return cached

    def keep(self, phase: str, modules: Sequence[nn.Module], progress: Progress, tell: Tell) -> None:
        """Store a phase's result, if there is space; problems are reported once."""
        folder, tensors = self.folder / progress.key, snapshot(together(modules).state_dict())
        aside = phases.aside(folder)
        try:
            if folder.exists():
                return
            size = sum(tensor.nbytes for tensor in tensors.values())
            if not phases.make_room(self.folder, size):
                raise RunError(f"{size / 1e6:.0f} MB exceed the limit, see PEARL_CACHE_GB")
            write_part(aside, tensors, {"phase": phase, **progress.facts}, within=self.folder)
            aside.rename(folder)
        except (OSError, RunError) as error:
            if not self._told:
                self._told = True
                reason = getattr(error, "strerror", None) or str(error).partition(";")[0]
                tell(f"finished phases are not cached for other runs in {self.folder} ({reason})")
        finally:
            shutil.rmtree(aside, ignore_errors=True)


def _remove(file: Path) -> None:
    with suppress(OSError):
        file.unlink()


def _read(folder: Path, key: str, modules: Sequence[nn.Module], steps: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return tensors and manifest of a phase.

    Raises:
        RunError: it is damaged, or belongs to another phase.
    """
    tensors, manifest = read_part(folder, CheckpointManifest)
    wanted = together(modules).state_dict()
    shapes = {name: (value.dtype, value.shape) for name, value in tensors.items()}
    fits = shapes == {name: (value.dtype, value.shape) for name, value in wanted.items()}
    if not fits or manifest.get("key") != key or manifest["steps"] != steps:
        raise RunError(f"{folder}: belongs to another phase than its name")
    return tensors, manifest
