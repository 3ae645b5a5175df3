"""Faster forms of PEARL's sub-networks, with the same results: in training on a CPU, and for few images of a ViT."""

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from pearl.methods.base import Network
from pearl.methods.pearl_updates import LowRankNetworks
from pearl.nn.fast.parallel_lora import ParallelLora, fits_beside, with_beside
from pearl.nn.fast.stacking import Updates, stack_updates, stackable, stacked, worthwhile
from pearl.nn.functional import functional_call
from pearl.nn.lowrank import Target


def in_training(method: LowRankNetworks, t: int) -> Network:
    """Return task t's sub-network for training: the same function, on a CPU with parallel low-rank branches."""
    thin: dict[Target, ParallelLora] = {}
    for target in method.targets if method.fast else ():
        layer = target.parameter.removesuffix(".weight")
        if not target.dense:
            a, b = method.tensors[f"{t}.A.{target.label}"], method.tensors[f"{t}.B.{target.label}"]
            if fits_beside(method.backbone.get_submodule(layer), len(a), method.fold):
                thin[target] = ParallelLora(layer, a, b, method.scale(len(a)), method.fold)
    if not thin:
        return partial(method.task_features, t=t)
    network = with_beside(method.backbone, thin.values())
    return lambda x: functional_call(network, method.weights(t, without=thin), (x,))


def at_once(method: LowRankNetworks) -> tuple[Network, int] | None:
    """Return all sub-networks of a ViT in one batch; the updates are not merged. See `Method.at_once`."""
    names = [target.parameter.removesuffix(".weight") for target in method.targets]
    classifier = method.classifier
    chosen = classifier.sub_networks()
    fits = stackable(method.backbone, names) and not method.norms and not classifier.bf16
    if not fits or len(chosen) <= method.first_adapted:
        return None
    updates: dict[str, list[Updates]] = {name: [] for name in names}
    for name, target in zip(names, method.targets, strict=True):
        updates[name].append(_stacked(method, target, chosen[method.first_adapted :]))
    network, tasks = classifier.network(stacked(method.backbone, updates)), len(chosen)

    def logits(x: Tensor) -> Tensor:
        with classifier.computing(x):
            outputs = network(x.repeat(tasks, 1, 1, 1)).unflatten(0, (tasks, len(x)))
        return classifier.logits(outputs.unbind())

    return logits, worthwhile(method.backbone, tasks, method.device)


def _stacked(method: LowRankNetworks, target: Target, tasks: Sequence[int]) -> Updates:
    """Return the updates of tasks to a linear target, after those that have none."""
    low_rank, label = [], target.label
    for t in tasks:
        a, b = method.tensors[f"{t}.A.{label}"], method.tensors[f"{t}.B.{label}"]
        scale = method.scale(a.shape[0])
        bias = b.new_zeros(b.shape[0])
        if method.lora_bias:
            bias = scale * (b @ method.tensors[f"{t}.a.{label}"] + method.tensors[f"{t}.b.{label}"])
        low_rank.append((a, scale * b, bias))
    return stack_updates(method.first_adapted, low_rank, target.rows[0] if target.rows else 0)
