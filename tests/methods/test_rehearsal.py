"""Methods with a memory, a teacher or a penalty, against calculations that share nothing with them."""

from collections import Counter

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy import stats
from sklearn.metrics.pairwise import cosine_similarity
from torch import nn

from pearl.data.augment import View
from pearl.data.batches import Batch, Task
from pearl.errors import ConfigError, DataError
from pearl.export.programs import _trace, network
from pearl.methods.base import Phase, own_loss
from pearl.methods.bounds.finetune import Finetune
from pearl.methods.common.average import Average
from pearl.methods.common.memory import Memory, Shown
from pearl.methods.common.teacher import distillation, frozen
from pearl.methods.regularization.ewc import OnlineEwc
from pearl.methods.regularization.lwf import Lwf
from pearl.methods.regularization.penalty import Anchor
from pearl.methods.rehearsal.derpp import DerPlusPlus, distance
from pearl.methods.rehearsal.er import Er
from pearl.methods.rehearsal.er_ace import ErAce, among
from pearl.nn.resnet import resnet18
from pearl.nn.task_modules import CosineHeads, TaskHeads
from pearl.settings.parts import METHODS
from pearl.settings.sections import ImagesConfig
from pearl.testing.tiny import CLASSES, SIZE, config, learn, logits, make_task, reload
from pearl.training.engine import Engine

pytestmark = pytest.mark.slow

REHEARSAL = {"er": Er, "er_ace": ErAce, "derpp": DerPlusPlus}


def net():
    torch.manual_seed(1)
    return resnet18(SIZE, width=4)


def numbered(labels, *, id=0, side=2, augment="none"):
    """A task whose image i is filled with the number i."""
    labels = np.asarray(labels)
    images = np.broadcast_to(np.arange(len(labels), dtype=np.uint8)[:, None, None, None], (len(labels), side, side, 3))
    view = View(ImagesConfig(size=side, augment=augment, pad=1), channels_last=False)
    return Task(id, f"task{id + 1}", ("a", "b"), 0, images, labels, view, torch.device("cpu"))


def batches(task, size):
    """In order, without augmentation."""
    for rows in torch.arange(len(task)).split(size):
        yield Batch(torch.zeros(len(rows), 3, 2, 2), task.labels[rows], rows)


def fill(memory, task, size=7, classes=2):
    memory.open(task, classes)
    for batch in batches(task, size):
        memory.offer(task, batch)
    return memory.images[: len(memory), 0, 0, 0].tolist()


def random_batch(count=6, first=0, classes=CLASSES):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(count, 3, SIZE, SIZE, generator=generator)
    return Batch(x, first + torch.arange(count) % classes, torch.arange(count))


def same_bits(one, other):
    ours, theirs = one.state_dict(), other.state_dict()
    for name in theirs:
        assert torch.equal(ours[name], theirs[name]), name


def not_uniform(counts, kept, of):
    """p-value that each of `of` images was kept with equal probability, `kept` at a time without replacement."""
    counts = np.asarray(counts, dtype=float)
    expected = counts.sum() / of
    statistic = ((counts - expected) ** 2).sum() / (expected * (1 - kept / of)) * (of - 1) / of
    return stats.chi2.sf(statistic, of - 1)


# ------------------------------------------------------------------------------------------------------------ memory


@pytest.mark.parametrize("size", [1, 7, 16])
def test_a_reservoir_keeps_every_image_with_the_same_probability(size):
    counts = Counter()
    for seed in range(500):
        torch.manual_seed(seed)
        kept = fill(Memory(10), numbered(np.zeros(40, int)), size)
        assert len(set(kept)) == 10
        counts.update(kept)
    assert not_uniform([counts[i] for i in range(40)], 10, 40) > 0.001


def test_the_test_of_uniformity_sees_a_bias():
    counts = Counter()
    for seed in range(500):  # 10 of 40, where the last ten images are twice as likely
        p = np.where(np.arange(40) < 30, 1.0, 2.0)
        counts.update(np.random.default_rng(seed).choice(40, 10, replace=False, p=p / p.sum()).tolist())
    assert not_uniform([counts[i] for i in range(40)], 10, 40) < 1e-6


