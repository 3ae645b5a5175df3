"""FlyPrompt against steps that were taken with its authors' code, and its parts."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from test_learners import SIZE, feed, joined, learner, setup, stream
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from pearl.data.batches import Batch
from pearl.errors import ConfigError
from pearl.nn import vit
from pearl.online import flyprompt as flyprompt_file
from pearl.online.flyprompt import FlyPrompt
from pearl.testing.tiny import small_resnet, small_vit

GOLDEN = json.loads(Path(__file__).with_name("golden_flyprompt.json").read_text())  # none of their code is here
DIM = 8


def numbers(seed: int, *shape: int) -> Tensor:
    """Numbers in (-1, 1) that need no generator: exact, and the same everywhere."""
    k = np.arange(1, math.prod(shape) + 1, dtype=np.int64)
    return torch.from_numpy(((k**3 * 7919 + k * seed * 104729 + seed) % 10007 / 10007 * 2 - 1).reshape(shape))


def close(ours: Tensor, authors: Any) -> None:
    torch.testing.assert_close(ours.detach(), torch.tensor(authors, dtype=torch.float64), rtol=1e-8, atol=1e-8)


def network() -> nn.Module:
    net: Any = VisionTransformer(img_size=8, patch_size=4, embed_dim=DIM, depth=3, num_heads=2, num_classes=0).eval()
    with torch.no_grad():
        for i, (name, parameter) in enumerate(net.named_parameters()):
            norm = "norm" in name and name.endswith("weight")
            parameter.copy_(0.5 * numbers(200 + i, *parameter.shape) + float(norm))
    net.dim, net.pretrained = DIM, True
    return net  # type: ignore[no-any-return]


class Plain(SimpleNamespace):
    """Instead of a task: network inputs, each batch as it is."""

    def __init__(self, *args: Any) -> None:
        super().__init__(x=torch.from_numpy(args[4]), y=torch.from_numpy(args[5]))

    def batches(self, size: int, seed: int) -> Iterator[Batch]:
        yield Batch(self.x, self.y, torch.arange(len(self.y)))


def test_three_batches_of_the_authors(monkeypatch: pytest.MonkeyPatch, double: None) -> None:
    """The second expert begins after the second batch; two classes come later, with rows of the authors' head."""
    own, rows = GOLDEN, iter(numbers(311, 4, DIM))
    options: dict[str, Any] = {"experts": 2, "images_per_expert": 8, "length": 2, "blocks": (0, 1), "M": 7}
    made = FlyPrompt(setup(network), **options, ridge=0.5, decays=(0.9, 0.99), lr=0.05)
    made.prompts.copy_(numbers(310, 2, 2, 2, DIM).transpose(0, 1))  # theirs are by block, then by expert
    made.features.matrix = numbers(312, DIM, 7)
    plain = SimpleNamespace(test=lambda x: x)
    made.network.view = plain  # type: ignore[assignment]
    monkeypatch.setattr(type(made.setup), "view", plain)
    monkeypatch.setattr(flyprompt_file, "Task", Plain)
    draw = lambda new, std: torch.stack([next(rows) for _ in new])  # noqa: E731
    monkeypatch.setattr(flyprompt_file.nn.init, "trunc_normal_", draw)
    losses, step = [], made.step
    monkeypatch.setattr(made, "step", lambda x, y: losses.append(step(x, y)))
    for b, labels in enumerate(own["labels"]):
        made.observe(numbers(320 + b, 4, 3, 8, 8), torch.tensor(labels))
    close(torch.stack(losses), own["losses"])
    close(made.prompts[1], own["prompt"])
    close(made.weight, own["weight"])
    close(made.bias, own["bias"])
    for found, theirs in zip(
        made.averages.flatten(0, 1), [part for each in own["averages"] for part in each], strict=True
    ):
        close(found[:, :-1].sum(0), theirs[0])
        close(found[:, -1], theirs[1])
    x = numbers(330, 6, 3, 8, 8)
    with torch.no_grad():
        features = network()(x)
        assert made.expert_of(features).tolist() == own["experts"]
        close(made.features(features) @ made._router[0].T, own["router"])
    newest = torch.tensor(own["experts"]) == 1
    close(made.predict(x)[newest], torch.tensor(own["probabilities"])[newest].tolist())
    theirs = torch.tensor(own["first_prompt"])
    assert 0 < (made.prompts[0] - theirs).abs().max() < 0.3  # theirs moved on by Adam's averages
    made.prompts[0] = theirs
    close(made.predict(x), own["probabilities"])


