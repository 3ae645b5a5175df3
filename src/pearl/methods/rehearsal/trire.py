"""TriRE: Retain, Revise and Rewind (Vijayan et al., NeurIPS 2023).

A set of important weights grows from task to task. *Retain*: these train on the memory only, all others on the new
images; then the weights important to the new task are chosen. *Revise*: only important weights train, at a low rate,
and the new ones join the set. *Rewind*: all others return to their values late in Retain, and train on the new images
again, so that they remain useful.
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
from pearl.nn.task_modules import TaskTensors
from pearl.settings.declared import PhaseSpec, UpcomingTask
from pearl.settings.derived_defaults import DerivedDefault, stream_length

Share = Annotated[float, Field(gt=0, le=1)]
BATCH = 256  # images per pass between two phases
LATE = 0.9  # share of Retain after which the weights for Rewind are stored

Masks = dict[str, Tensor]


def _is_last(task: UpcomingTask) -> bool:
    return task.id + 1 == task.options["tasks"]


class TriRe(Rehearsing):
    """New images among their task's own classes, remembered ones among all; masks select the parameters for each.

    The blocks' convolutions and norm layers after the first stage have masks; the stem, that stage, shortcuts and heads
    train on both. As in the paper, the channels with the most wins are chosen, and Rewind does not train important
    weights; the authors' code, once its options are completed so that it runs, chooses those with the fewest wins, and
    Rewind trains all. Parameters outside a step's mask do not move by Adam's momentum either. Wins of channels are
    counted in one pass over the task's images; weights are chosen by gradients of this pass and one over the memory.
    The authors use the wins of all steps on new images, and the gradients of the last step. The optimizer continues
    over the phases of a task; theirs over tasks too. Their memory is balanced as well, and evicts images with a low
    loss.

    Options:
        kwinner_share: share of a block's channels that are active for an image, in evaluation too.
        kwinner_sparsity: share of a layer's channels, by number of wins, among whose weights important ones are chosen.
        sparsity: share of these channels' weights that are chosen.
        tasks: number of tasks; the last has no Rewind and a longer Revise (`trire_revise_last`). `auto` is the stream's
            length; a model has no last task.
        reg_weight: weight of the squared distance to the teacher's logits.
        beta: weight of remembered labels.
        stable_model_update_freq: probability per step that the teacher is updated, see `MeanTeacher`.
        stable_model_alpha: its decay.
        ema_tasks: maximum length of its average in tasks (ours, for short tasks); null keeps the given rates. `auto` is
            null on a published benchmark with all its images and elsewhere 0.65, about theirs on CIFAR-100 in 5 tasks.
        ema_norms: running statistics of the teacher, see `Average`; the authors have its `own`.
        buffer_size: stored images; 200 and 500 are usual.
        minibatch_size: rehearsed images per step, for either term.
        policy: rule for storing images, see `Memory`.
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
        tasks: Annotated[Count | Literal["auto"], DerivedDefault(stream_length)] = "auto",
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
        # for masked parameters, the half of a block whose channels they compute
        self.halves = {
            f"{name}.{inner}": f"{name}.{inner.partition('.')[0][-1]}"
            for name, block in blocks.items()
            if not name.startswith("layer1.")
            for inner, _ in block.named_parameters()
            if not inner.startswith("downsample")
        }
        self.kept = TaskTensors(buffers=True)  # by parameter name: the entries important to a task so far
        for name in self.halves:
            self.kept.add(name, torch.zeros_like(named[name], dtype=torch.bool))

    @property
    def masked(self) -> dict[str, nn.Parameter]:
        """Return the parameters that have masks, by name."""
        named = dict(self.backbone.named_parameters())
        return {name: named[name] for name in self.halves}

    def learn(self, task: Task) -> Iterator[Phase]:
        """Run Retain, choose, Revise, Rewind."""
        self.begin(task)
        self.requires_grad_(True)
        kept = self.masks()
        others = {name: ~mask for name, mask in kept.items()}
        late = TaskTensors(buffers=True)  # the values that Rewind returns to
        for name, weight in self.masked.items():
            late.add(name, weight)

        def note(batch: Batch) -> None:
            if retain.done == max(1, round(LATE * retain.planned)):
                for name, weight in self.masked.items():
                    late[name].copy_(weight.detach())

        retain = self.stage(
            "trire_retain", task, others, kept, share=0.6, extra=late, after_step=note, keep_optimizer=True
        )
        yield retain

        chosen, last = self.choose(task), task.id + 1 == self.tasks
        new = {name: chosen[name] & others[name] for name in chosen}
        name, share = ("trire_revise_last", 0.4) if last else ("trire_revise", 0.2)
        yield self.stage(name, task, new, kept, share=share, keep_optimizer=not last)
        for name, mask in chosen.items():
            self.kept[name].logical_or_(mask)

        if not last:
            others = {name: ~mask for name, mask in self.masks().items()}
            with torch.no_grad():
                for name, weight in self.masked.items():
                    weight.copy_(torch.where(others[name], late[name], weight))
            yield self.stage("trire_rewind", task, others, None, share=0.2)

    def masks(self) -> Masks:
        """Return the entries important to a task so far."""
        return {name: self.kept[name].clone() for name in self.halves}

    def stage(self, name: str, task: Task, new: Masks, old: Masks | None, *, share: float, **hooks: Any) -> Phase:
        """Return a phase that trains the entries `new` on new images, `old` on remembered ones, and no others.

        Without `old` the memory is not used. Parameters without masks train on all images.
        """
        params = list(self.parameters())
        learning = {id(w): new[n] | old[n] if old else new[n] for n, w in self.masked.items()}
        hooks["project"] = within(params, [learning.get(id(parameter)) for parameter in params])
        return self.phase(name, task, partial(self.loss, task, new, old), params, share, **hooks)

    def loss(self, task: Task, new: Masks, old: Masks | None, batch: Batch) -> Tensor:
        """Return the loss: new images among their own classes, and remembered ones; each has gradients for its own
        entries only.
        """
        loss = F.cross_entropy(self.heads[task.id](self.routed(batch.x, new)), batch.y - task.first_class)
        if old is None:
            return loss
        ask = lambda x: self.heads(self.routed(x, old))  # noqa: E731
        return loss + self.rehearsed(task, self.reg_weight, self.beta, ask)

    def routed(self, x: Tensor, masks: Masks) -> Tensor:
        """Return unchanged features (B, dim) whose gradients reach only these entries and parameters without masks."""
        weights = {name: torch.where(masks[name], weight, weight.detach()) for name, weight in self.masked.items()}
        return functional_call(self.backbone, weights, (x,))

    def choose(self, task: Task) -> Masks:
        """Choose the entries important to a task: in the channels with most wins, those with the largest |weight| +
        |gradients|.

        Gradients are those of the mean cross-entropy of the task's images among its own classes, and of remembered ones
        among all, as in Retain.
        """
        self.eval()
        kept = len(self.memory)
        with counting(blocks_of(self.backbone)) as counts:
            network = lambda x: self.heads[task.id](self.backbone(x))  # noqa: E731
            importance = self.gradients(network, task, task.images, task.labels - task.first_class)
        if kept:
            remembered = self.gradients(self, task, self.memory.images[:kept], self.memory.labels[:kept])
            importance = {name: importance[name] + remembered[name] for name in importance}
        return {
            name: chosen(weight.detach().abs() + importance[name], counts[half], self.kwinner_sparsity, self.sparsity)
            for (name, half), weight in zip(self.halves.items(), self.masked.values(), strict=True)
        }

    def gradients(self, ask: Network, task: Task, images: Tensor, labels: Tensor) -> Masks:
        """Return absolute gradients of the mean cross-entropy of raw images (N, H, W, 3), not augmented."""
        weights = self.masked
        sums = {name: torch.zeros_like(weight) for name, weight in weights.items()}
        for raw, y in zip(images.split(BATCH), labels.split(BATCH), strict=True):
            logits = ask(task.view.test(raw.to(self.device)))
            loss = F.cross_entropy(logits, y.to(self.device), reduction="sum") / len(labels)
            for total, gradient in zip(sums.values(), torch.autograd.grad(loss, [*weights.values()]), strict=True):
                total += gradient
        return {name: total.abs() for name, total in sums.items()}
