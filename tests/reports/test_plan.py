"""The dry run: memory, steps and time."""

import re

import pytest
import torch
from torch import nn

from pearl.errors import ConfigError
from pearl.reports.plan import activation_bytes, plan, timed_pass
from pearl.settings.config import load_config
from pearl.tables.model_values import seconds
from pearl.testing.tiny import config
from pearl.training.engine import Engine
from zoo import needs_bf16

SMALL = ["backbone.width=4", "stream.per_class=20", "stream.test_per_class=10", "stream.tasks=[4,3,3]"]


def memory(*overrides, **options):
    (line,) = [line for line in lines(*overrides, **options) if "memory" in line]
    return line


def lines(*overrides, **options):
    small = SMALL[1:] if any(each.startswith("backbone={") for each in overrides) else SMALL  # of another network
    return [*plan(load_config("digits", [*small, *overrides]), **{"timing": False, **options})]


def steps(*overrides):
    """Steps of each phase in tasks of 80, 60 and 60 images: one epoch, in batches of 10."""
    short = [f"train.phases.{phase}.epochs=1" for phase in ("probe", "allocate", "sparcl_ewc")]
    actual = lines("train.epochs=1", *short, "train.batch_size=10", *overrides, long=True)
    each = {m[1]: int(m[2]) for m in (re.match(r"  (\w+): (\d+) steps? in", line) for line in actual) if m}
    (total,) = [int(line.removeprefix("steps: ")) for line in actual if line.startswith("steps: ")]
    assert sum(each.values()) == total
    return each


def numbers(monkeypatch, *overrides):
    """Bytes of data, weights, copy in training and activations; the phase and its batch."""
    monkeypatch.setattr("pearl.reports.plan._GB", 1)
    actual = re.search(
        r"task[s]? ([\d.]+), weights ([\d.]+); phase (\w+): .*optimizer ([\d.]+), .*batch (\d+) ([\d.]+)\)",
        memory(*overrides),
    )
    data, weights, phase, training, batch, activations = actual.groups()
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


# ---------------------------------------------------------------------------------------------------------- steps


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], {"reference": 8, "probe": 12, "adapt": 12}),
        (["method.rank.name=fixed"], {"reference": 8, "adapt": 12}),
        (["method.rank.name=fixed", "method.init=svd"], {"reference": 8, "probe": 12, "adapt": 12}),
        (["method.reference=given"], {"probe": 20, "adapt": 20}),
        (["method.probe_images=0.5"], {"reference": 8, "probe": 6, "adapt": 12}),
        (["method.rank={name: adalora, start: 4, r: 2, then: restart}"], {"reference": 8, "allocate": 12, "adapt": 12}),
        (["method.rank={name: adalora, start: 4, r: 2, then: continue}"], {"reference": 8, "adapt": 12}),
        (["method.classifier={name: statistics, spaces: 2}"], {"reference": 8, "probe": 6, "adapt": 6}),
        (["train.phases.adapt.steps=5"], {"reference": 8, "probe": 12, "adapt": 10}),
        (["engine.max_steps=1"], {"reference": 1, "probe": 2, "adapt": 2}),
        (["method=joint"], {"joint": 8 + 14 + 20}),
        (["method=lwf"], {"lwf_first": 8, "lwf": 12}),
        # the memory of 200 images comes on top: 80 and 140 of them
        (["method=co2l"], {"co2l_first": 8, "co2l": 14 + 20, "co2l_classifier": 8 + 14 + 20}),
        (["method=trire"], {"trire_retain": 20, "trire_revise": 14, "trire_revise_last": 6, "trire_rewind": 14}),
        (["method=sparcl_ewc", "method.rounds=3", "method.remove=0.5"], {"sparcl_ewc": 8 + 7 + 6 + 2 * (6 + 6 + 5)}),
        (["method=fetril"], {"extractor": 8, "fetril": 12}),
        (["method=aper", "method.tuning=finetune"], {"aper_finetune": 8}),
        (
            [
                *("method=hide", "method.e_prompt_layer_idx=[0]"),
                *("backbone={name: timm/test_vit}", "images.size=32", "images.augment=resized_crop"),
            ],
            # features drawn of 4 and 7 old classes, 24 and 120 of each
            {"hide_identity": 20, "hide_identity_align": 10 + 17, "hide_prompt": 20, "hide_align": 48 + 84},
        ),
    ],
)
def test_steps_are_those_of_the_phases(overrides, expected):
    assert steps(*overrides) == expected


def test_what_learning_decides_is_said():
    (line,) = [
        line for line in lines("method=nispa", "backbone={name: convnet, width: 4}") if line.startswith("  nispa:")
    ]
    assert "6 times, or more, depending on training" in line


def test_weights_are_not_read():
    missing = ["backbone.weights=missing.safetensors"]
    assert any("steps: " in line for line in lines(*missing))
    assert "reference" not in steps(*missing), "a backbone with weights needs no reference task"


def test_the_plan_comes_before_a_pass_is_timed(monkeypatch):
    timed = []
    monkeypatch.setattr("pearl.reports.plan.step_seconds", lambda net, size, batch, engine: timed.append(batch) or 0.1)
    whole = plan(load_config("digits", SMALL), device="cpu")
    before = [next(whole) for _ in lines()[:-1]]
    assert any("steps: " in line for line in before) and not timed
    (last,) = whole
    assert last.startswith("time: about ") and timed == [2, 32]
    timed.clear()
    assert lines()[-1] == "time: not estimated (--no-timing)" and not timed


@pytest.mark.parametrize(("seconds_of_two", "timed"), [(0.01, [2, 32]), (1.0, [2, 5]), (60.0, [2])])
def test_a_pass_that_takes_minutes_is_not_timed_again(monkeypatch, seconds_of_two, timed):
    actual = []
    monkeypatch.setattr(
        "pearl.reports.plan.step_seconds", lambda net, size, batch, engine: actual.append(batch) or seconds_of_two
    )
    engine = Engine(config(), device="cpu")
    assert timed_pass(nn.Linear(1, 1), 8, 32, engine) == (timed[-1], seconds_of_two) and actual == timed


def test_tables_estimate_the_time_of_the_same_steps():
    """Of a machine that takes a second for each step, and no time for what is in it."""
    for overrides in ([], ["method=co2l"], ["train.phases.adapt.steps=5"]):
        small = load_config("digits", ["stream.per_class=100", "train.batch_size=36", *overrides])
        expected = [line for line in plan(small, timing=False) if line.startswith("steps: ")]
        assert expected == [f"steps: {(seconds(small, (float('inf'), 1.0)) - 10) / 1.1:,.0f}"]
