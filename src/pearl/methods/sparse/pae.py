"""PAE: Packing-and-Expanding (Hung et al., ICMR 2019).

Each task trains the free weights and uses all older ones. Then its own weights are freed gradually, as far as its
accuracy allows. If too few weights are free for a task, the network grows.
"""

import copy
import math
from collections.abc import Generator, Iterator
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from pearl.data.batches import Batch, Task
from pearl.methods.base import Phase, own_loss
from pearl.methods.common.subnetworks import SubNetworks
from pearl.methods.sparse.held_out import accuracy, held_out
from pearl.methods.sparse.masks import FREE, HIDDEN, Owners, cubic, held, weight_names
from pearl.methods.sparse.stable_units import HoldOut
from pearl.methods.sparse.units import Units
from pearl.nn.functional import functional_call
from pearl.nn.task_modules import TaskTensors
from pearl.settings.declared import Phases, PhaseSpec
from pearl.settings.derived_defaults import DerivedDefault, stream_length

Multiplier = Annotated[float, Field(ge=1)]
Percent = Annotated[float, Field(ge=0, le=100)]
Tasks = Annotated[Annotated[int, Field(ge=1, strict=True)] | Literal["auto"], DerivedDefault(stream_length)]
Goal = Literal["scratch", "finetuned"]
OnGrowth = Literal["restart", "continue"]

TARGETS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)  # shares of a layer freed, one after the other
RAMP, EVERY = 0.2, 10  # the first part of a phase, and its steps, in which weights are freed
GROWTH = 0.5  # growth steps, as a multiple of the first size


def compacting(names: tuple[str, ...], *groups: str) -> tuple[PhaseSpec, ...]:
    """Return the phases of a method that grows and frees weights; their number depends on accuracy."""
    kept = lambda task: task.kept(task.options["hold_out"])  # noqa: E731
    return (
        PhaseSpec(names[0], "later", kept, groups=groups),
        PhaseSpec(names[1], "all", kept, at_least=True, groups=groups),
        PhaseSpec(names[2], "all", lambda task: [], at_least=True, groups=groups),
        *(PhaseSpec(name, "later", kept, groups=groups) for name in names[3:]),
    )


