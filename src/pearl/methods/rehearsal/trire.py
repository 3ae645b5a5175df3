"""TriRE: Retain, Revise and Rewind (Vijayan et al., NeurIPS 2023).

A set of weights that matter grows from task to task. *Retain*: these learn from the memory alone, all others from the
new images; then those that matter to the new task are chosen. *Revise*: only what matters learns, slowly, and the set
takes in what is new. *Rewind*: all else goes back to what it was late in Retain, and learns the new images once more,
so that it stays of use.
"""

from collections.abc import Iterator
from functools import partial
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from pearl.data.batches import Batch, Task
from pearl.methods.base import Network, Phase
from pearl.methods.common.average import Statistics
from pearl.methods.common.entries import within
from pearl.methods.common.memory import Policy
from pearl.methods.rehearsal.er import Images
from pearl.methods.rehearsal.mean_teacher import Chance, Decay, MeanTeacher, Rehearsing, Tasks, Weight, on_short_tasks
from pearl.methods.rehearsal.tamil import Count
from pearl.methods.rehearsal.winners import blocks_of, chosen, compete, counting
from pearl.nn.functional import functional_call
from pearl.nn.growing import TaskTensors
from pearl.settings.declared import PhaseSpec, UpcomingTask
from pearl.settings.follow import Follows, stream_length

Share = Annotated[float, Field(gt=0, le=1)]
BATCH = 256  # images that pass at once between two phases
LATE = 0.9  # of Retain, when the weights are noted that Rewind goes back to

Masks = dict[str, Tensor]


def _is_last(task: UpcomingTask) -> bool:
    return task.id + 1 == task.options["tasks"]


