"""Another device than the CPU, for machines that have none: its tensors lie in the CPU's memory, but nothing mixes.

Inside `elsewhere()` a tensor is on the device `ELSEWHERE` or on the host. As on a GPU, an operation on both is an
error, NumPy sees the host's alone, and a generator of the host draws nothing elsewhere. PyTorch calls the device
"meta", the one that every build accepts; unlike real meta tensors these have numbers. One thread may do this at a time.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

from pearl.data import augment, batches
from pearl.data.augment import View
from pearl.evaluation.evaluate import Ensemble
from pearl.lifecycle.small import Make, config, images, learn
from pearl.methods.base import Method
from pearl.nn.fast import stacking
from pearl.training import engine as engine_of
from pearl.training.engine import Engine
from pearl.training.optimizers import make_optimizers

ELSEWHERE = torch.device("meta")
ROUNDING = 2e-3  # what a few methods make of the rounding of other kernels
CROSSED: list[str] = []  # operations for which a GPU's host waits, since `elsewhere()` was entered
_READS = {"_local_scalar_dense", "equal"}  # what they give is on the host
_SIZED = {"nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive"}  # by numbers that the host reads
_INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_"}  # whose indices may be on the host
_ALIKE = {"cat", "stack"}  # where even a single number must not be on the host


def shows_the_same_on_another_device(make: Make) -> None:
    """Trained and asked on another device a method leaves nothing behind on the host, and says what it says there."""
    with elsewhere():
        there = _learnt(make)
    for ours, its in zip(there, _learnt(make), strict=True):
        assert_close(ours, its, rtol=ROUNDING, atol=ROUNDING)


def _learnt(make: Make) -> list[Tensor]:
    """What a method says of some images after two tasks, and how familiar they are to it; on the host."""
    method = make()
    method.fast = False
    unfused = partial(make_optimizers, device=ELSEWHERE)  # as there are no fused ones elsewhere
    with patch.object(engine_of, "make_optimizers", lambda settings, groups, *_, **__: unfused(settings, groups)):
        learn_two(method, Engine(config(train={"epochs": 1, "batch_size": 8}), device="cpu"))
    method.fast = True  # of a ViT all sub-networks are asked at once
    with torch.no_grad():
        ensemble, x = Ensemble(method), images().to(method.device)
        found = [ensemble(x), ensemble(x, 0), *(ensemble.judge(x) if ensemble.judge else ())]
    if not all(type(part) is type(x) for part in found):
        raise AssertionError("an answer is not on the device of the images")
    return [part.cpu() for part in found]


def learn_two(method: Method, engine: Engine, view: View | None = None) -> None:
    """Let a method learn two tasks where the engine is, their images seen as `view` says."""
    learn(engine.place(method), range(2), engine, view=view, device=engine.fabric.device)


class _Fabric:
    """As much of Lightning Fabric as the engine asks for."""

    device = ELSEWHERE
    autocast = staticmethod(nullcontext)

    def setup(self, module: nn.Module, *optimizers: torch.optim.Optimizer) -> tuple[Any, ...]:
        return module, *optimizers

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def clip_gradients(self, module: nn.Module, optimizer: object, max_norm: float, error_if_nonfinite: bool) -> None:
        nn.utils.clip_grad_norm_(module.parameters(), max_norm, foreach=False)


# ----------------------------------------------------------------------------------------------------------- the device


@contextmanager
def elsewhere() -> Iterator[None]:
    """The device exists, and every engine that is made is on it, whatever device it is asked for.

    Batches are made two at a time there, and a ViT's tasks asked at once, as on a GPU.
    """
    tensor, autocast = torch.tensor, torch.autocast

    def made(data: Any, *, device: Any = None, requires_grad: bool = False, **how: Any) -> Tensor:
        found = tensor(tree_map(lambda x: x.tolist() if isinstance(x, _There) else x, data), **how)
        return (found if device is None else found.to(device)).requires_grad_(requires_grad)

    def as_made(data: Any, dtype: Any = None, device: Any = None) -> Tensor:
        found = data if isinstance(data, Tensor) else made(data)
        return found.to(device=found.device if device is None else device, dtype=dtype or found.dtype)

    def without(device_type: str, *more: Any, **how: Any) -> Any:
        return autocast("cpu", *more, **how)

    instead = {"tensor": made, "as_tensor": as_made, "asarray": as_made, "autocast": without}
    CROSSED.clear()
    augment._scale_and_shift.cache_clear()
    with ExitStack() as changed, _Elsewhere():
        changed.callback(augment._scale_and_shift.cache_clear)  # its constants are of no use to real meta tensors
        for name, function in instead.items():  # PyTorch's own make no numbers on "meta", and have no autocast for it
            changed.enter_context(patch.object(torch, name, function))
        changed.enter_context(patch.object(torch.amp, "autocast", without))
        changed.enter_context(patch.object(torch, "is_autocast_enabled", lambda *_: False))
        changed.enter_context(patch.object(engine_of, "make_fabric", lambda *_, **__: _Fabric()))
        changed.enter_context(patch.dict(batches.AHEAD, {ELSEWHERE.type: 2 * 8 * 3 * 8**2}))
        changed.enter_context(patch.dict(stacking.ROWS, {ELSEWHERE.type: 1000}))
        yield


class _There(Tensor):
    """A tensor elsewhere; `here` are its numbers."""

    here: Tensor
    is_meta = False  # or `torch.nn.init` would leave it as it is
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, here: Tensor) -> "_There":
        layout: dict[str, Any] = {"strides": here.stride(), "storage_offset": here.storage_offset()}
        return Tensor._make_wrapper_subclass(cls, here.shape, dtype=here.dtype, device=ELSEWHERE, **layout)

    def __init__(self, here: Tensor) -> None:
        self.here = here

    def __repr__(self) -> str:  # type: ignore[override]
        return f"elsewhere: {self.here}"

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter  # type: ignore[override]
    def data(self, other: "_There") -> None:
        Tensor.data.__set__(self, other)  # type: ignore[attr-defined]
        self.here = other.here

    def tolist(self) -> Any:
        CROSSED.append("tolist")
        return self.here.tolist()

    def __format__(self, spec: str) -> str:
        CROSSED.append("format")
        return format(self.here, spec)

    def __getitem__(self, index: Any) -> Tensor:
        return super().__getitem__(_indices(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(_indices(index), value)

    def new_tensor(self, data: Any, **how: Any) -> Tensor:  # type: ignore[override]
        return torch.tensor(data, **dict[str, Any](dtype=self.dtype, device=ELSEWHERE) | how)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return _done(func, args, kwargs or {})


class _Elsewhere(TorchDispatchMode):
    """Sees what is made elsewhere of nothing that is there."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _done(func, args, kwargs or {})


