"""Copies of a network that are only evaluated: other weights, and BatchNorm folded into the convolution before it."""

import copy
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.utils.fusion import fuse_conv_bn_weights

from pearl.nn.functional import shallow_copy


def norms_after_convs(net: nn.Module) -> dict[str, str]:
    """Names of the BatchNorms that see nothing but a convolution which nothing else sees -> that convolution.

    Read off the graph of `net`; empty where torch.fx cannot follow the network, which then runs as it is.
    """
    graph = graph_of(net)
    if graph is None:
        return {}
    nodes = graph.nodes
    modules = dict(net.named_modules())
    calls = [node.target for node in nodes if node.op == "call_module"]
    found = {}
    for node in nodes:
        before = node.args[0] if node.args else None
        if node.op != "call_module" or not isinstance(before, fx.Node) or before.op != "call_module":
            continue
        norm, conv = modules[str(node.target)], modules[str(before.target)]
        pair = plain(norm, nn.BatchNorm2d) and plain(conv, nn.Conv2d)
        once = len(before.users) == 1 and calls.count(node.target) == calls.count(before.target) == 1
        if pair and once and norm.track_running_stats and conv.padding_mode == "zeros":
            found[str(node.target)] = str(before.target)
    return found


class Tracer(fx.Tracer):
    """Follows a network down to PyTorch's modules and those with hooks."""

    record_stack_traces = False  # of every node; half of the time

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """See `fx.Tracer`."""
        return hooked(m) or super().is_leaf_module(m, module_qualified_name)


def graph_of(net: nn.Module, tracer: type[Tracer] = Tracer) -> fx.Graph | None:
    """Return the steps of a network's forward pass, or None where torch.fx cannot follow it.

    `fx.Tracer.trace` replaces `nn.Module.__call__` for the whole process while it runs, so that every forward pass in
    another thread fails. Here a copy of the network is called whose leaves record that they were called.
    """
    recorder, network = tracer(), shallow_copy(net).eval()
    recorder.root, recorder.graph, recorder.tensor_attrs = network, fx.Graph(tracer_cls=tracer), {}
    for name, module in network.named_modules():
        if name and recorder.is_leaf_module(module, name):
            module._forward_hooks.clear()  # they run where the leaf runs
            module._forward_pre_hooks.clear()
            module.forward = partial(_recorded, recorder, name)
    try:
        out = network.forward(recorder.create_proxy("placeholder", "x", (), {}))
        recorder.create_node("output", "output", (recorder.create_arg(out),), {})
    except Exception:  # torch.fx raises nearly anything on code that it cannot follow, from a library or a user
        return None
    return recorder.graph


def _recorded(recorder: Tracer, name: str, *args: Any, **kwargs: Any) -> fx.Proxy:
    return recorder.create_proxy("call_module", name, args, kwargs)


def plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Return True if a module does what PyTorch's `kind` does and no more: of subclasses and hooks, who knows."""
    return type(module) is kind and not hooked(module)


def hooked(module: nn.Module) -> bool:
    """Return True if something happens before or after each of its forward passes."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def with_weights(net: nn.Module, weights: Mapping[str, Tensor]) -> nn.Module:
    """A copy in evaluation mode that has `weights`, by name; all other tensors are those of `net`, not copies."""
    named: dict[str, Tensor] = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    replaced = named | dict(weights)
    # what deepcopy finds in its memo it does not copy
    memo: dict[int, Any] = {id(old): _like(replaced[name], old) for name, old in named.items()}
    return copy.deepcopy(net, memo).eval()


@torch.no_grad()
def folded(net: nn.Module, weights: Mapping[str, Tensor], norms: Mapping[str, str]) -> nn.Module:
    """As `with_weights`, with BatchNorms folded into convolutions: `norms`, from `norms_after_convs(net)`.

    What a norm does with its running statistics is w x + b per channel, and so is what is left of it: w in the
    convolution's weight, b its bias. The copy does not follow later changes of these statistics.
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
    """A frozen parameter in place of a parameter, a plain tensor in place of a buffer."""
    return nn.Parameter(tensor.detach(), requires_grad=False) if isinstance(old, nn.Parameter) else tensor.detach()
