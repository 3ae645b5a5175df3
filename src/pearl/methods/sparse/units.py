"""Units: the channels and neurons of a network, and the units that each weight reads and computes."""

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from pearl.errors import ConfigError
from pearl.nn.fast.folding import graph_of

# modules, functions and tensor methods that leave every channel in place; a linear layer after `flatten` reads several
# columns per channel
MODULES = nn.ReLU | nn.Identity | nn.MaxPool2d | nn.AvgPool2d | nn.AdaptiveAvgPool2d | nn.Flatten | nn.Dropout
FUNCTIONS = {F.relu, torch.relu, F.max_pool2d, F.avg_pool2d, torch.flatten, operator.getitem}
METHODS = {"mean", "flatten", "relu"}
SUMS = {operator.add, operator.iadd, torch.add}


@dataclass(frozen=True)
class Layer:
    """The units that a convolution or linear layer reads, an index per input (in,), and those it computes (out,)."""

    inputs: Tensor
    makes: Tensor
    groups: int = 1

    @property
    def reads(self) -> Tensor:
        """Return the unit that each entry (out, in / groups) of the weight reads."""
        by_group = self.inputs.view(self.groups, -1)
        return by_group.repeat_interleave(len(self.makes) // self.groups, 0)


class Units:
    """All units of a network, numbered; the images' channels are first.

    Channels that are summed by residual connections are one unit: none of the layers computing it can train when the
    unit is frozen.
    """

    def __init__(self, backbone: nn.Module) -> None:
        """Compute from the graph of a network.

        Raises:
            ConfigError: the network cannot be traced unit by unit.
        """
        self.layers: dict[str, Layer] = {}
        self.norms: dict[str, Tensor] = {}  # by norm layer: the units of its channels
        self._parents: list[int] = []
        self._layer: list[int] = []
        graph = graph_of(backbone)
        if graph is None:
            raise _not_followed("its code")
        self._walk(dict(backbone.named_modules()), graph.nodes)

    def _walk(self, modules: dict[str, nn.Module], nodes: Iterable[fx.Node]) -> None:
        streams: dict[object, Tensor] = {}  # by graph node: the unit of each channel
        for node in nodes:
            before = streams.get(node.args[0]) if node.args and isinstance(node.args[0], fx.Node) else None
            if node.op == "placeholder":
                streams[node] = self._new(3, 0)
            elif node.op == "output":
                self.out = streams[node.args[0]]
            elif node.target in SUMS and all(part in streams for part in node.args):
                streams[node] = self._tied(*(streams[part] for part in node.args))
            elif node.target is torch.cat and (parts := _joined(node)) and all(part in streams for part in parts):
                streams[node] = torch.cat([streams[part] for part in parts])
            elif before is None:
                raise _not_followed(f"{node.op} {node.target}")
            elif node.op == "call_module":
                streams[node] = self._through(str(node.target), modules[str(node.target)], before)
            elif (node.target in FUNCTIONS) if node.op == "call_function" else (node.target in METHODS):
                streams[node] = before
            else:
                raise _not_followed(f"{node.op} {node.target}")
        roots = torch.tensor([self._root(unit) for unit in range(len(self._parents))])
        kept, number = roots.unique(return_inverse=True)
        self.layer = torch.tensor(self._layer)[kept]  # per unit: the first layer that computes it; 0: the image
        self.layers = {n: Layer(number[x.inputs], number[x.makes], x.groups) for n, x in self.layers.items()}
        self.norms = {name: number[units] for name, units in self.norms.items()}
        self.out = number[self.out]

    def _through(self, name: str, module: nn.Module, before: Tensor) -> Tensor:
        """Return the units after a module."""
        if isinstance(module, MODULES):
            return before
        if type(module) is nn.BatchNorm2d and name not in self.norms and module.affine and module.track_running_stats:
            self.norms[name] = before
            return before
        if isinstance(module, nn.Conv2d | nn.Linear) and name not in self.layers:
            made = self._new(len(module.weight), len(self.layers) + 1)
            groups = module.groups if isinstance(module, nn.Conv2d) else 1
            columns = before.repeat_interleave(groups * module.weight.shape[1] // len(before))
            self.layers[name] = Layer(columns, made, groups)
            return made
        raise _not_followed(f"{name}, a {type(module).__name__}")

    def _new(self, count: int, layer: int) -> Tensor:
        first = len(self._parents)
        self._parents += range(first, first + count)
        self._layer += [layer] * count
        return torch.arange(first, first + count)

    def _root(self, unit: int) -> int:
        while self._parents[unit] != unit:
            unit = self._parents[unit]
        return unit

    def _tied(self, one: Tensor, other: Tensor) -> Tensor:
        for a, b in zip(one.tolist(), other.tolist(), strict=True):
            low, high = sorted((self._root(a), self._root(b)))
            self._parents[high] = low
        return one

    def __len__(self) -> int:
        return len(self.layer)

    def between(self, name: str, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Return masks (out, in / groups) of a layer's weight: entries that lead to `chosen` units, and entries from
        such.
        """
        layer = self.layers[name]
        return chosen[layer.makes][:, None].expand(layer.reads.shape), chosen[layer.reads]

    def within(self, name: str, parameter: Tensor, chosen: Tensor) -> Tensor:
        """Return a mask, in the shape of a named parameter, of the entries that concern only `chosen` units."""
        module, _, kind = name.rpartition(".")
        if module in self.norms:
            return chosen[self.norms[module]]
        if kind == "bias":
            return chosen[self.layers[module].makes]
        into, of = self.between(module, chosen)
        return wide(into & of, parameter)

    def positions(self) -> Tensor:
        """Return the relative position of each unit in its layer, from 0 to below 1."""
        positions = torch.zeros(len(self))
        for number in self.layer.unique():
            of_layer = (self.layer == number).nonzero()[:, 0]
            positions[of_layer] = torch.arange(len(of_layer)) / len(of_layer)
        return positions

    @torch.no_grad()
    def activations(self, backbone: nn.Module, batches: Iterable[Tensor]) -> Tensor:
        """Return the mean absolute output of each unit over images (B, 3, H, W) and positions, as its readers get it,
        (units,).

        That is after ReLU and pooling; with several readers it is their mean. It is 0 for the images' channels.
        """
        device = next(backbone.parameters()).device
        total, readers = (torch.zeros(len(self), dtype=torch.float64, device=device) for _ in range(2))

        def add(units: Tensor, seen: Tensor) -> None:
            size = seen.detach().double().abs()
            mean = size.mean((2, 3)) if size.ndim == 4 else size
            total.index_add_(0, units.to(device), mean.sum(0))
            readers.index_add_(0, units.to(device), torch.full_like(mean[0], float(len(mean))))

        hooks = [
            backbone.get_submodule(name).register_forward_pre_hook(
                lambda _, seen, units=layer.inputs: add(units, *seen)
            )
            for name, layer in self.layers.items()
        ]
        hooks.append(backbone.register_forward_hook(lambda module, seen, out: add(self.out, out)))
        try:
            for images in batches:
                backbone(images)
        finally:
            for hook in hooks:
                hook.remove()
        return (total / readers.clamp(min=1)).masked_fill(self.layer.to(device) == 0, 0.0)


def wide(mask: Tensor, weight: Tensor) -> Tensor:
    """Reshape a mask (out, in) of connections to a layer's weight."""
    return mask.view(*mask.shape, *(1,) * (weight.ndim - 2)).expand(weight.shape)


def _joined(node: fx.Node) -> Sequence[object]:
    """Return the inputs that `torch.cat` concatenates along the channels; empty for another dimension."""
    parts = node.args[0]
    return parts if isinstance(parts, Sequence) and node.args[1:] == (1,) else ()


class HeldNorm(nn.BatchNorm2d):
    """BatchNorm in which `held` channels (C,) use running statistics in training, and keep them."""

    held: Tensor | None = None
    running_mean: Tensor
    running_var: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, C, H, W) to the same shape."""
        if not self.training or self.held is None:
            return super().forward(x)
        mean, var = self.running_mean.clone(), self.running_var.clone()
        then = F.batch_norm(x, mean, var, self.weight, self.bias, eps=self.eps)
        new_mean, new_var = mean.clone(), var.clone()
        out = F.batch_norm(x, new_mean, new_var, self.weight, self.bias, True, self.momentum or 0.0, self.eps)
        self.running_mean.copy_(torch.where(self.held, mean, new_mean))
        self.running_var.copy_(torch.where(self.held, var, new_var))
        return torch.where(self.held[:, None, None], then, out)

    @classmethod
    def of(cls, norm: nn.BatchNorm2d) -> "HeldNorm":
        """Create one with the tensors of another."""
        made = cls(norm.num_features, norm.eps, norm.momentum)
        made.load_state_dict(norm.state_dict())
        return made


def _not_followed(what: str) -> ConfigError:
    return ConfigError(
        f"this method assigns channels to tasks, and cannot trace those of this network through {what}; "
        f"use backbone=convnet, resnet18 or bsc"
    )
