"""Convolutions fused with the following sum and ReLU by oneDNN, in copies for evaluation on CPUs.

Weights are reordered once instead of at every call, and sums and ReLUs do not read and write maps again. Autocast does
not cover these functions, so this file casts to bfloat16. They turn NaN into 0, so weights with a NaN are not fused.
"""

import operator
import platform
from collections import Counter
from collections.abc import Callable, Iterator
from types import MethodType
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from pearl.nn.fast.folding import Tracer, graph_of, hooked, plain
from pearl.nn.precision import computes_bf16

FOLLOWED = ("pearl.nn.networks", "timm.models.resnet", "torchvision.models.resnet")
SUMS = {operator.add, torch.add}
RELUS = {F.relu, torch.relu}


class FusedModule(NamedTuple):
    """A module of a network, and its forward pass rewritten with fused convolutions."""

    name: str
    forward: Callable[..., Tensor]
    convs: dict[str, bool]
    """Names in the module -> True with a ReLU inside."""


def fusible(network: nn.Module) -> list[FusedModule]:
    """Return what `fuse` can rewrite in a network, and in all with its structure, from its graph.

    A graph has no branches, contexts or aliases, so only modules of `FOLLOWED` are rewritten; others, and those with
    hooks, are called unchanged, and their submodules are examined separately. On other processors than x86, which were
    not measured, nothing is rewritten.
    """
    onednn = torch.backends.mkldnn
    there = onednn.is_available() and onednn.enabled and hasattr(torch.ops.mkldnn, "_convolution_pointwise")
    return list(_parts(network, "")) if there and platform.machine() in ("x86_64", "AMD64") else []


@torch.no_grad()
def fuse(network: nn.Module, parts: list[FusedModule]) -> nn.Module:
    """Rewrite a copy for evaluation on the CPU in place; `parts` are from `fusible` of its structure.

    Results equal the network's up to rounding, under autocast up to that of bfloat16. Calls that need gradients or
    another precision are computed as before.
    """
    for part in parts:
        module = network.get_submodule(part.name)
        convs = {name: cast(nn.Conv2d, module.get_submodule(name)) for name in part.convs}
        if not all(_computes(conv.weight) for conv in convs.values()):
            continue
        for name, conv in convs.items():
            module.set_submodule(name, FusedConv(conv, part.convs[name]))
        module.forward = MethodType(part.forward, module)  # keeps its hooks
    return network


