"""The base class of methods: a generator of training phases, and a forward pass over all classes seen."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pearl.data.batches import Batch, Batches, Task
from pearl.methods.classifier import TaskClassifier
from pearl.nn.task_modules import TaskHeads
from pearl.settings.declared import Phases, UpcomingTask
from pearl.storage.checkpoint import in_weights

Network = Callable[[Tensor], Tensor]  # maps images (B, 3, H, W) to features (B, dim) or logits


@dataclass
class Phase:
    """One phase of training. The engine runs the loop; the method defines the loss and parameters.

    `name` finds the settings in the recipe (`train.phases.NAME`); a phase may be repeated as often as the training
    needs. `params` are the trained parameters, or a mapping from names of groups to them; groups may have different
    settings (`train.phases.NAME.groups.GROUP`). `loss` maps a batch to a scalar, a mean over its images. `extra` is a
    network outside the method's state that is trained too, such as PEARL's probe; it is stored in checkpoints. `data`
    replaces the batches of the task's images. `capturable`: for batches of one size, `loss` and `after_backward` always
    do the same on the device and nothing on the host, so that a step can be captured as a CUDA graph (see `graphs`): it
    reads no tensor values, has no branches, and uses only the device's random numbers. `depends_on` are the modules
    that the loss depends on; besides them it may use only the task and plain values that it holds. Runs that share the
    phase then train it once (see `training.fingerprint`). Without `depends_on`, every run trains it.

    During training, `done` is the number of completed steps of `planned` ones, `per_epoch` the steps per epoch;
    afterwards `seconds` is the duration, and `reused` is True if another run trained it.

    Several processes may train together (see `training.world`), without changes to the method. Each calls `loss` with
    its share of a batch and its own random numbers; gradients and batch statistics are those of the whole batch. The
    other hooks, and the code of `learn` between two phases, run with equal inputs in all processes: `after_step` gets
    the whole batch, and random numbers are equal until the phase begins. State that they store is therefore equal;
    state that `loss` stores is not.
    """

    name: str
    params: Iterable[nn.Parameter] | Mapping[str, Iterable[nn.Parameter]]
    loss: Callable[[Batch], Tensor]
    extra: nn.Module | None = None
    data: Batches | None = None
    capturable: bool = False
    depends_on: Sequence[nn.Module] = ()
    keep_optimizer: bool = False  # the next phase continues with this optimizer's state of the parameters
    after_backward: Callable[[], None] | None = None  # masks, gradient projections
    project: Callable[[list[Tensor]], None] | None = None  # after the optimizer's step; gets the values before it
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
            raise TypeError(f"a phase's name must be a string, not {type(self.name).__name__}")
        if not self.trained or not all(isinstance(parameter, nn.Parameter) for parameter in self.trained):
            raise TypeError(f"phase {self.name}: its params must be parameters, one or more")
        if not callable(self.loss):
            raise TypeError(f"phase {self.name}: its loss must be a function of a batch")
        self.params = self.trained

    def add_after_step(self, step: Callable[[Batch], None]) -> None:
        """Add a hook after each step, called after the existing `after_step`."""
        before = self.after_step

        def after_step(batch: Batch) -> None:
            if before is not None:
                before(batch)
            step(batch)

        self.after_step = after_step

    @property
    def trained(self) -> list[nn.Parameter]:
        """Return all parameters, group by group; `project` gets their values in this order."""
        return [parameter for params in self.groups.values() for parameter in params]


@dataclass(frozen=True)
class Expert:
    """A sub-network for evaluation: maps images (B, 3, H, W) to logits (B, its classes).

    The outputs of a method's experts, concatenated, are the logits of all classes seen, in order of arrival. A `frozen`
    expert never changes again, so its logits may be cached.
    """

    key: str
    forward: Network
    frozen: bool = False
    task: int | None = None  # its logits are those of this task, and `forward(x, task)` needs no other expert


class Method(nn.Module):
    """Base of all methods. The state_dict holds everything that is learnt.

    A subclass takes the backbone, has its hyper-parameters as keyword-only arguments, and defines `learn`.
    """

    oracle = False  # True: each task gets the data of all tasks so far
    # supported backbones; `convolutional`: pearl's own networks, `residual`: those of them with residual blocks
    backbones: Literal["any", "convolutional", "residual", "vit"] = "any"
    allows_repeated_classes = False  # True: a task may have classes of earlier tasks
    rehearsal = False  # True: stores images of past tasks
    batch_coupled = False  # True: the loss compares the images of a batch, or takes a norm over all of them
    domains = False  # True: designed for tasks with the same classes in the same order, in other styles
    task_local_loss = False  # True: a task's loss compares its own classes only, so one class gives no gradient
    task_identity = False  # True: designed for task-IL; class-IL concatenates the heads' raw logits
    phases: Phases = ()  # the phases that `learn` may yield, see `declared`; a bare name occurs once in every task
    frozen_start = False  # True: the first task's sub-network is the backbone, unchanged, if it is not trained
    _given: dict[str, Any]
    untrained: tuple[str, ...] = ()  # parts of names of parameters that are random and never trained
    may_rest: tuple[str, ...] = ()  # phases in which a trained parameter may stay unchanged
    may_not_matter: tuple[str, ...] = ()  # options and phases that may change nothing in a few steps, as thresholds do
    fast = True  # False: disables the faster forms of the same functions, in evaluation and training

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        self.heads = TaskHeads(int(backbone.dim))  # type: ignore[arg-type]

    def __new__(cls, *args: Any, **options: Any) -> Self:
        """Record the options that the method is created with."""
        made = super().__new__(cls)
        object.__setattr__(made, "_given", options)
        return made

    @property
    def options(self) -> dict[str, Any]:
        """Return the keyword options of this object, with defaults."""
        parameters = inspect.signature(type(self).__init__).parameters.values()
        return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY} | self._given

    @classmethod
    def has_phases(cls, task: UpcomingTask) -> bool:
        """Return True if anything is trained in a task; its phases are then the declared ones."""
        return True

    @property
    def device(self) -> torch.device:
        """Return the device of the weights."""
        return next(self.parameters()).device

    def learn(self, task: Task) -> Iterator[Phase]:
        """Learn one task: yield its phases; each is trained when the generator continues."""
        raise NotImplementedError

    def features(self, x: Tensor) -> Tensor:
        """Return features (B, dim) of the network that all heads share; by default the backbone's."""
        return self.backbone(x)

    def forward(self, x: Tensor, task: int | None = None) -> Tensor:
        """Return logits (B, classes seen) in order of arrival; with `task`, only those of that task's classes."""
        logits = self.heads(self.features(x))
        return logits if task is None else logits[:, self.columns(task)]

    def experts(self) -> Iterable[Expert]:
        """Yield sub-networks for evaluation one by one, each created on demand; by default the whole method, once."""
        return [Expert("all", self.forward)]

    @property
    def classifier(self) -> TaskClassifier:
        """Return the classifier over the classes of all tasks."""
        return TaskClassifier()

    def at_once(self) -> tuple[Network, int] | None:
        """Return a function for the logits of all experts in a single pass, and the most images for which it is faster.

        The products of that pass grow with the tasks and sum in another order: a task's logits equal its expert's up to
        rounding, in float32 about 1e-6 of the largest. None if there is no such form.
        """
        return None

    def forward_passes(self) -> int:
        """Return the forward passes of a network of the backbone's size per image, at most."""
        return len(self.heads)

    def columns(self, task: int) -> slice | Tensor:
        """Return the columns of a task's classes among all logits."""
        return self.heads.columns(task)

    def notes(self, task: Task) -> list[str]:
        """Return warnings for the user before the method learns a task."""
        return []

    def file_of(self, name: str) -> str:
        """Return the file of `storage.checkpoint.FILES` that stores a tensor of the state_dict."""
        return in_weights(name)

    def is_fixed(self, name: str, task: int) -> bool:
        """Return True if learning a task cannot change this tensor of the state_dict, which belongs to an earlier one.

        Such tensors are neither copied before the task nor compared after its phases.
        """
        return False

    def size(self) -> int:
        """Return the parameters of the deployed model; statistics such as running means do not count."""
        return sum(parameter.numel() for parameter in self.parameters())

    def facts(self, task: int) -> dict[str, Any]:
        """Return records about a finished task in addition to its tensors, as JSON values."""
        return {}


def own_loss(features: Callable[[Tensor], Tensor], head: nn.Module, task: Task) -> Callable[[Batch], Tensor]:
    """Return the loss of a sub-network: cross-entropy among its task's own classes."""

    def loss(batch: Batch) -> Tensor:
        return F.cross_entropy(head(features(batch.x)), batch.y - task.first_class)

    return loss


def has_frozen_features(method: Method, task: int) -> bool:
    """Return True if there are frozen features before task `task`: earlier tasks', or a pretrained network's."""
    return task > 0 or (method.frozen_start and bool(method.backbone.pretrained))


def whole(name: str, network: nn.Module, head: nn.Module, task: Task, extra: nn.Module | None = None) -> Phase:
    """Return a phase that trains a network and its task's head. It depends on nothing else, so it can be cached."""
    params = [*network.requires_grad_(True).parameters(), *head.requires_grad_(True).parameters()]
    return Phase(name, params, own_loss(network, head, task), extra=extra, capturable=True, depends_on=(network, head))
