"""Methods that keep statistics, masks or columns, against independent calculations of what their papers promise."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save
from sklearn.covariance import EmpiricalCovariance
from sklearn.linear_model import Ridge
from sklearn.neighbors import NearestCentroid
from torch import nn

from pearl.errors import ConfigError, Interrupted
from pearl.export import export
from pearl.export.trained import Trained
from pearl.methods.bounds.finetune import Finetune
from pearl.methods.bounds.isolation import Isolation
from pearl.methods.common.class_moments import ClassMoments
from pearl.methods.prototypes.closed_form import correlation, mahalanobis, nearest_mean, ridge, shrink
from pearl.methods.prototypes.fecam import FeCam
from pearl.methods.prototypes.fetril import FeTril, pseudo_features
from pearl.methods.prototypes.ncm import NearestMean
from pearl.methods.sparse.masks import FREE, Owners, weight_names
from pearl.methods.sparse.packnet import PackNet
from pearl.methods.sparse.pnn import Progressive
from pearl.nn.resnet import resnet18
from pearl.settings.config import load_config
from pearl.testing.conformance import (
    Cut,
    shows_experts_equal_forward,
    shows_resume_inside_a_task_bit_exact,
    shows_strict_reload,
)
from pearl.testing.tiny import CLASSES, SIZE, config, images, learn, logits, make_task, reload
from pearl.training.engine import Engine

pytestmark = pytest.mark.slow


def net(width=4):
    torch.manual_seed(1)
    return resnet18(SIZE, width=width)


def vit():
    torch.manual_seed(1)
    backbone = timm.create_model("test_vit", num_classes=0, img_size=SIZE, patch_size=4)
    backbone.dim, backbone.pretrained = backbone.num_features, True
    return backbone


def raw(task):
    """A task's images as the network sees them without augmentation, and their labels."""
    task = make_task(task)
    return task.view.test(task.images), task.labels.numpy()


@torch.no_grad()
def features_of(method, tasks):
    parts = [raw(t) for t in range(tasks)]
    features = [method.eval().backbone(x).numpy() for x, _ in parts]
    return np.concatenate(features).astype(np.float64), np.concatenate([y for _, y in parts])


# ------------------------------------------------------------------------------------------------ class statistics


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1000),
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=6),
    shift=st.sampled_from([0.0, 1e4]),
)
def test_streaming_statistics_are_those_of_all_at_once(seed, sizes, shift):
    rng = np.random.default_rng(seed)
    count, dim, classes = sum(sizes), 5, 3
    features, labels = rng.normal(shift, 1.0, (count, dim)), rng.integers(0, classes, count)
    statistics = ClassMoments(dim, covariance=True)
    statistics.grow(classes, torch.device("cpu"))
    for x, y in zip(torch.tensor(features).split(sizes), torch.tensor(labels).split(sizes), strict=True):
        statistics.update(x, y)
    for c in range(classes):
        of_class = features[labels == c]
        assert statistics.tensors["0.count"][c] == len(of_class)
        if len(of_class):
            np.testing.assert_allclose(statistics.means()[c], of_class.mean(0), rtol=1e-12, atol=1e-12)
        if len(of_class) > 1:
            np.testing.assert_allclose(statistics.covariances(0)[c], np.cov(of_class.T), rtol=1e-9, atol=1e-9)
        else:
            assert not statistics.covariances(0)[c].any()


def test_statistics_stand_in_order_of_arrival_and_take_their_size_from_the_file():
    statistics = ClassMoments(2, covariance=True)
    for t, classes in enumerate([2, 3]):
        statistics.grow(classes, torch.device("cpu"))
        statistics.update(torch.arange(classes)[:, None] + torch.full((classes, 2), 10.0 * t), torch.arange(classes))
    assert statistics.means()[:, 0].tolist() == [0, 1, 10, 11, 12]
    assert statistics.means(1)[:, 0].tolist() == [10, 11, 12]
    assert (statistics.columns(0), statistics.columns(1)) == (slice(0, 2), slice(2, 5))
    assert statistics.means().dtype == torch.float64

    fresh = ClassMoments(2, covariance=True)
    fresh.load_state_dict(load(save(statistics.state_dict())), strict=True)
    assert torch.equal(fresh.means(), statistics.means()) and len(fresh) == 2


