"""Steps that are recorded and replayed. All around CUDA's part, with a recorder for the CPU."""

import pytest
import torch

from pearl.methods.bounds.finetune import Finetune
from pearl.methods.pearl import Pearl
from pearl.nn.rank_rules import FixedRule
from pearl.settings.sections import PhaseConfig
from pearl.testing.conformance import Operations, shows_capturable_phases_do_the_same_for_every_batch
from pearl.testing.tiny import config, logits, make_task, small_resnet
from pearl.training import graphs
from pearl.training.engine import Engine, Observer
from pearl.training.graphs import WARM_UP, GraphedStep
from pearl.training.optimizers import make_optimizers, set_rate
from zoo import ZOO


class Rerun:
    """A recorder whose graph is the Python code itself; counts what it did."""

    recorded = replayed = ran = 0

    def run(self, work):
        type(self).ran += 1
        return work()

    def record(self, work):
        type(self).recorded += 1
        result = torch.full((), float("nan"))

        def resume():
            type(self).replayed += 1
            result.copy_(work())

        return resume, result


class Losses(Observer):
    def __init__(self):
        self.losses = []

    def event(self, kind, **facts):
        if kind == "epoch":
            self.losses.append(facts["loss"])


@pytest.fixture
def rerun(monkeypatch):
    for count in ("recorded", "replayed", "ran"):
        monkeypatch.setattr(Rerun, count, 0)
    return Rerun


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("make", [lambda: Finetune(small_resnet()), lambda: Pearl(small_resnet(), rank=FixedRule(r=2))])
def test_a_replayed_step_learns_what_a_plain_one_does(make, optimizer, rerun, monkeypatch):
    """24 images in batches of 7: three of a size and a smaller one an epoch; the rate falls at every step."""
    train = {"epochs": 4, "batch_size": 7, "optimizer": optimizer, "lr": 0.01, "schedule": "cosine", "clip": 1.0}

    def learnt():
        seen = Losses()
        engine = Engine(config(train=train), device="cpu", observer=seen)
        engine.recorder = rerun
        method = make()
        for t in range(2):
            engine.learn(method, make_task(t))
        return logits(method), seen.losses

    replayed, losses = learnt()
    phases = 2  # of either method
    assert rerun.recorded == phases
    assert rerun.replayed == phases * (4 * 3 - WARM_UP)
    assert rerun.ran == phases * (WARM_UP + 4)
    monkeypatch.setattr(graphs, "WARM_UP", 1000)
    plain, plain_losses = learnt()
    assert rerun.recorded == phases  # no more
    assert torch.equal(replayed, plain)
    assert losses == plain_losses


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "sgd"])
def test_rates_that_are_tensors_are_rates(optimizer):
    settings = PhaseConfig(optimizer=optimizer, lr=0.5, weight_decay=0.01)
    actual = []
    for graphed in (False, True):
        weight = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
        (optim,) = make_optimizers(settings, {"": [weight]}, torch.device("cpu"), graphed=graphed)
        for step in range(3):
            set_rate([optim], 0.1 / (step + 1))
            weight.grad = torch.tensor([0.3, float(step)])
            optim.step()
        actual.append(weight.detach())
    torch.testing.assert_close(actual[1], actual[0])
    assert not torch.equal(actual[0], torch.tensor([1.0, -2.0]))


def test_without_the_option_or_a_gpu_nothing_is_recorded():
    for settings in (config(), config(engine={"cuda_graphs": True})):
        assert Engine(settings, device="cpu").recorder is None


def test_the_option_does_not_change_a_result_s_name():
    assert config(engine={"cuda_graphs": True}).id == config(engine={"cuda_graphs": False}).id


def test_phases_that_are_not_capturable_are_not_recorded(rerun):
    engine = Engine(config(), device="cpu")
    engine.recorder = rerun
    method = ZOO["er"]()
    engine.learn(method, make_task(0))
    assert rerun.recorded == rerun.ran == 0


def test_what_reads_the_device_is_found():
    with pytest.raises(AssertionError, match="waits for the device"), Operations():
        torch.ones(2).sum().item()


def test_a_phase_that_is_not_capturable_is_found():
    class Drawn(Finetune):
        """Goes through every other batch twice."""

        count = 0

        def loss(self, batch):
            self.count += 1
            return sum(super(Drawn, self).loss(batch) for _ in range(1 + self.count % 2))

    with pytest.raises(AssertionError, match="phase finetune is not capturable"):
        shows_capturable_phases_do_the_same_for_every_batch(lambda: Drawn(small_resnet()))


def test_a_step_of_another_size_is_not_replayed():
    seen = []
    step = GraphedStep(lambda batch: seen.append(len(batch.x)) or batch.x.sum(), Rerun())
    big, small = ((make_task(0).batches(size, 0)) for size in (8, 5))
    big, small = next(big), next(small)
    for batch in [big] * (WARM_UP + 1) + [small, big]:
        torch.testing.assert_close(step(batch), batch.x.sum())
    assert seen == [8] * (WARM_UP + 1) + [5, 8]
