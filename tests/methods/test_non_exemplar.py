"""PASS, IL2A and SSRE against independent calculations of what their papers say."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pearl.data.batches import Batch
from pearl.errors import ConfigError
from pearl.export.programs import network
from pearl.methods.common.class_moments import class_covariances
from pearl.methods.common.rotations import turned, turned_labels
from pearl.methods.common.teacher import frozen
from pearl.methods.prototypes import ssre
from pearl.methods.prototypes.il2a import IL2A, mixed
from pearl.methods.prototypes.non_exemplar import old_classes, raised_logits
from pearl.methods.prototypes.pass_ import PASS
from pearl.methods.prototypes.ssre import SSRE
from pearl.tables import spec
from pearl.testing.conformance import course
from pearl.testing.tiny import CLASSES, SIZE, config, learn, logits, make_task, small_resnet, small_vit
from zoo import ZOO


class Flat(nn.Module):
    """Features are the pixels, by weights that start as the identity."""

    def __init__(self, dim):
        super().__init__()
        self.dim, self.pretrained = dim, False
        self.weight = nn.Parameter(torch.eye(dim))

    def forward(self, x):
        return x.flatten(1) @ self.weight


def np_cross_entropy(logits, labels):
    logits = logits - logits.max(1, keepdims=True)
    return np.mean(np.log(np.exp(logits).sum(1)) - logits[np.arange(len(labels)), labels])


def a_batch(task, count=6):
    return Batch(*(part[:count] for part in next(iter(make_task(task).batches(24, 3)))))


def known(method, tasks=2):
    """After so many tasks, with the head of another one and a network that has moved on from its teacher."""
    learn(method, range(tasks))
    teacher = frozen(method.backbone)
    method.heads.grow(CLASSES)
    for heads in getattr(method, "turned_heads", []):
        heads.grow(CLASSES)
    torch.manual_seed(4)
    with torch.no_grad():
        for parameter in method.backbone.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return method.eval(), teacher


def head(heads):
    weight, bias = (
        np.concatenate([getattr(block, name).detach().numpy() for block in heads]) for name in ("weight", "bias")
    )
    return lambda features: features @ weight.T + bias


def spreads(method):
    """Covariances of the newest task's classes, by numpy, from features of images as they are."""
    task = make_task(len(method.heads) - 1)
    with torch.no_grad():
        features = method.eval().backbone(task.view.test(task.images)).double().numpy()
    class_index = task.labels.numpy() - task.first_class
    return np.stack([np.cov(features[class_index == c].T) for c in range(CLASSES)])


# ---------------------------------------------------------------------------------------------------------- rotations


def test_four_turns_are_four_classes():
    x, y = torch.randn(3, 2, 5, 5), torch.tensor([2, 0, 1])
    four = turned(x)
    for turn in range(4):
        np.testing.assert_array_equal(four[3 * turn : 3 * turn + 3], np.rot90(x.numpy(), turn, (2, 3)))
        assert torch.equal(turned(four[3 * turn : 3 * turn + 3])[3 * ((4 - turn) % 4) :][:3], x)
    assert sorted(turned_labels(torch.arange(7), 7).tolist()) == list(range(28))
    assert turned_labels(y, 3).tolist() == [2, 0, 1, 5, 3, 4, 8, 6, 7, 11, 9, 10]
    assert turned(x.contiguous(memory_format=torch.channels_last)).is_contiguous(memory_format=torch.channels_last)


def test_old_classes_are_drawn_evenly():
    drawn = old_classes(torch.empty(6000), 3).bincount()
    assert len(drawn) == 3 and (drawn - 2000).abs().max() < 200  # over five standard deviations


# --------------------------------------------------------------------------------------------------------------- PASS


def test_pass_learns_four_classes_of_each():
    method = PASS(Flat(12), temp=0.5)
    for heads in (method.heads, *method.turned_heads):
        heads.grow(3)
    x, y = torch.randn(4, 3, 2, 2), np.array([2, 0, 1, 1])
    weights = np.concatenate([heads[0].weight.detach().numpy() for heads in (method.heads, *method.turned_heads)])
    biases = np.concatenate([heads[0].bias.detach().numpy() for heads in (method.heads, *method.turned_heads)])
    losses = [
        np_cross_entropy((np.rot90(x.numpy(), k, (2, 3)).reshape(4, 12) @ weights.T + biases) / 0.5, y + 3 * k)
        for k in range(4)
    ]
    with torch.no_grad():
        actual = method.loss(None, Batch(x, torch.from_numpy(y), torch.arange(4)))
    assert float(actual) == pytest.approx(np.mean(losses), rel=1e-5)
    with torch.no_grad():
        own = (x.flatten(1).numpy() @ weights[:3].T + biases[:3]) / 0.5
        np.testing.assert_allclose(method(x), own, rtol=1e-5)


