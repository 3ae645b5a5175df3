import pytest
import torch

from pearl.lifecycle.conformance import checks, course
from pearl.settings.parts import METHODS
from zoo import ZOO


@pytest.mark.parametrize("check", checks())
@pytest.mark.parametrize("method", ZOO)  # all checks of one method in a row: they share what it has learnt
def test_contract(method, check):
    check(ZOO[method])


def test_what_is_shared_does_not_depend_on_who_asks_first():
    with torch.no_grad():
        assert not course(lambda: ZOO["finetune"]()).wrong


def test_all_methods_are_held_to_it():
    assert {type(make()) for make in ZOO.values()} == {METHODS.load(name) for name in METHODS.own}