def test_balanced_classes_differ_by_one_at_most():
    labels = np.concatenate([np.zeros(60, int), np.tile([1, 2, 2, 2], 10), np.full(5, 3), np.full(50, 4)])
    task, memory = numbered(labels), Memory(14, "balanced")
    torch.manual_seed(0)
    memory.open(task, 5)
    for batch in batches(task, 4):
        memory.offer(task, batch)
        assert len(memory) == min(14, int(batch.rows[-1]) + 1)
        held = Counter(memory.labels[: len(memory)].tolist())
        offered = Counter(labels[: int(batch.rows[-1]) + 1].tolist())
        for one, count in held.items():  # less than another class only by one, or because there were no more
            assert count >= max(held.values()) - 1 or count == offered[one]
        values = memory.images[: len(memory), 0, 0, 0].tolist()
        assert len(set(values)) == len(values)
        assert memory.labels[: len(memory)].tolist() == labels[values].tolist()
    assert memory.facts() == {"capacity": 14, "images": 14, "per_class": dict(sorted(held.items()))}
    assert sorted(held.values()) == [2, 3, 3, 3, 3]


@pytest.mark.parametrize("order", ["blocks", "mixed"])
def test_balanced_is_uniform_within_a_class(order):
    labels = np.repeat([0, 1], [30, 10]) if order == "blocks" else np.tile([0, 0, 0, 1], 10)
    counts = Counter()
    for seed in range(400):
        torch.manual_seed(seed)
        counts.update(fill(Memory(8, "balanced"), numbered(labels)))
    for one, many in ((0, 30), (1, 10)):
        assert not_uniform([counts[i] for i in np.flatnonzero(labels == one)], 4, many) > 0.001


def test_balanced_with_fewer_places_than_classes_keeps_the_first():
    memory = Memory(3, "balanced")
    fill(memory, numbered(np.repeat([0, 1, 2, 3], 5)), classes=4)
    assert sorted(memory.labels.tolist()) == [0, 1, 2]


def test_a_draw_takes_different_images_and_augments_them_as_the_task_does():
    task, memory = numbered(np.arange(20) % 2, id=3), Memory(12)
    assert memory.draw(4, task.view) is None
    torch.manual_seed(0)
    kept = fill(memory, task)
    shown = memory.draw(5, task.view)
    values = (shown.x[:, 0, 0, 0] * 255).round().int().tolist()
    assert len(set(values)) == 5 and set(values) <= set(kept)
    assert shown.y.tolist() == [value % 2 for value in values]
    assert shown.tasks.tolist() == [3] * 5 and shown.logits is None
    assert sorted((memory.draw(100, task.view).x[:, 0, 0, 0] * 255).round().int().tolist()) == sorted(kept)


def test_draws_are_torchs_global_ones_and_augmentation_is_new_each_time():
    task, memory = numbered(np.zeros(20, int), side=6, augment="crop"), Memory(12)
    fill(memory, task)
    torch.manual_seed(5)
    first, second = memory.draw(12, task.view), memory.draw(12, task.view)
    torch.manual_seed(5)
    assert torch.equal(memory.draw(12, task.view).x, first.x)
    assert not torch.equal(first.x.sort(0)[0], second.x.sort(0)[0])


def test_a_draw_is_uniform():
    task, memory = numbered(np.zeros(30, int)), Memory(30)
    fill(memory, task)
    counts = Counter()
    for seed in range(300):
        torch.manual_seed(seed)
        counts.update((memory.draw(6, task.view).x[:, 0, 0, 0] * 255).round().int().tolist())
    assert not_uniform([counts[i] for i in range(30)], 6, 30) > 0.001


