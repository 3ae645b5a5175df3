"""Cheaper probes than the whole network."""

import copy

import numpy as np
import pytest
import torch

from pearl.methods.common import probes
from pearl.methods.common.probes import distance_to, step_down
from pearl.methods.pearl import Pearl
from pearl.nn.rank_rules import PaperRule
from pearl.nn.task_modules import Classifier
from pearl.testing.conformance import Watch
from pearl.testing.tiny import config, learn, make_task, small_resnet, small_vit
from pearl.training.engine import Engine
from zoo import separable


@pytest.mark.parametrize("share", [0.01, 0.3, 0.9])
@pytest.mark.parametrize("seed", range(4))
def test_a_step_goes_as_far_as_it_is_to(share, seed):
    w, g = np.random.default_rng(seed).standard_normal((2, 30)) * [[2.0], [0.1]]
    moved = w - distance_to(w @ w, w @ g, g @ g, share) * g
    assert ((w - moved) ** 2).sum() / (moved**2 + w**2).sum() == pytest.approx(share)
    assert distance_to(w @ w, 0.0, 0.0, share) == 0


@pytest.mark.parametrize("as_adam", [False, True])
def test_targets_go_down_the_gradient_of_all_images(monkeypatch, as_adam):
    """By one factor, and as Adam would by that of each batch, whose mean of squares is that of batches alone."""
    monkeypatch.setattr(probes, "IMAGES", 20)  # so that the last of 24 come in a smaller batch
    network, task = small_vit(), make_task(0)
    torch.manual_seed(0)
    head, method = Classifier(16, 2), Pearl(network, targets=["key", "value"])
    probe = copy.deepcopy(network)
    step_down(probe, head, task, method.targets, 0.2, as_adam=as_adam)
    names = [f"blocks.{i}.attn.qkv.weight" for i in range(3)]
    weights = [network.get_parameter(name).requires_grad_(True) for name in names]

    def gradient(rows):
        said = head(network.eval()(task.view.test(task.images[rows])))
        loss = torch.nn.functional.cross_entropy(said, task.labels[rows])
        return torch.stack(torch.autograd.grad(loss, weights))

    down = gradient(slice(None))
    if as_adam:
        down = down / ((20 * gradient(slice(20)) ** 2 + 4 * gradient(slice(20, 24)) ** 2) / 24).sqrt()
    steps = torch.stack([(probe.get_parameter(n) - w).detach() for n, w in zip(names, weights, strict=True)])
    usual = (steps / down).median()
    assert usual < 0
    rows = slice(16, 48)  # keys and values, of which alone the distance is to be this
    torch.testing.assert_close(steps[:, rows], usual * down[:, rows], rtol=1e-2, atol=1e-3 * float(steps.abs().max()))
    before = torch.cat([w[rows].detach().flatten() for w in weights])
    after = torch.cat([probe.get_parameter(name)[rows].flatten() for name in names])
    share = (after - before).square().sum() / (after.square() + before.square()).sum()
    assert float(share) == pytest.approx(0.2, rel=1e-4)
    others = {name for name, p in probe.named_parameters() if not torch.equal(p, network.get_parameter(name))}
    assert others == set(names)


class Noting(Watch):
    """Notes what phases are trained on, and how many numbers they train."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def train(self, method, task, phase, position, resume):
        self.seen.append((phase.name, len(phase.data or task), sum(p.numel() for p in phase.trained)))
        super().train(method, task, phase, position, resume)


@pytest.mark.parametrize(
    ("options", "images", "trained"),
    [
        ({}, 24, lambda net, norms: net),
        ({"probe_images": 0.5}, 12, lambda net, norms: net),
        ({"probe": "targets"}, 24, lambda net, norms: 3 * 16 * 16),
        ({"probe": "lora", "probe_rank": 2}, 24, lambda net, norms: 2 * 3 * 32),
        ({"probe": "gradients", "probe_images": 0.25}, 6, lambda net, norms: 0),
    ],
)
def test_what_a_probe_trains(options, images, trained):
    method, engine = Pearl(small_vit(), **options), Noting()
    learn(method, range(1), engine)
    whole = sum(p.numel() for p in method.backbone.parameters())
    assert engine.seen[0] == ("probe", images, trained(whole, 0) + 16 * 2 + 2)
    assert [name for name, *_ in engine.seen] == ["probe", "adapt"] and engine.seen[1][1] == 24
    assert not engine.wrong


@pytest.mark.parametrize("network", [small_vit, separable])
def test_a_probe_of_the_targets_moves_nothing_else(network, monkeypatch):
    """With momentum and weight decay, which would move other rows of a fused weight that the optimizer held."""
    method, probed = Pearl(network(), probe="targets", reference="given"), []
    choose = Pearl.choose_ranks
    monkeypatch.setattr(Pearl, "choose_ranks", lambda self, probe: probed.append(probe) or choose(self, probe))
    settings = {"epochs": 2, "batch_size": 8, "optimizer": "adamw", "weight_decay": 0.5}
    learn(method, range(1), Engine(config(train=settings), device="cpu"))
    before, after = dict(method.backbone.named_parameters()), dict(probed[0].named_parameters())
    for name, weight in before.items():
        moved = after[name] != weight
        for target in (t for t in method.targets if t.parameter == name):
            assert target.read({name: moved}).any()
            target.read({name: moved}).fill_(False)
        assert not moved.any(), name
    layers = {label: method.rank.choose(*pair).rank for label, pair in method.matrices(probed[0]).items()}
    assert layers == {layer["layer"]: layer["rank"] for layer in method.facts(0)["layers"]}


def test_a_probe_of_low_rank_is_what_its_updates_make_of_the_network(monkeypatch):
    """Ranks are at most the probe's, and the update that they are chosen by is the one that was trained."""
    method, seen = Pearl(small_resnet(), probe="lora", probe_rank=2, reference="given"), []

    def choose_all(rule, layers):
        seen.append({label: tuned - reference for label, (reference, tuned) in layers.items()})
        return {label: rule.choose(*pair) for label, pair in layers.items()}

    monkeypatch.setattr(PaperRule, "choose_all", choose_all)
    learn(method, range(1))
    for label, moved in seen[0].items():
        s = np.linalg.svd(moved.double().numpy(), compute_uv=False)
        assert s[2:].max() < 1e-3 * s[0], label
        assert s[0] > 0
