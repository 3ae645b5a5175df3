"""Another device than the CPU, for machines that have none: its tensors lie in the CPU's memory, but nothing mixes.

Inside `elsewhere()` a tensor is on the device `ELSEWHERE` or on the host. As on a GPU, an operation on both is an
error, NumPy sees the host's alone, and a generator of the host draws nothing elsewhere. PyTorch calls the device
"meta", the one that every build accepts; unlike real meta tensors these have numbers.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

ELSEWHERE = torch.device("meta")
CROSSED: list[str] = []  # operations that moved numbers between the two: a GPU's host waits for each of them
READS = {"_local_scalar_dense", "equal", "is_same_size"}  # what they give is on the host
INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_"}  # whose indices may be on the host


class There(Tensor):
    """A tensor elsewhere; `here` are its numbers."""

    here: Tensor
    is_meta = False  # or `torch.nn.init` would leave it as it is
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, here: Tensor) -> "There":
        layout = {"strides": here.stride(), "storage_offset": here.storage_offset(), "dtype": here.dtype}
        return Tensor._make_wrapper_subclass(cls, here.shape, **layout, device=ELSEWHERE)

    def __init__(self, here: Tensor) -> None:
        self.here = here

    def __repr__(self) -> str:
        return f"There({self.here})"

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, other: "There") -> None:
        Tensor.data.__set__(self, other)
        self.here = other.here

    def tolist(self) -> Any:
        return self.here.tolist()

    def new_tensor(self, data: Any, **how: Any) -> Tensor:
        return torch.tensor(data, **{"dtype": self.dtype, "device": ELSEWHERE} | how)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _done(func, args, kwargs or {})


def _done(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """An operation, by its numbers on the host; what it gives is where a GPU would leave it."""
    name, target = func.overloadpacket.__name__, kwargs.get("device")
    there = any(isinstance(x, There) for x in tree_leaves((args, kwargs)))
    _check(func, name, args, kwargs, there)
    moved = kwargs if target is None else kwargs | {"device": torch.device("cpu")}
    result = func(*tree_map(_here, args), **tree_map(_here, moved))
    ends = isinstance(args[0], There) if args else there, there if target is None else torch.device(target) == ELSEWHERE
    if (name in READS and there) or (name == "_to_copy" and ends[0] != ends[1]):
        CROSSED.append(name)
    if name == "copy_":
        return args[0]
    if name in READS or not ends[1]:
        return result
    wrapped = tree_map(lambda x: There(x) if isinstance(x, Tensor) else x, result)
    return return_and_correct_aliasing(func, args, kwargs, wrapped) if there else wrapped


def _here(value: Any) -> Any:
    return value.here if isinstance(value, There) else value


def _check(func: Any, name: str, args: Any, kwargs: dict[str, Any], there: bool) -> None:
    """Raises RuntimeError for what a GPU would refuse."""
    target = kwargs.get("device")
    if kwargs.get("generator") is not None and (there or (target and torch.device(target) == ELSEWHERE)):
        raise RuntimeError(f"{func}: a generator of the host draws elsewhere")
    if not there or name in {"_to_copy", "copy_"}:
        return
    looked_at = args
    if name in INDEXED:
        if not isinstance(args[0], There):
            raise RuntimeError(f"{func}: indices elsewhere of a tensor on the host")
        looked_at = (args[0], *args[2:])
    shapes = [tuple(x.shape) for x in tree_leaves(looked_at) if isinstance(x, Tensor) and not isinstance(x, There)]
    if any(shapes):  # a number may come from the host
        raise RuntimeError(f"{func}: tensors of shapes {shapes} are on the host, others are not")


class _Elsewhere(TorchDispatchMode):
    """Sees what is made elsewhere, of which no argument is a tensor."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _done(func, args, kwargs or {})


@contextmanager
def elsewhere() -> Iterator[torch.device]:
    """The device exists."""
    tensor, autocast = torch.tensor, torch.autocast

    def made(data: Any, *, device: Any = None, requires_grad: bool = False, **how: Any) -> Tensor:
        found = tensor(data, **how)
        return (found if device is None else found.to(device)).requires_grad_(requires_grad)

    with pytest.MonkeyPatch.context() as patch, _Elsewhere():
        patch.setattr(torch, "tensor", made)  # PyTorch's own leaves out the numbers of what is on "meta" ...
        patch.setattr(torch, "autocast", lambda kind, **how: autocast("cpu", **how))  # ... where no autocast is
        patch.setattr(torch, "is_autocast_enabled", lambda kind: False)
        yield ELSEWHERE