def test_prompts_are_tokens_that_leave_after_their_block() -> None:
    """Against the sequence itself: appended behind the tokens, and cut off after the block."""
    torch.manual_seed(0)
    made, net = FlyPrompt(setup(small_vit), blocks=(0, 2), length=3, M=5), small_vit()
    x, prompts = torch.randn(2, 3, SIZE, SIZE), torch.randn(2, 2, 3, 16)
    tokens = vit.embedded(net, x)
    count = tokens.shape[1]
    for i, block in enumerate(net.blocks):  # type: ignore[arg-type]
        if i in (0, 2):
            tokens = torch.cat([tokens, prompts[:, i // 2] + net.pos_embed[:, :1]], dim=1)  # type: ignore[index]
        tokens = block(tokens)[:, :count]
    torch.testing.assert_close(made.prompted(x, prompts), vit.pool(net, net.norm(tokens)), atol=1e-5, rtol=1e-5)  # type: ignore[operator]


def test_experts_follow_the_number_of_images() -> None:
    made = learner("flyprompt", images_per_expert=24, experts=3)
    assert isinstance(made, FlyPrompt)
    batches, begun = stream(), []
    for images, labels in batches:
        made.observe(images, labels)
        begun.append(len(made.averages))
    assert begun == [1, 2, 2, 3, 3, 3, 3, 3]  # batches of 12
    assert made.steps == 8  # one iteration each
    assert not any("block" in name for name in made.state_dict())  # the ViT is not stored
    assert made.cross.sum(0).gt(0).all()


def test_earlier_experts_never_change() -> None:
    made = learner("flyprompt", images_per_expert=48, experts=2)
    assert isinstance(made, FlyPrompt)
    batches = stream()
    feed(made, batches[:4])
    prompts, averages = made.prompts[0].clone(), made.averages[0].clone()
    assert torch.equal(made.prompts[1], made.prompts[0])  # the mean of one
    feed(made, batches, 4)
    assert torch.equal(made.prompts[0], prompts) and not torch.equal(made.prompts[1], prompts)
    assert torch.equal(made.averages[0][:, :2], averages)  # the third class has its initial row there


def test_the_router_takes_the_expert_of_its_images() -> None:
    made = learner("flyprompt", images_per_expert=48, experts=2, M=200, ridge=0.01)
    assert isinstance(made, FlyPrompt)
    batches = stream()
    feed(made, batches)
    early, late = (torch.cat([x for x, _ in part]) for part in (batches[:4], batches[4:]))
    with torch.no_grad():
        found = [made.expert_of(made.network(images)) for images in (early, late)]
    for number, experts in enumerate(found):  # they share two classes
        assert (experts == number).float().mean() > 0.7


def test_classes_outside_the_batch_get_no_gradient() -> None:
    made = learner("flyprompt")
    assert isinstance(made, FlyPrompt)
    images, _ = joined(stream())
    made.observe(images[:3], torch.tensor([0, 1, 2]))
    made.moments.zero_()
    before = made.weight.clone()
    made.observe(images[:4], torch.tensor([0, 1, 0, 1]))
    assert torch.equal(made.weight[2], before[2]) and not torch.equal(made.weight[0], before[0])


def test_errors_of_users() -> None:
    with pytest.raises(ConfigError, match="blocks: 4 is too high; the backbone has 3"):
        FlyPrompt(setup(small_vit), blocks=(0, 4), M=5)
    with pytest.raises(ConfigError, match="needs a plain ViT"):
        FlyPrompt(setup(small_resnet), M=5)
