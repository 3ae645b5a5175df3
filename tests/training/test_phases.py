"""What phases can ask of the engine: progress, parts of a task, groups, other batches, another phase's optimizer."""

import math
from functools import partial

import pytest
import torch
from torch import nn

from odd import ODD, Groups, Projects, TwoViews, clones, make
from pearl.data.batches import derive_seed
from pearl.errors import ConfigError
from pearl.methods.bounds.finetune import Finetune
from pearl.settings.config import check_config
from pearl.settings.parts import METHODS
from pearl.settings.sections import PhaseConfig
from pearl.testing import conformance
from pearl.testing.tiny import config, learn, make_task, small_resnet
from pearl.training.engine import Engine, Observer
from pearl.training.optimizers import Course, learning_rate, make_optimizers, take_over

CHECKS = ["strict_reload", "resume_inside_a_task_bit_exact", "resume_after_a_task_bit_exact", "past_data_closed"]
CHECKS += ["only_the_phase_changes", "a_last_batch_of_one", "classes_of_one_image", "bfloat16"]


MAKERS = {name: partial(make, name) for name in ODD}


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", ODD)
def test_the_contract_holds(name, check):
    getattr(conformance, f"shows_{check}")(MAKERS[name])


class Told(Observer):
    def __init__(self):
        self.phases = []

    def event(self, kind, **facts):
        if kind == "phase":
            self.phases.append(facts)


def taught(name, settings=None, tasks=2):
    told, method = Told(), make(name)
    engine = Engine(settings or config(), device="cpu", observer=told)
    seconds = [engine.learn(method, make_task(t)) for t in range(tasks)]
    return method, told.phases, seconds


# ----------------------------------------------------------------------------------------------------------- progress


def test_hooks_know_how_far_a_phase_is():
    method, _, _ = taught("Ramp")
    assert method.seen["0"].tolist() == [6, 6, 21]  # two epochs of three steps, counted from 1 after each


def test_what_is_planned_is_what_will_be_done():
    method, _, _ = taught("Ramp", config(engine={"precision": "fp32", "max_steps": 2}), tasks=1)
    assert method.seen["0"].tolist() == [2, 2, 3]


# ----------------------------------------------------------------------------------------------------- parts of a task


def test_images_held_out_are_of_every_class_and_of_no_other_part():
    task = make_task(0, per_class=10, extra=1)
    torch.manual_seed(0)
    train, held = task.hold_out(0.3)
    assert held.labels.bincount().tolist() == [3, 3] and train.labels.bincount().tolist() == [7, 8]
    rows = {image.numpy().tobytes() for image in task.images}
    parts = [{image.numpy().tobytes() for image in part.images} for part in (train, held)]
    assert parts[0] | parts[1] == rows and not parts[0] & parts[1]
    torch.manual_seed(0)
    assert torch.equal(task.hold_out(0.3)[1].images, held.images)
    torch.manual_seed(1)
    assert not torch.equal(task.hold_out(0.3)[1].images, held.images)


@pytest.mark.parametrize(("per_class", "share", "left"), [(1, 0.5, 1), (2, 0.01, 1), (2, 0.99, 1), (20, 0.01, 19)])
def test_a_class_keeps_an_image_and_gives_one(per_class, share, left):
    train, _ = make_task(0, per_class=per_class).hold_out(share)
    assert train.labels.bincount().tolist() == [left, left]


def test_parts_end_with_their_task():
    task = make_task(0)
    part = task.part(torch.tensor([3, 1]))
    assert torch.equal(part.images, task.images[[3, 1]]) and part.labels.tolist() == [0, 0]
    (batch,) = part.batches(8, 0)
    assert sorted(batch.rows.tolist()) == [0, 1]
    task.close()
    with pytest.raises(RuntimeError, match="is over"):
        part.images  # noqa: B018


def test_the_number_of_phases_may_depend_on_what_was_learnt():
    method, phases, seconds = taught("Choosy")
    for t in range(2):
        count = len(method.scores[f"{t}"])
        assert [p["phase"] for p in phases if p["task"] == t] == ["more"] * count
        assert [*seconds[t]] == ["more", "more 2", "more 3"][:count]
        assert all(p["images"] == 18 for p in phases), "18 of 24 images stay for training"
    assert max(len(method.scores[f"{t}"]) for t in range(2)) > 1


