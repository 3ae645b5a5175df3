"""What a method is: a generator that yields stretches of training, and a forward pass over all classes seen."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, Literal, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pearl.data.batches import Batch, Batches, Task
from pearl.nn.fast.folding import folded, norms_after_convs
from pearl.nn.growing import TaskHeads
from pearl.nn.once import once
from pearl.settings.declared import Phases, UpcomingTask
from pearl.storage.checkpoint import in_weights

Network = Callable[[Tensor], Tensor]  # images (B, 3, H, W) -> features (B, dim), or logits


@dataclass
class Phase:
    """One stretch of training. The engine owns the loop; the method owns what is learnt.

    `name` finds the settings in the recipe (`train.phases.NAME`); it may come again, as often as what was learnt asks
    for. `params` is what trains, or a mapping of it by the names of groups, whose settings may differ
    (`train.phases.NAME.groups.GROUP`). `loss` maps a batch to a scalar, a mean over its images. `extra` is a network
    that is trained beside the method, such as PEARL's probe: what a later phase reads of it must survive a restart.
    `data` are other batches than those of the task's images. `steady`: for batches of one size, `loss` and
    `after_backward` always do the same on the device and nothing on the host, so that a step can be recorded and
    replayed (see `graphs`): no reading of tensors, no choices, no random numbers but the device's. `reads` are the
    modules that the loss reads and changes; beside them it reads the task and plain values that it holds, and nothing
    else. So runs that share the phase train it once (see `training.content`). Without `reads` every run does.

    While it is trained, `done` says how many steps have been made, of all that are `planned`, `per_epoch` of them in an
    epoch; then `seconds` how long it took, and `reused` that another run has trained it.

    Several processes may learn together (see `training.world`); a method need not know. Each of them calls `loss` with
    its share of a batch and its own random numbers; gradients and batch statistics are then those of the whole batch.
    The other hooks, and what `learn` does between two phases, see the same in all of them: `after_step` the whole
    batch, and random numbers equal until the phase begins. So what they keep stays equal. What `loss` keeps for itself
    does not.
    """

    name: str
    params: Iterable[nn.Parameter] | Mapping[str, Iterable[nn.Parameter]]
    loss: Callable[[Batch], Tensor]
    extra: nn.Module | None = None
    data: Batches | None = None
    steady: bool = False
    reads: Sequence[nn.Module] = ()
    hands_on: bool = False  # the next phase goes on with what this one's optimizer knows of the parameters
    after_backward: Callable[[], None] | None = None  # masks, gradient projections
    project: Callable[[list[Tensor]], None] | None = None  # after the optimizer's step; with the values before it
    after_step: Callable[[Batch], None] | None = None  # memories, moving averages
    groups: dict[str, list[nn.Parameter]] = field(init=False)
    done: int = field(default=0, init=False)
    planned: int = field(default=0, init=False)
    per_epoch: int = field(default=0, init=False)
    seconds: float = field(default=0.0, init=False)
    reused: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        named = self.params if isinstance(self.params, Mapping) else {"": self.params}
        self.groups = {name: list(params) for name, params in named.items()}
        if not isinstance(self.name, str):
            raise TypeError(f"a phase's name is a text, not {type(self.name).__name__}")
        if not self.trained or not all(isinstance(parameter, nn.Parameter) for parameter in self.trained):
            raise TypeError(f"phase {self.name}: its params must be parameters, one or more")
        if not callable(self.loss):
            raise TypeError(f"phase {self.name}: its loss must be a function of a batch")
        self.params = self.trained

    def then(self, step: Callable[[Batch], None]) -> None:
        """Do something more after each step, behind what `after_step` does so far."""
        before = self.after_step

        def after_step(batch: Batch) -> None:
            if before is not None:
                before(batch)
            step(batch)

        self.after_step = after_step

    @property
    def trained(self) -> list[nn.Parameter]:
        """All parameters, group by group; `project` gets their values in this order."""
        return [parameter for params in self.groups.values() for parameter in params]


@dataclass(frozen=True)
class Expert:
    """A sub-network for evaluation: images (B, 3, H, W) -> logits of its own columns.

    The experts of a method in turn give the logits of all classes seen, in order of arrival. One that is `frozen`
    will never change again, so its logits may be kept.
    """

    key: str
    forward: Network
    frozen: bool = False
    task: int | None = None  # it gives this task's logits, and is all that `forward(x, task)` asks


@dataclass(frozen=True, eq=False)
class Answers:
    """What was said of N images, for who counts it: arrays (N,).

    `true` are logit indices, `best` those of the answers among all classes, `best_own` among the classes of the image's
    own task; `sure` is the probability of `best`, from 0 to 1.
    """

    true: np.ndarray
    best: np.ndarray
    best_own: np.ndarray
    sure: np.ndarray

    @classmethod
    def of(cls, logits: Tensor, true: Tensor, own: Tensor) -> "Answers":
        """From logits (N, classes), logit indices (N,), and which classes are of an image's own task (N, classes)."""
        sure, best = logits.double().softmax(1).max(1)
        best_own = logits.masked_fill(~own, -torch.inf).argmax(1)
        return cls(*(part.cpu().numpy() for part in (true, best, best_own, sure)))

    @classmethod
    def joined(cls, parts: Sequence["Answers"]) -> "Answers":
        """The answers of several batches."""
        return cls(*(np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(cls)))

    def __getitem__(self, rows: np.ndarray) -> "Answers":
        """Those of some images."""
        return Answers(*(getattr(self, f.name)[rows] for f in fields(self)))


