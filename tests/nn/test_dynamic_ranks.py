"""AdaLoRA, DoRA, CoDyRA and DyLoRA against figures of their papers and calculations in numpy."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from pearl.data.batches import Task
from pearl.errors import ConfigError
from pearl.export.adapters import adapter
from pearl.methods.pearl import Pearl
from pearl.nn.dynamic.codyra import CodyraRule, codyra_stages
from pearl.nn.dynamic.dylora import DyloraRule
from pearl.nn.dynamic.gated import GatedUpdates
from pearl.nn.dynamic.pruned import AdaLoraRule, DoraRule, shares
from pearl.nn.dynamic.rule import DynamicRule
from pearl.nn.fast.stacking import stack_updates
from pearl.nn.rank_rules import FixedRule, PaperRule
from pearl.settings.config import load_config
from pearl.settings.declared import declared
from pearl.settings.parts import RANK_RULES
from pearl.testing.conformance import Watch
from pearl.testing.tiny import images, learn, logits, make_task, small_resnet, small_vit

SHAPES = {"wide": (6, 9), "flat": (2, 7), "tall": (8, 4)}
RULES = [AdaLoraRule, DoraRule, CodyraRule, DyloraRule]


def made(rule: DynamicRule, seed: int = 0) -> GatedUpdates:
    """A rule's updates of three matrices, with values in the place of all zeros."""
    torch.manual_seed(seed)
    updates = rule.updates({label: (torch.zeros(shape), torch.zeros(shape)) for label, shape in SHAPES.items()})
    with torch.no_grad():
        for parameter in updates.parameters():
            if parameter.requires_grad:
                parameter.normal_()
    return updates


def two(rank: int) -> float:
    return 2.0


def product(updates: GatedUpdates, i: int) -> np.ndarray:
    a, b, gates = updates.a[i], updates.b[i], updates.each(updates.gates)[i]
    return (b.double() @ torch.diag(gates.double()) @ a.double()).detach().numpy()


def train(rule: DynamicRule, updates: GatedUpdates, steps: int, budget: int) -> None:
    """Steps of gradient descent towards a target, as the phase has them."""
    target = {label: torch.randn(shape) for label, shape in SHAPES.items()}
    trained = [parameter for parameter in updates.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=0.02)
    for done in range(steps):
        factors = rule.factors(updates, two, done)
        loss = sum(((b @ a - target[label]) ** 2).mean() for label, (a, b) in factors.items())
        optimizer.zero_grad()
        (loss + rule.penalty(updates, done, steps)).backward()  # type: ignore[union-attr]
        rule.observe(updates, done, steps)
        optimizer.step()
        rule.shrink(updates, done + 1, steps, budget)
    rule.finish(updates, budget, lambda: 1.0)


# ------------------------------------------------------------------------------------------------ budgets, all rules


@pytest.mark.parametrize("seed", range(5))
def test_the_highest_scores_are_kept_as_long_as_they_fit(seed: int) -> None:
    updates, rng = made(AdaLoraRule(start=5)), np.random.default_rng(seed)
    score, budget = rng.permutation(len(updates.costs)), int(rng.integers(0, sum(updates.costs) + 5))
    keep = updates.within(budget, torch.from_numpy(score)).numpy()
    costs = np.array(updates.costs)
    assert costs[keep].sum() <= budget
    for i in np.flatnonzero(~keep):  # it did not fit beside those that are above it
        assert costs[keep & (score > score[i])].sum() + costs[i] > budget