@pytest.mark.parametrize("policy", ["reservoir", "balanced"])
def test_a_reloaded_memory_goes_on_as_if_nothing_had_been(policy):
    first, second = numbered(np.arange(20) % 2), numbered(2 + np.arange(30) % 2, id=1)

    def later(memory):
        torch.manual_seed(9)
        return fill(memory, second, classes=4)

    torch.manual_seed(0)
    memory = Memory(8, policy, logits=True)
    fill(memory, first)
    fresh = Memory(8, policy, logits=True)
    fresh.load_state_dict({name: value.clone() for name, value in memory.state_dict().items()}, strict=True)
    assert len(fresh) == 8
    assert later(fresh) == later(memory)
    same_bits(fresh, memory)
    Memory(8, policy).load_state_dict(Memory(8, policy).state_dict(), strict=True)  # before the first task


def test_a_memory_of_none_draws_nothing():
    before = torch.get_rng_state()
    for policy in ("reservoir", "balanced"):
        memory = Memory(0, policy)
        assert fill(memory, numbered(np.zeros(20, int))) == []
        assert memory.draw(4, make_task(0).view) is None
    assert torch.equal(torch.get_rng_state(), before)


def test_images_of_another_size_are_refused():
    memory = Memory(4)
    fill(memory, numbered([0, 1]))
    with pytest.raises(DataError, match=r"images of task 2 \(task2\) are 3x3, those in memory 2x2; give"):
        memory.open(numbered([0, 1], id=1, side=3), 2)


def test_a_class_that_was_not_known_has_the_images_lowest_logit():
    memory = Memory(7, logits=True)
    given = torch.tensor([[1.0, -2.0], [3.0, 4.0], [0.0, 0.5]])
    for task, classes in ((numbered([0, 1, 0]), 2), (numbered([2, 3, 2], id=1), 4)):
        memory.open(task, classes)
        (batch,) = batches(task, 3)
        memory.offer(task, batch, torch.cat([given, given + 7], dim=1)[:, :classes])
    known = [[1, -2, 8, 5], [3, 4, 10, 11], [0, 0.5, 7, 7.5]]
    expected = [[1, -2, -2, -2], [3, 4, 3, 3], [0, 0.5, 0, 0], *known]
    assert memory.logits[:6].tolist() == expected
    assert memory.tasks[:6].tolist() == [0, 0, 0, 1, 1, 1]
    memory.open(numbered([4], id=2), 5)
    assert memory.logits[:6].tolist() == [[*row, min(row)] for row in expected]


def test_an_exported_program_holds_no_images():
    method = Er(net(), buffer_size=10)
    learn(method, range(1))
    assert "memory.images" in method.state_dict()
    program = _trace(network(method, config().images), SIZE)
    assert program.state_dict and not [name for name in program.state_dict if "memory" in name]


def test_memory_is_no_parameter_and_is_recorded():
    for make in REHEARSAL.values():
        method = make(net(), buffer_size=10)
        learn(method, range(2))
        plain = Finetune(net())
        learn(plain, range(2))
        assert method.size() == plain.size()
        facts = method.facts(1)["memory"]
        assert facts["images"] == facts["capacity"] == sum(facts["per_class"].values()) == 10
        assert make.rehearsal


# ------------------------------------------------------------------------------------------------------------ losses


def cross_entropy(scores, labels):
    scores = np.asarray(scores, dtype=np.float64)
    return float(np.mean([np.log(np.exp(row).sum()) - row[y] for row, y in zip(scores, labels, strict=True)]))


def with_shown(method, *shown, monkeypatch):
    """The method with a memory that shows these, one after the other."""
    learn(method, range(2))
    left = list(shown)
    monkeypatch.setattr(method.memory, "draw", lambda count, view: left.pop(0))
    return method.eval()


def some(method_columns=2 * CLASSES):
    stored = torch.linspace(-1, 1, 4 * method_columns).view(4, -1)
    return Shown(random_batch(4).x + 1, torch.tensor([0, 1, 2, 3]), torch.tensor([0, 0, 1, 1]), stored)


def test_er_is_one_cross_entropy_over_new_and_shown_images(monkeypatch):
    shown, batch = some(), random_batch(6, first=2)
    method = with_shown(Er(net()), shown, monkeypatch=monkeypatch)
    with torch.no_grad():
        loss = method.loss(make_task(1), batch).item()
        scores = np.concatenate([method(batch.x), method(shown.x)])
    assert loss == pytest.approx(cross_entropy(scores, [*batch.y.tolist(), *shown.y.tolist()]), rel=1e-5)


