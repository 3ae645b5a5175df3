"""RSIAT, SD-LoRA, E2-LoRA, SLCA++, SLDC and KLDA by their properties; what they share with SSIAT is tested there."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from pearl.methods.adapters.e2lora import E2Lora, kept_ranks, turned
from pearl.methods.adapters.rsiat import Projector, Rsiat, separation
from pearl.methods.adapters.sdlora import SdLora
from pearl.methods.adapters.slcapp import SlcaPlusPlus
from pearl.methods.adapters.sldc import Sldc, WeaklyNonlinear
from pearl.methods.adapters.ssiat import Ssiat
from pearl.methods.common.alignment import normalised, symmetric_cross_entropy
from pearl.methods.common.gaussians import GaussianDraws, linear_map
from pearl.methods.common.random_features import FourierFeatures
from pearl.methods.prototypes.klda import Discriminant, Klda, bandwidth
from pearl.testing.tiny import images, logits, make_task
from vits import WIDTH, close, drawn, run, small

# ---------------------------------------------------------------------------------------------------- what they share


def test_normalised_logits_do_not_depend_on_the_length_of_all():
    z = drawn(5, 6)
    close(normalised(3.7 * z, [2, 4], 0.1), normalised(z, [2, 4], 0.1), atol=1e-4)
    lengths = (z[:, :2].norm(dim=1) + z[:, 2:].norm(dim=1)) / 2
    close(normalised(z, [2, 4], 0.5), z / (0.5 * lengths[:, None]), atol=1e-5)


def test_reverse_cross_entropy_is_what_the_label_misses():
    z, y = drawn(5, 4), torch.tensor([0, 3, 1, 1, 2])
    p = z.softmax(1)
    labels = F.one_hot(y, 4).float().clamp(min=1e-4)
    expected = 0.7 * F.cross_entropy(z, y) - 0.2 * (p * labels.log()).sum(1).mean()
    close(symmetric_cross_entropy(z, y, 0.7, 0.2), expected, atol=1e-6)


def test_draws_may_be_scaled_one_by_one_and_be_the_same_in_all_epochs():
    means, factors = drawn(2, 3), torch.stack([torch.eye(3)] * 2)
    plain = next(GaussianDraws(means, factors, 6).batches(12, 5))
    scaled = next(GaussianDraws(means, factors, 6, scale=lambda u: 2 + 0 * u).batches(12, 5))
    close(scaled.x, 2 * plain.x)
    assert torch.equal(scaled.y, plain.y)
    once = GaussianDraws(means, factors, 6, once=3)
    first, second = (next(once.batches(12, seed)) for seed in (5, 6))
    assert not torch.equal(first.rows, second.rows)
    assert torch.equal(first.x[first.rows.argsort()], second.x[second.rows.argsort()])


# --------------------------------------------------------------------------------------------------------------- RSIAT


def make_rsiat(**options):
    return Rsiat(small(), **({"ffn_num": 4, "dropout": 0.0, "draws": 16, "code": 5} | options))


def test_separation_is_nothing_of_tight_classes_that_are_apart():
    points, y = torch.eye(4)[[0, 0, 1, 1, 2]], torch.tensor([0, 0, 1, 1, 2])
    assert separation(points, y, 1.5, 0.0) == 0
    close(separation(torch.eye(4)[:2], torch.tensor([3, 3]), 1.5, 0.3), torch.tensor(1.0), atol=1e-5)
    close(separation(torch.ones(2, 4), torch.tensor([0, 1]), 1.5, 0.3), torch.tensor(1.5 * 0.7), atol=1e-5)


def test_the_projector_is_the_identity_at_the_start():
    z = drawn(3, 8)
    assert torch.equal(Projector(8, 5, "linear")(z), z)
    assert ((Projector(8, 5, "sigmoid")(z) - z - 0.5).abs() < 0.3).all()
    counted = sum(p.numel() for p in Projector(768, 256, "linear").parameters())
    assert counted == 132_224  # as the authors' has with this code


def test_without_its_terms_rsiat_is_ssiat():
    off = {"margin": 0.0, "scale": 20.0, "rs_weight": 0.0, "align_weight": 0.0, "orthogonal_weight": 0.0}

    def learnt(method):
        state = run(method, range(2)).state_dict()
        return torch.cat([value.flatten() for name, value in state.items() if name.startswith(("adapters.", "heads."))])

    ssiat = learnt(Ssiat(small(), ffn_num=4, dropout=0.0, draws=16))
    close(learnt(make_rsiat(**off)), ssiat, atol=1e-7, rtol=0)
    for term in ({"margin": 0.2}, {"rs_weight": 5.0, "rs_warmup": 1}, {"align_weight": 9.0}):
        assert (learnt(make_rsiat(**off | term)) - ssiat).abs().max() > 1e-4, term


def test_rsiat_holds_features_to_projected_old_ones():
    method, task = run(make_rsiat(), range(1)), make_task(1)
    means = method.statistics.means().float()
    phase = next(method.learn(task))
    batch = next(task.batches(8, 0))
    with torch.no_grad():
        features = method.features(batch.x)
        cosines = F.cosine_similarity(means[None], features[:, None], dim=2)
        cosface = method.cosface(method.heads[1](features), batch.y - 2)
    close(phase.loss(batch), cosface + 1.5 * cosines.mean())  # features and projector are as before the task
    with torch.no_grad():
        for parameter in method.adapters.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
        moved = method.features(batch.x)
        assert F.mse_loss(moved, features) > 1e-3
        cosface = method.cosface(method.heads[1](moved), batch.y - 2)
    close(phase.loss(batch), cosface + 3 * F.mse_loss(moved, features) + 1.5 * cosines.mean())


def test_the_projector_alone_learns_from_old_means():
    method = run(make_rsiat(align_weight=0.0, margin=0.0), range(1))
    phase = next(method.learn(make_task(1)))
    batch = next(make_task(1).batches(8, 0))
    phase.loss(batch).backward()
    with_term = [p.grad.clone() for p in method.adapters.parameters()]
    assert any(p.grad.abs().max() > 0 for p in method.projector.parameters())
    method.zero_grad()
    method.orthogonal_weight = 0.0
    phase.loss(batch).backward()
    for gradient, parameter in zip(with_term, method.adapters.parameters(), strict=True):
        close(gradient, parameter.grad)


# ------------------------------------------------------------------------------------------------------------- SD-LoRA


def trained(method, t):
    """Factors of a task that are not those of the start."""
    torch.manual_seed(t)
    with torch.no_grad():
        for factor in method.factors.in_order(f"{t}."):
            factor.add_(torch.randn_like(factor))
        for magnitude in method.magnitudes.in_order():
            magnitude.add_(0.1)


def sd_lora(tasks, **options):
    method = SdLora(small(), rank=2, **options)
    for t in range(tasks):
        for _ in method.learn(make_task(t)):
            trained(method, t)
    return method


@torch.no_grad()
def test_earlier_directions_have_at_most_length_one_whatever_their_factors():
    method = sd_lora(2)
    target = method.targets[0]
    head = method.learn(make_task(2))
    next(head)
    a, b = (method.factors[f"0.{kind}.{target.label}"] for kind in "AB")
    direction = b @ a / (a.norm() * b.norm())
    assert 0.1 < direction.norm() <= 1
    others = method.factors[f"1.B.{target.label}"] @ method.factors[f"1.A.{target.label}"]
    lengths = method.factors[f"1.B.{target.label}"].norm() * method.factors[f"1.A.{target.label}"].norm()
    close(method.update(target), 0.8 * direction + 0.8 * others / lengths)  # the new one is nothing yet
    before = method.update(target).clone()
    method.factors[f"0.A.{target.label}"].mul_(3)
    method.factors[f"0.B.{target.label}"].mul_(0.2)
    close(method.update(target), before)


@torch.no_grad()
@pytest.mark.parametrize("magnitude", ["restart", "carry"])
def test_features_stay_between_tasks_if_magnitudes_are_carried(magnitude):
    method = sd_lora(2, magnitude=magnitude)
    before = method.features(images()).clone()
    next(method.learn(make_task(2)))
    assert torch.allclose(method.features(images()), before, atol=1e-5) == (magnitude == "carry")


def test_sd_lora_trains_all_magnitudes_and_no_key():
    method = run(SdLora(small(), rank=2), range(1))
    phase = next(method.learn(make_task(1)))
    assert {id(m) for m in method.magnitudes.in_order()} < {id(p) for p in phase.trained}
    trained(method, 1)
    changed = method.weights()
    assert len(changed) == 3
    for name, weight in changed.items():
        moved = (weight - method.backbone.get_parameter(name)).abs().amax(1) > 0
        assert moved[:WIDTH].all() and not moved[WIDTH : 2 * WIDTH].any() and moved[2 * WIDTH :].all()
    reduced = SdLora(small(), rank=10, reduced=True)
    for t in range(9):
        next(reduced.learn(make_task(t)))
    label = reduced.targets[0].label
    assert [len(reduced.factors[f"{t}.A.{label}"]) for t in (3, 4, 8)] == [10, 8, 6]


# ------------------------------------------------------------------------------------------------------------- E2-LoRA


def test_turning_sorts_directions_by_energy_and_changes_no_product(double):
    A, B = torch.randn(9, 4), torch.randn(12, 9)
    x = torch.randn(50, 4)
    a, b, energies = turned(A, B, x.T @ x / 50)
    close(b @ a, B @ A, atol=1e-12)
    close(b.T @ b, torch.eye(4), atol=1e-12)
    outputs = x @ a.T
    close(outputs.T @ outputs / 50, energies.diag(), atol=1e-12)
    assert (energies.diff() <= 0).all()


def test_ranks_follow_from_energy():
    assert kept_ranks([torch.tensor([1.0, 0, 0, 0])], [4], 4) == ([1], 1 - 1e-5)
    assert kept_ranks([torch.ones(4)], [4], 4)[0] == [4]
    ranks, share = kept_ranks([torch.ones(4)], [4], 2)
    assert ranks == [2] and 0.25 <= share < 0.5
    assert kept_ranks([torch.ones(4)], [3], 4)[0] == [3], "no more than are there"
    assert kept_ranks([torch.zeros(4)], [4], 4)[0] == [1]


def e2_lora(**options):
    return E2Lora(small(), draws=16, **options)


def test_directions_of_e2_lora_are_an_orthonormal_basis_task_by_task():
    method = run(e2_lora(), range(2)).requires_grad_(False)
    before = logits(method)
    next(method.learn(make_task(2)))
    method.requires_grad_(False)
    close(logits(method)[:, :4], before, atol=1e-2)  # what was released carried hardly any energy
    for target in method.targets:
        bases = [method.factors[f"{t}.B.{target.label}"] for t in range(3)]
        basis = torch.cat(bases, dim=1)
        assert basis.shape[1] == target.shape[0]
        close(basis.T @ basis, torch.eye(len(basis)), atol=1e-4)
        assert sum(part.shape[1] for part in bases[:2]) <= 2 * target.shape[0] // 3
        assert not method.factors[f"2.A.{target.label}"].any()


def test_earlier_tasks_of_e2_lora_leave_a_share_of_the_outputs():
    method, there = run(e2_lora(), range(3)), {}
    for target in method.targets:
        ranks = [len(method.factors[f"{t}.A.{target.label}"]) for t in range(3)]
        for t, rank in enumerate(ranks):
            method.energies.add(f"{t}.{target.label}", torch.ones(rank, dtype=torch.float64))
        there[target] = sum(ranks)
    assert 3 * WIDTH > 3 * 3 * WIDTH // 4, "without the limit they would keep all"
    next(method.learn(make_task(3)))
    for target in method.targets:
        kept, most = sum(len(method.factors[f"{t}.A.{target.label}"]) for t in range(3)), 3 * target.shape[0] // 4
        assert min(most, there[target]) - 3 < kept <= most  # of equal energies, each task gives up one at a time


def test_e2_lora_resets_the_last_norm_layer():
    norms = [e2_lora(reset_norm=reset).backbone.norm for reset in (True, False)]
    assert torch.equal(norms[0].weight, torch.ones(WIDTH)) and not norms[0].bias.any()
    assert torch.equal(norms[1].weight, small().norm.weight) and torch.equal(norms[1].bias, small().norm.bias)


def test_e2_lora_trains_inputs_of_later_tasks_alone():
    method = e2_lora()
    first = next(method.learn(make_task(0)))
    assert len(first.groups["lora"]) == 2 * len(method.targets)
    method = run(e2_lora(), range(1))
    later = next(method.learn(make_task(1)))
    assert {id(p) for p in later.groups["lora"]} == {id(p) for p in method.factors.in_order("1.A.")}
    assert not later.loss(next(make_task(1).batches(8, 0))).isnan()


def test_e2_lora_distils_old_logits():
    method, batch = run(e2_lora(), range(1)), next(make_task(1).batches(8, 0))
    phase = next(method.learn(make_task(1)))
    with torch.no_grad():
        task_loss = F.cross_entropy(method.heads[1](method.features(batch.x)), batch.y - 2)
        teacher = method.heads[0](method.features(batch.x)) / 2
        close(phase.loss(batch), task_loss)  # the task's update is nothing yet
        for factor in method.factors.in_order("1.A."):
            factor.add_(0.3 * torch.randn_like(factor))
        task_loss = F.cross_entropy(method.heads[1](method.features(batch.x)), batch.y - 2)
        student = method.heads[0](method.features(batch.x)) / 2
        divergence = (teacher.softmax(1) * (teacher.log_softmax(1) - student.log_softmax(1))).sum(1).mean()
    close(phase.loss(batch), task_loss + 0.25 * 4 * divergence)


# ------------------------------------------------------------------------------------------------------ SLCA++ and SLDC


def slcapp(**options):
    return SlcaPlusPlus(small(), rank=2, draws=16, **options)


def test_slcapp_starts_as_the_network_with_orthonormal_factors():
    method = slcapp()
    for parameter in next(method.learn(make_task(0))).groups["lora"]:
        if len(parameter) == 2:
            close(parameter @ parameter.T, torch.eye(2))
    close(method.features(images()), small()(images()))
    weight = method.backbone.blocks[0].attn.qkv.weight
    leading = torch.linalg.svd(weight).Vh[:2]
    close((method.update["A.blocks.0.attn.qkv.weight"] @ leading.T).abs(), torch.eye(2), atol=1e-4)


def test_the_next_task_starts_from_heads_before_the_alignment():
    method = run(slcapp(), range(1))
    assert torch.equal(method.heads[0].weight, method.trained_heads[0].weight)  # a single task is not aligned
    run(method, [1])
    first, second = (head.weight.clone() for head in method.trained_heads)
    assert not torch.equal(first, method.heads[0].weight), "they were aligned"
    run(method, [2])
    assert torch.equal(first, method.trained_heads[0].weight) and torch.equal(second, method.trained_heads[1].weight)


def test_heads_of_earlier_tasks_read_longer_features():
    method = run(slcapp(decay=0.5), range(3)).requires_grad_(False)
    features = method.features(images())
    parts = [head(scale * features) for head, scale in zip(method.heads, (2.0, 1.5, 1.0), strict=True)]
    close(logits(method), torch.cat(parts, 1))
    uniform = torch.tensor([[0.0, 0.5, 1.0]] * 6)
    expected = 1 / (1 + torch.tensor([0.49, 0.5, 0.51]) * torch.tensor([2, 2, 1, 1, 0, 0])[:, None])
    close(method.shortened(uniform), expected)


def test_slcapp_aligns_normalised_logits_of_shortened_features():
    method = run(slcapp(), range(1))
    *_, phase = method.learn(make_task(1))
    assert phase.name == "slcapp_align" and phase.data.scale == method.shortened and len(phase.data) == 4 * 16
    batch = next(phase.data.batches(8, 0))
    expected = F.cross_entropy(normalised(method.heads(batch.x), [2, 2], 0.1), batch.y)
    close(phase.loss(batch), expected)


def test_slcapp_trains_norms_biases_and_the_class_token():
    method = slcapp()
    body = {id(p) for p in next(method.learn(make_task(0))).groups["body"]}
    named = dict(method.backbone.named_parameters())
    expected = {n for n in named if n == "cls_token" or n.endswith("bias") or "norm" in n}
    assert {n for n, p in named.items() if id(p) in body} == expected


def test_a_linear_map_between_features(double):
    x = torch.randn(400, 6)
    rotation = torch.linalg.qr(torch.randn(6, 6)).Q
    close(linear_map(x, x, ridge=1e-4, unit=True, blend=True), torch.eye(6), atol=1e-5)
    close(linear_map(x, x @ rotation, ridge=1e-9, unit=True, blend=True), rotation, atol=1e-8)
    close(linear_map(x, 2 * x @ rotation, ridge=1e-9, unit=False, blend=False), 2 * rotation, atol=1e-8)
    few = torch.randn(30, 3000)
    assert (linear_map(few[:2], few[2:4], ridge=1e-4, unit=True, blend=True) - torch.eye(3000)).abs().max() < 0.01


def sldc(**options):
    return Sldc(small(), rank=2, **({"draws": 16} | options))


def test_old_distributions_move_with_the_map():
    method = run(sldc(operator="none"), range(1)).requires_grad_(False)
    means, rotation = method.statistics.means(), torch.linalg.qr(drawn(WIDTH, WIDTH).double()).Q
    before = method.gaussians(4, 0.0001)
    method.carry(rotation)
    close(method.statistics.means(), means @ rotation, atol=1e-5)
    after = method.gaussians(4, 0.0001)
    covariance = before.factors[1] @ before.factors[1].T
    close(after.factors[1] @ after.factors[1].T, rotation.float().T @ covariance @ rotation.float(), atol=1e-5)
    method.carry_draws(lambda z: z, 40_000, 0.0001)
    close(method.statistics.means(), means @ rotation, atol=0.05)
    again = method.gaussians(4, 0.0001)
    close(again.factors[1] @ again.factors[1].T, after.factors[1] @ after.factors[1].T, atol=0.05, rtol=0.1)


def test_sldc_moves_old_classes_by_the_images_of_the_task(monkeypatch):
    for operator, exact in (("ldc", True), ("none", False)):
        method = run(sldc(operator=operator), range(1))
        before, features = method.statistics.means().clone(), method.features
        for phase in method.learn(make_task(1, per_class=40)):
            if phase.name == "sldc":
                monkeypatch.setattr(method, "features", lambda x, f=features: 2 * f(x))
        close(method.statistics.means(0), (2 if exact else 1) * before, atol=1e-2, rtol=1e-2)


def test_sldc_refines_a_copy_of_the_heads():
    method = run(sldc(operator="nonlinear"), range(2))
    kept = [head.weight.clone() for head in method.trained_heads]
    assert not any(torch.equal(a, head.weight) for a, head in zip(kept, method.heads, strict=True))
    run(method, [2])
    assert all(torch.equal(a, head.weight) for a, head in zip(kept, method.trained_heads, strict=False))


def test_sldc_holds_features_and_their_lengths():
    method, batch = run(sldc(norm=100.0), range(1)), next(make_task(1).batches(8, 0))
    phase = next(method.learn(make_task(1)))
    with torch.no_grad():
        old = method.features(batch.x)
        for parameter in method.update.in_order("B."):
            parameter.add_(0.2 * torch.randn_like(parameter))
        new = method.features(batch.x)
        task_loss = symmetric_cross_entropy(method.trained_heads[1](new), batch.y - 2, 0.5, 0.5)
        lengths = (new.norm(dim=1) - old.norm(dim=1)).square().mean()
    assert lengths > 1e-3
    close(phase.loss(batch), task_loss + (new - old).square().mean() + 100 * lengths)


@pytest.mark.parametrize("operator", ["linear", "ldc"])
def test_sldcs_linear_operators_are_ridge_regressions(operator, monkeypatch, double):
    """In NumPy: `linear` of features of length 1 and near the identity, `ldc` of features as they are."""
    method, actual = sldc(operator=operator), []
    monkeypatch.setattr(method, "carry", actual.append)
    before, after = (drawn(20, WIDTH, seed=seed) * drawn(20, 1, seed=seed + 2).exp() for seed in range(2))
    assert not [*method.compensate(before, after)]
    x, y = before.double().numpy(), after.double().numpy()
    if operator == "linear":
        x, y = (rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in (x, y))
    expected = np.linalg.solve(x.T @ x + 1e-4 * np.eye(WIDTH), x.T @ y)
    if operator == "linear":
        share = math.exp(-20 / WIDTH)
        expected = (1 - share) * expected + share * np.eye(WIDTH)
    close(actual[0], torch.from_numpy(expected), atol=1e-8)


def test_sldcs_nonlinear_operator_keeps_lengths_and_is_held_to_be_linear(monkeypatch):
    method, carried = sldc(operator="nonlinear", linearity=30.0), []
    monkeypatch.setattr(method, "carry_draws", lambda *given: carried.extend(given))
    before, after = 3 * drawn(20, WIDTH), 2 * drawn(20, WIDTH, seed=1)
    phases = method.compensate(before, after)
    phase = next(phases)
    move, batch = phase.extra, next(phase.data.batches(20, seed=0))
    with torch.no_grad():
        move.alphas.copy_(torch.tensor([0.1, 0.2, 0.5]))
        lengths = before.norm(dim=1)
        assert sorted(batch.x.tolist()) == sorted((before / lengths[:, None]).tolist())
        apart = (move(batch.x) - batch.y).square().mean()
        close(phase.loss(batch), apart + 30 * (math.exp(0.5) / (math.exp(0.1) + math.exp(0.2) + math.exp(0.5))) ** 2)
        assert not [*phases]
        network, count, _ = carried
        close(network(before), move(before / lengths[:, None]) * lengths[:, None])
    assert count == 10 * WIDTH


def test_the_weakly_nonlinear_map_at_the_start():
    move, z = WeaklyNonlinear(6), drawn(3, 6)
    for parameter in move.mlp.parameters():
        torch.nn.init.zeros_(parameter)
    close(move(z), 0.788 * z, atol=1e-3)
    close(move.nonlinearity(), torch.tensor(1 / (math.e + 2)) ** 2)


# ---------------------------------------------------------------------------------------------------------------- KLDA


def test_inner_products_of_random_features_are_a_gaussian_kernel():
    torch.manual_seed(0)
    lift = FourierFeatures(4, 20_000)
    lift.sigma.fill_(0.3)
    lift.draw()
    x = drawn(6, 4).double()
    z = lift(x)
    close(z @ z.T, torch.exp(-0.3 * torch.cdist(x, x).square()), atol=0.02)
    again = FourierFeatures(4, 20_000)
    again.load_state_dict(lift.state_dict())
    assert torch.equal(again(x), z)


def test_the_kernel_of_klda_is_as_wide_as_the_first_tasks_images_are_apart():
    method, features = Klda(small(), D=20), drawn(9, WIDTH).double()
    apart = sorted(float((features[i] - features[j]).square().sum()) for i in range(9) for j in range(i))
    assert bandwidth(features.float()) == pytest.approx(1 / (2 * apart[17]), rel=1e-5)  # the lower middle of 36
    run(method, range(1))
    first = float(method.members[0].lift.sigma)
    assert first == pytest.approx(bandwidth(method.features_of(make_task(0))), rel=1e-4)
    run(method, [1])
    assert float(method.members[0].lift.sigma) == first
    assert float(run(Klda(small(), D=20, sigma=0.3), range(1)).members[0].lift.sigma) == pytest.approx(0.3)


def test_klda_does_not_depend_on_the_order_of_tasks_or_images(double):
    x, y, new = torch.randn(40, 5), torch.arange(40) % 4, torch.randn(7, 5)

    def after(order):
        torch.manual_seed(0)
        member = Discriminant(5, 12)
        member.lift.sigma.fill_(0.1)
        member.lift.draw()
        for c in order:
            member.add(x[y == c].flip(0), torch.zeros(10, dtype=torch.int64), 1, 1e-3)
        return member

    one, other = after([0, 1, 2, 3]), after([2, 0, 3, 1])
    close(other(new), one(new)[:, [2, 0, 3, 1]], atol=1e-8)
    z, rows = one.lift(new), one.lift(x)
    centred = rows - one.statistics.means()[y]
    covariance = centred.T @ centred / 36
    covariance = 0.999 * covariance + 0.001 * covariance.trace() / 12 * torch.eye(12)
    apart = z[:, None] - one.statistics.means()[None]
    quadratic = -(apart @ torch.linalg.inv(covariance) * apart).sum(2) / 2
    scores = one(new)
    close(scores - scores[:, :1], quadratic - quadratic[:, :1], atol=1e-6)


def test_members_vote_by_their_posteriors():
    method = run(Klda(small(), D=20, members=3), range(2))
    features = method.features_of(make_task(0))
    posteriors = torch.stack([member(features).softmax(1) for member in method.members]).mean(0)
    close(method.score(features).softmax(1), posteriors)
    assert method.members[0].lift.sigma == method.members[1].lift.sigma
