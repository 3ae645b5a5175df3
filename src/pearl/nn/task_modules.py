"""Containers that grow task by task and take their sizes from the file when loaded.

A new object can therefore load any run strictly.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from pearl.nn.precision import full, outside_autocast


class TaskTensors(nn.Module):
    """Named tensors, added as tasks arrive: parameters, or buffers if `buffers` (statistics, counters).

    Names may contain dots: in the state_dict they are written as slashes.
    """

    def __init__(self, *, buffers: bool = False) -> None:
        super().__init__()
        self._as_buffers = buffers

    def add(self, name: str, value: Tensor) -> Tensor:
        """Store a copy of `value`; parameters are trainable at first."""
        key, value = name.replace(".", "/"), value.detach().clone()
        if self._as_buffers:
            self.register_buffer(key, value)
            return value
        parameter = nn.Parameter(value)
        self.register_parameter(key, parameter)
        return parameter

    def _tensors(self) -> Mapping[str, Any]:
        return self._buffers if self._as_buffers else self._parameters

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors()[name.replace(".", "/")]

    def __contains__(self, name: str) -> bool:
        return name.replace(".", "/") in self._tensors()

    def __len__(self) -> int:
        return len(self._tensors())

    def in_order(self, prefix: str = "") -> list[nn.Parameter]:
        """Return the parameters whose names have this prefix, sorted by name.

        Needed to train parameters of earlier tasks: a file has its tensors in any order, and an optimizer's stored
        state refers to positions.
        """
        start = prefix.replace(".", "/")
        return [parameter for name, parameter in sorted(self.named_parameters()) if name.startswith(start)]

    @torch.no_grad()
    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, _metadata: Any, _strict: bool, missing: list[str], *_: Any
    ) -> None:
        # without the base class, which would copy every new tensor again, and outside of a mode that would inspect each
        # copy: a model may have tens of thousands of tensors
        loaded = {key.removeprefix(prefix): value for key, value in state_dict.items() if key.startswith(prefix)}
        with _disable_current_modes():
            for name, value in loaded.items():
                if name in self._tensors() and self[name].shape == value.shape:
                    self[name].copy_(value)
                else:
                    self.add(name, value)
        missing += [f"{prefix}{name}" for name in self._tensors() if name not in loaded]


class Grown(nn.ModuleList):
    """Modules of one kind, added when needed."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.make = make

    def grow(self) -> nn.Module:
        """Add a module."""
        self.append(self.make())
        return self[-1]

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        while any(key.startswith(f"{prefix}{len(self)}.") for key in state_dict):
            self.grow()
        super()._load_from_state_dict(state_dict, prefix, *args)


class LinearHead(nn.Linear):
    """A linear classifier in at least float32, also under autocast.

    With the 8 bits of bfloat16, close logits would be ties, which an arg-max gives to the earlier task.
    """

    def forward(self, features: Tensor) -> Tensor:
        """Map features (B, dim) to logits (B, classes), float32 unless features and weights are float64."""
        with outside_autocast(features):
            return F.linear(full(features), self.weight, self.bias)


class TaskHeads(nn.Module):
    """One linear classifier with bias per task; logits of all tasks in order of arrival, float32.

    A new classifier is initialised as `nn.Linear`, or, given `std`, with weights from N(0, std^2) and zero biases.
    """

    def __init__(self, dim: int, std: float | None = None) -> None:
        super().__init__()
        self.dim, self.std = dim, std
        self.blocks = nn.ModuleList()

    def grow(self, classes: int) -> nn.Linear:
        """Add the classifier of a new task."""
        block = self.block(max(classes, 1))
        if not classes:  # a task with only known classes
            for name, parameter in list(block.named_parameters()):
                setattr(block, name, nn.Parameter(parameter[:0].detach()))
            block.out_features = 0
        self.blocks.append(block)
        return block

    def block(self, classes: int) -> nn.Linear:
        """Return a new classifier for one task."""
        block = LinearHead(self.dim, classes)
        if self.std is not None:
            nn.init.normal_(block.weight, std=self.std)
            nn.init.zeros_(block.bias)
        return block

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, task: int) -> nn.Linear:
        return self.blocks[task]  # type: ignore[return-value]

    def __iter__(self) -> Iterator[nn.Linear]:
        return iter(self.blocks)  # type: ignore[arg-type]

    def sizes(self) -> list[int]:
        """Return the number of classes of each task."""
        return [block.out_features for block in self]

    def columns(self, task: int) -> slice:
        """Return the columns of a task's classes among all logits."""
        start = sum(self.sizes()[:task])
        return slice(start, start + self[task].out_features)

    def forward(self, features: Tensor) -> Tensor:
        """Map features (B, dim) to logits (B, classes so far)."""
        return torch.cat([block(features) for block in self], dim=1)

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        while (key := f"{prefix}blocks.{len(self)}.weight") in state_dict:
            self.grow(state_dict[key].shape[0])
        super()._load_from_state_dict(state_dict, prefix, *args)


class CosineHeads(TaskHeads):
    """Heads without bias whose logits are scale * cos(feature, weight): the norm of a weight does not favour its class.

    Gidaris & Komodakis (CVPR 2018); in class-incremental learning LUCIR (Hou et al., CVPR 2019), which trains the
    scale. All tasks share it; in training, one task's block returns cosines without it.
    """

    def __init__(self, dim: int, scale: float = 10.0, *, learnable: bool = False) -> None:
        super().__init__(dim)
        self.scale = nn.Parameter(torch.tensor(scale)) if learnable else None
        self.fixed = 1.0 if learnable else scale

    def block(self, classes: int) -> nn.Linear:
        """Return a block with a weight per class, in random directions."""
        return Cosines(self.dim, classes, self.fixed)

    def forward(self, features: Tensor) -> Tensor:
        """Map features (B, dim) to float32 logits (B, classes so far) between -scale and scale."""
        logits = super().forward(features)
        return logits if self.scale is None else self.scale * logits


class Cosines(nn.Linear):
    """Cosines of features and weights, times `scale`; 0 for a zero feature."""

    def __init__(self, dim: int, classes: int, scale: float = 1.0) -> None:
        super().__init__(dim, classes, bias=False)
        self.scale = scale

    def forward(self, features: Tensor) -> Tensor:
        """Map features (B, dim) to float32 logits (B, classes)."""
        with outside_autocast(features):  # bfloat16 cannot distinguish cosines near 1
            return self.scale * F.linear(F.normalize(full(features), dim=1), F.normalize(self.weight, dim=1))