def test_separate_passes_of_er_differ_in_batch_statistics_alone(monkeypatch):
    shown, batch, actual = some(), random_batch(6, first=2), {}
    method = with_shown(Er(net()), *[shown] * 4, monkeypatch=monkeypatch)
    for training in (False, True):
        for method.passes in ("together", "separate"):
            actual[training, method.passes] = method.train(training).loss(make_task(1), batch).item()
    assert actual[False, "separate"] == pytest.approx(actual[False, "together"], rel=1e-5)
    assert abs(actual[True, "separate"] - actual[True, "together"]) > 0.01
    assert Er(net(), passes="separate").passes == "separate"


@pytest.mark.parametrize(("alpha", "beta"), [(0.1, 0.5), (0.3, 1.0), (0.0, 0.5), (0.1, 0.0)])
def test_derpp_is_the_papers_formula_over_the_classes_seen(alpha, beta, monkeypatch):
    """Only there: the paper's head has the classes to come as well, and their logits are remembered."""
    dark, plain, batch = some(), some(), random_batch(6, first=2)
    shown = [dark] * bool(alpha) + [plain] * bool(beta)
    method = with_shown(DerPlusPlus(net(), alpha=alpha, beta=beta), *shown, monkeypatch=monkeypatch)
    with torch.no_grad():
        loss = method.loss(make_task(1), batch).item()
        new, old, again = (np.asarray(method(x), dtype=np.float64) for x in (batch.x, dark.x, plain.x))
    gap = np.mean((old - dark.logits.numpy()) ** 2)
    expected = cross_entropy(new, batch.y) + alpha * gap + beta * cross_entropy(again, plain.y)
    assert loss == pytest.approx(expected, rel=1e-5)


def test_derpp_holds_classes_down_that_an_old_image_was_given_before():
    """Every logit has the share of a mean over all classes, and those of later classes are drawn to the lowest."""
    method = DerPlusPlus(net(), buffer_size=100)
    learn(method, range(2))
    method.memory.open(make_task(2), 6)
    stored = method.memory.logits[:24]  # of images of task 1
    logits = torch.randn(24, 6, requires_grad=True)
    distance(logits, stored).backward()
    lowest = stored[:, :2].amin(1, keepdim=True).expand(-1, 4)
    torch.testing.assert_close(logits.grad[:, 2:], 2 * (logits.detach()[:, 2:] - lowest) / (24 * 6))
    torch.testing.assert_close(logits.grad[:, :2], 2 * (logits.detach()[:, :2] - stored[:, :2]) / (24 * 6))


def test_derpp_stores_the_logits_of_the_step_that_offered_the_image():
    method = DerPlusPlus(net(), buffer_size=100)
    task, seen = make_task(0), []
    (phase,) = [*take_first(method.learn(task))]
    method.train()
    for batch in task.batches(8, seed=0):
        before = frozen(method).train()
        phase.loss(batch)
        phase.after_step(batch)
        seen.append((batch.rows, before(batch.x).detach()))
    rows, expected = (torch.cat(part) for part in zip(*seen, strict=True))
    assert len(method.memory) == 24
    torch.testing.assert_close(method.memory.logits[:24], expected)
    assert torch.equal(method.memory.images[:24], task.images[rows])


def take_first(phases):
    yield next(phases)


def test_er_ace_masks_what_is_not_in_the_batch():
    scores = torch.tensor([[1.0, 5.0, 2.0, 0.5], [3.0, 5.0, -1.0, 4.0]])
    labels = torch.tensor([2, 3])
    assert among(scores, labels).tolist() == [[-np.inf, -np.inf, 2.0, 0.5], [-np.inf, -np.inf, -1.0, 4.0]]
    loss = F.cross_entropy(among(scores, labels), labels)
    assert loss.item() == pytest.approx(cross_entropy(scores[:, 2:], [0, 1]), rel=1e-6)


