"""Steps of methods for networks from scratch against calculations in plain PyTorch and NumPy.

The steps are of later tasks: teachers, penalties and masks have changed nothing in a first one. Weights of terms are so
large that no tolerance hides a term.
"""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from pearl.data.augment import View
from pearl.data.batches import Batch
from pearl.methods.common.memory import Shown
from pearl.methods.common.scatter import unpack
from pearl.methods.pearl import Pearl
from pearl.methods.prototypes import ranpac as ranpac_file
from pearl.methods.prototypes.apr import Apr
from pearl.methods.prototypes.il2a import IL2A
from pearl.methods.prototypes.loranpac import LoRanPac
from pearl.methods.prototypes.pass_ import PASS
from pearl.methods.prototypes.ranpac import RIDGES, RanPac, errors
from pearl.methods.prototypes.seed import Seed
from pearl.methods.prototypes.ssre import SSRE
from pearl.methods.regularization.ewc import OnlineEwc
from pearl.methods.rehearsal.agile import Agile
from pearl.methods.rehearsal.co2l import Co2L
from pearl.methods.rehearsal.ocdnet import OcdNet
from pearl.methods.rehearsal.tamil import Tamil
from pearl.methods.rehearsal.trire import TriRe
from pearl.methods.sparse.clnp import Clnp
from pearl.methods.sparse.cpg import Cpg
from pearl.methods.sparse.pae import Pae
from pearl.methods.sparse.sparcl import SparClEwc
from pearl.nn.convnet import convnet
from pearl.settings.sections import ImagesConfig
from pearl.testing.tiny import SIZE, make_task, small_resnet, small_vit

PLAIN = View(ImagesConfig(size=SIZE), channels_last=False)  # images as they are, so that passes can be repeated


def take_steps(method, task, rate=0.1, size=12, begin=None, look=None):
    """Learn a task by plain gradient descent, an epoch a phase; give each phase back when it is over."""
    for phase in method.learn(task):
        method.train()
        if begin:
            begin()
        batches = [*(phase.data or task).batches(size, seed=0)]
        phase.done, phase.planned, phase.per_epoch = 0, len(batches), len(batches)
        for batch in batches:
            for parameter in phase.trained:
                parameter.grad = None
            loss = phase.loss(batch)
            loss.backward()
            if phase.after_backward:
                phase.after_backward()
            before = [parameter.detach().clone() for parameter in phase.trained]
            with torch.no_grad():
                for parameter in phase.trained:
                    if parameter.grad is not None:
                        parameter -= rate * parameter.grad
                if phase.project:
                    phase.project(before)
            phase.done += 1
            if phase.after_step:
                phase.after_step(batch)
            if look:
                look(phase, batch)
        yield phase


def learn(method, tasks, **options):
    """Learn tasks of images as they are."""
    for t in tasks:
        for _ in take_steps(method, make_task(t, view=PLAIN), **options):
            pass
    return method


def copied(parameters):
    return {name: parameter.detach().clone() for name, parameter in parameters}


def some(count, classes, first=0, seed=3):
    """Random images of classes from `first` up to `classes` - 1."""
    x = torch.randn(count, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(seed))
    return Batch(x, first + torch.arange(count) % (classes - first), torch.arange(count))


# ---------------------------------------------------------------------------------------------------------- rehearsal

EMA = {"ema_tasks": None, "buffer_size": 20, "minibatch_size": 8}
TEACHERS = {
    "tamil": lambda: Tamil(small_resnet(), ema_update_freq=1.0, ema_alpha=0.8, **EMA),
    "agile": lambda: Agile(small_resnet(), code_dim=6, ema_update_freq=1.0, ema_alpha=0.8, **EMA),
    "ocdnet": lambda: OcdNet(small_resnet(), bernoulli_probability=1.0, ema_alpha=0.8, **EMA),
    "trire": lambda: TriRe(small_resnet(), tasks=3, stable_model_update_freq=1.0, stable_model_alpha=0.8, **EMA),
}


