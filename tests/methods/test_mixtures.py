"""Methods with several adapters in a block, or a pool of them, against calculations of their own."""

import copy
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits

from pearl.data.augment import View
from pearl.data.batches import Task
from pearl.data.domains import seen_as
from pearl.errors import ConfigError
from pearl.methods.adapters.ada import Ada, consolidation, leep, transrate
from pearl.methods.adapters.bottleneck import Bottleneck, mixed
from pearl.methods.adapters.dia import Dia, calibrated, foreign
from pearl.methods.adapters.sema import Descriptor, Sema
from pearl.methods.base import own_loss
from pearl.testing.tiny import config, images, make_task
from pearl.training.engine import Engine
from vits import WIDTH, close, drawn, naive, run, small


@torch.no_grad()
def randomised(module, seed=0):
    for i, parameter in enumerate(module.parameters()):
        parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(100 * seed + i)) / 3)
    return module


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"learnable": True, "activation": "gelu"}], ids=str)
def test_adapters_side_by_side_are_one_wider_adapter(options):
    adapters = [randomised(Bottleneck(WIDTH, 3, **options), i) for i in range(4)]
    tokens, weights = drawn(6, 5, WIDTH), drawn(6, 5, 4, seed=1)
    alone = torch.stack([adapter(tokens) for adapter in adapters], 3)
    close(mixed(adapters, tokens, weights), (alone * weights[:, :, None]).sum(3))
    close(mixed(adapters, tokens, weights[:, :1]), (alone * weights[:, :1, None]).sum(3))


# ---------------------------------------------------------------------------------------------------------------- SEMA


def make_sema(**options):
    shape = {"ffn_num": 4, "rd_dim": 6, "adapt_start_layer": 1, "adapt_end_layer": 2}
    return Sema(small(), **(shape | options))


def counts(method):
    return [len(mixture.adapters) for mixture in method.mixtures.values()]


def test_sema_mixes_the_adapters_of_a_block_by_the_mean_of_an_image_s_tokens():
    method = run(make_sema(exp_threshold=-1), range(3))
    assert counts(method) == [3, 3]
    for part in (method.adapters, method.mixtures):
        randomised(part)
    method, x = method.double().eval(), images().double()

    def mixture(own):
        def adapter(tokens):  # of one image
            weights = torch.stack([(row(tokens.mean(0))).squeeze() for row in own.router]).softmax(0)
            return sum(
                weight * (a.up.weight @ (a.down.weight @ tokens.T + a.down.bias[:, None]).relu() + a.up.bias[:, None]).T
                for weight, a in zip(weights, own.adapters, strict=True)
            )

        return adapter

    alone = method.adapters["0"]
    adapters = {0: lambda tokens: alone(tokens), 1: mixture(method.mixture(1)), 2: mixture(method.mixture(2))}
    close(method.features(x), naive(method.backbone, x, {}, adapters), atol=1e-10)
    weights = method.mixture(1).weights(drawn(6, 5, WIDTH).double())
    close(weights.sum(1), torch.ones(6).double())
    assert weights.shape == (6, 3)
    for part in (method.adapters, method.mixtures):
        for name, parameter in part.named_parameters():
            if ".up." in name:
                parameter.data.zero_()
    close(method.features(x), method.backbone(x), atol=1e-10)


def test_one_adapter_has_all_the_weight():
    method = run(make_sema(), range(1)).eval()
    own, tokens = method.mixture(2), drawn(6, 5, WIDTH)
    assert torch.equal(own.weights(tokens), torch.ones(6, 1))
    close(own(tokens), own.adapters[0](tokens))


