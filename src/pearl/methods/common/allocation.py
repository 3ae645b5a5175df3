"""Ranks found by training: a phase whose low-rank updates lose components according to a rule."""

from collections.abc import Callable, Generator, Iterable, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from pearl.data.batches import Batch, Task
from pearl.methods.base import Method, Phase, own_loss
from pearl.nn.dynamic.gated import Factors, Scale
from pearl.nn.dynamic.rule import DynamicRule, Layers
from pearl.nn.precision import outside_autocast
from pearl.nn.rank_rules import PaperRule, RankRule
from pearl.settings.declared import Options, UpcomingTask
from pearl.settings.parts import RANK_RULES

IMAGES = 256  # images per forward pass when a rule needs a loss


def rule_of(options: Options) -> RankRule:
    """Return the rank rule among a method's options; the paper's if there is no such option."""
    rule = options.get("rank") or PaperRule()
    return RANK_RULES.build(dict(rule)) if isinstance(rule, Mapping) else rule


def probes(options: Options) -> bool:
    """Return True if there is a probe, which the rank rule or the initialisation of the updates needs."""
    return rule_of(options).needs_probe or options.get("init", "kaiming") != "kaiming"


def allocates(options: Options) -> bool:
    """Return True if ranks are found in a separate phase."""
    rule = rule_of(options)
    return isinstance(rule, DynamicRule) and rule.then == "restart"


def probed_images(task: UpcomingTask) -> int:
    """Return the number of images that the probe is trained on."""
    share = task.options.get("probe_images", 1)
    return task.images if share == 1 else task.kept(1 - share)


def updated_images(phase: str, task: UpcomingTask) -> int:
    """Return the number of images for updates in the phase `allocate` or `adapt`."""
    rule = rule_of(task.options)
    if isinstance(rule, DynamicRule) and rule.holds_out and phase == phase_of(rule):
        return task.kept(rule.holds_out)
    return task.images


def phase_of(rule: DynamicRule) -> str:
    """Return the phase in which a rule finds ranks."""
    return "adapt" if rule.then == "continue" else "allocate"


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
    """Train updates of the rule's start rank with `params`, and return their remaining components.

    `network` computes features (B, dim) of images with updates A and B.
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
        phase_of(rule),
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
