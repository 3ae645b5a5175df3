"""Methods with several adapters in a block, or a pool of them, against calculations of their own."""

import math

import pytest
import torch

from pearl.errors import ConfigError
from pearl.lifecycle.small import images, make_task
from pearl.methods.adapters.bottleneck import Bottleneck, mixed
from pearl.methods.adapters.sema import Descriptor, Sema
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
    expected = (descriptor(3 * means) - errors.mean()).abs() / ((errors - errors.mean()) ** 2).mean().sqrt()
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
    found = [(phase.name, len(phase.trained)) for phase in method.learn(make_task(1))]
    # adapter 4, its row of the router 2, the head 2; descriptor 4
    assert found == [("sema_func", 8), ("sema_rd", 4)] * 2
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


def test_a_batch_that_no_descriptor_knows_is_enough_with_detect_batch_size():
    method, task = run(make_sema(detect_batch_size=4), range(1)), make_task(1)
    batches = method.seen(task)
    assert [len(own[1]) for own in batches] == [4] * 6
    (descriptor,) = method.mixture(1).descriptors
    descriptor.remember(torch.cat([own[1] for own in batches]))
    found = torch.stack([descriptor.unusual(own[1]).mean() for own in batches])
    method.exp_threshold = float(found.max() + found.mean()) / 2
    method.mixture(2).descriptors[0].record[0] = 0  # knows everything
    assert method.unfamiliar(task, [1, 2]) == 1
    method.detect_batch_size = None
    assert method.unfamiliar(task, [1, 2]) is None


def test_sema_names_blocks_that_cannot_grow():
    with pytest.raises(ConfigError, match=r"^method\.adapt_start_layer, adapt_end_layer: 3 is no block"):
        make_sema(adapt_end_layer=3)
    with pytest.raises(ConfigError, match=r"^method\.adapt_start_layer=2 is behind adapt_end_layer=1; "):
        make_sema(adapt_start_layer=2, adapt_end_layer=1)
