"""PEARL: Parameter Efficient Continual Learning with Dynamic Low-Rank Adaptation (Bhat et al., TMLR 2026).

For each task: fine-tune a copy of the reference network (probe), choose the rank of each layer's low-rank update by its
distance from the reference, train that update with the norm layers and a head from scratch (adapt), freeze it.
"""

import copy
import math
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from pearl.data.batches import Task
from pearl.errors import ConfigError
from pearl.methods.base import Network, Phase, own_loss, whole
from pearl.methods.common.allocation import allocate, allocates, probed_images, probes, updated_images
from pearl.methods.common.classifiers import Classifier
from pearl.methods.common.probes import TargetProbe, step_down, with_tensors
from pearl.methods.common.subnetworks import HEADS, SubNetworks
from pearl.nn import lowrank
from pearl.nn.dynamic.gated import Factors
from pearl.nn.dynamic.rule import DynamicRule
from pearl.nn.fast.beside import Beside, fits_beside, with_beside
from pearl.nn.fast.stacking import Updates, stack_updates, stackable, stacked, worthwhile
from pearl.nn.functional import functional_call
from pearl.nn.growing import TaskTensors
from pearl.nn.inner import WithInner
from pearl.nn.lowrank import Fold, Init, Target
from pearl.nn.rank_rules import Choice, FixedRule, PaperRule, RankRule
from pearl.settings.born import Born
from pearl.settings.declared import Phases, PhaseSpec
from pearl.settings.parts import CLASSIFIERS, RANK_RULES


