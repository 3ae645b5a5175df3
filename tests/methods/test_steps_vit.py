"""The third task of methods on ViTs, written out: what each phase trains, and what counts of both earlier tasks.

With two tasks, the first would be all that came before.
"""

import copy
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from pearl.methods.prompts.hide import HidePrompt
from pearl.nn import vit
from pearl.settings.parts import METHODS
from pearl.testing.tiny import make_task
from vits import WIDTH, close, drawn, small

HEAD, HEADS = r"heads\.blocks\.2\..+", r"heads\..+"
PREFIXES = {"g_prompt_layer_idx": (0,), "e_prompt_layer_idx": (1, 2), "length": 2}
DUALPROMPT = ["g_prompt", r"e_prompts\.tensors\.2", r"keys\.blocks\.2\..+", HEAD]
MAPPING = [r"mapping\..+", r"norm\..+"]
# of the third task, by method: options, and the phases with the names of all that they train (regular expressions)
# and how many parameters outside the method
TRAINED = {
    "sprompts": ({"prompt_length": 2, "centroids": 2}, {"sprompts": ([r"prompts\.tensors\.2", HEAD], 0)}),
    "l2p": ({"pool": 3, "length": 2, "top_k": 2}, {"l2p": ([r"pool\..+", HEAD], 0)}),
    "l2p_pgp": ({"pool": 3, "length": 2, "top_k": 2}, {"l2p_pgp": ([r"pool\..+", HEAD], 0)}),
    "dualprompt": (PREFIXES, {"dualprompt": (DUALPROMPT, 0)}),
    "dualprompt_pgp": (PREFIXES, {"dualprompt_pgp": (DUALPROMPT, 0)}),
    "coda_prompt": ({"per_task": 2, "length": 2, "blocks": 1}, {"coda_prompt": ([r"components\.2/.+", HEAD], 0)}),
    "hide": (
        {"e_prompt_layer_idx": (0,), "length": 2, "n_centroids": 2, "identity_draws": 2, "draws": 2},
        {
            "hide_identity": ([*MAPPING, r"identity_heads\.blocks\.2\..+"], 0),
            "hide_identity_align": ([*MAPPING, r"identity_heads\..+"], 0),
            "hide_prompt": ([r"e_prompts\.tensors\.2", HEAD], 0),
            "hide_align": ([HEADS], 0),
        },
    ),
    "evoprompt": ({"length": 1, "hidden_dim": 3}, {"evoprompt": (["reader", "writer", HEAD], 0)}),
    "cprompt": (
        {"length": 2, "blocks": (0,)},
        {"cprompt": ([r"prompts\.tensors\.2", r"keys\.blocks\.2\..+", HEAD], 2)},
    ),
    "convprompt": (
        {"num_prompts_per_task": 1, "kernel_size": 3, "length": 2, "blocks": 1},
        {"convprompt": (["shared", r"matcher\..+", r"kernels\.2/(weight|bias)", r"backbone\..*norm.*", HEAD], 0)},
    ),
    "inflora": ({"rank": 2}, {"inflora": ([r"trained\.2/.+", HEAD], 0)}),
    "seqlora": ({"rank": 2}, {"seqlora": ([r"update\..+", HEAD], 0)}),
    "clora": ({"rank": 2}, {"clora": ([r"update\.2/.+", HEAD], 0)}),
    "sdlora": ({"rank": 2}, {"sdlora": ([r"factors\.2/.+", r"magnitudes\..+", HEAD], 0)}),
    "e2lora": (
        {"first_rank": 4, "draws": 4},
        {"e2lora": ([r"factors\.2/A/.+", HEAD], 0), "e2lora_align": ([HEADS], 0)},
    ),
    "slcapp": (
        {"rank": 2, "draws": 4},
        {
            "slcapp": (
                [r"update\..+", r"backbone\.(cls_token|.*bias|.*norm.*)", r"trained_heads\.blocks\.2\..+"],
                0,
            ),
            "slcapp_align": ([HEADS], 0),
        },
    ),
    "sldc": (
        {"rank": 2, "draws": 4},
        {"sldc": ([r"update\..+", r"trained_heads\.blocks\.2\..+"], 0), "sldc_align": ([HEADS], 0)},
    ),
    "lae": (
        {"adapt_blocks": (0,), "size": 2},
        {"lae_head": ([HEAD], 0), "lae": ([r"pet\..+", HEAD], 0)},
    ),
    "ease": ({"ffn_num": 2}, {"ease": ([r"adapters(\.\w+)*\.2\.\d\..+"], 2)}),
    "ssiat": ({"ffn_num": 2, "draws": 4}, {"ssiat": ([r"adapters\..+", HEAD], 0), "ssiat_align": ([HEADS], 0)}),
    "rsiat": (
        {"ffn_num": 2, "draws": 4, "code": 3},
        {"rsiat": ([r"adapters\..+", r"projector\..+", HEAD], 0), "rsiat_align": ([HEADS], 0)},
    ),
    "sema": (
        {"ffn_num": 2, "rd_dim": 2, "adapt_start_layer": 2, "adapt_end_layer": 2, "exp_threshold": -1.0},
        {
            "sema_func": ([r"mixtures\.2\.(adapters|router)\.2\..+", HEAD], 0),
            "sema_rd": ([r"mixtures\.2\.descriptors\.2\..+"], 0),
        },
    ),
    "dia": (
        {"width": 2, "prototypes": 4},
        {"dia": ([r"adapters\.\d\.tasks\.2\..+", HEAD], 0), "dia_align": ([HEADS], 0)},
    ),
    "ada": ({"pool": 2, "width": 2}, {"ada": ([HEAD], 12), "ada_consolidate": ([r"pool\.\d\..+"], 0)}),
}


