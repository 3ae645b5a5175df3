"""Methods that leave most weights at 0: how many, which, and what a task may change."""

import copy

import pytest
import torch
import torch.nn.functional as F

from pearl.data.batches import Batch
from pearl.errors import ConfigError
from pearl.methods.bounds.finetune import Finetune
from pearl.methods.regularization.ewc import OnlineEwc
from pearl.methods.sparse.clnp import Clnp
from pearl.methods.sparse.cpg import Cpg
from pearl.methods.sparse.held_out import Best, accuracy, held_out
from pearl.methods.sparse.masks import FREE, HIDDEN, Owners, cubic, held
from pearl.methods.sparse.nispa import Nispa
from pearl.methods.sparse.pae import Pae
from pearl.methods.sparse.sparcl import Forgetting, SparClEwc, largest
from pearl.methods.sparse.units import Units
from pearl.nn.bsconv import bsc
from pearl.nn.convnet import convnet
from pearl.nn.resnet import resnet18
from pearl.settings.config import load_config
from pearl.testing.tiny import SIZE, config, images, learn, logits, make_task, reload, small_resnet, small_vit
from pearl.training.engine import Engine


class Rounds(Engine):
    """Notes what a method looks like before and after each phase."""

    def __init__(self, look):
        super().__init__(config(), device="cpu")
        self.look, self.seen = look, []

    def train(self, method, task, phase, position, resume):
        before = self.look(method)
        super().train(method, task, phase, position, resume)
        self.seen.append((before, self.look(method), len(phase.data or task)))


# ---------------------------------------------------------------------------------------------------------- SparCL-EWC


def test_each_round_of_sparcl_has_a_mask_of_its_own():
    def look(method):
        return {name: (method.open[name].clone(), w.detach().clone()) for name, w in method.weights.items()}

    engine, method = Rounds(look), SparClEwc(small_resnet(), rounds=4, regrow=0.05, remove=0.5, removals=2)
    learn(method, range(2), engine)
    assert len(method.names) == 8 and len(engine.seen) == 8
    for at, (before, after, _) in enumerate(engine.seen):
        density = (0.30, 0.25, 0.25, 0.25)[at % 4]
        for name, (mask, weight) in after.items():
            size = mask.numel()
            assert abs(int(mask.sum()) - density * size) <= 1, name
            assert torch.equal(mask, before[name][0]) and not before[name][1][~mask].any()
            assert not weight[~mask].any(), "what is closed stays 0"
    new = [b[0] & ~a[0] for a, b in zip(engine.seen[0][0].values(), engine.seen[1][0].values(), strict=True)]
    grown = [weight[mask] for mask, (_, weight) in zip(new, engine.seen[1][0].values(), strict=True)]
    assert all(len(w) and not w.any() for w in grown), "they are open again as 0"
    trained = [weight[mask] for mask, (_, weight) in zip(new, engine.seen[1][1].values(), strict=True)]
    assert any(w.any() for w in trained), "and learn"
    assert [images for *_, images in engine.seen] == [24, 18, 12, 12] * 2
    assert method.facts(1) == {"nonzero": sum(int((p != 0).sum()) for p in method.parameters())}
    name = method.names[0]
    fisher, ever_open = method.anchor.importances[f"backbone.{name}"], engine.seen[3][1][name][0] | method.open[name]
    assert fisher[ever_open].any() and not fisher[~ever_open].any()


class OwnClasses(OnlineEwc):
    """Online EWC whose cross-entropy is among a task's own classes."""

    phases = ("sparcl_ewc",)

    def cross_entropy(self, batch):
        own = self.heads.columns(len(self.heads) - 1)
        return F.cross_entropy(self(batch.x)[:, own], batch.y - own.start)


def test_sparcl_ewc_without_sparsity_is_ewc():
    dense = {"rounds": 1, "sparsity": 0.0, "regrow": 0.0, "gradient_sparse": 0.0, "remove": 0.0}
    method, plain = SparClEwc(small_resnet(), e_lambda=5.0, **dense), OwnClasses(small_resnet(), e_lambda=5.0)
    learn(method, range(2))
    learn(plain, range(2))
    # the draw of importances moves the order in which the Fisher matrix sums up images
    torch.testing.assert_close(logits(method), logits(plain), rtol=1e-3, atol=1e-4)


