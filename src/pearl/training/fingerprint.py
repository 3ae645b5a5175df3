"""A digest of everything that determines a phase's result, so that phases with equal digests are trained once.

A phase declares the modules that its loss depends on (`Phase.depends_on`). The digest covers their tensors and
structure, the task's images and labels, the settings, the machine, the bytes of pearl's source files, and the values
that the loss holds. A function is named by its position in those files, so that any change of the code is another
digest. If one of these cannot be digested, the phase has no digest: a loss, a module or a class in a user's file, for
example, is never taken from the cache.
"""

import hashlib
import json
import sys
import types
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel
from torch import Tensor, nn

from pearl.data.augment import View
from pearl.data.batches import Task
from pearl.methods.base import Phase
from pearl.storage.checkpoint import fingerprint
from pearl.version import LOADED

FORMAT = 1  # version of the digest and of the files stored under it
HOME = Path(__file__).parents[1]
ROOMS = ("settings", "storage", "data", "nn", "methods", "training")  # rooms of pearl whose code a phase may run
# packages whose version determines their code; pearl's source is read
_TRUSTED = sys.stdlib_module_names | {"torch", "torchvision", "timm", "numpy", "lightning_fabric"}
# exactly these types: subclasses may do anything
_PLAIN = {type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.memory_format}
_TENSORS = {Tensor, nn.Parameter}
_OF_MODULES = nn.Module().__dict__.keys() - {"training"}  # attributes of every torch module


class Unknown(Exception):
    """A value whose behaviour cannot be determined."""


def code() -> str:
    """Return a digest of pearl's own source.

    Raises:
        Unknown: a file was changed after it was loaded.
    """
    files = sorted(file for room in ROOMS for file in (HOME / room).rglob("*.py"))
    if any(max((about := file.stat()).st_mtime, about.st_ctime) > LOADED for file in files):
        raise Unknown
    return _digest_of(tuple(files))


@cache
def _digest_of(files: tuple[Path, ...]) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.relative_to(HOME)}\0".encode() + file.read_bytes())
    return digest.hexdigest()


def digest(phase: Phase, task: Task, facts: Mapping[str, Any]) -> str:
    """Return the digest of a phase before its training on a task, plus other inputs; empty if it has none.

    Phases with hooks, with batches other than a task's, or whose loss holds more than modules and plain values, have
    none.
    """
    data = phase.data or task
    hooks = (phase.after_backward, phase.project, phase.after_step)
    if not phase.depends_on or phase.keep_optimizer or any(hooks) or not isinstance(data, Task):
        return ""
    try:
        described = _Description(phase.depends_on)
        names = {id(p): name for name, p in described.whole.named_parameters(remove_duplicate=False)}
        content = {
            "format": FORMAT,
            "code": code(),
            "phase": phase.name,
            "capturable": phase.capturable,
            "modules": described.of(described.whole),
            "tied": _tied(described.whole),
            "trained": {group: [names[id(p)] for p in params] for group, params in phase.groups.items()},
            "loss": described.of(phase.loss),
            "data": described.of(data),
            **facts,
        }
    # it trains undeclared modules, a cell of its loss is empty, or a tensor or array has no readable bytes
    except (Unknown, KeyError, ValueError, TypeError, RuntimeError, OSError):
        return ""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def together(modules: Sequence[nn.Module]) -> nn.Module:
    """Combine several modules into one, with their tensors named by position."""
    return nn.ModuleList(modules)


