"""Checks of the conformance suite that an option, a phase and an average have an effect, on methods that have none."""

from typing import Annotated, Literal

import pytest
import torch
import torch.nn.functional as F
from pydantic import Field

from pearl.methods import Method, Phase
from pearl.methods.common.average import Average
from pearl.nn.task_modules import LinearHead
from pearl.testing.conformance import Watch, checks
from pearl.testing.tiny import learn, small_resnet

CHECKS = {check.__name__.removeprefix("shows_"): check for check in checks()}
Weight = Annotated[float, Field(ge=0)]


class Penalised(Method):
    """Phases and terms of the loss of which one has no effect, by `broken`; `limit` never has one."""

    phases = ("warm", "main")
    broken = ""

    def __init__(
        self, backbone, *, decay: Weight = 1e-3, noise: Weight | Literal["auto"] = "auto", limit: Weight = 9.0
    ):
        super().__init__(backbone)
        self.decay, self.noise, self.limit = decay, 0.1 if noise == "auto" else noise, limit

    def learn(self, task):
        head = self.heads.grow(len(task.classes))
        copy = LinearHead(self.heads.dim, len(task.classes))
        yield Phase("warm", copy.parameters(), lambda batch: self.own(copy, task, batch), extra=copy)
        if self.broken != "phase":
            head.load_state_dict(copy.state_dict())
        yield Phase("main", head.parameters(), lambda batch: self.loss(head, task, batch))

    def own(self, head, task, batch):
        with torch.no_grad():
            features = self.backbone.eval()(batch.x)  # whose running statistics stay
        return F.cross_entropy(head(features), batch.y - task.first_class)

    def loss(self, head, task, batch):
        noise = torch.randn(head.weight.shape) if self.noise else torch.zeros(())
        noise = (self.noise if self.broken != "noise" else 0) * (noise * head.weight).sum()
        later = task.id > 1 and self.broken != "decay"  # of no use before the third task
        return self.own(head, task, batch) + noise + (self.decay if later else 0) * head.weight.square().sum()


@pytest.mark.parametrize("broken", ["", "decay", "noise", "phase", "limit"])
def test_an_option_or_a_phase_without_effect_is_named(broken):
    def make():
        exempt = () if broken == "limit" else ("limit",)
        return type("Broken", (Penalised,), {"broken": broken, "may_not_matter": exempt})(small_resnet())

    expected = {"phase": "phase warm has no effect", "": ""}.get(broken, f"the option {broken} has no effect: halved")
    for name in ("options_that_matter", "phases_that_matter"):
        if expected and (name == "phases_that_matter") == (broken == "phase"):
            with pytest.raises(AssertionError, match=expected):
                CHECKS[name](make)
        else:
            CHECKS[name](make)


class Averaged(Method):
    """A network with a moving average of its head."""

    phases = ("averaged",)

    def __init__(self, backbone, *, decay: Weight = 0.5):
        super().__init__(backbone.requires_grad_(False))
        self.average, self.decay = Average(), decay

    def learn(self, task):
        self.heads.grow(len(task.classes))
        self.average.update(self.heads, 1.0)
        phase = Phase("averaged", self.heads.parameters(), lambda batch: F.cross_entropy(self(batch.x), batch.y))
        phase.add_after_step(lambda _: self.average.update(self.heads, self.decay))
        yield phase


@pytest.mark.parametrize(("decay", "actual"), [(0.5, ""), (0.0, "is the network itself"), (1.0, "did not follow")])
def test_an_average_that_stays_or_is_its_network_is_named(decay, actual):
    engine = Watch()
    learn(Averaged(small_resnet(), decay=decay), range(1), engine)
    assert actual in "; ".join(engine.idle) and bool(engine.idle) == bool(actual)