def test_a_few_gradients_count_and_the_same_for_a_while():
    method = SparClEwc(small_resnet(), gradient_sparse=0.9)
    name = method.names[0]
    method.open[name][:2] = False
    steps, weight = method.round_masks(), method.weights[name]
    weight.grad = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
    first = weight.grad.clone()
    method.mask_gradients(steps, measure=True)
    counts = weight.grad != 0
    assert int(counts.sum()) == weight.numel() - int(0.9 * weight.numel()) and not counts[:2].any()
    assert first[2:][counts[2:]].abs().min() >= first[2:][~counts[2:]].abs().max()
    weight.grad = torch.ones_like(weight)
    method.mask_gradients(steps, measure=False)
    assert torch.equal(weight.grad != 0, counts)


def test_what_the_mask_of_gradients_cuts_does_not_move_and_adam_goes_on():
    method = SparClEwc(small_resnet(), rounds=3, gradient_sparse=0.5, remove=0.0, sample_frequency=1000)
    engine = Engine(config(train={"epochs": 1, "optimizer": "adam", "weight_decay": 0.1}), device="cpu")
    moved, handed = [], []

    def train(method, task, phase, position, resume):
        before = {name: weight.detach().clone() for name, weight in method.weights.items()}
        Engine.train(engine, method, task, phase, position, resume)
        masks = phase.extra[0]
        for name, weight in method.weights.items():
            changed = weight != before[name]
            assert not (changed & ~masks[name]).any(), name
            moved.append(int(changed.sum()))
        handed.append(phase.keep_optimizer)

    engine.train = train
    engine.learn(method, make_task(0))
    assert sum(moved) and handed == [True, True, False]


def test_each_epoch_begins_with_a_new_mask_of_gradients():
    method, measured = SparClEwc(small_resnet(), rounds=1, sample_frequency=2), []
    mask = method.mask_gradients
    method.mask_gradients = lambda steps, *, measure: (measured.append(measure), mask(steps, measure=measure))
    learn(method, range(1), Engine(config(train={"epochs": 2, "batch_size": 8}), device="cpu"))  # of 24 images
    assert measured == [True, False, True] * 2


def test_images_that_are_forgotten_most_seldom_go_first():
    seen, rows = Forgetting(4, torch.device("cpu")), torch.arange(4)
    for right in (
        [1, 1, 0, 0],
        [0, 1, 0, 1],
        [1, 1, 0, 0],
        [0, 1, 0, 0],
    ):  # 0: twice, 1: never, 2: never right, 3: once
        seen.note(rows, torch.tensor(right, dtype=torch.bool))
    assert seen.events.tolist() == [2, 0, 0, 1]
    assert seen.by_forgetting().tolist() == [1, 3, 0, 2]


