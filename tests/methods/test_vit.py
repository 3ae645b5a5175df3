"""The wrapper around timm's ViT, and the methods on it, against calculations of their own."""

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.models.vision_transformer import ResPostBlock
from torch import nn
from torch.func import functional_call

from pearl.errors import ConfigError
from pearl.methods.adapters.inflora import InfLoRA
from pearl.methods.adapters.seqlora import SeqLora
from pearl.methods.common.subspace import Subspaces, input_matrices
from pearl.methods.pearl import Pearl
from pearl.methods.prompts.coda_prompt import CodaPrompt, orthonormal
from pearl.methods.prompts.l2p import L2P
from pearl.methods.prompts.pool import PromptPool
from pearl.nn import vit
from pearl.nn.rank_rules import FixedRule
from pearl.nn.resnet import resnet18
from pearl.nn.task_modules import TaskTensors
from pearl.settings.parts import METHODS
from pearl.testing.tiny import SIZE, images, make_task
from vits import WIDTH, close, drawn, naive, run, small

# ------------------------------------------------------------------------------------------------------- the wrapper


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("test_vit", {}),
        ("test_vit2", {}),  # average pooling, layer scale
        ("test_vit3", {}),  # attention pooling
        ("deit_tiny_patch16_224", {}),
        ("deit_tiny_distilled_patch16_224", {}),  # two class tokens
        ("vit_tiny_patch16_224", {"class_token": False, "global_pool": "avg"}),
        ("vit_tiny_patch16_224", {"global_pool": "avg", "reg_tokens": 3, "no_embed_class": True}),
        ("vit_tiny_patch16_224", {"qk_norm": True, "pre_norm": True, "init_values": 0.1, "global_pool": "max"}),
    ],
)
@torch.no_grad()
def test_with_nothing_put_in_it_is_timm(name, options):
    net = timm.create_model(name, img_size=32, num_classes=0, **options).eval()
    vit.require_plain(net)
    x = drawn(2, 3, 32, 32)
    expected = net(x)
    assert torch.equal(vit.features(net, x), expected)
    dim = net.embed_dim
    nothing = torch.empty(1, 0, dim)
    assert torch.equal(vit.features(net, x, prompts=nothing), expected)
    rest = {
        "prefixes": {0: (nothing, nothing)},
        "adapters": {1: torch.zeros_like},
        "attention_adapters": {1: torch.zeros_like},
    }
    close(vit.features(net, x, **rest), expected, atol=1e-6, rtol=1e-5)
    ours, theirs = vit.tokens(net, x, prompts=drawn(1, 4, dim))
    assert theirs.shape == (2, 4, dim)
    assert ours.shape == net.forward_features(x).shape


@torch.no_grad()
def test_prompts_stand_between_class_token_and_patches():
    net, x, prompts = small(reg_tokens=2, no_embed_class=True), images(), drawn(6, 3, WIDTH)
    first = torch.cat([net.cls_token, net.reg_token], 1).expand(6, -1, -1)
    patches = net.patch_embed(x) + net.pos_embed
    last = net.norm(net.blocks(torch.cat([first, prompts, patches], 1)))
    ours, theirs = vit.tokens(net, x, prompts=prompts)
    assert torch.equal(theirs, last[:, 3:6])
    assert torch.equal(ours, torch.cat([last[:, :3], last[:, 6:]], 1))
    assert torch.equal(vit.features(net, x, prompts=prompts), last[:, 0])


@torch.no_grad()
def test_prefixes_and_adapters_against_a_vit_written_out():
    net, x = small().double(), images().double()
    prefixes = {i: (drawn(4, WIDTH, seed=i).double(), drawn(4, WIDTH, seed=9 + i).double()) for i in (0, 2)}
    matrix = drawn(WIDTH, WIDTH).double()
    adapters, beside = (
        {1: lambda tokens: tokens @ matrix, 2: torch.sin},
        {0: lambda tokens: tokens @ matrix, 1: torch.cos},
    )
    own = {i: (k[None], v[None]) for i, (k, v) in prefixes.items()}
    ours = vit.features(net, x, prefixes=own, adapters=adapters, attention_adapters=beside)
    close(ours, naive(net, x, prefixes, adapters, beside), atol=1e-10, rtol=1e-8)
    close(net(x), naive(net, x, {}, {}), atol=1e-10, rtol=1e-8)


