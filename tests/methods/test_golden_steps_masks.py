"""Masks of weights, choices of tasks, and counts of forgetting against authors' code; see `test_golden_steps`."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from test_golden import close, numbers
from test_golden_steps import GOLDEN
from torch import nn, optim

from pearl.methods.prompts.identity import TaskCentroids
from pearl.methods.sparse.cpg import Cpg
from pearl.methods.sparse.masks import FREE, Owners, cubic
from pearl.methods.sparse.packnet import PackNet
from pearl.methods.sparse.sparcl import Forgetting
from pearl.nn.task_modules import TaskTensors
from pearl.testing.tiny import make_task, small_resnet


def test_packnet():
    """Their owner 0 is a free weight, and tasks are numbered from 1."""
    golden, weight = GOLDEN["packnet"], numbers(420, 6, 8)
    theirs = (torch.arange(48).view(6, 8) % 5).clamp(max=2)
    owners = Owners({"w": weight})
    owners["w"].copy_(torch.where(theirs == 0, FREE, theirs - 1))
    owners.prune({"w": weight}, 1, 0.4)
    freed = torch.tensor(golden["owners"]) == 0
    assert torch.equal(owners["w"] == FREE, freed) and int(freed.sum() - (theirs == 0).sum()) == golden["freed"]
    assert not weight[freed & (theirs > 0)].any() and weight[~freed].all()


def test_packnets_phases_prune_a_share_of_the_newest_task():
    method = PackNet(small_resnet(), prune=0.4)
    for t in range(2):
        phases = method.learn(make_task(t))
        next(phases)
        before = {name: (method.owners[name] == t).sum() for name in method.owners.names}
        next(phases)
        for name, count in before.items():
            assert (method.owners[name] == t).sum() == count - round(0.4 * int(count))
        assert not [*phases]


def test_cpgs_steps(double):
    """Weights of the task train, and masks of earlier weights; either keeps the other's entries."""
    golden, theirs = GOLDEN["cpg"], torch.arange(30).view(5, 6) % 2
    weight, masks = nn.Parameter(numbers(480, 5, 6)), TaskTensors()
    owners = Owners({"w": weight})
    owners["w"].copy_(theirs)
    mask = masks.add("w", torch.where(theirs == 1, 0.01, 0.01 * numbers(481, 5, 6)))
    method = SimpleNamespace(weights={"w": weight}, owners=owners, live=[masks], heads=[None] * 2, above=0.005)
    hooks = owners.held({"w": weight}, 1)
    optimizers = (
        optim.SGD([weight], lr=0.2, momentum=0.9, nesterov=True, weight_decay=4e-3),
        optim.SGD([mask], lr=0.02),
    )
    losses = []
    for picked in golden["picked"]:
        assert (mask[theirs == 0] > 0.005).tolist() == [bool(entry) for entry in picked]
        used = Cpg.weights_of(method, 1)["w"]
        losses.append(F.cross_entropy(3 * numbers(482, 7, 6) @ used.T, torch.arange(7) % 5))
        for optimizer in optimizers:
            optimizer.zero_grad()
        losses[-1].backward()
        hooks["after_backward"]()
        for optimizer in optimizers:
            optimizer.step()
        hooks["after_step"](None)
    close(torch.stack(losses), golden["losses"])
    close(weight, golden["weight"])
    close(mask, golden["mask"])


def test_cpgs_gradual_pruning():
    golden, weight = GOLDEN["cpg"], numbers(483, 6, 7)
    theirs = torch.arange(42).view(6, 7) % 3
    owners = Owners({"w": weight})
    owners["w"].copy_(torch.where(theirs == 0, FREE, theirs - 1))
    for step, share, free in zip((10, 20, 30, 40), golden["shares"], golden["free"], strict=True):
        assert cubic(step / 40, 0.4, 0.7) == pytest.approx(share, abs=1e-12)
        owners.clear({"w": weight})
        owners.prune_to({"w": weight}, 1, share)
        assert int((owners["w"] == FREE).sum()) == free
    expected = torch.tensor(golden["owners"])
    assert torch.equal(owners["w"], torch.where(expected == 0, FREE, expected - 1).to(owners["w"]))


def test_sprompts():
    centroids = TaskCentroids()
    for t in range(3):
        centroids.tensors.add(f"{t}", 0.7 * numbers(491 + t, 3, 4))
    assert centroids.nearest(numbers(490, 40, 4)).tolist() == GOLDEN["sprompts"]["chosen"]


def test_sparcl():
    """An image that is never correct counts as forgotten most often; ties are in random order."""
    times, seen = GOLDEN["sparcl"]["forgotten"], Forgetting(12, torch.device("cpu"))
    right = numbers(495, 12, 7) > 0.1
    right[3], right[8] = False, True
    for epoch in range(7):
        seen.note(torch.arange(12), right[:, epoch])
    learnt = [image for image in range(12) if image != 3]
    assert [int(seen.events[image]) for image in learnt] == [times[image] for image in learnt]
    order = seen.by_forgetting().tolist()
    assert [times[image] for image in order] == sorted(times) and order[-1] == 3