@pytest.mark.parametrize("name", TEACHERS)
def test_a_teacher_averages_the_steps_of_all_tasks_and_is_what_the_loss_is_held_to(name, monkeypatch):
    method, average, steps = TEACHERS[name](), {}, 0

    def look(phase, batch):
        nonlocal steps
        steps += 1
        share = max(1 / (steps + 1), 1 - 0.8)
        for each, parameter in method.network.named_parameters():
            average[each] = (1 - share) * average[each] + share * parameter.detach()

    def begin():  # what is new is averaged from here
        for each, parameter in method.network.named_parameters():
            average.setdefault(each, parameter.detach().clone())

    for t in range(2):
        task = make_task(t, view=PLAIN)
        for _ in take_steps(method, task, begin=begin, look=look):
            pass
        for each, _ in method.network.named_parameters():
            torch.testing.assert_close(method.teacher.tensors[each], average[each], rtol=1e-4, atol=1e-6)
    assert len(method.memory) == 20
    live = dict(method.network.named_parameters())
    assert (average["backbone.conv1.weight"] - live["backbone.conv1.weight"]).abs().max() > 1e-3

    twin = copy.deepcopy(method).eval()
    twin.network.load_state_dict(average, strict=False)
    shown = Shown(some(8, 4).x, some(8, 4).y, some(8, 4).y // 2, None)
    monkeypatch.setattr(method, "shown", lambda task: shown)
    method.eval()
    for parameters in (method.backbone, twin.backbone):  # running statistics of the same images
        for module in parameters.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                module.running_mean.zero_()
                module.running_var.fill_(1.0)
    for each, buffer in method.network.named_buffers():
        method.teacher.tensors[each].copy_(buffer)
    with torch.no_grad():
        for head in method.heads:  # the network goes on, and the teacher does not
            head.weight.add_(torch.randn(head.weight.shape, generator=torch.Generator().manual_seed(7)))
        features = twin.backbone(shown.x)
        if name == "tamil":
            gates = [twin.gates[t](row[None]) for t, row in zip(shown.tasks.tolist(), features, strict=True)]
            told = twin.heads(features * torch.cat(gates))
        else:
            told = twin.heads(features) if name in ("ocdnet", "trire") else twin(shown.x)
        taught = method.taught(shown)
        torch.testing.assert_close(taught[:, -4:], told, rtol=1e-4, atol=1e-5)
        if name == "ocdnet":
            torch.testing.assert_close(method(shown.x), told, rtol=1e-4, atol=1e-5)
            return
        apart = (method(shown.x) - told).square().mean()
        labels = F.cross_entropy(method(shown.x), shown.y)
        actual = method.rehearsed(make_task(1), 500.0, 0.5)
        assert 500 * apart > 0.1 * labels
        assert actual.item() == pytest.approx((500 * apart + 0.5 * labels).item(), rel=1e-4)


def test_co2l_keeps_the_relations_of_the_network_before_the_task():
    method = learn(Co2L(small_resnet(), buffer_size=20, distill_power=30.0), range(1))
    before = copy.deepcopy(torch.nn.Sequential(method.backbone, method.projection)).eval()
    phase = next(take_steps(method, make_task(1, view=PLAIN), size=24))
    assert phase.name == "co2l"
    method.eval()
    batch = Batch(torch.cat([some(6, 4).x, some(6, 4, seed=4).x]), some(6, 4).y, torch.arange(6))
    live = torch.nn.Sequential(method.backbone, method.projection)

    def relations(network, temperature):
        with torch.no_grad():
            z = F.normalize(network(batch.x), dim=1).double()
        others = (z @ z.T / temperature)[~torch.eye(12, dtype=torch.bool)].view(12, 11)
        return others.softmax(1)

    kept = -(relations(before, 0.01) * relations(live, 0.2).log()).sum(1).mean()
    own = -(relations(live, 0.01) * relations(live, 0.2).log()).sum(1).mean()
    with_power = phase.loss(batch)
    method.distill_power = 0.0
    actual = (with_power - phase.loss(batch)).item()
    assert actual == pytest.approx(30 * kept.item(), rel=1e-3)
    assert abs(30 * kept - 30 * own) > 0.05, "the network before is another"


# ----------------------------------------------------------------------------------------------------- regularization


@pytest.mark.parametrize(("kind", "weight"), [(OnlineEwc, 2e4), (SparClEwc, 2e5)], ids=["ewc", "sparcl"])
def test_ewc_holds_weights_by_what_mattered_to_both_earlier_tasks(kind, weight):
    sparse = {"rounds": 2, "removals": 1} if kind is SparClEwc else {}
    method = kind(small_resnet(), e_lambda=weight, gamma=0.5, **sparse)
    importance, anchor, seen = {}, {}, []

    def cross_entropy(batch):
        if kind is OnlineEwc:
            return F.cross_entropy(method.heads(method.backbone(batch.x)), batch.y)
        return F.cross_entropy(method.heads[-1](method.backbone(batch.x)), batch.y - batch.y.min() // 2 * 2)

    def look(phase, batch):
        method.eval()
        penalty = sum(
            (importance[name] * (parameter - anchor[name]).square()).sum()
            for name, parameter in method.named_parameters()
            if name in importance
        )
        with torch.no_grad():
            plain = cross_entropy(batch)
            assert phase.loss(batch).item() == pytest.approx((plain + weight * penalty).item(), rel=1e-3)
            seen.append(float(weight * penalty / plain))
        method.train()

    for t in range(3):
        task = make_task(t, per_class=4, view=PLAIN)
        for _ in take_steps(method, task, rate=0.003, size=4, look=look):
            pass
        method.eval()
        for x, y, rows in task.in_order(1):
            method.zero_grad()
            loss = cross_entropy(Batch(x, y, rows))
            loss.backward()
            for name, parameter in method.named_parameters():
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                new = torch.exp(-loss.detach()) * gradient.square() / len(task)
                if kind is SparClEwc and name.removeprefix("backbone.") in method.names:
                    new = new * method.open[name.removeprefix("backbone.")]
                if not int(rows):
                    importance[name] = 0.5 * importance.get(name, 0.0)
                importance[name] = importance[name] + new
        for name, value in importance.items():
            torch.testing.assert_close(
                method.anchor.importances[name], value, rtol=1e-3, atol=1e-3 * float(value.max())
            )
        anchor = copied(method.named_parameters())
        method.zero_grad()
    later = seen[len(seen) // 3 :]
    assert not any(seen[: len(seen) // 3]) and max(later) > 0.1, max(later)


# -------------------------------------------------------------------------------------------------------------- sparse


def small_convnet():
    torch.manual_seed(1)
    return convnet(SIZE, width=4)


def test_clnp_accepts_less_accuracy_than_the_best(monkeypatch):
    method, floors = Clnp(small_convnet(), m_perc=30.0), []
    monkeypatch.setattr("pearl.methods.sparse.stable_units.accuracy", lambda answer, part: 80.0)
    monkeypatch.setattr(
        method, "important", lambda activations, held, floor: floors.append(floor) or ~torch.zeros_like(method.stable)
    )
    learn(method, range(1))
    assert floors == [50.0]


def test_clnp_is_penalised_by_the_sizes_of_what_it_trains():
    method = learn(Clnp(small_convnet(), l1=0.2), range(1))
    method.stable[method.units.layers["conv1"].makes[:2]] = True
    task = make_task(1, view=PLAIN)
    phase, batch = next(method.learn(task)), some(6, 4, first=2)
    method.train()
    method.zero_grad()
    phase.loss(batch).backward()
    phase.after_backward()
    actual = [parameter.grad.clone() for parameter in phase.trained]
    plain = F.cross_entropy(method.heads[1](method.backbone(batch.x)), batch.y - 2)
    sizes = sum(parameter.abs().sum() for parameter in phase.trained)
    assert phase.loss(batch).item() == pytest.approx((plain + 0.2 * sizes).item(), rel=1e-4)
    expected = torch.autograd.grad(plain + 0.2 * sizes, phase.trained)
    fixed = {id(method.backbone.get_parameter(name)): mask for name, mask in method.fixed().items()}
    frozen = 0
    for parameter, ours, theirs in zip(phase.trained, actual, expected, strict=True):
        mask = fixed.get(id(parameter), torch.zeros_like(parameter, dtype=torch.bool))
        torch.testing.assert_close(ours, theirs.masked_fill(mask, 0.0), rtol=1e-3, atol=1e-5)
        frozen += int(mask.sum())
    assert frozen


def test_cpg_frees_weights_without_training_masks(monkeypatch):
    """While pruning, masks stay, to the bit; before and after, they are trained by the same steps."""
    method = learn(Cpg(small_convnet(), train_accuracy=0.0, tasks=3, threshold=0.0), range(1))
    monkeypatch.setattr(method, "right", lambda part: 100.0)
    task, phases, before = make_task(1, view=PLAIN), [], {}

    def look(phase, batch):
        masks = [mask.detach().clone() for mask in method.live[0].parameters()]
        moved = any(not torch.equal(a, b) for a, b in zip(masks, before.get("masks", masks), strict=True))
        phases.append((phase.name, "picks" in phase.groups, moved))
        before["masks"] = masks

    monkeypatch.setattr(method, "rival", lambda kept, held: (yield from ()) or 0.0)
    for _ in take_steps(method, task, rate=10.0, look=look):
        before.pop("masks", None)
        if phases.count(("cpg_prune", False, False)) > 4:
            break
    assert {phase for phase in phases if phase[0] == "cpg_prune"} == {("cpg_prune", False, False)}
    assert ("cpg", True, True) in phases


def test_cpg_computes_with_its_own_weights_and_those_that_it_picked():
    method = learn(Cpg(small_convnet(), train_accuracy=0.0, tasks=3), range(2))
    for name, weight in method.weights.items():
        picks = torch.rand(weight.shape, generator=torch.Generator().manual_seed(0)) < 0.5
        method.picks[f"1.{name}"].copy_(picks)
        owner = method.owners[name]
        expected = torch.where((owner == 1) | ((owner == 0) & picks), weight, 0.0)
        assert (weight[(owner == 0) & ~picks] != 0).any()
        assert torch.equal(method.weights_of(1)[name], expected)


def test_pae_goes_back_to_the_most_freed_weights_that_cost_nothing(monkeypatch):
    """Held-out images are right after the first two portions are freed, and not after any other."""
    method, held, seen = Pae(small_convnet(), train_accuracy=90.0, tasks=3), [50.0, 60.0, 60.0], []

    def right(part):
        return 100.0 if len(part) > 12 else (held.pop(0) if held else 0.0)

    monkeypatch.setattr(method, "right", right)
    for phase in take_steps(method, make_task(0, view=PLAIN)):
        owners = {name: method.owners[name].clone() for name in method.owners.names}
        seen += [owners] * (phase.name == "pae_prune")
    assert len(seen) == 10
    for name in method.owners.names:
        assert torch.equal(method.owners[name], seen[1][name])
        assert not torch.equal(method.owners[name], seen[-1][name])


# ---------------------------------------------------------------------------------------------------------- prototypes


def test_ranpacs_ridge_is_chosen_on_a_fifth_drawn_at_random(monkeypatch):
    method, task, given = RanPac(small_vit(), M=30, tuning="none"), make_task(0, view=PLAIN), []
    monkeypatch.setattr(ranpac_file, "errors", lambda *parts: given.append(parts) or errors(*parts))
    torch.manual_seed(0)
    learn(method, range(1))
    z, y, held, expected = given[0]
    with torch.no_grad():
        lifted = method.lifted(PLAIN.test(task.images)).double()
    labels = F.one_hot(task.labels).double()
    assert len(z) == int(0.8 * len(task)) and len(held) == len(task) - len(z)
    rows = torch.cdist(torch.cat([z, held]), lifted).argmin(1)
    assert sorted(rows.tolist()) == list(range(len(task))), "each image once"
    torch.testing.assert_close(torch.cat([y, expected]), labels[rows])
    assert rows.tolist() != sorted(rows.tolist()) and expected.sum(0).min() > 0, "not the last class alone"


@pytest.mark.parametrize(("scale", "sign", "best"), [(1e-3, 1, 1e-8), (1e3, -1, 1e8)])
def test_ranpacs_ridges_reach_from_the_least_to_the_greatest(scale, sign, best):
    """Where held-out images are as the others, the least is best; where they are the opposite, the greatest."""
    generator = torch.Generator().manual_seed(0)
    z, weight, held = (torch.randn(*shape, generator=generator).double() for shape in ((40, 6), (6, 2), (20, 6)))
    y, expected = z @ weight, sign * held @ weight
    z, held = scale * z, scale * held
    actual, eye = {}, torch.eye(6, dtype=torch.float64)
    for strength in [10.0**power for power in range(-8, 9)]:
        head = torch.linalg.solve(z.T @ z + strength * eye, z.T @ y)
        actual[strength] = float((held @ head - expected).square().mean())
    assert min(actual, key=actual.__getitem__) == best
    assert dict(zip(RIDGES, errors(z, y, held, expected), strict=True)) == pytest.approx(actual, rel=1e-4, abs=1e-12)


def test_loranpacs_first_session_trains_a_head_on_random_features():
    method = LoRanPac(small_vit(), E=40, tuning="ssf")
    phase, batch = next(method.learn(make_task(0, view=PLAIN))), some(6, 2)
    (weight,) = [parameter for parameter in phase.trained if parameter.shape == (2, 40)]
    scale = [parameter for parameter in phase.trained if parameter.numel() == 1]
    with torch.no_grad():
        features = method.tuned(method.backbone, batch.x)
        lifted = (features @ method.lift.matrix).clamp(min=0)
        cosines = F.normalize(lifted, dim=1) @ F.normalize(weight, dim=1).T
        expected = F.cross_entropy(cosines * (scale[0] if scale else 1.0), batch.y)
        assert phase.loss(batch).item() == pytest.approx(expected.item(), rel=1e-5)


def test_ssre_weighs_an_image_by_the_old_class_that_it_resembles_most():
    method = learn(SSRE(small_resnet(), kd_weight=5.0, protoAug_weight=0.0), range(3), rate=0.001)
    away = torch.randn(6, method.heads.dim, generator=torch.Generator().manual_seed(2)).double()
    method.statistics.move(away)  # random images of all classes have one mean
    means = torch.cat([method.statistics.means(t) for t in range(3)]).float()
    phase, batch = next(method.learn(make_task(3, view=PLAIN))), some(6, 8, first=6)
    method.eval()
    with torch.no_grad():
        for branch in phase.extra.parameters():
            branch.normal_(0, 0.1, generator=torch.Generator().manual_seed(1))
        before = method.backbone(batch.x)
        expanded = copy.deepcopy(method.backbone)
        phase.extra.merge(expanded)
        features = expanded(batch.x)
        cosines = np.array([[float(F.cosine_similarity(f, m, 0)) for m in means] for f in features])
        near = torch.from_numpy(cosines.max(1)).float()
        task_loss = F.cross_entropy(method.heads(features) / 0.1, batch.y, reduction="none")
        moved = (features - before).norm(dim=1)
        expected = ((1 - near) * task_loss).mean() + 5 * (near * moved).sum()
        assert phase.loss(batch).item() == pytest.approx(expected.item(), rel=1e-3)
    assert (cosines.max(1) - cosines.mean(1)).min() > 0.05 and 5 * float((near * moved).sum()) > 0.1 * float(expected)


@pytest.mark.parametrize("kind", [PASS, IL2A])
def test_features_are_held_to_the_network_before_the_task(kind):
    options = {"protoAug_weight": 0.0} if kind is PASS else {"seman_weight": 0.0, "mix_times": 0}
    method = learn(kind(small_resnet(), kd_weight=5.0, **options), range(1), rate=0.001)
    before = copy.deepcopy(method.backbone).eval()
    phase, batch = next(method.learn(make_task(1, view=PLAIN))), some(6, 4, first=2)
    method.eval()
    with torch.no_grad():
        for parameter in method.backbone.parameters():
            parameter.mul_(1.05)
        x = torch.cat([batch.x.rot90(turns, (2, 3)) for turns in range(4 if kind is PASS else 1)])
        moved = (method.backbone(x) - before(x)).square().sum().sqrt()
        together = phase.loss(batch)
        method.kd_weight = 0.0
        apart = phase.loss(batch)
    assert 5 * moved > 0.1 * apart
    assert (together - apart).item() == pytest.approx(5 * moved.item(), rel=1e-3)


def test_seeds_fine_tuning_is_held_to_the_expert_before_the_task():
    method = learn(Seed(small_resnet(), experts=1, features=5, alpha=0.9), range(1))
    before = copy.deepcopy(torch.nn.Sequential(method.backbone, method.bottlenecks[0])).eval()
    phase, batch = next(method.learn(make_task(1, view=PLAIN))), some(6, 4, first=2)
    method.eval()
    with torch.no_grad():
        method.bottlenecks[0].weight.add_(
            4 * torch.randn(5, method.heads.dim, generator=torch.Generator().manual_seed(1))
        )
        features = method.bottlenecks[0](method.backbone(batch.x))
        task_loss = F.cross_entropy(phase.extra(features), batch.y - 2)
        apart = (features - before(batch.x)).square().mean()
        assert apart > 0.1 * task_loss
        assert phase.loss(batch).item() == pytest.approx((0.1 * task_loss + 0.9 * apart).item(), rel=1e-4)


def small_apr(**options):
    return Apr(small_resnet(), replayed=6, replay_batch=8, drift_images=6, steps=2, drift_steps=2, **options)


def test_apr_pushes_images_to_noisy_means_and_holds_old_logits():
    method = learn(small_apr(noise=3.0, push=20.0, kd_lambda=30.0), range(1))
    before, means = copy.deepcopy(method).eval(), method.statistics.means().float()
    radius = 3 * torch.cat(method.variances()).mean().sqrt().float()
    phase = next(method.learn(make_task(1, view=PLAIN)))
    batch = next(phase.data.batches(12, seed=0))
    method.eval()
    with torch.no_grad():
        method.heads[0].weight.add_(torch.randn(2, method.heads.dim, generator=torch.Generator().manual_seed(1)))

    def expected(radius):
        torch.manual_seed(4)
        x = batch.x[12:]
        targets = means[batch.y[12:]] + radius * torch.randn(8, method.heads.dim)
        for _ in range(2):
            x = x.detach().requires_grad_(True)
            (slope,) = torch.autograd.grad((before.backbone(x) - targets).square().mean(), x)
            x = x - 20 * slope / slope.norm()
        x = torch.cat([batch.x[:12], x.detach()])
        with torch.no_grad():
            logits = method.heads(method.backbone(x))
            told = (before.heads(before.backbone(x)) / 2).softmax(1)
            kept = (told * (told.log() - (logits[:, :2] / 2).log_softmax(1))).sum(1).mean()
            return float(F.cross_entropy(logits[:12, 2:], batch.y[:12] - 2) + 30 * kept)

    torch.manual_seed(4)
    assert phase.loss(batch).item() == pytest.approx(expected(radius), rel=1e-5)
    assert expected(radius) != pytest.approx(expected(0.0), rel=1e-4)


def test_apr_moves_covariances_by_the_map_of_their_class():
    method = learn(small_apr(), range(1))
    dim = method.heads.dim
    earlier = [unpack(triangle.double(), dim) for triangle in method.covariances["0"]]
    maps = []
    for phase in method.learn(make_task(1, view=PLAIN)):
        if phase.name == "apr_transfer":
            drawn = torch.randn(dim, dim, generator=torch.Generator().manual_seed(len(maps)))
            phase.extra.weight.data = drawn
            maps.append(drawn.double())
    assert len(maps) == 2
    for triangle, way, covariance in zip(method.covariances["0"], maps, earlier, strict=True):
        torch.testing.assert_close(
            unpack(triangle.double(), dim), way @ covariance @ way.T, rtol=1e-4, atol=1e-4 * float(covariance.max())
        )


# --------------------------------------------------------------------------------------------------------------- PEARL


def matrix_of(weight):
    """Equation 4's matrix of a filter: rows (out, kh), columns (in, kw)."""
    return weight.detach().permute(0, 2, 1, 3).flatten(0, 1).flatten(1).double().numpy()


def test_pearls_second_task_is_the_reference_and_updates_of_ranks_by_its_distance():
    method, ranks = learn(Pearl(small_resnet()), range(1)), {}
    for phase in take_steps(method, make_task(1, view=PLAIN), rate=0.3):
        if phase.name == "probe":
            for target in method.targets:
                old, new = (matrix_of(net.get_parameter(target.parameter)) for net in (method.backbone, phase.extra))
                share = ((new - old) ** 2).sum() / ((new**2).sum() + (old**2).sum())
                energy = np.linalg.svd(new - old, compute_uv=False) ** 2
                ranks[target.label] = int((energy.cumsum() / energy.sum() < share - 1e-9).sum()) + 1
                assert share > 0
    actual = {label: len(method.tensors[f"1.A.{label}"]) for label in ranks}
    assert actual == ranks
    network = copy.deepcopy(method.backbone).eval()
    with torch.no_grad():
        for target in method.targets:
            weight = network.get_parameter(target.parameter)
            out, into, high, wide = weight.shape
            a = method.tensors[f"1.A.{target.label}"].view(-1, into, wide)
            b = method.tensors[f"1.B.{target.label}"].view(out, high, -1)
            weight.add_(2 * torch.einsum("ohr,riw->oihw", b, a))
        for name in method.norms:
            network.get_parameter(name).copy_(method.tensors[f"1.norm.{name}"])
        for name in method.norm_statistics:
            network.get_buffer(name).copy_(method.statistics[f"1.norm.{name}"])
        expected = method.heads[1](network(some(6, 4).x))
        assert (expected - method.heads[1](method.eval().backbone(some(6, 4).x))).abs().max() > 1e-2
        torch.testing.assert_close(method.eval()(some(6, 4).x, 1), expected, rtol=1e-4, atol=1e-5)


def test_pearls_head_starts_anew_after_the_probe():
    method = learn(Pearl(small_resnet()), range(1))
    phases = method.learn(make_task(1, view=PLAIN))
    assert next(phases).name == "probe"
    probed = method.heads[1].weight.detach().clone()
    assert next(phases).name == "adapt" and not torch.equal(method.heads[1].weight, probed)