@torch.no_grad()
def test_every_image_has_its_own_prefix():
    net, x, keys, values = small(), images(), drawn(6, 4, WIDTH), drawn(6, 4, WIDTH, seed=1)
    together = vit.features(net, x, prefixes={1: (keys, values)})
    alone = [vit.features(net, x[i : i + 1], prefixes={1: (keys[i : i + 1], values[i : i + 1])}) for i in range(6)]
    close(together, torch.cat(alone))


@torch.no_grad()
def test_scale_and_shift_are_in_the_weights():
    net, x = small(), images()
    sizes = {"patch_embed.proj": WIDTH, "blocks.0.attn.qkv": 3 * WIDTH, "blocks.1.mlp.fc1": 4 * WIDTH, "norm": WIDTH}
    scales = {name: 1 + 0.3 * drawn(size, seed=1) for name, size in sizes.items()}
    shifts = {name: drawn(size, seed=2) for name, size in sizes.items()}
    merged = functional_call(net, vit.scale_shift(net, scales, shifts), (x,))

    def after(name):
        def hook(module, inputs, output):
            shape = (1, -1, 1, 1) if output.ndim == 4 else (-1,)
            return output * scales[name].reshape(shape) + shifts[name].reshape(shape)

        return hook

    for name in sizes:
        net.get_submodule(name).register_forward_hook(after(name))
    close(merged, net(x))


def test_a_layer_without_a_bias_has_no_shift():
    net = small(qkv_bias=False)
    with pytest.raises(ConfigError, match=r"^blocks\.0\.attn\.qkv has no bias"):
        vit.scale_shift(net, {"blocks.0.attn.qkv": torch.ones(48)}, {"blocks.0.attn.qkv": torch.ones(48)})


@pytest.mark.parametrize("make", [lambda: resnet18(SIZE, width=4), lambda: small(block_fn=ResPostBlock)])
@pytest.mark.parametrize("method", [L2P, CodaPrompt])
def test_other_networks_are_refused_in_one_line(make, method):
    with pytest.raises(ConfigError, match=r"^this method needs a plain ViT, such as [^\n]*; here is [^\n]*$"):
        method(make())


def test_inflora_needs_attention():
    with pytest.raises(ConfigError, match=r"^this method needs a ViT[^\n]*; here is a ResNet[^\n]*$"):
        InfLoRA(resnet18(SIZE, width=4))


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ({"name": "l2p", "top_k": 0}, "method.top_k"),
        ({"name": "l2p", "pull": -1}, "method.pull"),
        ({"name": "coda_prompt", "length": 3}, "method.length"),
        ({"name": "coda_prompt", "per_task": 0}, "method.per_task"),
        ({"name": "inflora", "energy": 1.1}, "method.energy"),
        ({"name": "inflora", "rank": 0}, "method.rank"),
        ({"name": "seqlora", "scale": 0}, "method.scale"),
    ],
)
def test_ranges_are_checked(spec, problem):
    with pytest.raises(ConfigError, match=problem):
        METHODS.resolve(spec, "method")


def test_without_a_stream_there_are_10_tasks_to_lay_out_for():
    assert (InfLoRA(small()).tasks, CodaPrompt(small(), blocks=2).per_task) == (10, 10)


def test_what_does_not_fit_together_is_refused():
    with pytest.raises(ConfigError, match=r"method\.top_k=5: the pool has 3"):
        L2P(small(), pool=3)
    with pytest.raises(ConfigError, match=r"method\.blocks=5: this backbone has 3"):
        CodaPrompt(small())