# ------------------------------------------------------------------------------------------------ closed-form heads


def gaussian(count=60, dim=4, classes=3, seed=0):
    rng = np.random.default_rng(seed)
    labels = np.arange(count) % classes
    mix = rng.normal(size=(classes, dim, dim))
    features = np.einsum("nij,nj->ni", mix[labels], rng.normal(size=(count, dim))) + 2 * mix[labels, 0]
    return features, labels, rng.normal(size=(15, dim)) * 3


def test_nearest_mean_is_sklearns():
    features, labels, new = gaussian()
    theirs = NearestCentroid().fit(features, labels)
    ours = nearest_mean(torch.tensor(new), torch.tensor(theirs.centroids_))
    assert (ours.argmax(1).numpy() == theirs.predict(new)).all()
    np.testing.assert_allclose(ours, -(((new[:, None] - theirs.centroids_) ** 2).sum(2)), rtol=1e-10, atol=1e-10)


def test_mahalanobis_is_sklearns():
    features, labels, new = gaussian()
    theirs = [EmpiricalCovariance().fit(features[labels == c]) for c in range(3)]
    means = torch.tensor(np.stack([t.location_ for t in theirs]))
    precisions = torch.tensor(np.stack([t.precision_ for t in theirs]))
    expected = np.stack([t.mahalanobis(new) for t in theirs], 1)
    np.testing.assert_allclose(-mahalanobis(torch.tensor(new), means, precisions), expected, rtol=1e-9)


def test_mahalanobis_of_round_classes_is_nearest_mean():
    new, means = torch.randn(7, 4, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)
    round_ones = torch.eye(4, dtype=torch.float64).expand(3, 4, 4)
    torch.testing.assert_close(mahalanobis(new, means, round_ones), nearest_mean(new, means))


