import math
import re

import numpy as np
import pytest
import torch
from torch import nn

from pearl.data.augment import View
from pearl.data.batches import derive_seed
from pearl.errors import ConfigError, Interrupted, TrainingError
from pearl.methods.base import Method, Phase
from pearl.methods.bounds.finetune import Finetune
from pearl.methods.bounds.isolation import Isolation
from pearl.methods.bounds.joint import Joint
from pearl.methods.common.by_statistics import Statistics
from pearl.methods.pearl import Pearl
from pearl.nn.rank_rules import FixedRule, RankRule
from pearl.nn.resnet import resnet18
from pearl.settings.sections import ImagesConfig, PhaseConfig
from pearl.storage.checkpoint import read_part, write_part
from pearl.testing.conformance import Cut, Watch
from pearl.testing.tiny import config, learn, logits, make_task
from pearl.training import engine as engine_of
from pearl.training.engine import Engine
from pearl.training.machine import machine
from pearl.training.optimizers import Course, learning_rate, make_optimizers
from pearl.training.resume import Resume
from recorded import Record


def net():
    torch.manual_seed(1)
    return resnet18(8, width=4)


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
@pytest.mark.parametrize("schedule", ["constant", "cosine", "quarter_cosine", "multistep"])
def test_the_loop_is_a_plain_pytorch_loop(optimizer, schedule, double):
    train = {
        "epochs": 3,
        "batch_size": 8,
        "optimizer": optimizer,
        "lr": 0.01,
        "weight_decay": 0.001,
        "schedule": schedule,
        "milestones": [0.5],
        "clip": 0.5,
    }
    settings = config(train=train)
    method = Finetune(net())
    Engine(settings, device="cpu").learn(method, make_task(0))

    plain = Finetune(net())
    torch.manual_seed(derive_seed(0, 0))
    plain.heads.grow(2)
    kinds = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
    extra = {"momentum": 0.9} if optimizer == "sgd" else {}
    optim = kinds[optimizer](plain.parameters(), lr=0.01, weight_decay=0.001, **extra)
    task, step = make_task(0), 0
    for epoch in range(3):
        for batch in task.batches(8, derive_seed(0, 0, 0, epoch)):
            progress = step / 9
            rate = {
                "constant": 0.01,
                "cosine": 0.005 * (1 + math.cos(math.pi * progress)),
                "quarter_cosine": 0.01 * math.cos(99 * math.pi * epoch / (200 * (3 - 1))),
                "multistep": 0.01 if progress < 0.5 else 0.001,
            }[schedule]
            optim.param_groups[0]["lr"] = rate
            optim.zero_grad()
            nn.functional.cross_entropy(plain(batch.x), batch.y).backward()
            nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
            optim.step()
            step += 1
    for (name, ours), theirs in zip(method.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9, msg=name)


@pytest.mark.parametrize(("done", "rate"), [(0, 1.0), (50, 0.5), (100, 0.0)])
def test_cosine_falls_from_lr_to_zero(done, rate):
    assert learning_rate(PhaseConfig(lr=1.0, schedule="cosine"), Course(10, 100, 100), done) == pytest.approx(rate)


def rates_of(course, **settings):
    return [
        learning_rate(PhaseConfig(lr=2.0, schedule="quarter_cosine", **settings), course, s)
        for s in range(course.steps)
    ]


def test_quarter_cosine_is_a_stair_of_the_authors_rates():
    """Those of 5 epochs: cos(99 pi e / 800)."""
    rates = rates_of(Course(3, 15, 15))
    stair = [2.0, 2 * 0.925375, 2 * 0.712639, 2 * 0.393541, 2 * 0.015707]
    assert rates == pytest.approx(np.repeat(stair, 3), abs=2e-6)
    assert np.mean(rates_of(Course(7, 350, 350))) / 2 == pytest.approx(0.64, abs=0.005)


def test_quarter_cosine_of_a_single_epoch_and_of_a_phase_in_steps():
    assert rates_of(Course(4, 4, 4)) == [2.0] * 4
    settings = PhaseConfig(lr=2.0, schedule="quarter_cosine", batch_size=2, steps=7, epochs=1)
    course = Course.of(settings, 6, None)
    actual = [learning_rate(settings, course, step) for step in range(course.steps)]
    assert actual == pytest.approx([2.0] * 3 + [2 * 0.712639] * 3 + [2 * 0.015707], abs=2e-6)


