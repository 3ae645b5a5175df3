"""First-session adaptation: parts added to a network and trained on the first task, then frozen.

Each form is called with its network, which is unchanged.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from pearl.data.batches import Task
from pearl.methods.adapters.bottleneck import Adapters, Bottleneck
from pearl.methods.base import Network, Phase, own_loss
from pearl.methods.prototypes.extractor import FrozenExtractor
from pearl.nn import vit
from pearl.nn.functional import functional_call
from pearl.nn.task_modules import TaskTensors
from pearl.settings.declared import PhaseSpec, declared

Form = Literal["ssf", "adapter", "vpt_deep", "vpt_shallow", "finetune"]
FORMS: tuple[Form, ...] = ("ssf", "adapter", "vpt_deep", "vpt_shallow", "finetune")


class ScaleShift(nn.Module):
    """SSF (Lian et al., NeurIPS 2022): a scale and a shift after every layer of a plain ViT, close to 1 and 0."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        vit.require_plain(net)
        self.scales, self.shifts = TaskTensors(), TaskTensors()
        for name, layer in net.named_modules():
            if isinstance(layer, nn.Linear | nn.Conv2d | nn.LayerNorm):
                outputs = len(layer.weight)
                self.scales.add(name, torch.empty(outputs).normal_(1, 0.02))
                self.shifts.add(name, torch.empty(outputs).normal_(0, 0.02))
        self.layers = [name for name, layer in net.named_modules() if name in self.scales]
        # raises here if the network is unsupported
        vit.scale_shift(net, self._named(self.scales), self._named(self.shifts))

    def _named(self, tensors: TaskTensors) -> dict[str, Tensor]:
        return {layer: tensors[layer] for layer in self.layers}

    def forward(self, net: nn.Module, x: Tensor) -> Tensor:
        """Return features (B, dim)."""
        return functional_call(net, vit.scale_shift(net, self._named(self.scales), self._named(self.shifts)), (x,))


class Adapted(nn.Module):
    """AdaptFormer (Chen et al., NeurIPS 2022): an adapter parallel to the MLP of every block of a plain ViT."""

    def __init__(self, net: nn.Module, width: int) -> None:
        super().__init__()
        vit.require_plain(net)
        dim, depth = int(net.dim), len(net.blocks)  # type: ignore[arg-type]
        self.adapters = Adapters(range(depth), lambda: Bottleneck(dim, width, scale=0.1, dropout=0.1))

    def forward(self, net: nn.Module, x: Tensor) -> Tensor:
        """Return features (B, dim)."""
        return vit.features(net, x, adapters=self.adapters.by_block())


class Prompted(nn.Module):
    """VPT (Jia et al., ECCV 2022): prompts that stay to the end (shallow), or separate ones per block (deep).

    The outputs of a block's own prompts are unused, so that prompts are equivalent to a prefix of keys and values.
    """

    def __init__(self, net: nn.Module, length: int, *, deep: bool) -> None:
        super().__init__()
        vit.require_plain(net)
        self.deep = deep
        blocks = len(net.blocks) if deep else 1  # type: ignore[arg-type]
        self.prompts = nn.Parameter(torch.zeros(blocks, length, int(net.dim)))  # type: ignore[arg-type]

    def forward(self, net: Any, x: Tensor) -> Tensor:
        """Return features (B, dim)."""
        if not self.deep:
            return vit.features(net, x, prompts=self.prompts)
        prefixes = {i: vit.prefix_of(block, self.prompts[i][None]) for i, block in enumerate(net.blocks)}
        return vit.features(net, x, prefixes=prefixes)


class FineTuned(nn.Module):
    """A copy of any network, all of which is trained."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.copy = copy.deepcopy(net).requires_grad_(True)

    def forward(self, _: nn.Module, x: Tensor) -> Tensor:
        """Return features (B, dim)."""
        return self.copy(x)


def of_forms(method: str, forms: Sequence[Form]) -> tuple[PhaseSpec, ...]:
    """Return the phases of a method whose first task adds one of these forms; `tuning: auto` is the first on a ViT."""
    auto = ("auto", None)

    def chosen(form: Form) -> Callable[[Mapping[str, Any]], bool]:
        return lambda options: options.get("tuning") in ((form, *auto) if form == forms[0] else (form,))

    return tuple(PhaseSpec(f"{method}_{form}", "first", when=chosen(form)) for form in forms)


class FirstSession(FrozenExtractor):
    """A network to which the first task adds one of the `FORMS`; both are frozen afterwards."""

    def __init__(
        self,
        backbone: nn.Module,
        form: Form | None,
        phase: str,
        *,
        width: int,
        length: int,
        extractor: Literal["auto", "given", "first_task"] = "auto",
    ) -> None:
        super().__init__(backbone, extractor=extractor)
        self.tuned: nn.Module | None = None
        self.phase = f"{phase}_{form}"
        others = (spec for name, spec in declared(self).items() if not name.startswith(f"{phase}_"))
        self.phases = (*others, *([PhaseSpec(self.phase, "first")] if form else []))
        match form:
            case "ssf":
                self.tuned = ScaleShift(backbone)
            case "adapter":
                self.tuned = Adapted(backbone, width)
            case "vpt_deep" | "vpt_shallow":
                self.tuned = Prompted(backbone, length, deep=form == "vpt_deep")
            case "finetune":
                self.tuned = FineTuned(backbone)

    def tune(self, task: Task, head: nn.Module, network: Network) -> Iterator[Phase]:
        """Return the phase of the first task, none in later ones; with a temporary classifier on the features."""
        self.requires_grad_(False)
        if task.id or self.tuned is None:
            return
        params = [*self.tuned.requires_grad_(True).parameters(), *head.parameters()]
        yield Phase(self.phase, params, own_loss(network, head, task), extra=head, capturable=True)
        self.requires_grad_(False)

    def adapted(self, x: Tensor) -> Tensor:
        """Return features (B, dim) with the added parts."""
        return self.backbone(x) if self.tuned is None else self.tuned(self.backbone, x)