@pytest.mark.parametrize("kind", RULES)
def test_budgets_are_those_of_a_fixed_rank_or_of_the_papers_rule_or_a_number(kind: Callable[..., DynamicRule]) -> None:
    layers = {label: (torch.randn(shape), torch.randn(shape)) for label, shape in SHAPES.items()}
    ranks = {label: PaperRule().choose(*pair).rank for label, pair in layers.items()}
    assert kind(budget="r", r=3).parameters(layers) == 3 * (6 + 9) + 2 * (2 + 7) + 3 * (8 + 4)
    assert kind(budget="paper").parameters(layers) == sum(ranks[label] * sum(SHAPES[label]) for label in SHAPES)
    assert kind(budget=17).parameters(layers) == 17
    assert kind(budget=None, start=5).parameters(layers) == 5 * 15 + 2 * 9 + 4 * 12  # all there is
    assert [kind(budget=budget).needs_probe for budget in ("r", "paper", 17, None)] == [False, True, False, False]


@pytest.mark.parametrize("steps", [1, 2, 3, 60])
@pytest.mark.parametrize("kind", [*RULES, lambda **options: DyloraRule(tolerance=None, **options)])
def test_what_is_left_fits_the_budget_and_is_the_update_that_was_trained(kind, steps: int) -> None:
    rule = kind(start=4, budget=60)
    updates = made(rule)
    train(rule, updates, steps, 60)
    left = rule.left(updates, two)
    spent = sum(len(a) * sum(SHAPES[label]) for label, (a, _) in left.items())
    assert 0 <= spent <= 60
    if not isinstance(rule, CodyraRule | DyloraRule):
        assert spent > 60 - max(updates.costs)
        for i, (a, b) in enumerate(left.values()):  # nothing that is not kept is in it
            np.testing.assert_allclose((b.double() @ a.double()).numpy(), 2 * product(updates, i), atol=1e-5)


@pytest.mark.parametrize("kind", [AdaLoraRule, DoraRule, CodyraRule])
def test_updates_are_nothing_at_the_start(kind: Callable[..., DynamicRule]) -> None:
    layers = {label: (torch.zeros(shape), torch.zeros(shape)) for label, shape in SHAPES.items()}
    updates = kind().updates(layers)
    assert not any(product(updates, i).any() for i in range(3))
    assert updates.ranks == [min(updates.ranks[0], 6), 2, 4]


@pytest.mark.parametrize("kind", RULES)
def test_everything_that_trains_within_a_budget_has_a_gradient(kind: Callable[..., DynamicRule]) -> None:
    """Several processes wait for the gradient of every parameter that trains."""
    rule = kind(start=1)
    updates = made(rule)
    factors = rule.factors(updates, two, 0)
    loss = sum((b @ a).square().sum() for a, b in factors.values()) + rule.penalty(updates, 0, 10)
    loss.backward()
    actual = {name for name, parameter in updates.named_parameters() if parameter.requires_grad}
    assert actual == {name for name, parameter in updates.named_parameters() if parameter.grad is not None}
    assert len(actual) == 6 + (kind is not DyloraRule)  # of DyLoRA no gates


# ----------------------------------------------------------------------------------------------------------- AdaLoRA


def test_adaloras_budget_falls_as_a_cubic() -> None:
    """K 1000, t_i 100, t_f 300, from 12 to 8."""
    rule = AdaLoraRule(tinit=0.1, tfinal=0.3)
    actual = [rule.allowed(k, 1000, 12, 8) for k in (50, 100, 101, 200, 250, 400, 700, 900)]
    assert actual == [12, 12, 11, 10, 9, 8, 8, 8] and rule.settled(1000) == 700


def test_adaloras_penalty_is_a_norm_that_is_not_squared() -> None:
    rule = AdaLoraRule(start=3, gamma=0.5)
    updates = made(rule)
    with torch.no_grad():
        for a, b in zip(updates.a, updates.b, strict=True):
            a.copy_(torch.linalg.qr(a.T)[0].T)
            b.copy_(torch.linalg.qr(b)[0])
        assert float(rule.penalty(updates, 0, 1)) == pytest.approx(0, abs=1e-6)
        updates.a[0].mul_(2)  # |4 I - I| = 3 sqrt(3), of six factors
        assert float(rule.penalty(updates, 0, 1)) == pytest.approx(0.5 * 3 * np.sqrt(3) / 6, rel=1e-5)


