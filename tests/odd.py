"""Small methods, each of which asks one more thing of the engine than the published ones here did before."""

import torch
import torch.nn.functional as F
from torch import nn

from pearl.data import Batch, View
from pearl.data.batches import batch_bounds
from pearl.methods import ClassMoments, Memory, Method, Phase
from pearl.methods.bounds.finetune import Finetune
from pearl.nn import TaskTensors
from pearl.settings.declared import PhaseSpec
from pearl.testing.tiny import small_resnet


class Ramp(Finetune):
    """Its loss grows with the phase, and what it has seen of the phase's length is in the state."""

    phases = ("ramp",)

    def __init__(self, backbone):
        super().__init__(backbone)
        self.seen = TaskTensors(buffers=True)

    def learn(self, task):
        self.heads.grow(len(task.classes))
        seen = self.seen.add(f"{task.id}", torch.zeros(3))

        def loss(batch):
            return self.loss(batch) * (0.5 + phase.done / phase.planned)

        def after_step(batch):
            seen.copy_(torch.tensor([phase.done, phase.planned, seen[2] + phase.done]))

        phase = Phase("ramp", self.parameters(), loss, after_step=after_step)
        yield phase


class Choosy(Finetune):
    """Trains until images that it held out say that it got no better: nobody knows before how many phases there are."""

    phases = (PhaseSpec("more", images=lambda task: task.kept(0.25), at_least=True),)

    def __init__(self, backbone):
        super().__init__(backbone)
        self.scores = TaskTensors(buffers=True)

    def learn(self, task):
        self.heads.grow(len(task.classes))
        train, held = task.hold_out(0.25)
        best, scores = -1.0, []
        while True:
            yield Phase("more", self.parameters(), self.loss, data=train)
            scores.append(self.score(task, held))
            if scores[-1] <= best or len(scores) == 3:
                break
            best = scores[-1]
        self.scores.add(f"{task.id}", torch.tensor(scores))

    @torch.no_grad()
    def score(self, task, held):
        self.eval()
        right = self(task.view.test(held.images)).argmax(1) == held.labels
        return right.float().mean().item() + len(self.heads) * 1e-9


class Groups(Finetune):
    """Two groups of parameters."""

    phases = (PhaseSpec("groups", groups=("body", "head")),)

    def learn(self, task):
        self.heads.requires_grad_(False)
        head = self.heads.grow(len(task.classes))
        params = {"body": self.backbone.parameters(), "head": head.parameters()}
        yield Phase("groups", params, self.loss)


class HandsOn(Finetune):
    """Two phases and one optimizer."""

    phases = ("first", "second")
    keep_optimizer = True

    def learn(self, task):
        self.heads.grow(len(task.classes))
        yield Phase("first", self.parameters(), self.loss, keep_optimizer=self.keep_optimizer)
        yield Phase("second", self.parameters(), self.loss)


class Projects(Finetune):
    """Takes half of every step back."""

    phases = ("projects",)

    def learn(self, task):
        self.heads.grow(len(task.classes))
        params = list(self.parameters())

        def project(before):
            for parameter, old in zip(params, before, strict=True):
                parameter.copy_((parameter + old) / 2)

        yield Phase("projects", params, self.loss, project=project)


class Draws:
    """An epoch of features drawn from the Gaussians of class statistics."""

    def __init__(self, statistics, per_class):
        self.means, self.per_class = statistics.means().float(), per_class

    def __len__(self):
        return len(self.means) * self.per_class

    def batches(self, size, seed, *, skip=0):
        generator = torch.Generator().manual_seed(seed)
        labels = torch.arange(len(self.means)).repeat_interleave(self.per_class)
        labels = labels[torch.randperm(len(labels), generator=generator)]
        features = self.means[labels] + 0.1 * torch.randn(len(labels), self.means.shape[1], generator=generator)
        for start, stop in batch_bounds(len(labels), size)[skip:]:
            yield Batch(features[start:stop], labels[start:stop], torch.arange(start, stop))


