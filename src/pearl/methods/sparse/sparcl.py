"""SparCL-EWC: SparCL's sparse training (Wang et al., NeurIPS 2022) on elastic weight consolidation.

The PEARL paper compares with this combination, which is not published: SparCL's authors combine it only with rehearsal.
Here it is assembled from its parts: SparCL's dynamic mask, gradient mask and removal of images, with online EWC's
penalty instead of a memory.
"""

from collections.abc import Iterator
from functools import partial
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from pearl.data.batches import Batch, Task
from pearl.methods.base import Phase
from pearl.methods.common.entries import within
from pearl.methods.regularization.ewc import ELambda, Gamma, OnlineEwc, weight_in
from pearl.methods.sparse.masks import inner_weights, nonzero
from pearl.nn.task_modules import TaskTensors
from pearl.settings.declared import PhaseSpec, UpcomingTask
from pearl.settings.derived_defaults import DerivedDefault

Share = Annotated[float, Field(ge=0, lt=1)]
BATCH = 256  # images whose gradient determines the importance of weights


def _rounds(task: UpcomingTask) -> list[int]:
    """Return the images of each round; after some rounds, a part of the least often forgotten ones is removed."""
    remove, removals, rounds = (task.options[name] for name in ("remove", "removals", "rounds"))
    portion = int(remove * task.images / removals + 1e-6)
    return [task.images - portion * min(at, removals) for at in range(rounds)]


class SparClEwc(OnlineEwc):
    """Cross-entropy among the task's own classes + EWC's penalty, in one network of which most weights are 0.

    A single mask of the blocks' weights, for all tasks, keeps changing: in each layer those weights stay whose |weight|
    + grad_weight * |gradient| is largest, random other ones are reopened with value 0. The first mask is by magnitude.
    The gradient is that of 256 images between two rounds; the authors use that of the last step. If images are
    forgotten equally often, their removal does not depend on their order. The Fisher matrix applies to open weights.

    Options:
        e_lambda: weight of the penalty, see `OnlineEwc`.
        gamma: factor of the earlier tasks' Fisher matrix when a task's is added.
        rounds: parts of a task, each with its own mask and `train.phases.sparcl_ewc.epochs` long.
        sparsity: share of a layer's weights that are 0 at the end of a task.
        regrow: share that a round reopens, except the last; the mask before prunes that much more, except in the first
            round of a task.
        grad_weight: weight of the gradient in a weight's importance.
        gradient_sparse: share of a layer's gradients set to 0, the smallest ones.
        sample_frequency: steps per gradient mask.
        remove: share of a task's images removed during the task, the least often forgotten ones.
        removals: number of removals, from the second round on.
        forgotten_among: classes among which a training image's prediction must be correct to count as learnt: `all`
            seen, as in the authors' code, although its loss uses only the task's own; or its `own` task's.
    """

    task_local_loss = True
    batch_coupled = True  # with several processes, each would count forgetting on its part of the images only
    phases = (PhaseSpec("sparcl_ewc", images=_rounds),)

    def __init__(
        self,
        backbone: nn.Module,
        *,
        e_lambda: Annotated[ELambda, DerivedDefault(weight_in("sparcl_ewc"))] = "auto",
        gamma: Gamma = 1.0,
        rounds: Annotated[int, Field(ge=1, strict=True)] = 10,
        sparsity: Share = 0.75,
        regrow: Share = 0.01,
        grad_weight: Annotated[float, Field(ge=0)] = 0.5,
        gradient_sparse: Share = 0.8,
        sample_frequency: Annotated[int, Field(ge=1, strict=True)] = 30,
        remove: Share = 0.3,
        removals: Annotated[int, Field(ge=1, strict=True)] = 4,
        forgotten_among: Literal["all", "own"] = "all",
    ) -> None:
        super().__init__(backbone, e_lambda=e_lambda, gamma=gamma)
        self.rounds, self.sparsity, self.regrow = rounds, sparsity, regrow
        self.grad_weight, self.gradient_sparse, self.sample_frequency = grad_weight, gradient_sparse, sample_frequency
        self.remove, self.removals, self.forgotten_among = remove, removals, forgotten_among
        named = dict(backbone.named_parameters())
        self.open = TaskTensors(buffers=True)  # by weight name: the entries that may be nonzero
        self.names = inner_weights(backbone)
        for name in self.names:
            self.open.add(name, torch.ones_like(named[name], dtype=torch.bool))

    @property
    def weights(self) -> dict[str, nn.Parameter]:
        """Return the parameters that have masks, by name."""
        named = dict(self.backbone.named_parameters())
        return {name: named[name] for name in self.names}

    def learn(self, task: Task) -> Iterator[Phase]:
        """Train in rounds, each with a mask and the remaining images; then compute importance."""
        self.heads.grow(len(task.classes)).to(self.device)
        left, portion = task, int(self.remove * len(task) / self.removals + 1e-6)
        seen = Forgetting(len(left), task.device)
        for at in range(self.rounds):
            if 0 < at <= self.removals and portion:
                left = left.part(seen.by_forgetting()[portion:])
                seen = Forgetting(len(left), task.device)
            self.choose(left, at)
            yield self.round(left, seen, keep_optimizer=at < self.rounds - 1)
        fisher = self.fisher(task)
        for name in self.names:
            fisher[f"backbone.{name}"] *= self.open[name]
        self.anchor.move(dict(self.named_parameters()), fisher, self.gamma)

    def round(self, left: Task, seen: "Forgetting", *, keep_optimizer: bool) -> Phase:
        """Return one round of training. Masked weights do not move by momentum either."""
        steps, params = self.round_masks(), list(self.parameters())
        masks = {id(weight): steps[name] for name, weight in self.weights.items()}

        def after_backward() -> None:
            self.mask_gradients(steps, measure=phase.done % phase.per_epoch % self.sample_frequency == 0)

        phase = Phase(
            "sparcl_ewc",
            params,
            partial(self.loss, seen=seen),
            extra=nn.ModuleList([steps, seen]),
            data=left,
            keep_optimizer=keep_optimizer,
            after_backward=after_backward,
            project=within(params, [masks.get(id(parameter)) for parameter in params]),
            after_step=lambda batch: self.close(),
        )
        return phase

    def round_masks(self) -> TaskTensors:
        """Return masks of gradients by weight name: initially all."""
        masks = TaskTensors(buffers=True)
        for name in self.names:
            masks.add(name, self.open[name])
        return masks

    def loss(self, batch: Batch, seen: "Forgetting | None" = None) -> Tensor:
        """Return cross-entropy plus penalty; `seen` records which images are predicted correctly."""
        return self.cross_entropy(batch, seen) + self.penalty()

    def cross_entropy(self, batch: Batch, seen: "Forgetting | None" = None) -> Tensor:
        """Return the cross-entropy of labels among the newest task's classes."""
        features = self.features(batch.x)
        logits, labels = self.heads[-1](features), batch.y - sum(self.heads.sizes()[:-1])
        if seen is not None:
            right = logits.argmax(1) == labels
            if self.forgotten_among == "all":
                right = self.heads(features.detach()).argmax(1) == batch.y
            seen.note(batch.rows, right)
        return F.cross_entropy(logits, labels)

    @torch.no_grad()
    def mask_gradients(self, steps: TaskTensors, *, measure: bool) -> None:
        """Keep a weight's largest gradients, or, if `measure` is False, those of the last mask."""
        for name, weight in self.weights.items():
            if weight.grad is None:
                continue
            if measure:
                size = weight.grad.abs().masked_fill(~self.open[name], 0.0)
                steps[name].copy_(largest(size, size.numel() - int(self.gradient_sparse * size.numel() + 1e-6)))
            weight.grad.mul_(steps[name])

    @torch.no_grad()
    def close(self) -> None:
        """Set closed weights to 0."""
        for name, weight in self.weights.items():
            weight.mul_(self.open[name])

    def choose(self, left: Task, at: int) -> None:
        """Choose the mask of a round: the most important weights, and random others."""
        last = at == self.rounds - 1
        more = self.regrow if at > 0 and not last else 0.0
        importance = self.importance(left, first=left.id == 0 and at == 0)
        for name, value in importance.items():
            size = value.numel()
            kept = round((1 - min(self.sparsity + more, 1.0)) * size)
            opened = 0 if last else round(self.regrow * size)
            mask = largest(value.masked_fill(~self.open[name], -1.0), kept)
            chance = torch.rand(value.shape).to(value.device)  # from the host's generator, equal on every device
            self.open[name].copy_(mask | largest(chance.masked_fill(mask, -1.0), min(opened, size - kept)))
        self.close()

    def importance(self, left: Task, *, first: bool) -> dict[str, Tensor]:
        """Return |weight| + grad_weight * |gradient of the loss| of each entry; with `first` only |weight|."""
        weights = self.weights
        sizes = {name: weight.detach().abs() for name, weight in weights.items()}
        if first:
            return sizes
        self.eval()
        (batch, *_) = left.batches(BATCH, seed=int(torch.randint(2**62, ())))
        gradients = torch.autograd.grad(self.loss(batch), [*weights.values()])
        return {name: sizes[name] + self.grad_weight * g.abs() for name, g in zip(weights, gradients, strict=True)}

    def facts(self, task: int) -> dict[str, Any]:
        """Return how many parameters are not 0."""
        return {"nonzero": nonzero(self)}


