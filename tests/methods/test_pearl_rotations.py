"""PEARL with rotated images as classes of their own."""

import math

import numpy as np
import pytest
import test_devices
import torch

from pearl.data.batches import Batch
from pearl.methods.common.rotations import turned_loss
from pearl.methods.pearl import Pearl
from pearl.testing.conformance import checks
from pearl.testing.tiny import config, learn, make_task, small_resnet
from pearl.training.engine import Engine


def make() -> Pearl:
    return Pearl(small_resnet(), rotations=True)


@pytest.mark.parametrize("check", checks(), ids=lambda check: check.__name__)
def test_contract(check):
    check(make)


def test_no_step_waits_for_the_device(monkeypatch):
    monkeypatch.setitem(test_devices.ZOO, "rotations", make)
    few, many = (test_devices.waits("rotations", "crop", steps) for steps in (2, 6))
    assert few and few == many


class Recorded(torch.nn.Module):
    """Features: the four corner pixels of the first channel."""

    def forward(self, x):
        return x[:, 0, ::7, ::7].flatten(1)


def test_the_loss_is_the_cross_entropy_among_four_times_as_many_classes():
    torch.manual_seed(0)
    x, y = torch.randn(3, 3, 8, 8), torch.tensor([7, 5, 6])
    head, others = torch.nn.Linear(4, 3), torch.nn.Linear(4, 9)
    task = make_task(0)
    task.first_class = 5
    actual = turned_loss(Recorded(), head, others, task)(Batch(x, y, torch.arange(3)))
    weight = np.concatenate([head.weight.detach().numpy(), others.weight.detach().numpy()])
    bias = np.concatenate([head.bias.detach().numpy(), others.bias.detach().numpy()])
    losses = []
    for image, label in zip(x.numpy(), y.tolist(), strict=True):
        for turn in range(4):
            logits = weight @ np.rot90(image[0], turn)[::7, ::7].flatten() + bias
            losses.append(np.log(np.exp(logits).sum()) - logits[3 * turn + label - 5])
    assert actual.item() == pytest.approx(np.mean(losses), rel=1e-5)


def phases(method, task):
    """Return the phases of a task, none of them trained."""
    return list(method.learn_own(task))


def test_rotations_are_learnt_in_reference_and_adapt_but_not_in_the_probe():
    torch.manual_seed(0)
    method = Pearl(small_resnet(), rotations=True)
    (reference,) = phases(method, make_task(0))
    probe, adapt = phases(method, make_task(1))
    assert [p.name for p in (reference, probe, adapt)] == ["reference", "probe", "adapt"]
    for phase in (reference, adapt):
        assert isinstance(phase.extra, torch.nn.Linear) and phase.extra.out_features == 6  # of two classes
        trained = {id(p) for p in phase.trained}
        assert {id(p) for p in phase.extra.parameters()} <= trained
        assert {id(p) for p in method.heads[int(phase is adapt)].parameters()} <= trained
        batch = next(make_task(int(phase is adapt)).batches(4, seed=0))
        assert phase.loss(batch).item() > math.log(2) + 0.5  # about log 8
    assert not any(p is q for p in probe.trained for phase in (reference, adapt) for q in phase.extra.parameters())
    assert reference.depends_on[-1] is reference.extra and not adapt.depends_on
    assert method.heads.sizes() == [2, 2]


def test_a_model_keeps_nothing_of_them_and_learns_something_else():
    learnt = {}
    for rotations in (False, True):
        torch.manual_seed(0)
        method = Pearl(small_resnet(), rotations=rotations)
        learn(method, range(2))
        learnt[rotations] = method.state_dict()
    plain, other = learnt[False], learnt[True]
    shared = {name for name in plain if "tensors" not in name}
    assert shared <= other.keys() and {n.split(".")[0] for n in plain} == {n.split(".")[0] for n in other}
    assert all(plain[name].shape == other[name].shape for name in shared)
    assert not torch.equal(plain["backbone.conv1.weight"], other["backbone.conv1.weight"])


def test_a_task_shared_by_runs_is_trained_once(tmp_path):
    """The temporary head is a declared input of the reference phase, so that it can be cached."""
    from pearl.training.phase_cache import PhaseCache

    reused = []
    for _ in range(2):
        torch.manual_seed(0)
        method = Pearl(small_resnet(), rotations=True)
        engine = Engine(config(), device="cpu", phase_cache=PhaseCache(tmp_path))
        engine.learn(method, make_task(0))
        reused.append(engine.reused)
    assert reused == [[], ["reference"]]