class Align(Finetune):
    """Trains the network on images, then its heads on features drawn for all classes seen."""

    phases = (
        "images",
        PhaseSpec("draws", images=lambda task: 10 * (task.earlier_classes + task.classes), features_only=True),
    )

    def __init__(self, backbone):
        super().__init__(backbone)
        self.statistics = ClassMoments(self.heads.dim)

    def learn(self, task):
        self.requires_grad_(True)
        self.heads.grow(len(task.classes))
        yield Phase("images", self.parameters(), self.loss)
        self.eval()
        with torch.no_grad():
            features = self.backbone(task.view.test(task.images))
        self.statistics.grow(len(task.classes), self.device)
        self.statistics.update(features, task.labels - task.first_class)
        self.backbone.requires_grad_(False)
        yield Phase("draws", self.heads.parameters(), self.head_loss, data=Draws(self.statistics, 10))

    def head_loss(self, batch):
        return F.cross_entropy(self.heads(batch.x), batch.y)


class Mixed:
    """As many images of each class, of the task or of a memory: drawn with replacement."""

    def __init__(self, task, memory):
        self.task, self.memory = task, memory
        old = memory.labels[: len(memory)]
        self.labels = torch.cat([task.labels, old])
        self.weights = 1.0 / self.labels.bincount()[self.labels].float()

    def __len__(self):
        return len(self.task)

    def batches(self, size, seed, *, skip=0):
        generator = torch.Generator().manual_seed(seed)
        raw = torch.cat([self.task.images, self.memory.images[: len(self.memory)]])
        rows = torch.multinomial(self.weights, len(self), replacement=True, generator=generator)
        draws = self.task.view.draw(len(rows), raw.shape[1:3], generator)
        for start, stop in batch_bounds(len(rows), size)[skip:]:
            some = rows[start:stop]
            x = self.task.view.train(raw[some], tuple(draw[start:stop] for draw in draws))
            yield Batch(x, self.labels[some], some)


class Balanced(Finetune):
    """Fills a memory when a task ends, and trains on it and the next task in equal parts."""

    phases = ("balanced",)
    rehearsal = True

    def __init__(self, backbone):
        super().__init__(backbone)
        self.memory = Memory(8)

    def learn(self, task):
        self.heads.grow(len(task.classes))
        self.memory.open(task, sum(self.heads.sizes()))
        yield Phase("balanced", self.parameters(), self.loss, data=Mixed(task, self.memory))
        self.memory.offer(task, Batch(task.images, task.labels, torch.arange(len(task))))


class TwoViews(View):
    """Two augmented views of every image: (B, 2, 3, size, size)."""

    def __init__(self, view):
        super().__init__(view.images, channels_last=view.channels_last)

    def draw(self, count, shape, generator):
        return (*super().draw(count, shape, generator), *super().draw(count, shape, generator))

    def train(self, raw, draws):
        half = len(draws) // 2
        return torch.stack([super(TwoViews, self).train(raw, part) for part in (draws[:half], draws[half:])], dim=1)


class Twice(Finetune):
    """Two views of an image should look alike."""

    phases = ("twice",)

    def learn(self, task):
        self.heads.grow(len(task.classes))
        pairs = task.part(torch.arange(len(task)), TwoViews(task.view))

        def loss(batch):
            one, other = self.backbone(batch.x.flatten(0, 1)).unflatten(0, (-1, 2)).unbind(1)
            return F.cross_entropy(self.heads(one), batch.y) - F.cosine_similarity(one, other).mean()

        yield Phase("twice", self.parameters(), loss, data=pairs)


ODD: dict[str, type[Method]] = {
    kind.__name__: kind for kind in (Ramp, Choosy, Groups, HandsOn, Projects, Align, Balanced, Twice)
}


def make(name: str) -> Method:
    torch.manual_seed(1)
    return ODD[name](small_resnet())


def clones(module: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in module.parameters()]
