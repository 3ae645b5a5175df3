"""PEARL: Parameter Efficient Continual Learning with Dynamic Low-Rank Adaptation (Bhat et al., TMLR 2026).

For each task: fine-tune a copy of the reference network (probe), choose the rank of each layer's low-rank update by its
distance from the reference, train that update with the norm layers and a head from scratch (adapt), freeze it.
"""

import copy
from collections.abc import Generator, Iterator
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field
from torch import nn

from pearl.data.batches import Task
from pearl.errors import ConfigError
from pearl.methods.base import Network, Phase, own_loss, whole
from pearl.methods.common.allocation import allocates, probed_images, probes, updated_images
from pearl.methods.common.probes import TargetProbe
from pearl.methods.common.rotations import TURNS, turned_loss
from pearl.methods.common.subnetworks import HEADS, ClassifierOptions
from pearl.methods.pearl_records import adapted_share, layer_facts
from pearl.methods.pearl_speed import at_once, in_training
from pearl.methods.pearl_updates import LowRankNetworks
from pearl.nn.dynamic.rule import DynamicRule
from pearl.nn.lowrank import Fold, Init
from pearl.nn.rank_rules import Choice, PaperRule, RankRule
from pearl.settings.declared import Phases, PhaseSpec
from pearl.settings.parts import CLASSIFIERS, RANK_RULES