class Forgetting(nn.Module):
    """Counts of how often each image became incorrect, and whether it was ever correct; buffers (N,)."""

    def __init__(self, images: int, device: torch.device) -> None:
        super().__init__()
        self.right: Tensor
        self.learnt: Tensor
        self.events: Tensor
        for name in ("right", "learnt"):
            self.register_buffer(name, torch.zeros(images, dtype=torch.bool, device=device))
        self.register_buffer("events", torch.zeros(images, dtype=torch.int64, device=device))

    @torch.no_grad()
    def note(self, rows: Tensor, right: Tensor) -> None:
        """Record whether images (B,), by rows, are correct now."""
        self.events[rows] += self.right[rows] & ~right
        self.right[rows] = right
        self.learnt[rows] |= right

    def by_forgetting(self) -> Tensor:
        """Return all rows, least often forgotten first; images that were never correct are last."""
        events = torch.where(self.learnt, self.events, self.events.max() + 1).cpu()
        mixed = torch.randperm(len(events))  # ties are in random order, not class by class
        return mixed[events[mixed].argsort(stable=True)]


def largest(values: Tensor, count: int) -> Tensor:
    """Return a mask of the `count` largest entries of `values`; ties keep the first."""
    flat = torch.zeros(values.numel(), dtype=torch.bool, device=values.device)
    flat[values.flatten().argsort(descending=True, stable=True)[:count]] = True
    return flat.view(values.shape)
