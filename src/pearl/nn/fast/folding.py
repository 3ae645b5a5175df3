"""Copies of a network for evaluation: other weights, and BatchNorm folded into the convolution before it."""

import copy
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.utils.fusion import fuse_conv_bn_weights

from pearl.nn.functional import shallow_copy


def norms_after_convs(net: nn.Module) -> dict[str, str]:
    """Map each BatchNorm whose only input is a convolution with no other reader to that convolution, by name.

    The names come from the graph of `net`; the result is empty if torch.fx cannot trace it.
    """
    graph = graph_of(net)
    if graph is None:
        return {}
    nodes = graph.nodes
    modules = dict(net.named_modules())
    calls = [node.target for node in nodes if node.op == "call_module"]
    norm_of = {}
    for node in nodes:
        before = node.args[0] if node.args else None
        if node.op != "call_module" or not isinstance(before, fx.Node) or before.op != "call_module":
            continue
        norm, conv = modules[str(node.target)], modules[str(before.target)]
        pair = plain(norm, nn.BatchNorm2d) and plain(conv, nn.Conv2d)
        once = len(before.users) == 1 and calls.count(node.target) == calls.count(before.target) == 1
        if pair and once and norm.track_running_stats and conv.padding_mode == "zeros":
            norm_of[str(node.target)] = str(before.target)
    return norm_of


class Tracer(fx.Tracer):
    """Traces a network down to PyTorch's modules and those with hooks."""

    record_stack_traces = False  # for every node; it takes half of the time

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """See `fx.Tracer`."""
        return hooked(m) or super().is_leaf_module(m, module_qualified_name)


def graph_of(net: nn.Module, tracer: type[Tracer] = Tracer) -> fx.Graph | None:
    """Return the graph of a network's forward pass, or None if torch.fx cannot trace it.

    `fx.Tracer.trace` replaces `nn.Module.__call__` in the whole process while it runs, so that forward passes in other
    threads fail. This function calls a copy of the network instead, whose leaves record their calls.
    """
    recorder, network = tracer(), shallow_copy(net).eval()
    recorder.root, recorder.graph, recorder.tensor_attrs = network, fx.Graph(tracer_cls=tracer), {}
    for name, module in network.named_modules():
        if name and recorder.is_leaf_module(module, name):
            module._forward_hooks.clear()  # their calls belong to the leaf's
            module._forward_pre_hooks.clear()
            module.forward = partial(_recorded, recorder, name)
    try:
        out = network.forward(recorder.create_proxy("placeholder", "x", (), {}))
        recorder.create_node("output", "output", (recorder.create_arg(out),), {})
    except Exception:  # torch.fx raises many types of errors for code that it cannot trace
        return None
    return recorder.graph


def _recorded(recorder: Tracer, name: str, *args: Any, **kwargs: Any) -> fx.Proxy:
    return recorder.create_proxy("call_module", name, args, kwargs)


def plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Return True if a module is exactly PyTorch's `kind`: subclasses and hooks may do anything."""
    return type(module) is kind and not hooked(module)


def hooked(module: nn.Module) -> bool:
    """Return True if a module has hooks before or after its forward pass."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def with_weights(net: nn.Module, weights: Mapping[str, Tensor]) -> nn.Module:
    """Return a copy in evaluation mode with `weights`, by name; it shares all other tensors with `net`."""
    named: dict[str, Tensor] = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    replaced = named | dict(weights)
    # deepcopy does not copy the objects in its memo
    memo: dict[int, Any] = {id(old): _like(replaced[name], old) for name, old in named.items()}
    return copy.deepcopy(net, memo).eval()


@torch.no_grad()
def folded(net: nn.Module, weights: Mapping[str, Tensor], norms: Mapping[str, str]) -> nn.Module:
    """As `with_weights`, with BatchNorms folded into convolutions; `norms` is from `norms_after_convs(net)`.

    With running statistics, a norm computes w x + b per channel: w moves into the convolution's weight, b stays as a
    bias. Later changes of these statistics do not affect the copy.
    """
    network = with_weights(net, weights)
    for name, before in norms.items():
        norm: Any = network.get_submodule(name)
        conv: Any = network.get_submodule(before)
        statistics = norm.running_mean, norm.running_var, norm.eps
        conv.weight, conv.bias = fuse_conv_bn_weights(conv.weight, conv.bias, *statistics, norm.weight, norm.bias)
        network.set_submodule(name, nn.Identity())
    return network.requires_grad_(False)


def _like(tensor: Tensor, old: Tensor) -> Tensor:
    """Return a frozen parameter for a parameter, a plain tensor for a buffer."""
    return nn.Parameter(tensor.detach(), requires_grad=False) if isinstance(old, nn.Parameter) else tensor.detach()
