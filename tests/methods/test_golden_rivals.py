"""Methods of 2024 to 2026 against steps that were taken with their authors' code, on inputs made by one formula.

golden_rivals.json has the numbers, with repository, file, commit and inputs. None of that code is needed or here.
"""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from test_golden import close, numbers
from torch import nn, optim

from pearl.data.batches import Batch
from pearl.methods.adapters import rsiat as rsiat_file
from pearl.methods.adapters.e2lora import E2Lora, kept_ranks, turned
from pearl.methods.adapters.rsiat import Rsiat, separation
from pearl.methods.adapters.sdlora import SdLora
from pearl.methods.adapters.slcapp import SlcaPlusPlus
from pearl.methods.adapters.sldc import Sldc, WeaklyNonlinear
from pearl.methods.common.alignment import alignment, symmetric_cross_entropy
from pearl.methods.common.gaussians import linear_map
from pearl.methods.common.teacher import frozen
from pearl.methods.prototypes.apr import Apr, distance, pushed
from pearl.methods.prototypes.closed_form import correlation, mahalanobis, shrink
from pearl.methods.prototypes.efcpp import EfcPlusPlus, elastic_drift, feature_matrix
from pearl.methods.prototypes.klda import Discriminant
from pearl.methods.prototypes.seed import Seed, distributions, divergences, log_density
from pearl.nn.task_modules import CosineHeads
from pearl.testing.tiny import make_task, small_vit

GOLDEN = json.loads(Path(__file__).with_name("golden_rivals.json").read_text())
DIM, IMAGES = 6, torch.arange(5)
OWN = torch.tensor([2, 3, 3, 2, 3])


class Lookup(nn.Module):
    """Features that are rows of tables: those that train, and those before the task."""

    dim, pretrained = DIM, False

    def __init__(self):
        super().__init__()
        self.now, self.before = nn.Parameter(numbers(50, 5, DIM)), numbers(51, 5, DIM)

    def forward(self, x):
        return self.now[x]


def stepped(loss, params, times=3, kind=optim.SGD, **options):
    """Take steps on a batch whose images are the numbers of the rows; give back the losses."""
    optimizer, losses = kind(params, **options), []
    for _ in range(times):
        optimizer.zero_grad()
        losses.append(loss(Batch(IMAGES, OWN, IMAGES)))
        losses[-1].backward()
        optimizer.step()
    return torch.stack(losses).detach()


def with_heads(method, first, second):
    """Heads of two tasks with these weights, without bias."""
    for weight in (first, second):
        head = method.heads.grow(len(weight))
        head.weight.data = weight.clone()
        if head.bias is not None:
            head.bias.data.zero_()
    return head


def test_rsiat(monkeypatch, double):
    golden, table = GOLDEN["rsiat"], Lookup()
    method = Rsiat(small_vit(), output="sigmoid", code=3)
    method.heads = CosineHeads(DIM, 50.0)
    monkeypatch.setattr(method, "features", lambda x: table.now[x])
    monkeypatch.setattr(rsiat_file.vit, "features", lambda net, x, adapters: table.before[x])
    head = with_heads(method, numbers(52, 2, DIM), numbers(53, 2, DIM))
    first = method.heads[0]
    close(method.cosface(first(table.now), OWN - 2), golden["first"]["cosface"])
    phase = type("Phase", (), {"done": 21, "per_epoch": 10})  # epoch 2 of the 4 in which lambda rises
    method.first_loss(first, phase, Batch(IMAGES, OWN - 2, IMAGES)).backward()
    close(0.25 * separation(table.now, OWN, 1.5, 0.4), golden["first"]["separation"])
    close(table.now.grad, golden["first"]["gradient"])

    method.projector = rsiat_file.Projector(DIM, 3, "sigmoid")
    for i, parameter in enumerate(method.projector.parameters()):
        parameter.data = 0.3 * numbers(100 + i, *parameter.shape)
    first.requires_grad_(False)
    means = numbers(54, 2, DIM)
    task = make_task(1)
    params = [table.now, head.weight, *method.projector.parameters()]
    losses = stepped(
        lambda batch: method.loss(task, head, method.adapters, means, batch), params, lr=0.01, momentum=0.9
    )
    close(losses, [sum(terms) for terms in golden["second"]["losses"]])
    close(table.now, golden["second"]["features"])
    close(head.weight, golden["second"]["head"])
    close(torch.stack([p.sum() for p in method.projector.parameters()]), golden["second"]["projector"])