class _Description:
    """A converter of values to JSON, which is equal only if they compute the same; only declared modules have one."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.whole = together(modules)
        self.names = {id(module): name for name, module in self.whole.named_modules(remove_duplicate=False)}
        self._open: set[int] = set()

    def of(self, value: Any) -> Any:
        """Convert a value.

        Raises:
            Unknown: it is, or contains, an unsupported object.
        """
        if type(value) in _PLAIN:
            return repr(value)
        if isinstance(value, np.number | np.bool_):
            return [_name(type(value)), repr(value)]
        if type(value) in _TENSORS and not (value._backward_hooks or value._post_accumulate_grad_hooks):
            return ["tensor", fingerprint(value), value.stride(), value.requires_grad]
        if type(value) is np.ndarray and value.dtype != object:
            return ["array", fingerprint(torch.from_numpy(value.copy(order="C")))]
        if isinstance(value, Mapping):
            return ["mapping", [[self.of(key), self.of(each)] for key, each in value.items()]]
        if isinstance(value, set | frozenset):
            return ["set", sorted(json.dumps(self.of(each)) for each in value)]
        if isinstance(value, list | tuple):
            return [_name(type(value)), [self.of(each) for each in value]]
        if isinstance(value, type):
            return _name(value)
        if id(value) in self._open:  # it contains itself
            raise Unknown
        self._open.add(id(value))
        try:
            return self._of_parts(value)
        finally:
            self._open.remove(id(value))

    def _of_parts(self, value: Any) -> Any:
        if isinstance(value, nn.Module):
            return self._of_module(value)
        if isinstance(value, types.FunctionType):
            held = [cell.cell_contents for cell in value.__closure__ or ()]
            return [_name(value), _position(value), self.of([held, value.__defaults__, value.__kwdefaults__])]
        if isinstance(value, types.MethodType):
            return ["method", self.of([value.__func__, value.__self__])]
        if isinstance(value, types.BuiltinFunctionType):
            return _name(value)
        if isinstance(value, partial):
            return ["partial", self.of([value.func, value.args, value.keywords])]
        if isinstance(value, Enum):
            return [_name(type(value)), value.name]
        if isinstance(value, BaseModel):
            return [_name(type(value)), value.model_dump(mode="json")]
        if is_dataclass(value):
            return [_name(type(value)), self.of([getattr(value, each.name) for each in fields(value)])]
        if isinstance(value, View):
            return [_name(type(value)), self.of(vars(value))]
        if isinstance(value, Task):
            seen = (value.id, value.name, value.classes, value.first_class, value.train, value.device)
            return [_name(type(value)), self.of([*seen, value.images, value.labels, value.view])]
        raise Unknown

    def _of_module(self, module: nn.Module) -> Any:
        """Convert a declared module: class and values, absence of hooks, tensors and modules by name."""
        if id(module) not in self.names:
            raise Unknown
        attributes = vars(module)
        if any(value for name, value in attributes.items() if name in _OF_MODULES and "hook" in name):
            raise Unknown
        return [
            [_name(kind) for kind in type(module).__mro__],
            self.of({name: value for name, value in attributes.items() if name not in _OF_MODULES}),
            self.of({name: value for part in ("_parameters", "_buffers") for name, value in attributes[part].items()}),
            self.of(attributes["_modules"]),
        ]


def _tied(whole: nn.Module) -> list[list[str]]:
    """Return the names that share memory: tied tensors differ from separate ones with the same bits."""
    names: dict[tuple[int, int], list[str]] = {}
    for name, tensor in (*whole.named_parameters(remove_duplicate=False), *whole.named_buffers(remove_duplicate=False)):
        if tensor.numel():
            names.setdefault((tensor.untyped_storage().data_ptr(), int(tensor.storage_offset())), []).append(name)
    return [each for each in names.values() if len(each) > 1]


def _position(function: types.FunctionType) -> list[tuple[int, int]]:
    """Return the lines and columns of a function in its file: two functions of one file may have the same name.

    Raises:
        Unknown: Python was started without columns (-X no_debug_ranges).
    """
    parts = {(line, column) for line, _, column, _ in function.__code__.co_positions() if line is not None}
    if any(column is None for _, column in parts):
        raise Unknown
    return sorted(parts)  # type: ignore[arg-type]


def _name(value: Any) -> str:
    """Return the name of a class or function.

    Raises:
        Unknown: its code is not determined by its package, by pearl's rooms, or by a class that is defined once.
    """
    module = getattr(value, "__module__", None) or ""
    package, *room = module.split(".")
    known = package in _TRUSTED or (package == "pearl" and bool(room) and room[0] in ROOMS)
    if not known or (isinstance(value, type) and "<locals>" in value.__qualname__):
        raise Unknown
    return f"{module}:{value.__qualname__}"
