"""Lines whose faults no test noticed when they were written (see docs/results/reliability.md), one test each."""

from types import SimpleNamespace

import torch
import torch.nn.functional as F

from pearl.data.batches import Batch
from pearl.methods.adapters.e2lora import E2Lora
from pearl.methods.adapters.lae import Lae
from pearl.methods.adapters.ssiat import Ssiat
from pearl.methods.prompts.hide import HidePrompt
from pearl.methods.prototypes.aper import Aper
from pearl.methods.prototypes.fetril import FeTril, pseudo_features
from pearl.methods.prototypes.seed import Seed
from pearl.methods.sparse.clnp import Clnp
from pearl.methods.sparse.cpg import START, Cpg
from pearl.methods.sparse.nispa import Nispa
from pearl.methods.sparse.pae import Pae
from pearl.nn.convnet import convnet
from pearl.testing.tiny import SIZE, images, learn, make_task, small_resnet, small_vit


def test_fetrils_loss_is_the_mean_over_features_and_pseudo_features():
    backbone = small_resnet()
    backbone.pretrained = True
    method = FeTril(backbone, extractor="given")
    learn(method, range(1))
    task = make_task(1)
    phase = next(method.learn(task))
    with torch.no_grad():
        features = method.backbone(task.view.test(task.images))
        z, y = pseudo_features(features, task.labels, *method.translations(2))
        expected = F.cross_entropy(method.heads(z), y)
        rows = torch.arange(len(task))
        torch.testing.assert_close(phase.loss(Batch(rows, task.labels, rows)), expected)


def test_nispa_ends_with_the_units_and_the_network_of_the_phase_before_the_accuracy_fell(monkeypatch):
    """Phases reach 90, 89 and 80 %: NISPA keeps the network of the second, with the units chosen after the first."""
    torch.manual_seed(0)
    method = Nispa(convnet(SIZE, width=8), density=0.5, recovery_perc=2.5)
    reached, chosen = iter([90.0, 89.0, 80.0]), []

    def phase(*_, **__):
        return SimpleNamespace(), SimpleNamespace(restore=lambda: next(reached))

    def candidates(activations, share):
        chosen.append((torch.rand(len(method.units)) < 0.5) & ~method.stable)
        return chosen[-1]

    for name, stub in (
        ("phase", phase),
        ("candidates", candidates),
        ("look", lambda kept: None),
        ("rewire", lambda _: None),
    ):
        monkeypatch.setattr(method, name, stub)
    start, trained = method.stable.clone(), []
    bias = dict(method.backbone.named_parameters())["conv1.bias"]
    for number, _ in enumerate(method.learn(make_task(0)), 1):
        bias.data.fill_(number)
        trained.append(number)
    assert trained == [1, 2, 3]
    assert torch.equal(method.stable, start | chosen[0])
    own = method.stable[method.units.layers["conv1"].makes]
    assert own.any()
    assert (bias[own] == 2).all()
    assert not bias[~own].any()


def test_shallow_prompts_of_aper_enter_once_and_stay():
    method, net = Aper(small_vit(), tuning="vpt_shallow", prompt_token_num=3), small_vit()
    (prompts,) = method.tuned.parameters()
    assert prompts.shape == (1, 3, 16)
    prompts.data = torch.randn(prompts.shape)
    with torch.no_grad():
        x = net.norm_pre(net._pos_embed(net.patch_embed(images())))
        first = net.num_prefix_tokens
        x = torch.cat([x[:, :first], prompts.expand(len(x), -1, -1), x[:, first:]], dim=1)
        for block in net.blocks:
            x = block(x)
        x = net.norm(x)
        expected = net.pool(torch.cat([x[:, :first], x[:, first + 3 :]], dim=1))
        torch.testing.assert_close(method.adapted(images()), expected, rtol=1e-4, atol=1e-5)


