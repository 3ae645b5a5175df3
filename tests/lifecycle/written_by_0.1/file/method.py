"""Written against version 0.1: every import is of a path that it had."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pearl.data.augment import View
from pearl.data.batches import Batch, Task, fold
from pearl.data.sources import Source, Split
from pearl.errors import ConfigError
from pearl.methods.base import Expert, Method, Network, Phase, own_loss
from pearl.methods.closed_form import nearest_mean
from pearl.methods.er import Er
from pearl.methods.masks import Owners
from pearl.methods.memory import Memory
from pearl.methods.prompts import PromptMethod, PromptPool
from pearl.methods.stats import ClassStatistics
from pearl.methods.teacher import Average, distillation, frozen
from pearl.nn import lowrank, vit
from pearl.nn.growing import TaskTensors
from pearl.nn.ranks import FixedRule, RankRule
from pearl.nn.weights import load_weights
from pearl.registry import METHODS, RANK_RULES


class Replayed(Method):
    """Fine-tuning with a memory, a teacher and the mean of each class."""

    phases = ("replayed",)
    rehearsal = True

    def __init__(self, backbone: nn.Module, *, buffer_size: int = 6, temperature: float = 2.0) -> None:
        super().__init__(backbone)
        self.temperature = temperature
        self.memory = Memory(buffer_size, "balanced")
        self.statistics = ClassStatistics(self.heads.dim)
        self.extra = TaskTensors(buffers=True)

    def learn(self, task: Task) -> Iterator[Phase]:
        teacher = frozen(self) if task.id else None
        self.heads.grow(len(task.classes)).to(self.device)
        self.memory.open(task, sum(self.heads.sizes()))

        def loss(batch: Batch) -> Tensor:
            value = F.cross_entropy(self(batch.x), batch.y)
            old = self.memory.draw(4, task.view)
            if old is not None:
                value = value + F.cross_entropy(self(old.x), old.y)
            if teacher is not None:
                known = teacher(batch.x).detach()
                value = value + distillation(self(batch.x)[:, : known.shape[1]], known, self.temperature)
            return value

        yield Phase("replayed", self.parameters(), loss, after_step=lambda batch: self.memory.offer(task, batch))
        self.eval()
        with torch.no_grad():
            features = self.backbone(task.view.test(task.images))
        self.statistics.grow(len(task.classes), self.device)
        self.statistics.update(features, task.labels - task.first_class)
        self.extra.add(f"{task.id}.seed", torch.tensor(fold(task.id) % 1000))
