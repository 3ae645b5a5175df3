"""Base of CLNP and NISPA: units of a task never change again, and have no inputs from units that may.

Outputs of old tasks are therefore constant, bit by bit, while all other units continue to train and may read stable
ones.
"""

from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn

from pearl.data.batches import Batch, Task
from pearl.methods.base import Method, Phase, own_loss
from pearl.methods.sparse.held_out import Best, accuracy
from pearl.methods.sparse.masks import held, nonzero
from pearl.methods.sparse.units import HeldNorm, Units, wide
from pearl.nn.functional import functional_call

HoldOut = Annotated[float, Field(gt=0, lt=1)]
Masks = dict[str, Tensor]


class StableUnits(Method):
    """One network whose units become stable task by task, and a head per task that reads only stable units.

    Units without a task are 0 after it, and initialised again in the next. BatchNorm, which the authors' networks do
    not have, belongs to each channel: a stable one keeps its scale, shift and running statistics.
    """

    task_local_loss = True
    task_identity = True
    backbones = "convolutional"

    def __init__(self, backbone: nn.Module, hold_out: float) -> None:
        super().__init__(backbone)
        self.hold_out = hold_out
        self.units = Units(backbone)
        for name in self.units.norms:
            backbone.set_submodule(name, HeldNorm.of(backbone.get_submodule(name)))  # type: ignore[arg-type]
        self.stable: Tensor
        self.register_buffer("stable", self.units.layer == 0)  # per unit: True if it belongs to a task

    def train(self, mode: bool = True) -> "StableUnits":
        """Set the mode; stable channels keep their statistics."""
        super().train(mode)
        for name, units in self.units.norms.items():
            self.backbone.get_submodule(name).held = self.stable[units]
        return self

    # --------------------------------------------------------------------------------------------------- what is fixed

    def closed(self, name: str) -> Tensor:
        """Return the connections (out, in) of a layer that do not exist: those into stable units from others."""
        into, of = self.units.between(name, self.stable)
        return into & ~of

    def frozen(self) -> Masks:
        """Return the entries of the backbone's parameters that belong to earlier tasks."""
        named = self.backbone.named_parameters()
        return {name: self.units.within(name, parameter, self.stable) for name, parameter in named}

    def fixed(self) -> Masks:
        """Return the entries that a task may not change: those, and missing connections."""
        masks = self.frozen()
        for name in self.units.layers:
            mask = masks[f"{name}.weight"]
            masks[f"{name}.weight"] = mask | wide(self.closed(name), mask)
        return masks

    # ------------------------------------------------------------------------------------------------------- learning

    @torch.no_grad()
    def begin(self, task: Task) -> nn.Linear:
        """Add a head for the task, and initialise entries without a task: He's by fan-out, as the authors do.

        The first task keeps pretrained weights.
        """
        head = self.heads.grow(len(task.classes)).to(self.device)
        fresh = task.id > 0 or not self.backbone.pretrained
        modules, frozen = dict(self.backbone.named_modules()), self.frozen()
        for name, parameter in self.backbone.named_parameters():
            module, _, kind = name.rpartition(".")
            value = parameter.detach()
            if fresh and module in self.units.norms:
                value = torch.full_like(parameter, float(kind == "weight"))
                norm: Any = modules[module]
                for running, start in ((norm.running_mean, 0.0), (norm.running_var, 1.0)):
                    running.masked_fill_(~frozen[name], start)
            elif fresh and kind == "bias":
                value = torch.zeros_like(parameter)
            elif fresh:
                drawn = nn.init.kaiming_normal_(torch.empty(parameter.shape), mode="fan_out", nonlinearity="relu")
                value = drawn.to(parameter)
            if module in self.units.layers and kind == "weight":
                value = value.masked_fill(wide(self.closed(module), parameter), 0.0)
            parameter.copy_(torch.where(frozen[name], parameter, value))
        self.requires_grad_(False)
        for parameter in (*self.backbone.parameters(), *head.parameters()):
            parameter.requires_grad_(True)
        return head

    def phase(
        self,
        name: str,
        kept: Task,
        held_out: Task,
        head: nn.Linear,
        *,
        l1: float = 0.0,
        head_closed: Tensor | None = None,
    ) -> tuple[Phase, Best]:
        """Return a phase on the images `kept`, and the best of its epochs by the held-out ones."""
        named = {f"backbone.{n}": p for n, p in self.backbone.named_parameters()}
        fixed = {f"backbone.{n}": mask for n, mask in self.fixed().items()}
        if head_closed is not None:
            named["head"], fixed["head"] = head.get_parameter("weight"), head_closed
        params = [*self.backbone.parameters(), *head.parameters()]
        cross_entropy = own_loss(self.backbone, head, kept)

        def loss(batch: Batch) -> Tensor:
            sizes = [parameter.abs().sum() for parameter in params] if l1 else []
            return cross_entropy(batch) + l1 * sum(sizes)

        def score() -> float:
            self.eval()
            right = accuracy(lambda x: head(self.backbone(x)), held_out)
            self.train()
            return right

        best = Best(nn.ModuleList([self.backbone, head]), score, len(kept))
        phase = Phase(name, params, loss, extra=best, data=kept, **held(named, fixed))
        phase.add_after_step(best.after_step)
        return phase, best

    def look(self, kept: Task, batch: int = 256) -> Tensor:
        """Return mean activations (units,) on a task's images, not augmented."""
        self.eval()
        return self.units.activations(self.backbone, (x for x, _, _ in kept.in_order(batch)))

    def accuracy(self, part: Task, stable: Tensor) -> float:
        """Return the accuracy in percent on the newest task's images if `stable` units and the head read only stable
        ones.
        """
        self.eval()
        weights: Masks = {}
        for name in self.units.layers:
            into, of = self.units.between(name, stable)
            weight = self.backbone.get_parameter(f"{name}.weight")
            weights[f"{name}.weight"] = weight.masked_fill(wide(into & ~of, weight), 0.0)
        heard, head = stable[self.units.out], self.heads[-1]
        return accuracy(lambda x: head(functional_call(self.backbone, weights, (x,)) * heard), part)

    @torch.no_grad()
    def settle(self, stable: Tensor) -> None:
        """End a task: `stable` becomes the stable units; all others are set to 0."""
        self.stable.copy_(stable)
        for name, mask in self.frozen().items():
            self.backbone.get_parameter(name).masked_fill_(~mask, 0.0)
        self.heads[-1].weight.masked_fill_(~stable[self.units.out], 0.0)
        self.requires_grad_(False)

    def facts(self, task: int) -> dict[str, Any]:
        """Return how many parameters are not 0, and how many units are stable."""
        inner = self.units.layer > 0
        return {
            "nonzero": nonzero(self),
            "units": int(inner.sum()),
            "stable_units": int(self.stable.cpu()[inner].sum()),
        }