# --------------------------------------------------------------------------------------------------------------- L2P


def test_the_nearest_keys_by_brute_force():
    torch.manual_seed(0)
    pool, query = PromptPool(7, 2, WIDTH, top_k=3), drawn(20, WIDTH)
    prompts, cosines = pool(query)
    for i in range(20):
        score = [float(F.cosine_similarity(query[i], key, dim=0)) for key in pool.keys.detach()]
        best = sorted(range(7), key=lambda j: -score[j])[:3]
        assert torch.equal(prompts[i], torch.cat([pool.prompts[j] for j in best]))
        close(cosines[i], torch.tensor([score[j] for j in best]))


def test_l2p_trains_the_chosen_prompts_their_keys_and_the_new_head():
    method = L2P(small(), pool=5, length=2, top_k=2, pull=0.5)
    task = make_task(0)
    phase = next(method.learn(task))
    batch = next(task.batches(4, 0))
    loss = phase.loss(batch)
    loss.backward()
    query = method.backbone(batch.x)
    cosines, chosen = method.pool.choose(query)
    left = [j for j in range(5) if j not in chosen]
    assert left  # else the next line says nothing
    assert not method.pool.prompts.grad[left].any()
    assert not method.pool.keys.grad[left].any()
    assert method.pool.prompts.grad[chosen.unique()].abs().sum() > 0
    assert all(p.grad is None for p in method.backbone.parameters())
    with torch.no_grad():
        _, theirs = vit.tokens(method.backbone, batch.x, prompts=method.pool.prompts[chosen].flatten(1, 2))
        logits = method.heads[0](theirs.mean(1))
        pulled = (1 - cosines.detach()).sum() / 4
        close(loss.detach(), F.cross_entropy(logits, batch.y) + 0.5 * pulled)


def test_l2p_asks_for_every_image_alone():
    method = run(L2P(small(), pool=6, length=2, top_k=2), range(1)).eval()
    with torch.no_grad():
        whole = method(images())
        alone = torch.cat([method(torch.cat([image[None]] * 3))[:1] for image in images()])
    close(whole, alone)


@pytest.mark.parametrize("readout", [True, False])
def test_prompts_of_no_length_are_a_frozen_vit_with_a_linear_head(readout):
    net = small()
    method = L2P(net, length=0, prompt_readout=readout)
    method.heads.grow(2)
    with torch.no_grad():
        assert torch.equal(method.eval()(images()), method.heads[0](net(images())))


# ------------------------------------------------------------------------------------------------------- CODA-Prompt


def test_new_components_are_orthonormal_to_all_old_ones():
    torch.manual_seed(0)
    old = drawn(5, WIDTH)  # trained, so not orthogonal themselves
    new = orthonormal(4, old)
    close(new @ new.T, torch.eye(4))
    close(new @ old.T, torch.zeros(4, 5))
    crowded = orthonormal(4, drawn(14, WIDTH))  # room for two
    close(crowded[:2] @ drawn(14, WIDTH).T, torch.zeros(2, 14))
    close(crowded.norm(dim=1), torch.ones(4))
    assert orthonormal(3, drawn(20, WIDTH)).isfinite().all()


def test_the_prompt_is_the_papers_weighted_sum():
    method = run(CodaPrompt(small(), per_task=2, length=4, blocks=2), range(2))
    query = drawn(5, WIDTH)
    for block in range(2):
        P, K, A = (torch.cat([method.components[f"{t}.{kind}.{block}"] for t in range(2)]) for kind in "PKA")
        attended = torch.einsum("bd,md->bmd", query, A)
        weights = F.cosine_similarity(attended, K[None], dim=2)
        prompt = torch.einsum("bm,mld->bld", weights, P.reshape(4, 4, WIDTH))
        keys, values = method.prefix(query, block)
        close(keys, prompt[:, :2])
        close(values, prompt[:, 2:])


