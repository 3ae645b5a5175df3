"""Methods that leave most weights at 0: how many, which, and what a task may change."""

import pytest
import torch
import torch.nn.functional as F

from pearl.errors import ConfigError
from pearl.lifecycle.small import config, learn, logits, small_resnet
from pearl.methods.regularization.ewc import OnlineEwc
from pearl.methods.sparse.sparcl import Forgetting, SparClEwc, largest
from pearl.settings.config import load_config
from pearl.training.engine import Engine


class Rounds(Engine):
    """Notes what a method looks like before and after each phase."""

    def __init__(self, look):
        super().__init__(config(), device="cpu")
        self.look, self.seen = look, []

    def train(self, method, task, phase, position, replay):
        before = self.look(method)
        super().train(method, task, phase, position, replay)
        self.seen.append((before, self.look(method), len(phase.data or task)))


# ---------------------------------------------------------------------------------------------------------- SparCL-EWC


def test_each_round_of_sparcl_has_a_mask_of_its_own():
    def look(method):
        return {name: (method.open[name].clone(), w.detach().clone()) for name, w in method.weights.items()}

    engine, method = Rounds(look), SparClEwc(small_resnet(), rounds=4, regrow=0.05, remove=0.5, removals=2)
    learn(method, range(2), engine)
    assert len(method.names) == 16 and len(engine.seen) == 8
    for at, (before, after, _) in enumerate(engine.seen):
        density = (0.30, 0.25, 0.25, 0.25)[at % 4]
        for name, (mask, weight) in after.items():
            size = mask.numel()
            assert abs(int(mask.sum()) - density * size) <= 1, name
            assert torch.equal(mask, before[name][0]) and not before[name][1][~mask].any()
            assert not weight[~mask].any(), "what is closed stays 0"
    new = [b[0] & ~a[0] for a, b in zip(engine.seen[0][0].values(), engine.seen[1][0].values(), strict=True)]
    grown = [weight[mask] for mask, (_, weight) in zip(new, engine.seen[1][0].values(), strict=True)]
    assert all(len(w) and not w.any() for w in grown), "they are open again as 0"
    trained = [weight[mask] for mask, (_, weight) in zip(new, engine.seen[1][1].values(), strict=True)]
    assert any(w.any() for w in trained), "and learn"
    assert [images for *_, images in engine.seen] == [24, 18, 12, 12] * 2
    assert method.facts(1) == {"nonzero": sum(int((p != 0).sum()) for p in method.parameters())}
    name = method.names[0]
    fisher, ever_open = method.anchor.importances[f"backbone.{name}"], engine.seen[3][1][name][0] | method.open[name]
    assert fisher[ever_open].any() and not fisher[~ever_open].any()


class OwnClasses(OnlineEwc):
    """Online EWC whose cross-entropy is among a task's own classes."""

    phases = ("sparcl_ewc",)

    def cross_entropy(self, batch):
        own = self.heads.columns(len(self.heads) - 1)
        return F.cross_entropy(self(batch.x)[:, own], batch.y - own.start)


def test_sparcl_ewc_without_sparsity_is_ewc():
    dense = {"rounds": 1, "sparsity": 0.0, "regrow": 0.0, "gradient_sparse": 0.0, "remove": 0.0}
    method, plain = SparClEwc(small_resnet(), e_lambda=5.0, **dense), OwnClasses(small_resnet(), e_lambda=5.0)
    learn(method, range(2))
    learn(plain, range(2))
    # the draw of importances moves the order in which the Fisher matrix sums up images
    torch.testing.assert_close(logits(method), logits(plain), rtol=1e-3, atol=1e-4)


def test_a_few_gradients_count_and_the_same_for_a_while():
    method = SparClEwc(small_resnet(), gradient_sparse=0.9)
    name = method.names[0]
    method.open[name][:2] = False
    steps, weight = method.round_masks(), method.weights[name]
    weight.grad = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
    first = weight.grad.clone()
    method.mask_gradients(steps, measure=True)
    counts = weight.grad != 0
    assert int(counts.sum()) == weight.numel() - int(0.9 * weight.numel()) and not counts[:2].any()
    assert first[2:][counts[2:]].abs().min() >= first[2:][~counts[2:]].abs().max()
    weight.grad = torch.ones_like(weight)
    method.mask_gradients(steps, measure=False)
    assert torch.equal(weight.grad != 0, counts)


def test_images_that_are_forgotten_most_seldom_go_first():
    seen, rows = Forgetting(4, torch.device("cpu")), torch.arange(4)
    for right in (
        [1, 1, 0, 0],
        [0, 1, 0, 1],
        [1, 1, 0, 0],
        [0, 1, 0, 0],
    ):  # 0: twice, 1: never, 2: never right, 3: once
        seen.note(rows, torch.tensor(right, dtype=torch.bool))
    assert seen.events.tolist() == [2, 0, 0, 1]
    assert seen.by_forgetting().tolist() == [1, 3, 0, 2]


def test_the_largest_entries_are_as_many_as_asked():
    values = torch.tensor([[1.0, 3.0], [3.0, 2.0]])
    assert largest(values, 1).tolist() == [[False, True], [False, False]]
    assert largest(values, 3).tolist() == [[False, True], [True, True]]


@pytest.mark.parametrize("override", ["sparcl_ewc method.sparsity=1", "sparcl_ewc method.rounds=0"])
def test_options_out_of_range_are_refused(override):
    method, option = override.split()
    with pytest.raises(ConfigError, match=option.split("=")[0]):
        load_config("digits", [f"method={method}", option])
