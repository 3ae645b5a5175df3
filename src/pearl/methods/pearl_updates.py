"""PEARL's sub-networks: reference weights with low-rank updates, and their own norm layers."""

from collections.abc import Collection, Generator, Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from pearl.data.batches import Task
from pearl.errors import ConfigError
from pearl.methods.base import Phase
from pearl.methods.common.allocation import allocate
from pearl.methods.common.subnetworks import ClassifierOptions, SubNetworks
from pearl.nn import lowrank
from pearl.nn.dynamic.gated import Factors
from pearl.nn.dynamic.rule import DynamicRule
from pearl.nn.functional import functional_call
from pearl.nn.lowrank import Fold, Init, Target
from pearl.nn.rank_rules import Choice
from pearl.nn.task_modules import TaskTensors


class LowRankNetworks(SubNetworks):
    """A sub-network per task: W = W_reference + scale * B A for each target, with its own norm layers and head.

    Parameters are those of `Pearl`.
    """

    frozen_start = True

    def __init__(
        self,
        backbone: nn.Module,
        classifier: ClassifierOptions,
        *,
        targets: str | list[str],
        fold: Fold,
        init: Init,
        alpha: float | Literal["2r"],
        lora_bias: bool,
        reference: Literal["auto", "given", "first_task"],
    ) -> None:
        super().__init__(backbone, classifier)
        self.targets = lowrank.select_targets(backbone, targets)
        self.norms, self.norm_statistics = lowrank.task_norms(backbone)
        if lora_bias:
            self._check_biases()
        self.fold, self.init, self.alpha, self.lora_bias = fold, init, alpha, lora_bias
        if reference == "auto":
            reference = "given" if backbone.pretrained else "first_task"
        self.first_adapted = 0 if reference == "given" else 1
        # "t.A.layer", "t.B.layer" and their biases "t.a.layer", "t.b.layer", "t.dense.layer", "t.norm.parameter"
        self.tensors = TaskTensors()
        # "t.norm.running mean ...", "t.threshold": of each low-rank target in order
        self.statistics = TaskTensors(buffers=True)

    @property
    def low_rank(self) -> list[Target]:
        """Return the targets with low-rank updates; the others have full copies (`dense`)."""
        return [target for target in self.targets if not target.dense]

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

    def allocate_ranks(
        self, task: Task, head: nn.Linear, rule: DynamicRule, probe: nn.Module
    ) -> Generator[Phase, None, dict[str, Choice]]:
        """Let the rule find ranks by training updates, and store the remaining components."""
        layers, t = self.matrices(probe), task.id
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

    def matrices(self, probe: nn.Module) -> dict[str, tuple[Tensor, Tensor]]:
        """Return the weights of every low-rank target in the reference and in the probe, as matrices."""
        reference, tuned = dict(self.backbone.named_parameters()), dict(probe.named_parameters())
        return {each.label: (self._matrix(each, reference), self._matrix(each, tuned)) for each in self.low_rank}

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

    def sub_network(self, t: int) -> tuple[nn.Module, dict[str, Tensor]]:
        """See `SubNetworks.sub_network`. A task without training has the reference."""
        return self.backbone, self.weights(t) if self.is_adapted(t) else {}

    def is_adapted(self, t: int) -> bool:
        """Return True if task t has its own updates."""
        return f"{t}.threshold" in self.statistics

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


def _bias_of(target: Target) -> str:
    return target.parameter.removesuffix("weight") + "bias"