def test_multistep_counts_milestones_as_shares():
    settings = PhaseConfig(lr=1.0, schedule="multistep", milestones=[0.5, 0.75], gamma=0.1)
    rates = [learning_rate(settings, Course(10, 100, 100), done) for done in (0, 49, 50, 75, 99)]
    assert rates == pytest.approx([1, 1, 0.1, 0.01, 0.01])


def test_phases_have_their_own_settings():
    settings = config(train={"epochs": 1, "batch_size": 8, "phases": {"probe": {"epochs": 3, "batch_size": 12}}})
    record = Record()
    engine = Engine(settings, device="cpu", observer=record)
    method = Pearl(net())
    for t in range(2):
        engine.learn(method, make_task(t))
    steps = {facts["phase"]: facts["steps"] for kind, facts in record.events if kind == "phase"}
    assert steps == {"reference": 3, "probe": 6, "adapt": 3}
    epochs = [facts["phase"] for kind, facts in record.events if kind == "epoch"]
    assert epochs == ["reference", "probe", "probe", "probe", "adapt"]
    assert record.steps == 12


def test_a_phase_has_its_own_augmentation():
    """As if the whole recipe had it; a task's view for all else stays the recipe's."""

    def learnt(view, **train):
        method, task = Finetune(net()), make_task(0, view=View(view, channels_last=False))
        settings = config(images=view.model_dump(), train={"epochs": 1, "batch_size": 8} | train)
        Engine(settings, device="cpu").learn(method, task)
        return logits(method), task.view.images

    usual = ImagesConfig(size=8, augment="crop", pad=1)
    changes = {"pad": 3, "flip": False, "brightness": 0.5}
    expected, _ = learnt(usual.model_copy(update=changes))
    actual, images = learnt(usual, phases={"finetune": {"images": changes}})
    assert torch.equal(actual, expected) and images == usual
    halves = {"images": {"pad": 3, "flip": False}, "phases": {"finetune": {"images": {"brightness": 0.5}}}}
    assert torch.equal(learnt(usual, **halves)[0], expected)
    assert not torch.equal(learnt(usual)[0], expected)


def test_max_steps_ends_a_phase():
    record = Record()
    settings = config(engine={"precision": "fp32", "max_steps": 1})
    Engine(settings, device="cpu", observer=record).learn(Finetune(net()), make_task(0))
    assert record.steps == 1


def test_learning_is_a_function_of_the_seed():
    def run(seed):
        method = Finetune(net())
        torch.manual_seed(int(np.random.default_rng().integers(1000)))  # the state of the world must not matter
        Engine(config(seed=seed), device="cpu").learn(method, make_task(0))
        return logits(method)

    assert torch.equal(run(0), run(0))
    assert not torch.equal(run(0), run(1))


class Broken(Finetune):
    phases = ("broken",)

    def learn(self, task):
        self.heads.grow(2)
        self.calls = 0

        def loss(batch):
            self.calls += 1
            return self.loss(batch) * (float("nan") if self.calls == 5 else 1.0)

        yield Phase("broken", self.parameters(), loss)


def test_a_loss_that_is_not_finite_stops_with_the_facts():
    with pytest.raises(
        TrainingError,
        match=r"nan in task 1 \(task1\), phase broken, epoch 2, step 5, lr 0.001; earlier tasks are stored; lower",
    ):
        Engine(config(), device="cpu").learn(Broken(net()), make_task(0))


def test_hooks_run_after_backward_and_after_each_step():
    calls, later = [], []

    class Hooked(Finetune):
        phases = ("hooked",)

        def learn(self, task):
            self.heads.grow(2)
            head = self.heads[0]
            phase = Phase(
                "hooked",
                self.parameters(),
                self.loss,
                after_backward=lambda: head.weight.grad.zero_(),
                after_step=lambda batch: calls.append(len(batch.y)),
            )
            phase.add_after_step(lambda batch: later.append(len(calls)))
            yield phase

    method = Hooked(net())
    task = make_task(0)
    torch.manual_seed(0)
    Engine(config(), device="cpu").learn(method, task)
    assert sum(calls) == 2 * 24
    assert later == [*range(1, len(calls) + 1)]  # behind the first hook, step by step
    torch.manual_seed(derive_seed(0, 0))
    assert torch.equal(method.heads[0].weight, nn.Linear(method.heads.dim, 2).weight)