def test_old_components_do_not_move_and_new_ones_start_outside_them():
    method = run(CodaPrompt(small(), per_task=2, length=4, blocks=2), range(1))
    before = {name: value.clone() for name, value in method.state_dict().items()}
    task = make_task(1)
    next(method.learn(task))
    for block in range(2):
        for kind in "PKA":
            rows = method.all(kind, block).detach()
            assert len(rows) == 4
            close(rows[2:] @ rows.T, torch.eye(4)[2:])
    again = CodaPrompt(small(), per_task=2, length=4, blocks=2)
    again.load_state_dict(before)
    run(again, range(1, 2))
    for name, value in before.items():
        assert torch.equal(again.state_dict()[name], value), name
    start = {n: v for n, v in method.state_dict().items() if n.startswith("components.1/")}
    assert len(start) == 6
    moved = [not torch.equal(again.state_dict()[name], value) for name, value in start.items()]
    assert all(moved)


def test_the_penalty_counts_what_is_not_orthonormal():
    torch.manual_seed(0)
    method = CodaPrompt(small(), per_task=3, length=2, blocks=1, ortho=0.25)
    phase = next(method.learn(make_task(0)))
    close(method.penalty().detach(), torch.tensor(0.0))
    with torch.no_grad():
        method.components["0.K.0"].mul_(2)  # C C^T = 4 I: three squares of 3 among nine
    close(method.penalty().detach(), torch.tensor(3.0))
    batch = next(make_task(0).batches(4, 0))
    plain = F.cross_entropy(method.heads[0](method.features(batch.x)), batch.y)
    close(phase.loss(batch), plain + 0.25 * 3.0)


# ------------------------------------------------------------------------------------------------- the input subspace


def covariance(rank, seed, size=WIDTH):
    x = drawn(size, rank, seed=seed).double() * torch.logspace(0, -2, rank).double()
    return x @ x.T / rank


def gpm(basis, matrix, share):
    """GPM as printed: one basis that grows, one direction at a time."""
    total = float(matrix.square().sum())
    while True:
        left = matrix - basis @ (basis.T @ matrix)
        if 1 - float(left.square().sum()) / total >= share - 1e-12:
            return basis
        u, _, _ = torch.linalg.svd(left)
        basis = torch.linalg.qr(torch.cat([basis, u[:, :1]], 1)).Q


@pytest.mark.parametrize("share", [0.5, 0.9, 0.99, 0.9999, 1.0])
def test_dual_storage_remembers_what_gpm_does(share):
    memory, basis, rest = Subspaces(), torch.empty(WIDTH, 0).double(), False
    probe = drawn(WIDTH, 5).double()
    assert torch.equal(memory.outside("a.b", probe), probe)
    for seed in range(5):
        matrix = covariance(4, seed)
        memory.remember("a.b", matrix, share)
        basis = gpm(basis, matrix, share)
        assert memory.dimension("a.b") == basis.shape[1]
        close(memory.outside("a.b", probe), probe - basis @ (basis.T @ probe), atol=1e-5)
        left = memory.outside("a.b", matrix).square().sum() / matrix.square().sum()
        assert float(left) <= 1 - share + 1e-9
        stored, rest = memory.stored["basis.a.b"], bool(memory.stored["rest.a.b"])
        assert stored.shape[1] <= WIDTH / 2
        close(stored.T @ stored, torch.eye(stored.shape[1]))
        fresh = Subspaces()
        fresh.load_state_dict(memory.state_dict(), strict=True)
        assert torch.equal(fresh.outside("a.b", probe), memory.outside("a.b", probe))
    assert rest or share < 0.999  # the other branch was seen, too


def test_directions_are_the_principal_ones_outside():
    memory = Subspaces()
    memory.remember("layer", covariance(3, 0), 1.0)
    matrix = covariance(6, 1)
    actual = memory.directions("layer", matrix, 4)
    close(actual.T @ actual, torch.eye(4).double())
    close(memory.outside("layer", actual), actual)
    new = memory.outside("layer", matrix)
    explained = (actual.T @ new).square().sum()
    close(explained, torch.linalg.svdvals(new)[:4].square().sum())
    nothing = memory.directions("layer", covariance(3, 0), 4)  # all of it is remembered
    assert not nothing.any()


