"""A classifier besides heads and class statistics is one file: this one compares class means of the first features."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from pearl.methods.base import Expert
from pearl.methods.common.subnetworks import ClassifierOptions, SubNetworkClassifier, SubNetworks
from pearl.methods.pearl import Pearl
from pearl.nn.task_modules import TaskTensors
from pearl.settings.config import check_config
from pearl.settings.parts import CLASSIFIERS, METHODS
from pearl.testing.tiny import images, learn, reload, small_resnet


@dataclass(frozen=True, kw_only=True)
class Means(ClassifierOptions):
    """The nearest class mean in the features of the first sub-network.

    Options:
        scale: factor of the squared distances.
    """

    scale: float = 1.0

    def prepare(self, method: SubNetworks) -> None:
        method.class_means = TaskTensors(buffers=True)

    def of(self, method: SubNetworks) -> SubNetworkClassifier:
        return MeansClassifier(method, self.scale)


class MeansClassifier(SubNetworkClassifier):
    """Negative squared distances to class means."""

    def __init__(self, method: SubNetworks, scale: float) -> None:
        super().__init__(method)
        self.means, self.scale = method.class_means, scale

    @torch.no_grad()
    def fit(self, task) -> None:
        features = self.method.eval().spaces([0])
        rows = torch.cat([features(x)[0] for x, _, _ in task.in_order(32)])
        labels = task.labels - task.first_class
        self.means.add(f"{task.id}.mean", torch.stack([rows[labels == c].mean(0) for c in range(len(task.classes))]))

    def sub_networks(self) -> Sequence[int]:
        return [0]

    def logits(self, outputs: Sequence[Tensor]) -> Tensor:
        means = torch.cat([self.means[f"{t}.mean"] for t in range(len(self.method.heads))])
        return -self.scale * torch.cdist(outputs[0], means).square()

    def forward(self, x: Tensor, task: int | None = None) -> Tensor:
        logits = self.logits(self.method.spaces([0])(x))
        return logits if task is None else logits[:, self.columns(task)]

    def experts(self) -> list[Expert]:
        return [Expert("means", self.forward)]


@pytest.fixture
def registered(monkeypatch):
    monkeypatch.setitem(CLASSIFIERS.builtin, "means", f"{__name__}:Means")


def test_it_is_an_option_of_every_method_with_sub_networks(registered):
    raw = {"recipe": "r", "data": "digits", "stream": {"tasks": 2}, "images": {"size": 8}, "backbone": "resnet18"}
    method = {"name": "pearl", "classifier": {"name": "means", "scale": 2}}
    settings = check_config({**raw, "method": method})
    method = METHODS.build(settings.method, small_resnet())
    assert method.options["classifier"] == Means(scale=2.0)


def test_it_learns_predicts_and_reloads():
    method = Pearl(small_resnet(), classifier=Means(scale=0.5))
    tasks = learn(method, range(3))
    x = images(5)
    with torch.no_grad():
        features = method.task_features(x, 0).double().numpy()
        means = np.concatenate([method.class_means[f"{t}.mean"].double().numpy() for t in range(len(tasks))])
        actual = method(x)
        expected = -0.5 * ((features[:, None] - means) ** 2).sum(2)
        np.testing.assert_allclose(actual.numpy(), expected, rtol=1e-3, atol=1e-4)
        again = reload(method, lambda: Pearl(small_resnet(), classifier=Means(scale=0.5)))
        assert torch.equal(again.eval()(x), actual)
        assert method.forward_passes() == 1
        assert torch.equal(method(x, 1), actual[:, method.columns(1)])