@pytest.mark.parametrize("strength", [0.01, 1.0, 100.0])
def test_ridge_is_sklearns(strength):
    features, labels, _ = gaussian()
    targets = np.eye(3)[labels]
    x, y = torch.tensor(features), torch.tensor(targets)
    plain = Ridge(alpha=strength, fit_intercept=False).fit(features, targets)
    np.testing.assert_allclose(ridge(x.T @ x, x.T @ y, strength), plain.coef_, rtol=1e-8, atol=1e-10)
    whole = Ridge(alpha=strength).fit(features, targets)
    x, y = x - x.mean(0), y - y.mean(0)
    weights = ridge(x.T @ x, x.T @ y, strength)
    np.testing.assert_allclose(weights, whole.coef_, rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(targets.mean(0) - weights.numpy() @ features.mean(0), whole.intercept_, atol=1e-10)


def numpy_shrink(covariance, alpha1, alpha2):
    """As FeCAM's equation 8, entry by entry."""
    dim = len(covariance)
    variances = [covariance[i, i] for i in range(dim)]
    others = [covariance[i, j] for i in range(dim) for j in range(dim) if i != j and covariance[i, j] != 0]
    shrunk = covariance.copy()
    for i in range(dim):
        for j in range(dim):
            shrunk[i, j] += alpha1 * np.mean(variances) if i == j else alpha2 * np.mean(others)
    return shrunk


def test_shrinkage_and_correlation_entry_by_entry():
    features, labels, _ = gaussian()
    covariances = np.stack([np.cov(features[labels == c].T) for c in range(3)])
    ours = shrink(torch.tensor(covariances), 0.7, 0.3)
    np.testing.assert_allclose(ours, np.stack([numpy_shrink(c, 0.7, 0.3) for c in covariances]), rtol=1e-12)
    expected = [np.corrcoef(features[labels == c].T) for c in range(3)]
    np.testing.assert_allclose(correlation(torch.tensor(covariances)), np.stack(expected), rtol=1e-10)
    assert torch.equal(shrink(ours, 0.0, 0.0), ours)


def test_dead_units_and_single_images_have_a_correlation():
    covariance = torch.zeros(2, 3, 3, dtype=torch.float64)
    covariance[0, :2, :2] = torch.tensor([[2.0, 1.0], [1.0, 2.0]])
    actual = correlation(covariance)
    assert actual[0].tolist() == [[1, pytest.approx(0.5), 0], [pytest.approx(0.5), 1, 0], [0, 0, 1]]
    assert torch.equal(actual[1], torch.eye(3, dtype=torch.float64))
    assert torch.isfinite(shrink(covariance, 1, 1)).all()


# ------------------------------------------------------------------------------------------------ frozen extractors

FROZEN = {"ncm": NearestMean, "fecam": FeCam, "fetril": FeTril}


@pytest.mark.parametrize("kind", FROZEN.values(), ids=FROZEN)
def test_a_frozen_extractor_does_not_move_nor_do_its_statistics(kind):
    method = kind(net())
    start = {name: value.clone() for name, value in method.backbone.state_dict().items()}
    learn(method, range(1))
    first = {name: value.clone() for name, value in method.backbone.state_dict().items()}
    assert not torch.equal(first["conv1.weight"], start["conv1.weight"])
    assert not torch.equal(first["bn1.running_mean"], start["bn1.running_mean"])
    learn(method, range(1, 3))
    assert all(torch.equal(value, first[name]) for name, value in method.backbone.state_dict().items())

    given_ones = kind(net(), extractor="given")
    learn(given_ones, range(2))
    assert all(torch.equal(value, start[name]) for name, value in given_ones.backbone.state_dict().items())


@pytest.mark.parametrize("kind", FROZEN.values(), ids=FROZEN)
def test_a_pretrained_extractor_is_not_trained(kind):
    assert kind(net()).extractor == "first_task"
    assert kind(vit()).extractor == "given"


def test_task_1_of_frozen_extractors_is_plain_training():
    def after(method):
        learn(method, range(1))
        return method.backbone.state_dict()["layer4.1.conv2.weight"]

    actual = [after(kind(net())) for kind in (NearestMean, FeCam, FeTril, Finetune)]
    assert all(torch.equal(actual[0], other) for other in actual[1:])


@pytest.mark.filterwarnings("ignore:self.within_class_std_dev_")  # a dead unit; sklearn's own affair
def test_ncm_is_sklearns_nearest_centroid_on_the_features():
    method = NearestMean(net())
    learn(method, range(3))
    features, labels = features_of(method, 3)
    centroids = NearestCentroid().fit(features, labels)
    np.testing.assert_allclose(method.statistics.means(), centroids.centroids_, rtol=1e-5, atol=1e-7)
    new = method.backbone(images()).detach().numpy().astype(np.float64)
    assert (logits(method).argmax(1).numpy() == centroids.predict(new)).all()
    expected = -((new[:, None] - centroids.centroids_) ** 2).sum(2)
    np.testing.assert_allclose(logits(method), expected, rtol=1e-4, atol=1e-6)


def test_ncm_by_angle_forgets_lengths():
    method = NearestMean(net(), distance="cosine")
    learn(method, range(2))
    z = torch.rand(5, method.heads.dim)
    torch.testing.assert_close(method.score(z), method.score(7 * z))
    means = method.statistics.means().float()
    torch.testing.assert_close(method.score(z), F.cosine_similarity(z[:, None], means[None], dim=2))


def numpy_fecam(features, labels, new, *, beta, alphas, shrinkages, normalise):
    """The paper's distance with numpy alone."""

    def tukey(x):
        return np.sign(x) * np.abs(x) ** beta

    def unit(x):
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    distances = []
    for c in range(labels.max() + 1):
        of_class = features[labels == c]
        covariance = np.cov(tukey(of_class).T)
        for _ in range(shrinkages):
            covariance = numpy_shrink(covariance, *alphas)
        if normalise:
            deviations = np.sqrt(np.diag(covariance))
            covariance = covariance / np.outer(deviations, deviations)
        apart = unit(tukey(new)) - unit(tukey(of_class.mean(0)))
        distances.append(np.einsum("ni,ij,nj->n", apart, np.linalg.pinv(covariance), apart))
    return np.stack(distances, 1)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tukey": 1.0},
        {"alpha1": 0.1, "alpha2": 0.02, "shrinkages": 1},
        {"normalise": False},
        {"tukey": 0.3, "alpha1": 5.0, "alpha2": 0.0},
    ],
    ids=str,
)
def test_fecam_is_the_papers_distance(options):
    method = FeCam(net(), **options)
    learn(method, range(2))
    features, labels = features_of(method, 2)
    new = method.backbone(images()).detach().numpy().astype(np.float64)
    expected = numpy_fecam(
        features,
        labels,
        new,
        beta=options.get("tukey", 0.5),
        alphas=(options.get("alpha1", 1.0), options.get("alpha2", 1.0)),
        shrinkages=options.get("shrinkages", 2),
        normalise=options.get("normalise", True),
    )
    np.testing.assert_allclose(-logits(method), expected, rtol=1e-4, atol=1e-6 * expected.max())