def test_er_ace_has_two_losses_and_no_gradient_for_absent_classes(monkeypatch):
    shown, batch = some(), random_batch(6, first=2)
    method = with_shown(ErAce(net()), shown, None, monkeypatch=monkeypatch)
    with torch.no_grad():
        loss = method.loss(make_task(1), batch).item()
        new, old = (np.asarray(method(x), dtype=np.float64) for x in (batch.x, shown.x))
    expected = cross_entropy(new[:, 2:], batch.y - 2) + cross_entropy(old, shown.y)
    assert loss == pytest.approx(expected, rel=1e-5)
    method.loss(make_task(1), batch).backward()  # with an empty memory
    assert not method.heads[0].weight.grad.any() and method.heads[1].weight.grad.any()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0, 7.0])
def test_distillation_is_the_divergence(temperature):
    student, teacher = torch.randn(5, 6, dtype=torch.float64), torch.randn(5, 6, dtype=torch.float64)

    def softened(scores):
        powers = np.exp(scores.numpy() / temperature)
        return powers / powers.sum(1, keepdims=True)

    p, q = softened(teacher), softened(student)
    expected = (p * np.log(p / q)).sum() / 5
    assert distillation(student, teacher, temperature).item() == pytest.approx(expected, rel=1e-10)
    assert distillation(teacher, teacher, temperature).item() == pytest.approx(0, abs=1e-12)


def test_limits_of_the_temperature():
    """Hot: squared distance of centred logits. Cold: by how much the student prefers another class."""
    student, teacher = torch.randn(5, 6, dtype=torch.float64), torch.randn(5, 6, dtype=torch.float64)
    gap = student - teacher
    hot = (gap - gap.mean(1, keepdim=True)).square().sum() / (2 * 6 * 5)
    assert 1e6 * distillation(student, teacher, 1e3).item() == pytest.approx(hot.item(), rel=0.01)
    cold = (student.max(1)[0] - student.gather(1, teacher.argmax(1, keepdim=True))[:, 0]).mean()
    assert 1e-3 * distillation(student, teacher, 1e-3).item() == pytest.approx(cold.item(), rel=0.01)


def test_lwf_is_new_cross_entropy_and_old_distillation():
    method = Lwf(net(), kd_lambda=3.0, temperature=2.0)
    learn(method, range(1))
    task, batch = make_task(1), random_batch(6, first=2)
    (phase,) = [*take_first(method.learn(task))]
    teacher = {name: value.clone() for name, value in method.state_dict().items() if "blocks.1" not in name}
    with torch.no_grad():
        for parameter in method.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    method.eval()
    before = Lwf(net())
    before.load_state_dict(teacher)
    with torch.no_grad():
        loss, scores, old = phase.loss(batch).item(), method(batch.x).double(), before.eval()(batch.x).double()
    p, q = (np.exp(part.numpy() / 2) for part in (old, scores[:, :2]))
    p, q = (part / part.sum(1, keepdims=True) for part in (p, q))
    expected = cross_entropy(scores[:, 2:], batch.y - 2) + 3 * (p * np.log(p / q)).sum() / 6
    assert loss == pytest.approx(expected, rel=1e-4)


def test_lwf_names_its_first_task():
    method, names = Lwf(net()), []
    for t in range(3):
        names += [phase.name for phase in method.learn(make_task(t))]
    assert names == ["lwf_first", "lwf", "lwf"]


# ----------------------------------------------------------------------------------------------------------- penalty


def test_fisher_is_that_of_gradients_image_by_image():
    method, task = OnlineEwc(net()), make_task(0)
    learn(method, range(1))
    torch.manual_seed(4)
    actual = method.fisher(task)
    torch.manual_seed(4)
    order = [*task.batches(1, int(torch.randint(2**62, ())))]
    x, y = torch.cat([batch.x for batch in order]), torch.cat([batch.y for batch in order])
    parameters = {name: p.detach() for name, p in method.named_parameters()}
    buffers = dict(method.named_buffers())

    def log_p(weights, image, label):
        scores = torch.func.functional_call(method.eval(), {**weights, **buffers}, (image[None],))
        return scores.log_softmax(1)[0].gather(0, label[None])[0]

    each = torch.func.vmap(torch.func.grad(log_p), in_dims=(None, 0, 0))(parameters, x, y)
    p = torch.softmax(method(x), 1).gather(1, y[:, None])[:, 0].detach()
    assert actual.keys() == each.keys()
    for name, gradient in each.items():
        expected = torch.einsum("n,n...->...", p, gradient.square()) / len(y)
        torch.testing.assert_close(actual[name], expected, rtol=1e-3, atol=1e-7, msg=name)


