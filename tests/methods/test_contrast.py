"""Losses that compare embeddings, and the methods that learn by them, against calculations of their own."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from pearl.data.batches import Batch
from pearl.methods.common.memory import Shown
from pearl.methods.common.teacher import frozen
from pearl.methods.rehearsal.co2l import Co2L
from pearl.methods.rehearsal.contrast import contrast_across, relation_distillation, supervised_contrast
from pearl.methods.rehearsal.ocdnet import OcdNet, turned_copies
from pearl.nn.resnet import resnet18
from pearl.testing.tiny import CLASSES, SIZE, config, make_task
from pearl.testing.tiny import learn as learn_whole
from pearl.training.engine import Engine


def net():
    torch.manual_seed(1)
    return resnet18(SIZE, width=4)


def learn(method, tasks):
    """Two steps a phase."""
    learn_whole(method, tasks, Engine(config(train={"epochs": 1, "batch_size": 12}), device="cpu"))


def unit(n, d=5, seed=0):
    return F.normalize(torch.randn(n, d, generator=torch.Generator().manual_seed(seed)), dim=1)


def softmax(values):
    values = np.exp(values - values.max())
    return values / values.sum()


# ------------------------------------------------------------------------------------------------------------ losses


def contrast_by_hand(z, labels, temperature, anchors):
    total = 0.0
    for i in np.flatnonzero(anchors):
        others = [a for a in range(len(z)) if a != i]
        p = softmax(np.array([z[i] @ z[a] for a in others]) / temperature)
        positives = [k for k, a in enumerate(others) if labels[a] == labels[i]]
        total -= np.mean(np.log(p[positives]))
    return total / len(z)


@pytest.mark.parametrize("anchors", [None, [True, False, True, True, False, False, True, True]])
def test_contrast_is_that_of_loops(anchors):
    z, labels = unit(8), torch.tensor([0, 1, 2, 0, 1, 2, 0, 2])
    ours = supervised_contrast(z, labels, 0.3, None if anchors is None else torch.tensor(anchors))
    expected = contrast_by_hand(z.double().numpy(), labels.numpy(), 0.3, np.array(anchors or [True] * 8))
    assert ours.item() == pytest.approx(expected, rel=1e-5)


def test_contrast_in_closed_form():
    same = torch.ones(6, 1)
    assert supervised_contrast(same, torch.zeros(6), 0.5).item() == pytest.approx(math.log(5), rel=1e-6)
    views = torch.eye(3).repeat(2, 1)  # two equal views of three orthogonal classes
    labels = torch.arange(3).repeat(2)
    assert supervised_contrast(views, labels, 0.5).item() == pytest.approx(0.432653, abs=1e-6)
    one = supervised_contrast(views, labels, 0.5, anchors=labels == 2)
    assert one.item() == pytest.approx(0.144218, abs=1e-6), "the sum is divided by all, not by the anchors"


def test_contrast_across_has_an_images_own_twin():
    n = 5
    z = torch.eye(n)
    expected = math.log(1 + (n - 1) * math.exp(-1 / 0.3))
    assert contrast_across(z, z, torch.arange(n), 0.3).item() == pytest.approx(expected, rel=1e-5)
    a, b, labels = unit(6, seed=1), unit(6, seed=2), np.array([0, 1, 0, 1, 2, 2])
    rows = [np.log(softmax(a[i].double().numpy() @ b.double().numpy().T / 0.2)) for i in range(6)]
    expected = -np.mean([rows[i][labels == labels[i]].mean() for i in range(6)])
    assert contrast_across(a, b, torch.as_tensor(labels), 0.2).item() == pytest.approx(expected, rel=1e-5)


def test_relations_kept_cost_their_entropy_and_pull_nowhere():
    z = unit(7).requires_grad_(True)
    loss = relation_distillation(z, z.detach(), 0.2, 0.2)
    cosines = (z @ z.T).detach().double().numpy()
    others = [np.delete(row, i) for i, row in enumerate(cosines)]
    entropies = [-(p * np.log(p)).sum() for p in (softmax(row / 0.2) for row in others)]
    assert loss.item() == pytest.approx(np.mean(entropies), rel=1e-5)
    loss.backward()
    assert z.grad.abs().max() < 1e-6
    moved = relation_distillation(z, unit(7, seed=5), 0.2, 0.01)
    order = torch.randperm(7)
    again = relation_distillation(z[order], unit(7, seed=5)[order], 0.2, 0.01)
    assert again.item() == pytest.approx(moved.item(), rel=1e-5)


# -------------------------------------------------------------------------------------------------------------- Co2L


def two_views(method, task, count=6):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(2 * count, 3, SIZE, SIZE, generator=generator)
    return Batch(x, torch.arange(count) % (task.first_class + CLASSES), torch.arange(count))


def test_co2l_contrasts_new_images_alone_and_keeps_relations():
    method, task = Co2L(net(), buffer_size=20), make_task(1)
    learn(method, range(1))
    network = torch.nn.Sequential(method.backbone, method.projection).eval()
    teacher, batch = frozen(network), two_views(method, task)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(1.05)
        loss = method.loss(task, network, teacher, batch).item()
        z, before = (F.normalize(one(batch.x), dim=1).double().numpy() for one in (network, teacher))
    labels = np.tile(batch.y.numpy(), 2)
    expected = 0.5 / 0.07 * contrast_by_hand(z, labels, 0.5, labels >= 2)
    for i in range(12):
        q, p = (
            softmax(np.array([one[i] @ one[j] for j in range(12) if j != i]) / t)
            for one, t in ((before, 0.01), (z, 0.2))
        )
        expected -= (q * np.log(p)).sum() / 12
    assert loss == pytest.approx(expected, rel=1e-4)


def test_co2ls_memory_is_balanced_and_filled_when_a_task_ends():
    method = Co2L(net(), buffer_size=21)
    seen = []
    for t in range(3):
        phases = method.learn(make_task(t))
        method.train()
        for phase in phases:
            kept = method.memory.labels[: len(method.memory)]
            images = sum(1 for batch in phase.data.batches(8, 0) for _ in batch.y)
            seen.append((phase.name, images, len(phase.data)))
            assert len(kept) == (0 if t == 0 else 21), "nothing is kept of a task before it ends"
        counts = method.memory.labels[: len(method.memory)].bincount()
        assert counts.sum() == 21 and counts.max() - counts.min() <= 1 and len(counts) == 2 * (t + 1)
    names = [name for name, _, _ in seen]
    assert names == ["co2l_first", "co2l_classifier", "co2l", "co2l_classifier", "co2l", "co2l_classifier"]
    assert [count for _, count, _ in seen] == [length for _, _, length in seen] == [24, 24, 45, 45, 45, 45]


def test_co2ls_classifier_is_new_and_leaves_the_network_alone():
    method = Co2L(net(), buffer_size=20)
    learn(method, range(1))
    old = method.heads[0].weight.detach().clone()
    phases = method.learn(make_task(1))
    next(phases)
    phase = next(phases)
    method.train()
    assert not method.backbone.training and not any(p.requires_grad for p in method.backbone.parameters())
    assert not torch.equal(method.heads[0].weight, old)
    assert {id(p) for p in phase.trained} == {id(p) for p in method.heads.parameters()}
    before = {name: value.clone() for name, value in method.backbone.state_dict().items()}
    batch = next(phase.data.batches(8, 0))
    assert batch.x.shape == (8, 3, SIZE, SIZE)
    phase.loss(batch).backward()
    assert all(torch.equal(value, method.backbone.state_dict()[name]) for name, value in before.items())


def test_what_only_the_contrast_needs_does_not_count():
    method = Co2L(net())
    learn(method, range(1))
    assert method.size() == sum(p.numel() for part in (method.backbone, method.heads) for p in part.parameters())
    assert sum(p.numel() for p in Co2L(resnet18(32, width=64)).projection.parameters()) == 328_320


# ----------------------------------------------------------------------------------------------------------- OCD-Net


def remembered(count=6, classes=2 * CLASSES):
    x = torch.randn(count, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(4))
    return Shown(x, torch.arange(count) % classes, torch.zeros(count, dtype=torch.int64), None)


def test_ocdnet_distils_by_how_sure_the_teacher_is(monkeypatch):
    method = OcdNet(net(), buffer_size=20)
    learn(method, range(2))
    method.eval()
    old, logits, embedded = remembered(), torch.randn(6, 4), unit(6, 64)
    teachers, target = unit(6, 64, seed=9), torch.randn(6, 4, generator=torch.Generator().manual_seed(8))
    monkeypatch.setattr(method, "taught", lambda old: torch.cat([teachers, target], 1))
    p = [softmax(row)[y] for row, y in zip(target.numpy(), old.y.tolist(), strict=True)]
    apart = np.mean(np.array(p) * ((logits - target).numpy() ** 2).mean(1))
    expected = apart + contrast_across(teachers, embedded, old.y, 0.07).item()
    assert method.distilled(old, logits, embedded).item() == pytest.approx(expected, rel=1e-5)
    target[:] = F.one_hot((old.y + 1) % 4, 4) * 100.0  # sure, and of another class
    method_says = method.distilled(old, logits, embedded) - contrast_across(teachers, embedded, old.y, 0.07)
    assert abs(method_says.item()) < 1e-5


def test_a_teacher_that_is_the_student_has_nothing_to_say_of_logits():
    method = OcdNet(net(), buffer_size=20, ema_norms="averaged")
    learn(method, range(2))
    method.teacher.update(method.network, 0.0)
    method.eval()
    old = remembered()
    with torch.no_grad():
        features = method.backbone(old.x)
        logits, embedded = method.heads(features), method.embedded(features)
        loss = method.distilled(old, logits, embedded).item()
        assert loss == pytest.approx(contrast_across(embedded, embedded, old.y, 0.07).item(), rel=1e-5)
        assert torch.equal(method(old.x), logits), "the teacher is asked"
        method.heads[0].weight.add_(1.0)
        assert torch.equal(method(old.x), logits)
        assert not torch.equal(method.heads(method.backbone(old.x)), logits)


def test_ocdnets_loss_is_the_sum_of_its_parts(monkeypatch):
    """Twice the weight of remembered labels is once more their cross-entropy, and so on."""
    method = OcdNet(net(), buffer_size=20, er_weight=0.5)
    learn(method, range(2))
    method.eval()
    old, batch = remembered(), Batch(torch.randn(5, 3, SIZE, SIZE), torch.tensor([2, 3, 2, 3, 2]), torch.arange(5))
    monkeypatch.setattr(method, "shown", lambda task: old)
    torch.manual_seed(0)
    loss = method.loss(make_task(1), batch).item()
    torch.manual_seed(0)
    x, y = torch.cat([batch.x, old.x]), torch.cat([batch.y, old.y])
    turned, turns = turned_copies(x)
    with torch.no_grad():
        features, copies = method.backbone(x), method.backbone(turned)
        logits, z = method.heads(features), method.embedded(features)
        expected = F.cross_entropy(logits[:5], batch.y) + 0.5 * F.cross_entropy(logits[5:], old.y)
        expected += 0.1 * method.distilled(old, logits[5:], z[5:])
        both = torch.cat([z, method.embedded(copies)]).numpy()
        expected += 0.3 * contrast_by_hand(both, y.repeat(2).numpy(), 0.07, np.ones(22, bool))
        expected += 0.3 * F.cross_entropy(method.turns(copies), turns)
    assert loss == pytest.approx(float(expected), rel=1e-4)


def test_copies_are_turned_equally_often_and_show_two_thirds():
    torch.manual_seed(0)
    ramp = torch.arange(24.0).expand(3, 24, 24).repeat(10, 1, 1, 1)  # grows to the right
    copies, turns = turned_copies(ramp)
    assert sorted(turns.bincount().tolist()) == [2, 2, 3, 3]
    step = math.sqrt(2 / 3)  # of a pixel of the copy
    towards = {0: (0, 1), 1: (-1, 0), 2: (0, -1), 3: (1, 0)}  # after so many quarters against the clock, down and right
    for copy, turn in zip(copies, turns.tolist(), strict=True):
        down, right = (float(copy[0].diff(dim=d)[5:-5, 5:-5].mean()) for d in (0, 1))
        assert (down, right) == pytest.approx(tuple(step * s for s in towards[turn]), abs=0.05)
    assert torch.equal(ramp, torch.arange(24.0).expand(10, 3, 24, 24)), "the batch is not written to"


def test_ocdnets_sizes_are_the_authors():
    method = OcdNet(resnet18(32, width=64))
    assert sum(p.numel() for p in method.turns.parameters()) == 529_412
    assert sum(p.numel() for p in method.embedding.parameters()) == 560_192
    assert method.heads.grow(20).bias is None
    assert method.size() == sum(p.numel() for part in (method.backbone, method.heads) for p in part.parameters())