class FusedConv(nn.Module):
    """A convolution, a sum and a ReLU; in float32, or under autocast in bfloat16 if the CPU supports it.

    Its weight is reordered at the first call for any shape: a contiguous weight sometimes gives other bits.
    """

    def __init__(self, conv: nn.Conv2d, relu: bool) -> None:
        super().__init__()
        weight, bias = conv.weight.detach(), None if conv.bias is None else conv.bias.detach()
        self.tensors = {torch.float32: (weight, bias)}
        self.padding = cast(list[int], [*conv.padding])  # strings are not supported there
        self.stride, self.dilation, self.groups = [*conv.stride], [*conv.dilation], conv.groups
        self.relu = relu

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        """Map (B, C, H, W) to (B, O, H', W') and add `other`."""
        geometry = self.padding, self.stride, self.dilation, self.groups
        dtype = self._dtype(x, other)
        if dtype is None:
            weight, bias = self._dense()
            out = F.conv2d(x, weight, bias, self.stride, self.padding, self.dilation, self.groups)
            return self._one_by_one(out, other)
        ops = torch.ops.mkldnn
        weight, bias = self.tensors.get(dtype) or self._in_bfloat16()
        if not weight.is_mkldnn:
            weight = ops._reorder_convolution_weight(weight, *geometry, list(x.shape))
            self.tensors[dtype] = weight, bias
        if dtype == torch.float32 and other is not None:
            after = "relu" if self.relu else None
            return ops._convolution_pointwise.binary(x, other, weight, bias, *geometry, "add", 1.0, after, [], "")
        after = "relu" if self.relu and other is None else "none"
        out = ops._convolution_pointwise(x.to(dtype), weight, bias, *geometry, after, [], "")
        # in bfloat16 a fused sum is not faster, and PyTorch supports it for some shapes only
        return out if other is None else self._one_by_one(out, other)

    def _one_by_one(self, out: Tensor, other: Tensor | None) -> Tensor:
        """Compute the sum and the ReLU as separate steps."""
        if other is not None:
            alike = other.shape == out.shape and other.dtype == out.dtype
            out = out.add_(other) if alike else out + other
        return F.relu(out, inplace=True) if self.relu else out

    def _dense(self) -> tuple[Tensor, Tensor | None]:
        weight, bias = self.tensors[torch.float32]
        return weight.to_dense() if weight.is_mkldnn else weight, bias

    def _in_bfloat16(self) -> tuple[Tensor, Tensor | None]:
        weight, bias = self._dense()
        return weight.bfloat16(), None if bias is None else bias.bfloat16()  # as autocast does

    def _dtype(self, x: Tensor, other: Tensor | None) -> torch.dtype | None:
        """Return the precision in which oneDNN has this as one step; None if it has not."""
        given = [x] if other is None else [x, other]
        if torch.is_grad_enabled() and any(each.requires_grad for each in given):
            return None
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else torch.float32
        if dtype != torch.float32 and not (dtype == torch.bfloat16 and computes_bf16("cpu")):
            return None
        if x.dtype not in (torch.float32, dtype):
            return None
        if other is not None and (other.dtype != dtype or other.shape != self._shape(x)):
            return None
        # channels last, as the output has them
        return dtype if all(each.is_cpu and each.stride(1) == 1 for each in given) else None

    def _shape(self, x: Tensor) -> tuple[int, ...]:
        """Return the shape of the output."""
        weight, _ = self.tensors[torch.float32]
        sizes = zip(x.shape[2:], weight.shape[2:], self.padding, self.stride, self.dilation, strict=True)
        return len(x), len(weight), *((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, p, s, d in sizes)


def _computes(weight: Tensor) -> bool:
    # the sum is NaN if any entry is, and is ten times as fast as a test of each
    return weight.device.type == "cpu" and weight.dtype == torch.float32 and bool(weight.sum().isfinite())


class _Tracer(Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return hooked(m) or not _followed(m)


def _followed(module: nn.Module) -> bool:
    return type(module) is nn.Sequential or type(module).__module__ in FOLLOWED


def _parts(network: nn.Module, name: str) -> Iterator[FusedModule]:
    modules = dict(network.named_modules())
    if not any(isinstance(module, nn.Conv2d) for module in modules.values()):
        return
    graph = graph_of(network, _Tracer) if _followed(network) else None
    inside = dict(network.named_children())
    # otherwise a copy's tensors would stay in it
    if graph is not None and all(node.op != "get_attr" for node in graph.nodes):
        inside = {str(node.target): modules[str(node.target)] for node in graph.nodes if node.op == "call_module"}
        if convs := _Rewriting(graph, modules).convs():
            yield FusedModule(name, type(fx.GraphModule(network, graph)).forward, convs)
    for below, module in inside.items():
        yield from _parts(module, f"{name}.{below}".strip("."))


class _Rewriting:
    """Rewrites a graph: sums and ReLUs move into the convolution right before them, if it has no other reader."""

    def __init__(self, graph: fx.Graph, modules: dict[str, nn.Module]) -> None:
        self.graph, self.modules = graph, modules

    def convs(self) -> dict[str, bool]:
        """Rewrite the graph; see `FusedModule.convs`. Empty if nothing follows a convolution directly."""
        for node in self.graph.nodes:
            if self._is(node, nn.Identity):
                self._drop(node, node.args[0])
        times = Counter(node.target for node in self.graph.nodes)
        with_relu: dict[str, bool] = {}
        sums = False
        for node in self.graph.nodes:
            if self._is(node, nn.Conv2d) and times[node.target] == 1 and _zero_padded(self.modules[node.target]):
                sums |= self._take_sum(node)
                with_relu[str(node.target)] = self._take_relu(node)
        return with_relu if sums or any(with_relu.values()) else {}

    def _take_sum(self, conv: fx.Node) -> bool:
        after = _behind(conv)
        if after is None or after.target not in SUMS or after.kwargs or after.args.count(conv) != 1:
            return False
        (other,) = (each for each in after.args if each is not conv)
        if not isinstance(other, fx.Node):
            return False
        conv.args = (*conv.args, other)
        self._drop(after, conv)
        return True

    def _take_relu(self, conv: fx.Node) -> bool:
        after = _behind(conv)
        if after is None or not (self._is(after, nn.ReLU) or after.target in RELUS):
            return False
        self._drop(after, conv)
        return True

    def _is(self, node: fx.Node, kind: type[nn.Module]) -> bool:
        once = len(node.args) == 1 and not node.kwargs
        return once and node.op == "call_module" and plain(self.modules[str(node.target)], kind)

    def _drop(self, node: fx.Node, other: fx.Node) -> None:
        """Replace one node by another for all its readers."""
        node.replace_all_uses_with(other)
        self.graph.erase_node(node)


def _behind(node: fx.Node) -> fx.Node | None:
    """Return the next step if it is the only reader of this one and no in-place change lies between."""
    return node.next if [*node.users] == [node.next] else None


def _zero_padded(conv: nn.Module) -> bool:
    return conv.padding_mode == "zeros" and not isinstance(conv.padding, str)
