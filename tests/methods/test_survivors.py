"""Lines whose faults no test noticed when they were written (see docs/results/reliability.md), one test each."""

from types import SimpleNamespace

import torch
import torch.nn.functional as F

from pearl.data.batches import Batch
from pearl.methods.prototypes.aper import Aper
from pearl.methods.prototypes.fetril import FeTril, pseudo_features
from pearl.methods.sparse.nispa import Nispa
from pearl.nn.convnet import convnet
from pearl.testing.tiny import SIZE, images, learn, make_task, small_resnet, small_vit


def test_fetrils_loss_is_the_mean_over_features_and_pseudo_features():
    backbone = small_resnet()
    backbone.pretrained = True
    method = FeTril(backbone, extractor="given")
    learn(method, range(1))
    task = make_task(1)
    phase = next(method.learn(task))
    with torch.no_grad():
        features = method.backbone(task.view.test(task.images))
        z, y = pseudo_features(features, task.labels, *method.translations(2))
        expected = F.cross_entropy(method.heads(z), y)
        rows = torch.arange(len(task))
        torch.testing.assert_close(phase.loss(Batch(rows, task.labels, rows)), expected)


def test_nispa_ends_with_the_units_and_the_network_of_the_phase_before_the_accuracy_fell(monkeypatch):
    """Of phases with 90, 89 and 80 %, the second one's network stays, whose units were chosen after the first."""
    torch.manual_seed(0)
    method = Nispa(convnet(SIZE, width=8), density=0.5, recovery_perc=2.5)
    reached, chosen = iter([90.0, 89.0, 80.0]), []

    def phase(*_, **__):
        return SimpleNamespace(), SimpleNamespace(restore=lambda: next(reached))

    def candidates(activations, share):
        chosen.append((torch.rand(len(method.units)) < 0.5) & ~method.stable)
        return chosen[-1]

    for name, stub in (
        ("phase", phase),
        ("candidates", candidates),
        ("look", lambda kept: None),
        ("rewire", lambda _: None),
    ):
        monkeypatch.setattr(method, name, stub)
    start, trained = method.stable.clone(), []
    bias = dict(method.backbone.named_parameters())["conv1.bias"]
    for number, _ in enumerate(method.learn(make_task(0)), 1):
        bias.data.fill_(number)
        trained.append(number)
    assert trained == [1, 2, 3]
    assert torch.equal(method.stable, start | chosen[0])
    own = method.stable[method.units.layers["conv1"].makes]
    assert own.any()
    assert (bias[own] == 2).all()
    assert not bias[~own].any()


def test_shallow_prompts_of_aper_enter_once_and_stay():
    method, net = Aper(small_vit(), tuning="vpt_shallow", prompt_token_num=3), small_vit()
    (prompts,) = method.tuned.parameters()
    assert prompts.shape == (1, 3, 16)
    prompts.data = torch.randn(prompts.shape)
    with torch.no_grad():
        x = net.norm_pre(net._pos_embed(net.patch_embed(images())))
        first = net.num_prefix_tokens
        x = torch.cat([x[:, :first], prompts.expand(len(x), -1, -1), x[:, first:]], dim=1)
        for block in net.blocks:
            x = block(x)
        x = net.norm(x)
        expected = net.pool(torch.cat([x[:, :first], x[:, first + 3 :]], dim=1))
        torch.testing.assert_close(method.adapted(images()), expected, rtol=1e-4, atol=1e-5)


def test_scales_and_shifts_of_aper_start_near_1_and_0():
    torch.manual_seed(0)
    tuned = Aper(small_vit(), tuning="ssf").tuned
    for tensors, mean in ((tuned.scales, 1.0), (tuned.shifts, 0.0)):
        start = torch.cat([value.detach() for value in tensors.parameters()])
        assert abs(float(start.mean()) - mean) < 0.005
        assert 0.015 < float(start.std()) < 0.025