def test_scales_and_shifts_of_aper_start_near_1_and_0():
    torch.manual_seed(0)
    tuned = Aper(small_vit(), tuning="ssf").tuned
    for tensors, mean in ((tuned.scales, 1.0), (tuned.shifts, 0.0)):
        start = torch.cat([value.detach() for value in tensors.parameters()])
        assert abs(float(start.mean()) - mean) < 0.005
        assert 0.015 < float(start.std()) < 0.025


def test_a_task_of_pae_starts_with_the_norm_layers_of_the_task_before():
    method = Pae(small_resnet(), max_multiplier=1.0, tasks=2)
    learn(method, range(1))
    method.begin(make_task(1))
    fresh, moved = method.backbone.state_dict(), 0
    for name in method.personal:
        assert torch.equal(method.own[f"1.{name}"], method.own[f"0.{name}"])
        moved += int(not torch.equal(method.own[f"1.{name}"], fresh[name]))
    assert moved


def test_free_channels_start_a_task_with_fresh_running_statistics_and_stable_ones_keep_theirs():
    method = Clnp(small_resnet())
    norm = method.backbone.bn1
    norm.running_mean.fill_(3.0)
    norm.running_var.fill_(5.0)
    units = method.units.norms["bn1"]
    method.stable[units[:2]] = True
    method.begin(make_task(1))
    assert norm.running_mean.tolist() == [3.0, 3.0, 0.0, 0.0]
    assert norm.running_var.tolist() == [5.0, 5.0, 1.0, 1.0]


def test_the_last_phase_of_cpg_trains_new_masks():
    method = Cpg(small_resnet(), max_multiplier=1.0, tasks=2)
    learn(method, range(1))
    task = make_task(1)
    head = method.begin(task)
    for mask in method.live[0].parameters():
        mask.data.fill_(0.7)
    next(method.finish(task, task, head))
    assert all((mask == START).all() for mask in method.live[0].parameters())


def test_a_new_expert_of_seed_starts_as_the_first_one():
    method = Seed(small_resnet(), features=3)
    learn(method, range(1))
    next(method.learn(make_task(1)))
    for j in range(1, len(method.bottlenecks)):
        for first, new in zip(method.of_expert(0), method.of_expert(j), strict=True):
            assert torch.equal(first, new)


def test_e2_lora_shortens_the_means_of_the_task_before_in_its_alignment():
    method = E2Lora(small_vit(), draws=2)
    learn(method, range(1))
    phases = {}
    for phase in method.learn(make_task(1)):
        phases[phase.name] = phase
    means, drawn = method.statistics.means(), phases["e2lora_align"].data.means
    torch.testing.assert_close(drawn[:2].double(), 0.95 * means[:2])  # 0.9 + 0.1 * 1 / 2
    torch.testing.assert_close(drawn[2:].double(), means[2:])


def test_hide_aligns_longer_the_more_classes_are_old():
    method = HidePrompt(small_vit(), e_prompt_layer_idx=(0,), length=2, n_centroids=1, identity_draws=3, draws=5)
    lengths = []
    for t in range(3):
        for phase in method.learn(make_task(t)):
            lengths += [(phase.name, len(phase.data))] if "align" in phase.name else []
    assert lengths == [("hide_identity_align", 6), ("hide_align", 10), ("hide_identity_align", 12), ("hide_align", 20)]


def test_lae_trains_a_network_without_weights_on_the_first_task():
    method = Lae(small_resnet())
    names = [[phase.name for phase in method.learn(make_task(t))] for t in range(3)]
    assert names == [["reference"], ["lae_first"], ["lae_head", "lae"]]


def test_adapters_of_ssiat_add_a_tenth_of_their_output():
    method = Ssiat(small_vit()).eval()
    tokens = torch.randn(2, 4, 16)
    for adapter in method.adapters.by_block().values():
        adapter.up.weight.data = torch.randn(adapter.up.weight.shape)
        with torch.no_grad():
            torch.testing.assert_close(adapter(tokens), 0.1 * adapter.up(adapter.down(tokens).relu()))
