"""Methods that put adapters into a frozen ViT, and what they share, against calculations of their own."""

import pytest
import torch
import torch.nn.functional as F

from pearl.errors import ConfigError
from pearl.methods.adapters.bottleneck import Adapters, Bottleneck, TaskAdapters
from pearl.methods.adapters.ease import Ease
from pearl.methods.adapters.ssiat import Ssiat
from pearl.methods.common.gaussians import GaussianDraws, drift
from pearl.nn import vit
from pearl.testing.tiny import images, logits, make_task, small_resnet
from vits import WIDTH, close, drawn, run, small

# ------------------------------------------------------------------------------------------------------------ the block


def stirred(module, size=0.3):
    """With weights that are not those of the start."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(size * torch.randn_like(parameter))
    return module.eval()


@torch.no_grad()
def test_a_bottleneck_is_two_linear_layers_and_what_stands_between():
    tokens = drawn(2, 5, WIDTH)
    for activation, function in (("relu", torch.relu), ("gelu", F.gelu)):
        block = stirred(Bottleneck(WIDTH, 4, scale=0.1, activation=activation))
        hidden = function(tokens @ block.down.weight.T + block.down.bias)
        close(block(tokens), 0.1 * (hidden @ block.up.weight.T + block.up.bias))
    assert sum(p.numel() for p in Bottleneck(768, 64).parameters()) * 12 == 1_189_632  # as EASE and SSIAT count
    assert [*Bottleneck(WIDTH, 4, bias=False, learnable=True).state_dict()] == ["scale", "down.weight", "up.weight"]


@torch.no_grad()
def test_adapters_are_nothing_at_the_start_and_drop_out_in_training_alone():
    net, x = small(), images()
    fresh = Adapters(range(3), lambda: Bottleneck(WIDTH, 4, dropout=0.5))
    close(vit.features(net, x, adapters=fresh.by_block()), net(x), atol=1e-6)
    block = stirred(fresh)["1"]
    tokens = drawn(1, 3, WIDTH)
    assert torch.equal(block(tokens), block(tokens))
    assert not torch.equal(block.train()(tokens), block(tokens))


@pytest.mark.parametrize("option", ["adapters", "attention_adapters"])
def test_a_learnable_scale_is_trained_where_an_adapter_stands(option):
    net, x = small(), images()
    adapters = stirred(Adapters([0, 2], lambda: Bottleneck(WIDTH, 4, learnable=True)))
    vit.features(net, x, **{option: adapters.by_block()}).square().sum().backward()
    assert all(block.scale.grad.abs() > 0 and block.down.weight.grad.any() for block in adapters.values())


def test_adapters_of_tasks_grow_from_their_file():
    tasks = TaskAdapters([0, 2], lambda: Bottleneck(WIDTH, 4))
    for _ in range(11):
        stirred(tasks.grow())
    fresh = TaskAdapters([0, 2], lambda: Bottleneck(WIDTH, 4))
    fresh.load_state_dict(tasks.state_dict())
    assert len(fresh) == 11
    assert [*fresh.by_block(10)] == [0, 2]
    tokens = drawn(1, 3, WIDTH)
    assert torch.equal(fresh.by_block(10)[2](tokens), tasks.by_block(10)[2](tokens))


@torch.no_grad()
def test_several_sets_of_adapters_share_what_lies_before_the_first():
    net, x = small(), images()
    sets = [stirred(Adapters(blocks, lambda: Bottleneck(WIDTH, 4))).by_block() for blocks in ([1, 2], [2], [1])]
    for actual, own in zip(vit.features_of_each(net, x, sets), sets, strict=True):
        close(actual, vit.features(net, x, adapters=own), atol=1e-6)
    called = []
    for i, block in enumerate(net.blocks):
        block.attn.register_forward_hook(lambda *_, i=i: called.append(i))
    vit.features_of_each(net, x, sets)
    assert called == [0, 1, 2, 2, 2]


# ----------------------------------------------------------------------------------------- classes that are drawn from


def test_means_move_as_the_images_near_them_did():
    before, moves, means = drawn(30, 5).double(), drawn(30, 5, seed=1).double(), drawn(4, 5, seed=2).double()
    close(drift(before, before + 0.7, means, 4.0), torch.full((4, 5), 0.7).double(), atol=1e-12)
    assert not drift(before, before, means, 4.0).any()
    actual = drift(before, before + moves, means, 0.9)
    for c, mean in enumerate(means):
        weights = torch.tensor([torch.exp(-(y - mean).square().sum() / (2 * 0.81)) + 1e-5 for y in before]).double()
        close(actual[c], sum(w * m for w, m in zip(weights, moves, strict=True)) / weights.sum(), atol=1e-7)
    far = drift(before, before + moves, means + 1e4, 4.0)
    close(far, moves.mean(0).expand(4, -1), atol=1e-9)  # no image is near: they all count alike


def test_draws_have_the_classes_means_and_covariances():
    factors = torch.tril(drawn(3, 4, 4)) + torch.eye(4)
    means = 3 * drawn(3, 4, seed=1)
    draws = GaussianDraws(means, factors, 20_000)
    batch = next(draws.batches(len(draws), 5))
    assert batch.y.bincount().tolist() == [20_000] * 3
    assert batch.y[:100].unique().tolist() == [0, 1, 2]
    for c in range(3):
        of_class = batch.x[batch.y == c]
        close(of_class.mean(0), means[c], atol=0.1, rtol=0)
        close(of_class.T.cov(), factors[c] @ factors[c].T, atol=0.2, rtol=0.05)
    parts = [*draws.batches(256, 5, skip=3)]
    assert torch.equal(parts[0].x, batch.x[768:1024])
    assert not torch.equal(next(draws.batches(256, 6)).x, batch.x[:256])


# --------------------------------------------------------------------------------------------------------------- SSIAT


def make_ssiat(**options):
    return Ssiat(small(), **({"ffn_num": 4, "dropout": 0.0, "draws": 16} | options))


def test_ssiat_learns_its_own_classes_and_aligns_all():
    method, task = run(make_ssiat(), range(1)), make_task(1)
    phases = method.learn(task)
    phase = next(phases)
    batch = next(task.batches(8, 0))
    cosines = F.cosine_similarity(method.features(batch.x)[:, None], method.heads[1].weight[None], dim=2)
    close(phase.loss(batch), F.cross_entropy(20 * cosines, batch.y - 2))
    assert phase.name == "ssiat" and method.heads[0].weight.requires_grad is False
    align = next(phases)
    assert align.name == "ssiat_align" and len(align.data) == 4 * 16
    assert {id(p) for p in align.trained} == {id(head.weight) for head in method.heads}
    batch = next(align.data.batches(8, 0))
    weights = torch.cat([head.weight for head in method.heads])
    expected = 20 * F.cosine_similarity(batch.x[:, None], weights[None], dim=2)
    close(align.loss(batch), F.cross_entropy(expected, batch.y))
    assert [phase.name for phase in make_ssiat().learn(make_task(0))] == ["ssiat_first"]


def test_ssiat_moves_old_means_by_what_the_same_images_did(monkeypatch):
    method = run(make_ssiat(), range(1))
    before, features = method.statistics.means().clone(), method.features
    for phase in method.learn(make_task(1)):
        if phase.name == "ssiat":
            monkeypatch.setattr(method, "features", lambda x: features(x) + 3)
    close(method.statistics.means(0), before + 3, atol=1e-6)
    task = make_task(1)
    with torch.no_grad():
        new = features(task.view.test(task.images)).double() + 3
    close(method.statistics.means(1)[1], new[task.labels == 3].mean(0), atol=1e-5)


def test_ssiat_draws_around_a_share_of_each_mean():
    method = run(make_ssiat(), range(3))
    draws, means = method.draws_of_all(), method.statistics.means()
    shares = torch.tensor([0.9 + 0.1 / 3] * 2 + [0.9 + 0.2 / 3] * 2 + [1.0] * 2)[:, None]
    close(draws.means, (shares * means).float())
    task = make_task(2)
    with torch.no_grad():
        rows = method.features(task.view.test(task.images))[task.labels == 5].double()
    close((draws.factors[5] @ draws.factors[5].T).double(), rows.T.cov() + 1e-3 * torch.eye(WIDTH), atol=1e-4)


# ---------------------------------------------------------------------------------------------------------------- EASE


def make_ease(**options):
    return Ease(small(), **({"ffn_num": 4, "dropout": 0.0} | options))


def test_with_one_task_ease_is_the_cosine_to_class_means():
    method = make_ease()
    for _ in method.learn(make_task(0)):
        pass  # nothing is trained: adapters are nothing yet
    task = make_task(0)
    with torch.no_grad():
        plain = method.backbone(task.view.test(task.images)).double()
        means = torch.stack([plain[task.labels == c].mean(0) for c in range(2)])
        expected = F.cosine_similarity(method.backbone(images()).double()[:, None], means[None], dim=2)
    close(logits(method).double(), expected, atol=1e-6)


def test_ease_asks_every_space_by_prototypes_that_were_seen_or_are_put_together():
    method, x = run(make_ease(alpha=0.3), range(3)).eval(), images()
    tasks = [make_task(t) for t in range(3)]
    with torch.no_grad():
        spaces = [
            lambda z, t=t: vit.features(method.backbone, z, adapters=method.adapters.by_block(t)) for t in range(3)
        ]
        real = {}  # by class and space
        for t, task in enumerate(tasks):
            for s in range(t + 1):
                features = spaces[s](task.view.test(task.images)).double()
                real |= {(c, s): features[task.labels == c].mean(0) for c in (2 * t, 2 * t + 1)}
        for i in range(6):
            for s in range(i // 2 + 1, 3):
                own = real[i, i // 2]
                others = range(2 * s, 6)
                alike = torch.stack([F.cosine_similarity(own, real[j, i // 2], dim=0) for j in others]).exp()
                real[i, s, "made"] = sum(a / alike.sum() * real[j, s] for a, j in zip(alike, others, strict=True))
        expected = torch.zeros(6, 6)
        for s in range(3):
            features = spaces[s](x).double()
            for c in range(6):
                prototype = real[c, s] if s <= c // 2 else real[c, s, "made"]
                weight = 1 if s == c // 2 else 0.3 / 2
                expected[:, c] += (weight * F.cosine_similarity(features, prototype[None], dim=1)).float()
    close(logits(method), expected, atol=1e-5)
    close(logits(method, 1), expected[:, 2:4], atol=1e-5)


def test_a_single_new_class_stands_for_all_old_ones_in_its_space():
    method = make_ease()
    for t in range(2):
        for _ in method.learn(make_task(t, classes=1)):
            stirred(method.adapters[t])
    close(method.prototypes(0, 1), method.prototypes(1, 1))


def test_later_tasks_leave_earlier_adapters_alone():
    method = run(make_ease(), range(1))
    before = {name: value.clone() for name, value in method.adapters.state_dict().items()}
    run(method, [1])
    assert all(torch.equal(method.adapters.state_dict()[name], value) for name, value in before.items())
    assert method.forward_passes() == 2


@pytest.mark.parametrize("method", [Ease, Ssiat])
def test_other_networks_are_refused(method):
    with pytest.raises(ConfigError, match=r"^this method needs a plain ViT, such as [^\n]*; here is a ResNet$"):
        method(small_resnet())