@torch.no_grad()
def test_a_descriptor_counts_deviations_from_the_errors_it_recorded():
    descriptor, means = randomised(Descriptor(WIDTH, 6)), drawn(40, WIDTH)
    rebuilt = means @ descriptor.encode.weight.T + descriptor.encode.bias
    rebuilt = rebuilt @ descriptor.decode.weight.T + descriptor.decode.bias
    errors = ((rebuilt - means) ** 2).mean(1)
    close(descriptor(means), errors)
    descriptor.remember(means[:2])
    assert not descriptor.unusual(3 * means).any(), "two errors have no deviation to speak of"
    descriptor.remember(means)
    deviation = (((errors - errors.mean()) ** 2).sum() / 39).sqrt()
    expected = (descriptor(3 * means) - errors.mean()).abs() / deviation
    close(descriptor.unusual(3 * means), expected)
    assert 0.5 < descriptor.unusual(means).mean() < 1
    descriptor.record[2] = 0
    assert descriptor.unusual(means).isfinite().all(), "images may be all the same"


@pytest.mark.parametrize("batch", [None, 8])
@pytest.mark.parametrize(("threshold", "expected"), [(-1.0, [2, 2]), (math.inf, [1, 1])])
def test_a_block_of_sema_grows_once_a_task_or_never(batch, threshold, expected):
    assert counts(run(make_sema(exp_threshold=threshold, detect_batch_size=batch), range(2))) == expected


def test_sema_trains_what_it_adds_and_else_the_head_alone():
    method = run(make_sema(exp_threshold=math.inf), range(1))
    assert [phase.name for phase in method.learn(make_task(1))] == ["sema_head"]
    method = run(make_sema(exp_threshold=-1), range(1))
    before = {name: value.clone() for name, value in method.state_dict().items()}
    actual = [(phase.name, len(phase.trained)) for phase in method.learn(make_task(1))]
    # adapter 4, its row of the router 2, the head 2; descriptor 4
    assert actual == [("sema_func", 8), ("sema_rd", 4)] * 2
    method = run(make_sema(exp_threshold=-1), range(2))
    after = method.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert method.size() == sum(p.numel() for p in method.parameters()) - 4 * (2 * WIDTH * 6 + WIDTH + 6)


def test_sema_grows_where_no_descriptor_knows_the_images():
    """By hand: errors of one block are as they were recorded, those of the other far above."""
    method, task = run(make_sema(exp_threshold=2.0), range(1)), make_task(1)
    batches = method.seen(task)
    for block in (1, 2):
        means = torch.cat([own[block] for own in batches])
        (descriptor,) = method.mixture(block).descriptors
        descriptor.remember(means)
        close(method.mixture(block).unusual(means), descriptor.unusual(means).mean())
    assert method.unfamiliar(task, [1, 2]) is None
    (descriptor,) = method.mixture(2).descriptors
    descriptor.record[1] -= 5 * descriptor.record[2]
    assert method.unfamiliar(task, [1, 2]) == 2
    assert method.unfamiliar(task, [1]) is None
    _, knows = method.mixture(2).grow(torch.device("cpu"))
    knows.remember(torch.cat([own[2] for own in batches]))
    assert method.unfamiliar(task, [1, 2]) is None, "one descriptor that knows is enough"


def test_errors_are_recorded_on_images_that_a_descriptor_was_not_trained_on():
    method, task, trained = make_sema(hold_out=0.25), make_task(0), {}
    for phase in method.learn(task):
        trained[phase.name] = (phase.data or task).images.flatten(1)
    assert (len(trained["sema_func"]), len(trained["sema_rd"])) == (24, 18)
    held = [image for image in task.images if not (image.flatten() == trained["sema_rd"]).all(1).any()]
    part = Task(0, "held", task.classes, 0, torch.stack(held).numpy(), np.zeros(6, dtype=int), task.view, task.device)
    for block in (1, 2):
        (descriptor,) = method.mixture(block).descriptors
        errors = descriptor(torch.cat([means[block] for means in method.seen(part)])).double()
        close(descriptor.record.double(), torch.stack([errors.new_tensor(6), errors.mean(), errors.std(correction=1)]))


def digits_task(t, domain, start):
    """100 of scikit-learn's digits 0 to 3, in the look of a domain."""
    pixels, labels = load_digits(return_X_y=True)
    rows = np.flatnonzero(labels < 4)[start : start + 100]
    raw = (pixels[rows].reshape(-1, 8, 8, 1).repeat(3, 3) * 255 / 16).astype(np.uint8)
    view, names = View(config().images, channels_last=False), tuple(f"{t} {c}" for c in range(4))
    return Task(t, domain, names, 4 * t, seen_as(domain, raw, rows), labels[rows] + 4 * t, view, torch.device("cpu"))