def test_adaloras_scores_of_a_constant_sensitivity() -> None:
    """I~ = I (1 - .85^k) and U = .15 I k .85^k after k steps: of lambda, and on average of both vectors."""
    rule = AdaLoraRule(start=2, tfinal=0.0)
    updates = made(rule)
    sensitivity = []
    for parameter in (*updates.a, *updates.b, updates.gates):
        parameter.grad = torch.randn_like(parameter)
        sensitivity.append((parameter * parameter.grad).abs().detach().double().numpy())
    k = 7
    for step in range(k):
        rule.observe(updates, step, 1000)
    of = [i * (1 - 0.85**k) * 0.15 * i * k * 0.85**k for i in sensitivity]
    expected = [of[3 + i][:, c].mean() + of[i][c].mean() + of[6][2 * i + c] for i in range(3) for c in range(2)]
    np.testing.assert_allclose(rule.scores(updates).numpy(), expected, rtol=1e-4)


def test_what_adalora_closes_comes_back_until_the_choice_is_settled() -> None:
    rule = AdaLoraRule(start=4, tinit=0.0, tfinal=0.5)
    updates = made(rule)
    train(rule, updates, 10, 30)
    closed = ~updates.kept
    assert closed.any() and not updates.gates[closed].any() and updates.gates[updates.kept].all()
    with torch.no_grad():
        updates.gates.fill_(1.0)
    rule.shrink(updates, 2, 100, 30)  # long before
    assert updates.gates.bool().sum() > updates.kept.sum()
    rule.shrink(updates, 801, 1000, 30)  # long after, and every step: the mask is what it was
    assert torch.equal(updates.gates.bool(), updates.kept) and torch.equal(~closed, updates.kept)


def test_the_choice_that_adalora_settles_is_closed_in_that_step() -> None:
    rule = AdaLoraRule(start=4, tinit=0.0, tfinal=0.5)
    updates = made(rule)
    assert updates.gates.all()
    rule.shrink(updates, 501, 1001, 30)  # before that, gates are closed every 5 steps
    assert not updates.kept.all() and torch.equal(updates.gates.bool(), updates.kept)


# -------------------------------------------------------------------------------------------------------------- DoRA


def test_doras_scores_are_shares_of_a_layers_norm() -> None:
    updates = made(DoraRule(start=4))
    for i, actual in enumerate(shares(updates)):
        a, b, gates = updates.a[i], updates.b[i], updates.each(updates.gates)[i].detach().numpy()
        parts = [g * np.outer(b[:, c].detach(), a[c].detach()) for c, g in enumerate(gates)]
        expected = [np.linalg.norm(part) / np.linalg.norm(sum(parts)) for part in parts]
        np.testing.assert_allclose(actual.detach().numpy(), expected, rtol=1e-4)
    with torch.no_grad():
        for a in updates.a:
            a.copy_(torch.linalg.qr(a.T)[0].T)  # orthogonal components: squares sum to 1
        for actual in shares(updates):
            assert float(actual.square().sum()) == pytest.approx(1, rel=1e-4)
        updates.gates.zero_()
    assert not torch.cat([*shares(updates)]).any()


def test_dora_prunes_between_15_and_50_percent_of_the_steps() -> None:
    rule = DoraRule()
    actual = [rule.allowed(k, 1000, 1200, 800) for k in (1, 150, 325, 499)]
    assert actual == [1200, 1200, 1150, int(1200 - 400 * (349 / 350) ** 3)] and rule.settled(1000) == 500
    rule = DoraRule(start=3)
    updates = made(rule)
    for step in range(1, 5):  # smoothed from 0
        now = torch.cat([*shares(updates)]).detach()
        rule.shrink(updates, step, 1000, 1)
        np.testing.assert_allclose(rule.scores(updates), now * (1 - 0.9**step), rtol=1e-4)