def test_fecam_with_endless_shrinkage_is_nearest_mean():
    """Covariances become round and, normalised, the same for all classes."""
    method = FeCam(net(), alpha1=1e9, alpha2=0.0, tukey=1.0)
    learn(method, range(2))
    z = torch.rand(9, method.heads.dim)
    means = F.normalize(method.statistics.means())
    torch.testing.assert_close(method.score(z), nearest_mean(F.normalize(z).double(), means).float())


def test_fecam_is_the_authors_of_its_backbone():
    def settings(method):
        return method.tukey, method.alpha1, method.alpha2, method.shrinkages, method.normalise, method.unit

    assert settings(FeCam(net())) == (0.5, 1.0, 1.0, 2, True, False)
    assert settings(FeCam(vit())) == (1.0, 1.0, 0.0, 1, True, True)
    assert settings(FeCam(vit(), alpha2=1.0, shrinkages=2, unit=False)) == (1.0, 1.0, 1.0, 2, True, False)


def test_the_power_transform_is_odd():
    z = torch.tensor([[-4.0, 0.0, 9.0]])
    assert FeCam(net()).transform(z).tolist() == [[-2.0, 0.0, 3.0]]


def test_fecam_takes_a_class_of_one_image():
    method = FeCam(net())
    engine = Engine(config(train={"batch_size": 2, "epochs": 1}), device="cpu")
    for t in range(2):
        engine.learn(method, make_task(t, per_class=1))
    assert torch.isfinite(logits(method)).all()


def test_pseudo_features_have_the_means_of_the_old_classes():
    method = FeTril(net())
    learn(method, range(2))
    features, labels = features_of(method, 3)
    task = make_task(2)
    z = method.observe(task)
    nearest, ways = method.translations(2 * CLASSES)

    new_means = np.stack([features[labels == c].mean(0) for c in range(4, 6)])
    similar = [
        4 + np.argmax(new_means @ mean / np.linalg.norm(new_means, axis=1))
        for mean in (features[labels == c].mean(0) for c in range(4))
    ]
    assert nearest.tolist() == similar

    actual, of = pseudo_features(z, task.labels, nearest, ways)
    assert sorted(of.bincount().tolist()) == [12] * 6  # each class has as many as its donor
    for c in range(6):
        np.testing.assert_allclose(actual[of == c].mean(0), features[labels == c].mean(0), rtol=1e-4, atol=1e-6)
        if c < 4:  # translated, and nothing else
            donor = z[task.labels == nearest[c]]
            torch.testing.assert_close(actual[of == c] - actual[of == c][0], donor - donor[0], rtol=1e-4, atol=1e-6)


def test_an_epoch_of_batches_has_every_pseudo_feature_once():
    method = FeTril(net())
    learn(method, range(2))
    task = make_task(2)
    z = method.observe(task)
    moves = method.translations(4)
    whole = pseudo_features(z, task.labels, *moves)
    parts = [pseudo_features(z[b.rows], b.y, *moves) for b in task.batches(8, seed=3)]

    def rows(features, labels):
        return sorted([y, *x] for x, y in zip(features.tolist(), labels.tolist(), strict=True))

    assert rows(*whole) == rows(torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts]))


