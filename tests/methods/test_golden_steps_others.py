"""Eight more methods against steps that were taken with their authors' code; see `test_golden_steps`."""

from types import SimpleNamespace

import pytest
import torch
from test_golden import close, numbers
from test_golden_steps import DIM, EARLIER, GOLDEN, IMAGES, OTHERS, OWN, Table, holds, stepped, with_heads
from torch import nn, optim

from pearl.data.batches import Batch
from pearl.methods.adapters.bottleneck import Bottleneck
from pearl.methods.common.statistics import ClassStatistics
from pearl.methods.prompts.dualprompt import DualPrompt
from pearl.methods.prompts.evoprompt import EvoPrompt
from pearl.methods.prototypes import ssre as ssre_file
from pearl.methods.prototypes.aper import Aper
from pearl.methods.prototypes.fetril import FeTril, pseudo_features
from pearl.methods.prototypes.ssre import SSRE
from pearl.methods.rehearsal.mean_teacher import MeanTeacher
from pearl.methods.rehearsal.trire import TriRe
from pearl.methods.rehearsal.winners import chosen, k_winners
from pearl.methods.sparse import pae as pae_file
from pearl.methods.sparse.masks import FREE, Owners
from pearl.methods.sparse.nispa import Nispa
from pearl.methods.sparse.pae import Pae
from pearl.nn.branches import SideBranches, absorb_norms
from pearl.nn.functional import functional_call
from pearl.nn.task_modules import TaskTensors
from pearl.nn.vit import scale_shift
from pearl.testing.tiny import make_task, small_resnet, small_vit

ENTRIES = torch.arange(60).view(10, DIM)
KEPT, NOW = ENTRIES % 3 == 0, ENTRIES % 5 < 3  # entries that earlier tasks, and the new one, find important


def trire(table, head):
    """TriRE on a table of features, all of which have masks."""
    method = TriRe(small_resnet(), reg_weight=0.7, ema_tasks=None)
    method.backbone, method.heads = Table(table), type(method.heads)(DIM)
    method.halves, method.kept = {"rows": "1"}, TaskTensors(buffers=True)
    method.kept.add("rows", KEPT)
    with_heads(method.heads, numbers(head, 4, DIM), numbers(head + 1, 4))
    return method


@pytest.mark.parametrize("stage", ["retain", "revise"])
def test_trire(stage, monkeypatch, double):
    """New images train entries of their own, remembered ones those of earlier tasks; a teacher follows every step."""
    own, method = GOLDEN["trire"][stage], trire(200, 201)
    method.teacher = MeanTeacher(1.0, 0.9, None, "own")
    method.teacher.steps = 4
    method.teacher.update(trire(203, 204).network, 1.0)
    method.beta = 1.0 if stage == "retain" else 0.6
    shown = iter([EARLIER, OTHERS] * 3)
    monkeypatch.setattr(method, "shown", lambda task: next(shown))
    new = {"rows": ~KEPT if stage == "retain" else NOW & ~KEPT}
    loss = lambda batch: method.loss(make_task(1), new, {"rows": KEPT}, batch)  # noqa: E731
    follow = lambda: method.teacher.follow(method.network, 100)  # noqa: E731
    params = [*method.backbone.parameters(), *method.heads.parameters()]
    close(stepped(loss, params, Batch(IMAGES, OWN, IMAGES), 0.05, follow), own["losses"])
    close(method.backbone.rows, own["features"])
    close(torch.cat([head.weight for head in method.heads]), own["weight"])
    close(method.teacher.tensors["backbone.rows"], own["teacher"])


def test_trires_choice_and_winners(double):
    own = GOLDEN["trire"]
    wins = (numbers(691, 8) * 50 + 50).round()
    mask = chosen(numbers(690, 8, 3, 3, 3).abs(), wins, 0.5, 0.3)
    assert mask.flatten().nonzero()[:, 0].tolist() == own["chosen"]
    close(k_winners(numbers(692, 3, DIM, 2, 2), 0.5), own["won"])


def test_ssre(monkeypatch, double):
    own, method = GOLDEN["ssre"], SSRE(small_resnet())
    table = Table(200)
    method.backbone, method.heads = Table(203), type(method.heads)(DIM)  # without branches: the network before the task
    with_heads(method.heads, numbers(201, 4, DIM), numbers(202, 4))
    method.statistics = ClassStatistics(DIM)
    monkeypatch.setattr(method.statistics, "means", lambda: numbers(530, 2, DIM))
    monkeypatch.setattr(ssre_file, "old_classes", lambda like, known: torch.tensor([1, 0, 0, 1, 1]))
    branches = SimpleNamespace(merged=lambda net: {"rows": table.rows})
    params = [table.rows, *method.heads.parameters()]
    losses = stepped(lambda batch: method.loss(branches, batch), params, Batch(IMAGES, OWN, IMAGES), 0.02)
    close(losses, own["losses"])
    holds(own, table, method.heads)


