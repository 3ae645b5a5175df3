"""Methods of 2016 to 2024 against three steps that were taken with their authors' code, on inputs made by one formula.

golden_steps.json has the numbers, with repository, file, commit and inputs. None of that code is needed or here. Every
step is of a later task, with a teacher that differs from the network and with terms of sizeable weight.
"""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_golden import close, numbers
from torch import nn, optim

from pearl.data.batches import Batch
from pearl.methods.common.memory import Shown
from pearl.methods.prototypes import il2a as il2a_file
from pearl.methods.prototypes import pass_ as pass_file
from pearl.methods.prototypes.il2a import IL2A
from pearl.methods.prototypes.pass_ import PASS
from pearl.methods.regularization.ewc import OnlineEwc
from pearl.methods.regularization.lwf import Lwf
from pearl.methods.rehearsal.agile import Agile
from pearl.methods.rehearsal.co2l import Co2L
from pearl.methods.rehearsal.er_ace import ErAce
from pearl.methods.rehearsal.tamil import Tamil
from pearl.testing.tiny import make_task

GOLDEN = json.loads(Path(__file__).with_name("golden_steps.json").read_text())
DIM, IMAGES, OWN = 6, torch.arange(5), torch.tensor([2, 3, 3, 2, 3])
NOTHING = torch.zeros(4, dtype=torch.int64)
EARLIER = Shown(torch.arange(5, 9), torch.tensor([1, 0, 1, 2]), torch.tensor([0, 0, 0, 1]), None)
OTHERS = Shown(torch.arange(6, 10), torch.tensor([0, 1, 3, 1]), torch.tensor([0, 0, 1, 0]), None)
CHOSEN = torch.tensor([1, 0, 0, 1, 1])  # classes of prototypes


class Table(nn.Module):
    """Features that are rows of a table: the images are their numbers."""

    dim, pretrained = DIM, False

    def __init__(self, seed, count=10):
        super().__init__()
        self.rows = nn.Parameter(numbers(seed, count, DIM))

    def forward(self, x):
        return self.rows[x]


class Tanh(nn.Module):
    """A network of one layer on images (B, 3, 2, 2)."""

    dim, pretrained = DIM, False

    def __init__(self, seed):
        super().__init__()
        self.weight = nn.Parameter(numbers(seed, DIM, 12))

    def forward(self, x):
        return torch.tanh(0.3 * x.flatten(1) @ self.weight.T)


def filled(module, seed, scale=1.0):
    """Set the parameters of a module by the formula, with seeds that count up."""
    for i, parameter in enumerate(module.parameters()):
        parameter.data = scale * numbers(seed + i, *parameter.shape)


def with_heads(heads, weight, bias, sizes=(2, 2)):
    """Add heads that are rows of one classifier."""
    for size, rows, entries in zip(sizes, weight.split(sizes), bias.split(sizes), strict=True):
        head = heads.grow(size)
        head.weight.data, head.bias.data = rows.clone(), entries.clone()


def joined(heads, kind):
    return torch.cat([getattr(head, kind) for head in heads])


def stepped(loss, parameters, batch, rate, after=lambda: None):
    """Take three steps on one batch; return the losses."""
    optimizer, losses = optim.SGD(parameters, lr=rate, momentum=0.9), []
    for _ in range(3):
        optimizer.zero_grad()
        losses.append(loss(batch))
        losses[-1].backward()
        optimizer.step()
        after()
    return torch.stack(losses).detach()


def holds(golden, table, heads, tolerance=1e-8):
    """Compare features and classifier with the authors' after the last step."""
    close(table.rows, golden["features"], tolerance)
    close(joined(heads, "weight"), golden["weight"], tolerance)
    close(joined(heads, "bias"), golden["bias"], tolerance)


