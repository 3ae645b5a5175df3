"""The dry run's estimate of memory."""

import re

import pytest
import torch
from torch import nn

from pearl.errors import ConfigError
from pearl.reports.plan import activation_bytes, plan
from pearl.settings.config import load_config
from zoo import needs_bf16

SMALL = ["backbone.width=4", "stream.per_class=20", "stream.test_per_class=10", "stream.tasks=[4,3,3]"]


def memory(*overrides, **options):
    (line,) = [
        line for line in plan(load_config("digits", [*SMALL, *overrides]), **options).splitlines() if "memory" in line
    ]
    return line


def numbers(monkeypatch, *overrides):
    """Bytes of data, weights, copy in training and activations; the phase and its batch."""
    monkeypatch.setattr("pearl.reports.plan._GB", 1)
    found = re.search(
        r"task[s]? ([\d.]+), weights ([\d.]+); phase (\w+): .*optimizer ([\d.]+), .*batch (\d+) ([\d.]+)\)",
        memory(*overrides),
    )
    data, weights, phase, training, batch, activations = found.groups()
    return float(data), float(weights), float(training), float(activations), phase, int(batch)


def test_the_phase_that_needs_most_counts(monkeypatch):
    batches = ["train.batch_size=4", "train.phases.probe.batch_size=8"]
    *_, training, activations, phase, batch = numbers(monkeypatch, *batches)
    assert (phase, batch) == ("probe", 8)
    *_, sgd, _, phase, batch = numbers(monkeypatch, *batches, "train.optimizer=sgd")
    assert (phase, batch, sgd) == ("probe", 8, training * 3 / 4)
    # the same batch everywhere: the phase with more optimizer states needs more
    *_, adam, _, phase, _ = numbers(monkeypatch, "train.optimizer=sgd", "train.phases.adapt.optimizer=adam")
    assert (phase, adam) == ("adapt", training)
    *_, twice, _, batch = numbers(monkeypatch, "train.batch_size=16")
    assert batch == 16 and twice == 2 * activations


def test_a_batch_is_no_larger_than_its_task(monkeypatch):
    *_, batch = numbers(monkeypatch, "train.batch_size=500")
    assert batch == 80


def test_an_oracle_holds_the_images_of_all_tasks(monkeypatch):
    image = 8 * 8 * 3
    assert numbers(monkeypatch)[0] == 80 * image
    assert numbers(monkeypatch, "method=joint")[0] == 200 * image
    assert "images of all tasks" in memory("method=joint")


@needs_bf16
def test_the_precision_is_that_of_the_run():
    assert "on cpu in bf16" in memory("engine.precision=bf16", device="cpu")


def test_the_device_is_that_of_the_run():
    assert "estimated memory on cpu in fp32" in memory("engine.precision=fp32", device="cpu")
    with pytest.raises(ConfigError, match="device 'abacus' cannot be used here"):
        memory(device="abacus")


def test_activations_are_those_kept_for_the_backward_pass():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(12, 5), nn.Linear(5, 7)

        def forward(self, x):
            return self.two(torch.sigmoid(self.one(x.flatten(1))))

    net = Net().requires_grad_(False)
    assert activation_bytes(net, 2, "fp32") == 4 * (12 + 5)  # input of each layer; sigmoid keeps its output
    assert activation_bytes(net, 2, "bf16") == 2 * (12 + 5)
    assert not any(p.requires_grad for p in net.parameters())