def test_fetril_learns_old_classes_that_it_does_not_see():
    """Classes that are translations of each other are what the method assumes: then nothing is forgotten."""

    class Flat(nn.Module):
        dim, pretrained = 6, True

        def __init__(self):
            super().__init__()
            self.unused = nn.Linear(1, 1)

        def forward(self, x):
            return x.mean((2, 3)).repeat(1, 2) * torch.tensor([1.0, 1.0, 1.0, 2.0, 2.0, 2.0])

    means = np.array([[0, 0, 0], [200, 0, 0], [0, 200, 0], [0, 0, 200], [200, 200, 0], [0, 200, 200]])
    tasks = []
    for t in range(3):
        task = make_task(t)
        noise = np.random.default_rng(t).integers(0, 30, task.images.shape)
        task._images = torch.tensor(means[task.labels][:, None, None] + noise, dtype=torch.uint8)
        tasks.append(task)
    seen = [(task.view.test(task.images), task.labels) for task in tasks]
    method = FeTril(Flat())
    settings = config(train={"epochs": 60, "lr": 0.1}, images={"size": SIZE})
    for task in tasks:
        Engine(settings, device="cpu").learn(method, task)
    with torch.no_grad():
        for x, y in seen:
            assert (method.eval()(x).argmax(1) == y).float().mean() > 0.95


# ------------------------------------------------------------------------------------------------ masks and PackNet


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000), shape=st.tuples(st.integers(1, 6), st.integers(1, 6)), share=st.floats(0, 0.99))
def test_pruning_takes_exactly_the_smallest_of_a_tasks_own(seed, shape, share):
    rng = np.random.default_rng(seed)
    weight = torch.tensor(rng.integers(-3, 4, shape), dtype=torch.float32)  # with ties
    owners = Owners({"w": weight})
    owners.claim(0)
    owners["w"][torch.tensor(rng.random(shape) < 0.5)] = FREE
    owners.claim(1)
    before, own = weight.clone(), owners["w"] == 1
    owners.prune({"w": weight}, 1, share)
    gone = owners["w"] == FREE
    assert gone.sum() == round(share * int(own.sum()))
    assert not (gone & ~own).any() and not weight[gone].any()
    assert torch.equal(weight[~gone], before[~gone])
    kept = own & ~gone
    if gone.any() and kept.any():
        assert before[gone].abs().max() <= before[kept].abs().min()


@pytest.mark.parametrize("share", [0.5, 0.75])
def test_masks_are_disjoint_and_of_the_papers_sizes(share):
    method = PackNet(net(), prune=share)
    learn(method, range(3))
    assert set(method.owners.names) == set(weight_names(method.backbone))
    for name, weight in method.weights.items():
        owner, left = method.owners[name], weight.numel()
        for t in range(3):
            own = left - round(share * left)
            assert (owner == t).sum() == own, name
            left -= own
        assert (owner == FREE).sum() == left
        assert not weight[owner == FREE].any()
        masks = torch.stack([method.owners.mask(name, t) for t in range(3)]).int()
        assert (masks.diff(dim=0) >= 0).all()  # a task has all that earlier ones have


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_old_tasks_of_packnet_keep_their_bits(optimizer):
    """Whatever momentum and weight decay would do to weights without a gradient."""
    train = {"epochs": 2, "batch_size": 8, "optimizer": optimizer, "lr": 0.01, "weight_decay": 0.1, "clip": 1.0}
    engine = Engine(config(train=train), device="cpu")
    method = PackNet(net())
    kept = []
    for t in range(3):
        learn(method, range(t, t + 1), engine)
        kept.append(logits(method, t))
        assert all(torch.equal(logits(method, old), kept[old]) for old in range(t + 1))
        if t == 0:
            first = {name: value.clone() for name, value in method.backbone.state_dict().items()}
    changed = {name for name, value in method.backbone.state_dict().items() if not torch.equal(value, first[name])}
    assert changed == set(method.owners.names)  # and not a bias, norm layer or running statistic