# -------------------------------------------------------------------------------------------- settings of optimizers


@pytest.fixture
def grouped(monkeypatch):
    """A method that has groups."""
    monkeypatch.setitem(METHODS.builtin, "grouped", f"{Groups.__module__}:Groups")
    return "grouped"


def test_groups_have_settings_of_their_own(grouped, double):
    """A head by SGD and a body by Adam, each as a plain loop would."""
    own = {"body": {"lr": 0.01}, "head": {"optimizer": "sgd", "lr": 0.1, "momentum": 0.0}}
    phase = {"groups": own, "schedule": "cosine"}
    settings = config(method=grouped, train={"epochs": 1, "batch_size": 8, "phases": {"groups": phase}})
    method, _, _ = taught("Groups", settings, tasks=1)
    plain = Finetune(small_resnet())
    torch.manual_seed(derive_seed(0, 0))
    head = plain.heads.grow(2)
    body, sgd = torch.optim.Adam(plain.backbone.parameters()), torch.optim.SGD(head.parameters(), lr=1)
    for step, batch in enumerate(make_task(0).batches(8, derive_seed(0, 0, 0, 0))):
        share = (1 + math.cos(math.pi * step / 3)) / 2
        body.param_groups[0]["lr"], sgd.param_groups[0]["lr"] = 0.01 * share, 0.1 * share
        plain.zero_grad()
        plain.loss(batch).backward()
        body.step()
        sgd.step()
    for ours, theirs in zip(method.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def test_an_unknown_group_is_one_line(grouped):
    for group, hint in (("haed", "did you mean 'head'"), ("x", "choose from body, head")):
        with pytest.raises(ConfigError, match=rf"train\.phases\.groups\.groups\.{group}: no such group; {hint}"):
            config(method=grouped, train={"phases": {"groups": {"groups": {group: {"lr": 1}}}}})
    with pytest.raises(
        ConfigError, match=r"train\.phases\.finetune\.groups\.head: no such group; its parameters have no groups"
    ):
        config(train={"phases": {"finetune": {"groups": {"head": {"lr": 1}}}}})
    with pytest.raises(ConfigError, match=r"groups\.head\.lr: input should be greater than 0"):
        config(method=grouped, train={"phases": {"groups": {"groups": {"head": {"lr": -1}}}}})
    with pytest.raises(ConfigError, match="nesterov needs a momentum above 0"):
        config(train={"optimizer": "sgd", "nesterov": True, "momentum": 0.0})


def test_what_was_set_of_a_group_is_read_back():
    settings = config(train={"phases": {"finetune": {"steps": 3}}, "groups": {"x": {"lr": 0.5}}})
    again = check_config(settings.model_dump(mode="json"))
    assert again == settings and again.id == settings.id
    assert settings.model_dump(mode="json")["train"]["groups"] == {"x": {"lr": 0.5}}
    assert settings.train.phase("finetune").group("x").lr == 0.5
    assert settings.train.phase("finetune").group("y").lr == settings.train.lr


@pytest.mark.parametrize(
    ("settings", "rates"),
    [
        ({"schedule": "cosine", "end_lr": 0.2}, [1, 0.6, 0.2]),
        ({"warmup": 0.5}, [0, 1, 1]),
        ({"warmup": 0.5, "warmup_lr": 0.4}, [0.4, 1, 1]),
        ({"schedule": "cosine", "warmup": 0.25}, [0, 0.5, 0]),
    ],
)
def test_rates(settings, rates):
    actual = [learning_rate(PhaseConfig(lr=1.0, **settings), Course(1, 8, 8), done) for done in (0, 4, 8)]
    assert actual == pytest.approx(rates)


def test_a_warm_up_rises_to_where_the_schedule_is():
    settings = PhaseConfig(lr=1.0, schedule="cosine", warmup=0.5)
    plain = PhaseConfig(lr=1.0, schedule="cosine")
    course = Course(1, 8, 8)
    assert learning_rate(settings, course, 2) == pytest.approx(learning_rate(plain, course, 2) / 2)
    assert learning_rate(settings, course, 4) == learning_rate(plain, course, 4)


def test_a_phase_can_be_so_many_steps_long():
    settings = config(train={"epochs": 9, "steps": 4, "batch_size": 8})
    _, phases, _ = taught("Ramp", settings)
    assert [p["steps"] for p in phases] == [4, 4]


def test_nesterov_is_torch_s(double):
    method = Finetune(small_resnet())
    settings = config(train={"epochs": 1, "optimizer": "sgd", "lr": 0.01, "nesterov": True, "batch_size": 8})
    learn(method, range(1), Engine(settings, device="cpu"))
    plain = Finetune(small_resnet())
    torch.manual_seed(derive_seed(0, 0))
    plain.heads.grow(2)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.01, momentum=0.9, nesterov=True)
    for batch in make_task(0).batches(8, derive_seed(0, 0, 0, 0)):
        optimizer.zero_grad()
        plain.loss(batch).backward()
        optimizer.step()
    for ours, theirs in zip(method.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


class Again:
    """A task whose epochs all have the same images."""

    def __init__(self, task):
        self.task = task

    def __len__(self):
        return len(self.task)

    def batches(self, size, seed, *, skip=0):
        return self.task.batches(size, 7, skip=skip)


class Same(Engine):
    """Trains on such tasks."""

    def train(self, method, task, phase, position, resume):
        phase.data = Again(task)
        super().train(method, task, phase, position, resume)


def test_an_optimizer_is_handed_on():
    """Two phases of an epoch are then one of two epochs."""

    def weights(method, epochs):
        engine = Same(config(train={"batch_size": 8, "lr": 0.01, "epochs": epochs}), device="cpu")
        engine.learn(method, make_task(0))
        return clones(method)

    one, two, apart = Finetune(small_resnet()), make("HandsOn"), make("HandsOn")
    apart.keep_optimizer = False
    whole = weights(one, 2)
    assert all(torch.equal(a, b) for a, b in zip(weights(two, 1), whole, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(weights(apart, 1), whole, strict=True))


def test_momentum_is_handed_on_to_a_phase_with_more_parameters():
    first, second = (nn.Parameter(torch.zeros(2)) for _ in range(2))
    settings = config(train={"optimizer": "sgd", "lr": 1.0, "momentum": 0.5}).train.phase("finetune")

    def step(params, before):
        optimizers = make_optimizers(settings, {"": params}, torch.device("cpu"))
        take_over(optimizers, before)
        for parameter in params:
            parameter.grad = torch.ones(2)
        optimizers[0].step()
        return optimizers

    step([first, second], step([first], []))
    assert first.tolist() == [-2.5, -2.5]  # 1, then 1 and half of that
    assert second.tolist() == [-1.0, -1.0]


# --------------------------------------------------------------------------------------------------------------- hooks


def test_a_projection_sees_the_values_before_the_step(double):
    """Half of every step is taken back: SGD at half the rate."""
    train = {"epochs": 1, "batch_size": 8, "optimizer": "sgd", "momentum": 0.0}
    half, whole = make("Projects"), Finetune(small_resnet())
    Engine(config(train={**train, "lr": 0.02}), device="cpu").learn(half, make_task(0))
    Engine(config(train={**train, "lr": 0.01}), device="cpu").learn(whole, make_task(0))
    for ours, theirs in zip(half.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def test_a_projection_that_takes_all_back_leaves_all_as_it_was():
    class Nothing(Projects):
        def learn(self, task):
            (phase,) = super().learn(task)
            phase.project = lambda before: [p.copy_(old) for p, old in zip(phase.trained, before, strict=True)]
            yield phase

    method = Nothing(small_resnet())
    before = clones(method.backbone)
    Engine(config(), device="cpu").learn(method, make_task(0))
    assert all(torch.equal(a, b) for a, b in zip(before, clones(method.backbone), strict=True))


# ------------------------------------------------------------------------------------------------------- other batches


def test_a_phase_trains_on_what_it_is_given():
    """Features drawn for all classes seen: 10 of each of 4 in the second task."""
    _, phases, _ = taught("Align")
    assert [(p["phase"], p["images"]) for p in phases] == [("images", 24), ("draws", 20), ("images", 24), ("draws", 40)]


def test_two_views_are_two_draws():
    task = make_task(0)
    batch = next(task.part(torch.arange(24), TwoViews(task.view)).batches(8, 0))
    assert batch.x.shape == (8, 2, 3, 8, 8)
    assert not torch.equal(batch.x[:, 0], batch.x[:, 1])
