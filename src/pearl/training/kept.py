"""Phases that were trained once: where another run has trained the same, bit for bit, its result is taken.

A kept phase is as a finished moment of a run (see `replay`): tensors with checksums, what was told of its epochs, and
the seconds it took. It is there whole or not at all; what is damaged is trained again. While one process trains a
phase others that come to the same wait for it.
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
from pearl.storage.shapes import Moment
from pearl.training.content import together
from pearl.training.replay import Progress
from pearl.training.world import World

Tell = Callable[[str], object]  # a line for the user


class Kept:
    """The phases in a folder. Of several ranks the first one locks, looks and writes; each reads for itself."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._told = False

    @classmethod
    def of(cls, config: ModelConfig, world: World) -> "Kept | None":
        """Where settings and environment say; None if phases are not kept. On all ranks as on the first.

        Raises:
            ConfigError: the environment says what cannot be.
        """
        folder = phases.folder() if config.engine.reuse and world.first else None
        if folder:
            phases.limit()  # what is wrong with it is said before anything is trained
        folder = world.same(folder)
        return cls(folder) if folder else None

    @contextmanager
    def claimed(
        self, key: str, modules: Sequence[nn.Module], steps: int, world: World, tell: Tell
    ) -> Iterator[Progress | None]:
        """What `find` finds; if that is nothing, no other process trains the phase meanwhile."""
        found = self.find(key, modules, steps, world, tell)
        with self._alone(key, tell) if found is None and world.first else nullcontext():
            yield found or self.find(key, modules, steps, world, tell)

    @contextmanager
    def _alone(self, key: str, tell: Tell) -> Iterator[None]:
        """No other process is in here with the same key; but where a folder may only be read, one may be."""
        with ExitStack() as held:
            with suppress(OSError):  # of a folder that may only be read
                self.folder.mkdir(parents=True, exist_ok=True)
                lock = Lock(self.folder / f"{key}.lock", self.folder / f"{key}.holder.json")
                try:
                    lock.acquire()
                except Held:
                    tell("another process trains the same phase; its result will be taken")
                    lock.wait()
                held.callback(lock.release)
                held.callback(_remove, lock.file)  # who waits for it finds it gone, and makes another one
            yield

    def find(self, key: str, modules: Sequence[nn.Module], steps: int, world: World, tell: Tell) -> Progress | None:
        """Put what a phase ended with into its modules, on all ranks; None, and nothing changed, if it is not there."""
        there = self._there(key, modules, steps, tell) if world.first else None
        place = world.same(self.folder / key if there else None)
        if place is None:
            return None
        if not world.first:
            with suppress(RunError):
                there = _read(place, key, modules, steps)
        (missing,) = world.any(there is None)
        if missing or there is None:
            return None
        tensors, manifest = there
        together(modules).load_state_dict(tensors, strict=True)
        return replace(Progress.of(manifest, []), reused=True)

    def _there(self, key: str, modules: Sequence[nn.Module], steps: int, tell: Tell) -> Any:
        place = self.folder / key
        try:
            if not place.exists():
                return None
        except OSError:  # a folder of others, a disk that fails; `keep` will say it
            return None
        try:
            found = _read(place, key, modules, steps)
        except RunError as error:
            if not place.exists():  # another process has just made room
                return None
            tell(f"a phase that was kept is damaged and trained again ({str(error).partition(';')[0]})")
            shutil.rmtree(place, ignore_errors=True)
            return None
        phases.touch(place)
        return found

    def keep(self, phase: str, modules: Sequence[nn.Module], progress: Progress, tell: Tell) -> None:
        """Keep what a phase ended with, if there is room; what prevents it is said once."""
        place, tensors = self.folder / progress.key, snapshot(together(modules).state_dict())
        aside = phases.aside(place)
        try:
            if place.exists():
                return
            size = sum(tensor.nbytes for tensor in tensors.values())
            if not phases.make_room(self.folder, size):
                raise RunError(f"{size / 1e6:.0f} MB are more than may lie there, see PEARL_CACHE_GB")
            write_part(aside, tensors, {"phase": phase, **progress.facts}, within=self.folder)
            aside.rename(place)
        except (OSError, RunError) as error:
            if not self._told:
                self._told = True
                reason = getattr(error, "strerror", None) or str(error).partition(";")[0]
                tell(f"finished phases are not kept for other runs in {self.folder} ({reason})")
        finally:
            shutil.rmtree(aside, ignore_errors=True)


def _remove(file: Path) -> None:
    with suppress(OSError):
        file.unlink()


def _read(place: Path, key: str, modules: Sequence[nn.Module], steps: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and manifest of a phase.

    Raises:
        RunError: it is damaged, or of another phase.
    """
    tensors, manifest = read_part(place, Moment)
    wanted = together(modules).state_dict()
    shapes = {name: (value.dtype, value.shape) for name, value in tensors.items()}
    fits = shapes == {name: (value.dtype, value.shape) for name, value in wanted.items()}
    if not fits or manifest.get("key") != key or manifest["steps"] != steps:
        raise RunError(f"{place}: of another phase than its name says")
    return tensors, manifest