class Pearl(SubNetworks):
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
        classifier: `heads` - the concatenated logits of the heads (the paper); `chain` - class statistics in the
            feature spaces of the first sub-networks, see `common.chain`.
        probe: what is trained to measure how far each layer moves (only the first is the paper's): `full` - the whole
            network (the paper); `targets` - the targets and the head; `lora` - updates of rank `probe_rank`, norm
            layers and head; `adam` - only the head, then one step of all targets, of `probe_distance`, in Adam's
            direction; `gradients` - the same along the gradient.
        probe_images: the share of each class's images that the probe is trained on.
        probe_rank: rank of the updates of the probe `lora`.
        probe_distance: length of the step of the probes `adam` and `gradients`: the threshold of all targets together.
    """

    own_classes = True
    isolated = True
    phases: Phases = (
        PhaseSpec("reference", "reference"),
        PhaseSpec("probe", "adapted", probed_images, when=probes),
        PhaseSpec("allocate", "adapted", partial(updated_images, "allocate"), when=allocates, added_later=True),
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
        classifier: Annotated[Classifier, CLASSIFIERS, Born({"name": "heads"})] = HEADS,
        probe: Annotated[Literal["full", "targets", "lora", "adam", "gradients"], Born("full")] = "full",
        probe_images: Annotated[float, Field(gt=0, le=1), Born(1.0)] = 1.0,
        probe_rank: Annotated[int, Field(ge=1), Born(32)] = 32,
        probe_distance: Annotated[float, Field(gt=0, lt=1), Born(0.8)] = 0.8,
    ) -> None:
        super().__init__(backbone, classifier)
        self.targets = lowrank.select_targets(backbone, targets)
        self.norms, self.norm_statistics = lowrank.task_norms(backbone)
        if lora_bias:
            self._check_biases()
        if isinstance(rank, DynamicRule) and (lora_bias or init != "kaiming"):
            what = "lora_bias" if lora_bias else f"init={init}"
            raise ConfigError(
                f"method.{what}: has no effect with a rank rule that trains updates itself; leave it at its default"
            )
        self.rank, self.fold, self.init, self.alpha, self.lora_bias = rank, fold, init, alpha, lora_bias
        self.probe, self.probe_images = probe, probe_images
        self.probe_rank, self.probe_distance = probe_rank, probe_distance
        if reference == "auto":
            reference = "given" if backbone.pretrained else "first_task"
        self.first_adapted = 0 if reference == "given" else 1
        # "t.A.layer", "t.B.layer" and their biases "t.a.layer", "t.b.layer", "t.dense.layer", "t.norm.parameter"
        self.tensors = TaskTensors()
        # "t.norm.running mean ...", "t.threshold": of each low-rank target in order
        self.statistics = TaskTensors(buffers=True)

    @property
    def low_rank(self) -> list[Target]:
        """The targets with low-rank updates; the others have full copies (`dense`)."""
        return [target for target in self.targets if not target.dense]

    # ------------------------------------------------------------------------------------------------ learning

    def learn_own(self, task: Task) -> Iterator[Phase]:
        """Algorithms 1 and 2 of the paper."""
        self.requires_grad_(False)  # earlier tasks' parameters are fixed
        head = self.heads.grow(len(task.classes)).to(self.device)
        if task.id < self.first_adapted:
            yield whole("reference", self.backbone, head, task)
            self.requires_grad_(False)
            return

        probe = self.backbone
        if self.rank.needs_probe or self.init != "kaiming":
            probe = yield from self._probed(task, head)
        choices = self.choose_ranks(probe)
        if isinstance(self.rank, DynamicRule) and choices:  # so far the initial ones
            choices = yield from self._allocated(task, head, self.rank, probe)
            if self.rank.then == "continue":
                self.requires_grad_(False)
                return

        new = self.start_updates(task.id, probe, choices)
        del probe  # a whole network, no longer needed
        if self.init == "kaiming":
            head.reset_parameters()
        params = [*new, *head.parameters()]
        yield Phase("adapt", params, own_loss(self._in_training(task.id), head, task), steady=True)
        self.requires_grad_(False)

    def _probed(self, task: Task, head: nn.Module) -> Generator[Phase, None, nn.Module]:
        """Train the probe, and return it as a network."""
        data = task if self.probe_images == 1 else task.hold_out(1 - self.probe_images)[0]
        if self.probe == "lora":
            fixed = FixedRule(r=self.probe_rank).choose_all(self._layers(self.backbone))
            params = [*self.start_updates(task.id, self.backbone, fixed), *head.parameters()]
            yield Phase("probe", params, own_loss(self._in_training(task.id), head, task), data=data, steady=True)
            return with_tensors(self.backbone, self.weights(task.id))
        if self.probe == "targets":
            some = TargetProbe(self.backbone, self.targets)
            params = [*some.trained.parameters(), *head.parameters()]
            loss = own_loss(some, head, task)
            yield Phase("probe", params, loss, extra=some, data=data, steady=True, reads=(some, head))
            return with_tensors(some.network, some.weights())
        probe = copy.deepcopy(self.backbone).requires_grad_(self.probe == "full")
        params = [p for p in (*probe.parameters(), *head.parameters()) if p.requires_grad]
        reads = (probe, head)
        yield Phase("probe", params, own_loss(probe, head, task), extra=probe, data=data, steady=True, reads=reads)
        if self.probe != "full":
            step_down(probe, head, data, self.low_rank, self.probe_distance, as_adam=self.probe == "adam")
        return probe

    def _allocated(
        self, task: Task, head: nn.Linear, rule: DynamicRule, probe: nn.Module
    ) -> Generator[Phase, None, dict[str, Choice]]:
        """Let the rule find ranks by training updates, and store the remaining components."""
        layers, t = self._layers(probe), task.id
        none = {name: Choice(0, min(weight.shape), 1.0) for name, (weight, _) in layers.items()}
        params = [*self.start_updates(t, self.backbone, none), *head.parameters()]
        head.reset_parameters()

        def network(updates: Factors, x: Tensor) -> Tensor:
            return functional_call(self.backbone, self.weights(t, updates=updates), (x,))

        left = yield from allocate(rule, layers, task, self, network, head, params, self.scale)
        for label, (a, b) in left.items():
            self.tensors.add(f"{t}.A.{label}", a)
            self.tensors.add(f"{t}.B.{label}", b / self.scale(len(a)))
        return {name: Choice(len(left[name][0]), choice.full, 1.0) for name, choice in none.items()}

    def _layers(self, probe: nn.Module) -> dict[str, tuple[Tensor, Tensor]]:
        """Return the weights of every low-rank target in the reference and in the probe, as matrices."""
        reference, tuned = dict(self.backbone.named_parameters()), dict(probe.named_parameters())
        return {each.label: (self._matrix(each, reference), self._matrix(each, tuned)) for each in self.low_rank}

    def choose_ranks(self, probe: nn.Module) -> dict[str, Choice]:
        """Return the rank of every low-rank target, from its weights in the probe and the reference."""
        return self.rank.choose_all(self._layers(probe))

    def start_updates(self, t: int, probe: nn.Module, choices: dict[str, Choice]) -> list[nn.Parameter]:
        """Create task t's tensors: from scratch, or from the probe (`init: svd`)."""
        add, afresh = self.tensors.add, self.init == "kaiming"
        reference, tuned = dict(self.backbone.named_parameters()), dict(probe.named_parameters())
        for target in self.targets:
            label = target.label
            if target.dense:
                add(f"{t}.dense.{label}", target.read(reference if afresh else tuned))
                continue
            k, start = choices[label].rank, self._matrix(target, reference)
            if afresh:
                a, b = lowrank.kaiming_factors((start.shape[0], start.shape[1]), k, like=start)
            else:
                moved = self._matrix(target, tuned) - start
                a, b = lowrank.svd_factors(moved, k, self.scale(k), self.init)
            add(f"{t}.A.{label}", a)
            add(f"{t}.B.{label}", b)
            if self.lora_bias and len(target.shape) == 2:
                add(f"{t}.a.{label}", torch.zeros(k, device=start.device))
                add(f"{t}.b.{label}", torch.zeros(target.shape[0], device=start.device))
        for name in self.norms:
            # weight 1, bias 0: the initial values of a norm layer
            value = tuned[name] if not afresh else torch.full_like(reference[name], float(name.endswith("weight")))
            add(f"{t}.norm.{name}", value)
        buffers, tuned_buffers = dict(self.backbone.named_buffers()), dict(probe.named_buffers())
        for name in self.norm_statistics:
            fresh = torch.full_like(buffers[name], float(name.endswith("running_var")))
            self.statistics.add(f"{t}.norm.{name}", fresh if afresh else tuned_buffers[name])
        thresholds = [choice.threshold for choice in choices.values()]
        self.statistics.add(f"{t}.threshold", torch.tensor(thresholds, dtype=torch.float64))
        return [p for name, p in self.tensors.named_parameters() if name.startswith(f"{t}/") and p.numel()]

    # ---------------------------------------------------------------------------------------------- sub-networks

    def weights(
        self, t: int, without: Collection[Target] = (), updates: Mapping[str, tuple[Tensor, Tensor]] | None = None
    ) -> dict[str, Tensor]:
        """Return the weights of task t's sub-network that differ from the reference, by the backbone's names.

        `updates` are A and B of each low-rank target, by label and including the scale, to use instead of the stored
        ones.
        """
        changed = {name: self.tensors[f"{t}.norm.{name}"] for name in self.norms}
        changed |= {name: self.statistics[f"{t}.norm.{name}"] for name in self.norm_statistics}
        with torch.autocast(self.device.type, enabled=False):  # updates are merged in float32, then cast once
            for target in self.targets:
                if target in without:
                    continue
                name = target.parameter
                weight = changed.get(name, self.backbone.get_parameter(name))
                if target.dense:
                    changed[name] = self.tensors[f"{t}.dense.{target.label}"]
                    continue
                if updates is None:
                    a, b = self.tensors[f"{t}.A.{target.label}"], self.tensors[f"{t}.B.{target.label}"]
                    scale = self.scale(a.shape[0])
                else:
                    (a, b), scale = updates[target.label], 1.0
                if not len(a):
                    continue  # the layer keeps the reference's weight
                if target.rows is None:
                    changed[name] = lowrank.updated(weight, a, b, scale, self.fold)
                else:
                    changed[name] = target.add(weight, (scale * b) @ a)
                if self.lora_bias and len(target.shape) == 2:
                    bias = _bias_of(target)
                    inner, outer = self.tensors[f"{t}.a.{target.label}"], self.tensors[f"{t}.b.{target.label}"]
                    old = changed.get(bias, self.backbone.get_parameter(bias))
                    changed[bias] = target.add(old, scale * (b @ inner + outer))
        return changed

    def task_features(self, x: Tensor, t: int) -> Tensor:
        """Return features (B, dim) of task t's sub-network."""
        if not self.is_adapted(t):
            return self.backbone(x)
        return functional_call(self.backbone, self.weights(t), (x,))

    def _in_training(self, t: int) -> Network:
        """Return task t's sub-network for training: the same function, on a CPU with parallel low-rank branches."""
        thin: dict[Target, Beside] = {}
        for target in self.targets if self.fast else ():
            layer = target.parameter.removesuffix(".weight")
            if not target.dense:
                a, b = self.tensors[f"{t}.A.{target.label}"], self.tensors[f"{t}.B.{target.label}"]
                if fits_beside(self.backbone.get_submodule(layer), len(a), self.fold):
                    thin[target] = Beside(layer, a, b, self.scale(len(a)), self.fold)
        if not thin:
            return partial(self.task_features, t=t)
        network = with_beside(self.backbone, thin.values())
        return lambda x: functional_call(network, self.weights(t, without=thin), (x,))

    def sub_network(self, t: int) -> tuple[nn.Module, dict[str, Tensor]]:
        """See `SubNetworks.sub_network`. A task without training has the reference."""
        return self.backbone, self.weights(t) if self.is_adapted(t) else {}

    def is_adapted(self, t: int) -> bool:
        """Return True if task t has its own updates."""
        return f"{t}.threshold" in self.statistics

    def at_once(self) -> tuple[Network, int] | None:
        """Return all sub-networks of a ViT in one batch; the updates are not merged. See `Method.at_once`."""
        names = [target.parameter.removesuffix(".weight") for target in self.targets]
        chosen = list(range(len(self.heads))) if self.chain is None else self.chain.births
        if self.norms or not stackable(self.backbone, names) or len(chosen) <= self.first_adapted:
            return None
        updates: dict[str, list[Updates]] = {name: [] for name in names}
        for name, target in zip(names, self.targets, strict=True):
            updates[name].append(self._stacked(target, chosen[self.first_adapted :]))
        network, tasks = stacked(self.backbone, updates), len(chosen)
        if self.chain is not None:
            network = WithInner(network, self.layers)

        def logits(x: Tensor) -> Tensor:
            features = network(x.repeat(tasks, 1, 1, 1)).unflatten(0, (tasks, len(x)))
            if self.chain is not None:
                return self.chain.head()(features.unbind())
            return torch.cat([head(own) for head, own in zip(self.heads, features, strict=True)], dim=1)

        return logits, worthwhile(self.backbone, tasks, self.device)

    def _stacked(self, target: Target, tasks: Sequence[int]) -> Updates:
        """Stack the tasks' updates of a linear target, after the tasks that have none."""
        low_rank, label = [], target.label
        for t in tasks:
            a, b = self.tensors[f"{t}.A.{label}"], self.tensors[f"{t}.B.{label}"]
            scale = self.scale(a.shape[0])
            bias = b.new_zeros(b.shape[0])
            if self.lora_bias:
                bias = scale * (b @ self.tensors[f"{t}.a.{label}"] + self.tensors[f"{t}.b.{label}"])
            low_rank.append((a, scale * b, bias))
        return stack_updates(self.first_adapted, low_rank, target.rows[0] if target.rows else 0)

    def _check_biases(self) -> None:
        named = dict(self.backbone.named_parameters())
        bare = [target for target in self.targets if len(target.shape) == 2 and _bias_of(target) not in named]
        if bare:
            raise ConfigError(f"method.lora_bias: {bare[0].label} has no bias to add to; set lora_bias=false")

    def _matrix(self, target: Target, weights: dict[str, nn.Parameter]) -> Tensor:
        return lowrank.to_matrix(target.read(weights).detach(), self.fold)

    def scale(self, rank: int) -> float:
        """Return the factor of B A for this rank."""
        return 2.0 if self.alpha == "2r" else self.alpha / max(rank, 1)

    # --------------------------------------------------------------------------------------------------- records

    def notes(self, task: Task) -> list[str]:
        """See `SubNetworks.notes`; for the first task also the share of the network that a task adapts."""
        told = super().notes(task)
        if task.id:
            return told
        layers = [m for m in self.backbone.modules() if isinstance(m, nn.Linear | nn.Conv2d)]
        adapted = sum(math.prod(target.shape) for target in self.targets)
        share = 100 * adapted / sum(layer.weight.numel() for layer in layers)
        own = f", and has its own {len(self.norms)} parameters of norm layers" if self.norms else ""
        adapts = (
            f"a task adapts {len(self.targets)} of {len(layers)} layers, which hold {share:.0f} % of the weights{own}"
        )
        return [*told, adapts]

    def facts(self, task: int) -> dict[str, Any]:
        """Return threshold, rank and full rank of every low-rank target of a task."""
        chain = super().facts(task)
        if not self.is_adapted(task):
            return {"layers": [], **chain}
        return {
            **chain,
            "fold": self.fold,
            "layers": [
                {
                    "layer": target.label,
                    "threshold": threshold,
                    "rank": self.tensors[f"{task}.A.{target.label}"].shape[0],
                    "full_rank": min(lowrank.matrix_shape(target.shape, self.fold)),
                    "rows_and_columns": sum(lowrank.matrix_shape(target.shape, self.fold)),
                }
                for target, threshold in zip(self.low_rank, self.statistics[f"{task}.threshold"].tolist(), strict=True)
            ],
        }


def _bias_of(target: Target) -> str:
    return target.parameter.removesuffix("weight") + "bias"