def test_pass_is_held_to_noisy_prototypes_and_to_its_features():
    method, teacher = known(PASS(small_resnet(), protoAug_weight=3.0, kd_weight=2.0))
    batch = a_batch(2)
    x = turned(batch.x)
    with torch.no_grad():
        features, before = method.backbone(x).double().numpy(), teacher(x).double().numpy()
        torch.manual_seed(9)
        actual = method.loss(teacher, batch).item()
    torch.manual_seed(9)
    old, noise = torch.randint(2 * CLASSES, (len(batch.y),)), torch.randn(len(batch.y), method.heads.dim).numpy()
    drawn = method.statistics.means().numpy()[old] + float(method.radius) * noise
    parts = [head(heads) for heads in (method.heads, *method.turned_heads)]
    on_images, on_drawn = (np.concatenate([part(z) for part in parts], 1) / 0.1 for z in (features, drawn))
    labels = np.concatenate([batch.y.numpy() + k * 3 * CLASSES for k in range(4)])
    distance = np.sqrt(((features - before) ** 2).sum())
    expected = np_cross_entropy(on_images, labels) + 3 * np_cross_entropy(on_drawn, old.numpy()) + 2 * distance
    assert actual == pytest.approx(expected, rel=1e-4)


def test_where_the_network_is_its_teacher_the_gradient_is_finite():
    method, _ = known(PASS(small_resnet(), protoAug_weight=0.0))
    batch = a_batch(2)
    loss = method.loss(frozen(method.backbone), batch)
    assert loss.item() == pytest.approx(method.loss(None, batch).item(), rel=1e-5)
    loss.backward()
    assert all(p.grad.isfinite().all() for p in method.backbone.parameters())


def test_the_radius_is_that_of_the_first_task():
    method = PASS(small_resnet())
    learn(method, range(1))
    radius = np.sqrt(np.mean([np.trace(spread) / method.heads.dim for spread in spreads(method)]))
    assert float(method.radius) == pytest.approx(radius, rel=1e-5)
    means = method.statistics.means().clone()
    learn(method, range(1, 2))
    assert float(method.radius) == pytest.approx(radius, rel=1e-5)
    assert torch.equal(method.statistics.means(0), means)
    spread = class_covariances(3 * torch.randn(4000, 8), torch.arange(4000) % 2, 2)
    assert float(spread.diagonal(dim1=1, dim2=2).mean().sqrt()) == pytest.approx(3, rel=0.03)


def test_turned_classes_do_not_count_as_parameters():
    method = course(ZOO["pass"]).methods[-1]
    assert method.size() == sum(p.numel() for part in (method.backbone, method.heads) for p in part.parameters())


# --------------------------------------------------------------------------------------------------------------- IL2A


def test_pairs_of_classes_are_numbered_in_order():
    x, y = torch.eye(4), torch.arange(4)
    actual = {}
    for _ in range(20):
        images, labels = mixed(x, y, 4, 4, 20.0)
        for image, label in zip(images, labels.tolist(), strict=True):
            actual.setdefault(label, set()).add(tuple(image.nonzero()[:, 0].tolist()))
    assert actual == {k: {pair} for k, pair in enumerate([(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)])}


def test_images_of_one_class_are_not_mixed_and_shares_are_near_the_middle():
    y = torch.tensor([0, 0, 1, 1])
    images, labels = mixed(torch.eye(4).repeat(50, 1)[:, :, None], y.repeat(50), 2, 3, 1.0)
    assert 0 < len(images) < 600 and set(labels.tolist()) == {0}
    shares = images.flatten(1)
    torch.testing.assert_close(shares.sum(1), torch.ones(len(shares)))
    assert torch.equal((shares > 0).sum(1), torch.full((len(shares),), 2))
    assert torch.equal(shares[:, :2].count_nonzero(1), torch.ones(len(shares)))
    largest = shares.amax(1)
    assert largest.max() <= 0.6, "of Beta(1, 1), a fifth lies between 0.4 and 0.6, the others become a half"
    assert 0.7 < (largest == 0.5).float().mean() < 0.9


