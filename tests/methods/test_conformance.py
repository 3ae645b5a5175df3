import pytest
import torch

from pearl.lifecycle.conformance import checks, course
from pearl.lifecycle.saved import task_rows
from pearl.lifecycle.small import CLASSES
from pearl.settings.parts import METHODS
from zoo import ZOO


@pytest.mark.parametrize("check", checks())
@pytest.mark.parametrize("method", ZOO)  # all checks of one method in a row: they share what it has learnt
def test_contract(method, check):
    check(ZOO[method])


@pytest.mark.parametrize("method", ZOO)
def test_manifests_tell_how_many_classes_a_task_has(method):
    """A manifest has the shapes of what its task added; opening a model counts its classes in them."""
    state = course(ZOO[method]).methods[-1].state_dict()
    shapes = {name: list(value.shape) for name, value in state.items()}
    assert [task_rows(task, shapes) for task in range(3)] == [{CLASSES}] * 3


def test_what_is_shared_does_not_depend_on_who_asks_first():
    with torch.no_grad():
        assert not course(lambda: ZOO["finetune"]()).wrong


def test_all_methods_are_held_to_it():
    assert {type(make()) for make in ZOO.values()} == {METHODS.load(name) for name in METHODS.own}
