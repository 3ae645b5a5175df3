"""Checkpoints within a task, so that a resumed run continues there, bit by bit.

A resumed run calls the method's `learn` again. Finished phases are restored instead of trained, the code between them
runs again with the same seeds, and the interrupted phase continues after its last stored step.

RUN/resume/TASK-PHASE-STEP/     tensors of the checkpoint, and a manifest; removed when the task is complete
"""

import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pearl.errors import Interrupted, RunError, counted
from pearl.methods.base import Method, Phase
from pearl.storage.checkpoint import changed, read_part, snapshot, write_part
from pearl.storage.inside import remove_tree
from pearl.storage.schemas import CheckpointManifest
from pearl.training.optimizers import Optimizers, states
from pearl.training.stop import Stop
from pearl.training.world import World

_CHECKPOINT = re.compile(r"[0-9]{3,}-[0-9]{2,}-[0-9]{8,}")  # task, phase, step


@dataclass
class Progress:
    """Progress of a phase: steps done, losses of the current epoch (device tensors), and events of its epochs.

    `key` is the digest of what determines its result (see `fingerprint`), if equal for all its steps; a `reused` phase
    was trained by another run, in `seconds`.
    """

    done: int = 0
    losses: list[Tensor] = field(default_factory=list)
    epochs: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0
    key: str = ""
    reused: bool = False

    @property
    def facts(self) -> dict[str, Any]:
        """Return the manifest's entry."""
        seconds = round(self.seconds, 3)
        return {"steps": self.done, "seconds": seconds, "epochs": self.epochs, "key": self.key, "reused": self.reused}

    @classmethod
    def of(cls, manifest: Mapping[str, Any], losses: list[Tensor]) -> "Progress":
        """Create from a manifest's entry; older ones have fewer keys."""
        known = {name: manifest[name] for name in ("seconds", "epochs", "key", "reused") if name in manifest}
        return cls(manifest["steps"], losses, **known)


class Resume:
    """Stores checkpoints of one task under `folder`: after a phase, on interruption, and every `minutes`.

    With `folder` None nothing is stored, and an interruption loses the task. With several ranks the first one stores
    for all, and all resume from the checkpoint that it finds.
    """

    def __init__(
        self,
        folder: Path | None = None,
        *,
        minutes: float = 10.0,
        stop: Stop | None = None,
        world: World | None = None,
    ) -> None:
        self.folder, self.minutes, self.stop, self.world = folder, minutes, stop or Stop(), world or World()
        self.run = folder.parent if folder else None
        self.start: dict[str, Tensor] = {}  # the state before the task, without `fixed`
        self.fixed: set[str] = set()  # tensors that cannot change, see `Method.is_fixed`
        self._stored_at = time.monotonic()

    def begin(self, method: Method, task: int) -> None:
        """Start or resume a task."""
        state = method.state_dict()
        self.fixed = {name for name in state if method.is_fixed(name, task)}
        self.start = snapshot({name: value for name, value in state.items() if name not in self.fixed})
        self._stored_at = time.monotonic()
        self.keep_only(task)

    def changes(self, method: Method) -> dict[str, Tensor]:
        """Return a snapshot of the tensors that have changed since `begin`."""
        state = method.state_dict().items()
        return changed(self.start, {name: value for name, value in state if name not in self.fixed})

    def keep_only(self, task: int) -> None:
        """Remove checkpoints of other tasks: a process may have died between completing one and removing them."""
        for folder in self._checkpoints("") if self.world.first else []:
            if not folder.name.startswith(f"{task:03d}-"):
                remove_tree(folder, self.run)
        if self.folder and self.world.first:
            with suppress(OSError):  # it does not exist, or contains other files
                self.folder.rmdir()

    def end(self) -> None:
        """Complete the task."""
        self.start = {}
        if self.folder and self.world.first:
            remove_tree(self.folder, self.run)

    @contextmanager
    def training(self) -> Iterator[None]:
        """Delay signals to the end of a step within the context."""
        self.stop.waits = True
        try:
            yield
        finally:
            self.stop.waits = False

    def due(self) -> bool:
        """Return True if a checkpoint is due. Called after every step; the result is equal on all ranks."""
        return any(self.world.any(self.stop.requested, time.monotonic() - self._stored_at >= 60 * self.minutes))

    def store(self, at: tuple[int, int], scene: "Scene", progress: Progress, *, finished: bool) -> None:
        """Store a checkpoint of a phase `at` (task, position).

        Raises:
            Interrupted: the user stopped the run; the checkpoint is complete.
            RunError: it cannot be written.
        """
        (requested,) = self.world.any(self.stop.requested)
        random = None if finished else self.world.gather(_random_state(scene.method.device))
        if self.folder and self.world.first:
            prefix = "{:03d}-{:02d}-".format(*at)
            older = self._checkpoints(prefix)
            folder = self.folder / f"{prefix}{progress.done:08d}"
            tensors = scene.state(self.changes(scene.method), progress, random)
            write_part(folder, tensors, {"phase": scene.phase.name, **progress.facts}, within=self.run)
            for other in older:
                if other != folder:
                    remove_tree(other, self.run)
        self.world.wait()  # no rank ends before it is on disk
        self._stored_at = time.monotonic()
        if requested:
            raise Interrupted(f"interrupted in phase {scene.phase.name} after {counted(progress.done, 'step')}")

    def restore(self, at: tuple[int, int], scene: "Scene", key: str = "") -> Progress:
        """Restore the newest checkpoint of a phase and return its progress; without one, start from the beginning.

        If steps were made under another `key`, the phase is not cached for other runs.
        """
        newest = self._newest("{:03d}-{:02d}-".format(*at), scene) if self.world.first else None
        folder = self.world.same(newest[0] if newest else None)
        if folder is None:
            return Progress(key=key)
        _, tensors, manifest = newest or (folder, *read_part(folder))
        progress = Progress.of(manifest, scene.put_back(self.start, tensors, self.world.rank))
        progress.key = key if progress.key == key else ""
        return progress

    def _newest(self, prefix: str, scene: "Scene") -> tuple[Path, dict[str, Tensor], dict[str, Any]] | None:
        for folder in reversed(self._checkpoints(prefix)):
            # incomplete, damaged or foreign: resuming from an older checkpoint gives the same bits
            with suppress(RunError):
                tensors, manifest = read_part(folder, CheckpointManifest)
                if scene.fits(tensors, manifest):
                    return folder, tensors, manifest
        return None

    def _checkpoints(self, prefix: str) -> list[Path]:
        there = self.folder.iterdir() if self.folder and self.folder.is_dir() else ()
        return sorted(
            folder for folder in there if _CHECKPOINT.fullmatch(folder.name) and folder.name.startswith(prefix)
        )