def test_ssres_branches_and_norms(double):
    own = GOLDEN["ssre"]
    net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)).eval()
    net[0].weight.data = numbers(531, 4, 3, 3, 3)
    branches = SideBranches({"0": net[0]})
    next(branches.parameters()).data = numbers(532, 4, 3, 1, 1)
    close(branches.merged(net)["0.weight"], own["merged"])
    net[1].weight.data, net[1].bias.data = 1 + 0.5 * numbers(533, 4), numbers(534, 4)
    net[1].running_mean, net[1].running_var = numbers(535, 4), 1.5 + numbers(536, 4)
    absorb_norms(net)
    close(net[0].weight, own["kernel"])
    close(net(torch.zeros(1, 3, 3, 3))[0, :, 1, 1], own["shift"])


class Units(nn.Module):
    """Two linear layers of 6 and 5 units that read 3 channels."""

    dim, pretrained = 5, False

    def __init__(self):
        super().__init__()
        self.layer1, self.layer2 = nn.Linear(3, 6), nn.Linear(6, 5)
        self.relu1, self.relu2 = nn.ReLU(), nn.ReLU()

    def forward(self, x):
        return self.relu2(self.layer2(self.relu1(self.layer1(x.mean((2, 3))))))


def test_nispa(double):
    own, net = GOLDEN["nispa"], Units()
    method = Nispa(net, step_size_param=8)
    for i, name in enumerate(("layer1", "layer2")):
        layer = net.get_submodule(name)
        method.open[name].copy_(numbers(720 + i, *layer.weight.shape) > -0.4 if i else torch.ones(6, 3))
        layer.weight.data = numbers(700 + i, *layer.weight.shape) * method.open[name]
        layer.bias.data = 0.5 * numbers(710 + i, len(layer.bias))
    x, units = numbers(730, 20, 3, 1, 1), method.units
    activations = units.activations(net, [x])
    close(activations[units.layers["layer1"].makes], own["activations"][0])
    close(activations[units.layers["layer2"].makes], own["activations"][1])
    for share, theirs in own["tops"].items():
        top = method.candidates(activations, float(share))
        for name, chosen_units in zip(("layer1", "layer2"), theirs, strict=True):
            assert top[units.layers[name].makes].nonzero()[:, 0].tolist() == chosen_units
    close(torch.tensor([method.share(phase) for phase in range(1, 7)]), own["shares"])

    stable = method.stable | method.candidates(activations, 70.0)
    method.grown = lambda there, *_: torch.zeros_like(there)  # their growth draws other random numbers
    method.rewire(stable)
    for name, theirs in zip(("layer1", "layer2"), own["connections"], strict=True):
        assert method.open[name].long().tolist() == theirs

    method.stable.copy_(stable)
    head = method.heads.grow(2)
    closed = ~(numbers(722, 4, 5) > -0.4)[2:]
    head.weight.data, head.bias.data = numbers(702, 4, 5)[2:] * ~closed, 0.5 * numbers(712, 4)[2:]
    method.requires_grad_(True)
    task = make_task(0, per_class=2)
    phase, _ = method.phase("nispa", task, task, head, head_closed=closed)
    optimizer, losses = optim.SGD(phase.params, lr=0.1, momentum=0.9), []
    for _ in range(3):
        optimizer.zero_grad()
        losses.append(phase.loss(Batch(x, torch.arange(20) % 2, torch.arange(20))))
        losses[-1].backward()
        phase.after_backward()
        optimizer.step()
        phase.after_step(Batch(x[:1], torch.zeros(1), torch.zeros(1)))
    close(torch.stack(losses), own["losses"])
    for i, layer in enumerate((net.layer1, net.layer2)):
        close(layer.weight, own["weights"][i])
        close(layer.bias, own["biases"][i])
    close(head.weight, own["weights"][2][2:])
    close(head.bias, own["biases"][2][2:])