def test_sdlora(double):
    golden, method = GOLDEN["sdlora"], SdLora(small_vit())
    method.targets = method.targets[:2]
    query, value = method.targets
    for t in range(3):
        for part, target in enumerate((query, value)):
            method.factors.add(f"{t}.A.{target.label}", numbers(61 + part + 10 * t, 2, DIM))
            method.factors.add(f"{t}.B.{target.label}", numbers(63 + part + 10 * t, DIM, 2))
        method.magnitudes.add(f"{t}", torch.tensor([0.9, 0.5, 0.7][t]))
    x, plain = numbers(65, 4, DIM), numbers(60, 18, DIM)
    params = [*method.factors.in_order("2."), *method.magnitudes.in_order()]

    def output():
        nothing = torch.zeros(DIM, DIM)
        return x @ (plain + torch.cat([method.update(query), nothing, method.update(value)])).T

    close(output(), golden["output"])
    losses = stepped(
        lambda _: (output() * numbers(66, 4, 18)).sum() + output().square().mean(), params, lr=0.05, momentum=0.9
    )
    close(losses, golden["losses"])
    close(torch.stack(method.magnitudes.in_order()), golden["magnitudes"])
    for kind in "AB":
        close(torch.stack([method.factors[f"2.{kind}.{target.label}"] for target in (query, value)]), golden[kind])


def test_e2lora_ranks_and_energies(double):
    """Of 8 outputs half are kept at most; a task of 12 outputs with as many directions has a share of 9 for three."""
    golden = GOLDEN["e2lora"]
    assert kept_ranks([torch.tensor([8.0, 3, 1, 0.5, 0.1, 0, 0, 0])], [8], 4)[0] == golden["ranks"]["two"][:1]
    energies = [numbers(94 + i, 12).abs().pow(4).sort(descending=True).values for i in range(3)]
    assert kept_ranks(energies, [12] * 3, 9)[0] == golden["ranks"]["three"]
    assert kept_ranks([energy**0.1 for energy in energies], [12] * 3, 9)[0] == golden["ranks"]["tight"]
    x = numbers(97, 9, 4)
    x = x - x.mean(0)
    basis, update = torch.linalg.qr(numbers(98, 8, 8)).Q, numbers(99, 8, 4)
    a, b, actual = turned(update, basis, x.T @ x / 8)  # theirs divides by n - 1
    close(F.pad(actual, (0, 8 - len(actual))), golden["energies"])
    torch.testing.assert_close(b @ a, basis @ update)


def test_e2lora(monkeypatch, double):
    golden, table = GOLDEN["e2lora"]["step"], Lookup()
    method = E2Lora(small_vit())
    method.heads.dim = DIM
    head = with_heads(method, numbers(52, 2, DIM), numbers(53, 2, DIM))
    method.heads[0].requires_grad_(False)
    head.bias.requires_grad_(False)
    method.targets = [type("Target", (), {"parameter": "weight"})]  # 0 before the task, 1 with its update
    monkeypatch.setattr(method, "update", lambda target, tasks: torch.ones(()))
    monkeypatch.setattr(
        "pearl.methods.adapters.e2lora.functional_call",
        lambda net, weights, args: (table.now if weights["weight"] else table.before)[args[0]],
    )
    task = make_task(1)
    stepped(
        lambda batch: method.loss(task, head, {"weight": torch.zeros(())}, batch),
        [table.now, head.weight],
        lr=0.05,
        momentum=0.9,
        weight_decay=5e-4,
    )
    close(table.now, golden["features"])
    close(head.weight, golden["head"])