def test_a_full_memory_leaves_no_direction():
    memory = Subspaces()
    memory.remember("layer", torch.eye(WIDTH).double(), 1.0)
    assert memory.dimension("layer") == WIDTH
    assert not memory.directions("layer", covariance(5, 1), 3).any()
    memory.remember("layer", covariance(5, 1), 1.0)
    assert memory.dimension("layer") == WIDTH


def test_input_matrices_are_the_mean_outer_products():
    net, task = small(), make_task(0)
    seen = []
    x = task.view.test(task.images)
    with torch.no_grad():
        tokens = net._pos_embed(net.patch_embed(x))
        for block in net.blocks[:2]:
            seen.append(block.norm1(tokens).reshape(-1, WIDTH).double())
            tokens = block(tokens)
    net.train()
    actual = input_matrices(net, net, ["blocks.0.attn.qkv", "blocks.1.attn.qkv"], task)
    assert net.training
    assert not net.blocks[0].attn.qkv._forward_pre_hooks
    for i, rows in enumerate(seen):
        close(actual[f"blocks.{i}.attn.qkv"], sum(torch.outer(r, r) for r in rows) / len(rows))


# ----------------------------------------------------------------------------------------------------------- InfLoRA


def make_inflora(**options):
    return InfLoRA(small(), **({"rank": 3, "energy": 0.9, "tasks": 4} | options))


def test_inflora_designs_what_it_does_not_train():
    method = run(make_inflora(), range(2))
    layers = [f"blocks.{i}.attn.qkv" for i in range(3)]
    dimensions = {layer: method.memory.dimension(layer) for layer in layers}
    assert method.facts(1) == {"remembered": dimensions}
    task = make_task(2)
    inputs = method.inputs(task)
    phase = next(method.learn(task))
    for layer in layers:
        A = method.designed[f"2.{layer}"].double()
        assert 0 < dimensions[layer] < WIDTH
        close(A @ A.T, torch.eye(3).double() / 3)  # orthogonal rows over the authors' sqrt(3)
        remembered = torch.eye(WIDTH).double() - method.memory.outside(layer, torch.eye(WIDTH).double())
        assert (A @ remembered).abs().max() < 1e-5  # nothing of earlier tasks gets through
        new = method.memory.outside(layer, inputs[layer])
        top = torch.linalg.svd(new).U[:, :3]
        close(A.T @ A * 3, top @ top.T)
    trained = {id(p) for p in phase.trained}
    expected = {id(p) for name, p in method.trained.named_parameters() if name.startswith("2/")}
    assert trained == expected | {id(p) for p in method.heads[2].parameters()}


def test_inflora_sums_its_updates_into_keys_and_values():
    method = run(make_inflora(), range(3))
    merged = small()
    with torch.no_grad():
        for i in range(3):
            qkv = merged.blocks[i].attn.qkv.weight
            for part, rows in (("key", slice(WIDTH, 2 * WIDTH)), ("value", slice(2 * WIDTH, 3 * WIDTH))):
                for t in range(3):
                    B = method.trained[f"{t}.blocks.{i}.attn.qkv.weight:{part}"]
                    assert B.abs().sum() > 0
                    qkv[rows] += B @ method.designed[f"{t}.blocks.{i}.attn.qkv"]
        features = merged(images())
        close(method.features(images()), features)
        close(method(images()), torch.cat([head(features) for head in method.heads], 1))
    assert method.size() == sum(p.numel() for p in merged.parameters()) + 3 * (2 * WIDTH + 2)


