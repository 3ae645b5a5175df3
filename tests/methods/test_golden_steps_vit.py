"""Methods on frozen networks, and OCD-Net, against steps that were taken with their authors' code; see
`test_golden_steps`.

Networks are tables of features where a formula of a method does not need one.
"""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from test_golden import close, numbers
from test_golden_steps import DIM, EARLIER, GOLDEN, IMAGES, OWN, Table, filled, joined, stepped
from torch import nn, optim

from pearl.data.batches import Batch
from pearl.methods.adapters.ease import Ease
from pearl.methods.adapters.lae import ParallelAdapters
from pearl.methods.adapters.sema import Mixture
from pearl.methods.adapters.ssiat import Ssiat
from pearl.methods.common.average import Average
from pearl.methods.common.gaussians import drift
from pearl.methods.common.scatter import pack
from pearl.methods.common.subspace import Subspaces
from pearl.methods.prompts import cprompt as cprompt_file
from pearl.methods.prompts.convprompt import ConvPrompt
from pearl.methods.prompts.cprompt import CPrompt
from pearl.methods.prompts.hide import HidePrompt, contrast
from pearl.methods.prompts.lgcl import Lgcl
from pearl.methods.prompts.pgp import remember
from pearl.methods.prototypes.loranpac import LoRanPac
from pearl.methods.prototypes.ranpac import RanPac
from pearl.methods.rehearsal import ocdnet as ocdnet_file
from pearl.methods.rehearsal.ocdnet import OcdNet
from pearl.nn.task_modules import CosineHeads
from pearl.testing.tiny import make_task, small_vit


def test_ocdnet(monkeypatch, double):
    """Their heads of two hidden layers are single layers here and there; a turned image is another row."""
    golden = GOLDEN["ocdnet"]
    turns = torch.tensor(golden["turns"])

    def made(table, seed):
        method = OcdNet(Table(table, 20), er_weight=0.5, bernoulli_probability=1.0, ema_alpha=0.999, ema_tasks=None)
        for rows in numbers(seed, 4, DIM).split(2):
            method.heads.grow(2).weight.data = rows.clone()
        method.turns, method.embedding = nn.Linear(DIM, 4), nn.Linear(DIM, 64)
        filled(method.turns, seed + 1)
        filled(method.embedding, seed + 3)
        return method

    method = made(300, 301)
    method.teacher.update(made(310, 311).network, 1.0)
    monkeypatch.setattr(ocdnet_file, "turned_copies", lambda x: (10 + (x + turns) % 10, turns))
    monkeypatch.setattr(method, "shown", lambda task: EARLIER)
    losses = stepped(
        lambda batch: method.loss(make_task(1), batch),
        method.parameters(),
        Batch(IMAGES, OWN, IMAGES),
        0.02,
        lambda: method.teacher.follow(method.network, 100),
    )
    close(losses, golden["losses"])
    close(method.backbone.rows, golden["features"])
    close(joined(method.heads, "weight"), golden["head"])
    close(method.turns.weight, golden["rotations"])
    close(method.embedding.weight.sum(0), golden["embedding"])
    close(method.teacher.tensors["backbone.rows"], golden["teacher"])
    theirs = [method.teacher.tensors[f"heads.blocks.{t}.weight"] for t in range(2)]
    close(torch.cat(theirs), golden["teachers_head"])