def test_er_ace(monkeypatch, double):
    golden, method = GOLDEN["er_ace"], ErAce(Table(200))
    with_heads(method.heads, numbers(201, 4, DIM), numbers(202, 4))
    monkeypatch.setattr(method.memory, "draw", lambda count, view: EARLIER)
    task = SimpleNamespace(id=1, view=None)
    batch = Batch(IMAGES, OWN, IMAGES)
    losses = stepped(lambda batch: method.loss(task, batch), method.parameters(), batch, 0.1)
    close(losses, golden["losses"])
    holds(golden, method.backbone, method.heads)


def test_er_aces_cosine_head(monkeypatch, double):
    """Their lengths are greater by 1e-5."""
    golden, method = GOLDEN["er_ace"]["cosine"], ErAce(Table(200), head="cosine")
    for rows in numbers(201, 4, DIM).split(2):
        method.heads.grow(2).weight.data = rows.clone()
    monkeypatch.setattr(method.memory, "draw", lambda count, view: EARLIER)
    task, batch = SimpleNamespace(id=1, view=None), Batch(IMAGES, OWN, IMAGES)
    losses = stepped(lambda batch: method.loss(task, batch), method.parameters(), batch, 0.1)
    close(losses, golden["losses"], 1e-3)
    close(method.backbone.rows, golden["features"], 1e-3)
    close(joined(method.heads, "weight"), golden["weight"], 1e-3)


def test_lwf(double):
    """Their distillation is a cross-entropy, which is more by the teacher's entropy and has the same gradients."""
    golden = GOLDEN["lwf"]
    method, before = (Lwf(Table(seed), kd_lambda=golden["lamda"], temperature=golden["T"]) for seed in (200, 203))
    with_heads(method.heads, numbers(201, 4, DIM), numbers(202, 4))
    with_heads(before.heads, numbers(204, 2, DIM), numbers(205, 2), (2,))
    with torch.no_grad():
        p = (before(IMAGES) / golden["T"]).softmax(1)
        entropy = -(p * p.log()).sum(1).mean()
    kept = []

    def loss(batch):
        total = method.loss(make_task(1), before, batch)
        plain = method.loss(make_task(1), None, batch)
        kept.append((total - plain).detach() / golden["lamda"] + entropy)
        return total

    stepped(loss, method.parameters(), Batch(IMAGES, OWN, IMAGES), 0.1)
    close(torch.stack(kept), golden["distillation"])
    holds(golden, method.backbone, method.heads)


class Images:
    """Images by number, one batch each."""

    def __init__(self, shown):
        self.shown = shown

    def __len__(self):
        return len(self.shown.y)

    def batches(self, size, seed):
        for i in range(len(self)):
            yield Batch(self.shown.x[i : i + 1], self.shown.y[i : i + 1], torch.tensor([i]))


def test_ewc(double):
    golden, method = GOLDEN["ewc"], OnlineEwc(Table(200), e_lambda=300.0, gamma=0.5)
    with_heads(method.heads, numbers(201, 4, DIM), numbers(202, 4))
    optimizer, penalties = optim.SGD(method.parameters(), lr=0.05, momentum=0.9), []
    for t, shown in enumerate((EARLIER, Shown(IMAGES, OWN, IMAGES, None), OTHERS)):
        for _ in range(3):
            optimizer.zero_grad()
            penalties.append(method.penalty().detach())
            method.loss(Batch(shown.x, shown.y, shown.x)).backward()
            optimizer.step()
        method.anchor.move(dict(method.named_parameters()), method.fisher(Images(shown)), method.gamma)
        importances = {name: method.anchor.importances[name] for name, _ in method.named_parameters()}
        parts = [importances["backbone.rows"]]
        parts += [importances[f"heads.blocks.{head}.{kind}"] for kind in ("weight", "bias") for head in range(2)]
        close(torch.cat([part.flatten() for part in parts]), golden["fishers"][t])
    close(torch.stack(penalties), golden["penalties"])
    assert min(golden["penalties"][4:6]) > 0.1
    holds(golden, method.backbone, method.heads)