def test_anchor_adds_up_and_leaves_new_parameters_free():
    anchor = Anchor()
    a, b = torch.tensor([1.0, 2.0]), torch.tensor(3.0)
    assert anchor({"a": a}).item() == 0
    anchor.move({"a": a}, {"a": torch.tensor([1.0, 4.0])})
    assert anchor({"a": a + 2, "b": b}).item() == 1 * 4 + 4 * 4
    anchor.move({"a": a + 1, "b": b}, {"a": torch.tensor([2.0, 0.0]), "b": torch.tensor(5.0)}, gamma=0.5)
    assert anchor({"a": a, "b": b - 1}).item() == pytest.approx(2.5 * 1 + 2 * 1 + 5)
    fresh = Anchor()
    fresh.load_state_dict(anchor.state_dict(), strict=True)
    assert fresh({"a": a, "b": b - 1}).item() == anchor({"a": a, "b": b - 1}).item()
    assert not [*anchor.parameters()]


def test_fisher_of_tasks_runs_on():
    both = OnlineEwc(net(), gamma=0.25)
    learn(both, range(1))
    first = {n: t.clone() for n, t in both.state_dict().items() if n.startswith("anchor.importances.")}
    actual = []
    both.fisher = lambda task: actual.append(OnlineEwc.fisher(both, task)) or actual[0]
    learn(both, range(1, 2))
    for name, value in both.state_dict().items():
        if name.startswith("anchor.importances."):
            second = actual[0][name.removeprefix("anchor.importances.").replace("/", ".")]
            torch.testing.assert_close(value, 0.25 * first[name] + second if name in first else second)
    values = {n: p for n, p in both.state_dict().items() if n.startswith("anchor.values.")}
    now = dict(both.named_parameters())
    assert all(torch.equal(v, now[n.removeprefix("anchor.values.").replace("/", ".")]) for n, v in values.items())
    assert len(values) == len(now)


def test_a_heavy_penalty_holds_what_mattered():
    def moved(e_lambda):
        method = OnlineEwc(net(), e_lambda=e_lambda)
        learn(method, range(1))
        importance = {n: t.clone() for n, t in method.anchor.importances.named_buffers()}
        before = {n: p.detach().clone() for n, p in method.named_parameters()}
        learn(method, range(1, 2))
        now = dict(method.named_parameters())
        return sum((importance[n.replace(".", "/")] * (now[n] - p).square()).sum() for n, p in before.items()).item()

    assert moved(1e4) < 0.5 * moved(0.0)


# ----------------------------------------------------------------------------------------------------------- teacher


def test_a_frozen_copy_stays():
    source = net()
    teacher = frozen(source)
    x = random_batch().x
    before = teacher(x)
    with torch.no_grad():
        next(source.parameters()).add_(1.0)
    assert torch.equal(teacher(x), before)
    assert not teacher.training and source.training
    assert not any(p.requires_grad for p in teacher.parameters())


def test_an_average_follows_grows_and_is_no_parameter():
    network, average = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), Average()
    average.update(network, 0.9)
    expected = {name: value.clone() for name, value in network.state_dict().items()}
    for _ in range(3):
        network(torch.randn(8, 3))
        with torch.no_grad():
            network[0].weight.add_(torch.randn(3, 3))
        average.update(network, 0.9)
        for name, value in network.state_dict().items():
            floating = value.is_floating_point()
            expected[name] = 0.9 * expected[name] + 0.1 * value if floating else value.clone()
    teacher = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    teacher.load_state_dict(expected)
    x = torch.randn(4, 3)
    statistics = network[1].running_mean.clone()
    torch.testing.assert_close(average(network, x), teacher.eval()(x))
    assert network.training and network[1].training and torch.equal(network[1].running_mean, statistics)

    network.append(nn.Linear(3, 2))
    average.update(network, 1.0)  # takes what is new, moves nothing
    fresh = Average()
    fresh.load_state_dict(average.state_dict(), strict=True)
    torch.testing.assert_close(fresh(network, x), network[2](teacher(x)))
    assert not [*average.parameters()]


