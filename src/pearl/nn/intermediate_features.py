"""Intermediate features of a network: pooled outputs of inner layers, concatenated with the final features.

Inner layers separate classes that the last one, trained on a single task, merges.
"""

import re
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from pearl.nn.precision import full

Layers = Literal["auto", "final"]


def inner_layers(backbone: nn.Module, layers: Layers = "auto") -> tuple[str, ...]:
    """Return the names of the modules whose outputs are pooled; the final features are added to them.

    `auto`: in a network of constant resolution (ViT, MLP-Mixer) the blocks at 1/2, 3/4 and all of its depth; in one
    with stages (ResNet, BSC, Swin, ConvNeXt) the last module of the last three stages before the final one, whose mean
    is the final feature. Stages are `layer1`, `layer2`, ... or what timm lists in `feature_info`; a network with
    neither has only its final features, as with `final`.
    """
    if layers == "final":
        return ()
    there = dict(backbone.named_modules())
    # timm has a list of mappings, or an object with one
    info = getattr(backbone, "feature_info", None) or []
    listed = [(str(entry["module"]), entry["reduction"]) for entry in getattr(info, "info", info) if "module" in entry]
    listed = [(name, reduction) for name, reduction in listed if name in there]
    if not listed:
        stages = sorted(name for name in there if re.fullmatch(r"layer\d+", name))
        listed = [(name, at) for at, name in enumerate(stages)]
    last_of = {reduction: name for name, reduction in listed}
    if len(last_of) == 1 and len(listed) > 1:
        depth = len(listed)
        positions = sorted({max(1, round(depth * share)) - 1 for share in (0.5, 0.75, 1.0)})
        return tuple(listed[position][0] for position in positions)
    return tuple([*last_of.values()][:-1][-3:])


class WithInner(nn.Module):
    """A network that maps images (B, 3, H, W) to float32 (B, p): its pooled inner layers, then its features.

    Pooling of a map (B, C, H, W) or (B, H, W, C) is the mean and standard deviation of each channel over space; of
    tokens (B, N, C) the class token, if any, and the mean of the others.
    """

    def __init__(self, network: nn.Module, layers: Sequence[str]) -> None:
        """Hook `network`, which must be a copy without other users (see `folding.with_weights`)."""
        super().__init__()
        self.network = network
        self._seen: dict[int, dict[str, Tensor]] = {}  # by thread: several may use it at once
        self.layers = tuple(layers)
        self._pool = pooling(network)
        for name in self.layers:
            network.get_submodule(name).register_forward_hook(partial(self._note, name))

    def _note(self, name: str, *call: Any) -> None:
        if (seen := self._seen.get(threading.get_ident())) is not None:  # called from `forward`
            seen[name] = self._pool(call[-1])  # called with module, inputs and output

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        parts = self._seen[threading.get_ident()] = {}
        features = full(self.network(x))
        del self._seen[threading.get_ident()]
        return torch.cat([*(parts[name] for name in self.layers), features], dim=1)


def pooling(network: nn.Module) -> Callable[[Tensor], Tensor]:
    """Return the function that pools the output of a layer of this network to one vector per image."""
    channels_last = getattr(network, "output_fmt", None) == "NHWC"
    return partial(pooled, channels_last=channels_last, prefix=int(getattr(network, "num_prefix_tokens", 0)))


def pooled(out: Tensor, *, channels_last: bool = False, prefix: int = 0) -> Tensor:
    """Pool a layer's output to a float32 vector per image; see `WithInner`."""
    out = full(out)
    if out.ndim == 4:
        space = (1, 2) if channels_last else (2, 3)
        return torch.cat([out.mean(space), out.var(space, unbiased=False).clamp(min=1e-12).sqrt()], dim=1)
    if out.ndim == 3:
        tokens = out[:, prefix:].mean(1)
        return torch.cat([out[:, 0], tokens], dim=1) if prefix else tokens
    return out.flatten(1)