class TriRe(Rehearsing):
    """New images among their task's own classes, remembered ones among all; who learns from which is said by masks.

    Masks are of the blocks' convolutions and norm layers behind the first stage; the stem, that stage, shortcuts and
    heads learn from both. As the paper says, the channels that won most are chosen, and Rewind leaves alone what
    matters; in the authors' code those are chosen that won least, if its options are completed so that it runs, and
    Rewind trains all. What a step does not train is also kept from Adam's momentum. The channels' wins are counted in
    one pass over the task's images; the gradients that weights are chosen by are of this pass and one over the memory.
    Theirs are the wins of all steps on new images, and the gradients of the last step. Adam goes on from phase to phase
    of a task; theirs from task to task too. Their memory is balanced as well, and evicts images with a low loss.

    Options:
        kwinner_share: share of a block's channels that an image is heard by, in evaluation too.
        kwinner_sparsity: share of a layer's channels, those that won most, of which weights are chosen.
        sparsity: share of these channels' weights that are chosen.
        tasks: how many there are: the last has no Rewind, and a longer Revise (`trire_revise_last`). `auto` is the
            stream's length; a model has no last task.
        reg_weight: weight of the squared distance to the teacher's logits.
        beta: weight of remembered labels.
        stable_model_update_freq: probability of a step that the teacher follows it, see `MeanTeacher`.
        stable_model_alpha: its decay.
        ema_tasks: it is at most so many tasks long (ours, for short tasks); null leaves the rates as given. `auto` is
            null on a published benchmark with all its images and elsewhere 0.65, about theirs on CIFAR-100 in 5 tasks.
        ema_norms: running statistics of the teacher, see `Average`; the authors have its `own`.
        buffer_size: images kept; 200 and 500 are usual.
        minibatch_size: images shown again in each step, for either term.
        policy: which images are kept, see `Memory`.
    """

    backbones = "residual"
    phases = (
        "trire_retain",
        PhaseSpec("trire_revise", lambda task: not _is_last(task)),
        PhaseSpec("trire_revise_last", _is_last),
        PhaseSpec("trire_rewind", lambda task: not _is_last(task)),
    )

    def __init__(
        self,
        backbone: nn.Module,
        *,
        kwinner_share: Share = 0.9,
        kwinner_sparsity: Share = 0.3,
        sparsity: Share = 0.2,
        tasks: Annotated[Count | Literal["auto"], Follows(stream_length)] = "auto",
        reg_weight: Weight = 0.05,
        beta: Weight = 1.0,
        stable_model_update_freq: Chance = 0.1,
        stable_model_alpha: Decay = 0.999,
        ema_tasks: Annotated[Tasks, on_short_tasks(0.65)] = "auto",
        ema_norms: Statistics = "own",
        buffer_size: Images = 200,
        minibatch_size: Count = 32,
        policy: Policy = "balanced",
    ) -> None:
        blocks = blocks_of(backbone)
        teacher = MeanTeacher(
            stable_model_update_freq, stable_model_alpha, 0.65 if ema_tasks == "auto" else ema_tasks, ema_norms
        )
        super().__init__(backbone, teacher, buffer_size=buffer_size, minibatch_size=minibatch_size, policy=policy)
        self.kwinner_sparsity, self.sparsity, self.tasks = kwinner_sparsity, sparsity, tasks
        self.reg_weight, self.beta = reg_weight, beta
        for block in blocks.values():
            compete(block, kwinner_share)
        named = dict(backbone.named_parameters())
        # of a masked parameter, the half of a block whose channels it makes
        self.halves = {
            f"{name}.{inner}": f"{name}.{inner.partition('.')[0][-1]}"
            for name, block in blocks.items()
            if not name.startswith("layer1.")
            for inner, _ in block.named_parameters()
            if not inner.startswith("downsample")
        }
        self.kept = TaskTensors(buffers=True)  # by a parameter's name, which of its entries matter to a task so far
        for name in self.halves:
            self.kept.add(name, torch.zeros_like(named[name], dtype=torch.bool))

    @property
    def masked(self) -> dict[str, nn.Parameter]:
        """The parameters that have masks, by name."""
        named = dict(self.backbone.named_parameters())
        return {name: named[name] for name in self.halves}

    def learn(self, task: Task) -> Iterator[Phase]:
        """Retain, choose, Revise, Rewind."""
        self.begin(task)
        self.requires_grad_(True)
        kept = self.masks()
        others = {name: ~mask for name, mask in kept.items()}
        late = TaskTensors(buffers=True)  # what Rewind goes back to
        for name, weight in self.masked.items():
            late.add(name, weight)

        def note(batch: Batch) -> None:
            if retain.done == max(1, round(LATE * retain.planned)):
                for name, weight in self.masked.items():
                    late[name].copy_(weight.detach())

        retain = self.stage("trire_retain", task, others, kept, share=0.6, extra=late, after_step=note, hands_on=True)
        yield retain

        own, last = self.choose(task), task.id + 1 == self.tasks
        new = {name: own[name] & others[name] for name in own}
        name, share = ("trire_revise_last", 0.4) if last else ("trire_revise", 0.2)
        yield self.stage(name, task, new, kept, share=share, hands_on=not last)
        for name, mask in own.items():
            self.kept[name].logical_or_(mask)

        if not last:
            others = {name: ~mask for name, mask in self.masks().items()}
            with torch.no_grad():
                for name, weight in self.masked.items():
                    weight.copy_(torch.where(others[name], late[name], weight))
            yield self.stage("trire_rewind", task, others, None, share=0.2)

    def masks(self) -> Masks:
        """Which entries matter to a task so far."""
        return {name: self.kept[name].clone() for name in self.halves}

    def stage(self, name: str, task: Task, new: Masks, old: Masks | None, *, share: float, **hooks: Any) -> Phase:
        """A phase in which the entries `new` learn from new images, `old` from remembered ones, others not at all.

        Without `old` nothing is remembered. What has no masks learns from all.
        """
        params = list(self.parameters())
        learning = {id(w): new[n] | old[n] if old else new[n] for n, w in self.masked.items()}
        hooks["project"] = within(params, [learning.get(id(parameter)) for parameter in params])
        return self.phase(name, task, partial(self.loss, task, new, old), params, share, **hooks)

    def loss(self, task: Task, new: Masks, old: Masks | None, batch: Batch) -> Tensor:
        """New images among their own classes, and remembered ones; each has gradients of its own entries alone."""
        loss = F.cross_entropy(self.heads[task.id](self.routed(batch.x, new)), batch.y - task.first_class)
        if old is None:
            return loss
        ask = lambda x: self.heads(self.routed(x, old))  # noqa: E731
        return loss + self.rehearsed(task, self.reg_weight, self.beta, ask)

    def routed(self, x: Tensor, masks: Masks) -> Tensor:
        """Features (B, dim) as ever, whose gradients reach only these entries, and what has no masks."""
        weights = {name: torch.where(masks[name], weight, weight.detach()) for name, weight in self.masked.items()}
        return functional_call(self.backbone, weights, (x,))

    def choose(self, task: Task) -> Masks:
        """Which entries matter to a task: of channels that won most, those with the largest |weight| + |gradients|.

        Gradients of the mean cross-entropy of the task's images among its own classes, and of remembered ones among
        all: as in Retain.
        """
        self.eval()
        kept = len(self.memory)
        with counting(blocks_of(self.backbone)) as counts:
            own = lambda x: self.heads[task.id](self.backbone(x))  # noqa: E731
            importance = self.gradients(own, task, task.images, task.labels - task.first_class)
        if kept:
            remembered = self.gradients(self, task, self.memory.images[:kept], self.memory.labels[:kept])
            importance = {name: importance[name] + remembered[name] for name in importance}
        return {
            name: chosen(weight.detach().abs() + importance[name], counts[half], self.kwinner_sparsity, self.sparsity)
            for (name, half), weight in zip(self.halves.items(), self.masked.values(), strict=True)
        }

    def gradients(self, ask: Network, task: Task, images: Tensor, labels: Tensor) -> Masks:
        """Sizes of the gradients of the mean cross-entropy of raw images (N, H, W, 3), not augmented."""
        weights = self.masked
        sums = {name: torch.zeros_like(weight) for name, weight in weights.items()}
        for raw, y in zip(images.split(BATCH), labels.split(BATCH), strict=True):
            logits = ask(task.view.test(raw.to(self.device)))
            loss = F.cross_entropy(logits, y.to(self.device), reduction="sum") / len(labels)
            for total, gradient in zip(sums.values(), torch.autograd.grad(loss, [*weights.values()]), strict=True):
                total += gradient
        return {name: total.abs() for name, total in sums.items()}