def test_doras_penalty_is_the_mean_variance_until_pruning_ends() -> None:
    rule = DoraRule(start=3)
    updates = made(rule)
    vectors = [v.detach().numpy() for a, b in zip(updates.a, updates.b, strict=True) for v in (*a, *b.T)]
    expected = 0.1 * np.mean([v.var(ddof=1) for v in vectors])
    assert float(rule.penalty(updates, 499, 1000).detach()) == pytest.approx(expected, rel=1e-5)
    assert rule.penalty(updates, 500, 1000) == 0
    with torch.no_grad():
        for factor in (*updates.a, *updates.b):
            factor.fill_(3)
        assert float(rule.penalty(updates, 0, 1000)) == 0


# ------------------------------------------------------------------------------------------------------------ CoDyRA


def test_codyras_thresholds_sum_to_that_of_the_authors_steps() -> None:
    stages = codyra_stages(500)
    assert not any(stages[:251]) and stages[251] == 1 and stages[499] == 49
    assert 0.005 / 49 * sum(stages) == pytest.approx(0.6499, abs=5e-5)


def test_codyra_shrinks_by_a_soft_threshold() -> None:
    """Gates between the threshold and twice of it are not zeroed."""
    rule = CodyraRule(start=2, shrinkage=0.005 * sum(codyra_stages(500)) / 49)
    updates = made(rule)
    gates = torch.tensor([0.003, 0.007, 0.012, -0.007, -0.02, 0.0])
    with torch.no_grad():
        updates.gates.copy_(gates)
    rule.shrink(updates, 200, 500, 0)
    assert torch.equal(updates.gates, gates)  # the first half is dense
    rule.shrink(updates, 500, 500, 0)
    expected = torch.tensor([0, 0.002, 0.007, -0.002, -0.015, 0])
    torch.testing.assert_close(updates.gates.detach(), expected, rtol=0, atol=1e-7)
    rule.finish(updates, 10**9, lambda: 0.0)
    assert updates.kept.tolist() == [False, True, True, True, True, False]
    rule.finish(updates, 9 + 12 + 8, lambda: 0.0)  # the largest that fit
    assert updates.kept.tolist() == [False, False, True, False, True, False]


def test_codyra_without_shrinkage_loses_no_rank_and_has_no_scale() -> None:
    rule = CodyraRule(start=3, shrinkage=0)
    updates = made(rule)
    train(rule, updates, 10, 10**9)
    for i, (a, b) in enumerate(rule.left(updates, two).values()):
        np.testing.assert_allclose((b.double() @ a.double()).numpy(), product(updates, i), atol=1e-5)
    assert updates.kept.all()


def test_gates_of_codyra_start_as_standard_normal_numbers() -> None:
    torch.manual_seed(0)
    gates = CodyraRule(start=200).updates({"wide": (torch.zeros(200, 200), torch.zeros(200, 200))}).gates.detach()
    np.testing.assert_allclose([gates.mean(), gates.std()], [0, 1], atol=0.2)
    np.testing.assert_allclose(gates.abs().sort().values[[50, 100, 150]], [0.32, 0.67, 1.15], atol=0.2)


# ------------------------------------------------------------------------------------------------------------ DyLoRA


@pytest.mark.parametrize("frozen", [True, False])
def test_a_step_of_dylora_trains_the_first_components(frozen: bool) -> None:
    rule = DyloraRule(start=6, frozen=frozen)
    updates = made(rule)
    step = next(step for step in range(99) if rule.prefix(updates, step) == 3)
    factors = rule.factors(updates, lambda rank: 12 / rank, step)
    for i, (label, (a, b)) in enumerate(factors.items()):
        count = min(3, updates.ranks[i])
        expected = 12 / count * updates.b[i][:, :count] @ updates.a[i][:count]
        torch.testing.assert_close(b @ a, expected)
        (b @ a).square().sum().backward()
        moved = updates.a[i].grad.abs().sum(1) > 0, updates.b[i].grad.abs().sum(0) > 0
        trains = [c < count and (not frozen or c == count - 1) for c in range(updates.ranks[i])]
        assert [m.tolist() for m in moved] == [trains, trains], label


