"""Co2L: Contrastive Continual Learning (Cha et al., ICCV 2021).

Features are trained contrastively, with images of the memory as negatives only, and the similarities of images under
the previous network are distilled. A linear classifier is trained on the features after every task, on a balanced
sample.
"""

from collections.abc import Iterator
from functools import partial
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from pearl.data.batches import Balanced, Batch, Task
from pearl.data.strong import StrongView
from pearl.methods.base import Method, Phase
from pearl.methods.common.memory import Memory
from pearl.methods.common.teacher import frozen
from pearl.methods.rehearsal.contrast import relation_distillation, supervised_contrast
from pearl.methods.rehearsal.er import Images
from pearl.nn.precision import full
from pearl.settings.declared import PhaseSpec, UpcomingTask
from pearl.settings.derived_defaults import DerivedDefault, data_of

Positive = Annotated[float, Field(gt=0)]
BASE_TEMPERATURE = 0.07  # of SupCon, whose loss has the factor temperature / 0.07
DIM = 128  # dimension of the embeddings


def _area(config: Any) -> float:
    return 0.1 if data_of(config) == "tinyimagenet" else 0.2


def _with_memory(task: UpcomingTask) -> int:
    return task.images + min(task.options["buffer_size"], task.earlier_images)


class Co2L(Method):
    """Asymmetric supervised contrast + distill_power * relation distillation; then a classifier on frozen features.

    Images of a task and of the memory are shuffled together, with two strong views of each. The teacher is the network
    before the task, in evaluation mode; in the authors' code it is in training mode, so that its running statistics
    drift. The result of a task is the last epoch of the classifier, not that with the best test accuracy.

    The memory changes only between tasks, and has equally many images per class. Views are mirrored if `images.flip` is
    set; in the authors' code always.

    Options:
        temp: temperature of the contrast.
        current_temp: temperature of the trained network in the distillation.
        past_temp: temperature of its teacher.
        distill_power: weight of the distillation.
        area: minimum share of the area in a strong view; `auto` is the authors' for the data, 0.1 for TinyImageNet and
            0.2 otherwise.
        buffer_size: stored images; 200 and 500 are usual.
    """

    rehearsal = True
    batch_coupled = True
    phases = (
        PhaseSpec("co2l_first", "first"),
        PhaseSpec("co2l", "later", images=_with_memory),
        PhaseSpec("co2l_classifier", images=_with_memory),
    )

    def __init__(
        self,
        backbone: nn.Module,
        *,
        temp: Positive = 0.5,
        current_temp: Positive = 0.2,
        past_temp: Positive = 0.01,
        distill_power: Annotated[float, Field(ge=0)] = 1.0,
        area: Annotated[Annotated[float, Field(gt=0, le=1)] | Literal["auto"], DerivedDefault(_area)] = "auto",
        buffer_size: Images = 200,
    ) -> None:
        super().__init__(backbone)
        self.temp, self.current_temp, self.past_temp = temp, current_temp, past_temp
        self.distill_power, self.area = distill_power, 0.2 if area == "auto" else area
        dim = self.heads.dim
        self.projection = nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, DIM))
        self.memory = Memory(buffer_size, "balanced")

    def train(self, mode: bool = True) -> "Co2L":
        """Set the mode; while the classifier trains, the network and its running statistics are frozen."""
        super().train(mode)
        self.backbone.train(mode and any(p.requires_grad for p in self.backbone.parameters()))
        return self

    def learn(self, task: Task) -> Iterator[Phase]:
        """Train features on the task and the memory, then a new classifier of all classes; then fill the memory."""
        self.memory.open(task, 0)
        held = self.memory.images[: len(self.memory)], self.memory.labels[: len(self.memory)]
        pairs = task.joined(*held, StrongView(task.view, (self.area, 1.0), views=2))
        network = nn.Sequential(self.backbone, self.projection)
        teacher = frozen(network) if task.id else None
        self.backbone.requires_grad_(True)
        name, loss = "co2l" if task.id else "co2l_first", partial(self.loss, task, network, teacher)
        yield Phase(name, network.parameters(), loss, data=pairs)

        self.backbone.requires_grad_(False)
        self.heads.grow(len(task.classes)).to(self.device)
        for head in self.heads:
            head.reset_parameters()
        balanced = Balanced(task.joined(*held, StrongView(task.view, (self.area, 1.0))))
        yield Phase("co2l_classifier", self.heads.parameters(), self.classify, data=balanced)
        self.memory.fill(task)

    def loss(self, task: Task, network: nn.Module, teacher: nn.Module | None, batch: Batch) -> Tensor:
        """Return the contrast, with the authors' factor temp / 0.07, plus distillation.

        Each image of a batch has two views.
        """
        z, y = F.normalize(full(network(batch.x)), dim=1), batch.y.repeat(2)
        contrast = supervised_contrast(z, y, self.temp, anchors=y >= task.first_class)
        loss = self.temp / BASE_TEMPERATURE * contrast
        if teacher is not None and self.distill_power:
            with torch.no_grad():
                before = F.normalize(full(teacher(batch.x)), dim=1)
            kept = relation_distillation(z, before, self.current_temp, self.past_temp)
            loss = loss + self.distill_power * kept
        return loss

    def classify(self, batch: Batch) -> Tensor:
        """Return the cross-entropy over all classes seen, on frozen features."""
        with torch.no_grad():
            features = self.backbone(batch.x)
        return F.cross_entropy(self.heads(features), batch.y)

    def size(self) -> int:
        """Count all but the projection, which only the contrast uses."""
        return super().size() - sum(p.numel() for p in self.projection.parameters())

    def facts(self, task: int) -> dict[str, Any]:
        """Return records of the memory."""
        return {"memory": self.memory.facts()}
