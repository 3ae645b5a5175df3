"""NISPA: Neuro-Inspired Stability-Plasticity Adaptation for Continual Learning in Sparse Networks (Gurbuz & Dovrolis,
ICML 2022).

A network with a constant, small number of connections is rewired during training: phase by phase fewer units, the most
active ones, are chosen to become stable. Connections from other units to these are cut, and as many grow into other
units, which later tasks use.
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
from pearl.nn.task_modules import TaskTensors
from pearl.settings.declared import PhaseSpec

LEAST = 5  # percentage of activation at which phases end


class Nispa(StableUnits):
    """Sparse connections, most of them between units without a task; a task ends when rewiring costs accuracy.

    A convolution's kernels are cut and grown as a whole; the layer that reads the image is dense. A task's logits are
    compared among its own classes only; the authors use zeros for all others. Their head has all classes from the
    start, so that connections can grow before a task arrives; here a new head's connections are drawn when its task
    begins. When a unit without connections gets one, all its positions before a linear layer count as one unit; the
    authors use the first position.

    Options:
        density: share of existing connections.
        step_size_param: phases after which the stable units' share of activation would be 0; it falls with a cosine.
        recovery_perc: a task ends when held-out accuracy is this many percent points below the best phase.
        hold_out: share of a task's training images held out to choose epochs and the end of a task.
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
        self.open = TaskTensors(buffers=True)  # by layer name: the existing connections (out, in)
        for name, layer in self.units.layers.items():
            dense = bool((self.units.layer[layer.inputs] == 0).all())
            self.open.add(name, torch.rand(layer.reads.shape) < (1.0 if dense else density))

    def closed(self, name: str) -> Tensor:
        """See `StableUnits.closed`."""
        return ~self.open[name]

    def share(self, phase: int) -> float:
        """Return the percentage of a layer's activation that stable units need after a phase, counted from 1."""
        return 50 * (1 + math.cos(math.pi * phase / self.step_size_param))

    def learn(self, task: Task) -> Iterator[Phase]:
        """Run phases of training, with fewer units chosen after each, until the accuracy falls."""
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
        """Return, per layer, the fewest units, the most active ones, with `share` percent of its activation."""
        chosen = torch.zeros_like(self.stable)
        layer = self.units.layer.to(chosen.device)
        for number in range(1, int(layer.max()) + 1):
            units = (layer == number).nonzero()[:, 0]
            activity, order = activations[units].sort(descending=True, stable=True)
            if activity.sum() > 0:
                reached = activity.cumsum(0) >= share / 100 * activity.sum() * (1 - 1e-9)
                chosen[units[order[: int((~reached).sum()) + 1]]] = True
        return chosen

    @torch.no_grad()
    def rewire(self, stable: Tensor) -> None:
        """Cut connections from other units to `stable` ones, and grow as many of the layer into other units."""
        for name, layer in self.units.layers.items():
            weight, there = self.backbone.get_parameter(f"{name}.weight"), self.open[name]
            into, of = self.units.between(name, stable)
            cut = there & into & ~of
            there &= ~cut
            free = ~there & ~into
            new = self.grown(there, free & ~of, free, layer.reads.to(there.device), stable, int(cut.sum()))
            there |= new
            weight.masked_fill_(wide(~there, weight), 0.0)
            connected = weight[weight != 0].cpu()
            mean, std = (
                (connected.mean(), connected.std()) if len(connected) > 1 else (torch.tensor(0.0), torch.tensor(0.0))
            )
            drawn = (mean + std * torch.randn(weight.shape)).to(weight)
            weight.copy_(torch.where(wide(new, weight), drawn, weight))

    def grown(self, there: Tensor, plastic: Tensor, free: Tensor, reads: Tensor, stable: Tensor, count: int) -> Tensor:
        """Return `count` new connections (out, in): first one for each unit without any, then any that are `free`.

        `plastic` are the free ones from units that are not stable. Connections without a place are dropped.
        """
        chance = torch.rand(free.shape).to(free.device)
        new = torch.zeros_like(free)
        deaf = torch.ones_like(stable)
        deaf[reads[there]] = False
        first = chance.masked_fill(~(plastic & deaf[reads]), -1.0).flatten()
        # the most likely one of each unit
        best = torch.full((len(stable),), -1.0, device=free.device).scatter_reduce(0, reads.flatten(), first, "amax")
        repairs = ((first >= 0) & (first == best[reads.flatten()])).nonzero()[:, 0]
        repairs = repairs[torch.randperm(len(repairs)).to(free.device)[:count]]
        new.view(-1)[repairs] = True
        rest = chance.masked_fill(~free | new, -1.0).flatten()
        order = rest.argsort(descending=True, stable=True)[: min(count - len(repairs), int((rest >= 0).sum()))]
        new.view(-1)[order] = True
        return new

    def snapshot(self, head: nn.Linear) -> Masks:
        """Return a copy of the network, its connections and the newest head."""
        return {name: value.clone() for name, value in self._parts(head).state_dict().items()}

    def put_back(self, tensors: Masks, head: nn.Linear) -> None:
        """Restore the network from a copy."""
        parts = self._parts(head)
        parts.load_state_dict({name: tensors[name] for name in parts.state_dict()})

    def _parts(self, head: nn.Linear) -> nn.ModuleList:
        return nn.ModuleList([self.backbone, self.open, head])
