"""Cheaper probes than the whole network."""

import pytest

from pearl.methods.pearl import Pearl
from pearl.testing.conformance import Watch
from pearl.testing.tiny import config, learn, small_vit
from pearl.training.engine import Engine
from zoo import separable


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
    [({}, 24, None), ({"probe_images": 0.5}, 12, None), ({"probe": "targets"}, 24, 3 * 16 * 16)],
)
def test_what_a_probe_trains(options, images, trained):
    method, engine = Pearl(small_vit(), **options), Noting()
    learn(method, range(1), engine)
    whole = sum(p.numel() for p in method.backbone.parameters())
    assert engine.seen[0] == ("probe", images, (trained or whole) + 16 * 2 + 2)
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