def test_inflora_remembers_what_a_task_ends_with_and_rises():
    method = run(make_inflora(energy=0.5, energy_end=0.9), range(1))
    assert [round(method.share(t), 6) for t in range(6)] == [0.5, 0.6, 0.7, 0.8, 0.8, 0.8]
    for layer, matrix in method.inputs(make_task(0)).items():
        size = torch.linalg.svdvals(matrix).square()
        count = int((size.cumsum(0) / size.sum() < 0.5).sum()) + 1
        assert method.memory.dimension(layer) == count


def test_inflora_goes_on_when_nothing_is_left():
    method = run(make_inflora(energy=1.0), range(3))  # 120 tokens of 16 numbers: the first task takes all room
    assert method.memory.dimension("blocks.0.attn.qkv") == WIDTH
    assert not method.designed["1.blocks.0.attn.qkv"].any()
    with torch.no_grad():
        assert method.eval()(images()).isfinite().all()


# ----------------------------------------------------------------------------------------------------------- SeqLoRA


def test_seqlora_with_one_task_is_pearl_with_a_fixed_rank():
    ours = SeqLora(small(), targets="key", rank=2, scale=2.0)
    theirs = Pearl(small(), targets="key", rank=FixedRule(r=2), reference="given")
    phases = [next(ours.learn(make_task(0))), next(theirs.learn(make_task(0)))]
    assert [phase.name for phase in phases] == ["seqlora", "adapt"]
    with torch.no_grad():
        for target in theirs.targets:
            for factor in "AB":
                ours.update[f"{factor}.{target.label}"].copy_(theirs.tensors[f"0.{factor}.{target.label}"])
        ours.heads.load_state_dict(theirs.heads.state_dict())
    for phase in phases:
        params = phase.trained
        optimizer = torch.optim.SGD(params, lr=0.1)
        for epoch in range(2):
            for batch in make_task(0).batches(8, epoch):
                optimizer.zero_grad()
                phase.loss(batch).backward()
                optimizer.step()
    assert ours.update["B.blocks.0.attn.qkv.weight:key"].abs().sum() > 0
    with torch.no_grad():
        close(ours.eval()(images()), theirs.eval()(images()), atol=1e-6)


def test_seqlora_trains_one_update_further():
    method = run(SeqLora(small(), rank=2), range(1))
    assert {target.part for target in method.targets} == {"key", "value"}
    before = {name: value.clone() for name, value in method.state_dict().items()}
    run(method, range(1, 2))
    changed = {name for name, value in before.items() if not torch.equal(method.state_dict()[name], value)}
    assert changed == {name for name in before if name.startswith("update.")}
    assert set(method.state_dict()) - set(before) == {"heads.blocks.1.weight", "heads.blocks.1.bias"}


def test_seqlora_on_convolutions_merges_like_its_weights():
    torch.manual_seed(1)
    net = resnet18(SIZE, width=4)
    method = run(SeqLora(net, rank=2, fold="unfold", reference="given"), range(2)).eval()
    name = next(target.parameter for target in method.low_rank if target.shape[2:] == (3, 3))
    a, b = method.update[f"A.{name}"], method.update[f"B.{name}"]
    update = torch.einsum("or,rikl->oikl", b, a.reshape(2, -1, 3, 3))
    close(method.weights()[name], net.get_parameter(name) + update)
    assert any(
        isinstance(m, nn.BatchNorm2d) and not torch.equal(m.weight, torch.ones_like(m.weight)) for m in net.modules()
    )


def test_tensors_in_order_whatever_a_file_says():
    tensors = TaskTensors()
    for name in ("1.B", "0.B.x", "0.A.x"):
        tensors.add(name, torch.zeros(2))
    shuffled = TaskTensors()
    shuffled.load_state_dict({name: torch.ones(2) * i for i, name in enumerate(("0/B/x", "1/B", "0/A/x"))})
    assert [float(p.detach()[0]) for p in shuffled.in_order()] == [2, 0, 1]
    assert [float(p.detach()[0]) for p in shuffled.in_order("0.")] == [2, 0]
    assert len(tensors.in_order("1.")) == 1