def stirred(phases):
    """Run all phases; each changes what it trains by random amounts instead of training it."""
    for phase in phases:
        with torch.no_grad():
            for i, parameter in enumerate(phase.trained):
                parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i))


def after_two(method):
    for t in range(2):
        stirred(method.learn(make_task(t)))
    return method


@pytest.mark.parametrize("name", TRAINED)
def test_phases_of_the_third_task_train_what_the_method_says_and_nothing_else(name):
    options, expected = TRAINED[name]
    method, actual = after_two(METHODS.load(name)(small(), **options)), {}
    for phase in method.learn(make_task(2)):
        names = {id(parameter): name for name, parameter in method.named_parameters()}
        own = {names[id(parameter)] for parameter in phase.trained if id(parameter) in names}
        actual[phase.name] = own, len([*phase.trained]) - len(own)
        patterns = expected[phase.name][0]
        assert all(any(re.fullmatch(pattern, name) for name in own) for pattern in patterns)
        if name != "ada":  # one of two adapters is consolidated
            assert own == {name for name in names.values() if any(re.fullmatch(p, name) for p in patterns)}
        assert all(parameter.requires_grad for parameter in phase.trained)
    assert [*actual] == [*expected]
    assert {phase: extra for phase, (_, extra) in actual.items()} == {phase: n for phase, (_, n) in expected.items()}


# --------------------------------------------------------------------------------- what counts of both earlier tasks


@pytest.mark.parametrize("name", ["dualprompt_pgp", "l2p_pgp"])
def test_pgp_remembers_the_share_that_it_is_told_of_every_task(name):
    share = {"dualprompt_pgp": 0.9, "l2p_pgp": 0.999}[name]
    options = PREFIXES if name == "dualprompt_pgp" else {"pool": 3, "length": 2, "top_k": 1, "key_epsilon": share}
    method, before = METHODS.load(name)(small(), **options, epsilon=0.9), []

    def shares(task):
        """Of the energy of a task's queries, by what is remembered of them."""
        if name == "l2p_pgp":
            matrices = {"keys": method.of_images(task, method.query).T.double()}
        else:
            matrices = {
                f"{block}.{head}": torch.linalg.cholesky(moment + 1e-9 * torch.eye(len(moment)))
                for block, moments in method.queries(task).items()
                for head, moment in enumerate(moments)
            }
        left = {layer: method.memory.outside(layer, matrix) for layer, matrix in matrices.items()}
        return torch.stack([1 - left[layer].square().sum() / matrices[layer].square().sum() for layer in left])

    for t in range(3):
        task = make_task(t, per_class=1)  # few images, so that those of the next task lie elsewhere
        phases = method.learn(task)
        next(phases)
        before.append(float(shares(task).min()))
        assert not [*phases]
        assert shares(task).min() > share - 1e-5
    assert before[0] < 1e-6 and before[1] < share and before[2] < share