class FirstPhase(Engine):
    """Keeps the logits after the first phase."""

    def train(self, method, task, phase, position, resume):
        super().train(method, task, phase, position, resume)
        if not position:
            self.after_first = logits(method, task.id)
            method.train()


def test_packnet_that_prunes_nothing_is_plain_training():
    engine = FirstPhase(config(), device="cpu")
    method, plain = PackNet(net(), prune=0.0), Finetune(net())
    engine.learn(method, make_task(0))
    learn(plain, range(1))
    assert torch.equal(engine.after_first, logits(plain))
    assert all((method.owners[name] == 0).all() for name in method.owners.names)
    learn(method, range(1, 2))  # nothing is free any more: only the head learns
    assert logits(method).shape == (6, 2 * CLASSES)


def test_packnet_computes_with_old_weights_and_no_later_ones():
    method = PackNet(net(), prune=0.5)
    learn(method, range(2))
    weights = method.owners.masked(method.weights, 0)
    copy = net()
    state = method.backbone.state_dict()
    copy.load_state_dict({**state, **weights})
    with torch.no_grad():
        torch.testing.assert_close(method.heads[0](copy.eval()(images())), logits(method, 0))
    before = logits(method, 1)
    with torch.no_grad():
        name = method.owners.names[0]
        method.weights[name][method.owners[name] == 0] += 1.0
    assert not torch.equal(logits(method, 1), before)


# ------------------------------------------------------------------------------------------------ progressive columns


def test_one_column_is_plain_training():
    method, plain = Progressive(net()), Isolation(net())
    learn(method, range(1))
    learn(plain, range(1))
    assert torch.equal(logits(method), logits(plain))
    assert method.size() == plain.size()


def test_earlier_columns_keep_their_bits_and_statistics():
    method = Progressive(net())
    learn(method, range(2))
    before = {name: value.clone() for name, value in method.state_dict().items()}
    learn(method, range(2, 3))
    after = method.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    new = {name.split(".")[0] for name in after.keys() - before.keys()}
    assert new == {"networks", "heads", "adapters"}


def test_a_column_hears_the_earlier_ones_at_every_stage():
    method = Progressive(net())
    learn(method, range(3))
    assert method.stages == ["layer1", "layer2", "layer3", "layer4"]
    x = images()
    with torch.no_grad():
        heard, features = [], []
        for t in range(3):
            column = method.network(t).eval()
            h, own = F.relu(column.bn1(column.conv1(x))), []
            for stage in method.stages:
                h = getattr(column, stage)(h)
                if t:
                    lateral = torch.zeros_like(h)
                    for j in range(t):
                        v = method.adapters[f"{t}.{j}.V.{stage}"]
                        alpha = method.adapters[f"{t}.{j}.alpha.{stage}"]
                        lateral += F.conv2d(alpha * heard[j][method.stages.index(stage)], v[:, :, None, None])
                    h = h + F.relu(lateral)
                own.append(h)
            heard.append(own)
            features.append(h.mean((2, 3)))
        expected = torch.cat([method.heads[t](z) for t, z in enumerate(features)], 1)
    torch.testing.assert_close(logits(method), expected, rtol=1e-5, atol=1e-6)


def test_columns_that_hear_nothing_are_isolation():
    method, plain = Progressive(net()), Isolation(net())
    learn(method, range(2))
    learn(plain, range(2))
    with torch.no_grad():
        for name, value in method.adapters.named_parameters():
            if "/alpha/" in name:
                value.zero_()
        for t in range(2):
            method.network(t).load_state_dict(plain.network(t).state_dict())
            method.heads[t].load_state_dict(plain.heads[t].state_dict())
    torch.testing.assert_close(logits(method), logits(plain))


def test_adapters_are_trained_with_their_column():
    method = Progressive(net())
    learn(method, range(1))
    generator = method.learn(make_task(1))
    torch.manual_seed(0)
    phase = next(generator)
    trained = {id(p) for p in phase.trained}
    assert all(id(p) in trained for p in method.adapters.parameters())
    assert len(method.adapters) == 2 * 4
    alphas = [p.item() for name, p in method.adapters.named_parameters() if "alpha" in name]
    assert all(0 <= alpha <= 0.1 for alpha in alphas)