# ------------------------------------------------------------------------------------------------------ equivalences


class NewClassesOnly(Finetune):
    """Fine-tuning whose cross-entropy knows the new classes alone."""

    def learn(self, task):
        head = self.heads.grow(len(task.classes))
        yield Phase("finetune", self.parameters(), own_loss(self.backbone, head, task))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Er(net(), buffer_size=0),
        lambda: DerPlusPlus(net(), buffer_size=0),
        lambda: DerPlusPlus(net(), alpha=0.0, beta=0.0),
        lambda: OnlineEwc(net(), e_lambda=0.0),
    ],
    ids=["er without memory", "derpp without memory", "derpp without weights", "ewc without penalty"],
)
def test_without_its_idea_a_method_is_fine_tuning_bit_for_bit(make):
    method, plain = make(), Finetune(net())
    for one in (method, plain):
        learn(one, range(3))
    same_bits(method, plain)


def test_lwf_without_a_teacher_is_fine_tuning_on_new_classes():
    method, plain = Lwf(net(), kd_lambda=0.0), NewClassesOnly(net())
    for one in (method, plain):
        learn(one, range(3))
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(method.state_dict()[name], value, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("kind", [ErAce, Lwf, OnlineEwc])
def test_one_task_is_fine_tuning_bit_for_bit(kind):
    method, plain = kind(net()), Finetune(net())
    for one in (method, plain):
        learn(one, range(1))
    same_bits(method, plain)


def test_er_ace_without_memory_never_touches_old_heads():
    method = ErAce(net(), buffer_size=0)
    learn(method, range(1))
    old = method.heads[0].weight.detach().clone()
    learn(method, range(1, 2))
    assert torch.equal(method.heads[0].weight, old)


def known_of_the_first(method):
    """The share of the first task's images that is right after the second."""
    settings = config(train={"epochs": 12, "batch_size": 8, "lr": 0.005}, images={"size": SIZE, "augment": "none"})
    for t in range(2):
        Engine(settings, device="cpu").learn(method, plain_task(t))
    x = plain_task(0).view.test(plain_task(0).images)
    with torch.no_grad():
        return (method(x).argmax(1) == plain_task(0).labels).float().mean().item()


@pytest.mark.parametrize("kind", REHEARSAL.values())
def test_a_memory_of_everything_remembers(kind):
    assert known_of_the_first(kind(net(), buffer_size=48, minibatch_size=8)) > 0.7


def test_fine_tuning_knows_the_last_task_alone():
    assert known_of_the_first(Finetune(net())) < 0.3


def plain_task(index):
    """Every class has a picture of its own, of which its images are noisy copies."""
    task = make_task(index)
    pictures = np.random.default_rng(7).integers(0, 128, (4, SIZE, SIZE, 3), dtype=np.uint8)
    images = pictures[task.labels.numpy()] + task.images.numpy() // 2
    view = View(ImagesConfig(size=SIZE), channels_last=False)
    parts = (task.name, task.classes, task.first_class, images, task.labels.numpy(), view, torch.device("cpu"))
    return Task(index, *parts)


def test_a_reloaded_method_holds_the_same_memory():
    method = DerPlusPlus(net(), buffer_size=10)
    learn(method, range(2))
    fresh = reload(method, lambda: DerPlusPlus(net(), buffer_size=10))
    same_bits(fresh, method)
    assert len(fresh.memory) == 10 and torch.equal(logits(fresh), logits(method))


# ----------------------------------------------------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("er.buffer_size", -1),
        ("er.minibatch_size", 0),
        ("er_ace.policy", "oldest"),
        ("derpp.alpha", -0.1),
        ("derpp.beta", -1),
        ("lwf.kd_lambda", -1),
        ("lwf.temperature", 0),
        ("ewc.e_lambda", -1),
        ("ewc.gamma", 1.5),
    ],
)
def test_options_have_ranges(option, value):
    name, key = option.split(".")
    with pytest.raises(ConfigError, match=f"method.{key}: "):
        METHODS.resolve({"name": name, key: value}, "method")