@torch.no_grad()
def test_evoprompt_starts_a_head_from_those_of_both_earlier_tasks():
    method = after_two(METHODS.load("evoprompt")(small(), length=1, hidden_dim=3, num_heads=4, temp=0.5))
    next(method.learn(make_task(2)))
    means = []
    for task in map(make_task, range(3)):
        x = task.view.test(task.images)
        query = method.query(x)
        means += [query[task.labels == c].mean(0) for c in task.labels.unique()]
    old = torch.cat([head.weight for head in list(method.heads)[:2]])
    for c in range(2):
        for part in range(4):
            part_of = slice(4 * part, 4 * part + 4)
            alike = torch.stack(
                [F.cosine_similarity(means[4 + c][part_of], means[o][part_of], dim=0) for o in range(4)]
            )
            close(method.heads[2].weight[c, part_of], (alike / 0.5).softmax(0) @ old[:, part_of])


def test_convprompt_holds_all_that_tasks_share():
    options = {"num_prompts_per_task": 1, "kernel_size": 3, "length": 2, "blocks": 1, "stay": 0.5}
    method, task = after_two(METHODS.load("convprompt")(small(), **options)), make_task(2)
    phase, batch = next(method.learn(task)), next(task.batches(8, 0))
    with torch.no_grad():
        for parameter in (method.shared, *method.matcher.parameters()):
            parameter[0] += 0.25
            plain = F.cross_entropy(method.heads[2](method.features(batch.x)), batch.y - 4)
            close(phase.loss(batch) - plain, 0.5 * 0.25 * torch.tensor(float(parameter[0].numel())), atol=1e-4)
            parameter[0] -= 0.25


def test_clora_charges_what_the_sum_of_both_earlier_updates_is():
    method, task = after_two(METHODS.load("clora")(small(), rank=2, scale=3.0, penalty=10.0)), make_task(2)
    phase, batch = next(method.learn(task)), next(task.batches(8, 0))
    with torch.no_grad():
        penalty = torch.zeros(())
        for target in method.low_rank:
            factors = [
                (method.update[f"{t}.B.{target.label}"], method.update[f"{t}.A.{target.label}"]) for t in range(3)
            ]
            factors[2][0].add_(drawn(*factors[2][0].shape))
            first, second, new = (3.0 * b @ a for b, a in factors)
            penalty += 10.0 * ((first + second) * new).square().sum()
        assert penalty > 0.1
        plain = F.cross_entropy(method.heads[2](method.features(batch.x)), batch.y - 4)
        close(phase.loss(batch), plain + penalty)


@torch.no_grad()
def test_coda_prompt_weighs_the_components_of_three_tasks():
    method = after_two(METHODS.load("coda_prompt")(small(), per_task=2, length=2, blocks=1))
    next(method.learn(make_task(2)))
    query, parts = drawn(5, WIDTH), [{k: method.components[f"{t}.{k}.0"] for k in "PKA"} for t in range(3)]
    prompt = torch.zeros(5, 2 * WIDTH)
    for part in parts:
        for i in range(2):
            prompt += F.cosine_similarity(query * part["A"][i], part["K"][i][None], dim=1)[:, None] * part["P"][i]
    close(torch.cat(method.prefix(query, 0), 1).flatten(1), prompt)


def test_ease_composes_prototypes_by_a_softmax_over_the_classes_of_the_later_task():
    method = METHODS.load("ease")(small(), ffn_num=2)
    rows = [drawn(3, (t + 1) * WIDTH, seed=t) for t in range(3)]  # an image of each of three classes a task
    for t in range(3):
        method.adapters.grow()
        method.statistics.grow(3, torch.device("cpu"), (t + 1) * WIDTH)
        method.statistics.update(rows[t], torch.arange(3))
    own, later = rows[0], rows[2]
    for c in range(3):
        alike = torch.stack([F.cosine_similarity(own[c], later[j, :WIDTH], dim=0) for j in range(3)])
        assert alike.amax() - alike.amin() > 0.1
        expected = alike.softmax(0) @ later[:, 2 * WIDTH :]
        close(method.prototypes(0, 2)[c].float(), expected)