def test_the_bound_of_round_classes():
    torch.manual_seed(0)
    logits, weight, y = torch.randn(5, 3), torch.randn(3, 4), torch.tensor([0, 2, 1, 1, 0])
    assert torch.equal(raised_logits(logits, weight, y, torch.zeros(3, 4, 4), 2.5), logits)
    raised = raised_logits(logits, weight, y, 0.7**2 * torch.eye(4).expand(3, 4, 4), 2.5)
    apart = (weight[None] - weight[y][:, None]).square().sum(2)
    torch.testing.assert_close(raised, logits + 1.25 * 0.7**2 * apart)
    torch.testing.assert_close(raised.gather(1, y[:, None]), logits.gather(1, y[:, None]))


def test_the_bound_is_above_the_loss_expected_of_features():
    rng = np.random.default_rng(0)
    root, mean, weight = rng.standard_normal((4, 4)), rng.standard_normal(4), rng.standard_normal((3, 4))
    features = mean + np.sqrt(2.5) * rng.standard_normal((50_000, 4)) @ root.T
    expected = np_cross_entropy(features @ weight.T, np.full(50_000, 1))
    logits = torch.from_numpy((mean @ weight.T)[None])
    spread = torch.from_numpy(root @ root.T).expand(3, 4, 4)
    bound = F.cross_entropy(
        raised_logits(logits, torch.from_numpy(weight), torch.tensor([1]), spread, 2.5), torch.tensor([1])
    )
    plain = F.cross_entropy(logits, torch.tensor([1]))
    assert plain < expected < float(bound)


def test_il2a_is_held_to_the_bound_and_to_its_features():
    method, teacher = known(IL2A(small_resnet(), seman_weight=3.0, kd_weight=2.0, mix_times=0))
    batch = a_batch(2)
    covariances = torch.cat([method.covariances[f"{t}"] for t in range(2)])
    with torch.no_grad():
        features, before = (network(batch.x).double().numpy() for network in (method.backbone, teacher))
        torch.manual_seed(9)
        actual = method.loss(make_task(2), teacher, None, covariances, batch).item()
    torch.manual_seed(9)
    old = torch.randint(2 * CLASSES, (len(batch.y),)).numpy()
    weight = np.concatenate([block.weight.detach().numpy() for block in method.heads])
    raised = head(method.heads)(method.statistics.means().numpy()[old])
    for i, y in enumerate(old):
        for j in range(3 * CLASSES):
            raised[i, j] += 1.25 * (weight[j] - weight[y]) @ covariances[y].numpy() @ (weight[j] - weight[y])
    expected = np_cross_entropy(head(method.heads)(features) / 0.1, batch.y.numpy())
    expected += 3 * np_cross_entropy(raised / 0.1, old) + 2 * np.sqrt(((features - before) ** 2).sum())
    assert actual == pytest.approx(expected, rel=1e-4)


def test_mixtures_have_a_head_of_their_own_while_a_task_lasts():
    method = IL2A(small_resnet())
    task = make_task(0, classes=3)
    phase = next(method.learn(task))
    assert phase.extra.out_features == 3
    assert not {id(p) for p in phase.extra.parameters()} & {id(p) for p in method.parameters()}
    assert {id(p) for p in phase.extra.parameters()} <= {id(p) for p in phase.trained}
    seen = []
    method.cross_entropy = lambda logits, y: seen.append((logits, y)) or logits.sum()
    phase.loss(next(iter(task.batches(30, 0))))
    (logits, y) = seen[0]
    assert logits.shape == (len(y), 6) and 30 < len(y) <= 150 and set(y[30:].tolist()) == {3, 4, 5}
    assert next(IL2A(small_resnet()).learn(make_task(0, classes=1))).extra is None


@pytest.mark.parametrize(("order", "tasks"), [("own", (0, 1)), ("released", (1, 0))])
def test_an_old_class_has_its_own_covariance(order, tasks):
    method, spread = IL2A(small_resnet(), covariances=order), []
    for t in range(2):
        learn(method, range(t, t + 1))
        spread.append(spreads(method))
    *_, old = next(method.learn(make_task(2))).loss.args
    np.testing.assert_allclose(old, np.concatenate([spread[t] for t in tasks]), rtol=1e-3, atol=1e-6)


# --------------------------------------------------------------------------------------------------------------- SSRE


