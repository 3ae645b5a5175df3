"""What a declaration says of a task, against the task itself."""

import pytest

from pearl.settings.declared import PhaseSpec, UpcomingTask, declared
from pearl.settings.parts import METHODS
from pearl.testing.tiny import make_task


@pytest.mark.parametrize(("per_class", "extra"), [(12, 0), (12, 5), (1, 0), (1, 1), (2, 0), (7, 3)])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.3, 0.5, 0.9, 1.0])
def test_as_many_images_are_kept_as_are_not_held_out(per_class, extra, share):
    task = UpcomingTask(((per_class, per_class + extra),), {}, pretrained=False)
    kept, held = make_task(0, per_class, extra=extra).hold_out(share)
    assert task.kept(share) == len(kept) and task.images == len(kept) + len(held)


@pytest.mark.parametrize(
    ("options", "pretrained", "first"),
    [
        ({}, False, 1),
        ({}, True, 0),
        ({"reference": "given"}, False, 0),
        ({"extractor": "first_task"}, True, 1),
        ({"reference": "auto"}, True, 0),
    ],
)
def test_the_reference_is_the_first_tasks_where_it_is_not_given(options, pretrained, first):
    tasks = [UpcomingTask(((4,),) * n, options, pretrained) for n in (1, 2)]
    assert [bool(PhaseSpec("p", "reference").sizes(task)) for task in tasks] == [first == 1, False]
    assert [bool(PhaseSpec("p", "adapted").sizes(task)) for task in tasks] == [first == 0, True]


def test_names_alone_come_once_in_every_task():
    assert declared(METHODS.load("er")) == {"er": PhaseSpec("er")}
    assert PhaseSpec("er").sizes(UpcomingTask(((2, 3), (4,)), {}, pretrained=False)) == [4]
