"""Methods against numbers that their authors' code gave, on inputs that are made here and there by one formula.

golden.json has them with repository, file and commit. None of that code is needed, and none is here.
"""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from pearl.data.augment import View
from pearl.data.batches import Batch, Task
from pearl.methods.common.memory import Shown
from pearl.methods.common.subspace import Subspaces
from pearl.methods.prompts.coda_prompt import CodaPrompt
from pearl.methods.prompts.pool import PromptPool
from pearl.methods.prototypes.fecam import FeCam
from pearl.methods.rehearsal.derpp import DerPlusPlus
from pearl.settings.sections import ImagesConfig, PhaseConfig
from pearl.testing.tiny import small_vit
from pearl.training.optimizers import Course, learning_rate

GOLDEN = json.loads(Path(__file__).with_name("golden.json").read_text())


def numbers(seed, *shape):
    """Numbers in (-1, 1) that need no generator: exact, and the same everywhere."""
    k = np.arange(1, math.prod(shape) + 1, dtype=np.int64)
    return torch.from_numpy(((k**3 * 7919 + k * seed * 104729 + seed) % 10007 / 10007 * 2 - 1).reshape(shape))


def close(ours, authors, tolerance=1e-8):
    torch.testing.assert_close(
        ours.detach().double(), torch.tensor(authors, dtype=torch.float64), rtol=tolerance, atol=tolerance
    )


class Known(nn.Module):
    """A network whose features of an image filled with the number i are row i of a table."""

    def __init__(self, table, *, pretrained=True):
        super().__init__()
        self.table = nn.Parameter(table)
        self.dim, self.pretrained = table.shape[1], pretrained

    def forward(self, x):
        return self.table[(x[:, 0, 0, 0] * 255).round().long()]


def filled(count, first=0):
    return np.broadcast_to(np.arange(first, first + count, dtype=np.uint8)[:, None, None, None], (count, 1, 1, 3))


@pytest.mark.parametrize(
    ("name", "train", "new", "options"),
    [
        ("fecam", numbers(1, 2, 7, 4).abs(), numbers(2, 5, 4).abs(), {}),
        (
            "fecam of a ViT",
            numbers(3, 2, 7, 4),
            numbers(4, 5, 4),
            {"unit": True, "tukey": 1.0, "alpha2": 0.0, "shrinkages": 1},
        ),
    ],
    ids=["convolutional", "ViT"],
)
def test_fecam(name, train, new, options, double):
    """Over two tasks of one class each, so that both are in the score."""
    method = FeCam(Known(torch.cat([*train, new])), **options)
    view = View(ImagesConfig(size=1), channels_last=False)
    for t in range(2):
        task = Task(t, f"task{t}", (f"{t}",), t, filled(7, 7 * t), np.full(7, t), view, torch.device("cpu"))
        assert not [*method.learn(task)]
    x = view.test(torch.from_numpy(filled(5, 14).copy()))
    close(-method(x).T, GOLDEN[name]["distances"], 2e-5)  # theirs are in float32


def test_dual_gpm():
    """Of the first task their code remembers one direction less than those that reach the share; here all that do.

    It is asked here for the share of as many as theirs are.
    """
    golden, memory, kinds = GOLDEN["dual gpm"], Subspaces(), []
    for t, step in enumerate(golden["steps"]):
        inputs = numbers(10 + t, 6, 8) * torch.tensor(golden["scales"], dtype=torch.float64).roll(2 * t)
        memory.remember("layer", inputs.T @ inputs / 6, step["share"] - 1e-9)
        inside = torch.eye(8, dtype=torch.float64) - memory.outside("layer", torch.eye(8, dtype=torch.float64))
        close(inside, step["inside"], 1e-5)  # a basis is kept in float32
        kinds.append("retain" if memory.stored["rest.layer"] else "remove")
        assert (kinds[-1], memory.stored["basis.layer"].shape[1]) == (step["stored"], step["columns"])
    assert kinds[0] == "remove" and kinds[-2:] == ["retain", "retain"]


@pytest.mark.parametrize("epochs", [2, 5, 20])
def test_quarter_cosine(epochs):
    settings, course = PhaseConfig(lr=1.0, schedule="quarter_cosine"), Course(3, 3 * epochs, 3 * epochs)
    actual = [learning_rate(settings, course, 3 * epoch + 2) for epoch in range(epochs)]
    assert actual == pytest.approx(GOLDEN["quarter cosine"]["rates"][f"{epochs}"], abs=1e-9)


def test_coda_prompt(double):
    golden, dim = GOLDEN["coda-prompt"], 16
    method = CodaPrompt(small_vit(), per_task=2, length=4, blocks=1, ortho=golden["ortho"])
    components = {"P": numbers(20, 6, 4, dim).flatten(1), "K": numbers(21, 6, dim), "A": numbers(22, 6, dim)}
    for kind, rows in components.items():
        for t in range(2):
            method.components.add(f"{t}.{kind}.0", rows[2 * t : 2 * t + 2])
    keys, values = method.prefix(numbers(23, 3, dim), 0)
    close(keys, golden["keys"])
    close(values, golden["values"])
    close(method.ortho * method.penalty(), golden["penalty"])


def test_l2p(double):
    golden, pool = GOLDEN["l2p"], PromptPool(5, 2, 12, top_k=3)
    pool.prompts.data, pool.keys.data = numbers(30, 5, 2, 12), numbers(31, 5, 12)
    query = numbers(32, 4, 12)
    assert pool.choose(query)[1].tolist() == golden["chosen"]
    tokens, cosines = pool(query)
    close(tokens.sum(2), golden["tokens"])
    close(cosines.sum(1).mean(), golden["reduce_sim"])


def test_derpp(monkeypatch, double):
    """With a head that has all classes, as theirs does: here after the last task."""
    golden = GOLDEN["der++"]
    table = torch.cat([numbers(46, 6, 12), numbers(42, 5, 12), numbers(44, 5, 12)])
    method = DerPlusPlus(Known(table), alpha=golden["alpha"], beta=golden["beta"])
    weight, bias = numbers(40, 4, 12), numbers(41, 4)
    for t in range(2):
        head = method.heads.grow(2)
        head.weight.data, head.bias.data = weight[2 * t : 2 * t + 2], bias[2 * t : 2 * t + 2]
    view = View(ImagesConfig(size=1), channels_last=False)
    x = view.test(torch.from_numpy(filled(16).copy()))
    nothing = torch.zeros(5, dtype=torch.int64)
    shown = [
        Shown(x[6:11], nothing, nothing, numbers(43, 5, 4)),
        Shown(x[11:], torch.tensor([3, 2, 1, 0, 3]), nothing, None),
    ]
    monkeypatch.setattr(method.memory, "draw", lambda count, view: shown.pop(0))
    task = Task(1, "task2", ("c", "d"), 2, filled(6), np.array([0, 1] * 3), view, torch.device("cpu"))
    loss = method.loss(task, Batch(x[:6], torch.tensor([2, 3] * 3), torch.arange(6)))
    close(loss, golden["loss"])
    loss.backward()
    close(torch.cat([head.weight.grad for head in method.heads]), golden["gradient"])
    close(method._logits, golden["stored"])