def test_images_that_sparcl_removes_are_the_first_of_that_order(monkeypatch):
    method, task = SparClEwc(small_resnet(), rounds=2, remove=0.25, removals=1), make_task(0)
    order = torch.randperm(24, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(Forgetting, "by_forgetting", lambda self: order)
    first, second = [phase.data for phase in method.learn(task)]
    left = task.images[order[6:]].flatten(1)
    assert len(first) == 24 and torch.equal(second.images.flatten(1).unique(dim=0), left.unique(dim=0))


def test_a_weight_of_sparcl_is_important_by_its_size_and_its_gradient():
    method, task = SparClEwc(small_resnet(), grad_weight=0.5), make_task(0)
    method.heads.grow(2)
    torch.manual_seed(0)
    actual = method.importance(task, first=False)
    torch.manual_seed(0)
    batch = next(task.batches(256, seed=int(torch.randint(2**62, ()))))
    loss = F.cross_entropy(method.heads[0](method.backbone(batch.x)), batch.y)
    for name, weight in method.weights.items():
        (gradient,) = torch.autograd.grad(loss, weight, retain_graph=True)
        assert gradient.any()
        torch.testing.assert_close(actual[name], weight.detach().abs() + 0.5 * gradient.abs())
        assert torch.equal(method.importance(task, first=True)[name], weight.detach().abs())


@pytest.mark.parametrize("among", ["all", "own"])
def test_an_image_of_sparcl_is_learnt_among_the_classes_that_count(among):
    method = SparClEwc(small_resnet(), forgotten_among=among)
    for _ in range(2):
        method.heads.grow(2)
    with torch.no_grad():
        for head, bias in zip(method.heads, ((9.0, 0.0), (5.0, 1.0)), strict=True):
            head.weight.zero_()
            head.bias.copy_(torch.tensor(bias))
    seen = Forgetting(4, torch.device("cpu"))
    batch = Batch(images(4), torch.tensor([2, 3, 2, 2]), torch.arange(4))
    method.cross_entropy(batch, seen)
    assert seen.right.tolist() == [among == "own", False, among == "own", among == "own"]


def test_the_largest_entries_are_as_many_as_asked():
    values = torch.tensor([[1.0, 3.0], [3.0, 2.0]])
    assert largest(values, 1).tolist() == [[False, True], [False, False]]
    assert largest(values, 3).tolist() == [[False, True], [True, True]]


@pytest.mark.parametrize(
    "override",
    ["sparcl_ewc method.sparsity=1", "sparcl_ewc method.rounds=0", "nispa method.density=0", "clnp method.hold_out=0"],
)
def test_options_out_of_range_are_refused(override):
    method, option = override.split()
    with pytest.raises(ConfigError, match=option.split("=")[0]):
        load_config("digits", [f"method={method}", option])


# ------------------------------------------------------------------------------------------------------- stable units


def convolutional(width=4):
    torch.manual_seed(1)
    return convnet(SIZE, width=width)


def connections(weight):
    """Which (out, in) of a weight are not 0."""
    return weight.flatten(2).any(2) if weight.ndim == 4 else weight != 0


class Half(Clnp):
    """Keeps the more active half, whatever that costs: random images say nothing about it."""

    def important(self, activations, held, floor):
        return self.stable | (activations > activations[~self.stable].median())


STABLE = {
    "clnp": Half,
    "nispa": lambda network: Nispa(network, density=0.5, step_size_param=3),
}
NETWORKS = {"convnet": convolutional, "resnet": small_resnet, "bsc": lambda: bsc(SIZE, width=4)}


def test_the_plain_network_has_the_size_of_the_papers():
    network = convnet(32)
    head = 100 * (network.dim + 1)
    assert sum(p.numel() for p in network.parameters()) + head == 8_752_292
    assert convnet(9, width=2)(torch.zeros(1, 3, 9, 9)).shape == (1, 32)


def test_units_of_the_plain_network():
    units = Units(convnet(8, width=4))
    assert len(units) == 3 + 4 + 4 + 8 + 8 + 64
    assert units.layers["linear"].inputs.tolist() == [u for u in range(19, 27) for _ in range(4)]
    assert torch.equal(units.layers["linear"].makes, units.out)
    assert units.layer.bincount().tolist() == [3, 4, 4, 8, 8, 64]


def test_channels_of_a_residual_stream_are_one_unit():
    units = Units(resnet18(SIZE, width=4))
    layers = units.layers
    stream = layers["layer2.0.conv2"].makes
    for other in ("layer2.0.downsample.0", "layer2.1.conv2"):
        assert torch.equal(layers[other].makes, stream)
    for reader in ("layer2.1.conv1", "layer3.0.conv1", "layer3.0.downsample.0"):
        assert torch.equal(layers[reader].inputs, stream)
    assert torch.equal(units.norms["layer2.1.bn2"], stream) and torch.equal(
        layers["conv1"].makes, layers["layer1.1.conv2"].makes
    )
    assert not set(layers["layer2.0.conv1"].makes.tolist()) & set(stream.tolist())
    grouped = Units(torch.nn.Sequential(torch.nn.Conv2d(3, 4, 1), torch.nn.Conv2d(4, 8, 3, groups=4))).layers["1"]
    assert torch.equal(grouped.reads[:, 0], grouped.inputs.repeat_interleave(2)), "a group reads a channel"


def test_channels_that_a_shortcut_repeats_are_one_unit():
    layers = Units(bsc(SIZE, width=4)).layers
    first, second = (layers[f"layer{stage}.1.conv2.depthwise"].makes for stage in (1, 2))
    assert torch.equal(second, first.repeat(2))


class Shifted(torch.nn.Module):
    """Adds a number, and not a stream."""

    def __init__(self):
        super().__init__()
        self.dim, self.pretrained, self.conv = 4, False, torch.nn.Conv2d(3, 4, 1)

    def forward(self, x):
        return (self.conv(x) + 1).mean((2, 3))


@pytest.mark.parametrize("network", [small_vit, Shifted])
def test_a_network_that_cannot_be_followed_is_refused(network):
    with pytest.raises(ConfigError, match="backbone=convnet, resnet18 or bsc"):
        Clnp(network())


def test_mean_activations_are_those_that_readers_see():
    network, x = convolutional(), images()
    units = Units(network)
    actual = units.activations(network, x.split(4))
    with torch.no_grad():
        one = F.relu(network.conv1(x))
        two = F.max_pool2d(F.relu(network.conv2(one)), 2)
    torch.testing.assert_close(actual[units.layers["conv1"].makes], one.double().mean((0, 2, 3)), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(actual[units.layers["conv2"].makes], two.double().mean((0, 2, 3)), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(actual[units.out], network(x).detach().double().mean(0), rtol=1e-5, atol=1e-7)
    assert not actual[:3].any()


@pytest.mark.parametrize(
    ("method", "network"), [("clnp", "convnet"), ("nispa", "convnet"), ("clnp", "resnet"), ("nispa", "bsc")]
)
def test_stable_units_keep_what_old_tasks_say_bit_by_bit(method, network):
    train = {"epochs": 2, "batch_size": 8, "lr": 0.01, "weight_decay": 0.1, "optimizer": "adamw"}
    torch.manual_seed(1)
    engine, made, kept, stable = Engine(config(train=train), device="cpu"), STABLE[method](NETWORKS[network]()), [], []
    for t in range(3):
        learn(made, range(t, t + 1), engine)
        kept.append(logits(made, t))
        assert all(torch.equal(logits(made, old), kept[old]) for old in range(t + 1))
        stable.append(made.stable.clone())
        for name in made.units.layers:
            there = connections(made.backbone.get_parameter(f"{name}.weight"))
            into, of = made.units.between(name, made.stable)
            assert not there[~into | ~of].any(), "only what leads from stable units to stable units is left"
        assert not made.heads[t].weight[:, ~made.stable[made.units.out]].any()
        assert made.facts(t)["stable_units"] == int(made.stable.sum()) - 3
    assert (stable[0] <= stable[1]).all() and (stable[1] <= stable[2]).all() and (stable[0] < stable[2]).any()
    assert reload(made, lambda: STABLE[method](NETWORKS[network]())).stable.equal(made.stable)


def test_clnp_keeps_the_fewest_units_that_cost_nothing(monkeypatch):
    method = Clnp(convolutional(), theta_step=0.1)
    activations = torch.linspace(0, 1, len(method.stable))
    called = []

    def accuracy(part, stable):
        called.append(int(stable.sum()))
        return 100.0 if (activations > 0.3)[stable].sum() == (activations > 0.3).sum() else 50.0

    monkeypatch.setattr(method, "accuracy", accuracy)
    chosen = method.important(activations, None, 90.0)
    assert torch.equal(chosen, method.stable | (activations > 0.3)) and len(called) == 5
    assert method.important(activations, None, 101.0).all(), "if nothing is good enough, all units"
    method.stable.fill_(True)
    called.clear()
    assert method.important(activations, None, 0.0).all() and len(called) == 1, "no unit is added"


def test_units_are_tried_as_a_settled_task_would_hear_them():
    torch.manual_seed(0)
    method, task = Clnp(convolutional()), make_task(0, per_class=40)
    head = method.begin(task)
    stable = torch.rand(len(method.units)) < 0.7
    stable[:3] = True
    settled = copy.deepcopy(method).eval()
    settled.settle(stable)
    with torch.no_grad():
        x, *_ = next(task.in_order(len(task)))
        settled.heads[0].bias[0] += settled(x).diff(dim=1).median()  # half of the images are of either class
        head.bias.copy_(settled.heads[0].bias)
        head.weight[0, ~stable[method.units.out]] = 100.0  # with these heard, all of them of class 0
    tried, all_heard = method.accuracy(task, stable), method.accuracy(task, torch.ones_like(stable))
    assert tried == accuracy(settled, task) and tried != all_heard == 50.0


def test_clnp_with_all_units_taken_trains_the_head_alone():
    method = Clnp(convolutional())
    learn(method, range(1))
    method.stable.fill_(True)
    before = {name: value.clone() for name, value in method.backbone.state_dict().items()}
    learn(method, range(1, 2))
    assert all(torch.equal(value, before[name]) for name, value in method.backbone.state_dict().items())


def test_nispa_asks_for_less_activation_phase_by_phase():
    method = Nispa(convolutional())
    expected = {1: 99.726, 2: 98.907, 3: 97.553, 5: 93.301, 10: 75, 15: 50, 20: 25, 25: 6.699, 26: 4.323}
    for phase, percent in expected.items():
        assert method.share(phase) == pytest.approx(percent, abs=5e-4)


def test_nispa_chooses_the_fewest_most_active_units():
    method = Nispa(convolutional())
    activations = torch.zeros(len(method.units), dtype=torch.float64)
    one = method.units.layers["conv1"].makes
    activations[one] = torch.tensor([4.0, 1.0, 3.0, 2.0], dtype=torch.float64)
    assert method.candidates(activations, 70.0)[one].tolist() == [True, False, True, False]
    assert method.candidates(activations, 71.0)[one].tolist() == [True, False, True, True]
    assert method.candidates(activations, 100.0)[one].all() and method.candidates(activations, 100.0).sum() == 4


def test_rewiring_cuts_what_leads_to_stable_units_and_lets_as_much_grow():
    torch.manual_seed(0)
    method = Nispa(convolutional(8), density=0.3)
    method.begin(make_task(0))
    stable = torch.rand(len(method.units)) < 0.3
    stable[:3] = True
    before = {name: method.open[name].clone() for name in method.units.layers}
    weights = {name: method.backbone.get_parameter(f"{name}.weight").detach().clone() for name in before}
    method.rewire(stable)
    for name, was in before.items():
        now, weight = method.open[name], method.backbone.get_parameter(f"{name}.weight")
        into, of = method.units.between(name, stable)
        assert not (now & into & ~of).any() and torch.equal(now & into, was & into & of)
        assert (was & ~into <= now).all(), "what leads to others stays"
        assert now.sum() == was.sum() or (now | into).all(), "as many, or all that fit"
        assert torch.equal(connections(weight), now)
        kept = now & was
        assert torch.equal(weight[kept], weights[name][kept])
    linear = method.units.layers["linear"]
    heard = torch.zeros(len(method.units), dtype=torch.bool)
    heard[linear.reads[method.open["linear"]]] = True
    assert heard[linear.inputs].all(), "a unit that has no reader left gets one"


def test_connections_of_nispa_grow_with_weights_like_those_that_are_there():
    torch.manual_seed(0)
    method = Nispa(convolutional(8), density=0.3)
    before = {name: method.open[name].clone() for name in method.units.layers}
    with torch.no_grad():
        for name, there in before.items():
            weight = method.backbone.get_parameter(f"{name}.weight")
            weight.copy_((5 + 0.1 * torch.randn_like(weight)) * there.view(*there.shape, *[1] * (weight.ndim - 2)))
    method.rewire(torch.rand(len(method.units)) < 0.3)
    for name, was in before.items():
        grown = method.backbone.get_parameter(f"{name}.weight")[method.open[name] & ~was]
        assert not len(grown) or (grown.min() > 4 and grown.max() < 6 and grown.std() > 0.05)
    assert any((method.open[name] & ~was).any() for name, was in before.items())


def test_the_head_of_nispa_hears_chosen_units_alone(monkeypatch):
    method = Nispa(convolutional(8), density=0.9)
    chosen = torch.arange(len(method.units)) % 2 == 0
    monkeypatch.setattr(method, "candidates", lambda activations, share: chosen)
    phases = method.learn(make_task(0))
    for _ in range(2):
        phase = next(phases)
    head, heard = method.heads[0], chosen[method.units.out]
    assert head.weight[:, heard].any() and not head.weight[:, ~heard].any()
    phase.loss(next(make_task(0).batches(8, 0))).backward()
    phase.after_backward()
    assert head.weight.grad[:, heard].any() and not head.weight.grad[:, ~heard].any()


def test_a_unit_without_readers_gets_the_first_connection_that_grows():
    method = Nispa(convolutional(), density=1.0)
    reads = torch.arange(4).repeat(3, 1)
    there = torch.zeros(3, 4, dtype=torch.bool)
    there[0, [0, 1, 3]] = True
    for _ in range(5):
        new = method.grown(there, ~there, ~there, reads, method.stable, 1)
        assert new.sum() == 1 and new[:, 2].any()
    assert torch.equal(method.grown(there, ~there, ~there, reads, method.stable, 99), ~there), (
        "what does not fit is lost"
    )


def test_the_best_epoch_is_taken():
    network = torch.nn.Linear(1, 1)
    scores = iter([50.0, 80.0, 60.0, 80.0])  # of equal ones the first
    best = Best(network, lambda: next(scores), images=4)
    values = []
    for step in range(8):
        with torch.no_grad():
            network.weight.fill_(step)
        best.after_step(Batch(torch.zeros(2, 1), torch.zeros(2), torch.arange(2)))
        values.append(float(best.score))
    assert values == [-1, 50, 50, 80, 80, 80, 80, 80] and best.restore() == 80 and network.weight.item() == 3


def test_what_is_held_has_no_part_in_momentum_and_norms():
    weight = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    hooks = held({"w": weight}, {"w": torch.tensor([True, False])})
    weight.grad = torch.tensor([30.0, 4.0])
    hooks["after_backward"]()
    assert weight.grad.tolist() == [0.0, 4.0]
    with torch.no_grad():
        weight.sub_(0.5)
    hooks["after_step"](None)
    assert weight.tolist() == [1.0, 1.5]


def test_a_task_of_single_images_chooses_by_them():
    kept, held = held_out(make_task(0, per_class=1), 0.1)
    assert len(kept) == len(held) == 2
    kept, held = held_out(make_task(0, per_class=12), 0.1)
    assert (len(kept), len(held)) == (22, 2)


# ---------------------------------------------------------------------------------------------------- packing, growing

PACKING = {
    "pae": lambda network: Pae(network, train_accuracy=0.0, tasks=3),
    "cpg": lambda network: Cpg(network, train_accuracy=0.0, tasks=3),
}


@pytest.mark.parametrize(("method", "network"), [("pae", "resnet"), ("cpg", "convnet")])
def test_old_tasks_of_a_growing_network_keep_their_bits(method, network):
    """Whatever weight decay and momentum would do, and however far the network has grown."""
    train = {"epochs": 1, "batch_size": 8, "lr": 0.01, "weight_decay": 0.1, "optimizer": "adamw"}
    engine, made, kept, sizes = Engine(config(train=train), device="cpu"), PACKING[method](NETWORKS[network]()), [], []
    for t in range(3):
        if t == 2:
            made.train_accuracy = 100.0  # which nobody reaches: it grows
        learn(made, range(t, t + 1), engine)
        kept.append(logits(made, t))
        assert all(torch.equal(logits(made, old), kept[old]) for old in range(t + 1))
        sizes.append(made.size())
        owners = [made.owners[name] for name in made.owners.names]
        free = [(weight, owner == FREE) for weight, owner in zip(made.weights.values(), owners, strict=True)]
        assert not any(weight[mask].any() for weight, mask in free)
    assert sizes[0] < sizes[2] <= sum(p.numel() for p in made.parameters())
    assert float(made.multiplier) == made.max_multiplier and not any((owner == HIDDEN).any() for owner in owners)
    if method == "cpg":
        assert not any(made.picks[f"2.{name}"].logical_not().all() for name in made.owners.names)


@pytest.mark.parametrize(("make", "on_growth"), [(Pae, "restart"), (Pae, "continue"), (Cpg, "restart")])
def test_a_task_whose_network_has_grown_begins_again_or_goes_on(make, on_growth):
    begun = []

    class Begun(Engine):
        def train(self, method, task, phase, position, resume):
            if phase.name == method.names[1] and task.id:
                weights = {name: weight.detach().clone() for name, weight in method.weights.items()}
                owned = {name: method.owners[name] == task.id for name in weights}
                others = [p.detach().clone() for p in (*method.own_of(task.id), *method.heads[-1].parameters())]
                begun.append((weights, owned, others))
            super().train(method, task, phase, position, resume)

    engine = Begun(config(train={"epochs": 1, "batch_size": 8}), device="cpu")
    method = make(small_resnet(), on_growth=on_growth, max_multiplier=1.5, train_accuracy=0.0, tasks=3)
    learn(method, range(1), engine)
    method.train_accuracy = 100.0  # which nobody reaches: it grows
    learn(method, range(1, 2), engine)
    (before, owned, others), (after, more, again) = begun
    assert all(torch.equal(mask & more[name], mask) for name, mask in owned.items())
    assert sum(map(torch.sum, more.values())) > sum(map(torch.sum, owned.values())) > 0
    same = [torch.equal(before[name][mask], after[name][mask]) for name, mask in owned.items() if mask.any()]
    same += [torch.equal(one, other) for one, other in zip(others, again, strict=True)]
    assert all(same) == (on_growth == "restart")


@pytest.mark.parametrize(("goal", "grown"), [(60.0, 1.0), (80.0, 2.0)])
def test_a_network_grows_until_held_out_images_are_as_right_as_in_a_network_of_their_own(monkeypatch, goal, grown):
    """Training images, which are all right, do not stop it."""
    method = Pae(convolutional(), max_multiplier=2.0, train_accuracy=50.0, tasks=3)
    learn(method, range(1), Engine(config(train={"epochs": 1, "batch_size": 8}), device="cpu"))
    monkeypatch.setattr(method, "right", lambda part: 100.0 if len(part) > 12 else 70.0)
    monkeypatch.setattr(method, "rival", lambda kept, held: (yield from ()) or goal)
    monkeypatch.setattr(method, "compact", lambda *args, **options: ())
    for _ in method.learn(make_task(1)):
        pass
    assert float(method.multiplier) == grown


def test_a_network_begins_with_the_first_channels_of_each_layer():
    method = Pae(convolutional(8), max_multiplier=4.0)
    for name, share in {"conv1.weight": 1 / 2, "conv3.weight": 1 / 4, "linear.weight": 1 / 4}.items():
        there = method.owners[name] == FREE
        assert there.float().mean() == share and there[0].flatten()[0]
    assert (method.owners["conv3.weight"][:8, :4] == FREE).all()
    with torch.no_grad():
        method.begin(make_task(0))
        features = method.task_features(images(), 0)
    assert not features[:, 64:].any() and features.shape[1] == 128
    method.grow()
    assert float(method.multiplier) == 1.5
    assert (method.owners["conv1.weight"] == FREE).float().mean() == 5 / 8  # ceil(8 sqrt(1.5 / 4))


def test_weights_are_freed_to_a_share_of_what_is_free_and_own():
    weights = {"w": torch.arange(1.0, 21.0).view(4, 5)}
    owners = Owners(weights)
    owners["w"].copy_(torch.tensor([0] * 6 + [1] * 10 + [FREE] * 2 + [HIDDEN] * 2).view(4, 5))
    owners.prune_to(weights, 1, 0.5)
    assert owners["w"].flatten().tolist() == [0] * 6 + [FREE] * 4 + [1] * 6 + [FREE] * 2 + [HIDDEN] * 2
    owners.prune_to(weights, 1, 0.3)  # more is free already
    assert (owners["w"] == FREE).sum() == 6
    owners.clear(weights)
    assert torch.equal(weights["w"] == 0, owners["w"] == FREE)


def test_the_share_grows_fast_at_first():
    assert [cubic(p, 0.2, 1.0) for p in (0.0, 0.5, 1.0)] == pytest.approx([0.2, 1.0 - 0.8 / 8, 1.0])


@pytest.mark.parametrize(("short", "met", "learnt", "right", "freed", "phases"), [
    (False, True, 100.0, 100.0, 0.95, 10),  # as much as there is to free
    (False, True, 100.0, 0.0, 0.0, 10),  # below its goal from the first
    (False, True, 95.0, 100.0, 0.0, 1),  # a network that forgets its training images is never kept
    (True, False, 100.0, 0.0, 0.7, 7),  # full: what two tasks to come need, and no more
    (True, False, 0.0, 100.0, 0.7, 7),
    (False, False, 100.0, 100.0, 0.0, 0),
])  # fmt: skip
def test_as_much_is_freed_as_the_goal_allows_and_later_tasks_need(
    short, met, learnt, right, freed, phases, monkeypatch
):
    method = Pae(convolutional(), max_multiplier=1.0, tasks=3)
    task = make_task(0)
    head = method.begin(task)
    method.owners.claim(0)
    monkeypatch.setattr(method, "right", lambda part: right if part == "held" else learnt)
    ran = []

    class Learnt(Finetune):
        phases = Pae.phases

        def learn(self, task):
            for phase in method.compact(task, "held", head, 50.0, met=met, short=short):
                ran.append(phase)
                yield phase

    Engine(config(train={"epochs": 1}), device="cpu").learn(Learnt(convolutional()), task)
    assert len(ran) == phases
    for name in method.owners.names:
        size = method.owners[name].numel()
        assert int((method.owners[name] == FREE).sum()) == round(freed * size), name
        method.owners[name].fill_(1)
    assert not [*method.compact(task, "held", head, 50.0, met=True, short=True)], "a task without weights of its own"


@pytest.mark.parametrize("make", [Pae, Cpg, Clnp, Nispa])
def test_images_that_are_held_out_are_never_trained_on(make):
    engine = Rounds(lambda method: None)
    learn(make(convolutional(), hold_out=0.25), range(2), engine)
    assert engine.seen and {images for *_, images in engine.seen} == {18}  # of 24


def test_gradients_pass_the_threshold_to_masks_of_older_weights_alone():
    method = Cpg(convolutional())
    learn(method, range(1))
    method.begin(make_task(1))
    method.owners.claim(1)
    name = "conv2.weight"
    weight, owner, mask = method.weights[name], method.owners[name], method.live[0][name]
    with torch.no_grad():
        owner[0] = 1
        weight.normal_()
        mask[1, 0] = 0.005
    actual = method.weights_of(1)[name]
    expected = weight.detach().clone()
    expected[1, 0] = 0
    assert torch.equal(actual, expected.masked_fill(owner > 1, 0.0))
    slope = torch.randn_like(actual)
    (actual * slope).sum().backward()
    old = owner < 1
    assert torch.equal(mask.grad, torch.where(old, slope * weight, 0.0).detach()) and old.any()
    assert torch.equal(weight.grad, torch.where(owner == 1, slope, 0.0))


def test_cpg_that_picks_all_is_pae():
    one, other = (kind(convolutional(), max_multiplier=2.0, goal="scratch") for kind in (Cpg, Pae))
    for method in (one, other):
        learn(method, range(1))
        method.begin(make_task(1))
        method.owners.claim(1)
    for name, weight in one.weights_of(1).items():
        assert torch.equal(weight, other.weights_of(1)[name])


def test_the_last_phase_of_cpg_is_kept_for_its_best_epoch(monkeypatch):
    """Which is neither what was before it nor its last."""
    # that much accuracy frees nothing: the second task has none but the first one's weights to pick
    method, scores, seen = Cpg(convolutional(), train_accuracy=100.0, max_multiplier=1.0), [10.0, 20.0, 80.0, 30.0], []

    def score(part):
        seen.append({name: method.live[0][name].detach() > method.above for name in method.owners.names})
        return scores[len(seen) - 1]

    learn(method, range(1))
    monkeypatch.setattr(method, "score", score)
    lively = config(train={"phases": {"cpg_retrain": {"epochs": 3, "groups": {"picks": {"lr": 0.05}}}}})
    learn(method, range(1, 2), Engine(lively, device="cpu"))
    assert len(seen) == 4 and any((seen[2][name] != seen[3][name]).any() for name in method.owners.names)
    for name in method.owners.names:
        assert torch.equal(method.picks[f"1.{name}"], seen[2][name])