def test_defaults_are_the_authors():
    common = {"buffer_size": 200, "minibatch_size": 32, "policy": "reservoir"}
    assert METHODS.resolve("er", "method") == {"name": "er", "passes": "together", **common}
    assert METHODS.resolve("er_ace", "method") == {"name": "er_ace", "head": "linear", **common}
    assert METHODS.resolve("derpp", "method") == {"name": "derpp", "alpha": 0.1, "beta": "auto", **common}
    assert METHODS.resolve("lwf", "method") == {"name": "lwf", "kd_lambda": 10.0, "temperature": 2.0}
    assert METHODS.resolve("ewc", "method") == {"name": "ewc", "e_lambda": "auto", "gamma": 1.0}


# ---------------------------------------------------------------------------------------------------- the cosine head


def test_cosine_logits_are_scaled_cosines_of_sklearn():
    torch.manual_seed(0)
    heads = CosineHeads(6, scale=7.0)
    for classes in (2, 1, 3):
        heads.grow(classes)
    features = 100 * torch.randn(5, 6)
    weights = torch.cat([block.weight for block in heads]).detach()
    wanted = 7.0 * cosine_similarity(features, weights)
    torch.testing.assert_close(heads(features).detach(), torch.as_tensor(wanted), rtol=0, atol=1e-5)
    assert heads.sizes() == [2, 1, 3] and heads.columns(2) == slice(3, 6)
    torch.testing.assert_close(heads(0.01 * features), heads(features))  # lengths do not count
    with torch.no_grad():
        heads[1].weight.mul_(50)
    torch.testing.assert_close(heads(features).detach(), torch.as_tensor(wanted), rtol=0, atol=1e-5)
    assert torch.equal(heads(torch.zeros(1, 6)), torch.zeros(1, 6))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(heads(features).detach(), torch.as_tensor(wanted), rtol=0, atol=1e-5)


def test_cosine_gradients_against_finite_differences():
    torch.manual_seed(0)
    heads = CosineHeads(4, learnable=True)
    heads.grow(3)
    features = torch.randn(2, 4)
    heads(features)[0, 1].backward()
    (weight, scale), step = (heads[0].weight, heads.scale), 1e-2
    for parameter, at in ((weight, (1, 2)), (scale, ())):
        values = []
        for sign in (1, -1):
            with torch.no_grad():
                parameter[at] += sign * step
                values.append(float(heads(features)[0, 1]))
                parameter[at] -= sign * step
        assert float(parameter.grad[at]) == pytest.approx((values[0] - values[1]) / (2 * step), rel=1e-3, abs=1e-3)
    assert float(weight.grad[0].abs().sum()) == 0


def test_a_learnt_scale_is_loaded_with_the_heads():
    heads = CosineHeads(4, learnable=True)
    heads.grow(2)
    heads.grow(3)
    with torch.no_grad():
        heads.scale.fill_(3.5)
    fresh = CosineHeads(4, learnable=True)
    fresh.load_state_dict(heads.state_dict(), strict=True)
    x = torch.randn(3, 4)
    assert torch.equal(fresh(x), heads(x)) and fresh.scale.item() == 3.5
    assert "scale" not in CosineHeads(4).state_dict()
    with pytest.raises(RuntimeError, match=r"blocks\.0\.bias"):
        TaskHeads(4).load_state_dict(heads.state_dict(), strict=True)


def test_er_ace_with_a_cosine_head_bounds_its_logits():
    method = ErAce(net(), buffer_size=8, head="cosine")
    learn(method, range(2))
    assert logits(method).abs().max() <= 10 + 1e-5
    assert not any("bias" in name for name, _ in method.heads.named_parameters())
    assert type(ErAce(net()).heads) is TaskHeads
