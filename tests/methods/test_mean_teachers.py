"""A moving average that teaches, gates of tasks, and the methods that are made of them."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pearl.data.batches import Batch
from pearl.errors import ConfigError
from pearl.methods.common.average import Average
from pearl.methods.common.memory import Shown
from pearl.methods.rehearsal.agile import Agile
from pearl.methods.rehearsal.gates import repulsion
from pearl.methods.rehearsal.mean_teacher import MeanTeacher
from pearl.methods.rehearsal.tamil import Tamil, of
from pearl.nn.resnet import resnet18
from pearl.nn.task_modules import Grown
from pearl.settings.parts import METHODS
from pearl.testing.tiny import CLASSES, SIZE, config, logits, make_task, reload
from pearl.testing.tiny import learn as learn_whole
from pearl.training.engine import Engine


def net():
    torch.manual_seed(1)
    return resnet18(SIZE, width=4)


def learn(method, tasks):
    """Two steps a phase."""
    learn_whole(method, tasks, Engine(config(train={"epochs": 1, "batch_size": 12}), device="cpu"))


def some(count=6, first=0, classes=2 * CLASSES):
    x = torch.randn(count, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(first + 3))
    return Batch(x, first + torch.arange(count) % (classes - first), torch.arange(count))


def remembered(seed):
    batch = some(5, 0)
    x = batch.x + 0.1 * seed
    return Shown(x, batch.y, batch.y // CLASSES, None)


def showing(method, *shown, monkeypatch):
    """The method after two tasks, in evaluation mode, with a memory that shows these, one after the other."""
    learn(method, range(2))
    left = list(shown)
    monkeypatch.setattr(method, "shown", lambda task: left.pop(0))
    return method.eval()


# ----------------------------------------------------------------------------------------------------------- teacher


def test_statistics_of_its_own_come_from_what_it_was_asked():
    network, average = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), Average("own")
    average.update(network, 0.9)
    twin = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    twin.load_state_dict(network.state_dict())
    for _ in range(3):
        with torch.no_grad():
            network[0].weight.add_(1.0)
            twin[0].weight.copy_(0.5 * twin[0].weight + 0.5 * network[0].weight)
        network(torch.randn(8, 3))  # which changes the network's statistics, and not the average's
        average.update(network, 0.5)
        x = torch.randn(8, 3)
        torch.testing.assert_close(average(network, x), twin(x).detach())
    x, statistics = torch.randn(4, 3), network[1].running_mean.clone()
    for one in (network, twin):
        one.eval()
    torch.testing.assert_close(average(network, x), twin(x).detach())
    assert torch.equal(network[1].running_mean, statistics) and average.tensors["1.num_batches_tracked"] == 3


def test_an_average_answers_questions_to_parts():
    parts, average = nn.ModuleDict({"a": nn.Linear(2, 3), "b": nn.Linear(3, 1)}), Average()
    average.update(parts, 0.0)
    x = torch.randn(4, 2)
    before = parts["b"](parts["a"](x)).detach()
    with torch.no_grad():
        parts["a"].weight.zero_()
    assert torch.equal(average.evaluated(parts, lambda own: own["b"](own["a"](x))), before)


def test_a_mean_teacher_begins_with_a_plain_mean():
    """With the decay 1 - 1 / (step + 1) at every step it is the mean of the start and all steps."""
    network, teacher = nn.Linear(1, 1), MeanTeacher(1.0, 0.999, 1.3, "own")
    teacher.update(network, 1.0)
    values = [network.weight.item()]
    for step in range(6):
        with torch.no_grad():
            network.weight.fill_(float(step))
        values.append(float(step))
        teacher.follow(network, 1e6)
        assert teacher.tensors["weight"].item() == pytest.approx(np.mean(values), abs=1e-5)


def test_a_mean_teacher_follows_as_often_as_asked_and_goes_on_after_a_restart():
    network, teacher = nn.Linear(1, 1), MeanTeacher(0.25, 0.999, 1.3, "own")
    teacher.update(network, 1.0)
    followed = []
    teacher.update = lambda network, decay: followed.append(decay)
    torch.manual_seed(0)
    for _ in range(800):
        teacher.follow(network, 1e6)
    assert len(followed) == pytest.approx(200, abs=40) and max(followed) == pytest.approx(1 - 1 / 801, abs=1e-3)
    fresh = MeanTeacher(0.25, 0.999, 1.3, "own")
    fresh.load_state_dict(teacher.state_dict(), strict=True)
    assert fresh.steps == 800


@pytest.mark.parametrize(("chance", "planned"), [(0.05, 15650), (0.1, 15650), (0.1, 3950), (0.05, 450), (0.1, 1)])
def test_an_average_is_no_longer_than_its_tasks(chance, planned):
    now, decay = MeanTeacher(chance, 0.999, 1.3, "own").pace(planned)
    if 1 / (chance * 0.001) <= 1.3 * planned:
        assert (now, decay) == (chance, 0.999), "the authors' settings at their length"
    else:
        assert now * (1 - decay) == pytest.approx(1 / (1.3 * planned))
        assert now == 1.0 or decay == 0.999, "more often first"


def test_modules_grow_from_a_file():
    modules = Grown(lambda: nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1)))
    for _ in range(11):  # ten and more: names are not compared by their beginnings
        modules.grow()
    fresh = Grown(modules.make)
    fresh.load_state_dict(modules.state_dict(), strict=True)
    assert len(fresh) == 11 and torch.equal(fresh[10][2].weight, modules[10][2].weight)


# ------------------------------------------------------------------------------------------------------------- gates


def test_gates_repel_by_the_distance_of_their_softmaxes():
    gates = [torch.rand(4, 3, generator=torch.Generator().manual_seed(s)).requires_grad_(True) for s in range(3)]
    own, *others = gates
    p = [np.exp(g.detach().numpy()) / np.exp(g.detach().numpy()).sum(1, keepdims=True) for g in gates]
    expected = -sum(np.abs(p[0] - q).sum(1).mean() for q in p[1:])
    loss = repulsion(own, others)
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    loss.backward()
    assert own.grad is not None and all(other.grad is None for other in others)
    assert repulsion(own, [own]).item() == 0 and repulsion(own, []) == 0


# ------------------------------------------------------------------------------------------------------------- TAMiL


def test_tamil_takes_the_gate_that_is_nearest_to_an_images_features():
    method = Tamil(net(), buffer_size=20)
    learn(method, range(2))
    method.eval()
    x = some().x
    with torch.no_grad():
        h = method.backbone(x)
        for gate, constant in zip(method.gates, (0.9, 0.1), strict=True):  # the same for every image
            gate[2].weight.zero_()
            gate[2].bias.fill_(math.log(constant / (1 - constant)))
        away = [((c - h) ** 2).mean(1) for c in (0.9, 0.1)]
        chosen = torch.where(away[0] <= away[1], 0.9, 0.1)[:, None]
        torch.testing.assert_close(method(x), method.heads(h * chosen))
        torch.testing.assert_close(method(x, 1), method(x)[:, 2:]), "the task's identity chooses no gate"


def test_tamils_loss_is_the_sum_of_its_parts(monkeypatch):
    first, second, batch = remembered(0), remembered(1), some(6, first=2)
    method = showing(
        Tamil(net(), reg_weight=0.3, beta=0.7, pairwise_weight=0.2), first, second, monkeypatch=monkeypatch
    )
    with torch.no_grad():
        loss = method.loss(make_task(1), batch).item()
        h = method.backbone(batch.x)
        gates = [gate(h) for gate in method.gates]
        expected = F.cross_entropy(method.heads(h * gates[1]), batch.y)
        expected += 0.2 * repulsion(gates[1], [gates[0]])
        told = method.teacher.evaluated(  # the teacher uses the gates of each image's task
            method,
            lambda own: torch.cat(
                [
                    own.heads((h := own.backbone(x[None])) * own.gates[t](h))
                    for x, t in zip(first.x, first.tasks.tolist(), strict=True)
                ]
            ),
        )
        expected += 0.3 * (method(first.x) - told).square().mean()
        expected += 0.7 * F.cross_entropy(method(second.x), second.y)
    assert loss == pytest.approx(expected.item(), rel=1e-4)


def test_with_one_task_tamil_is_er_with_gated_features(monkeypatch):
    method = Tamil(net(), reg_weight=0.0, beta=1.0, buffer_size=20)
    learn(method, range(1))
    shown, batch = remembered(0), some(6, classes=2)
    monkeypatch.setattr(method, "shown", lambda task: shown._replace(y=shown.y % 2))
    method.eval()
    gated = lambda x: method.heads((h := method.backbone(x)) * method.gates[0](h))  # noqa: E731
    expected = F.cross_entropy(gated(batch.x), batch.y) + F.cross_entropy(gated(shown.x), shown.y % 2)
    assert method.loss(make_task(0), batch).item() == pytest.approx(expected.item(), rel=1e-5)


def test_tamils_gates_have_the_authors_size():
    method = Tamil(resnet18(32, width=64))
    assert sum(p.numel() for p in method.gates.grow().parameters()) == 66_112


# ------------------------------------------------------------------------------------------------------------- AGILE


def test_agiles_sizes_are_the_authors():
    method = Agile(resnet18(32, width=64))
    both = (*method.encoder.parameters(), *method.decoder.parameters())
    assert sum(p.numel() for p in both) == 262_912
    learnt = Agile(net(), code_dim=6, buffer_size=4)
    learn(learnt, range(2))
    parts = [learnt.backbone, learnt.heads, learnt.encoder, learnt.decoder]
    assert learnt.size() == sum(p.numel() for part in parts for p in part.parameters()) + 2 * 6
    assert learnt.tasks.sizes() == [2, 1]  # one more than there are
    learn(six := Agile(net(), code_dim=6, buffer_size=4, tasks=6), range(2))
    assert six.tasks.sizes() == [6] and six.size() == learnt.size()
    learn(two := Agile(net(), code_dim=6, buffer_size=4, tasks=2), range(3))
    assert two.tasks.sizes() == [2, 1]


def test_agiles_first_vector_learns_to_be_told_from_those_to_come():
    def losses(**options):
        torch.manual_seed(0)
        method = Agile(net(), code_dim=6, reg_weight=0, pairwise_weight=0, buffer_size=4, **options)
        actual, loss = [], method.task_loss
        method.task_loss = lambda codes, tasks: actual.append(loss(codes, tasks)) or actual[-1]
        learn(method, range(1))
        return [each.item() for each in actual]

    assert min(losses()) > 0 and max(losses(tasks=1)) == 0


def test_agile_keeps_what_belongs_to_earlier_tasks():
    for biases in (False, True):
        method = Agile(net(), code_dim=6, buffer_size=20, old_biases=biases)
        learn(method, range(1))
        head, vector = method.heads[0], method.vectors["0"]
        before = [tensor.detach().clone() for tensor in (head.weight, vector, head.bias)]
        method = reload(method, lambda b=biases: Agile(net(), code_dim=6, buffer_size=20, old_biases=b))
        learn(method, range(1, 2))
        now = (method.heads[0].weight, method.vectors["0"], method.heads[0].bias)
        assert [torch.equal(a, b) for a, b in zip(now, before, strict=True)] == [True, True, not biases]


def test_agile_reads_each_tasks_logits_through_its_own_gate():
    method = Agile(net(), code_dim=6, buffer_size=20)
    learn(method, range(3))
    first = logits(method)[:, :4]
    with torch.no_grad():
        method.vectors["2"].add_(1.0)
        method.heads[2].weight.add_(1.0)
        assert torch.equal(logits(method)[:, :4], first), "what came later is not asked"
        for t in range(3):
            method.vectors[f"{t}"].fill_(1.0)
        h = method.backbone(some().x)
        gates = method.coded(h)[1]
        assert torch.equal(gates[:, 0], gates[:, 2]) and repulsion(gates[:, 2], [gates[:, 0]]) == 0
        hidden = torch.sigmoid(h @ method.encoder[0].weight.T + method.encoder[0].bias)
        gate = torch.sigmoid(hidden @ method.decoder[0].weight.T + method.decoder[0].bias)
        torch.testing.assert_close(gates[:, 1], gate)
        torch.testing.assert_close(method(some().x, 1), method.heads[1](h * gate))


@pytest.mark.parametrize("task_of_memory", [True, False])
def test_agiles_loss_is_the_sum_of_its_parts(task_of_memory, monkeypatch):
    first, second, batch = remembered(0), remembered(1), some(6, first=2)
    options = {"reg_weight": 0.3, "pairwise_weight": 0.2, "task_loss_weight": 0.4, "task_of_memory": task_of_memory}
    method = showing(Agile(net(), code_dim=6, **options), first, second, monkeypatch=monkeypatch)

    def tasks_told(x, tasks):
        codes = method.encoder(method.backbone(x)) * torch.stack([method.vectors[f"{t}"] for t in tasks.tolist()])
        return 0.4 * F.cross_entropy(method.tasks(codes), tasks)

    with torch.no_grad():
        loss = method.loss(make_task(1), batch).item()
        gates = method.coded(method.backbone(batch.x))[1]
        expected = F.cross_entropy(method(batch.x), batch.y) + 0.2 * repulsion(gates[:, 1], [gates[:, 0]])
        expected += tasks_told(batch.x, torch.ones(6, dtype=torch.int64))
        told = method.teacher.evaluated(method, lambda own: own(first.x))
        expected += 0.3 * (method(first.x) - told).square().mean() + F.cross_entropy(method(second.x), second.y)
        if task_of_memory:
            expected += tasks_told(second.x, second.tasks)
    assert loss == pytest.approx(expected.item(), rel=1e-4)


def test_each_image_gets_its_own_tasks():
    values = torch.arange(12.0).view(2, 3, 2)
    assert of(values, torch.tensor([2, 0])).tolist() == [[4, 5], [6, 7]]


# ----------------------------------------------------------------------------------------------------------- options


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": "tamil", "ema_alpha": 1.0},
        {"name": "tamil", "code_dim": 0},
        {"name": "agile", "ema_update_freq": 0.0},
        {"name": "agile", "ema_norms": "batch"},
        {"name": "ocdnet", "bernoulli_probability": 1.1},
        {"name": "co2l", "temp": 0},
        {"name": "co2l", "area": 1.5},
    ],
)
def test_options_have_ranges(wrong):
    key = [*wrong][1]
    with pytest.raises(ConfigError, match=f"method.{key}"):
        METHODS.resolve(wrong, "method")