def test_size_of_columns_grows_with_the_square_of_tasks():
    method = Progressive(net())
    learn(method, range(3))
    column = sum(p.numel() for p in method.backbone.parameters())
    head = CLASSES * (method.heads.dim + 1)
    pair = sum(width**2 + 1 for width in (4, 8, 16, 32))
    assert method.size() == 3 * (column + head) + 3 * pair


@pytest.mark.parametrize(("stages", "message"), [("nothing", "matches no module"), ("(", "not a valid regular")])
def test_stages_that_are_not_there_are_named(stages, message):
    with pytest.raises(ConfigError, match=message):
        Progressive(net(), stages=stages)


# ------------------------------------------------------------------------------------------------ the contract

ON_VIT = {
    "pnn": lambda: Progressive(vit()),
    "packnet": lambda: PackNet(vit()),
    "ncm": lambda: NearestMean(vit()),
    "fetril": lambda: FeTril(vit()),
    "fecam": lambda: FeCam(vit()),
}


@pytest.mark.parametrize("method", ON_VIT)
@pytest.mark.parametrize(
    "check", [shows_strict_reload, shows_experts_equal_forward, shows_resume_inside_a_task_bit_exact]
)
def test_on_a_transformer(method, check):
    check(ON_VIT[method])


ON_RESNET = {
    "pnn": lambda: Progressive(net()),
    "packnet": lambda: PackNet(net()),
    "ncm": lambda: NearestMean(net()),
    "fetril": lambda: FeTril(net()),
    "fecam": lambda: FeCam(net()),
}


@pytest.mark.parametrize("method", ON_RESNET)
def test_resume_inside_the_first_task(method):
    make = ON_RESNET[method]
    whole, engine = make(), Engine(config(), device="cpu")
    learn(whole, range(1))
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(100):
            cut = reload(make(), make)
            try:
                engine.learn(cut, make_task(0), Cut(Path(folder), 4))
                break
            except Interrupted:
                continue
    for name, value in whole.state_dict().items():
        assert torch.equal(cut.state_dict()[name], value), name


@pytest.mark.parametrize("method", ["pnn", "packnet"])
def test_made_for_task_il(method):
    assert ON_RESNET[method]().task_identity


@pytest.mark.parametrize(
    "override",
    ["packnet method.prune=1", "packnet method.prune=-0.1", "fecam method.tukey=0", "fecam method.alpha1=-1",
     "fecam method.shrinkages=-1", "ncm method.distance=far", "fetril method.extractor=last"],
)  # fmt: skip
def test_options_out_of_range_are_refused(override):
    method, option = override.split()
    with pytest.raises(ConfigError, match=option.split("=")[0]):
        load_config("digits", [f"method={method}", option])


@pytest.mark.parametrize("method", ["ncm", "fecam", "fetril"])
def test_what_is_kept_beside_the_parameters_is_told(method):
    made = ON_RESNET[method]()
    learn(made, range(2))
    dim, classes = made.heads.dim, 2 * CLASSES
    expected = classes * (dim + 1) + (classes * dim**2 if method == "fecam" else 0)
    assert made.facts(1) == {"statistics": expected}


@pytest.mark.parametrize("method", ON_RESNET)
def test_an_exported_program_gives_the_logits(method, tmp_path):
    made = ON_RESNET[method]()
    learn(made, range(2))
    tasks = [{"name": f"task {t}", "classes": [f"{t}.{c}" for c in range(CLASSES)]} for t in range(2)]
    model = Trained(made.eval(), config().images, tasks, {"name": "resnet18", "width": 4})
    pixels = torch.randint(256, (3, SIZE, SIZE, 3), dtype=torch.uint8)
    export(model, "torch", tmp_path / "model.pt2", pixels)  # compares before it writes
    assert (tmp_path / "model.pt2").is_file()
