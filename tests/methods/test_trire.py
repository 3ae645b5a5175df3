"""TriRE: which channels are heard, which weights are chosen, and what each of its stages may change."""

import copy
from functools import cache

import pytest
import torch
import torch.nn.functional as F

from pearl.data.batches import Batch
from pearl.errors import ConfigError
from pearl.methods.common.memory import Shown
from pearl.methods.rehearsal.trire import TriRe
from pearl.methods.rehearsal.winners import blocks_of, chosen, compete, counting, k_winners
from pearl.nn.bsconv import bsc
from pearl.nn.networks import BasicBlock
from pearl.nn.resnet import resnet18
from pearl.testing.tiny import CLASSES, SIZE, config, make_task, small_resnet, small_vit
from pearl.training.engine import Engine


class Look(Engine):
    """An engine that notes masked weights before and after each phase, and late in Retain."""

    def __init__(self):
        super().__init__(config(), device="cpu")
        self.seen, self.late = [], {}

    def train(self, method, task, phase, position, resume):
        inner = phase.after_step

        def after_step(batch):
            if phase.name == "trire_retain" and phase.done == 5:  # of 6
                self.late[task.id] = now()
            inner(batch)

        def now():
            return {name: weight.detach().clone() for name, weight in method.masked.items()}

        phase.after_step = after_step
        kept, before = method.masks(), now()
        super().train(method, task, phase, position, resume)
        self.seen.append((task.id, phase.name, kept, before, now()))


@cache
def learnt():
    """What was seen of two tasks, and the method after them; the second is the last."""
    engine, method = Look(), TriRe(small_resnet(), tasks=2, buffer_size=20, minibatch_size=8)
    for t in range(2):
        engine.learn(method, make_task(t))
    return engine, method


def test_the_channels_with_the_largest_maxima_are_heard():
    x = torch.randn(4, 10, 3, 3, generator=torch.Generator().manual_seed(0))
    heard = k_winners(x, 0.9)
    for image, made in zip(x, heard, strict=True):
        lowest = image.flatten(1).max(1).values.argmin()
        others = [c for c in range(10) if c != lowest]
        assert torch.equal(made[others], image[others]) and not made[lowest].any()
    assert torch.equal(k_winners(x[1:2], 0.9), heard[1:2]), "each image has its own"
    assert (k_winners(x, 0.01).flatten(2).any(2).sum(1) == 1).all()


def test_channels_compete_before_both_relus():
    torch.manual_seed(0)
    block = BasicBlock(10, 10, 1).eval()
    x = torch.randn(3, 10, 5, 5)
    with torch.no_grad():
        inner = F.relu(k_winners(block.bn1(block.conv1(x)), 0.7))
        expected = F.relu(k_winners(block.bn2(block.conv2(inner)) + x, 0.7))
        compete(block, 0.7)
        assert torch.equal(block(x), expected)
        with counting({"a": block}) as counts:
            block(x[:2])
            block(x[2:])
    assert torch.equal(counts["a.1"], (inner.amax((2, 3)) > 0).sum(0))
    assert torch.equal(counts["a.2"], (expected.amax((2, 3)) > 0).sum(0))
    with torch.no_grad():
        block(x)
    assert counts["a.1"].max() <= 3, "nothing is counted afterwards"


@pytest.mark.parametrize("shape", [(10, 4, 3, 3), (10,), (10, 1, 3, 3)])
def test_the_most_important_weights_of_the_busiest_channels_are_chosen(shape):
    generator = torch.Generator().manual_seed(0)
    importance, counts = torch.rand(shape, generator=generator), torch.randperm(10, generator=generator)
    mask = chosen(importance, counts, 0.3, 0.2)
    if len(shape) == 4:
        assert torch.equal(chosen(importance.to(memory_format=torch.channels_last), counts, 0.3, 0.2), mask)
    busiest = (counts >= 7).nonzero()[:, 0].tolist()
    assert int(mask.sum()) == int(0.2 * 3 * importance[0].numel())
    rest = [c for c in range(10) if c not in busiest]
    assert not mask[rest].any()
    own, taken = importance[busiest], mask[busiest]
    if taken.any():
        assert own[taken].min() > own[~taken].max()


def test_masks_are_of_blocks_behind_the_first_stage():
    method = TriRe(resnet18(SIZE, width=4))
    assert set(method.masked) == {
        name
        for name, _ in method.backbone.named_parameters()
        if name.startswith(("layer2", "layer3", "layer4")) and "downsample" not in name
    }
    assert method.halves["layer3.1.bn2.weight"] == "layer3.1.2"
    assert TriRe(bsc(SIZE, width=4)).halves["layer2.0.conv1.depthwise.weight"] == "layer2.0.1"
    with pytest.raises(ConfigError, match="use backbone=resnet18 or backbone=bsc"):
        blocks_of(small_vit())


def test_an_entry_learns_from_new_images_or_from_the_memory(monkeypatch):
    method = learnt()[1]
    method.requires_grad_(True).eval()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(10, 3, SIZE, SIZE, generator=generator)
    batch = Batch(x[:5], CLASSES + torch.arange(5) % CLASSES, torch.arange(5))
    old = Shown(x[5:], torch.arange(5) % 4, torch.zeros(5, dtype=torch.int64), None)
    monkeypatch.setattr(method, "shown", lambda task: old)
    some = {name: torch.rand(w.shape, generator=generator) < 0.5 for name, w in method.masked.items()}
    new = {name: ~mask & (torch.rand(mask.shape, generator=generator) < 0.7) for name, mask in some.items()}

    def gradients(loss):
        return dict(zip(names, torch.autograd.grad(loss, params), strict=True))

    names, params = zip(*method.backbone.named_parameters(), strict=True)
    of_new = gradients(F.cross_entropy(method.heads[1](method.backbone(batch.x)), batch.y - CLASSES))
    distance = F.mse_loss(method(old.x), method.taught(old))
    of_old = gradients(0.05 * distance + F.cross_entropy(method(old.x), old.y))
    ours = gradients(method.loss(make_task(1), new, some, batch))
    for name in names:
        routed = name in some
        expected = of_new[name] * (new[name] if routed else 1) + of_old[name] * (some[name] if routed else 1)
        torch.testing.assert_close(ours[name], expected, rtol=1e-4, atol=1e-6)
    alone = gradients(method.loss(make_task(1), new, None, batch))
    torch.testing.assert_close(alone["conv1.weight"], of_new["conv1.weight"])