def test_ssre_weighs_what_is_new_against_what_was():
    method, _ = known(SSRE(small_resnet(), protoAug_weight=3.0, kd_weight=2.0))
    phase = next(SSRE.learn(method, make_task(2)))
    branches, batch = phase.extra, a_batch(2)
    method.eval()
    torch.manual_seed(5)
    with torch.no_grad():
        for branch in branches.parameters():
            branch.normal_(0, 0.1)
        before = method.backbone(batch.x).double().numpy()
        expanded = frozen(method.backbone)
        branches.merge(expanded)
        features = expanded(batch.x).double().numpy()
    means = method.statistics.means().numpy()
    unit = [rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in (features, means)]
    near = (unit[0] @ unit[1].T).max(1)
    classifier = head(method.heads)
    losses = [np_cross_entropy(classifier(z[None]) / 0.1, [y]) for z, y in zip(features, batch.y.tolist(), strict=True)]
    torch.manual_seed(9)
    old = torch.randint(2 * CLASSES, (len(batch.y),)).numpy()
    expected = np.mean((1 - near) * losses) + 2 * (near * np.linalg.norm(features - before, axis=1)).sum()
    expected += 3 * np_cross_entropy(classifier(means[old]) / 0.1, old)
    torch.manual_seed(9)
    assert phase.loss(batch).item() == pytest.approx(expected, rel=1e-4)


def test_ssre_does_not_learn_to_resemble(monkeypatch):
    """The gradient is that with weights which are numbers."""
    method, _ = known(SSRE(small_resnet(), protoAug_weight=0.0))
    phase, batch = next(method.learn(make_task(2))), a_batch(2)
    method.eval()
    with torch.no_grad():
        for branch in phase.extra.parameters():
            branch.normal_(0, 0.1)
    actual = torch.autograd.grad(phase.loss(batch), [*phase.extra.parameters()])
    numbers = ssre.resemblance
    monkeypatch.setattr(ssre, "resemblance", lambda *given: numbers(*given).detach())
    expected = torch.autograd.grad(phase.loss(batch), [*phase.extra.parameters()])
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_ssre_starts_a_task_as_the_network_it_was():
    method, _ = known(SSRE(small_resnet()))
    phase, batch = next(method.learn(make_task(2))), a_batch(2)
    method.eval()
    with torch.no_grad():
        torch.manual_seed(0)
        one = phase.loss(batch).item()
        method.kd_weight = 1e6
        torch.manual_seed(0)
        assert phase.loss(batch).item() == one
    phase.loss(batch).backward()
    assert all(p.grad.isfinite().all() for p in phase.trained)


def test_later_tasks_of_ssre_move_the_centres_of_kernels_alone():
    one, _, three = course(ZOO["ssre"]).methods
    moved = 0
    for name, value in one.backbone.state_dict().items():
        now = three.backbone.state_dict()[name]
        if value.ndim == 4 and value.shape[2:] == (3, 3) and name != "conv1.weight":
            moved += not torch.equal(now[:, :, 1, 1], value[:, :, 1, 1])
            now, value = (weight.index_fill(2, torch.tensor([1]), 0) for weight in (now, value))
        assert torch.equal(now, value), name
    assert moved == 8
    norms = [module for module in three.backbone.modules() if isinstance(module, nn.BatchNorm2d)]
    assert all((norm.weight == 1).all() and (norm.running_var - 1 + norm.eps).abs().max() < 1e-6 for norm in norms)
    assert three.size() - one.size() == sum(p.numel() for block in list(three.heads)[1:] for p in block.parameters())


def test_ssre_needs_convolutions():
    with pytest.raises(ConfigError, match="method=ssre: the backbone has no 3x3 convolutions"):
        SSRE(small_vit())


# ------------------------------------------------------------------------------------------------------- of all three


@pytest.mark.parametrize("kind", ["ssre", "pass", "il2a"])
@torch.no_grad()
def test_what_is_exported_says_the_same(kind):
    method, pixels = course(ZOO[kind]).methods[-1].eval(), torch.rand(3, 3, SIZE, SIZE)
    torch.testing.assert_close(network(method, config().images)(pixels), method(pixels))


@pytest.mark.parametrize("kind", ["pass", "il2a", "ssre"])
def test_old_logits_stay_when_a_head_grows(kind):
    method = ZOO[kind]()
    learn(method, range(1))
    before = logits(method)
    next(method.learn(make_task(1)))
    assert torch.equal(logits(method)[:, :CLASSES], before)


def test_the_table_of_methods_without_exemplars_has_their_runs():
    rows = {row.name: row.set for row in spec.read("necil").rows}
    assert [rows[name] for name in ("PASS", "IL2A", "SSRE")] == [["method=pass"], ["method=il2a"], ["method=ssre"]]
