"""The layers that a task adapts, and the low-rank updates of their weights.

Layers are not wrapped. An update is a tensor added to a weight, and the network is called with the sum:
`functional_call(backbone, weights, x)`.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from pearl.errors import ConfigError
from pearl.settings.patterns import compiled
from pearl.settings.registry import nearest

Fold = Literal["spatial", "view", "unfold"]
Init = Literal["kaiming", "svd", "svd_paper"]

_PROJECTIONS = ("query", "key", "value")  # in the order of a fused qkv layer
_BY_NETWORK = {"auto": ("key",), "all": ("linear",)}  # what a word means in networks with attention
_SEPARATE = {
    "query": {"query", "q", "q_proj", "to_q", "wq"},
    "key": {"key", "k", "k_proj", "to_k", "wk"},
    "value": {"value", "v", "v_proj", "to_v", "wv"},
}


@dataclass(frozen=True)
class Target:
    """A weight, or rows of a fused weight, that each task adapts."""

    parameter: str  # its name in the backbone
    shape: tuple[int, ...]  # of the adapted rows
    rows: tuple[int, int] | None = None  # of a fused projection; None means all
    part: str = ""  # "key", if only rows are adapted
    dense: bool = False  # a depthwise filter: a copy costs as much as an update of full rank

    @property
    def label(self) -> str:
        """A unique label, valid as a name of stored tensors."""
        return f"{self.parameter}:{self.part}" if self.part else self.parameter

    def read(self, weights: Mapping[str, Tensor]) -> Tensor:
        """Return the adapted part of this target's weight."""
        weight = weights[self.parameter]
        return weight if self.rows is None else weight[slice(*self.rows)]

    def add(self, weight: Tensor, delta: Tensor) -> Tensor:
        """Return the whole weight with `delta` (of this target's shape) added to the adapted rows."""
        if self.rows is not None:
            below = weight.shape[0] - self.rows[1]
            delta = torch.nn.functional.pad(delta, (*(0, 0) * (delta.ndim - 1), self.rows[0], below))
        return weight + delta

    def replace(self, weight: Tensor, value: Tensor) -> Tensor:
        """Return the whole weight with `value` (of this target's shape) in place of the adapted rows."""
        if self.rows is None:
            return value
        return torch.cat((weight[: self.rows[0]], value, weight[self.rows[1] :]))


def select_targets(backbone: nn.Module, spec: str | Sequence[str] = "auto") -> tuple[Target, ...]:
    """Return the targets of a specification, in the order of the network.

    `spec` is a word or a list of them: `key`, `query`, `value` (attention projections, fused or separate), `linear`,
    `conv` (every convolution that is not grouped), `pointwise` (those of them that are 1x1), `depthwise` (kept as a
    dense copy per task), or a regular expression searched in the parameters' names. `auto` is `key` in networks with
    attention, else `conv` and `depthwise`, as in the paper, and `linear`: the paper's networks have no linear layers,
    but those of an MLP-Mixer or a ConvNeXt hold most weights. `all` is `linear` in networks with attention, else as
    `auto`.

    Raises:
        ConfigError: a word that matches no layer, or layers named as a whole and in part.
    """
    words = [spec] if isinstance(spec, str) else list(spec)
    if not words:
        raise ConfigError("method.targets: empty; list the layers to adapt, or use auto")
    chosen: dict[str, Target] = {}
    for word in words:
        parts: tuple[str, ...] = (word,)
        if word in _BY_NETWORK:
            parts = _BY_NETWORK[word] if has_attention(backbone) else ("conv", "depthwise", "linear")
        selected = [target for part in parts for target in _matching(backbone, part)]
        if not selected:
            raise ConfigError(f"method.targets={word!r} matches no layer; {_hint(backbone, word)}")
        chosen.update({target.label: target for target in selected})
    twice = [target.label for target in chosen.values() if target.part and target.parameter in chosen]
    if twice:
        raise ConfigError(f"method.targets: {twice[0]} is named as a whole and in part; keep one of the two words")
    order = {name: position for position, (name, _) in enumerate(backbone.named_parameters())}
    return tuple(sorted(chosen.values(), key=lambda target: (order[target.parameter], target.rows or (0, 0))))


def has_attention(backbone: nn.Module) -> bool:
    """Return True if the backbone is a transformer, that is, has key projections."""
    return any(True for _ in _matching(backbone, "key"))


def _matching(backbone: nn.Module, word: str) -> Iterator[Target]:
    select = _KINDS.get(word)
    pattern = None if select or word in _PROJECTIONS else compiled(word, "method.targets")
    for name, module in backbone.named_modules():
        if not isinstance(module, nn.Linear | nn.Conv2d):
            continue
        weight, last = f"{name}.weight", name.rpartition(".")[2]
        depthwise = isinstance(module, nn.Conv2d) and _is_depthwise(module)
        whole = Target(weight, tuple(module.weight.shape), dense=depthwise)
        if word in _PROJECTIONS and isinstance(module, nn.Linear):
            if last in _SEPARATE[word]:
                yield whole
            elif last == "qkv" and module.out_features % 3 == 0:
                size, at = module.out_features // 3, _PROJECTIONS.index(word)
                yield Target(weight, (size, module.in_features), (at * size, (at + 1) * size), word)
        elif (select and select(module)) or (pattern and pattern.search(weight)):
            yield whole


def _is_depthwise(module: nn.Conv2d) -> bool:
    return module.groups == module.in_channels == module.out_channels and module.groups > 1


