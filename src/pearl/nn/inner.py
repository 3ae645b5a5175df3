"""What a network makes of an image on its way: pooled outputs of inner layers beside the final features.

Inner layers tell classes apart that the last one, trained on a single task, has folded into one.
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
    """Names of the modules whose outputs are looked at; the final features come on top.

    `auto`: of a network that keeps its resolution (ViT, MLP-Mixer) the blocks at 1/2, 3/4 and all of its depth; of one
    with stages (ResNet, BSC, Swin, ConvNeXt) the last module of the last three stages before the final one, whose mean
    is the final feature. Stages are `layer1`, `layer2`, ... or what timm lists in `feature_info`; a network with
    neither has its final features alone, as all have with `final`.
    """
    if layers == "final":
        return ()
    there = dict(backbone.named_modules())
    # timm keeps a list of mappings, or an object around one
    info = getattr(backbone, "feature_info", None) or []
    listed = [(str(entry["module"]), entry["reduction"]) for entry in getattr(info, "info", info) if "module" in entry]
    listed = [(name, reduction) for name, reduction in listed if name in there]
    if not listed:
        stages = sorted(name for name in there if re.fullmatch(r"layer\d+", name))
        listed = [(name, at) for at, name in enumerate(stages)]
    last_of = {reduction: name for name, reduction in listed}
    if len(last_of) == 1 and len(listed) > 1:
        depth = len(listed)
        places = sorted({max(1, round(depth * share)) - 1 for share in (0.5, 0.75, 1.0)})
        return tuple(listed[place][0] for place in places)
    return tuple([*last_of.values()][:-1][-3:])


class WithInner(nn.Module):
    """A network that gives images (B, 3, H, W) -> float32 (B, p): its inner layers, pooled, then its features.

    Of a map (B, C, H, W) or (B, H, W, C) that is the mean and the standard deviation of each channel over space; of
    tokens (B, N, C) the class token, where there is one, and the mean of the others.
    """

    def __init__(self, network: nn.Module, layers: Sequence[str]) -> None:
        """`network` gets hooks: it is a copy that nobody else uses (see `folding.with_weights`)."""
        super().__init__()
        self.network = network
        self._seen: dict[int, dict[str, Tensor]] = {}  # by thread: several may use it at once
        self._layers = tuple(layers)
        self._pool = pooling(network)
        for name in self._layers:
            network.get_submodule(name).register_forward_hook(partial(self._note, name))

    def _note(self, name: str, *call: Any) -> None:
        self._seen[threading.get_ident()][name] = self._pool(call[-1])  # called with module, inputs and output

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        parts = self._seen[threading.get_ident()] = {}
        features = full(self.network(x))
        del self._seen[threading.get_ident()]
        return torch.cat([*(parts[name] for name in self._layers), features], dim=1)


def pooling(network: nn.Module) -> Callable[[Tensor], Tensor]:
    """What makes a vector per image of the output of a layer of this network."""
    channels_last = getattr(network, "output_fmt", None) == "NHWC"
    return partial(pooled, channels_last=channels_last, prefix=int(getattr(network, "num_prefix_tokens", 0)))


def pooled(out: Tensor, *, channels_last: bool = False, prefix: int = 0) -> Tensor:
    """One float32 vector per image of a layer's output; see `WithInner`."""
    out = full(out)
    if out.ndim == 4:
        space = (1, 2) if channels_last else (2, 3)
        return torch.cat([out.mean(space), out.var(space, unbiased=False).clamp(min=1e-12).sqrt()], dim=1)
    if out.ndim == 3:
        tokens = out[:, prefix:].mean(1)
        return torch.cat([out[:, 0], tokens], dim=1) if prefix else tokens
    return out.flatten(1)