def test_co2l(double):
    """Two views of each image; images of classes 0 and 1 are from the memory."""
    golden = GOLDEN["co2l"]
    method = Co2L(Table(206), temp=0.5, current_temp=0.2, past_temp=0.05, distill_power=3.0)
    batch = Batch(torch.arange(10), torch.tensor([2, 3, 1, 2, 0]), IMAGES)
    losses = stepped(
        lambda batch: method.loss(make_task(1), method.backbone, Table(207), batch), [method.backbone.rows], batch, 0.5
    )
    close(losses, golden["losses"], 1e-7)
    close(method.backbone.rows, golden["embeddings"], 1e-7)


def test_pass(monkeypatch, double):
    """Their classes of rotated images are in turn those of one class; here all classes of one rotation."""
    golden = GOLDEN["pass"]
    method = PASS(Tanh(212), temp=0.5, protoAug_weight=4.0, kd_weight=2.0)
    for turn, heads in enumerate((method.heads, *method.turned_heads)):
        with_heads(heads, numbers(210, 4, 4, DIM)[turn], numbers(211, 4, 4)[turn])
    method.statistics.grow(2, torch.device("cpu"))
    method.statistics.update(numbers(214, 2, DIM), torch.arange(2))
    method.radius.fill_(0.7)
    monkeypatch.setattr(pass_file, "old_classes", lambda like, known: CHOSEN)
    monkeypatch.setattr(torch, "randn", lambda *shape, **kwargs: numbers(215, *shape))
    batch = Batch(numbers(216, 5, 3, 2, 2), OWN, IMAGES)
    losses = stepped(lambda batch: method.loss(Tanh(213), batch), method.parameters(), batch, 0.02)
    close(losses, golden["losses"])
    close(method.backbone.weight, golden["network"])
    every = (method.heads, *method.turned_heads)
    close(torch.stack([joined(heads, "weight") for heads in every]), golden["weight"])
    close(torch.stack([joined(heads, "bias") for heads in every]), golden["bias"])


def test_passes_radius(monkeypatch, double):
    """The square root of the mean variance of a class's features."""
    method = PASS(Tanh(212))
    labels = torch.tensor([0, 1, 0, 1, 1, 0, 1, 1, 0, 0, 1, 1])
    task = SimpleNamespace(id=0, classes=("a", "b"), first_class=0, labels=labels)
    monkeypatch.setattr(method, "observe", lambda task: numbers(217, 12, DIM))
    assert len([*method.learn(task)]) == 1
    close(method.radius, GOLDEN["pass"]["radius"], 1e-6)


def test_il2a(monkeypatch, double):
    golden, roots = GOLDEN["il2a"], numbers(220, 2, DIM, DIM)
    method = IL2A(Tanh(212), temp=0.5, seman_weight=4.0, kd_weight=2.0, ratio=2.5, mix_times=4)
    weight, bias = numbers(218, 8, DIM), numbers(219, 8)
    with_heads(method.heads, weight[:5], bias[:5], (2, 3))
    pairs = method.heads.block(3)
    pairs.weight.data, pairs.bias.data = weight[5:].clone(), bias[5:].clone()
    method.statistics.grow(2, torch.device("cpu"))
    method.statistics.update(numbers(214, 2, DIM), torch.arange(2))
    orders = iter(golden["permutations"] * 3)
    monkeypatch.setattr(torch, "randperm", lambda count, **kwargs: torch.tensor(next(orders)))
    beta = SimpleNamespace(sample=lambda shape: torch.tensor((golden["shares"] * 9)[: shape[0]]))
    monkeypatch.setattr(torch.distributions, "Beta", lambda a, b: beta)
    monkeypatch.setattr(il2a_file, "old_classes", lambda like, known: CHOSEN)
    task = SimpleNamespace(id=1, classes=("c", "d", "e"), first_class=2)
    batch = Batch(numbers(216, 5, 3, 2, 2), torch.tensor([2, 3, 4, 2, 3]), IMAGES)
    losses = stepped(
        lambda batch: method.loss(task, Tanh(213), pairs, roots @ roots.mT, batch),
        [*method.parameters(), *pairs.parameters()],
        batch,
        0.01,
    )
    close(losses, golden["losses"])
    close(method.backbone.weight, golden["network"])
    close(torch.cat([joined(method.heads, "weight"), pairs.weight]), golden["weight"])
    close(torch.cat([joined(method.heads, "bias"), pairs.bias]), golden["bias"])