def test_hide_holds_prefixes_apart_from_the_clusters_of_both_earlier_tasks():
    shape = {"e_prompt_layer_idx": (0,), "length": 2, "n_centroids": 2, "identity_draws": 2, "draws": 2}
    method, task = after_two(HidePrompt(small(), **shape, prompt_momentum=0.4, reg=2.0)), make_task(2)
    phase = next(phase for phase in method.learn(task) if phase.name == "hide_prompt")
    batch = next(task.batches(8, 0))
    with torch.no_grad():
        method.e_prompts[2].add_(drawn(*method.e_prompts[2].shape))
        mixed = 0.6 * method.e_prompts[2] + 0.2 * (method.e_prompts[0] + method.e_prompts[1])
        features = method.read(batch.x, mixed[None])
        centres = [method.prompted.tensors[f"{t}.mean"] for t in range(2)]
        rows = torch.cat([*centres, features])
        contrast = -(rows @ rows.T / 0.8).log_softmax(1).diagonal().mean()
        close(phase.loss(batch), F.cross_entropy(method.heads[2](features), batch.y - 4) + 2.0 * contrast)


def test_lgcl_pushes_off_the_texts_of_both_earlier_tasks(tmp_path):
    rows = drawn(6, WIDTH, seed=4)
    np.savez(tmp_path / "texts.npz", names=[f"class {c}" for c in range(6)], features=rows.numpy())
    options = PREFIXES | {"task_weight": 0.3, "class_weight": 0.7, "text_features": str(tmp_path / "texts.npz")}
    method, given = METHODS.load("lgcl")(small(), **options), F.normalize(rows, dim=1)
    tasks = F.normalize(given.unflatten(0, (3, 2)).mean(1), dim=1)
    for t in range(3):
        task, learning = make_task(t), method.learn(make_task(t))
        phase, batch = next(learning), next(task.batches(24, 0))
        with torch.no_grad():
            query = method.query(batch.x)
            features = vit_features(method, batch.x, t)
            key = method.keys[t].weight[0]
            guided = 0.3 * (1 - F.cosine_similarity(key, tasks[t], dim=0))
            if t:
                drawn_tasks = method.draws.below(t, 0, batch.rows)
                drawn_classes = method.draws.below(2 * t, 0, batch.rows)
                assert len({*drawn_classes.tolist()}) == 2 * t
                guided += 0.3 * F.cosine_similarity(key[None], tasks[drawn_tasks], dim=1).mean()
                own = F.cosine_similarity(features, given[batch.y], dim=1)
                pushed = F.cosine_similarity(features, given[drawn_classes], dim=1)
                guided += 0.7 * (1 - own + pushed).mean()
            plain = F.cross_entropy(method.heads[t](features), batch.y - 2 * t)
            pulled = F.cosine_similarity(query, key[None], dim=1).mean()
            close(phase.loss(batch), plain - pulled + guided)
        stirred([phase])
        assert not [*learning]


def vit_features(method, x, t):
    """Features (B, dim) with the general prefix and the expert prefixes of task t."""
    prefixes = {0: method.g_prompt[0], 1: method.e_prompts[t][0], 2: method.e_prompts[t][1]}
    return vit.features(method.backbone, x, prefixes={b: (p[:1], p[1:]) for b, p in prefixes.items()})


def test_cprompt_averages_its_consistency_over_both_earlier_heads():
    method = METHODS.load("cprompt")(small(), length=2, blocks=(0,), tau=1.5, margin=0.1)
    for classes in (2, 3, 2):
        method.heads.grow(classes)
    features, total = drawn(8, WIDTH), 0.0
    with torch.no_grad():
        newest = method.heads[2](features).amax(1)
        for head in list(method.heads)[:2]:
            logits = head(features)
            sure = newest <= logits.amax(1) + 0.1
            assert 0 < sure.sum() < 8
            flatter = (logits / torch.where(sure, 1.5, 1.0)[:, None]).softmax(1)
            total -= (flatter * logits.log_softmax(1)).sum(1).mean() / 2
        close(method.consistency(features), total)