@dataclass
class Scene:
    """All state that a phase changes: the method's, additional networks and parameters, the optimizers'."""

    method: Method
    phase: Phase
    optimizers: Optimizers

    @property
    def params(self) -> list[nn.Parameter]:
        """Return the trained parameters, in order."""
        return self.phase.trained

    def state(
        self, changes: Mapping[str, Tensor], progress: Progress, random: list[dict[str, Tensor]] | None
    ) -> dict[str, Tensor]:
        """Return tensors by name: the method's `changes`; with each rank's `random` state, to resume a phase, also the
        optimizers', otherwise only if the next phase needs them.
        """
        groups: dict[str, Mapping[str, Tensor]] = {
            "method": changes,
            "extra": snapshot(self.phase.extra.state_dict()) if self.phase.extra else {},
            "loose": snapshot({str(i): p for i, p in self._loose().items()}),
        }
        if random is not None or self.phase.keep_optimizer:
            known = states(self.optimizers)
            groups["optimizer"] = snapshot(
                {
                    f"{i}/{key}": torch.as_tensor(value)
                    for i, p in enumerate(self.params)
                    for key, value in known[p].items()
                    if value is not None
                }
            )
        if random is not None:
            groups |= {_random_name(rank): state for rank, state in enumerate(random)}
            if progress.losses:
                groups["epoch"] = {"losses": torch.stack(progress.losses).float().cpu()}
        return {f"{group}/{name}": value for group, named in groups.items() for name, value in named.items()}

    def fits(self, tensors: Mapping[str, Tensor], manifest: Mapping[str, Any]) -> bool:
        """Return True if a checkpoint belongs to this phase; nothing is changed. An optimizer would accept any shape.

        Buffers may have other shapes: memories and statistics grow.
        """
        shapes = {f"loose/{i}": p.shape for i, p in self._loose().items()}
        if self.phase.extra:
            shapes |= {f"extra/{name}": value.shape for name, value in self.phase.extra.state_dict().items()}
        needed = set(shapes)
        shapes |= {f"method/{name}": p.shape for name, p in self.method.named_parameters()}
        for name, value in tensors.items():
            group, _, rest = name.partition("/")
            if group == "optimizer":
                index = rest.partition("/")[0]
                if not index.isdecimal() or int(index) >= len(self.params):
                    return False
                shapes[name] = self.params[int(index)].shape if value.numel() > 1 else value.shape  # or steps, counted
            if value.shape != shapes.get(name, value.shape) or (group in ("loose", "extra") and name not in needed):
                return False
        return needed <= tensors.keys() and manifest.get("phase") == self.phase.name

    def put_back(self, start: Mapping[str, Tensor], tensors: Mapping[str, Tensor], rank: int) -> list[Tensor]:
        """Restore from `state`, into the existing tensors; return the losses of the current epoch."""
        groups: dict[str, dict[str, Tensor]] = {}
        for name, value in tensors.items():
            group, _, rest = name.partition("/")
            groups.setdefault(group, {})[rest] = value
        state = self.method.state_dict()
        state = {name: start.get(name, value) for name, value in state.items()}
        self.method.load_state_dict({**state, **groups.get("method", {})}, strict=True)
        if self.phase.extra:
            self.phase.extra.load_state_dict(groups["extra"], strict=True)
        with torch.no_grad():
            for i, parameter in self._loose().items():
                parameter.copy_(groups["loose"][str(i)])
        known = states(self.optimizers)
        for name, value in groups.get("optimizer", {}).items():
            index, _, key = name.partition("/")
            parameter = self.params[int(index)]
            if value.shape == parameter.shape:  # one value per weight: in the weight's memory format
                value = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
            known[parameter][key] = value.to(parameter.device)
        _set_random_state(groups.get(_random_name(rank), {}), self.method.device)
        return [*groups["epoch"]["losses"].to(self.method.device)] if "epoch" in groups else []

    def _loose(self) -> dict[int, nn.Parameter]:
        modules = [self.method, *([self.phase.extra] if self.phase.extra else [])]
        held = {id(p) for module in modules for p in module.parameters()}
        return {i: p for i, p in enumerate(self.params) if id(p) not in held}


def _random_name(rank: int) -> str:
    return f"random{rank or ''}"


def _random_state(device: torch.device) -> dict[str, Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def _set_random_state(state: dict[str, Any], device: torch.device) -> None:
    if "cpu" in state:
        torch.set_rng_state(state["cpu"])
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