def test_each_stage_changes_what_it_may():
    engine, method = learnt()
    names = [(task, name) for task, name, *_ in engine.seen]
    assert names == [
        (0, "trire_retain"),
        (0, "trire_revise"),
        (0, "trire_rewind"),
        (1, "trire_retain"),
        (1, "trire_revise_last"),
    ]
    retain, revise, rewind, again, last = engine.seen
    empty, first = retain[2], rewind[2]
    for name in method.halves:
        assert not empty[name].any() and torch.equal(revise[2][name], empty[name])
        moved = revise[3][name] != revise[4][name]
        assert not (moved & ~first[name]).any(), "Revise trains what is chosen"
        late = torch.where(first[name], revise[4][name], engine.late[0][name])
        assert torch.equal(rewind[3][name], late), "Rewind begins with weights of late in Retain"
        assert not ((rewind[3][name] != rewind[4][name]) & first[name]).any(), "Rewind leaves alone what matters"
        now = method.kept[name]
        assert torch.equal(again[2][name], first[name]) and not (first[name] & ~now).any(), "the set grows"
        assert not ((last[3][name] != last[4][name]) & ~now).any()
    weight = "layer4.0.conv1.weight"  # 32 channels of 16 x 9
    assert int(first[weight].sum()) == int(0.2 * 9 * 144)
    assert (revise[3][weight] != revise[4][weight]).any() and (rewind[3][weight] != rewind[4][weight]).any()


def test_weights_are_chosen_by_their_size_and_both_gradients(monkeypatch):
    method, task = learnt()[1].eval(), make_task(1)
    images, labels = method.memory.images, method.memory.labels
    actual = method.gradients(method, task, images, labels)
    loss = F.cross_entropy(method(task.view.test(images)), labels)
    for (name, weight), size in zip(method.masked.items(), actual.values(), strict=True):
        (expected,) = torch.autograd.grad(loss, weight, retain_graph=True)
        torch.testing.assert_close(size, expected.abs(), rtol=1e-3, atol=1e-6, msg=name)

    called = []
    gradients = TriRe.gradients
    monkeypatch.setattr(TriRe, "gradients", lambda self, *given: called.append(given) or gradients(self, *given))
    method.choose(task)
    (own, _, shown, positions), (every, _, held, names) = called
    x = task.view.test(shown)
    torch.testing.assert_close(own(x), method(x)[:, CLASSES:])  # new images among their own classes, as in Retain
    assert shown is task.images and positions.max() < CLASSES
    assert every is method and len(held) == len(names) == len(method.memory) and names.max() >= CLASSES


def test_gradients_of_new_and_of_remembered_images_count_alike(monkeypatch):
    method, task = learnt()[1].eval(), make_task(1)
    with counting(blocks_of(method.backbone)) as counts:
        method.backbone(task.view.test(task.images))
    drawn = [
        {name: torch.rand(w.shape, generator=torch.Generator().manual_seed(seed)) for name, w in method.masked.items()}
        for seed in (0, 1)
    ]
    gradients, left = TriRe.gradients, iter(drawn)
    monkeypatch.setattr(TriRe, "gradients", lambda self, *given: (gradients(self, *given), next(left))[1])
    for name, mask in method.choose(task).items():
        importance = method.masked[name].detach().abs() + drawn[0][name] + drawn[1][name]
        assert torch.equal(mask, chosen(importance, counts[method.halves[name]], 0.3, 0.2)), name


def test_only_entries_that_are_new_learn_from_new_images_in_revise(monkeypatch):
    method, called, stage = copy.deepcopy(learnt()[1]), {}, TriRe.stage
    own = {name: torch.arange(w.numel()).view(w.shape) % 2 == 0 for name, w in method.masked.items()}
    kept = method.masks()

    def noted(self, name, task, new, old, **hooks):
        called[name] = new, old
        return stage(self, name, task, new, old, **hooks)

    monkeypatch.setattr(TriRe, "stage", noted)
    monkeypatch.setattr(TriRe, "choose", lambda self, task: own)
    assert [phase.name for phase in method.learn(make_task(2))] == ["trire_retain", "trire_revise", "trire_rewind"]
    new, old = called["trire_revise"]
    assert any((own[name] & kept[name]).any() for name in own)
    for name in own:
        assert torch.equal(new[name], own[name] & ~kept[name]) and torch.equal(old[name], kept[name])
        assert torch.equal(called["trire_rewind"][0][name], ~own[name] & ~kept[name])


def test_adam_goes_on_from_phase_to_phase_of_a_task():
    method, handed = TriRe(small_resnet(), tasks=2, buffer_size=20, minibatch_size=8), {}
    for t in range(2):
        handed |= {(t, phase.name): phase.keep_optimizer for phase in method.learn(make_task(t))}
    assert handed == {
        (0, "trire_retain"): True,
        (0, "trire_revise"): True,
        (0, "trire_rewind"): False,
        (1, "trire_retain"): True,
        (1, "trire_revise_last"): False,
    }