def test_inflora_remembers_the_share_that_it_is_told_of_every_task():
    method, before = METHODS.load("inflora")(small(), rank=2, energy=0.999, energy_end=0.999), []

    def least(task):
        """Of the energy of a task's inputs that is remembered, a layer at a time."""
        shares = []
        for layer, matrix in method.inputs(task).items():
            left = method.memory.outside(layer, matrix)
            shares.append(1 - float(left.square().sum() / matrix.square().sum()))
        return min(shares)

    for t in range(3):
        task = make_task(t, per_class=1)  # few images, so that those of the next task lie elsewhere
        stirred(method.learn(task))
        assert least(task) > 0.999 - 1e-6
        before.append(least(make_task(t + 1, per_class=1)))
    assert max(before) < 0.999


@torch.no_grad()
def test_pgp_takes_what_is_remembered_out_of_steps_of_prompts_and_of_keys():
    method = METHODS.load("l2p_pgp")(small(), pool=3, length=2, top_k=2)
    for layer, rank in (("prompts", 5), ("keys", 3)):
        method.memory.remember(layer, drawn(WIDTH, rank, seed=rank), 1.0)
    phase = next(method.learn(make_task(0)))
    before = [parameter.detach().clone() for parameter in phase.trained]
    for i, parameter in enumerate(phase.trained):
        parameter.add_(drawn(*parameter.shape, seed=20 + i))
    phase.project(before)
    for parameter, was, rank in ((method.pool.prompts, before[0], 5), (method.pool.keys, before[1], 3)):
        step = drawn(*parameter.shape, seed=20 + (rank == 3))
        basis = torch.linalg.qr(drawn(WIDTH, rank, seed=rank)).Q
        close(parameter - was, step - step @ basis @ basis.T)


def test_seqlora_goes_on_from_the_update_of_the_task_before():
    method = after_two(METHODS.load("seqlora")(small(), rank=2))
    before = {name: factor.detach().clone() for name, factor in method.update.named_parameters()}
    assert all(factor.any() for factor in before.values())
    next(method.learn(make_task(2)))
    assert all(torch.equal(factor, before[name]) for name, factor in method.update.named_parameters())


def test_slcapp_weighs_the_cross_entropy_and_the_reverse_one():
    method, task = after_two(METHODS.load("slcapp")(small(), rank=2, ce=0.9, rce=0.2, draws=4)), make_task(2)
    phase, batch = next(method.learn(task)), next(task.batches(8, 0))
    with torch.no_grad():
        logits = method.trained_heads[2](method.features(batch.x))
        labels = F.one_hot(batch.y - 4, 2).float()
        forwards = -(labels * logits.log_softmax(1)).sum(1).mean()
        reverse = -(logits.softmax(1) * labels.clamp(min=1e-4).log()).sum(1).mean()
        close(phase.loss(batch), 0.9 * forwards + 0.2 * reverse)


def test_ada_consolidates_an_adapter_for_all_tasks_that_it_serves():
    method, task = METHODS.load("ada")(small(), pool=1, width=2), make_task(2)
    for t in range(2):
        stirred(method.learn(make_task(t)))
    learning = method.learn(task)
    stirred([first := next(learning)])
    old, consolidate = copy.deepcopy(method.pool[0]), next(learning)
    stirred([consolidate])
    x = next(task.batches(8, 0)).x
    with torch.no_grad():
        before, now, student = (method.read(x, adapters) for adapters in (old, first.extra, method.pool[0]))
        assert (before - student).abs().max() > 0.01 < (before - now).abs().max()
        first_two = torch.cat([method.heads[t](before) for t in range(2)], 1)
        newest = method.heads[2](now)
        taught = torch.cat([first_two - first_two.mean(1)[:, None], newest - newest.mean(1)[:, None]], 1)
        answers = torch.cat([head(student) for head in method.heads], 1)
        close(consolidate.loss(next(task.batches(8, 0))), (answers - taught).square().mean())