def test_dyloras_draws_are_of_the_seed_and_the_step() -> None:
    rule = DyloraRule(start=6)
    draws = [[rule.prefix(updates, step) for step in range(600)] for updates in (made(rule, s) for s in (0, 0, 1))]
    assert draws[0] == draws[1] != draws[2]
    counts = np.bincount(draws[0], minlength=7)
    assert counts[0] == 0 and counts[1:].min() > 60 and len(counts) == 7
    one = DyloraRule(start=1)
    assert {one.prefix(made(one), 0), one.prefix(made(one), 1)} == {1}


@pytest.mark.parametrize(
    ("tolerance", "budget", "chosen"),
    [(0.0, None, 3), (0.05, None, 2), (0.6, None, 1), (None, None, 4), (0.0, 75, 2), (None, 75, 2), (None, 35, 0)],
)
def test_dylora_takes_the_smallest_rank_that_is_good_enough_or_the_largest_that_fits(tolerance, budget, chosen) -> None:
    rule = DyloraRule(start=4, tolerance=tolerance)
    updates = made(rule)  # a rank of all costs 15 + 9 + 12 = 36
    losses = {1: 1.5, 2: 1.04, 3: 1.0, 4: 1.2}
    rule.finish(updates, budget or 10**9, lambda: losses[int(updates.each(updates.kept)[0].sum())])
    assert [len(a) for a, _ in rule.left(updates, two).values()] == [chosen, min(chosen, 2), chosen]
    assert rule.holds_out == (0.0 if tolerance is None else 0.1)


# ---------------------------------------------------------------------------------------------- in PEARL's own learner


def ranks(method: Pearl, task: int) -> list[int]:
    return [layer["rank"] for layer in method.facts(task)["layers"]]


@pytest.mark.parametrize("then", ["continue", "restart"])
def test_pearl_goes_on_with_what_is_left_or_begins_afresh(then) -> None:
    engine = Watch()
    trained: list[tuple[str, int]] = []
    engine.observer.event = lambda kind, **facts: (  # type: ignore[method-assign]
        trained.append((facts["phase"], facts["trained"])) if kind == "phase" else None
    )
    method = Pearl(small_vit(), rank=AdaLoraRule(start=4, r=2, then=then), targets="query")
    learn(method, range(1), engine)
    head = 16 * 2 + 2
    adapt = sum(ranks(method, 0)) * 32 + head
    assert sum(ranks(method, 0)) == 6  # the budget of rank 2 in three layers of one size
    whole = 3 * (4 * 32 + 4) + head
    assert trained == ([("adapt", whole)] if then == "continue" else [("allocate", whole), ("adapt", adapt)])
    used = [name for name, spec in declared(method).items() if spec.used(method.options)]
    assert used == ["reference", *(["allocate"] * (then == "restart")), "adapt"]
    assert not engine.wrong


def test_what_is_left_answers_as_it_was_trained(monkeypatch) -> None:
    """With `continue` the sub-network is the one that the phase ended with, for any alpha."""
    for alpha in ("2r", 5.0):
        method = Pearl(small_resnet(), rank=DoraRule(start=4, r=2), alpha=alpha, reference="given")
        last: list[Tensor] = []
        left = DynamicRule.left

        def noted(rule, updates, scale, method=method, last=last, left=left):
            factors = rule.factors(updates, scale, None)
            weights = method.weights(0, updates=factors)
            network = torch.func.functional_call(method.eval().backbone, weights, (images(),))
            last.append(method.heads[0](network).detach())
            return left(rule, updates, scale)

        monkeypatch.setattr(DynamicRule, "left", noted)
        learn(method, range(1))
        monkeypatch.undo()
        torch.testing.assert_close(logits(method), last[0], rtol=1e-4, atol=1e-5)


