import pytest
import torch

from pearl.settings.parts import METHODS
from pearl.storage.stored_task import task_rows
from pearl.testing.conformance import checks, course
from pearl.testing.tiny import CLASSES
from zoo import ZOO


def manifests_tell_how_many_classes_a_task_has(make):
    """A manifest has the shapes of what its task added; opening a model counts its classes in them."""
    shapes = {name: list(value.shape) for name, value in course(make).methods[-1].state_dict().items()}
    assert [task_rows(task, shapes) for task in range(3)] == [{CLASSES}] * 3


@pytest.mark.parametrize("check", [*checks(), manifests_tell_how_many_classes_a_task_has])
@pytest.mark.parametrize("method", ZOO)  # all checks of one method in a row: they share what it has learnt
def test_contract(method, check):
    check(ZOO[method])


def test_what_is_shared_does_not_depend_on_who_asks_first():
    with torch.no_grad():
        assert not course(lambda: ZOO["finetune"]()).wrong


def test_all_methods_are_held_to_it():
    assert {type(make()) for make in ZOO.values()} == {METHODS.load(name) for name in METHODS.builtin}