def test_slcapp(monkeypatch, double):
    golden, table = GOLDEN["slcapp"], Lookup()
    head = nn.Parameter(numbers(53, 2, DIM))
    stepped(
        lambda batch: symmetric_cross_entropy(table.now[batch.x] @ head.T, batch.y - 2, 1.0, 0.1),
        [table.now, head],
        lr=0.05,
        momentum=0.9,
    )
    close(table.now, golden["features"])
    close(head, golden["head"])

    method = SlcaPlusPlus(small_vit(), draws=256)
    method.heads.dim = DIM
    with_heads(method, numbers(52, 2, DIM), numbers(53, 1, DIM))
    for t, head in enumerate(method.heads):
        head.bias.data = numbers(71 + t, len(head.bias))
    factors = torch.stack([(0.04 * (i + 1)) ** 0.5 * torch.eye(DIM) for i in range(3)])
    x = numbers(73, 3, DIM)[:, None] + numbers(70, 256, DIM) @ factors.mT
    x = (x * method.shortened((numbers(74, 256) + 1) / 2 * torch.ones(3, 1))[..., None]).flatten(0, 1)
    order = torch.arange(768) * 7 % 768
    phase = alignment("align", method.heads, None, norm=0.1)
    optimizer = optim.SGD(phase.trained, lr=0.01, momentum=0.9, weight_decay=5e-4)
    for rows in order.split(256):
        optimizer.zero_grad()
        phase.loss(Batch(x[rows], rows // 256, rows)).backward()
        optimizer.step()
    close(torch.cat([head.weight for head in method.heads]), golden["alignment"]["weight"])
    close(torch.cat([head.bias for head in method.heads]), golden["alignment"]["bias"])
    monkeypatch.setattr(method, "features", lambda x: numbers(50, 5, DIM)[x])
    close(method(IMAGES), golden["logits"])


def test_sldc(monkeypatch, double):
    """Their cross-entropy takes the label as 1e-4 where it is 0; that is added here."""
    golden, table = GOLDEN["sldc"], Lookup()
    method = Sldc(small_vit())
    method.heads.dim = DIM
    head = with_heads(method, numbers(52, 2, DIM), numbers(53, 2, DIM))
    monkeypatch.setattr(method, "features", lambda x: table.now[x])
    monkeypatch.setattr("pearl.methods.adapters.sldc.functional_call", lambda net, weights, args: table.before[args[0]])
    task = make_task(1)

    def loss(batch):
        others = -head(table.now[batch.x]).log_softmax(1).gather(1, 3 - batch.y[:, None])
        return method.training_loss(task, head, {}, batch) + 0.5 * 1e-4 * others.mean()

    params = [table.now, head.weight, head.scale]
    losses = stepped(loss, params, kind=optim.AdamW, lr=0.05, weight_decay=3e-5)
    close(losses, [sce + kd + 0.1 * norm for sce, kd, norm in golden["losses"]])
    for actual, theirs in ((table.now, "features"), (head.weight, "head"), (head.scale, "scale")):
        close(actual, golden[theirs])

    before = numbers(55, 20, DIM)
    linear = linear_map(before, before + 0.2 * numbers(56, 20, DIM), ridge=1e-4, unit=True, blend=True)
    root = numbers(57, DIM, DIM)
    close(numbers(58, DIM) @ linear, golden["mean"])
    close(linear.T @ root @ root.T @ linear, golden["covariance"])
    weak = WeaklyNonlinear(DIM)
    for i, parameter in enumerate(weak.parameters()):
        parameter.data = numbers(110 + i, *parameter.shape)
    close(weak(numbers(50, 5, DIM)), golden["nonlinear"])
    close(weak.nonlinearity(), golden["penalty"])


def test_klda(double):
    """Their logits are of the scatter instead of the covariance, and have a part that all classes share."""
    golden, member = GOLDEN["klda"], Discriminant(DIM, 5)
    member.lift.matrix, member.lift.offsets = numbers(120, DIM, 5), numbers(121, 5)
    member.lift.sigma.fill_(0.5)  # so that the matrix is taken as it is
    for c in range(2):
        member.add(numbers(122 + c, 30, DIM), torch.zeros(30, dtype=torch.int64), 1, 1e-13)
    x = numbers(50, 5, DIM)
    close(member.lift(x), golden["random"], 1e-7)
    close(member.statistics.means(), golden["means"], 1e-7)
    close(member.kept["scatter"], golden["scatter"], 1e-6)  # their factor is in float32
    ours, theirs = member(x), torch.tensor(golden["logits"], dtype=torch.float64)
    close(2 / 58 * (ours[:, 0] - ours[:, 1]), (theirs[:, 0] - theirs[:, 1]).tolist(), 1e-6)


def test_efcpp(double):
    golden, table = GOLDEN["efcpp"], Lookup()
    heads = torch.cat([numbers(52, 2, DIM), numbers(53, 2, DIM)])
    matrix = feature_matrix(numbers(130, 8, DIM), heads)
    close(matrix, golden["matrix"])
    method = EfcPlusPlus(table)
    method.heads.dim = DIM
    head = with_heads(method, numbers(52, 2, DIM), numbers(53, 2, DIM))
    method.matrix = matrix
    task, teacher = make_task(1), lambda x: table.before[x]
    params = [table.now, head.weight]
    losses = stepped(
        lambda batch: method.loss(task, head, teacher, batch), params, kind=optim.Adam, lr=0.05, weight_decay=2e-4
    )
    close(losses, [sum(terms) for terms in golden["losses"]])
    close(table.now, golden["features"])
    close(head.weight, golden["head"])
    before = numbers(132, 7, DIM)
    means = numbers(131, 3, DIM)
    close(elastic_drift(before, before + 0.3 * numbers(133, 7, DIM), means, matrix, 0.2), golden["drift"], 1e-6)


def test_seed(monkeypatch, double):
    """Their covariances are those of a mixture of one normal distribution, which adds 1e-8 to variances as well."""
    golden, table = GOLDEN["seed"], Lookup()
    method = Seed(table, experts=2, features=3)
    rows = [
        [numbers(140 + c, 20, 3) * (1 + c / 4) + c / 3 for c in range(4)],
        [numbers(150 + c, 20, 3) for c in (2, 3)],
    ]
    classes = torch.arange(2).repeat_interleave(20)
    for j, first in ((0, 0), (0, 1), (1, 1)):
        pair = rows[j][2 * first - 2 * j :][:2]
        mean, root = distributions(torch.cat(pair)[:, None], classes, 2)
        method.gaussians.add(f"{first}.{j}.mean", mean)
        method.gaussians.add(f"{first}.{j}.root", root)
    for _ in range(2):
        method.bottlenecks.grow()
        method.statistics.grow(2, torch.device("cpu"))
    features = [numbers(160, 5, 3), numbers(161, 5, 3)]
    parts = [
        log_density(features[0], *(method.gaussians[f"{t}.0.{kind}"] for kind in ("mean", "root"))) for t in (0, 1)
    ]
    close(torch.cat(parts, 1), golden["densities"], 1e-5)
    monkeypatch.setattr(method, "read", lambda j, x: features[j])
    close(method(IMAGES).exp(), golden["votes"], 1e-5)
    overlap = [divergences(*(method.gaussians[f"1.{j}.{kind}"] for kind in ("mean", "root"))).mean() for j in range(2)]
    close(torch.stack(overlap), golden["overlap"], 1e-5)

    monkeypatch.setattr(method, "read", lambda j, x: table.now[x])
    head = nn.Linear(DIM, 2, bias=False)
    head.weight.data = numbers(53, 2, DIM)
    teacher = [lambda x: x, lambda x: table.before[x]]
    losses = stepped(
        lambda batch: method.finetuning_loss(make_task(1), 0, head, teacher, batch),
        [table.now, head.weight],
        lr=0.5,
        momentum=0.9,
    )
    close(losses, golden["losses"])
    close(table.now, golden["features"])
    close(head.weight, golden["head"])


class Tanh(nn.Module):
    """A layer on the pixels of an image."""

    dim, pretrained = DIM, False

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(0.3 * numbers(170, DIM, 12))

    def forward(self, x):
        return torch.tanh(x.flatten(1) @ self.weight.T)


def test_apr(double):
    """Their distillation is a cross-entropy, which is ours plus the teacher's entropy."""
    golden = GOLDEN["apr"]
    method = Apr(Tanh(), noise=0.0, steps=3, push=0.5, replay_batch=4)
    with_heads(method, numbers(171, 4, DIM)[:2], numbers(171, 4, DIM)[2:])
    method.heads.scale.data.fill_(2.0)
    teacher = frozen(method)
    del teacher.heads.blocks[1]
    means, images, others = numbers(172, 2, DIM), numbers(173, 5, 3, 2, 2), numbers(174, 4, 3, 2, 2)
    y = torch.tensor([2, 3, 3, 2, 3, 0, 1, 1, 0])
    close(pushed(teacher.backbone, others, means[y[5:]], 3, 0.5).flatten(1), golden["pushed"])
    batch = Batch(torch.cat([images, others]), y, y)
    optimizer, task = optim.SGD(method.parameters(), lr=0.1, momentum=0.9, weight_decay=2e-4), make_task(1)
    with torch.no_grad():
        x = torch.cat([images, pushed(teacher.backbone, others, means[y[5:]], 3, 0.5)])
        p = (teacher.heads(teacher.backbone(x)) / 2).softmax(1)
        entropy = -10 * (p * p.log()).sum(1).mean()
    for terms in golden["losses"]:
        optimizer.zero_grad()
        loss = method.loss(task, teacher, means, 0.0, batch)
        close(loss + entropy, sum(terms))
        loss.backward()
        optimizer.step()
    close(method.backbone.weight, golden["body"])
    close(torch.cat([head.weight for head in method.heads]), golden["head"])
    close(method.heads.scale, golden["scale"])
    root, features = numbers(57, DIM, DIM), numbers(50, 5, DIM)
    precision = torch.linalg.pinv(correlation(shrink(root @ root.T, 24, 24)), hermitian=True)
    mean = F.normalize(numbers(58, DIM)[None])
    close(-mahalanobis(F.normalize(features), mean, precision[None])[:, 0], golden["mahalanobis"], 1e-7)
    close(distance(nn.Identity(), Batch(features, numbers(51, 5, DIM), IMAGES)), golden["distance"])


@pytest.mark.parametrize("name", GOLDEN)
def test_numbers_have_a_source(name):
    assert all(GOLDEN[name][key] for key in ("repository", "file", "commit", "about"))
