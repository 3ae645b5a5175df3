"""Methods that put prefixes and prompts into a frozen ViT, and what they share, against calculations of their own."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from pearl.errors import ConfigError
from pearl.methods.common.clusters import FeatureClusters, kmeans
from pearl.methods.common.draws import ImageDraws
from pearl.methods.common.subspace import Subspaces
from pearl.methods.common.transport import transport
from pearl.methods.prompts.convprompt import ConvPrompt, kernels_for
from pearl.methods.prompts.cprompt import CPrompt
from pearl.methods.prompts.dualprompt import DualPrompt
from pearl.methods.prompts.evoprompt import EvoPrompt, alignment
from pearl.methods.prompts.hide import HidePrompt, contrast
from pearl.methods.prompts.identity import TaskCentroids, TaskKeys, tasks_of_classes
from pearl.methods.prompts.l2p import L2P
from pearl.methods.prompts.lgcl import Lgcl
from pearl.methods.prompts.pgp import DualPromptPgp, L2PPgp, remember, root, stay_outside
from pearl.methods.prompts.sprompts import SiPrompts, others_below
from pearl.nn import vit
from pearl.testing.tiny import images, make_task
from vits import HEADS, WIDTH, close, drawn, naive, run, small

# ------------------------------------------------------------------------------------------------- what goes into a ViT


@torch.no_grad()
def test_prompts_enter_before_their_block_and_stay():
    net, x, first, later = small(), images(), drawn(6, 3, WIDTH), drawn(1, 2, WIDTH, seed=1)
    tokens = net._pos_embed(net.patch_embed(x))
    tokens = net.blocks[0](torch.cat([tokens[:, :1], first, tokens[:, 1:]], 1))
    tokens = net.blocks[1](tokens)
    tokens = net.blocks[2](torch.cat([tokens[:, :4], later.expand(6, -1, -1), tokens[:, 4:]], 1))
    ours, theirs = vit.tokens(net, x, prompts={0: first, 2: later})
    close(theirs, net.norm(tokens)[:, 1:6])
    close(ours[:, 0], net.norm(tokens)[:, 0])
    close(vit.unnormalised(net, x, prompts={0: first, 2: later}), tokens[:, 0])


@torch.no_grad()
def test_a_prefix_may_be_made_of_the_tokens_that_enter_its_block():
    net, x, seen = small(), images(), []

    def prefix(tokens):
        seen.append(tokens)
        return tokens[:, :2], -tokens[:, :2]

    actual = vit.features(net, x, prefixes={1: prefix})
    entering = net.blocks[0](net._pos_embed(net.patch_embed(x)))
    close(seen[0], entering)
    close(actual, vit.features(net, x, prefixes={1: (entering[:, :2], -entering[:, :2])}))


# ----------------------------------------------------------------------------------------------------- which task is it


def test_the_nearest_key_is_that_of_a_task_seen():
    keys, query = TaskKeys(WIDTH), drawn(9, WIDTH)
    for seen in range(1, 5):
        keys.grow()
        cosines = F.cosine_similarity(query[:, None], torch.cat([key.weight for key in keys])[None], dim=2)
        assert cosines.shape == (9, seen)
        close(keys(query), cosines)
        assert keys.nearest(query).tolist() == cosines.argmax(1).tolist()


def test_centroids_are_compared_by_the_sum_of_absolute_differences():
    centroids = TaskCentroids()
    centroids.tensors.add("0", torch.tensor([[2.0, 1.0]]))  # from (1, 0): L1 2, L2 1.41
    centroids.tensors.add("1", torch.tensor([[2.7, 0.0], [9.0, 9.0]]))  # L1 and L2 1.7
    assert centroids.nearest(torch.tensor([[5.0, 0.0]])).tolist() == [1]
    two = TaskCentroids()
    for sign in (1, -1):
        two.grow(sign * torch.eye(WIDTH)[:1].repeat(7, 1) + 0.01 * drawn(7, WIDTH), 5)
    assert two.nearest(torch.eye(WIDTH)[:1] * torch.tensor([[3.0], [-0.2]])).tolist() == [0, 1]


def test_kmeans_finds_the_best_of_all_partitions():
    rows = drawn(9, 2).double()
    every = torch.cartesian_prod(*[torch.arange(3)] * 9)
    members = F.one_hot(every, 3).double()  # (partitions, rows, clusters)
    means = members.mT @ rows / members.sum(1)[..., None].clamp(min=1)
    within = (rows - members @ means).square().sum((1, 2))
    best = within.argmin()
    centroids, own = kmeans(rows.float(), 3)
    actual = (rows - centroids[own]).square().sum()
    close(actual, within[best], atol=1e-6)
    close(centroids.sort(0).values, means[best].sort(0).values, atol=1e-6)


def test_there_are_no_more_clusters_than_different_rows():
    rows = drawn(3, WIDTH)[[0, 1, 2, 1, 0]]
    centroids, own = kmeans(rows, 10)
    assert len(centroids) == 3
    close(centroids[own], rows.double())
    assert len(kmeans(rows[:1], 5)[0]) == 1


def test_tasks_of_classes_may_have_any_size():
    assert tasks_of_classes([2, 1, 3], torch.empty(0)).tolist() == [0, 0, 1, 2, 2, 2]


# ----------------------------------------------------------------------------------------------------------- DualPrompt


def make_dualprompt(**options):
    return DualPrompt(small(), **({"g_prompt_layer_idx": (0,), "e_prompt_layer_idx": (1, 2), "length": 3} | options))


def test_dualprompt_puts_in_the_general_prefix_and_that_of_the_nearest_key():
    method, x = run(make_dualprompt(), range(3)).double().eval(), images(12).double()
    with torch.no_grad():
        for t, key in enumerate(method.keys):
            key.weight[:] = method.backbone(x[t : t + 1]) - method.backbone(x).mean(0)
        keys = torch.cat([key.weight for key in method.keys])
        chosen = F.cosine_similarity(method.backbone(x)[:, None], keys[None], dim=2).argmax(1).tolist()
        assert len({*chosen}) > 1
        logits = method(x)
        for i, t in enumerate(chosen):
            prefixes = {0: method.g_prompt[0]} | {1 + b: method.e_prompts[t][b] for b in range(2)}
            feature = naive(method.backbone, x[i : i + 1], prefixes, {})
            close(logits[i : i + 1], torch.cat([head(feature) for head in method.heads], 1), atol=1e-9)


def test_dualprompt_learns_with_the_prefix_of_the_task_whatever_is_nearest():
    method = run(make_dualprompt(pull=0.7), range(2))
    task = make_task(2)
    phase = next(method.learn(task))
    assert torch.equal(method.e_prompts[2], method.e_prompts[1])
    assert not torch.equal(method.keys[2].weight, method.keys[1].weight)
    batch = next(task.batches(6, 0))
    query = method.backbone(batch.x)
    method.keys[0].weight.data[:] = query[:1]  # nearest to the first image
    loss = phase.loss(batch)
    loss.backward()
    prefixes = {0: method.g_prompt[0], 1: method.e_prompts[2][0], 2: method.e_prompts[2][1]}
    features = vit.features(method.backbone, batch.x, prefixes={b: (p[:1], p[1:]) for b, p in prefixes.items()})
    task_loss = F.cross_entropy(method.heads[2](features), batch.y - task.first_class)
    close(loss, task_loss - 0.7 * F.cosine_similarity(query, method.keys[2].weight).mean())
    assert method.e_prompts[2].grad.abs().sum() > 0
    assert all(method.e_prompts[t].grad is None and method.keys[t].weight.grad is None for t in range(2))
    assert all(parameter.grad is None for parameter in method.backbone.parameters())
    key = method.keys[2].weight
    assert abs(float((key.grad * key.detach()).sum())) < 1e-6  # a cosine does not depend on the length


def test_a_key_that_is_the_query_lowers_the_loss_by_its_weight():
    method, task = make_dualprompt(pull=0.7), make_task(0)
    phase = next(method.learn(task))
    batch = next(task.batches(1, 0))
    method.keys[0].weight.data = 3 * method.backbone(batch.x)
    logits = method.heads[0](method.features(batch.x))
    close(phase.loss(batch), F.cross_entropy(logits, batch.y) - 0.7)


def test_prefixes_of_no_length_are_the_plain_vit():
    method = make_dualprompt(length=0, g_prompt_length=0)
    next(method.learn(make_task(0)))
    with torch.no_grad():
        close(method.eval()(images()), method.heads[0](method.backbone(images())), atol=1e-6)


def test_blocks_that_there_are_not_are_refused():
    with pytest.raises(ConfigError, match=r"e_prompt_layer_idx: 3 is not a block of this backbone, which has 3"):
        make_dualprompt(e_prompt_layer_idx=(1, 3))
    with pytest.raises(ConfigError, match="lists a block twice"):
        make_dualprompt(e_prompt_layer_idx=(0, 1))


# ----------------------------------------------------------------------------------------------------------- S-iPrompts


def test_sprompts_asks_the_task_of_the_nearest_centroid_alone():
    method = run(SiPrompts(small(), prompt_length=3, centroids=2), range(3)).eval()
    x = images(12)
    with torch.no_grad():
        query = F.normalize(method.backbone(x), dim=1)
        distances = [
            [min(float((q - c).abs().sum()) for c in method.centroids.tensors[f"{t}"]) for t in range(3)] for q in query
        ]
        actual = method(x)
        assert actual.isfinite().all()
        for i, row in enumerate(distances):
            t = min(range(3), key=row.__getitem__)
            feature = vit.features(method.backbone, x[i : i + 1], prompts=method.prompts[t][None])
            own, others = actual[i].split([2 * t, 2, 4 - 2 * t])[1], actual[i].clone()
            close(own, method.heads[t](feature)[0])
            others[2 * t : 2 * t + 2] = -torch.inf
            assert others.max() <= own.min() - 29  # nothing in a softmax
            for s in {0, 1, 2} - {t}:  # among themselves as their heads say
                close(actual[i, 2 * s : 2 * s + 2].diff(), method.heads[s](feature)[0].diff(), atol=1e-4)


def test_sprompts_trains_what_is_the_tasks():
    method = run(SiPrompts(small(), prompt_length=3, centroids=2), range(1))
    before = {name: value.clone() for name, value in method.state_dict().items()}
    run(method, range(1, 3))
    assert all(torch.equal(method.state_dict()[name], value) for name, value in before.items())
    images_of = make_task(0)
    rows = F.normalize(method.backbone(images_of.view.test(images_of.images)), dim=1).detach()
    close(method.centroids.tensors["0"], kmeans(rows, 2)[0].float())  # without augmentation


def test_no_task_is_below_itself():
    logits = drawn(4, 3)
    assert torch.equal(others_below(logits, torch.ones(4, 3, dtype=torch.bool)), logits)


# ----------------------------------------------------------------------------------------------------------------- LGCL


def texts(path, names, rows):
    np.savez(path, names=names, features=np.asarray(rows, dtype=np.float32))
    return str(path)


def make_lgcl(path, **options):
    shape = {"g_prompt_layer_idx": (0,), "e_prompt_layer_idx": (1, 2), "length": 3}
    return Lgcl(small(), text_features=path, **(shape | options))


@pytest.fixture
def six(tmp_path):
    return texts(tmp_path / "texts.npz", [f"Class_{c}" for c in range(6)], drawn(6, WIDTH))


def test_lgcl_without_weights_is_dualprompt(six):
    plain = run(make_dualprompt(), range(2)).state_dict()
    guided = run(make_lgcl(six, task_weight=0.0, class_weight=0.0), range(2)).state_dict()
    assert {name for name in guided if name not in plain} == {
        f"texts.{t}/{x}" for t in "01" for x in ("classes", "task")
    }
    assert all(torch.equal(guided[name], value) for name, value in plain.items())


def test_lgcl_draws_to_its_own_texts_and_pushes_off_earlier_ones(six):
    method = run(make_lgcl(six, task_weight=0.3, class_weight=0.7), range(1))
    task = make_task(1)
    phase = next(method.learn(task))
    batch = next(task.batches(8, 0))
    features = drawn(8, WIDTH, seed=3)
    given = F.normalize(torch.from_numpy(np.load(six)["features"]), dim=1)
    own, old = given[2:4], given[:2]
    close(method.texts["1.task"], F.normalize(own.mean(0), dim=0))
    phase.done = 5
    drawn_classes = method.draws.below(2, 5, batch.rows)
    with torch.no_grad():
        key = F.normalize(method.keys[1].weight[0], dim=0)
        of_task = 1 - key @ method.texts["1.task"] + key @ method.texts["0.task"]
        of_class = 0.0
        for i in range(8):
            f = F.normalize(features[i], dim=0)
            of_class += (1 - f @ own[batch.y[i] - 2] + f @ old[drawn_classes[i]]) / 8
        close(method.guidance(task, batch, features, 5), 0.3 * of_task + 0.7 * of_class)
        alike = own[batch.y - 2]
        apart = alike - (alike @ torch.linalg.pinv(old)) @ old  # orthogonal to earlier classes
        only_class = make_lgcl(six, task_weight=0.0, class_weight=1.0)
        only_class.texts, only_class.keys, only_class.draws = method.texts, method.keys, method.draws
        expected = 1 - (F.normalize(apart, dim=1) * alike).sum(1).mean()
        close(only_class.guidance(task, batch, apart, 5), expected)


def test_the_first_task_has_no_class_to_be_pushed_off(six):
    method, task = make_lgcl(six, task_weight=0.3, class_weight=0.7), make_task(0)
    next(method.learn(task))
    batch = next(task.batches(8, 0))
    method.keys[0].weight.data = 2 * method.texts["0.task"][None]
    close(method.guidance(task, batch, drawn(8, WIDTH), 0), torch.tensor(0.0))


def test_draws_of_images_are_new_at_each_step_and_the_same_for_any_share():
    torch.manual_seed(0)
    draws, rows = ImageDraws(make_task(0, per_class=50)), torch.arange(100)
    first = draws.below(3, 0, rows)
    assert {*first.tolist()} == {0, 1, 2}
    assert torch.equal(draws.below(3, 0, rows[40:60].flip(0)), first[40:60].flip(0))
    assert not torch.equal(draws.below(3, 1, rows), first)


def test_texts_of_another_width_keep_their_angles(tmp_path):
    narrow = drawn(6, 10)
    method = make_lgcl(texts(tmp_path / "texts.npz", [f"class {c}" for c in range(6)], narrow))
    for t in range(2):
        next(method.learn(make_task(t)))
        actual = method.texts[f"{t}.classes"]
        rows = F.normalize(narrow[2 * t : 2 * t + 2], dim=1)
        close(actual @ actual.T, rows @ rows.T)
    method.text_features = texts(tmp_path / "other.npz", [f"class {c}" for c in range(6)], drawn(6, 12))
    with pytest.raises(ConfigError, match="features of width 12; those of earlier tasks have 10; use the same encoder"):
        next(method.learn(make_task(2)))
    wide = make_lgcl(texts(tmp_path / "wide.npz", ["class 0", "class 1", "class 0 or class 1"], drawn(3, 40)))
    next(wide.learn(make_task(0)))
    close(wide.texts["0.classes"].norm(dim=1), torch.ones(2))
    close(wide.texts["0.task"], F.normalize(drawn(3, 40)[2:] @ wide.texts["directions"], dim=1)[0])


def test_text_features_that_cannot_be_used_are_one_line(tmp_path, six):
    with pytest.raises(ConfigError, match=r"^method\.text_features: missing; give an \.npz file"):
        make_lgcl(None)
    with pytest.raises(ConfigError, match=r"text_features not found: tried .*nowhere\.npz"):
        next(make_lgcl(str(tmp_path / "nowhere.npz")).learn(make_task(0)))
    with pytest.raises(ConfigError, match="no feature of 'class 1'; make the file with the names of all classes"):
        next(make_lgcl(texts(tmp_path / "one.npz", ["class 0"], drawn(1, WIDTH))).learn(make_task(0)))
    for arrays in ({"names": ["a"]}, {"names": ["a"], "features": [[1, 2]]}, {"names": ["a"], "features": [[np.nan]]}):
        np.savez(tmp_path / "odd.npz", **arrays)
        with pytest.raises(ConfigError, match="needs `names`, N texts, and `features`, N rows of finite floats"):
            next(make_lgcl(str(tmp_path / "odd.npz")).learn(make_task(0)))


# ---------------------------------------------------------------------------------------------------------- HiDe-Prompt


def make_hide(**options):
    shape = {"e_prompt_layer_idx": (0, 2), "length": 3, "n_centroids": 2, "identity_draws": 8, "draws": 8}
    return HidePrompt(small(), **(shape | options))


def test_contrast_of_orthogonal_rows():
    rows = 2 * torch.linalg.qr(drawn(WIDTH, 4)).Q.T
    close(contrast(rows), torch.tensor(0.020012), atol=1e-6)  # log(1 + 3 exp(-4 / 0.8))
    assert not contrast(rows[:1])


def test_hide_names_the_task_by_its_query_and_the_class_by_its_prompts():
    method, x = run(make_hide(), range(3)).eval(), images(12)
    with torch.no_grad():
        query = method.backbone(x)
        mapped = method.norm(query + method.mapping(query))
        for t, head in enumerate(method.identity_heads):  # so that several tasks are named
            head.weight.copy_(mapped[2 * t : 2 * t + 2] - mapped.mean(0))
        chosen = torch.cat([head(mapped) for head in method.identity_heads], 1).argmax(1) // 2
        assert len({*chosen.tolist()}) > 1
        for i, t in enumerate(chosen.tolist()):
            prefixes = {block: method.e_prompts[t][n][:, None] for n, block in enumerate((0, 2))}
            feature = vit.features(
                method.backbone, x[i : i + 1], prefixes={b: (p[0], p[1]) for b, p in prefixes.items()}
            )
            close(method(x)[i : i + 1], torch.cat([head(feature) for head in method.heads], 1), atol=1e-4)


@pytest.mark.parametrize("momentum", [0.0, 0.25])
def test_a_tasks_prefixes_have_a_share_of_the_earlier_ones(momentum):
    method = run(make_hide(prompt_momentum=momentum), range(2))
    earlier = torch.stack([method.e_prompts[t].detach() for t in range(2)]).mean(0)
    phases = method.learn(make_task(2))
    for phase in phases:
        if phase.name == "hide_prompt":
            trained = drawn(*method.e_prompts[2].shape)
            method.e_prompts[2].data.copy_(trained)
    close(method.e_prompts[2].detach(), (1 - momentum) * trained + momentum * earlier)


def test_hide_learns_its_classes_with_the_prefixes_mixed_and_held_apart():
    method = run(make_hide(prompt_momentum=0.25, reg=0.3), range(1))
    task = make_task(1)
    for phase in method.learn(task):
        if phase.name == "hide_prompt":
            break
    assert [*phase.groups] == ["prompt", "head"]
    batch = next(task.batches(8, 0))
    with torch.no_grad():
        mixed = 0.75 * method.e_prompts[1] + 0.25 * method.e_prompts[0]
        prefixes = {block: (mixed[n, :1], mixed[n, 1:]) for n, block in enumerate((0, 2))}
        features = vit.features(method.backbone, batch.x, prefixes=prefixes)
        rows = torch.cat([method.prompted.tensors["0.mean"], features])
        likeness = (rows @ rows.T / 0.8).log_softmax(1)
        expected = F.cross_entropy(method.heads[1](features), batch.y - 2) - 0.3 * likeness.diagonal().mean()
    loss = phase.loss(batch)
    close(loss, expected)
    loss.backward()
    assert method.e_prompts[1].grad is not None and method.e_prompts[0].grad is None


def test_hide_clusters_plain_and_prompted_features_apart():
    method, task = run(make_hide(n_centroids=1), range(2)).eval(), make_task(1)
    x = task.view.test(task.images)
    with torch.no_grad():
        prefixes = {block: method.e_prompts[1][n][:, None] for n, block in enumerate((0, 2))}
        prompted = vit.features(method.backbone, x, prefixes={b: (p[0], p[1]) for b, p in prefixes.items()})
        plain = method.backbone(x)
    for clusters, features in ((method.plain, plain), (method.prompted, prompted)):
        for c, mean in enumerate(clusters.tensors["1.mean"]):
            close(mean, features[task.labels == 2 + c].mean(0))
    assert (method.plain.tensors["1.mean"] - method.prompted.tensors["1.mean"]).abs().max() > 0.01


def test_clusters_are_those_of_each_class_and_draws_come_from_them():
    features = torch.cat([drawn(40, 3) + 20, drawn(40, 3, seed=1) - 20, drawn(30, 3, seed=2), drawn(1, 3, seed=3)])
    labels = torch.tensor([5] * 80 + [6] * 30 + [7])
    clusters = FeatureClusters(2)
    clusters.grow(features, labels)
    mean, variance, label = (clusters.all(name) for name in ("mean", "variance", "label"))
    assert label.tolist() == [5, 5, 6, 6, 7]
    first = mean[:2, 0].argmax()
    close(mean[first], features[:40].mean(0))
    close(variance[first], features[:40].var(0, correction=0))
    assert not variance[4].any()
    draws = clusters.draws(60_000)
    assert len(draws) == 60_000
    batch = next(draws.batches(60_000, 3))
    of_class = batch.x[(batch.y == 5) & (batch.x[:, 0] > 0)]
    assert abs(len(of_class) - 12_000) < 500
    close(of_class.mean(0), mean[first], atol=0.05, rtol=0)
    close(of_class.var(0), variance[first] + 1e-4, atol=0.05, rtol=0.05)
    close(batch.x[batch.y == 7].std(0), torch.full((3,), 0.01), atol=1e-3, rtol=0)
    parts = [*draws.batches(100, 3, skip=2)]
    assert torch.equal(parts[0].x, batch.x[200:300]) and len(parts) == 598


def test_an_alignment_of_far_clusters_names_all_of_them():
    method = run(make_hide(), range(2))
    far = 5 * F.normalize(drawn(8, WIDTH), dim=1)
    for t in range(2):
        for name, value in (("mean", far[4 * t : 4 * t + 4]), ("variance", torch.zeros(4, WIDTH))):
            method.prompted.tensors.add(f"{t}.{name}", value)
        method.prompted.tensors.add(f"{t}.label", torch.tensor([0, 0, 1, 1]) + 2 * t)
    optimizer = torch.optim.SGD(method.only(method.heads.parameters()), lr=0.05, momentum=0.9)
    for epoch in range(5):
        for batch in method.prompted.draws(400).batches(20, epoch):
            optimizer.zero_grad()
            F.cross_entropy(method.heads(batch.x), batch.y).backward()
            optimizer.step()
    assert method.heads(far).argmax(1).tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


# ------------------------------------------------------------------------------------------------------------------ PGP


def make_pgp(**options):
    shape = {"g_prompt_layer_idx": (0,), "e_prompt_layer_idx": (1, 2), "length": 3}
    return DualPromptPgp(small(), **(shape | options))


def queries_of(net, x, block, prefixes):
    """Written out, by head (heads, n, h)."""
    tokens = net._pos_embed(net.patch_embed(x))
    for i in range(block):
        keys, values = prefixes[i]
        tokens = vit._block(net.blocks[i], tokens, (keys[None], values[None]))
    q = net.blocks[block].attn.qkv(net.blocks[block].norm1(tokens)).chunk(3, 2)[0]
    return q.unflatten(2, (HEADS, -1)).permute(2, 0, 1, 3).flatten(1, 2)


@pytest.mark.parametrize("kind", ["dualprompt", "l2p"])
def test_pgp_that_remembers_nothing_is_its_host(kind):
    make = make_dualprompt if kind == "dualprompt" else lambda: L2P(small(), pool=4, length=2, top_k=2)
    none = {"epsilon": 0.0} | ({} if kind == "dualprompt" else {"key_epsilon": 0.0, "pool": 4, "length": 2, "top_k": 2})
    ours = make_pgp(**none) if kind == "dualprompt" else L2PPgp(small(), **none)
    host, ours = (run(method, range(3)).state_dict() for method in (make(), ours))
    assert host.keys() == ours.keys()
    assert all(torch.equal(ours[name], value) for name, value in host.items())


def test_pgp_remembers_the_queries_of_each_head():
    method, task = run(make_pgp(epsilon=0.6), range(1)), make_task(0)
    x = task.view.test(task.images)
    with torch.no_grad():
        prefixes = [method.g_prompt[0], *method.e_prompts[0]]
        for block in range(3):
            for head, rows in enumerate(queries_of(method.backbone, x, block, prefixes)):
                energy = torch.linalg.svdvals(rows.double()).square()
                count = int((energy.cumsum(0) / energy.sum() < 0.6).sum()) + 1
                assert method.memory.dimension(f"{block}.{head}") == count
                basis = torch.linalg.svd(rows.double(), full_matrices=False).Vh[:count]
                close(method.memory.outside(f"{block}.{head}", basis.T), torch.zeros(WIDTH // HEADS, count).double())


def test_pgp_counts_directions_as_the_authors_code():
    """Of R R^T, whose singular values are squared once more; `r` as their loop finds it, written out."""
    rows, later = drawn(40, 8), drawn(40, 8, seed=1) * torch.linspace(3, 0.1, 8)
    memory = Subspaces()
    remember(memory, "layer", rows.T, 0.5, "squared", make_task(0), most=50)
    moment = (rows.T @ rows).double()
    u, s, _ = torch.linalg.svd(moment)
    first = int(((s**2).cumsum(0) / (s**2).sum() < 0.5).sum())
    assert 0 < first == memory.dimension("layer")
    close(memory.outside("layer", u[:, :first]), torch.zeros(8, first).double(), atol=1e-6)
    moment = (later.T @ later).double()
    total, left = (moment**2).sum(), memory.outside("layer", moment)
    inside, more = float((total - (left**2).sum()) / total), 0
    for value in torch.linalg.svdvals(left):
        if inside >= 0.9:
            break
        inside, more = inside + float(value**2 / total), more + 1
    remember(memory, "layer", later.T, 0.9, "squared", make_task(1), most=50)
    assert more and memory.dimension("layer") == first + more
    remember(few := Subspaces(), "layer", later.T, 1.0, "squared", make_task(1), most=5)
    remember(all_ := Subspaces(), "layer", later.T, 1.0, "energy", make_task(1), most=5)
    assert (few.dimension("layer"), all_.dimension("layer")) == (5, 8)


@pytest.mark.parametrize("kind", [DualPromptPgp, L2PPgp])
def test_both_criteria_of_pgp_can_be_asked_for(kind):
    shape = {"pool": 4} if kind is L2PPgp else {"g_prompt_layer_idx": (0,), "e_prompt_layer_idx": (1, 2)}
    sizes = {}
    for criterion in ("energy", "squared"):
        method = run(kind(small(), length=3, epsilon=0.9, criterion=criterion, **shape), range(2))
        layers = {name.partition("/")[2].replace("/", ".") for name in dict(method.memory.stored.named_buffers())}
        sizes[criterion] = sum(method.memory.dimension(layer) for layer in layers)
    assert 0 < sizes["squared"] < sizes["energy"]


def test_pgp_keeps_what_old_queries_make_of_keys_head_by_head():
    method, task = run(make_pgp(epsilon=0.9), range(1)), make_task(0)
    before = {name: value.clone() for name, value in method.state_dict().items()}
    old = [before["g_prompt"][0], *before["e_prompts.tensors.0"]]
    again = make_pgp(epsilon=0.9)
    again.load_state_dict(before)
    run(method, range(1, 2))
    steps = [method.g_prompt.detach()[0] - old[0], *(method.e_prompts[1].detach() - before["e_prompts.tensors.0"])]
    assert all(step[1].abs().max() > 1e-3 for step in steps)  # values move
    with torch.no_grad():
        for block, step in enumerate(steps):
            changes = step[0].unflatten(1, (HEADS, -1)).transpose(0, 1)  # (heads, length, h)
            queries = queries_of(again.backbone, task.view.test(task.images), block, old)
            for head in range(HEADS):
                assert 0 < again.memory.dimension(f"{block}.{head}") < WIDTH // HEADS
                assert changes[head].abs().max() > 1e-4
                held = again.memory.stored[f"basis.{block}.{head}"].T
                if again.memory.stored[f"rest.{block}.{head}"]:
                    held = torch.linalg.svd(held).Vh[len(held) :]
                assert (held @ changes[head].T).abs().max() < 1e-6
                share = (queries[head] @ held.T).square().sum() / queries[head].square().sum()
                assert share >= 0.9


def test_pgp_that_remembers_all_freezes_keys():
    method = run(make_pgp(epsilon=1.0), range(1))
    before = method.g_prompt.detach().clone(), method.e_prompts[0].detach().clone()
    run(method, range(1, 2))
    for now, old in zip((method.g_prompt, method.e_prompts[1]), before, strict=True):
        assert (now - old)[:, 0].abs().max() < 1e-5 < (now - old)[:, 1].abs().max()


def test_a_step_stays_out_of_what_is_remembered():
    memory, now, before = Subspaces(), drawn(5, 8), drawn(5, 8, seed=1)
    seen = drawn(8, 3, seed=2)
    memory.remember("layer", seen.double(), 1.0)
    moved, step = now.clone(), now - before
    stay_outside(memory, "layer", moved, before)
    assert ((moved - before) @ seen).abs().max() < 1e-5
    basis = torch.linalg.qr(seen).Q
    close(moved - before, step - step @ basis @ basis.T)
    close(root(seen @ seen.T) @ root(seen @ seen.T).T, seen @ seen.T, atol=1e-4)


def test_l2p_pgp_keeps_what_old_queries_make_of_keys():
    method, task = run(L2PPgp(small(), pool=4, length=2, top_k=2, key_epsilon=1.0), range(1)), make_task(0)
    query = method.backbone(task.view.test(task.images)).detach()
    scores, prompts = query @ method.pool.keys.detach().T, method.pool.prompts.detach().clone()
    run(method, range(1, 2))
    close(query @ method.pool.keys.detach().T, scores, atol=1e-4)
    step = (method.pool.prompts.detach() - prompts).flatten(0, 1).T
    assert step.abs().max() > 1e-3
    tokens = method.backbone._pos_embed(method.backbone.patch_embed(task.view.test(task.images))).flatten(0, 1)
    leading = torch.linalg.svd(tokens.detach(), full_matrices=False).Vh[0]
    assert (leading @ step).norm() / step.norm() < 0.2  # with prompts among the tokens, they are not quite these


# ------------------------------------------------------------------------------------------------------------ EvoPrompt


def make_evoprompt(**options):
    return EvoPrompt(small(), **({"hidden_dim": 4, "length": 2, "num_heads": 4} | options))


def test_transport_of_equal_weights_is_the_best_assignment():
    from scipy.optimize import linear_sum_assignment

    cost, uniform = drawn(6, 6).abs(), torch.full((6,), 1 / 6)
    plan = transport(cost, uniform, uniform)
    rows, columns = linear_sum_assignment(cost.numpy())
    expected = torch.zeros(6, 6)
    expected[rows, columns] = 1 / 6
    close(plan, expected, atol=1e-7)
    uneven = transport(cost[:2, :2], torch.tensor([0.25, 0.75]), torch.tensor([0.5, 0.5]))
    close(uneven.sum(0), torch.tensor([0.5, 0.5]))
    close(uneven.sum(1), torch.tensor([0.25, 0.75]))
    assert (uneven >= 0).all()


def test_transport_of_many_points_costs_as_little_as_a_single_program(monkeypatch):
    """A single program has all routes; here they are added one by one to the nearest of each point."""
    from scipy.optimize import linprog

    monkeypatch.setattr("pearl.methods.common.transport.NEAR", 1)
    cost = torch.cdist(drawn(50, 3), drawn(60, 3, seed=1)).double()
    source, target = (drawn(n, seed=n).abs().double() for n in (50, 60))
    source, target = source / source.sum(), target / target.sum()
    plan = transport(cost, source, target)
    close(plan.sum(1), source, atol=1e-9)
    close(plan.sum(0), target, atol=1e-9)
    sums = np.concatenate([np.kron(np.eye(50), np.ones(60)), np.kron(np.ones(50), np.eye(60))])
    whole = linprog(cost.numpy().ravel(), A_eq=sums, b_eq=torch.cat([source, target]).numpy(), method="highs")
    assert float((plan * cost).sum()) == pytest.approx(whole.fun, abs=1e-10)


def test_a_memory_whose_units_were_shuffled_is_put_in_order():
    before, order = drawn(5, WIDTH), torch.tensor([3, 0, 4, 1, 2])
    before = before / before.abs().sum(1, keepdim=True)
    plan = alignment(2 * before[order], before)
    close(plan.T @ before[order], before, atol=1e-6)
    close(plan.sum(0), torch.ones(5))


@torch.no_grad()
def test_evoprompt_puts_in_what_its_memory_makes_of_the_query():
    method, x = make_evoprompt(), images()
    net = method.backbone
    plain = net._pos_embed(net.patch_embed(x))
    for block in net.blocks:
        plain = block(plain)
    query, tokens = plain[:, 0], net._pos_embed(net.patch_embed(x))
    for i, block in enumerate(net.blocks):
        made = (query @ method.reader[i].T).relu() @ method.writer[i].T
        tokens = block(torch.cat([made.unflatten(1, (2, WIDTH)), tokens], 1))
        assert tokens.shape[1] == 5 + 2 * (i + 1)
    close(method.features(x), net.norm(tokens)[:, 6])


def test_a_head_is_composed_of_old_ones_part_by_part():
    method = run(make_evoprompt(), range(1))
    method.statistics.grow(2, method.device)
    method.statistics.update(drawn(10, WIDTH), torch.arange(10) % 2)
    means, weights = method.statistics.means().float(), method.heads[0].weight.detach()
    actual = method.composed(1)
    for c in range(2):
        for part in range(4):
            part_of = slice(4 * part, 4 * part + 4)
            alike = torch.stack(
                [F.cosine_similarity(means[2 + c, part_of], means[o, part_of], dim=0) for o in range(2)]
            )
            close(actual[c, part_of], (alike / 0.05).softmax(0) @ weights[:, part_of])
    single = EvoPrompt(small(), num_heads=4)
    single.heads.grow(1)
    single.statistics.tensors.load_state_dict(
        {
            f"{t}/{name}": value
            for t in range(2)
            for name, value in (("count", torch.ones(1)), ("mean", drawn(1, WIDTH)))
        }
    )
    close(single.composed(1), single.heads[0].weight.detach())


@pytest.mark.parametrize("align", ["hidden", "both"])
def test_memories_are_fused_by_how_much_each_unit_is_used(align):
    method = run(make_evoprompt(alpha=0.4, align=align), range(1))
    task, first = make_task(1), {name: value.clone() for name, value in method.state_dict().items()}
    for _ in method.learn(task):
        for parameter in (method.reader, method.writer):
            parameter.data += 0.3 * drawn(*parameter.shape, seed=7)
        method.heads[1].bias.data += 5  # right sometimes
        trained = {name: value.clone() for name, value in method.state_dict().items()}
    x, labels = task.view.test(task.images), task.labels
    again = make_evoprompt()
    again.load_state_dict(trained)
    with torch.no_grad():
        right = again.eval()(x).argmax(1) == labels
        assert 0 < right.sum() < len(labels)
        query = vit.unnormalised(again.backbone, x)[right]
        for block in range(3):
            was, now = first["reader"][block], trained["reader"][block]
            plan = alignment(now, was)
            hidden = (query @ now.T).relu()
            used = plan.T @ hidden.mean(0), (hidden @ trained["writer"][block].T).relu().mean(0)
            aligned = plan.T @ now, trained["writer"][block] @ plan
            if align == "both":  # rows weigh as they did before their columns were brought into order
                rows = [aligned[1], first["writer"][block]]
                cost = torch.cdist(*(F.normalize(r.double(), dim=1) for r in rows)).square()
                sums = [r.double().abs().sum(1) for r in (trained["writer"][block], rows[1])]
                plan = transport(cost, *(s / s.sum() for s in sums)).float()
                plan = plan / plan.sum(0)
                aligned, used = (aligned[0], plan.T @ aligned[1]), (used[0], plan.T @ used[1])
            for name, use, what in zip(("reader", "writer"), used, aligned, strict=True):
                old = first["hidden_use" if name == "reader" else "output_use"][block]
                unit = [(u - u.min()) / (u.max() - u.min()).clamp(min=1e-9) for u in (use, old)]
                share = 0.4 * (1 + unit[0] - unit[1])[:, None]
                expected = first[name][block] + share * (what - first[name][block])
                close(getattr(method, name)[block].detach(), expected, atol=1e-4)
                remembered = getattr(method, "hidden_use" if name == "reader" else "output_use")[block]
                close(remembered, torch.maximum(old, use), atol=1e-4)


def test_a_memory_that_takes_nothing_stays_as_the_first_task_left_it():
    method = run(make_evoprompt(alpha=0.0), range(1))
    before = method.reader.detach().clone(), method.writer.detach().clone()
    run(method, range(1, 3))
    assert torch.equal(method.reader, before[0]) and torch.equal(method.writer, before[1])


def test_parts_of_features_are_equal():
    with pytest.raises(ConfigError, match="num_heads=5: features of 16 numbers cannot be divided"):
        make_evoprompt(num_heads=5)


# -------------------------------------------------------------------------------------------------------------- CPrompt


def make_cprompt(**options):
    return CPrompt(small(), **({"length": 3, "blocks": (0, 2)} | options))


def test_cprompt_flattens_earlier_heads_only_where_they_are_too_sure():
    method = make_cprompt(tau=1.5, margin=0.1)
    for classes in (3, 2):
        method.heads.grow(classes)
    features = drawn(6, WIDTH).requires_grad_()
    old, new = (head(features) for head in method.heads)
    surer = new.amax(1) > old.amax(1) + 0.1
    assert 0 < surer.sum() < 6
    (gradient,) = torch.autograd.grad(method.consistency(features), old_logits := features)
    p, soft = old.softmax(1), (old / 1.5).softmax(1)
    through = torch.where(surer[:, None], 0.0, p - soft) / 6
    close(gradient, through @ method.heads[0].weight, atol=1e-6)
    assert gradient[surer].abs().max() < 1e-7 and old_logits is features


def test_cprompt_learns_with_prompts_of_any_task_seen_and_tells_classes_by_keys():
    method = run(make_cprompt(tau=1.2, margin=0.0, alpha=0.8), range(2))
    task = make_task(2)
    phase = next(method.learn(task))
    keys = torch.cat([key.weight for key in method.keys]).detach()
    close(keys[4:] @ keys.T, torch.eye(6)[4:])  # new ones are orthonormal to all there are
    assert torch.equal(method.prompts[2], method.prompts[1])
    with torch.no_grad():
        method.prompts[2].add_(drawn(2, 3, WIDTH))
    batch = next(task.batches(24, 0))
    phase.done = 4
    seen = []
    read = method.read
    method.read = lambda x, prompts: seen.append(prompts) or read(x, prompts)
    loss = phase.loss(batch)
    method.read = read
    own, drawn_ones = seen
    close(own, method.prompts[2][None])
    which = [[bool(torch.equal(row, method.prompts[t])) for t in range(3)].index(True) for row in drawn_ones]
    assert {*which} == {0, 1, 2}
    with torch.no_grad():
        features = read(batch.x, own)
        query = vit.unnormalised(method.backbone, batch.x)
        cosines = F.cosine_similarity(query[:, None], torch.cat([key.weight for key in method.keys])[None], dim=2)
        expected = F.cross_entropy(phase.extra(features), batch.y - 4) + 0.8 * method.consistency(features)
        expected += F.cross_entropy(cosines, batch.y)
        expected += F.cross_entropy(method.heads[2](read(batch.x, drawn_ones)), batch.y - 4)
    close(loss, expected)
    loss.backward()
    assert all(method.keys[t].weight.grad is None and method.prompts[t].grad is None for t in range(2))
    assert method.keys[2].weight.grad.abs().sum() > 0


def test_cprompt_takes_the_prompts_of_the_nearest_class_and_features_before_the_norm():
    method, x = make_cprompt(), images(12)
    for t, classes in enumerate((1, 3, 2)):  # tasks of any size
        next(method.learn(make_task(t, classes=classes)))
        method.prompts[t].data = drawn(2, 3, WIDTH, seed=t)
    with torch.no_grad():
        keys = torch.cat([key.weight for key in method.keys])
        query = vit.unnormalised(method.backbone, x)
        close(method.backbone.norm(query), method.backbone(x))
        nearest = F.cosine_similarity(query[:, None], keys[None], dim=2).argmax(1)
        for i, c in enumerate(nearest.tolist()):
            prompts = method.prompts[[0, 1, 1, 1, 2, 2][c]]
            feature = vit.unnormalised(method.backbone, x[i : i + 1], prompts={0: prompts[:1], 2: prompts[1:]})
            close(method.eval()(x)[i : i + 1], torch.cat([head(feature) for head in method.heads], 1), atol=1e-4)


# ----------------------------------------------------------------------------------------------------------- ConvPrompt


def make_convprompt(**options):
    shape = {"num_prompts_per_task": 2, "kernel_size": 3, "length": 4, "blocks": 2}
    return ConvPrompt(small(), **(shape | options))


def test_a_kernel_that_is_one_in_its_middle_cuts_the_shared_prompt():
    method = ConvPrompt(small(), num_prompts_per_task=1, blocks=1)
    next(method.learn(make_task(0)))
    assert method.shared.shape == (1, 2 * HEADS, 36, WIDTH // HEADS + 16)  # 20 + 17 - 1
    method.kernels["0.weight"].data.zero_()[..., 8, 8] = 1
    method.kernels["0.bias"].data.zero_()
    (bank,) = method.bank()
    for part in range(2):
        for head in range(HEADS):
            cut = method.shared[0, part * HEADS + head, 8:-8, 8:-8]
            close(bank[0, part, :, head * 8 : head * 8 + 8], cut)


def test_convprompt_weights_its_kernels_block_by_block():
    method, x = run(make_convprompt(), range(3)).eval(), images()
    with torch.no_grad():
        net, keys = method.backbone, torch.cat([method.kernels[f"{t}.key"] for t in range(3)])
        assert keys.shape == (6, 4)
        close(keys[:4] @ keys[:4].T, torch.eye(4))  # as many as there is room for
        tokens, before = net._pos_embed(net.patch_embed(x)), 0
        for i, block in enumerate(net.blocks):
            if i == 2:
                tokens = block(tokens)
                continue
            alike = F.cosine_similarity(method.matcher(tokens[:, 0])[:, None], keys[None], dim=2)
            made = torch.zeros(6, 2, 4, WIDTH)
            for k in range(6):
                t, own = divmod(k, 2)
                weight, bias = method.kernels[f"{t}.weight"][own, i], method.kernels[f"{t}.bias"][own, i]
                for part in range(2):
                    for head in range(HEADS):
                        n = part * HEADS + head
                        out = F.conv2d(method.shared[i, n][None, None], weight[n][None, None], bias[n][None])
                        made[:, part, :, head * 8 : head * 8 + 8] += alike[:, k, None, None] * out[0]
            tokens = vit._block(block, tokens, tuple((made + before).unbind(1)))
            before = made
        feature = net.norm(tokens)[:, 0]
        heads = [
            F.linear(F.layer_norm(feature, (WIDTH,), h.norm.weight, h.norm.bias), h.weight, h.bias)
            for h in method.heads
        ]
        close(method(x), torch.cat(heads, 1), atol=1e-4)


def test_convprompt_trains_what_is_new_and_holds_what_is_shared():
    method = run(make_convprompt(stay=0.02), range(1))
    task = make_task(1)
    before = {name: value.clone() for name, value in method.state_dict().items()}
    phase = next(method.learn(task))
    trained = {name for name, p in method.named_parameters() if any(p is q for q in phase.trained)}
    norms = {name for name in before if "norm" in name and name.startswith("backbone")}
    shared = {name for name in before if name.startswith(("shared", "matcher"))}
    head = {f"heads.blocks.1.{name}" for name in ("weight", "bias", "norm.weight", "norm.bias")}
    assert norms and trained == norms | shared | head | {"kernels.1/weight", "kernels.1/bias"}
    batch = next(task.batches(8, 0))
    plain = F.cross_entropy(method.heads[1](method.features(batch.x)), batch.y - 2)
    close(phase.loss(batch), plain)
    with torch.no_grad():
        method.shared[0, 0, 0, :3] += 2
        moved = F.cross_entropy(method.heads[1](method.features(batch.x)), batch.y - 2)
        close(phase.loss(batch), moved + 0.02 * 6)
        values = [p.detach().clone() for p in phase.trained]
        for parameter in phase.trained:
            parameter.add_(1)
        phase.project(values)
        steps = {p: p - value for p, value in zip(phase.trained, values, strict=True)}
        for name, parameter in method.named_parameters():
            if name in trained:
                close(steps[parameter], torch.full_like(parameter, 0.005 if name in norms else 1.0))


def test_fewer_kernels_for_what_resembles_earlier_tasks(tmp_path):
    assert [kernels_for(alike, 5) for alike in (-1, 0, 0.2, 0.21, 0.99, 1, 1 + 1e-7)] == [5, 5, 4, 4, 1, 0, 0]
    rows = torch.eye(WIDTH)[[0, 1, 0, 2, 0, 1]]  # of the second task one as before, of the third both
    file = texts(tmp_path / "texts.npz", [f"class {c}" for c in range(6)], rows)
    for over, counts in (("new", [4, 2, 0]), ("earlier", [4, 2, 2])):  # one of three earlier ones is not met again
        method = run(make_convprompt(num_prompts_per_task=4, similarity=file, similarity_over=over), range(3))
        assert [len(method.kernels[f"{t}.key"]) for t in range(3)] == counts
    with torch.no_grad():
        assert method.eval()(images()).shape == (6, 6)


def test_an_attribute_of_several_classes_counts_once(tmp_path):
    """As in the authors' code: of two earlier attributes one comes again, though three of four rows have it."""
    e = torch.eye(WIDTH)
    names = [f"class {c}" for c in (0, 0, 1, 1, 2, 3)]
    file = texts(tmp_path / "texts.npz", names, e[[0, 1, 0, 0, 0, 2]])
    method = run(make_convprompt(num_prompts_per_task=4, similarity=file), range(1))
    assert method.count(make_task(1)) == 2
