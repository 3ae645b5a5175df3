"""What every method is held against: where each stage of it starts."""

import pytest
import torch

from pearl.testing.tiny import learn
from zoo import ZOO

ORACLES = [name for name, make in ZOO.items() if make().oracle]


def second_task(make, *, spoilt):
    """What is learnt by the end of a second task, if before it everything the first one trained is `spoilt`, or not."""
    method = make()
    start = {name: value.clone() for name, value in method.state_dict().items()}
    learn(method, range(1))
    if spoilt:
        for name, value in method.state_dict().items():
            if name not in start or not torch.equal(value, start[name]):
                value.fill_(7) if value.is_floating_point() else value.zero_()
    learn(method, range(1, 2))
    return method.state_dict()


def same(one, other, prefix=""):
    return all(torch.equal(value, other[name]) for name, value in one.items() if name.startswith(prefix))


@pytest.mark.parametrize("name", ORACLES)
def test_an_oracle_starts_from_the_reference_at_every_stage(name):
    """What a stage learns is the same to the bit whatever the stage before has left."""
    assert same(second_task(ZOO[name], spoilt=False), second_task(ZOO[name], spoilt=True))


def test_isolation_gives_every_task_the_reference():
    plain, spoilt = (second_task(ZOO["isolation"], spoilt=spoilt) for spoilt in (False, True))
    assert same(plain, spoilt, "networks.1.") and same(plain, spoilt, "heads.blocks.1.")
    assert not same(plain, spoilt, "networks.0.")


def test_fine_tuning_goes_on_from_what_the_task_before_has_left():
    plain, spoilt = (second_task(ZOO["finetune"], spoilt=spoilt) for spoilt in (False, True))
    assert not same(plain, spoilt, "backbone.")


def test_joint_is_among_them():
    assert "joint" in ORACLES
