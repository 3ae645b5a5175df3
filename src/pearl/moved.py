"""Import paths of version 0.1, for people's files and packages: what they import is found where it lies now.

A method's file is kept with the run and named by its bytes, so it cannot be brought up to date.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

NOW: dict[str, tuple[str, ...]] = {
    "board": ("sweeps.board",),
    "checkpoint": ("storage.checkpoint",),
    "config": ("settings.config", "settings.sections"),
    "conformance": ("lifecycle.conformance", "lifecycle.small"),
    "doctor": ("reports.doctor",),
    "engine": ("training.engine",),
    "evaluate": ("evaluation.evaluate",),
    "files": ("storage.files",),
    "graphs": ("training.graphs",),
    "jobs": ("sweeps.jobs", "sweeps.local", "sweeps.executors"),
    "launch": ("training.launch",),
    "learning": ("lifecycle.learning",),
    "methods.closed_form": ("methods.prototypes.closed_form",),
    "methods.coda_prompt": ("methods.prompts.coda_prompt",),
    "methods.derpp": ("methods.rehearsal.derpp",),
    "methods.er": ("methods.rehearsal.er",),
    "methods.er_ace": ("methods.rehearsal.er_ace",),
    "methods.ewc": ("methods.regularization.ewc",),
    "methods.fecam": ("methods.prototypes.fecam",),
    "methods.fetril": ("methods.prototypes.fetril",),
    "methods.finetune": ("methods.bounds.finetune",),
    "methods.frozen": ("methods.prototypes.extractor",),
    "methods.inflora": ("methods.adapters.inflora",),
    "methods.isolation": ("methods.bounds.isolation",),
    "methods.joint": ("methods.bounds.joint",),
    "methods.l2p": ("methods.prompts.l2p",),
    "methods.lwf": ("methods.regularization.lwf",),
    "methods.masks": ("methods.sparse.masks",),
    "methods.memory": ("methods.common.memory",),
    "methods.ncm": ("methods.prototypes.ncm",),
    "methods.packnet": ("methods.sparse.packnet",),
    "methods.penalty": ("methods.regularization.penalty",),
    "methods.pnn": ("methods.sparse.pnn",),
    "methods.seqlora": ("methods.adapters.seqlora",),
    "methods.stats": ("methods.common.statistics",),
    "methods.subspace": ("methods.common.subspace",),
    "methods.teacher": ("methods.common.teacher", "methods.common.average"),
    "metrics": ("evaluation.metrics",),
    "model": ("lifecycle.model",),
    "nn.beside": ("nn.fast.beside",),
    "nn.folding": ("nn.fast.folding",),
    "nn.grouped": ("nn.fast.convolutions",),
    "nn.ranks": ("nn.rank_rules",),
    "nn.stacking": ("nn.fast.stacking",),
    "paths": ("storage.paths",),
    "plan": ("reports.plan",),
    "plots": ("reports.plots",),
    "predict": ("lifecycle.predict",),
    "progress": ("reports.progress",),
    "ranks": ("training.world",),
    "registry": ("settings.registry", "settings.parts"),
    "replay": ("training.replay",),
    "report": ("reports.page", "reports.records", "reports.parts", "reports.compared"),
    "runs": ("lifecycle.runs",),
    "saved": ("lifecycle.saved",),
    "session": ("lifecycle.session",),
    "slurm": ("sweeps.slurm",),
    "sweep": ("sweeps.sweep",),
    "tensorboard": ("reports.tensorboard",),
    "text": ("reports.text",),
}


class Moved(MetaPathFinder, Loader):
    """Asked last, when there is no file of that name; gives a module that looks its names up where they are now."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> Any:
        """A spec for a name of `NOW`, else None."""
        return ModuleSpec(name, self) if name.removeprefix("pearl.") in NOW and name.startswith("pearl.") else None

    def create_module(self, spec: ModuleSpec) -> None:
        """As usual."""

    def exec_module(self, module: ModuleType) -> None:
        """Fill the module."""
        places = [import_module(f"pearl.{place}") for place in NOW[module.__name__.removeprefix("pearl.")]]

        def look_up(name: str) -> Any:
            for place in places:
                if hasattr(place, name):
                    return getattr(place, name)
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")

        module.__getattr__ = look_up  # type: ignore[method-assign]
        module.__doc__ = places[0].__doc__


def install() -> None:
    """Let old paths be found."""
    if not any(isinstance(finder, Moved) for finder in sys.meta_path):
        sys.meta_path.append(Moved())