_KINDS: dict[str, Callable[[nn.Module], bool]] = {
    "linear": lambda m: isinstance(m, nn.Linear),
    "conv": lambda m: isinstance(m, nn.Conv2d) and m.groups == 1,
    "pointwise": lambda m: isinstance(m, nn.Conv2d) and m.groups == 1 and m.kernel_size == (1, 1),
    "depthwise": lambda m: isinstance(m, nn.Conv2d) and _is_depthwise(m),
}


def _hint(backbone: nn.Module, word: str) -> str:
    kinds = [kind for kind in (*_PROJECTIONS, *_KINDS) if any(True for _ in _matching(backbone, kind))]
    layers = [f"{name}.weight" for name, m in backbone.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    return f"{nearest(word, kinds)}, or give a regular expression for names such as {layers[0]} ... {layers[-1]}"


def task_norms(backbone: nn.Module) -> tuple[list[str], list[str]]:
    """Return the names of the parameters and statistics of norm layers that each task stores separately.

    These are all in a convolutional network, none in a ViT (PEARL, section 3.1: "only in CNNs"). In a network with
    attention and BatchNorm they are those with statistics, which would otherwise change for earlier tasks.
    """
    parameters: list[str] = []
    statistics: list[str] = []
    kinds = (_NormBase,) if has_attention(backbone) else (_NormBase, nn.GroupNorm, nn.LayerNorm)
    for name, module in backbone.named_modules():
        if isinstance(module, kinds):
            parameters += [f"{name}.{key}" for key, _ in module.named_parameters(recurse=False)]
            statistics += [f"{name}.{key}" for key, _ in module.named_buffers(recurse=False)]
    return parameters, statistics


def matrix_shape(shape: Sequence[int], fold: Fold) -> tuple[int, int]:
    """Return rows and columns of the 2-D view of a weight: (out, in) linear, (out, in, kh, kw) convolutional."""
    if len(shape) == 2:
        return shape[0], shape[1]
    out, into, kh, kw = shape
    return (out, into * kh * kw) if fold == "unfold" else (out * kh, into * kw)


def to_matrix(weight: Tensor, fold: Fold) -> Tensor:
    """Return the 2-D view of a weight.

    `spatial`: rows (out, kh), columns (in, kw); a rank-r matrix is a 1 x kw convolution to r channels followed by a
    kh x 1 one. `view`: the same shape filled in memory order. `unfold`: (out, in*kh*kw), a k x k convolution to r
    channels followed by a 1 x 1 one. The paper's parameter counts fix the shape of the first two, not their order.
    """
    shape = matrix_shape(weight.shape, fold)
    if weight.ndim == 4 and fold == "spatial":
        weight = weight.permute(0, 2, 1, 3)
    return weight.reshape(shape)


def from_matrix(matrix: Tensor, shape: Sequence[int], fold: Fold) -> Tensor:
    """Return the weight of `shape` with this 2-D view; the inverse of `to_matrix`."""
    if len(shape) == 2 or fold != "spatial":
        return matrix.reshape(shape)
    out, into, kh, kw = shape
    return matrix.reshape(out, kh, into, kw).permute(0, 2, 1, 3)


def updated(weight: Tensor, a: Tensor, b: Tensor, scale: float, fold: Fold) -> Tensor:
    """Return weight + scale * B A as a weight; A (r, n), B (m, r)."""
    if fold == "spatial" and weight.ndim == 4 and weight.is_contiguous(memory_format=torch.channels_last):
        # memory order is (out, kh, kw, in): with the columns of A as (kw, in) instead of (in, kw), this is the product
        # itself
        out, into, kh, kw = weight.shape
        columns = a.reshape(-1, into, kw).transpose(1, 2).reshape(-1, kw * into)
        rows = weight.permute(0, 2, 3, 1).reshape(out * kh, kw * into)
        return torch.addmm(rows, b, columns, alpha=scale).reshape(out, kh, kw, into).permute(0, 3, 1, 2)
    return weight + from_matrix((scale * b) @ a, weight.shape, fold)


def merged(backbone: nn.Module, updates: Mapping[Target, Tensor]) -> dict[str, Tensor]:
    """Return weights of the backbone, by name, with updates (of each target's shape) added to the adapted rows."""
    changed: dict[str, Tensor] = {}
    for target, update in updates.items():
        weight = changed.get(target.parameter, backbone.get_parameter(target.parameter))
        changed[target.parameter] = target.add(weight, update)
    return changed


def kaiming_factors(shape: tuple[int, int], rank: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Initialise as LoRA (Hu et al., 2022): A (rank, n) kaiming-uniform, B (m, rank) zero; on the device of `like`."""
    a = torch.empty(rank, shape[1])
    if rank:
        nn.init.kaiming_uniform_(a, a=math.sqrt(5))
    return a.to(like.device), torch.zeros(shape[0], rank, device=like.device)


def svd_factors(matrix: Tensor, rank: int, scale: float, init: Init) -> tuple[Tensor, Tensor]:
    """Return A (rank, n) and B (m, rank) from the truncated SVD of a task vector.

    `svd`: B = U S^(1/2), A = S^(1/2) V / scale, so that scale * B A is the best approximation of that rank.
    `svd_paper`: B = U S, A = S V, with S in both factors as equation 5 of the paper is printed.
    """
    u, s, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    u, s, v = u[:, :rank], s[:rank], v[:rank]
    if init == "svd_paper":
        return (s[:, None] * v).to(matrix), (u * s).to(matrix)
    return (s.sqrt()[:, None] * v / scale).to(matrix), (u * s.sqrt()).to(matrix)
