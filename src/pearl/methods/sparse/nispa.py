"""NISPA: Neuro-Inspired Stability-Plasticity Adaptation for Continual Learning in Sparse Networks (Gurbuz & Dovrolis,
ICML 2022).

A network with few connections, as many from beginning to end, is rewired while it learns: phase by phase fewer units,
those that are most active, are chosen to become stable. What leads from others to these is cut, and grows again into
others, from which later tasks are made.
"""

import math
from collections.abc import Iterator
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from pearl.data.batches import Task
from pearl.methods.base import Phase
from pearl.methods.sparse.held_out import held_out
from pearl.methods.sparse.stable_units import HoldOut, Masks, StableUnits
from pearl.methods.sparse.units import wide
from pearl.nn.growing import TaskTensors
from pearl.settings.declared import PhaseSpec

LEAST = 5  # percent of activation below which there is no further phase


class Nispa(StableUnits):
    """Sparse connections, most of them between units that serve no task yet; a task ends when rewiring costs accuracy.

    Kernels of convolutions come and go as a whole; the layer that sees the image is dense. A task's logits are compared
    among its own classes alone; the authors put zeros in the place of all others. Their head has all classes from the
    start, into which connections can grow before a task comes; here a new head's are drawn when its task begins. Where
    a connection of a unit that has none left is grown, all its places before a linear layer are one unit; theirs looks
    at the first place.

    Options:
        density: share of connections that there are.
        step_size_param: phases after which the share of activation that stable units have would be 0; it falls with a
            cosine.
        recovery_perc: percent points of held-out accuracy below the best phase, at which a task ends.
        hold_out: share of a task's training images that epochs and the end of a task are chosen by.
    """

    may_not_matter = ("recovery_perc",)  # if the accuracy falls by more or by nothing
    phases = (PhaseSpec("nispa", images=lambda task: [task.kept(task.options["hold_out"])] * 2, at_least=True),)

    def __init__(
        self,
        backbone: nn.Module,
        *,
        density: Annotated[float, Field(gt=0, le=1)] = 0.1,
        step_size_param: Annotated[int, Field(ge=1, strict=True)] = 30,
        recovery_perc: Annotated[float, Field(ge=0)] = 2.5,
        hold_out: HoldOut = 0.1,
    ) -> None:
        super().__init__(backbone, hold_out)
        self.density, self.step_size_param, self.recovery_perc = density, step_size_param, recovery_perc
        self.open = TaskTensors(buffers=True)  # by a layer's name, which connections (out, in) there are
        for name, layer in self.units.layers.items():
            dense = bool((self.units.layer[layer.inputs] == 0).all())
            self.open.add(name, torch.rand(layer.reads.shape) < (1.0 if dense else density))

    def closed(self, name: str) -> Tensor:
        """See `StableUnits.closed`."""
        return ~self.open[name]

    def share(self, phase: int) -> float:
        """Percent of a layer's activation that stable units have to have after a phase, counted from 1."""
        return 50 * (1 + math.cos(math.pi * phase / self.step_size_param))

    def learn(self, task: Task) -> Iterator[Phase]:
        """Phases of training, with fewer and fewer units chosen between them, until the accuracy falls."""
        kept, held = held_out(task, self.hold_out)
        head = self.begin(task)
        head_open = (torch.rand(head.weight.shape) < self.density).to(self.device)
        with torch.no_grad():
            head.weight.mul_(head_open)
        chosen, at, top = torch.ones_like(self.stable), 0, 0.0
        while True:
            at += 1
            phase, best = self.phase("nispa", kept, held, head, head_closed=~head_open)
            yield phase
            reached, share = best.restore(), self.share(at)
            if at > 1 and (share <= LEAST or (at > 2 and reached < top - self.recovery_perc)):
                break
            top, before = max(top, reached), self.snapshot(head) | {"chosen": chosen}
            activations = self.look(kept)
            chosen = self.stable | self.candidates(activations, share)
            self.rewire(chosen)
            head_open &= chosen[self.units.out]
            with torch.no_grad():
                head.weight.mul_(head_open)
        self.put_back(before, head)
        self.settle(before["chosen"])

    def candidates(self, activations: Tensor, share: float) -> Tensor:
        """Of each layer the fewest units, the most active ones, that have `share` percent of its activation."""
        chosen = torch.zeros_like(self.stable)
        layer = self.units.layer.to(chosen.device)
        for number in range(1, int(layer.max()) + 1):
            units = (layer == number).nonzero()[:, 0]
            own, order = activations[units].sort(descending=True, stable=True)
            if own.sum() > 0:
                reached = own.cumsum(0) >= share / 100 * own.sum() * (1 - 1e-9)
                chosen[units[order[: int((~reached).sum()) + 1]]] = True
        return chosen

    @torch.no_grad()
    def rewire(self, stable: Tensor) -> None:
        """Cut what leads from others to `stable` units, and let as many connections of the layer grow into others."""
        for name, layer in self.units.layers.items():
            weight, there = self.backbone.get_parameter(f"{name}.weight"), self.open[name]
            into, of = self.units.between(name, stable)
            cut = there & into & ~of
            there &= ~cut
            free = ~there & ~into
            new = self.grown(there, free & ~of, free, layer.reads.to(there.device), stable, int(cut.sum()))
            there |= new
            weight.masked_fill_(wide(~there, weight), 0.0)
            own = weight[weight != 0].cpu()
            mean, std = (own.mean(), own.std()) if len(own) > 1 else (torch.tensor(0.0), torch.tensor(0.0))
            drawn = (mean + std * torch.randn(weight.shape)).to(weight)
            weight.copy_(torch.where(wide(new, weight), drawn, weight))

    def grown(self, there: Tensor, plastic: Tensor, free: Tensor, reads: Tensor, stable: Tensor, count: int) -> Tensor:
        """Which `count` connections (out, in) grow: first one of each unit that has none left, then any that is `free`.

        `plastic` are those of them that come from units which are not stable. What does not fit is lost.
        """
        chance = torch.rand(free.shape).to(free.device)
        new = torch.zeros_like(free)
        deaf = torch.ones_like(stable)
        deaf[reads[there]] = False
        first = chance.masked_fill(~(plastic & deaf[reads]), -1.0).flatten()
        # the likeliest of each unit's
        best = torch.full((len(stable),), -1.0, device=free.device).scatter_reduce(0, reads.flatten(), first, "amax")
        repairs = ((first >= 0) & (first == best[reads.flatten()])).nonzero()[:, 0]
        repairs = repairs[torch.randperm(len(repairs)).to(free.device)[:count]]
        new.view(-1)[repairs] = True
        rest = chance.masked_fill(~free | new, -1.0).flatten()
        order = rest.argsort(descending=True, stable=True)[: min(count - len(repairs), int((rest >= 0).sum()))]
        new.view(-1)[order] = True
        return new

    def snapshot(self, head: nn.Linear) -> Masks:
        """The network, its connections and the newest head as they are."""
        return {name: value.clone() for name, value in self._parts(head).state_dict().items()}

    def put_back(self, tensors: Masks, head: nn.Linear) -> None:
        """Make the network again what it was."""
        parts = self._parts(head)
        parts.load_state_dict({name: tensors[name] for name in parts.state_dict()})

    def _parts(self, head: nn.Linear) -> nn.ModuleList:
        return nn.ModuleList([self.backbone, self.open, head])