class Pae(SubNetworks):
    """One network whose weights belong to tasks, as in PackNet; each task has its own norm layers, biases and head.

    It follows the authors' comparison on CIFAR-100 (ivclab/CPG), where both methods have the same trainer. The given
    network is the maximum size, so that the result is not larger than another method's: it starts with the first
    channels of each layer, a share of sqrt(1 / max_multiplier). A pretrained network is complete from the start. The
    goal of a task is the accuracy of a separate network of the first size; for the first task it is its own accuracy.
    Decisions use the accuracy on held-out images without augmentation; the authors use test images, and augmented ones.

    Options:
        max_multiplier: maximum size relative to the first network.
        goal: initial weights of the separate network for a task: random, or those learnt so far.
        train_accuracy: training accuracy in percent that a task needs before, and while, weights are freed beyond
            necessity.
        tasks: number of tasks, so that the full network reserves a share for each, regardless of the goal. `auto` is
            the stream's length; a model expects one more.
        hold_out: share of a task's training images held out for decisions.
        on_growth: continuation of a task when the network has grown: `restart` from the weights before the task, as the
            authors do, or `continue` from those trained so far.
    """

    task_identity = True
    backbones = "convolutional"
    names: tuple[str, ...] = ("pae_goal", "pae", "pae_prune")
    may_not_matter: tuple[str, ...] = ("pae_goal",)  # of which an accuracy is all that counts
    phases: Phases = compacting(names, "weights")

    def __init__(
        self,
        backbone: nn.Module,
        *,
        max_multiplier: Multiplier = 2.0,
        goal: Goal = "finetuned",
        train_accuracy: Percent = 95.0,
        tasks: Tasks = "auto",
        hold_out: HoldOut = 0.1,
        on_growth: OnGrowth = "restart",
    ) -> None:
        super().__init__(backbone)
        self.on_growth = on_growth
        whole = bool(backbone.pretrained)
        self.max_multiplier, self.goal = max_multiplier, "finetuned" if whole else goal
        self.train_accuracy, self.tasks, self.hold_out = train_accuracy, tasks, hold_out
        self.units = Units(backbone)
        named = dict(backbone.named_parameters())
        self.owners = Owners({name: named[name] for name in weight_names(backbone)})
        self.personal = [name for name in named if name not in self.owners]
        self.measured = [name for name, buffer in backbone.named_buffers() if buffer.is_floating_point()]
        self.own = TaskTensors()  # "t.parameter": norm layers and biases
        self.statistics = TaskTensors(buffers=True)  # "t.buffer": their running statistics
        self.multiplier: Tensor
        self.register_buffer("multiplier", torch.tensor(max_multiplier if whole else 1.0, dtype=torch.float64))
        self.shown: dict[str, Tensor] = {}  # during a task: the existing entries of each parameter
        for name, there in self.visible().items():
            if name in self.owners:
                self.owners[name].masked_fill_(~there, HIDDEN)

    @property
    def weights(self) -> dict[str, nn.Parameter]:
        """Return the parameters that have owners, by name."""
        return {name: self.backbone.get_parameter(name) for name in self.owners.names}

    def visible(self, multiplier: float | None = None) -> dict[str, Tensor]:
        """Return the entries of the backbone's parameters in a network of some size; by default its current size."""
        share = math.sqrt((multiplier or float(self.multiplier)) / self.max_multiplier)
        there = ((self.units.positions() < share - 1e-6) | (self.units.layer == 0)).to(self.device)
        return {name: self.units.within(name, p, there) for name, p in self.backbone.named_parameters()}

    # ------------------------------------------------------------------------------------------------------- learning

    def learn_own(self, task: Task) -> Iterator[Phase]:
        """Train, growing if needed; then free unneeded weights."""
        kept, held_back = held_out(task, self.hold_out)
        goal = (yield from self.rival(kept, held_back)) if task.id else None
        head = self.begin(task)
        start = copy.deepcopy(self.parts(head).state_dict())
        while True:
            self.owners.claim(task.id)
            yield self.phase(self.names[1], kept, head)
            reached = self.right(held_back)
            goal = reached if goal is None else goal
            met = reached >= goal and self.right(kept) > self.train_accuracy
            full = float(self.multiplier) >= self.max_multiplier
            if met or full or not task.id:
                break
            if self.on_growth == "restart":
                self.parts(head).load_state_dict(start)
            self.grow()
        yield from self.compact(kept, held_back, head, goal, met=met, short=full and reached < goal)
        yield from self.finish(kept, held_back, head)

    def rival(self, kept: Task, held_back: Task) -> Generator[Phase, None, float]:
        """Return the held-out accuracy in percent of a separate network of the first size for this task."""
        network, head = copy.deepcopy(self.backbone), self.heads.block(len(kept.classes)).to(self.device)
        network.load_state_dict(self.tensors_of(kept.id - 1), strict=False)
        if self.goal == "scratch":
            for module in network.modules():
                reset: Any = getattr(module, "reset_parameters", None)
                if reset:
                    reset()
        named = dict(network.requires_grad_(True).named_parameters())
        hidden = {name: ~there for name, there in self.visible(None if self.backbone.pretrained else 1.0).items()}
        with torch.no_grad():
            for name, mask in hidden.items():
                named[name].masked_fill_(mask, 0.0)
        weights = [named[name] for name in self.owners.names]
        groups = {"weights": weights, "": [*(named[name] for name in self.personal), *head.parameters()]}
        both = nn.Sequential(network, head)
        yield Phase(self.names[0], groups, own_loss(network, head, kept), both, kept, **held(named, hidden))
        return accuracy(both.eval(), held_back)

    @torch.no_grad()
    def begin(self, task: Task) -> nn.Linear:
        """Create a head, and copies of the last task's norm layers and biases, if any; return what is trained."""
        self.requires_grad_(False)
        t, fresh, self.shown = task.id, self.backbone.state_dict(), self.visible()
        before = self.tensors_of(t - 1) if t else fresh
        for name in self.personal:
            self.own.add(f"{t}.{name}", torch.where(self.shown[name], before[name], fresh[name]))
        for name in self.measured:
            self.statistics.add(f"{t}.{name}", before[name])
        head = self.heads.grow(len(task.classes)).to(self.device)
        for parameter in (*self.weights.values(), *self.own_of(t), *head.parameters()):
            parameter.requires_grad_(True)
        return head

    def own_of(self, t: int) -> list[nn.Parameter]:
        """Return norm layers and biases of a task."""
        return self.own.in_order(f"{t}.")

    def trained(self, name: str, t: int, head: nn.Linear) -> dict[str, list[nn.Parameter]]:
        """Return the parameters that a phase trains, by groups; among weights, only a task's own change."""
        return {"weights": [*self.weights.values()], "": [*self.own_of(t), *head.parameters()]}

    def phase(self, name: str, kept: Task, head: nn.Linear, extra: nn.Module | None = None) -> Phase:
        """Return a phase that trains the task's own weights, norm layers, biases and head."""
        loss = own_loss(lambda x: self.task_features(x, kept.id), head, kept)
        hooks = self.owners.held(self.weights, kept.id)
        return Phase(name, self.trained(name, kept.id, head), loss, extra, kept, **hooks)

    @torch.no_grad()
    def grow(self) -> None:
        """Make channels of the network visible; their weights are free."""
        self.multiplier.add_(GROWTH).clamp_(max=self.max_multiplier)
        self.shown = self.visible()
        for name in self.owners.names:
            self.owners[name].masked_fill_((self.owners[name] == HIDDEN) & self.shown[name], FREE)

    def compact(
        self, kept: Task, held_back: Task, head: nn.Linear, goal: float, *, met: bool, short: bool
    ) -> Iterator[Phase]:
        """Free more and more of the task's weights during training, and use the largest share that meets the goal.

        A network that has not `met` the goal frees nothing; a full one that falls `short` of it frees what later tasks
        need.
        """
        left = 1 if self.tasks == "auto" else max(self.tasks - kept.id - 1, 0)
        needed = 1 - round(1 / (left + 1), 1) if short else 0.0
        parts, before = self.parts(head), 0.0
        best = copy.deepcopy(parts.state_dict())
        targets = [target for target in TARGETS if target < needed + 1e-6] if needed else TARGETS
        for target in targets if (met or needed) and self.has_own(kept.id) else ():
            yield self.pruning(kept, head, before, target)
            before = target
            if not needed and self.right(kept) <= self.train_accuracy:
                break
            if needed or self.right(held_back) >= goal:
                best = copy.deepcopy(parts.state_dict())
        parts.load_state_dict(best)

    def has_own(self, t: int) -> bool:
        """Return True if any weight is task t's; a full network may have none left."""
        return any(bool((self.owners[name] == t).any()) for name in self.owners.names)

    def pruning(self, kept: Task, head: nn.Linear, before: float, target: float) -> Phase:
        """Return a phase that frees weights from a share `before` to the `target`, and trains the remaining ones."""
        phase, weights = self.phase(self.names[2], kept, head), self.weights

        def free(_: Batch) -> None:
            ramp = max(1, round(RAMP * phase.planned))
            if phase.done <= ramp and (phase.done % EVERY == 0 or phase.done == ramp):
                self.owners.prune_to(weights, kept.id, cubic(phase.done / ramp, before, target))
            self.owners.clear(weights)  # momentum would move free weights

        phase.add_after_step(free)
        return phase

    def parts(self, head: nn.Linear) -> nn.ModuleList:
        """Return all tensors that a task changes."""
        return nn.ModuleList([self.backbone, self.own, self.statistics, self.owners, head])

    def finish(self, kept: Task, held_back: Task, head: nn.Linear) -> Iterator[Phase]:
        """End a task: it owns nothing in channels that the network has not grown to."""
        yield from ()
        with torch.no_grad():
            for name in self.personal:
                self.own[f"{kept.id}.{name}"].mul_(self.shown[name])
        self.shown = {}
        self.requires_grad_(False)

    # ------------------------------------------------------------------------------------------------------ answering

    def tensors_of(self, t: int) -> dict[str, Tensor]:
        """Return the tensors, by name, that turn the backbone into task t's sub-network."""
        personal = {name: self.own[f"{t}.{name}"] for name in self.personal}
        if self.shown and t == len(self.heads) - 1:
            personal = {name: value * self.shown[name] for name, value in personal.items()}
        statistics = {name: self.statistics[f"{t}.{name}"] for name in self.measured}
        return self.weights_of(t) | personal | statistics

    def weights_of(self, t: int) -> dict[str, Tensor]:
        """Return the weights that task t uses; all others are 0."""
        return self.owners.masked(self.weights, t)

    def right(self, part: Task) -> float:
        """Return the percentage of the newest task's images predicted correctly."""
        self.eval()
        return accuracy(lambda x: self.heads[part.id](self.task_features(x, part.id)), part)

    def task_features(self, x: Tensor, t: int) -> Tensor:
        """See `SubNetworks.task_features`."""
        return functional_call(self.backbone, self.tensors_of(t), (x,))

    def sub_network(self, t: int) -> tuple[nn.Module, dict[str, Tensor]]:
        """See `SubNetworks.sub_network`."""
        return self.backbone, self.tensors_of(t)

    def size(self) -> int:
        """Count the weights of the network at its current size; each task's norm layers, biases and head have full
        width.
        """
        grown = sum(int((self.owners[name] != HIDDEN).sum()) for name in self.owners.names)
        return grown + sum(parameter.numel() for module in (self.own, self.heads) for parameter in module.parameters())

    def facts(self, task: int) -> dict[str, Any]:
        """Return the size of the network, and the number of parameters that are not 0."""
        tensors = [*self.own.parameters(), *self.heads.parameters(), *self.owners.masked(self.weights, task).values()]
        return {"multiplier": float(self.multiplier), "nonzero": sum(int(tensor.count_nonzero()) for tensor in tensors)}