def test_a_phase_that_trains_what_it_does_not_declare_is_caught():
    class Sneaky(Finetune):
        def learn(self, task):
            head = self.heads.grow(2)

            def loss(batch):
                with torch.no_grad():
                    next(self.backbone.parameters()).add_(1e-3)
                return self.loss(batch)

            yield Phase("finetune", head.parameters(), loss)

    watch = Watch()
    watch.learn(Sneaky(net()), make_task(0))
    assert watch.wrong[0] == "backbone.conv1.weight changed in phase finetune, which does not train it"


def test_unknown_device_is_one_line():
    with pytest.raises(ConfigError, match="device 'warp' cannot be used here"):
        Engine(config(), device="warp")


def test_a_cpu_without_bfloat16_is_one_line(monkeypatch):
    monkeypatch.setattr(engine_of, "computes_bf16", lambda device: False)
    with pytest.raises(ConfigError, match=r"precision=bf16: this CPU does not support it; use engine\.precision="):
        Engine(config(engine={"precision": "bf16"}), device="cpu")
    assert Engine(config(engine={"precision": "auto"}), device="cpu").precision == "fp32"


@pytest.mark.parametrize(("seconds", "chosen"), [(1.0, "bf16"), (0.5, "bf16"), (1.9, "fp32")])
def test_a_cpu_takes_bfloat16_only_if_it_is_faster(seconds, chosen, monkeypatch):
    monkeypatch.setattr(engine_of, "computes_bf16", lambda device: True)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True}, raising=False)
    monkeypatch.setattr(engine_of, "_product_seconds", lambda dtype: seconds if dtype == torch.bfloat16 else 1.5)
    assert Engine(config(engine={"precision": "auto"}), device="cpu").precision == chosen


def test_frozen_rank_rule_equals_fixed_rank():
    """PEARL whose rule always answers r is fixed rank, whatever the probe does."""

    class Frozen(RankRule):
        needs_probe = True

        def choose(self, reference, tuned):
            return FixedRule(r=2).choose(reference, tuned)

    def run(rule, settings):
        method = Pearl(net(), rank=rule)
        engine = Engine(settings, device="cpu")
        for t in range(2):
            engine.learn(method, make_task(t))
        return method

    with_probe, without = run(Frozen(), config()), run(FixedRule(r=2), config())
    shapes = {name: p.shape for name, p in with_probe.tensors.named_parameters()}
    assert shapes == {name: p.shape for name, p in without.tensors.named_parameters()}
    assert with_probe.size() == without.size()


def test_one_task_makes_all_baselines_equal():
    """With a single task, fine-tuning, isolation, joint training and PEARL's reference are the same training."""
    outputs = []
    for make in (Finetune, Isolation, Joint, Pearl):
        method: Method = make(net())
        Engine(config(), device="cpu").learn(method, make_task(0))
        outputs.append(logits(method))
    for other in outputs[:2]:
        torch.testing.assert_close(other, outputs[3])
    # joint draws its head a second time, so only its loss landscape is the same
    assert outputs[2].shape == outputs[3].shape


def test_optimizers_are_fused_on_the_cpu():
    (optimizer,) = make_optimizers(PhaseConfig(), {"": [nn.Parameter(torch.zeros(2))]}, torch.device("cpu"))
    assert optimizer.param_groups[0]["fused"]