TEACHER = {"reg_weight": 2.0, "pairwise_weight": 1.5, "ema_update_freq": 1.0, "ema_alpha": 0.7, "ema_tasks": None}


def taught_steps(monkeypatch, method, teacher, golden):
    """Three steps with a teacher that starts elsewhere and follows; the losses and distances are the authors'."""
    method.teacher.update(teacher.network, 1.0)
    draws, distances = [], []

    def shown(task):
        draws.append(EARLIER if len(draws) % 2 == 0 else OTHERS)
        return draws[-1]

    monkeypatch.setattr(method, "shown", shown)

    def loss(batch):
        with torch.no_grad():
            distances.append(2.0 * (method(EARLIER.x) - method.taught(EARLIER)).square().mean())
        return method.loss(make_task(1), batch)

    params = [parameter for parameter in method.parameters() if parameter.requires_grad]
    batch = Batch(IMAGES, OWN, IMAGES)
    losses = stepped(loss, params, batch, 0.1, lambda: method.teacher.follow(method.network, 100))
    close(losses, golden["losses"], 1e-5)  # their distances of gates add 1e-6 to each difference
    close(torch.stack(distances), golden["distillation"], 1e-5)
    close(method.backbone.rows, golden["features"], 1e-5)
    close(method.teacher.tensors["backbone.rows"], golden["teacher"], 1e-5)


def test_tamil(monkeypatch, double):
    golden = GOLDEN["tamil"]

    def made(table, seed):
        method = Tamil(Table(table), code_dim=3, beta=0.6, **TEACHER)
        with_heads(method.heads, numbers(seed, 4, DIM), numbers(seed + 1, 4))
        for t in range(2):
            filled(method.gates.grow(), seed + 2 + 4 * t, 2.0)
        return method

    method = made(200, 230)
    taught_steps(monkeypatch, method, made(203, 240), golden)
    close(joined(method.heads, "weight"), golden["head"], 1e-5)
    close(torch.stack([gate[2].weight for gate in method.gates]), golden["gates"], 1e-5)
    theirs = [method.teacher.tensors[f"gates.{t}.0.weight"] for t in range(2)]
    close(torch.stack(theirs), golden["teachers_gates"], 1e-5)


def test_agile(monkeypatch, double):
    """The first task's vector and weights are frozen, and its biases are not."""
    golden = GOLDEN["agile"]

    def made(table, seed):
        method = Agile(Table(table), code_dim=3, tasks=3, task_loss_weight=1.2, **TEACHER)
        for t in range(2):
            filled(method.heads.grow(2), seed + 2 * t)
            method.vectors.add(f"{t}", 3 * numbers(seed + 8 + t, 3))
        filled(nn.ModuleList([method.encoder, method.decoder]), seed + 4, 2.0)
        filled(method.tasks.grow(3), seed + 10)
        method.vectors["0"].requires_grad_(False)
        method.heads[0].weight.requires_grad_(False)
        return method

    method = made(200, 250)
    taught_steps(monkeypatch, method, made(203, 270), golden)
    close(torch.stack([head.weight for head in method.heads]), golden["heads"], 1e-5)
    close(torch.stack([head.bias for head in method.heads]), golden["biases"], 1e-5)
    close(method.decoder[0].weight, golden["decoder"], 1e-5)
    close(torch.stack([method.vectors[f"{t}"] for t in range(2)]), golden["vectors"], 1e-5)
    close(method.tasks[0].weight, golden["tasks"], 1e-5)
    close(method.teacher.tensors["decoder.0.weight"], golden["teachers_decoder"], 1e-5)


@pytest.mark.parametrize("name", GOLDEN)
def test_numbers_have_a_source(name):
    assert all(GOLDEN[name][key] for key in ("repository", "file", "commit", "about"))