def test_pae(double, monkeypatch):
    """Owner 0 is a free weight in their code, and tasks are numbered from 1."""
    own, theirs = GOLDEN["pae"], torch.tensor(GOLDEN["pae"]["start"])
    weight = nn.Parameter(numbers(570, 5, DIM) * (theirs > 0))
    owners = Owners({"w": weight})
    owners["w"].copy_(torch.where(theirs == 0, FREE, theirs - 1))
    x, target = numbers(571, 7, DIM), numbers(572, 7, 5)
    method = SimpleNamespace(weights={"w": weight}, owners=owners, names=("", "pae", "pae_prune"))
    hooks, after = owners.held({"w": weight}, 1), []
    phase = SimpleNamespace(done=0, planned=40, add_after_step=after.append)
    method.phase = lambda *_: phase
    monkeypatch.setattr(pae_file, "RAMP", 1.0)
    Pae.pruning(method, SimpleNamespace(id=1), None, 0.1, 0.6)
    optimizer = optim.SGD([weight], lr=0.1, momentum=0.9, nesterov=True, weight_decay=4e-3)
    losses, freed = [], []
    for step in range(1, 41):
        optimizer.zero_grad()
        loss = (x @ weight.T - target).square().mean()
        loss.backward()
        hooks["after_backward"]()
        optimizer.step()
        hooks["after_step"](None)
        phase.done = step
        after[0](None)
        losses.append(loss)
        if step % 10 == 0:
            freed.append(int((owners["w"] == FREE).sum()))
    close(torch.stack(losses), own["losses"])
    assert freed == own["freed"]
    assert torch.equal(owners["w"] == FREE, torch.tensor(own["owners"]) == 0)
    close(weight, own["weight"])


def test_fetril(double):
    own, method = GOLDEN["fetril"], FeTril(Table(200), extractor="given")
    method.heads.grow(2)
    features = torch.cat([numbers(540 + c, 4, DIM) + 2 * numbers(550 + c % 2, DIM) for c in range(4)])
    labels = torch.arange(4).repeat_interleave(4)
    for first in (0, 8):
        method.statistics.grow(2, torch.device("cpu"))
        method.statistics.update(features[first : first + 8], torch.arange(2).repeat_interleave(4))
    nearest, ways = method.translations(2)
    assert nearest.tolist() == own["nearest"]
    z, y = pseudo_features(features[8:], labels[8:], nearest, ways)
    for c in range(2):
        close(z[8:][y[8:] == c], own["pseudo"][c])
    assert torch.equal(z[:8], features[8:])
    assert y[:8].tolist() == labels[8:].tolist()


def test_aper(double):
    own, method = GOLDEN["aper"], Aper(Table(560), tuning="finetune")
    method.merged, method.statistics = True, ClassStatistics(2 * DIM)
    labels = torch.tensor([0, 1, 1, 0, 1])
    phase = next(method.learn(make_task(0)))
    head = phase.extra  # the classifier of the first task
    head[0].weight.data = numbers(561, 2, DIM)
    losses = stepped(phase.loss, phase.params, Batch(IMAGES, labels, IMAGES), 0.5)
    close(losses, own["losses"])
    close(head.scale, own["scale"])
    close(method.tuned.copy.rows, own["features"])
    with torch.no_grad():
        both = method.extract(torch.arange(10))
        method.statistics.grow(2, torch.device("cpu"))
        method.statistics.update(both[:5], labels)
        close(method.score(both), own["logits"])


def test_apers_added_parts(double):
    own, tokens = GOLDEN["aper"], numbers(566, 4, 5, DIM)
    adapter = Bottleneck(DIM, 3, scale=0.1, dropout=0.1).eval()
    for part, seed in ((adapter.down, 562), (adapter.up, 564)):
        part.weight.data = numbers(seed, *part.weight.shape)
        part.bias.data = numbers(seed + 1, len(part.bias))
    close(adapter(tokens), own["adapted"])

    scale, shift = 1 + 0.5 * numbers(567, DIM), numbers(568, DIM)
    for layer, x, theirs in (
        (nn.Linear(DIM, DIM), tokens, "scaled"),
        (nn.Conv2d(DIM, DIM, 1), numbers(569, 2, DIM, 3, 3), "maps"),
    ):
        layer.weight.data, layer.bias.data = torch.eye(DIM).view(layer.weight.shape), torch.zeros(DIM)
        net = nn.Sequential(layer)  # passes its input on
        close(functional_call(net, scale_shift(net, {"0": scale}, {"0": shift}), (x,)), own[theirs])