def test_cprompt(monkeypatch, double):
    """Prompts multiply and shift features, in place of a network."""
    golden, method = GOLDEN["cprompt"], CPrompt(small_vit(), length=2, blocks=(0, 2), tau=1.5, margin=0.1, alpha=2.0)
    method.heads.dim = method.keys.dim = DIM
    for t in range(2):
        filled(method.heads.grow(2), 321 + 2 * t, 3.0)
        method.keys.grow(2)
        method.prompts.grow(numbers(330 + t, 2, 2, DIM))
    monkeypatch.setattr(method, "read", lambda x, p: numbers(320, 5, DIM)[x] * (1 + p[:, 0].mean(1)) + p[:, 1].mean(1))
    monkeypatch.setattr(method, "query", lambda x: numbers(333, 5, DIM)[x])
    drawn = torch.tensor(golden["drawn"])
    monkeypatch.setattr(cprompt_file.ImageDraws, "below", lambda self, high, step, rows: drawn[rows])
    phase = next(method.learn(make_task(2)))
    phase.done = 0
    with torch.no_grad():
        for t, keys in enumerate(method.keys):
            keys.weight.copy_(numbers(329, 6, DIM)[2 * t : 2 * t + 2])
        method.prompts[2].copy_(numbers(332, 2, 2, DIM))
        filled(method.heads[2], 325, 3.0)
        filled(phase.extra, 327)
    stepped(phase.loss, phase.trained, Batch(IMAGES, OWN + 2, IMAGES), 0.05)
    close(method.prompts[2], golden["prompt"])
    close(method.heads[2].weight, golden["weight"])
    close(method.heads[2].bias, golden["bias"])
    close(method.keys[2].weight, golden["keys"])
    close(phase.extra.weight, golden["auxiliary"])


def test_ssiat(monkeypatch, double):
    golden, table, method = GOLDEN["ssiat"], Table(340, 5), Ssiat(small_vit(), scale=20.0)
    method.heads = CosineHeads(DIM, 20.0)
    method.heads.grow(2)
    monkeypatch.setattr(method, "features", lambda x: table.rows[x])
    monkeypatch.setattr(method, "of_images", lambda task, network: None)
    phase = next(method.learn(make_task(1)))
    head = method.heads[1]
    head.weight.data = numbers(341, 2, DIM)
    losses = stepped(phase.loss, [table.rows, head.weight], Batch(IMAGES, OWN, IMAGES), 0.02)
    close(losses, golden["losses"])
    close(table.rows, golden["features"])
    close(head.weight, golden["head"])
    before = numbers(342, 7, DIM)
    close(drift(before, before + 0.3 * numbers(343, 7, DIM), numbers(344, 3, DIM), 0.8), golden["moves"])