def test_layers_of_rank_0_keep_the_references_weight() -> None:
    for net in (small_resnet, small_vit):
        method = Pearl(net(), rank=AdaLoraRule(start=2, budget=1, then="restart"), reference="given")
        learn(method, range(2))
        assert {*ranks(method, 0), *ranks(method, 1)} == {0}
        changed = method.weights(1)
        assert not any(target.parameter in changed for target in method.targets)
        tensors, settings = adapter(method, 1)
        assert settings["target_modules"] == "dummy-target-modules" and not any("lora" in name for name in tensors)
        if net is small_vit:  # nothing of its own but the head
            assert not changed
            torch.testing.assert_close(method.merged(1)(images()), method.backbone(images()))
            together, _ = method.at_once()
            torch.testing.assert_close(together(images()), logits(method), rtol=1e-5, atol=1e-5)
    one = torch.zeros(0, 5), torch.zeros(3, 0), torch.ones(3)
    assert stack_updates(1, [one, one], 0).down.shape == (3, 5, 0)


@pytest.mark.parametrize("options", [{"init": "svd"}, {"lora_bias": True}])
def test_what_needs_another_start_is_refused(options) -> None:
    with pytest.raises(ConfigError, match=rf"method\.{next(iter(options))}.*trains updates itself"):
        Pearl(small_vit(), rank=AdaLoraRule(), **options)


def test_settings_of_the_phase_name_a_run_only_where_there_is_one() -> None:
    def id(*settings: str) -> str:
        return load_config("digits", settings).id

    more = "train.phases.allocate.epochs=3"
    assert id() == id(more) and id("method.rank=adalora") == id("method.rank=adalora", more)
    restart = "method.rank={name: adalora, then: restart}"
    assert id(restart) != id(restart, more)


def test_parameters_of_learnt_ranks_are_not_counted_beforehand() -> None:
    kinds = {name: RANK_RULES.build(RANK_RULES.resolve(name, "rank")) for name in RANK_RULES.builtin}
    assert {name for name, rule in kinds.items() if not rule.learnt} == {"fixed"}
    assert FixedRule().learnt is False


def test_dylora_measures_every_rank_on_images_that_it_does_not_train_on(monkeypatch) -> None:
    """The loss that it chooses by is the mean over the images held out, in the network cut to that rank."""
    asked: list[float] = []
    parts: list[tuple[Task, Task]] = []
    finish, hold_out, close = DyloraRule.finish, Task.hold_out, Task.close

    def noted(rule, updates, budget, loss):
        finish(rule, updates, budget, lambda: asked.append(loss()) or asked[-1])
        rule._keep(updates, 2)

    def seen(task, share):
        parts.append(hold_out(task, share))
        return parts[-1]

    monkeypatch.setattr(DyloraRule, "finish", noted)
    monkeypatch.setattr(Task, "hold_out", seen)
    monkeypatch.setattr(Task, "close", lambda task: None)
    method, engine = Pearl(small_vit(), rank=DyloraRule(start=3, hold_out=0.25), targets="value"), Watch()
    sizes: list[int] = []
    engine.observer.event = lambda kind, **facts: sizes.append(facts.get("images", 0))  # type: ignore[method-assign]
    engine.learn(method, make_task(0))
    monkeypatch.setattr(Task, "close", close)
    ((trained, held),) = parts
    assert sizes[0] == len(trained) == 18 and len(held) == 6 and len(asked) == 3
    assert ranks(method, 0) == [2, 2, 2]
    with torch.no_grad():  # what is kept in the end is the network cut to rank 2
        said = method.eval()(held.view.test(held.images))
    expected = torch.nn.functional.cross_entropy(said, held.labels)
    assert asked[1] == pytest.approx(float(expected), rel=1e-4)