def test_evoprompt(double):
    own = GOLDEN["evoprompt"]
    method = EvoPrompt(small_vit(), hidden_dim=4, length=2, alpha=0.4, align="both", num_heads=4)
    reader = torch.stack([numbers(580 + b, 4, DIM) for b in range(2)])
    writer = torch.stack([numbers(590 + b, 2 * DIM, 4) for b in range(2)])
    method.reader, method.writer = nn.Parameter(reader.clone()), nn.Parameter(writer.clone())
    queries = numbers(620, 5, DIM)
    hidden = torch.einsum("bd,lhd->blh", queries, method.reader).relu()
    close(method.made(hidden).unflatten(2, (2, DIM)), own["made"])

    target = numbers(621, 5, 2 * DIM)
    optimizer, losses = optim.Adam([method.reader, method.writer], lr=0.05), []
    for _ in range(3):
        hidden = torch.einsum("bd,lhd->blh", queries, method.reader).relu()
        losses.append((method.made(hidden)[:, 0] - target).square().mean())
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    close(torch.stack(losses), own["losses"])
    close(method.reader[0], own["reader"])
    close(method.writer[0], own["writer"])

    method.reader, method.writer = nn.Parameter(reader.clone()), nn.Parameter(writer.clone())
    method.hidden_use = torch.stack([numbers(660 + b, 4).abs() for b in range(2)])
    method.output_use = torch.stack([numbers(670 + b, 12).abs() for b in range(2)])
    uses = [torch.stack([numbers(seed + b, size).abs() for b in range(2)]) for seed, size in ((640, 4), (650, 12))]
    method.used = lambda task: tuple(uses)
    before = [
        torch.stack([numbers(seed + b, *shape) for b in range(2)]) for seed, shape in ((600, (4, DIM)), (610, (12, 4)))
    ]
    method.fuse(SimpleNamespace(id=1), *before)
    fused = torch.cat([part for b in range(2) for part in (method.reader[b].flatten(), method.writer[b].flatten())])
    close(fused, own["fused"], 1e-5)  # they add 1e-7 to the masses that plans are divided by


def test_evoprompts_composed_head(double):
    own = GOLDEN["evoprompt"]
    method = EvoPrompt(small_vit(), temp=0.05)
    method.parts, method.statistics, method.heads = 3, ClassStatistics(DIM), type(method.heads)(DIM)
    method.heads.grow(3).weight.data = numbers(681, 3, DIM)
    method.statistics.grow(3, torch.device("cpu"))
    method.statistics.update(numbers(680, 3, DIM), torch.arange(3))
    method.statistics.grow(2, torch.device("cpu"))
    method.statistics.update(numbers(682, 6, DIM), torch.tensor([0, 1, 0, 1, 1, 0]))
    close(method.composed(1), own["composed"])


def test_dualprompt(double):
    own, vit = GOLDEN["dualprompt"], small_vit()
    for i, (name, parameter) in enumerate(vit.named_parameters()):
        norm = name.endswith("weight") and parameter.ndim == 1
        parameter.data = 0.3 * numbers(740 + i, *parameter.shape) + float(norm)
    method = DualPrompt(vit, g_prompt_layer_idx=(0,), g_prompt_length=2, e_prompt_layer_idx=(1,), length=3, pull=0.5)
    method.g_prompt.data = numbers(800, 1, 2, 2, 16)
    for t in range(2):
        method.e_prompts.grow(numbers(801 + t, 1, 2, 3, 16))
        method.keys.grow().weight.data = numbers(853 + t, 1, 16)
        head = method.heads.grow(2)
        head.weight.data, head.bias.data = numbers(805 + t, 2, 16), numbers(807 + t, 2)
    key, images, labels = method.keys[1], numbers(809, 3, 3, 8, 8), torch.tensor([2, 3, 2])
    params = [method.g_prompt, method.e_prompts[1], *key.parameters(), *head.parameters()]
    optimizer, losses, cosines = optim.Adam(params, lr=0.03), [], []
    for i in range(3):
        batch = Batch(images[i : i + 1], labels[i : i + 1], torch.zeros(1))
        cosines.append(key(method.query(batch.x)).mean().detach())
        optimizer.zero_grad()
        losses.append(method.loss(make_task(1), batch, i))
        losses[-1].backward()
        optimizer.step()
    close(torch.stack(cosines), own["cosines"])
    close(torch.stack(losses), own["losses"])
    for ours, theirs in ((method.g_prompt, "general"), (method.e_prompts[1], "expert"), (key.weight[0], "key")):
        close(ours, own[theirs], 1e-6)
    close(head.weight, own["weight"], 1e-6)
    close(head.bias, own["bias"], 1e-6)
    close(method.features(images), own["answers"], 1e-6)