def test_ssiats_alignment(monkeypatch, double):
    """Means are shortened by their task, 0.001 is added to variances, and a batch has 256 of all classes' features."""
    golden, method = GOLDEN["ssiat"], Ssiat(small_vit(), scale=20.0)
    method.heads = CosineHeads(DIM, 20.0)
    monkeypatch.setattr(method, "statistics", type(method.statistics)(DIM))
    least = 0.009 * torch.eye(DIM)
    roots = [numbers(346 + c % 3, DIM, DIM) for c in range(6)]
    for t in range(3):
        method.heads.grow(2).weight.data = numbers(345, 6, DIM)[2 * t : 2 * t + 2]
        method.statistics.grow(2, torch.device("cpu"))
        method.statistics.update(numbers(349, 6, DIM)[2 * t : 2 * t + 2], torch.arange(2))
        rows = [pack(0.05 * root @ root.T + least) for root in roots[2 * t : 2 * t + 2]]
        method.covariances.add(f"{t}", torch.stack(rows))
    monkeypatch.setattr(method, "of_images", lambda task, network: None)
    monkeypatch.setattr(method, "remember", lambda task, features: None)
    (phase,) = method.settle(make_task(2), None, "ssiat_align")
    noise = torch.stack([numbers(350 + c, 256, DIM) for c in range(6)])
    x = (phase.data.means[:, None] + noise @ phase.data.factors.mT).flatten(0, 1)
    optimizer = optim.SGD(method.heads.requires_grad_(True).parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    for rows in (torch.arange(1536) * 7 % 1536).split(256):
        optimizer.zero_grad()
        phase.loss(Batch(x[rows], rows // 256, rows)).backward()
        optimizer.step()
    close(joined(method.heads, "weight"), golden["aligned"])


def test_ranpac(monkeypatch, double):
    """Images are in one order: theirs are not shuffled before the last fifth is held out."""
    golden, method = GOLDEN["ranpac"], RanPac(Table(200), M=8, tuning="none", extractor="given")
    rows = [numbers(361 + t, 30, DIM) + 0.8 * numbers(363, 4, DIM)[torch.arange(30) % 2 + 2 * t] for t in range(2)]
    monkeypatch.setattr(method, "features_of", lambda task: rows[task.id])
    monkeypatch.setattr(method.lift, "draw", lambda: setattr(method.lift, "matrix", numbers(360, DIM, 8)))
    monkeypatch.setattr(torch, "randperm", torch.arange)
    chosen, choose = [], method.chosen
    monkeypatch.setattr(method, "chosen", lambda *given: chosen.append(choose(*given)) or chosen[-1])
    for t in range(2):
        labels = torch.arange(30) % 2 + 2 * t
        task = SimpleNamespace(id=t, classes=("a", "b"), first_class=2 * t, labels=labels)
        assert not [*method.learn(task)]
        close(method.kept["head"].T, golden["heads"][t])
    assert chosen == golden["ridges"]


def test_ease(double):
    golden, method = GOLDEN["ease"], Ease(small_vit(), alpha=0.3)
    method.heads.dim = DIM
    known = numbers(370, 6, 3 * DIM)
    for t in range(3):
        method.adapters.grow()
        method.statistics.grow(2, torch.device("cpu"), (t + 1) * DIM)
        method.statistics.update(known[2 * t : 2 * t + 2, : (t + 1) * DIM], torch.arange(2))
    composed = [torch.cat([method.prototypes(t, s) for s in range(3)], 1) for t in range(3)]
    close(torch.cat(composed), golden["prototypes"])
    features = [*numbers(371, 5, 3 * DIM).split(DIM, dim=1)]
    close(torch.cat([method.score(features, t) for t in range(3)], 1), golden["logits"])


def test_hide(double):
    """Their reg multiplies the contrast; prefixes have heads as separate dimensions."""
    golden, features = GOLDEN["hide"], numbers(380, 5, DIM).requires_grad_(True)
    loss = 0.6 * contrast(torch.cat([numbers(381, 3, DIM), features]))
    loss.backward()
    close(loss, golden["contrast"])
    close(features.grad, golden["gradient"])
    method = HidePrompt(small_vit(), e_prompt_layer_idx=(0, 2), length=4, prompt_momentum=0.3)
    for t in range(3):
        method.e_prompts.grow(numbers(382, 2, 2, 3, 4, 2, 3)[:, :, t].flatten(3))
    close(method.mixed(2), torch.tensor(golden["prefix"]).flatten(3).tolist())


def test_pgps_squared_criterion(double):
    """Their rule, which is an option; a basis is kept in float32."""
    golden, memory = GOLDEN["pgp"], Subspaces()
    for t, step in enumerate(golden["steps"]):
        vectors = numbers(400 + t, 20, 8) * torch.tensor(golden["scales"]).roll(3 * t)
        remember(memory, "layer", vectors.T, step["share"], "squared", SimpleNamespace(id=t), most=50)
        eye = torch.eye(8, dtype=torch.float64)
        assert memory.dimension("layer") == step["columns"]
        close(eye - memory.outside("layer", eye), step["inside"], 1e-6)


def test_loranpac(monkeypatch, double):
    golden = GOLDEN["loranpac"]
    options = {"E": 14, "rank": 7, "truncate_percent": 40.0, "ridge": 0.3, "tuning": "none", "extractor": "given"}
    method = LoRanPac(Table(200), **options)
    monkeypatch.setattr(method, "features_of", lambda task: numbers(411 + task.id, 8, DIM))
    monkeypatch.setattr(method.lift, "draw", lambda: setattr(method.lift, "matrix", numbers(410, DIM, 14)))
    for t, step in enumerate(golden["tasks"]):
        labels = torch.arange(8) % 2 + 2 * t
        task = SimpleNamespace(id=t, classes=("a", "b"), first_class=2 * t, labels=labels)
        assert not [*method.learn(task)]
        close(method.svd.values, step["values"])
        close(method.kept["head"], step["head"])


def test_convprompt(monkeypatch, double):
    golden, method = GOLDEN["convprompt"], ConvPrompt(small_vit(), kernel_size=3, length=4, blocks=1)
    method.parts, method.matcher = 2, nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))
    filled(method.matcher, 430)
    method.shared = nn.Parameter(numbers(437, 2, 2, 6, 5).flatten(0, 1)[None])
    kernels, biases, keys = numbers(435, 3, 2, 2, 3, 3), numbers(436, 3, 2, 2), numbers(434, 3, 2)
    for t, rows in enumerate((slice(0, 2), slice(2, 3))):
        method.kernels.add(f"{t}.weight", kernels[rows].flatten(1, 2)[:, None])
        method.kernels.add(f"{t}.bias", biases[rows].flatten(1)[:, None])
        method.kernels.add(f"{t}.key", keys[rows])
    actual = []
    monkeypatch.setattr(method.backbone, "pool", lambda tokens: tokens)

    def features(network, x, prefixes):
        actual.extend(prefixes[0](x))

    monkeypatch.setattr("pearl.methods.prompts.convprompt.vit.features", features)
    method.features(numbers(439, 4, 8))
    close(torch.stack(actual, 1), golden["prefix"])


def test_sema(double):
    golden, mixture = GOLDEN["sema"], Mixture(DIM, 3, 2)
    for j in range(2):
        mixture.grow(torch.device("cpu"))
        filled(mixture.adapters[j], 440 + 10 * j)
        filled(mixture.descriptors[j], 445 + 10 * j)
        filled(mixture.router[j], 470 + 2 * j)
        mixture.descriptors[j].remember(numbers(460 + j, 9, 4, DIM).mean(1))
    tokens = numbers(474, 5, 4, DIM)
    with torch.no_grad():
        close(mixture(tokens), golden["output"])
        unusual = torch.stack([descriptor.unusual(tokens.mean(1)) for descriptor in mixture.descriptors])
        close(unusual, golden["unusual"])
        close(mixture.unusual(tokens.mean(1)), min(sum(z) / len(z) for z in golden["unusual"]))


def test_lgcl(double):
    """The key of the third task, pulled to its text and queries and pushed off the texts of earlier tasks."""
    golden, method = (
        GOLDEN["lgcl"],
        Lgcl(small_vit(), e_prompt_layer_idx=(2,), text_features="-", task_weight=0.8, class_weight=0.0),
    )
    method.keys.dim = DIM
    texts = F.normalize(numbers(500, 3, DIM), dim=1)
    for t in range(3):
        method.keys.grow().weight.data = numbers(501, 3, DIM)[t : t + 1]
        method.texts.add(f"{t}.task", texts[t])
        method.texts.add(f"{t}.classes", torch.eye(2, DIM, dtype=torch.float64))
    drawn = torch.tensor(golden["drawn"])
    method.draws = SimpleNamespace(below=lambda count, step, rows: drawn[rows])
    query, features, key = numbers(502, 5, DIM), torch.ones(5, DIM), method.keys[2]

    def loss(batch):
        return method.guidance(make_task(2), batch, features, 0) - 0.6 * key(query).mean()

    losses = stepped(loss, [key.weight], Batch(IMAGES, OWN + 2, IMAGES), 0.5)
    close(losses, golden["losses"])
    close(key.weight[0], golden["key"])


def test_lae(double):
    """Its adapter beside attention, with a factor that trains, and the moving average."""
    golden = GOLDEN["lae"]
    module = ParallelAdapters(SimpleNamespace(dim=DIM), (0,), 3)
    adapter, average = module["0"], Average()
    for name, seed in {"down.weight": 510, "down.bias": 511, "up.weight": 512, "up.bias": 513}.items():
        adapter.get_parameter(name).data = numbers(seed, *adapter.get_parameter(name).shape)
    adapter.scale.data = torch.tensor(1.3)
    average.update(module, 0.8)
    x, optimizer, losses = numbers(514, 4, 5, DIM), optim.Adam(module.parameters(), lr=0.05), []
    for _ in range(3):
        losses.append((0.5 * x + adapter(x)).square().mean())
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
        average.update(module, 0.8)
    close(torch.stack(losses), golden["losses"])
    close(adapter.down.weight, golden["down"])
    close(adapter.scale, golden["scale"])
    close(average.tensors["0.down.weight"], golden["averaged"])