def _done(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """An operation, by its numbers on the host; what it gives is where a GPU would leave it."""
    name, target = func.overloadpacket.__name__, kwargs.get("device")
    there = any(isinstance(x, _There) for x in tree_leaves((args, kwargs)))
    to = there if target is None else torch.device(target) == ELSEWHERE
    _check(func, name, args, kwargs, there, to)
    numbers = kwargs if target is None else kwargs | {"device": torch.device("cpu")}
    result = func(*tree_map(_here, args), **tree_map(_here, numbers))
    if _waits(name, args, there, to):
        CROSSED.append(name)
    if name == "copy_":
        return args[0]
    if name in _READS or not to:
        return result
    wrapped = tree_map(lambda x: _There(x) if isinstance(x, Tensor) else x, result)
    return return_and_correct_aliasing(func, args, kwargs, wrapped) if there else wrapped


def _here(value: Any) -> Any:
    return value.here if isinstance(value, _There) else value


def _indices(index: Any) -> Any:
    """Lists of indices as tensors of the host, since PyTorch would make them on "meta"."""
    if isinstance(index, tuple):
        return tuple(map(_indices, index))
    return torch.tensor(index) if isinstance(index, list | np.ndarray) else index


def _waits(name: str, args: Any, there: bool, to: bool) -> bool:
    """Return True if the host waits for the device."""
    if name == "_to_copy":
        return to != there
    if name == "copy_":
        return isinstance(args[0], _There) != isinstance(args[1], _There)
    if name in _INDEXED:
        chosen = [index for index in args[1] if index is not None]
        return there and any(not isinstance(index, _There) or index.dtype == torch.bool for index in chosen)
    return there and name in _READS | _SIZED


def _check(func: Any, name: str, args: Any, kwargs: dict[str, Any], there: bool, to: bool) -> None:
    """Raise RuntimeError for what a GPU refuses."""
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    if any(x.device == ELSEWHERE and not isinstance(x, _There) for x in tensors):
        raise RuntimeError(f"{func}: a tensor that was made on this pretended device in a way that it does not know")
    if kwargs.get("generator") is not None and (there or to):
        raise RuntimeError(f"{func}: a generator of the host draws on another device")
    if not there or name in {"_to_copy", "copy_"}:
        return
    mixed = args
    if name in _INDEXED:
        if not isinstance(args[0], _There):
            raise RuntimeError(f"{func}: indices on another device than the host's tensor that they are of")
        mixed = (args[0], *args[2:])
    hosts = [x for x in tree_leaves(mixed) if isinstance(x, Tensor) and not isinstance(x, _There)]
    if hosts and func._schema.is_mutable and args[0] is hosts[0]:
        raise RuntimeError(f"{func}: a tensor on the host is changed by one on another device")
    if any(x.ndim or name in _ALIKE for x in hosts):  # elsewhere a number may come from the host
        shapes = [tuple(x.shape) for x in hosts]
        raise RuntimeError(f"{func}: some of its tensors are on another device, but those of {shapes} on the host")
