"""APER and the forms in which the first task adapts a network, against calculations of their own."""

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.models.vision_transformer import ResPostBlock
from torch import nn

from pearl.errors import ConfigError
from pearl.methods.prototypes.aper import Aper
from pearl.methods.prototypes.first_session import FORMS, Adapted, FineTuned, Prompted, ScaleShift
from pearl.methods.prototypes.ranpac import RanPac
from pearl.testing.tiny import images, logits, make_task, small_resnet
from vits import WIDTH, close, drawn, naive, run, small


def unchanged(scale_shift):
    """Scales of 1 and shifts of 0."""
    for scale, shift in zip(scale_shift.scales.parameters(), scale_shift.shifts.parameters(), strict=True):
        nn.init.ones_(scale)
        nn.init.zeros_(shift)


def test_scales_and_shifts_stand_after_every_layer():
    with torch.device("meta"):
        net = timm.create_model("vit_base_patch16_224", num_classes=0)
        made = ScaleShift(net)
    assert sum(p.numel() for p in made.parameters()) == 205_824  # the paper's 0.2 M
    assert {name.removeprefix("blocks.3.") for name in made.layers if name.startswith("blocks.3.")} == {
        "norm1", "attn.qkv", "attn.proj", "norm2", "mlp.fc1", "mlp.fc2",
    }  # fmt: skip
    assert {name for name in made.layers if not name.startswith("blocks.")} == {"patch_embed.proj", "norm"}


@torch.no_grad()
def test_without_scales_and_shifts_a_score_is_the_cosine_to_the_plain_mean():
    method, x = Aper(small()), images()
    unchanged(method.tuned)
    means = []
    for t in range(2):
        task = make_task(t)
        method.observe(task)
        features = method.backbone(task.view.test(task.images)).double()
        means += [features[task.labels == c].mean(0) for c in task.labels.unique()]
    close(method.extract(x)[:, :WIDTH], method.extract(x)[:, WIDTH:], atol=1e-5)
    expected = F.cosine_similarity(method.backbone(x).double()[:, None], torch.stack(means)[None], dim=2)
    close(logits(method).double(), expected, atol=1e-6)


@torch.no_grad()
def test_an_adapter_adds_a_tenth_of_its_output_to_that_of_the_mlp(double):
    net, x, branches = small().double(), images(2).double(), {}
    made = Adapted(net, 3).eval()
    for seed, parameter in enumerate(made.parameters()):
        parameter.copy_(drawn(*parameter.shape, seed=seed))

    def branch(down, up):
        return lambda tokens: 0.1 * ((tokens @ down.weight.T + down.bias).clamp(min=0) @ up.weight.T + up.bias)

    for block in range(3):
        adapter = made.adapters[f"{block}"]
        branches[block] = branch(adapter.down, adapter.up)
    close(made(net, x), naive(net, x, {}, branches), atol=1e-8)


def test_the_halves_are_the_network_as_it_came_and_as_the_first_task_made_it():
    plain, x = small(), images()
    method = run(Aper(small()), range(2)).eval()
    with torch.no_grad():
        close(method.extract(x)[:, :WIDTH], plain(x))
        close(method.extract(x)[:, WIDTH:], method.tuned(plain, x))
        assert not torch.allclose(method.extract(x)[:, WIDTH:], plain(x), atol=0.1)


@pytest.mark.parametrize("tuning", FORMS)
def test_only_the_first_task_trains_and_later_ones_change_no_score(tuning):
    method = Aper(small(), tuning=tuning, ffn_num=4, prompt_token_num=2)
    names = [[phase.name for phase in method.learn(make_task(t))] for t in range(2)]
    assert names == [[f"aper_{tuning}"], []]
    one = run(Aper(small(), tuning=tuning, ffn_num=4, prompt_token_num=2), range(1))
    first, before = logits(one), {name: value.clone() for name, value in one.tuned.state_dict().items()}
    two = run(one, [1, 2])
    assert torch.equal(logits(two)[:, :2], first)
    assert all(torch.equal(two.tuned.state_dict()[name], value) for name, value in before.items())


def test_the_order_of_later_tasks_does_not_matter():
    one, other = (run(Aper(small()), order) for order in ([0, 1, 2], [0, 2, 1]))
    means, swapped = one.statistics.means(), other.statistics.means()
    close(means[[0, 1, 4, 5, 2, 3]], swapped, atol=0, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, {"qk_norm": True}])
def test_deep_prompts_enter_each_block_and_leave_behind_it(options):
    net, x, made = small(**options), images(), Prompted(small(), 2, deep=True)
    made.prompts.copy_(drawn(3, 2, WIDTH))
    tokens = net._pos_embed(net.patch_embed(x))
    for block, prompts in zip(net.blocks, made.prompts, strict=True):
        tokens = block(torch.cat([tokens, prompts.expand(6, -1, -1)], 1))[:, :-2]
    close(made(net, x), net.norm(tokens)[:, 0])


def test_a_network_without_weights_has_one_half():
    alone = Aper(small_resnet())
    assert isinstance(alone.tuned, FineTuned) and alone.statistics.dim == alone.heads.dim
    pretrained = small_resnet()
    pretrained.pretrained = True
    both = run(Aper(pretrained), range(2)).eval()
    with torch.no_grad():
        close(both.extract(images())[:, : both.heads.dim], small_resnet().eval()(images()))
        assert both.statistics.dim == 2 * both.heads.dim
    assert torch.equal(both.backbone.bn1.running_mean, small_resnet().bn1.running_mean)
    assert not torch.equal(both.tuned.copy.bn1.running_mean, small_resnet().bn1.running_mean)


def test_a_vit_of_another_kind_is_fine_tuned():
    assert isinstance(Aper(small(block_fn=ResPostBlock)).tuned, FineTuned)
    assert RanPac(small(block_fn=ResPostBlock), M=4).tuned is None


@pytest.mark.parametrize("tuning", ["ssf", "adapter", "vpt_deep", "vpt_shallow"])
def test_what_needs_a_vit_says_so(tuning):
    with pytest.raises(ConfigError, match=r"^this method needs a plain ViT, such as [^\n]*; here is a ResNet$"):
        Aper(small_resnet(), tuning=tuning)