class Pearl(LowRankNetworks):
    """A sub-network per task: reference weights + low-rank updates, with its own norm layers and head.

    Options:
        targets: layers to adapt; words and regular expressions, see `lowrank.select_targets`.
        rank: the rank rule. A rule that finds ranks by training (`nn.dynamic`) may replace the probe, or, with `then:
            continue`, both phases.
        fold: 2-D view of a convolution, see `lowrank.to_matrix`.
        init: `kaiming` initialises updates, norm layers and head anew (the method); `svd` continues from the probe's
            truncated task vectors, norm layers and head (the ablation); `svd_paper` does so with S in both factors.
        alpha: the update is alpha/r * B A; "2r" for alpha = 2r, the paper's choice.
        lora_bias: biases in both factors of linear targets only, as the paper counts the ViT's parameters.
        reference: `given` - the backbone comes with weights (algorithm 1); `first_task` - task 1 trains it
            (algorithm 2); `auto` - the first if it was pretrained.
        classifier: `heads` - the concatenated logits of the heads (the paper); `statistics` - class statistics in the
            feature spaces of the first sub-networks, see `common.class_statistics`.
        probe: what is trained to measure how far each layer moves: `full` - the whole network (the paper); `targets` -
            the targets and the head.
        probe_images: the share of each class's images that the probe is trained on.
        rotations: in the reference phase and in adapt phases, images rotated by 90, 180 and 270 degrees are classes of
            their own, whose outputs are discarded afterwards. A step trains on four times `batch_size` images.
    """

    task_local_loss = True
    isolated = True
    phases: Phases = (
        PhaseSpec("reference", "reference"),
        PhaseSpec("probe", "adapted", probed_images, when=probes),
        PhaseSpec("allocate", "adapted", partial(updated_images, "allocate"), when=allocates),
        PhaseSpec("adapt", "adapted", partial(updated_images, "adapt")),
    )

    def __init__(
        self,
        backbone: nn.Module,
        *,
        targets: str | list[str] = "auto",
        rank: Annotated[RankRule, RANK_RULES] = PaperRule(),  # noqa: B008 - an immutable value
        fold: Fold = "spatial",
        init: Init = "kaiming",
        alpha: Annotated[float, Field(gt=0)] | Literal["2r"] = "2r",
        lora_bias: bool = False,
        reference: Literal["auto", "given", "first_task"] = "auto",
        classifier: Annotated[ClassifierOptions, CLASSIFIERS] = HEADS,
        probe: Literal["full", "targets"] = "full",
        probe_images: Annotated[float, Field(gt=0, le=1)] = 1.0,
        rotations: bool = False,
    ) -> None:
        updates: dict[str, Any] = {"targets": targets, "fold": fold, "init": init, "alpha": alpha}
        super().__init__(backbone, classifier, **updates, lora_bias=lora_bias, reference=reference)
        if isinstance(rank, DynamicRule) and (lora_bias or init != "kaiming"):
            what = "lora_bias" if lora_bias else f"init={init}"
            raise ConfigError(
                f"method.{what}: has no effect with a rank rule that trains updates itself; leave it at its default"
            )
        self.rank, self.probe, self.probe_images, self.rotations = rank, probe, probe_images, rotations

    # ------------------------------------------------------------------------------------------------ learning

    def learn_own(self, task: Task) -> Iterator[Phase]:
        """Train the sub-network of a task: algorithms 1 and 2 of the paper."""
        self.requires_grad_(False)  # earlier tasks' parameters are fixed
        head = self.heads.grow(len(task.classes)).to(self.device)
        if task.id < self.first_adapted:
            phase = whole("reference", self.backbone, head, task)
            yield self._with_rotations(phase, self.backbone, head, task) if self.rotations else phase
            self.requires_grad_(False)
            return

        probe = self.backbone
        if self.rank.needs_probe or self.init != "kaiming":
            probe = yield from self._probed(task, head)
        choices = self.choose_ranks(probe)
        if isinstance(self.rank, DynamicRule) and choices:  # so far the initial ones
            choices = yield from self.allocate_ranks(task, head, self.rank, probe)
            if self.rank.then == "continue":
                self.requires_grad_(False)
                return

        new = self.start_updates(task.id, probe, choices)
        del probe  # a whole network, no longer needed
        if self.init == "kaiming":
            head.reset_parameters()
        params, network = [*new, *head.parameters()], in_training(self, task.id)
        phase = Phase("adapt", params, own_loss(network, head, task), capturable=True)
        yield self._with_rotations(phase, network, head, task) if self.rotations else phase
        self.requires_grad_(False)

    def _with_rotations(self, phase: Phase, network: Network, head: nn.Module, task: Task) -> Phase:
        """Return the phase with a temporary head for the classes of rotated images."""
        others = self.heads.block((TURNS - 1) * len(task.classes)).to(self.device)
        depends_on = (*phase.depends_on, others) if phase.depends_on else ()
        params, loss = [*phase.trained, *others.parameters()], turned_loss(network, head, others, task)
        return replace(phase, params=params, loss=loss, extra=others, depends_on=depends_on)

    def _probed(self, task: Task, head: nn.Module) -> Generator[Phase, None, nn.Module]:
        """Train the probe, and return it as a network."""
        data = task if self.probe_images == 1 else task.hold_out(1 - self.probe_images)[0]
        targets = TargetProbe(self.backbone, self.targets) if self.probe == "targets" else None
        some = targets or copy.deepcopy(self.backbone).requires_grad_(True)
        params = [*(p for p in some.parameters() if p.requires_grad), *head.parameters()]
        loss = own_loss(some, head, task)
        yield Phase("probe", params, loss, extra=some, data=data, capturable=True, depends_on=(some, head))
        return targets.whole() if targets else some

    def choose_ranks(self, probe: nn.Module) -> dict[str, Choice]:
        """Return the rank of every low-rank target, from its weights in the probe and the reference."""
        return self.rank.choose_all(self.matrices(probe))

    # ------------------------------------------------------------------------------------- see pearl_speed, _records

    def at_once(self) -> tuple[Network, int] | None:
        """Return all sub-networks of a ViT in one batch; the updates are not merged. See `Method.at_once`."""
        return at_once(self)

    def notes(self, task: Task) -> list[str]:
        """See `SubNetworks.notes`; for the first task also the share of the network that a task adapts."""
        return super().notes(task) + ([] if task.id else [adapted_share(self)])

    def facts(self, task: int) -> dict[str, Any]:
        """Return threshold, rank and full rank of every low-rank target of a task."""
        return {**super().facts(task), **layer_facts(self, task)}