class Method(nn.Module):
    """Base of all methods. What is learnt is in the state_dict, and nowhere else.

    A subclass takes the backbone, has its hyper-parameters as keyword-only arguments, and defines `learn`.
    """

    oracle = False  # True: a task holds the data of all tasks so far
    # what it can learn on; `convolutional`: pearl's own networks, `residual`: those of them with residual blocks
    backbones: Literal["any", "convolutional", "residual", "vit"] = "any"
    shown_again = False  # True: a task may show classes that earlier ones have shown
    rehearsal = False  # True: it keeps images of past tasks
    couples = False  # True: a loss is no mean over images, but compares them or takes a norm over the whole batch
    domains = False  # True: made for tasks in which the same classes come again, in the same order, with another look
    own_classes = False  # True: a task's loss compares its own classes alone, so a single one is learnt from nothing
    task_identity = False  # True: made for task-IL; its class-IL puts the heads' raw logits side by side
    phases: Phases = ()  # the phases that `learn` may yield, see `declared`; names alone: each once in every task
    _given: dict[str, Any]
    untrained: tuple[str, ...] = ()  # parts of names of parameters that are drawn and never trained
    may_rest: tuple[str, ...] = ()  # phases in which a parameter that is trained may stay where it is
    may_not_matter: tuple[str, ...] = ()  # options and phases that may change nothing in a few steps, as thresholds do
    fast = True  # False: no faster form of the same function is used, in evaluation or in training

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        self.heads = TaskHeads(int(backbone.dim))  # type: ignore[arg-type]

    def __new__(cls, *args: Any, **options: Any) -> Self:
        """Note the options that the method is made with."""
        made = super().__new__(cls)
        object.__setattr__(made, "_given", options)
        return made

    @property
    def options(self) -> dict[str, Any]:
        """The keyword options that it was made with, defaults included."""
        parameters = inspect.signature(type(self).__init__).parameters.values()
        return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY} | self._given

    @classmethod
    def has_phases(cls, task: UpcomingTask) -> bool:
        """Whether anything is trained in a task; if so, its phases are those that are declared."""
        return True

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.parameters()).device

    def learn(self, task: Task) -> Iterator[Phase]:
        """Learn one task: yield its phases; each has been trained when the generator goes on."""
        raise NotImplementedError

    def features(self, x: Tensor) -> Tensor:
        """Features (B, dim) of the one network that all heads share; by default the backbone's."""
        return self.backbone(x)

    def forward(self, x: Tensor, task: int | None = None) -> Tensor:
        """Logits (B, classes seen) in order of arrival; with `task`, those of that task's classes alone."""
        logits = self.heads(self.features(x))
        return logits if task is None else logits[:, self.columns(task)]

    def experts(self) -> Iterable[Expert]:
        """Sub-networks to evaluate one after the other, each made when it is its turn; by default the whole, once."""
        return [Expert("all", self.forward)]

    def judging(self) -> Callable[[Tensor], tuple[Tensor, Tensor]] | None:
        """Images -> logits (B, classes), and in-distribution scores (B,); None of a method that has none."""
        return None

    def threshold(self, rate: float) -> float:
        """The in-distribution score below which an image is unknown, so that a share `rate` of known ones is, too."""
        raise NotImplementedError

    def shares(self, scores: Tensor) -> Tensor:
        """Of in-distribution scores (B,): the share of images of known classes that have no higher one (B,)."""
        raise NotImplementedError

    def left_out(self) -> Answers | None:
        """What it said of the images that it learnt last, each while it was left out of what it is compared with.

        None of a method that cannot leave images out, and of one that has only been loaded.
        """
        return None

    def remaining(self, task: int, right: int, images: int) -> float | None:
        """About which share (0 to 1) of a task's images that were right when it was learnt still is, among all classes.

        `right` of so many `images` were. None of a method that cannot say.
        """
        return None

    def at_once(self) -> tuple[Network, int] | None:
        """The logits of all experts from a single pass, and for how many images at a time this is the faster way.

        The products of that pass are larger with every task, and sum in another order: a task's logits are those of its
        expert within rounding, in float32 some 1e-6 of the largest. None if there is no such form.
        """
        return None

    def asked(self) -> int:
        """How many networks of the backbone's size an image passes through, at most."""
        return len(self.heads)

    def columns(self, task: int) -> slice | Tensor:
        """Where a task's classes stand among all logits."""
        return self.heads.columns(task)

    def expert(self, t: int, network: Callable[[], Network]) -> Expert:
        """A frozen expert of task t: its head on a network that is made when it is first asked, and once."""
        made = once(network)
        return Expert(f"task {t}", lambda x: self.heads[t](made()(x)), frozen=True, task=t)

    def evaluated(self, network: nn.Module, weights: Mapping[str, Tensor]) -> nn.Module:
        """A copy of a network of the backbone's structure with these weights, in its fastest form for evaluation."""
        return folded(network, weights, self._norms_to_fold if self.fast else {})

    @cached_property
    def _norms_to_fold(self) -> dict[str, str]:
        return norms_after_convs(self.backbone)

    def notes(self, task: Task) -> list[str]:
        """What a user should know of this method before it learns a task, in words."""
        return []

    def file_of(self, name: str) -> str:
        """Which of `storage.checkpoint.FILES` a tensor of the state_dict is stored in."""
        return in_weights(name)

    def needed(self, statistics: Mapping[str, Tensor]) -> int | None:
        """Of how many tasks, the first ones, the weights are enough to answer, by the statistics; None: of all."""
        return None

    def size(self) -> int:
        """Parameters of the model as it would be deployed; statistics such as running means do not count."""
        return sum(parameter.numel() for parameter in self.parameters())

    def facts(self, task: int) -> dict[str, Any]:
        """What to record about a finished task beside its tensors; JSON."""
        return {}


def own_loss(features: Callable[[Tensor], Tensor], head: nn.Module, task: Task) -> Callable[[Batch], Tensor]:
    """The loss of a sub-network: cross-entropy among its task's own classes."""

    def loss(batch: Batch) -> Tensor:
        return F.cross_entropy(head(features(batch.x)), batch.y - task.first_class)

    return loss


def whole(name: str, network: nn.Module, head: nn.Module, task: Task, extra: nn.Module | None = None) -> Phase:
    """A phase in which all of a network and of its task's head train. It reads nothing else, so it may be kept."""
    params = [*network.requires_grad_(True).parameters(), *head.requires_grad_(True).parameters()]
    return Phase(name, params, own_loss(network, head, task), extra=extra, steady=True, reads=(network, head))
