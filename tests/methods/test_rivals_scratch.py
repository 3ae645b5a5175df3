"""EFC++, SEED and APR, which train networks from nothing, by their properties."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import MultivariateNormal

from pearl.methods.common.rotations import turned, turned_labels
from pearl.methods.common.teacher import frozen
from pearl.methods.prototypes.apr import Apr, Replayed, pushed
from pearl.methods.prototypes.efcpp import EfcPlusPlus, elastic_drift, feature_matrix
from pearl.methods.prototypes.seed import Seed, divergences, log_density
from pearl.testing.tiny import images, logits, make_task, small_resnet
from vits import close, drawn, run

# --------------------------------------------------------------------------------------------------------------- EFC++


def test_the_feature_matrix_is_what_predictions_depend_on(double):
    features, weight = torch.randn(40, 7), torch.randn(4, 7)
    E = feature_matrix(features, weight)
    close(E, E.T, atol=1e-12)
    values = torch.linalg.eigvalsh(E)
    assert values.min() > -1e-12 and (values > 1e-9).sum() == 3  # classes less one
    assert not feature_matrix(features, torch.zeros(4, 7)).any()
    apart = weight[0] - weight[1]
    close(feature_matrix(torch.zeros(3, 7), weight[:2]), torch.outer(apart, apart) / 4, atol=1e-12)


def test_means_move_with_the_images_that_e_finds_near(double):
    before, means, E = torch.randn(30, 5), torch.randn(4, 5), feature_matrix(torch.randn(9, 5), torch.randn(3, 5))
    close(elastic_drift(before, before + 0.7, means, E, 0.2), torch.full((4, 5), 0.7), atol=1e-9)
    moves = torch.randn(30, 5)
    apart = before[None] - means[:, None]
    near = -torch.einsum("cnd,de,cne->cn", apart, E, apart)
    weights = torch.exp((near - near.min()) / (near.max() - near.min()) / 0.08)
    expected = (weights[..., None] * moves).sum(1) / weights.sum(1, keepdim=True)
    close(elastic_drift(before, before + moves, means, E, 0.2), expected, atol=1e-9)
    assert weights.max() / weights.min() == pytest.approx(268337, rel=1e-4)


def test_efcpp_turns_the_first_tasks_images():
    method, batch = EfcPlusPlus(small_resnet()), next(make_task(0).batches(8, 0))
    phase = next(method.learn(make_task(0)))
    assert phase.extra.out_features == 6
    method.eval()
    features = method.backbone(turned(batch.x))
    outputs = torch.cat([features @ method.heads[0].weight.T, phase.extra(features)], 1)
    close(phase.loss(batch), F.cross_entropy(outputs, turned_labels(batch.y, 2)))
    assert method.heads[0].bias is None


def test_efcpp_holds_features_by_e_and_damping():
    method, batch = run(EfcPlusPlus(small_resnet()), range(1)), next(make_task(1).batches(8, 0))
    phase = next(method.learn(make_task(1)))
    method.train()
    assert not method.backbone.training
    with torch.no_grad():
        old = method.backbone(batch.x)
        for parameter in method.backbone.layer4.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        new = method.backbone(batch.x)
        task_loss = F.cross_entropy(new @ method.heads[1].weight.T, batch.y - 2)
        moved, strength = new - old, 10 * method.matrix + 0.1 * torch.eye(method.heads.dim)
        penalty = torch.einsum("bd,de,be->b", moved, strength, moved).mean()
    assert penalty > 0.05 * task_loss
    close(phase.loss(batch), task_loss + penalty)


def test_efcpp_freezes_norms_and_old_heads_until_it_balances():
    method = run(EfcPlusPlus(small_resnet()), range(1))
    norms = {n: t.clone() for n, t in method.backbone.state_dict().items() if "bn" in n}
    phases = {phase.name: phase for phase in method.learn(make_task(1))}
    trained = {id(p) for p in phases["efcpp"].trained}
    assert id(method.heads[0].weight) not in trained and id(method.backbone.conv1.weight) in trained
    assert id(method.backbone.bn1.weight) not in trained
    balance = phases["efcpp_balance"]
    assert len(balance.trained) == 2 and len(balance.data) == 24 + 2 * 12
    labels = torch.cat([batch.y for batch in balance.data.batches(8, 0)])
    assert labels.bincount().tolist() == [12] * 4
    run(method, [2])
    assert all(torch.equal(t, method.backbone.state_dict()[n]) for n, t in norms.items())


def test_efcpp_moves_old_means_and_computes_e_of_all_heads():
    method, task = run(EfcPlusPlus(small_resnet()), range(1)), make_task(1)
    means, E, learning = method.statistics.means().clone(), method.matrix.clone(), method.learn(task)
    next(learning)
    x = task.view.test(task.images)
    with torch.no_grad():
        before = method.eval().backbone(x)
        for parameter in method.backbone.layer4.parameters():
            parameter.add_(0.1 * drawn(*parameter.shape))
        after = method.backbone(x)
    next(learning)
    drift = elastic_drift(before, after, means, E, 0.2)
    assert drift.abs().max() > 0.01
    close(method.statistics.means(), means + drift)
    assert not [*learning]
    with torch.no_grad():
        weight = torch.cat([head.weight for head in method.heads])
        p = (after @ weight.T).softmax(1)
        fisher = torch.stack([weight.T @ (row.diag() - torch.outer(row, row)) @ weight for row in p]).mean(0)
    close(method.matrix, fisher, atol=1e-4)


# ---------------------------------------------------------------------------------------------------------------- SEED


def test_densities_and_divergences_are_those_of_normal_distributions(double):
    roots = torch.tril(torch.randn(3, 4, 4)) + 2 * torch.eye(4)
    means, x = torch.randn(3, 4), torch.randn(5, 4)
    made = [MultivariateNormal(m, scale_tril=s) for m, s in zip(means, roots.abs(), strict=True)]
    close(log_density(x, means, roots.abs()), torch.stack([one.log_prob(x) for one in made], 1), atol=1e-9)
    expected = [[torch.distributions.kl_divergence(a, b) for b in made] for a in made]
    close(divergences(means, roots.abs()), torch.tensor(expected), atol=1e-9)


def make_seed():
    return Seed(small_resnet(), experts=2, features=5)


def test_experts_are_left_alone_until_one_is_chosen():
    method = run(make_seed(), range(1))
    first = {n: t.clone() for n, t in method.backbone.state_dict().items()}
    run(method, [1])
    assert all(torch.equal(t, method.backbone.state_dict()[n]) for n, t in first.items())
    assert not torch.equal(method.copies[0].conv1.weight, method.backbone.conv1.weight)
    names = {name for name, _ in method.gaussians.named_buffers()}
    assert {n for n in names if n.endswith("mean")} == {"0/0/mean", "1/0/mean", "1/1/mean"}
    assert method.forward_passes() == 2
    chosen = method.least_overlap(make_task(2))
    before = [method.network(j).conv1.weight.clone() for j in range(2)]
    norms = method.network(chosen).bn1.running_mean.clone()
    run(method, [2])
    for j in range(2):
        assert torch.equal(before[j], method.network(j).conv1.weight) == (j != chosen)
    assert torch.equal(norms, method.network(chosen).bn1.running_mean)


def test_the_expert_whose_classes_are_furthest_apart_is_chosen(monkeypatch):
    method = run(make_seed(), range(2))
    task = make_task(2)
    class_index = (task.labels - task.first_class).float()
    for far in (0, 1):
        rows = [drawn(24, 2, 5) + (20 if j == far else 1) * class_index[:, None, None] for j in range(2)]
        monkeypatch.setattr(method, "features_of", lambda task, j, rows=rows: rows[j])
        assert method.least_overlap(task) == far


def test_votes_are_means_over_the_experts_that_know_a_class():
    method = run(make_seed(), range(3)).eval()
    with torch.no_grad():
        features = [method.read(j, images()).double() for j in range(2)]
    votes = torch.zeros(6, 6, dtype=torch.float64)
    for j, first in ((0, 0), (1, 1)):
        parts = [
            torch.stack([MultivariateNormal(m, scale_tril=s).log_prob(features[j]) for m, s in zip(*pair, strict=True)])
            for pair in ([method.gaussians[f"{t}.{j}.{kind}"] for kind in ("mean", "root")] for t in range(first, 3))
        ]
        votes[:, 2 * first :] += (torch.cat(parts).T / 3).softmax(1)
    votes[:, 2:] /= 2
    close(logits(method).double().exp(), votes, atol=1e-4)


def test_fine_tuning_is_held_to_the_features_before():
    method, batch = run(make_seed(), range(2)), next(make_task(2).batches(8, 0))
    phase = next(method.learn(make_task(2)))
    method.eval()
    with torch.no_grad():
        task_loss = F.cross_entropy(phase.extra(method.read(method_of(phase, method), batch.x)), batch.y - 4)
    close(phase.loss(batch), 0.01 * task_loss)  # features are those before


def method_of(phase, method):
    """The expert that a phase trains."""
    trained = {id(p) for p in phase.trained}
    return next(j for j in range(2) if id(method.network(j).conv1.weight) in trained)


# ----------------------------------------------------------------------------------------------------------------- APR


def make_apr(**options):
    small = {"replayed": 6, "replay_batch": 8, "drift_images": 6, "steps": 2, "drift_steps": 2}
    return Apr(small_resnet(), **(small | options))


def test_a_step_has_its_length_over_the_whole_batch():
    network = frozen(small_resnet())
    x = drawn(1, 3, 8, 8).expand(4, -1, -1, -1)
    targets = drawn(1, network.dim, seed=1).expand(4, -1)
    moved = pushed(network, x, targets, 1, 5.0)
    close((moved - x).flatten(1).norm(dim=1), torch.full((4,), 2.5), atol=1e-4)
    before, after = ((network(z) - targets).square().mean() for z in (x, pushed(network, x, targets, 1, 0.05)))
    assert after < before
    assert torch.equal(pushed(network, x, network(x).detach(), 1, 5.0), x), "there is no gradient where it is to be"
    bounds = x.amin(), x.amax()
    inside = pushed(network, x, targets, 3, 50.0, bounds)
    assert inside.min() >= bounds[0] and inside.max() <= bounds[1]


def test_images_that_stand_for_old_classes_are_the_nearest_ones():
    method, task = run(make_apr(), range(1)), make_task(1)
    teacher = frozen(method)
    rows, draws = method.nearest(task, teacher, 6)
    assert rows.shape == (2, 6)
    made = task.batch(torch.arange(24), draws)
    with torch.no_grad():
        apart = torch.cdist(method.statistics.means().float(), teacher.backbone(made.x))
    close(apart.gather(1, rows), apart.sort(1).values[:, :6], atol=1e-5)
    labels = torch.arange(2).repeat_interleave(6)
    replayed = Replayed(task, rows.flatten(), labels, draws, 5)
    batches = [*replayed.batches(8, 3)]
    assert [len(batch.y) for batch in batches] == [13] * 3
    assert torch.equal(batches[1].x, next(replayed.batches(8, 3, skip=1)).x)
    assert (batches[0].y[:8] >= 2).all() and (batches[0].y[8:] < 2).all()
    own = batches[2].rows[8:]
    close(batches[2].x[8:], task.batch(own, tuple(draw[own] for draw in draws)).x)
    assert set(torch.cat([b.y[8:] for b in batches]).tolist()) == {0, 1}


def test_apr_learns_new_classes_of_new_images_and_old_logits_of_all():
    method, task = run(make_apr(noise=0.0), range(1)), make_task(1)
    phase = next(method.learn(task))
    teacher, batch = frozen(method.eval()), next(phase.data.batches(8, 0))
    means = method.statistics.means().float()
    with torch.no_grad():
        for parameter in method.backbone.layer4.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    close(batch.x[8:], phase.data.task.batch(batch.rows[8:], tuple(d[batch.rows[8:]] for d in phase.data.draws)).x)
    x = torch.cat([batch.x[:8], pushed(teacher.backbone, batch.x[8:], means[batch.y[8:]], 2, 64.0)])
    with torch.no_grad():
        z, old = method.heads(method.backbone(x)), teacher.heads(teacher.backbone(x))[:, :2]
        task_loss = F.cross_entropy(z[:8, 2:], batch.y[:8] - 2)
        p, q = (old / 2).log_softmax(1), (z[:, :2] / 2).log_softmax(1)
        kept = (p.exp() * (p - q)).sum(1).mean()
    assert kept > 1e-4
    close(phase.loss(batch), task_loss + 10 * kept, atol=1e-4)


def test_old_means_move_as_the_images_that_reach_them(monkeypatch):
    method = run(make_apr(), range(1))
    before, covariance = method.statistics.means().clone(), method.covariances["0"].clone()

    class Shifted(nn.Module):
        def __init__(self, net):
            super().__init__()
            self.net = net

        def forward(self, x):
            return self.net(x) + 3

    for phase in method.learn(make_task(1)):
        if phase.name == "apr":
            method.backbone = Shifted(method.backbone)
    close(method.statistics.means(0), before + 3, atol=1e-4)
    close(method.covariances["0"], covariance, atol=1e-6)  # a map that was not trained is the identity


def test_read_outs_of_one_network():
    method = run(make_apr(), range(2)).requires_grad_(False)
    features, means = method.features(images()), method.statistics.means().float()
    method.read_out = "ncm"
    close(logits(method), F.cosine_similarity(features[:, None], means[None], dim=2), atol=1e-4)
    method.read_out = "linear"
    close(logits(method), method.heads(features))
    method.read_out = "mahalanobis"
    apart = F.normalize(features)[:, None] - F.normalize(means)[None]
    precisions = method.precisions["all"]
    close(logits(method), -torch.einsum("bcd,cde,bce->bc", apart, precisions, apart), atol=1e-3)
    assert precisions.shape[0] == 4 and not torch.allclose(precisions[0], torch.eye(method.heads.dim), atol=1e-3)
