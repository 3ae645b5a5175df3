"""Methods that go on with one module, or one sum of updates, from task to task, against calculations of their own."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call

from pearl.errors import ConfigError
from pearl.methods.adapters.clora import CLora
from pearl.methods.adapters.lae import Lae, LearnablePrefixes, ScaledLoRA
from pearl.methods.adapters.seqlora import SeqLora
from pearl.nn import vit
from pearl.nn.lowrank import from_matrix
from pearl.testing.tiny import images, make_task, small_resnet
from vits import WIDTH, close, naive, run, small

# -------------------------------------------------------------------------------------------------------------- C-LoRA


def after_two_tasks(**options):
    """C-LoRA with updates that are not small, in float64."""
    method = run(CLora(small(), rank=2, **options), range(2)).double()
    for i, factor in enumerate(method.update.parameters()):
        factor.data = torch.randn(factor.shape, generator=torch.Generator().manual_seed(i)).double() / 3
        factor.requires_grad_()
    return method


def products(method, t):
    """B A of each target, of one task."""
    pairs = [(f"{t}.A.{x.label}", f"{t}.B.{x.label}") for x in method.targets]
    return [method.update[b] @ method.update[a] for a, b in pairs]


def test_clora_starts_as_the_sum_of_earlier_updates_and_adds_to_it():
    method = run(CLora(small(), rank=2), range(1))
    said = method(images())
    assert any(product.abs().max() > 1e-4 for product in products(method, 0))
    phase = next(method.learn(make_task(1)))
    assert len(phase.trained) == 4 * 3 + 2  # A and B of the keys and values of three blocks, and the head
    close(method(images())[:, :2], said)
    method = after_two_tasks()
    sums = [a + b for a, b in zip(products(method, 0), products(method, 1), strict=True)]
    weights = dict(method.backbone.named_parameters())
    for target, sum_ in zip(method.targets, sums, strict=True):
        rows = torch.zeros(3 * WIDTH, WIDTH, dtype=torch.float64)
        rows[slice(*target.rows)] = sum_
        weights[target.parameter] = weights[target.parameter] + rows
    x = images().double()
    close(method.features(x), functional_call(method.backbone, weights, (x,)), atol=1e-10)


def test_clora_charges_entries_that_earlier_tasks_have_changed():
    method, task = after_two_tasks(penalty=7.0), make_task(1)
    batch = next(task.batches(6, 0))
    batch = batch._replace(x=batch.x.double())
    charged = method.loss(method.heads[1], task)(batch)
    plain = F.cross_entropy(method.heads[1](method.features(batch.x)), batch.y - 2)
    before, now = products(method, 0), products(method, 1)
    close(charged - plain, 7 * sum((b.abs() * n).square().sum() for b, n in zip(before, now, strict=True)), atol=1e-10)
    label = method.targets[0].label
    A, B = method.update[f"1.A.{label}"], method.update[f"1.B.{label}"]
    gradient = torch.autograd.grad(charged - plain, [B, method.update[f"0.B.{label}"]])
    close(gradient[0], 2 * 7 * (before[0].square() * (B @ A)) @ A.T, atol=1e-9)
    close(gradient[1], torch.zeros_like(B), atol=1e-9)  # the sum of earlier updates is what it was


def test_the_first_task_of_clora_is_that_of_seqlora():
    ours, theirs = run(CLora(small(), rank=2), range(1)), run(SeqLora(small(), rank=2), range(1))
    assert torch.equal(ours(images()), theirs(images()))


def test_clora_on_a_resnet_charges_entries_of_filters():
    """However they are laid out as matrices."""
    method, task = run(CLora(small_resnet(), rank=2, reference="given"), range(2)).eval(), make_task(1)
    batch = next(task.batches(6, 0))
    method.penalty = 1e8
    actual = method.loss(method.heads[1], task)(batch)
    method.penalty = 0.0
    actual = actual - method.loss(method.heads[1], task)(batch)
    total = 0.0
    for target in method.low_rank:
        pairs = [(method.update[f"{t}.B.{target.label}"], method.update[f"{t}.A.{target.label}"]) for t in range(2)]
        before, now = (from_matrix(B @ A, target.shape, "spatial") for B, A in pairs)
        total += 1e8 * float((before * now).square().sum())
    assert total > 1e-2
    close(actual, torch.tensor(total), rtol=1e-3)


# ----------------------------------------------------------------------------------------------------------------- LAE


def make_lae(pet="adapter", **options):
    return Lae(small(), **({"pet": pet, "size": 3, "adapt_blocks": (0, 2)} | options))


def randomised(pet):
    """A module that changes much."""
    with torch.no_grad():
        for i, parameter in enumerate(pet.parameters()):
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i)) / 3)
    return pet


def moved(net, pet, x):
    """What the module makes of features (B, dim), on a ViT that is written out."""
    prefixes, adapters, attention = {}, {}, {}
    if isinstance(pet, LearnablePrefixes):
        for block, (keys, values), (k, v) in zip(pet.blocks, pet.prefixes, pet.scale, strict=True):
            prefixes[block] = (k * keys, v * values)
        return compensated(net, x, prefixes)
    if isinstance(pet, ScaledLoRA):
        net = copy.deepcopy(net)
        for block in (0, 2):
            name = f"blocks.{block}.attn.qkv.weight"
            weight = net.get_parameter(name)
            for rows, part in ((slice(WIDTH, 2 * WIDTH), "key"), (slice(2 * WIDTH, 3 * WIDTH), "value")):
                A, B, s = (pet.factors[f"{kind}.{name}:{part}"] for kind in "ABs")
                weight[rows] += s * B @ A
        return naive(net, x, {}, {})
    for block, adapter in pet.by_block().items():
        down, up, scale = adapter.down, adapter.up, adapter.scale
        attention[block] = lambda n, down=down, up=up, scale=scale: scale * up(F.gelu(down(n)))
    return naive(net, x, prefixes, adapters, attention)


def compensated(net, x, prefixes):
    """Attention matrices written out: those of own tokens as in the joint softmax, those of the prefix sum to 1."""
    features = []
    for image in x:
        tokens = net._pos_embed(net.patch_embed(image[None]))[0]
        for i, block in enumerate(net.blocks):
            seen = block.norm1(tokens)
            q, k, v = (part.unflatten(1, (2, -1)).transpose(0, 1) for part in block.attn.qkv(seen).split(WIDTH, 1))
            keys, values = (
                p.unflatten(1, (2, -1)).transpose(0, 1) for p in prefixes.get(i, (k.new_zeros(0, WIDTH),) * 2)
            )
            weights = (q @ torch.cat([keys, k], 1).mT / (WIDTH // 2) ** 0.5).softmax(2)
            n = keys.shape[1]
            share = weights[..., :n].sum(2, keepdim=True)
            out = weights[..., n:] @ v
            if n:
                out = out + weights[..., :n] / share @ values
            tokens = tokens + block.attn.proj(out.transpose(0, 1).flatten(1))
            tokens = tokens + block.mlp(block.norm2(tokens))
        features.append(net.norm(tokens)[0])
    return torch.stack(features)


@pytest.mark.parametrize("pet", ["adapter", "prefix", "lora"])
@torch.no_grad()
def test_lae_puts_its_module_where_the_authors_have_it(pet):
    method, x = make_lae(pet).double().eval(), images().double()
    if pet != "prefix":  # which is something from the start
        assert torch.equal(method.pet(method.backbone, x), vit.features(method.backbone, x))
    randomised(method.pet)
    actual = method.pet(method.backbone, x)
    assert (actual - method.backbone(x)).abs().max() > 0.01
    close(actual, moved(method.backbone, method.pet, x), atol=1e-10)


def test_lae_asks_the_module_and_its_average_with_one_head():
    method, x = run(make_lae(ema_decay=0.5), range(2)).double().eval(), images().double()
    assert method.forward_passes() == 2
    randomised(method.pet)
    with torch.no_grad():
        said = method(x)
        online = method.heads(moved(method.backbone, method.pet, x)).softmax(1)
        for name, parameter in method.pet.named_parameters():
            parameter.copy_(method.average.tensors[name])
        offline = method.heads(moved(method.backbone, method.pet, x)).softmax(1)
    assert ((online > offline).any(1) & (online < offline).any(1)).any()
    close(said.exp(), torch.maximum(online, offline), atol=1e-10)
    close(method(x), offline.log(), atol=1e-10)  # two that agree are one


@pytest.mark.parametrize("decay", [0.0, 0.7, 1.0])
def test_the_average_of_lae_follows_from_the_second_task_on(decay):
    method = run(make_lae(ema_decay=decay), range(1))
    assert not len(method.average.tensors)
    assert method.forward_passes() == 1
    expected = {name: parameter.detach().clone() for name, parameter in method.pet.named_parameters()}
    start = dict(expected)
    for phase in (phase for t in (1, 2) for phase in method.learn(make_task(t))):
        for _ in range(3):
            with torch.no_grad():
                for parameter in method.pet.parameters():
                    parameter += 0.1
            phase.after_step(None)
            for name, parameter in method.pet.named_parameters():
                expected[name] = decay * expected[name] + (1 - decay) * parameter.detach()
    for name, parameter in method.pet.named_parameters():
        close(method.average.tensors[name], expected[name])
        close(expected[name], {0.0: parameter, 0.7: expected[name], 1.0: start[name]}[decay])


def test_lae_trains_a_new_head_alone_before_the_module_goes_on():
    method = run(make_lae(), range(1))
    before = method.pet.state_dict()
    names = []
    for phase in method.learn(make_task(1)):
        names.append(phase.name)
        head = {id(parameter) for parameter in method.heads[1].parameters()}
        assert ({id(p) for p in phase.trained} == head) == (phase.name == "lae_head")
        phase.loss(next(make_task(1).batches(6, 0))).backward()
        assert all((p.grad is None) == (phase.name == "lae_head") for p in method.pet.parameters())
        assert phase.keep_optimizer == (phase.name == "lae_head")
        assert all(torch.equal(value, before[name]) for name, value in method.pet.state_dict().items())
    assert names == ["lae_head", "lae"]


def test_heads_of_lae_start_small():
    """N(0, 0.001^2) and biases of 0, the authors' code's; PyTorch's own start is as large as the features allow."""
    method = make_lae()
    head = method.heads.grow(500)
    assert 0.0009 < float(head.weight.detach().std()) < 0.0011
    assert head.weight.abs().max() < 0.006
    assert not head.bias.any()
    own = make_lae(head_std=None).heads.grow(500)
    close(own.weight.abs().max().detach(), torch.tensor(0.25), atol=0.01)  # uniform up to 1 / sqrt(16)


def test_lae_on_a_resnet_leaves_norm_layers_as_the_reference_task_left_them():
    method = run(Lae(small_resnet(), size=2), range(1))
    before = copy.deepcopy(method.backbone.state_dict())
    said = method(images())
    run(method, [1])
    assert all(torch.equal(value, before[name]) for name, value in method.backbone.state_dict().items())
    assert (method(images())[:, :2] - said).abs().max() > 1e-4


@pytest.mark.parametrize("pet", ["adapter", "lora", "prefix"])
def test_lae_names_a_block_that_is_not_there(pet):
    with pytest.raises(ConfigError, match=r"^method\.adapt_blocks: 4 is not a block of this backbone, which has 3"):
        make_lae(pet, adapt_blocks=(0, 4))
