"""Calls of a network with other tensors than its own, without changing it.

`torch.func.functional_call` replaces the tensors of the network itself during the call. Two threads that use one
network then compute with each other's tensors, and may leave them there. Here each call has its own module objects.
"""

from collections.abc import Mapping
from types import MethodType
from typing import Any, TypeVar

from torch import Tensor, nn

M = TypeVar("M", bound=nn.Module)

# of the copy, so that it can be changed
_OWN = ("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks")


def functional_call(network: nn.Module, tensors: Mapping[str, Tensor], args: tuple[Any, ...]) -> Any:
    """Return the output of a network with `tensors`, by name, instead of its own.

    Buffers that a forward pass changes in place, such as running statistics, are changed as usual.

    Raises:
        KeyError: the network has no tensor of this name.
    """
    return shallow_copy(network, tensors)(*args)


def shallow_copy(network: M, tensors: Mapping[str, Tensor] | None = None) -> M:
    """Return a network of new module objects that shares all tensors with `network` except the given `tensors`.

    A tensor that has several names is replaced under all of them. The copy has the same hooks, and may get others.

    Raises:
        KeyError: the network has no tensor of this name.
    """
    copies: dict[int, nn.Module] = {}
    copy = _copied(network, copies)
    if tensors:
        replaced = {id(_tensor(network, name)): tensor for name, tensor in tensors.items()}
        for module in copies.values():
            of_kinds: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
            for attributes in of_kinds:
                attributes.update({name: replaced[id(old)] for name, old in attributes.items() if id(old) in replaced})
    return copy


def _copied(module: M, copies: dict[int, nn.Module]) -> M:
    if (copy := copies.get(id(module))) is not None:
        return copy  # type: ignore[return-value]
    copy = copies[id(module)] = object.__new__(type(module))
    state = vars(copy)
    state.update(vars(module))
    for name in _OWN:
        state[name] = state[name].copy()
    if isinstance(forward := state.get("forward"), MethodType) and forward.__self__ is module:
        state["forward"] = MethodType(forward.__func__, copy)
    for name, child in copy._modules.items():
        if child is not None:
            copy._modules[name] = _copied(child, copies)
    return copy


def _tensor(network: nn.Module, name: str) -> Tensor:
    module: nn.Module = network
    *path, last = name.split(".")
    for part in path:
        module = module._modules[part]  # type: ignore[assignment]
    tensor: Tensor | None = module._parameters.get(last)
    tensor = module._buffers[last] if tensor is None else tensor
    if tensor is None:
        raise KeyError(name)
    return tensor