def test_sema_grows_for_a_new_domain_and_not_for_new_images_of_a_known_one():
    """At the authors' threshold, 2 deviations."""
    train = {"epochs": 2, "batch_size": 16, "phases": {"sema_rd": {"epochs": 20, "lr": 0.01}}}
    engine, method = Engine(config(train=train), device="cpu"), make_sema(hold_out=0.3)
    grown = []
    for t, (domain, start) in enumerate([("plain", 0), ("plain", 100), ("inverted", 200), ("inverted", 300)]):
        engine.learn(method, digits_task(t, domain, start))
        grown.append(counts(method))
    assert grown == [[1, 1], [1, 1], [2, 2], [2, 2]]


def test_a_batch_that_no_descriptor_knows_is_enough_with_detect_batch_size():
    method, task = run(make_sema(detect_batch_size=4), range(1)), make_task(1)
    batches = method.seen(task)
    assert [len(own[1]) for own in batches] == [4] * 6
    (descriptor,) = method.mixture(1).descriptors
    descriptor.remember(torch.cat([own[1] for own in batches]))
    actual = torch.stack([descriptor.unusual(own[1]).mean() for own in batches])
    method.exp_threshold = float(actual.max() + actual.mean()) / 2
    method.mixture(2).descriptors[0].record[0] = 0  # knows everything
    assert method.unfamiliar(task, [1, 2]) == 1
    method.detect_batch_size = None
    assert method.unfamiliar(task, [1, 2]) is None


def test_sema_names_blocks_that_cannot_grow():
    with pytest.raises(ConfigError, match=r"^method\.adapt_end_layer: 3 is not a block"):
        make_sema(adapt_end_layer=3)
    with pytest.raises(ConfigError, match=r"^method\.adapt_start_layer=2 is after adapt_end_layer=1; "):
        make_sema(adapt_start_layer=2, adapt_end_layer=1)


# ----------------------------------------------------------------------------------------------------------------- DIA


def after_three(**options):
    method = run(Dia(small(), width=3, prototypes=5, **options), range(3))
    randomised(method.adapters)
    return method.double().eval()


@torch.no_grad()
def written_out(method, tasks, x):
    def integration(own):
        def adapter(tokens):  # of one image
            added = torch.zeros_like(tokens)
            for j, token in enumerate(tokens):
                cosines = [F.cosine_similarity(token, own.tasks[t].signature, dim=0) for t in range(tasks)]
                weights = torch.stack(cosines).softmax(0) if tasks > 1 else cosines
                for weight, task in zip(weights, own.tasks, strict=False):
                    added[j] += weight * (task.adapter.up.weight @ (task.adapter.down.weight @ token).relu())
            return added

        return adapter

    return naive(method.backbone, x, {}, {i: integration(own) for i, own in method.adapters.by_block().items()})


@pytest.mark.parametrize("tasks", [1, 2, 3])
def test_dia_mixes_adapters_token_by_token(tasks):
    """Also of the network as it was, which teaches: adapters of later tasks take no part."""
    method, x = after_three(), images(2).double()
    close(method.seen(x, tasks)[0], written_out(method, tasks, x), atol=1e-10)


def test_dia_answers_with_the_adapters_of_all_tasks():
    method, x = after_three(), images(2).double()
    assert torch.equal(method.features(x), method.seen(x, 3)[0])
    for adapter in method.adapters.values():
        weights = adapter.weights(drawn(2, 5, WIDTH).double(), 3)
        close(weights.sum(2), torch.ones(2, 5).double())
        for task in adapter.tasks:
            task.signature.data = adapter.tasks[0].signature.data
        tokens = drawn(2, 5, WIDTH).double()
        close(adapter(tokens, 3), sum(task.adapter(tokens) for task in adapter.tasks) / 3, atol=1e-10)
        one = {
            "cosine": F.cosine_similarity(tokens, adapter.tasks[0].signature, dim=2)[..., None],
            "softmax": torch.ones(2, 5, 1),
        }
        for adapter.single, expected in one.items():
            close(adapter.weights(tokens, 1), expected.double())


