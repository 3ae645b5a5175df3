"""A simulated device besides the CPU, for machines without a GPU: its tensors are in the CPU's memory, but do not mix.

Inside `fake_device()` a tensor is on the device `FAKE_DEVICE` or on the host. As on a GPU, an operation on both is an
error, NumPy accepts only the host's, and a generator of the host cannot draw elsewhere. PyTorch calls the device
"meta", which every build accepts; unlike real meta tensors these have values. Only one thread at a time may use it.
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
from pearl.methods.base import Method
from pearl.nn.fast import stacking
from pearl.testing.tiny import Make, config, images, learn
from pearl.training import engine as engine_of
from pearl.training.engine import Engine
from pearl.training.optimizers import make_optimizers

FAKE_DEVICE = torch.device("meta")
ROUNDING = 2e-3  # tolerance for methods that amplify the rounding of other kernels
CROSSED: list[str] = []  # operations for which a GPU's host would wait, since `fake_device()` was entered
_READS = {"_local_scalar_dense", "equal"}  # their results are on the host
# they depend on values that the host reads
_SIZED = {"nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive"}
_INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_"}  # their indices may be on the host
_ALIKE = {"cat", "stack"}  # not even a single number may be on the host


def shows_the_same_on_another_device(make: Make) -> None:
    """Check that a method leaves no tensor on the host after training and prediction elsewhere, with equal results."""
    with fake_device():
        there = _learnt(make)
    for ours, its in zip(there, _learnt(make), strict=True):
        assert_close(ours, its, rtol=ROUNDING, atol=ROUNDING)


def _learnt(make: Make) -> list[Tensor]:
    """Return a method's logits and in-distribution scores for some images after two tasks; on the host."""
    method = make()
    method.fast = False
    unfused = partial(make_optimizers, device=FAKE_DEVICE)  # fused optimizers do not exist elsewhere
    with patch.object(engine_of, "make_optimizers", lambda settings, groups, *_, **__: unfused(settings, groups)):
        learn_two(method, Engine(config(train={"epochs": 1, "batch_size": 8}), device="cpu"))
    method.fast = True  # all sub-networks of a ViT run at once
    with torch.no_grad():
        ensemble, x = Ensemble(method), images().to(method.device)
        outputs = [ensemble(x), ensemble(x, 0), *(ensemble.scorer(x) if ensemble.scorer else ())]
    if not all(type(part) is type(x) for part in outputs):
        raise AssertionError("a result is not on the device of the images")
    return [part.cpu() for part in outputs]


def learn_two(method: Method, engine: Engine, view: View | None = None) -> None:
    """Train a method on two tasks with the engine, with images transformed by `view`."""
    learn(engine.to_device(method), range(2), engine, view=view, device=engine.device)


class _Fabric:
    """The part of Lightning Fabric that the engine uses."""

    device = FAKE_DEVICE
    autocast = staticmethod(nullcontext)

    def setup(self, module: nn.Module, *optimizers: torch.optim.Optimizer) -> tuple[Any, ...]:
        return module, *optimizers

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def clip_gradients(self, module: nn.Module, optimizer: object, max_norm: float, error_if_nonfinite: bool) -> None:
        nn.utils.clip_grad_norm_(module.parameters(), max_norm, foreach=False)


# ----------------------------------------------------------------------------------------------------------- the device


@contextmanager
def fake_device() -> Iterator[None]:
    """Make the device available, and the device of every new engine.

    Batches are made two at a time there, and a ViT's tasks are evaluated at once, as on a GPU.
    """
    tensor, autocast = torch.tensor, torch.autocast

    def made(data: Any, *, device: Any = None, requires_grad: bool = False, **options: Any) -> Tensor:
        made_tensor = tensor(tree_map(lambda x: x.tolist() if isinstance(x, _There) else x, data), **options)
        return (made_tensor if device is None else made_tensor.to(device)).requires_grad_(requires_grad)

    def as_made(data: Any, dtype: Any = None, device: Any = None) -> Tensor:
        made_tensor = data if isinstance(data, Tensor) else made(data)
        return made_tensor.to(device=made_tensor.device if device is None else device, dtype=dtype or made_tensor.dtype)

    def without(device_type: str, *more: Any, **options: Any) -> Any:
        return autocast("cpu", *more, **options)

    instead = {"tensor": made, "as_tensor": as_made, "asarray": as_made, "autocast": without}
    CROSSED.clear()
    augment._scale_and_shift.cache_clear()
    with ExitStack() as changed, _Elsewhere():
        changed.callback(augment._scale_and_shift.cache_clear)  # its constants are unusable for real meta tensors
        # PyTorch's own functions create no values on "meta", and have no autocast for it
        for name, function in instead.items():
            changed.enter_context(patch.object(torch, name, function))
        changed.enter_context(patch.object(torch.amp, "autocast", without))
        changed.enter_context(patch.object(torch, "is_autocast_enabled", lambda *_: False))
        changed.enter_context(patch.object(engine_of, "make_fabric", lambda *_, **__: _Fabric()))
        changed.enter_context(patch.object(Engine, "device", FAKE_DEVICE))
        changed.enter_context(patch.dict(batches.AHEAD, {FAKE_DEVICE.type: 2 * 8 * 3 * 8**2}))
        changed.enter_context(patch.dict(stacking.ROWS, {FAKE_DEVICE.type: 1000}))
        yield


class _There(Tensor):
    """A tensor elsewhere; `here` are its values."""

    here: Tensor
    is_meta = False  # otherwise `torch.nn.init` would not change it
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, here: Tensor) -> "_There":
        layout: dict[str, Any] = {"strides": here.stride(), "storage_offset": here.storage_offset()}
        return Tensor._make_wrapper_subclass(cls, here.shape, dtype=here.dtype, device=FAKE_DEVICE, **layout)

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

    def new_tensor(self, data: Any, **options: Any) -> Tensor:  # type: ignore[override]
        return torch.tensor(data, **dict[str, Any](dtype=self.dtype, device=FAKE_DEVICE) | options)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return _done(func, args, kwargs or {})


class _Elsewhere(TorchDispatchMode):
    """Handles functions that create tensors elsewhere from nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _done(func, args, kwargs or {})


def _done(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operation on the values on the host; return its result where a GPU would have it."""
    name, target = func.overloadpacket.__name__, kwargs.get("device")
    there = any(isinstance(x, _There) for x in tree_leaves((args, kwargs)))
    to = there if target is None else torch.device(target) == FAKE_DEVICE
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
    """Convert lists of indices to tensors of the host, since PyTorch would create them on "meta"."""
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
    """Raise RuntimeError for operations that fail on a GPU."""
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    if any(x.device == FAKE_DEVICE and not isinstance(x, _There) for x in tensors):
        raise RuntimeError(f"{func}: a tensor created on the simulated device in an unsupported way")
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
    if any(x.ndim or name in _ALIKE for x in hosts):  # a number elsewhere may be set from the host
        shapes = [tuple(x.shape) for x in hosts]
        raise RuntimeError(f"{func}: some of its tensors are on another device, but those of {shapes} on the host")