@pytest.mark.parametrize(
    "harm", ["none", "shape", "index", "no index", "weight", "other network", "no network", "phase"]
)
def test_a_moment_that_does_not_fit_is_passed_over(harm, tmp_path):
    """As a damaged one is: PEARL's probe begins anew, and ends with the same bits."""

    def make():
        torch.manual_seed(1)
        return Pearl(net(), reference="given")

    engine, whole, cut = Engine(config(), device="cpu"), make(), make()
    engine.learn(whole, make_task(0))
    with pytest.raises(Interrupted):
        engine.learn(cut, make_task(0), Cut(tmp_path, 3))
    path = sorted(tmp_path.iterdir())[-1]
    tensors, manifest = read_part(path)
    kept = {key: manifest[key] for key in ("phase", "steps")}
    average = next(name for name in tensors if name.endswith("exp_avg") and tensors[name].ndim == 4)
    weight = next(name for name in tensors if name.startswith("method/heads.blocks"))
    if harm == "shape":
        tensors[average] = tensors[average].flatten(1).contiguous()
    elif harm == "index":
        tensors["optimizer/999/step"] = torch.tensor(3.0)
    elif harm == "no index":
        tensors["optimizer/x/step"] = torch.tensor(3.0)
    elif harm == "weight":
        tensors[weight] = torch.zeros(5)
    elif harm == "other network":
        tensors["extra/conv1.weight"] = torch.zeros(2, 2)
    elif harm == "no network":
        tensors = {name: value for name, value in tensors.items() if not name.startswith("extra/")}
    elif harm == "phase":
        kept["phase"] = "elsewhere"
    write_part(path, tensors, kept)
    again, told = make(), []
    engine.observer.event = lambda kind, **facts: told.append(facts.get("done"))
    engine.learn(again, make_task(0), Resume(tmp_path))
    assert told[0] == (3 if harm == "none" else 0)
    for name, value in whole.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name


@pytest.mark.parametrize(
    ("device", "precision", "inside"),
    [("cuda", "bf16", "high"), ("cuda", "fp32", "highest"), ("cpu", "bf16", "highest")],
)
def test_float32_is_rounded_only_beside_bfloat16_on_a_gpu(device, precision, inside):
    engine = Engine(config(), device="cpu")
    engine.precision, engine.device = precision, torch.device(device)
    before = machine(torch.device("cpu"))
    with pytest.raises(KeyError), engine._tensor_float32():
        assert torch.get_float32_matmul_precision() == inside
        raise KeyError
    assert torch.get_float32_matmul_precision() == "highest"
    assert machine(torch.device("cpu")) == before


@pytest.mark.parametrize("own", ["ieee", "tf32"])
def test_who_has_set_how_float32_is_rounded_keeps_it(own):
    engine = Engine(config(), device="cpu")
    engine.precision, engine.device = "bf16", torch.device("cuda")
    library = torch.backends.cuda.matmul
    library.fp32_precision = own
    try:
        with engine._tensor_float32():
            assert library.fp32_precision == own
        assert library.fp32_precision == own
    finally:
        library.fp32_precision = "none"


@pytest.mark.parametrize("kind", [Pearl, Isolation])
def test_tensors_of_earlier_isolated_tasks_are_neither_copied_nor_compared(kind):
    method = kind(resnet18(8, width=4))
    learn(method, range(2))
    resume = Resume()
    resume.begin(method, 2)
    names = {*method.state_dict()}
    own = {name for name in names if not name.startswith("backbone.")}
    assert own <= resume.fixed and not any(name.startswith("backbone.") for name in resume.fixed)
    assert {*resume.start} == names - resume.fixed
    resume.begin(method, 1)  # task 1 again: its own tensors may change
    assert resume.fixed == {name for name in own if "blocks.0." in name or re.search(r"s\.0[./]", name)}
    with torch.no_grad():
        method.heads[1].weight.add_(1)
        method.backbone.conv1.weight[0] = torch.nan
    assert resume.changes(method).keys() == {"heads.blocks.1.weight", "backbone.conv1.weight"}


def test_a_method_that_does_not_declare_isolation_itself_has_no_fixed_tensors():
    class Other(Pearl):  # may train an earlier task again
        pass

    method = Other(resnet18(8, width=4))
    learn(method, range(2))
    assert not any(method.is_fixed(name, 2) for name in method.state_dict())


def test_statistics_of_earlier_tasks_are_fixed_but_not_those_of_all_images():
    method = Finetune(resnet18(8, width=4))
    assert not method.is_fixed("class_statistics.tensors.task/0/means/0", 3)
    method = Pearl(resnet18(8, width=4), classifier=Statistics())
    learn(method, range(2))
    fixed = {name for name in method.state_dict() if method.is_fixed(name, 1)}
    statistics = {name for name in fixed if name.startswith("class_statistics.")}
    assert {name.split("/")[1] for name in statistics} == {"0"} and len(statistics) > 5
    assert not any("/space/" in name or "temperature" in name for name in statistics)