def test_dia_keeps_patches_the_more_the_less_they_are_like_the_image():
    features, patches = F.normalize(drawn(3, WIDTH), dim=1), F.normalize(drawn(3, 4, WIDTH, seed=1), dim=2)
    cosines = torch.einsum("bd,bnd->bn", features, patches)
    close(foreign(features, patches), (math.pi - (-cosines).arccos()) / math.pi)  # as it is printed
    signs = torch.stack([features, -features], 1)
    close(foreign(features, signs), torch.tensor([[0.0, 1.0]] * 3), atol=1e-3)
    method, x = after_three(), images(4).double()
    features, patches = method.seen(x, 3)
    before = method.seen(x, 2)[1]
    total = 0.0
    for i in range(4):
        for j in range(before.shape[1]):
            turned = F.normalize(patches[i, j], dim=0) - F.normalize(before[i, j], dim=0)
            angle = F.cosine_similarity(features[i], patches[i, j], dim=0).arccos() / math.pi
            total += angle * turned.norm() / before.shape[:2].numel()
    close(method.moved(x, features, patches, 2), total, atol=1e-10)
    assert method.moved(x, *method.seen(x, 2), 2) == 0


def test_the_loss_of_dia_weighs_both_parts_from_the_second_task_on():
    method, task = run(Dia(small(), width=3, pdl=0.3), range(1)), make_task(1)
    phase = next(method.learn(task))
    randomised(method.adapters)
    batch = next(task.batches(6, 0))
    features, patches = method.seen(batch.x, 2)
    task_loss = F.cross_entropy(method.heads[1](features), batch.y - 2)
    kept = method.moved(batch.x, features, patches, 1)
    assert kept > 0.01
    close(phase.loss(batch), task_loss + 0.3 * kept)
    assert len(phase.trained) == 3 * 3 + 2  # of each block two matrices and a signature


def test_dia_moves_prototypes_by_patches_that_are_nearer_to_them_than_to_their_image():
    means, features, patches = drawn(3, WIDTH), drawn(2, WIDTH, seed=1), drawn(2, 4, WIDTH, seed=2)
    assert torch.equal(calibrated(means, features, patches, 1.0), means)
    actual = calibrated(means, features, patches, 0.7)
    for k in range(3):
        scores = []
        for i in range(2):
            for j in range(4):
                a = max(float(F.cosine_similarity(means[k], patches[i, j], dim=0)), 0)
                b = max(float(F.cosine_similarity(features[i], patches[i, j], dim=0)), 0)
                scores.append(max(0.0, (a - b) / (a + b)) if a + b else 0.0)
        weights = torch.tensor(scores).softmax(0)
        close(actual[k], 0.7 * means[k] + 0.3 * (weights[:, None] * patches.flatten(0, 1)).sum(0), atol=1e-4)


@pytest.mark.parametrize("among", ["own", "all"])
def test_dia_aligns_heads_on_images_and_prototypes_of_all_classes(among):
    method, task = run(Dia(small(), width=3, prototypes=50, align_among=among), range(2)), make_task(2)
    _, align = method.learn(task)
    assert {id(p) for p in align.trained} == {id(p) for p in method.heads.parameters()}
    method.eval()
    batch = next(task.batches(6, 0))
    torch.manual_seed(3)
    actual = align.loss(batch)
    torch.manual_seed(3)
    labels = torch.randint(6, (50,))
    means = method.statistics.means().float()
    seen = method.seen(batch.x, 3)
    prototypes = torch.stack(
        [calibrated(means[k][None], *seen, 0.7)[0] if k < 4 else means[k] for k in labels.tolist()]
    )
    logits = method.heads(seen[0])
    task_loss = {"own": F.cross_entropy(logits[:, 4:], batch.y - 4), "all": F.cross_entropy(logits, batch.y)}[among]
    close(actual, task_loss + F.cross_entropy(method.heads(prototypes), labels))
    close(means[4:], torch.stack([method.of_images(task, method.features)[task.labels == c].mean(0) for c in (4, 5)]))


