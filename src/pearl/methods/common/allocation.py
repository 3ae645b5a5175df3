"""Ranks found by training: a phase whose low-rank updates lose components by a rule."""

from collections.abc import Callable, Generator, Iterable
from functools import partial

import torch
from torch import Tensor, nn

from pearl.data.batches import Batch, Task
from pearl.methods.base import Method, Phase, own_loss
from pearl.nn.dynamic.gated import Factors, Scale
from pearl.nn.dynamic.rule import DynamicRule, Layers
from pearl.nn.precision import outside_autocast

IMAGES = 256  # that pass at once where a rule asks for a loss


def allocate(
    rule: DynamicRule,
    layers: Layers,
    task: Task,
    method: Method,
    network: Callable[[Factors, Tensor], Tensor],
    head: nn.Module,
    params: Iterable[nn.Parameter],
    scale: Scale,
) -> Generator[Phase, None, Factors]:
    """Train updates of the rule's start rank with `params`, and give what it leaves of them.

    `network` makes features (B, dim) of images with updates A and B.
    """
    budget, updates = rule.parameters(layers), rule.updates(layers)
    part, held = task.hold_out(rule.holds_out) if rule.holds_out else (task, task)

    def loss(batch: Batch) -> Tensor:
        with outside_autocast(batch.x):
            factors = rule.factors(updates, scale, phase.done)
            penalty = rule.penalty(updates, phase.done, phase.planned)
        return own_loss(partial(network, factors), head, task)(batch) + penalty

    trained = [parameter for parameter in updates.parameters() if parameter.requires_grad]
    phase = Phase(
        "adapt" if rule.then == "continue" else "allocate",
        [*trained, *params],
        loss,
        extra=updates,
        data=part,
        after_backward=lambda: rule.observe(updates, phase.done, phase.planned),
        after_step=lambda batch: rule.shrink(updates, phase.done, phase.planned, budget),
    )
    yield phase

    @torch.no_grad()
    def of_images() -> float:
        shown, factors = held if len(held) else part, rule.factors(updates, scale, None)
        measure = own_loss(partial(network, factors), head, task)
        return float(sum(len(batch.y) * measure(batch) for batch in shown.in_order(IMAGES))) / len(shown)

    method.eval()
    rule.finish(updates, budget, of_images)
    return rule.left(updates, scale)