def coloured_task(t):
    """24 images of two classes, each a pattern of its own under noise."""
    rng, labels = np.random.default_rng(t), np.repeat([0, 1], 12)
    pixels = rng.uniform(60, 195, (2, 8, 8, 3))[labels] + rng.normal(0, 20, (24, 8, 8, 3))
    view = View(config().images, channels_last=False)
    shape = t, f"task{t + 1}", (f"class {2 * t}", f"class {2 * t + 1}"), 2 * t, pixels.clip(0, 255).astype(np.uint8)
    return Task(*shape, labels + 2 * t, view, torch.device("cpu"))


@pytest.mark.parametrize(("among", "newest"), [("own", (0.15, 0.35)), ("all", (0.4, 1.0))])
def test_aligned_heads_of_dia_favour_no_task(among, newest):
    """On features that tell eight classes apart. Images of the newest task alone, compared with all, pull to it."""
    method = Dia(small(), width=3, align_among=among)

    def seen(x, tasks):
        features = 3 * F.normalize(x.flatten(1) @ drawn(192, WIDTH), dim=1)
        patches = (x.mean((2, 3)) @ drawn(3, 4 * WIDTH, seed=2)).unflatten(1, (4, WIDTH))
        return features, features[:, None] + 0.5 * patches

    method.seen = seen
    for t in range(4):
        own = coloured_task(t)
        for i, phase in enumerate(method.learn(own)):
            first = own_loss(method.features, method.heads[t], own)
            optimizer = torch.optim.Adam(method.heads.parameters(), lr=0.05)
            torch.manual_seed(10 * t + i)
            for epoch in range(10):
                for batch in own.batches(8, epoch):
                    optimizer.zero_grad()
                    (phase.loss if i else first)(batch).backward()
                    optimizer.step()
    with torch.no_grad():
        chosen = torch.cat([method(next(coloured_task(t).in_order(24)).x).argmax(1) // 2 for t in range(4)])
    assert newest[0] < (chosen == 3).float().mean() < newest[1]


# ----------------------------------------------------------------------------------------------------------------- ADA


def make_ada(**options):
    return Ada(small(), **({"width": 3, "pool": 2} | options))


def test_leep_is_the_likelihood_of_labels_by_way_of_old_classes():
    labels = torch.tensor([3, 3, 4, 4, 4, 5])
    assert leep(F.one_hot(labels).float(), labels) == 0
    entropy = -sum(share * math.log(share) for share in (2 / 6, 3 / 6, 1 / 6))
    close(leep(torch.tensor([[0.3, 0.7]]).repeat(6, 1), labels).float(), torch.tensor(-entropy))
    answers = drawn(6, 4).softmax(1)
    total = 0.0
    for i in range(6):
        likelihood = 0.0
        for z in range(4):
            joint = sum(float(answers[k, z]) for k in range(6) if labels[k] == labels[i])
            likelihood += joint / float(answers[:, z].sum()) * float(answers[i, z])
        total += math.log(likelihood) / 6
    close(leep(answers, labels), torch.tensor(total).double(), atol=1e-6)
    assert leep(torch.tensor([[1.0, 0.0]]).repeat(6, 1), labels).isfinite(), "a class that no image is taken for"


def test_transrate_is_what_classes_explain_of_the_coding_rate():
    features, labels = drawn(40, 3), (torch.arange(40) % 4 == 0).long()
    apart = features * F.one_hot(labels, 3)  # each class along an axis of its own

    def coding(z):
        return sum(math.log1p(float(s) ** 2 / (len(z) * 1e-4)) for s in torch.linalg.svdvals(z)) / 2

    for z in (features, apart, drawn(40, 60)):
        centred = z.double() - z.double().mean(0)
        expected = coding(centred) - 0.75 * coding(centred[labels == 0]) - 0.25 * coding(centred[labels == 1])
        close(transrate(z, labels).float(), torch.tensor(expected))
    assert transrate(apart, labels) > 1 > transrate(features, labels)
    twice = torch.cat([features, features])
    assert abs(transrate(twice, torch.arange(80) // 40)) < 1e-9


def test_consolidation_holds_logits_to_those_of_teachers_that_are_centred():
    teachers = [drawn(5, 3), drawn(5, 2, seed=1)]
    logits = torch.cat([said - said.mean(1, keepdim=True) for said in teachers], 1)
    assert consolidation(logits, teachers) == 0
    other = drawn(5, 5, seed=2)
    close(consolidation(other, teachers), ((other - logits) ** 2).sum() / 25)
    close(consolidation(other, [teachers[0] + 3, teachers[1] - 2]), consolidation(other, teachers))


def test_nothing_of_ada_changes_while_the_pool_has_room():
    method = run(make_ada(pool=3), range(2))
    before = {name: value.clone() for name, value in method.state_dict().items()}
    assert [phase.name for phase in copy.deepcopy(method).learn(make_task(2))] == ["ada"]
    run(method, [2])
    assert all(torch.equal(method.state_dict()[name], value) for name, value in before.items())
    assert [method.facts(t)["adapter"] for t in range(3)] == [0, 1, 2]


@pytest.mark.parametrize("score", ["leep", "transrate"])
def test_a_full_pool_of_ada_makes_one_of_the_new_adapter_and_the_most_suitable(score):
    method, task = run(make_ada(score=score), range(2)), make_task(2)
    learning = method.learn(task)
    first = next(learning)
    assert first.extra is not None
    assert len(method.pool) == 2
    randomised(first.extra)
    randomised(method.heads)
    for slot in range(2):
        randomised(method.pool[slot], slot)
    old = copy.deepcopy(method.pool)
    second = next(learning)
    method.eval()
    features = [method.of_images(task, lambda x, k=k: method.read(x, old[k])) for k in range(2)]
    if score == "leep":
        scores = [leep(method.heads[k](features[k]).softmax(1), task.labels) for k in range(2)]
    else:
        scores = [transrate(own, task.labels) for own in features]
    chosen = int(scores[1] > scores[0])
    assert abs(scores[1] - scores[0]) > 1e-4
    assert method.tasks_of(chosen) == [chosen, 2]
    assert {id(p) for p in second.trained} == {id(p) for p in method.pool[chosen].parameters()}
    batch = next(task.batches(6, 0))
    randomised(method.pool[chosen], 7)  # it moves, its teacher does not
    said = [method.heads[chosen](method.read(batch.x, old[chosen])), method.heads[2](method.read(batch.x, first.extra))]
    student = method.read(batch.x, method.pool[chosen])
    close(
        second.loss(batch),
        consolidation(torch.cat([method.heads[t](student) for t in (chosen, 2)], 1), said),
        rtol=1e-3,
    )


def test_ada_asks_each_adapter_once_for_all_its_tasks(monkeypatch):
    method, x = run(make_ada(), range(3)).double().eval(), images().double()
    passes = []
    monkeypatch.setattr(method, "read", lambda x, adapters: passes.append(1) or Ada.read(method, x, adapters))
    logits = method(x)
    assert len(passes) == method.forward_passes() == 2
    for t in range(3):
        adapters = method.pool.by_block(method.facts(t)["adapter"])
        close(logits[:, 2 * t : 2 * t + 2], method.heads[t](naive(method.backbone, x, {}, adapters)), atol=1e-10)


def test_heads_of_ada_are_distilled_if_asked_to():
    """What they are to say is what they said before."""
    method, task = run(make_ada(pool=1, train_heads=True), range(1)), make_task(1)
    learning = method.learn(task)
    new = next(learning).extra
    last = next(learning)
    assert len(last.trained) == 3 * 4 + 2 * 2
    x = next(task.batches(6, 0)).x
    said = [head(method.read(x, own)).detach() for head, own in zip(method.heads, (method.pool[0], new), strict=True)]
    randomised(method.heads)
    student = method.read(x, method.pool[0])
    expected = consolidation(torch.cat([head(student) for head in method.heads], 1), said)
    assert expected > 1e-3
    close(last.loss(next(task.batches(6, 0))), expected)
