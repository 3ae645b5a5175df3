"""Class statistics against their formulas in NumPy, image by image and class by class, and what they promise."""

import copy
import math
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.special import log_softmax, logsumexp

from pearl.data.augment import View
from pearl.data.batches import Batch, derive_seed
from pearl.errors import RunError, TrainingError
from pearl.lifecycle.recognition import unlearnt
from pearl.methods.bounds.isolation import Isolation
from pearl.methods.common import calibration
from pearl.methods.common.by_statistics import Statistics
from pearl.methods.common.calibration import DOUBT, ENOUGH, LeftOut, Scores, moved, score
from pearl.methods.common.class_statistics import GRID, UNCALIBRATED, ClassStatistics
from pearl.methods.common.feature_spaces import ByClass, fits, misfit, projection
from pearl.methods.common.retained import retained
from pearl.methods.common.scatter import pieces
from pearl.methods.pearl import Pearl
from pearl.nn.fast.folding import with_weights
from pearl.nn.intermediate_features import WithInner, inner_layers
from pearl.nn.timm import timm_backbone
from pearl.testing.tiny import SIZE, config, learn, make_task, small_resnet, small_vit
from pearl.training.engine import Engine
from zoo import separable

RAW = (40, 24)  # raw features of the two sub-networks
CLASSES = (3, 2, 4)  # of three tasks


def stream(seed=0, per_class=12, views=None):
    """Per task: labels, and raw features (N, p) in each sub-network; with `views` (N, views, p)."""
    rng = np.random.default_rng(seed)
    centres = [rng.normal(size=(sum(CLASSES), dim)) for dim in RAW]
    tasks, first = [], 0
    for count in CLASSES:
        labels = np.repeat(np.arange(first, first + count), per_class)[rng.permutation(count * per_class)]
        raws = [c[labels] + 1.5 * rng.normal(size=(len(labels), c.shape[1])) for c in centres]
        if views:
            raws = [raw[:, None] + 0.7 * rng.normal(size=(len(raw), views, raw.shape[1])) for raw in raws]
        tasks.append((labels, raws))
        first += count
    test = rng.integers(0, sum(CLASSES), 50)
    return tasks, [c[test] + 1.5 * rng.normal(size=(len(test), c.shape[1])) for c in centres]


def taught(options, tasks):
    class_statistics = ClassStatistics(options)
    for t, (labels, raws) in enumerate(tasks):
        if class_statistics.wants_space() and t < len(RAW):
            class_statistics.add_space(t, torch.tensor(first_view(raws[t])).float())
        raws = raws[: len(class_statistics.created_at)]
        features = [in_space(space, raw) for space, raw in zip(class_statistics.spaces(), raws, strict=True)]
        class_statistics.observe(features, torch.tensor(labels))
    return class_statistics


def first_view(raw):
    return raw[:, 0] if raw.ndim == 3 else raw


def in_space(space, raw):
    """Features of raw ones, of one view (N, p) or several (N, views, p)."""
    return space(torch.tensor(raw).float().flatten(0, -2)).reshape(*raw.shape[:-1], -1)


def length(rows):
    return rows / np.linalg.norm(rows, axis=1, keepdims=True) * np.sqrt(rows.shape[1])


def written_out(tasks, test, spaces, dim, temperature=None, updated=True):
    """log P (images, classes) and the temperature, by loops over the formulas of the module."""
    made = []
    for v in range(spaces):
        raw = tasks[v][1][v]
        p = projection(v, raw.shape[1], dim).double().numpy() if dim and dim < raw.shape[1] else np.eye(raw.shape[1])
        half = lambda x, v=v, raw=raw, p=p: length((x - raw.mean(0)) / (raw.std(0) + 1e-6)) @ p  # noqa: E731
        own = half(raw)
        made.append(lambda x, half=half, own=own: length((half(x) - own.mean(0)) / (own.std(0) + 1e-6)))

    def scores(v, known, x):
        """One column a class of `known`: (task, label, rows in space v)."""
        mu = np.stack([rows.mean(0) for _, _, rows in known])
        counted = [rows for t, _, rows in known if updated or t < 2]
        freedom = sum(len(rows) - 1 for rows in counted)
        p = mu.shape[1]
        s = sum((rows - rows.mean(0)).T @ (rows - rows.mean(0)) for rows in counted) / max(1, freedom)
        a = (p / (freedom + p)) ** 3
        inverse = np.linalg.inv((1 - a) * s + a * np.trace(s) / p * np.eye(p))
        return np.stack([x @ inverse @ m - 0.5 * m @ inverse @ m for m in mu], axis=1)

    def chained(images, shown, used, temperatures):
        """`shown`: per task its rows and labels in every space; `images` in every space; log P at each temperature."""
        steps = []
        for u in range(len(shown)):
            later = [(t, c) for t in range(u, len(shown)) for c in sorted(set(shown[t][0]))]
            total = 0
            for v in range(min(u + 1, used)):
                everyone = [
                    (t, c, shown[t][1][v][shown[t][0] == c])
                    for t in range(v, len(shown))
                    for c in sorted(set(shown[t][0]))
                ]
                column = {(t, c): i for i, (t, c, _) in enumerate(everyone)}
                total = total + scores(v, everyone, images[v])[:, [column[each] for each in later]]
            steps.append((u, later, total / min(u + 1, used)))
        for temperature in temperatures:
            out, passed = {}, np.zeros(len(images[0]))
            for u, later, mean in steps:
                logq = log_softmax(temperature * mean, axis=1)
                for i, (t, c) in enumerate(later):
                    if t == u:
                        out[c] = passed + logq[:, i]
                after = [i for i, (t, _) in enumerate(later) if t > u]
                if after:
                    passed = passed + logsumexp(logq[:, after], axis=1)
            yield np.stack([out[c] for c in sorted(out)], axis=1)

    shown = [(labels, [made[v](raws[v]) for v in range(spaces)]) for labels, raws in tasks]
    if temperature is None:
        loss = np.log(GRID.numpy() / UNCALIBRATED) ** 2 / 2
        for t in range(1, len(tasks)):
            labels, rows = shown[t]
            for i, label in enumerate(labels):
                kept = [*shown[:t], (np.delete(labels, i), [np.delete(each, i, axis=0) for each in rows])]
                out = [each[i : i + 1] for each in rows]
                loss -= [logp[0, label] for logp in chained(out, kept, min(spaces, t), GRID.tolist())]
        temperature = float(GRID[loss.argmin()])
    (actual,) = chained([make(x) for make, x in zip(made, test, strict=False)], shown, spaces, [temperature])
    return actual, temperature


@pytest.mark.parametrize(("spaces", "dim"), [(1, None), (2, 16), (2, 30)])
def test_it_is_what_its_formulas_say(spaces, dim):
    tasks, test = stream()
    class_statistics = taught(Statistics(spaces=spaces, projection=dim), tasks)
    _, temperature = written_out(tasks, test, spaces, dim)
    step = float(GRID[1] / GRID[0])  # without an image the trace is another one, which the closed form leaves out
    assert 0.99 / step < class_statistics.temperature / temperature < 1.01 * step
    expected, _ = written_out(tasks, test, spaces, dim, class_statistics.temperature)
    actual = class_statistics.head()([torch.tensor(x).float() for x in test[:spaces]]).double().numpy()
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(np.exp(actual).sum(1), 1, rtol=1e-5)


def test_a_frozen_covariance_is_the_one_after_two_tasks():
    tasks, test = stream()
    class_statistics = taught(Statistics(spaces=2, projection=16, covariance="frozen"), tasks)
    actual = class_statistics.head()([torch.tensor(x).float() for x in test]).double().numpy()
    expected, _ = written_out(tasks, test, 2, 16, class_statistics.temperature, updated=False)
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-3)


def test_a_frozen_covariance_of_a_later_space_is_of_the_task_that_made_it():
    method = Isolation(small_resnet(), classifier=Statistics(covariance="frozen"))
    learn(method, range(4))
    freedom = [int(method.class_statistics.tensors[f"space.{v}.freedom"]) for v in range(3)]
    each = len(make_task(0)) - len(make_task(0).classes)
    assert freedom == [2 * each, each, each]


def test_with_one_space_it_is_linear_discriminant_analysis():
    """scikit-learn's, with the same shrunk covariance."""
    from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

    tasks, test = stream()
    class_statistics = taught(Statistics(spaces=1, projection=None), tasks)
    (space,) = class_statistics.spaces()
    rows = np.concatenate([space(torch.tensor(raws[0]).float()).numpy() for _, raws in tasks]).astype(float)
    labels = np.concatenate([labels for labels, _ in tasks])
    p, freedom = rows.shape[1], len(rows) - sum(CLASSES)
    a = (p / (freedom + p)) ** 3

    class Pooled:
        def fit(self, x):
            s = sum(np.cov(rows[labels == c].T, bias=True) * (labels == c).sum() for c in np.unique(labels)) / freedom
            self.covariance_ = (1 - a) * s + a * np.trace(s) / p * np.eye(p)
            return self

    priors = np.full(sum(CLASSES), 1 / sum(CLASSES))
    lda = LinearDiscriminantAnalysis(solver="lsqr", priors=priors, covariance_estimator=Pooled()).fit(rows, labels)
    # scikit-learn averages one estimate per class, each of which here is the pooled one
    expected = lda.decision_function(space(torch.tensor(test[0]).float()).numpy())
    actual = class_statistics.head()([torch.tensor(test[0]).float()]).numpy()
    gap = class_statistics.temperature * (expected - expected[:, :1])
    np.testing.assert_allclose(actual - actual[:, :1], gap, rtol=1e-3, atol=1e-3)


def test_scores_of_old_classes_keep_their_bits_if_the_covariance_is_frozen():
    tasks, _ = stream()
    for covariance in ("frozen", "updated"):
        class_statistics = taught(Statistics(spaces=2, projection=16, covariance=covariance), tasks[:2])
        before = [copy.deepcopy(made) for made in class_statistics.head().discriminants]
        labels, raws = tasks[2]
        features = [
            space(torch.tensor(raw).float()) for space, raw in zip(class_statistics.spaces(), raws, strict=True)
        ]
        class_statistics.observe(features, torch.tensor(labels))
        kept = [
            torch.equal(old.weight, new.weight[: len(old.weight)]) and torch.equal(old.bias, new.bias[: len(old.bias)])
            for old, new in zip(before, class_statistics.head().discriminants, strict=True)
        ]
        assert all(kept) == (covariance == "frozen")


def test_a_class_may_be_shown_twice():
    """Two domains of a class are two prototypes; its probability is the sum of theirs."""
    tasks, test = stream()
    labels, raws = tasks[2]
    again = [
        *tasks[:2],
        (labels - 5, raws),
    ]  # images of other classes, under the names of the first task's and one more
    apart = taught(Statistics(spaces=2, projection=16), tasks)
    class_statistics = taught(Statistics(spaces=2, projection=16), again)
    assert class_statistics.class_of.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3]
    class_statistics.tensors["temperature"].fill_(0.3)
    apart.tensors["temperature"].fill_(0.3)
    x = [torch.tensor(x).float() for x in test]
    single, actual = apart.head()(x).exp(), class_statistics.head()(x).exp()
    assert actual.shape == (50, 5)
    expected = torch.stack([single[:, c] + (single[:, c + 5] if c < 4 else 0) for c in range(5)], 1)
    torch.testing.assert_close(actual, expected)


def test_after_many_classes_products_are_made_piece_by_piece(monkeypatch):
    """The answers are the same ones; the temperature and the scores are of fewer images, computed in float32."""
    tasks, test = stream(per_class=40)
    x = [torch.tensor(x).float() for x in test]
    apart = taught(Statistics(spaces=2, projection=16), tasks)
    for module in ("class_statistics", "scatter"):
        monkeypatch.setattr(f"pearl.methods.common.{module}.MANY", 4)
    assert [len(piece) for piece in pieces([torch.ones(2, 3)] * 5)] == [4, 4, 2]
    precise = taught(Statistics(spaces=2, projection=16), tasks)
    torch.testing.assert_close(precise.logits_and_scores(x), apart.logits_and_scores(x), rtol=1e-4, atol=1e-3)
    monkeypatch.setattr("pearl.methods.common.class_statistics.PAIRS", 9 * 64)
    class_statistics = taught(Statistics(spaces=2, projection=16), tasks)
    measured = [int(class_statistics.tensors[f"task.{t}.measured"]) for t in range(3)]
    assert measured == [120, 80, 64]  # as many as PAIRS allows
    steps = GRID.log()
    assert abs(math.log(class_statistics.temperature) - math.log(apart.temperature)) < 3.5 * (steps[1] - steps[0])
    actual, expected = class_statistics.tensors["task.2.scores"], apart.tensors["task.2.scores"]
    assert abs(actual.median() - expected.median()) < 0.75 * expected.std()


def test_classes_that_are_shown_more_often_than_others():
    logp = torch.randn(5, 9).log_softmax(1)
    class_of = torch.tensor([0, 1, 2, 3, 1, 2, 0, 2, 2])
    actual = ByClass(class_of)(logp)
    expected = torch.stack([logp[:, class_of == c].logsumexp(1) for c in range(4)], 1)
    torch.testing.assert_close(actual, expected)


def test_classes_of_one_image_each_are_no_measure():
    """The temperature stays what it was, and no image is strange."""
    tasks, test = stream()
    x = [torch.tensor(x).float() for x in test]

    def single(labels, raws):
        classes = np.unique(labels)
        return classes, [raw[: len(classes)] for raw in raws]

    for before in (1, 2):
        class_statistics = taught(Statistics(spaces=2, projection=16), [*tasks[:before], single(*tasks[before])])
        assert class_statistics.temperature == taught(Statistics(spaces=2, projection=16), tasks[:before]).temperature
        assert all(part.isfinite().all() for part in class_statistics.logits_and_scores(x))
    class_statistics = taught(Statistics(spaces=2, projection=16), [single(*task) for task in tasks])
    assert class_statistics.temperature == UNCALIBRATED
    assert (class_statistics.logits_and_scores(x)[1] >= class_statistics.scores().threshold(0.05)).all()
    assert (class_statistics.scores().shares(class_statistics.logits_and_scores(x)[1]) == 1).all()
    assert class_statistics.scores().expected(0.05) == (0, 1)


def test_a_class_that_is_never_confused_says_little_of_the_temperature():
    tasks, _ = stream()
    options = Statistics(spaces=2, projection=16)
    before = taught(options, tasks)
    rng = np.random.default_rng(5)
    far = np.full(20, sum(CLASSES)), [30 + rng.normal(size=(20, raw.shape[1])) for raw in tasks[-1][1]]
    after = taught(options, [*tasks, far])
    alone = GRID[after.tensors["task.3.losses"].argmin()]
    assert alone == GRID[-1] and abs(math.log(after.temperature / before.temperature)) < 0.25
    nothing = taught(options, [tasks[0], (np.full(20, CLASSES[0]), far[1])])  # else it would be an end of the grid
    assert (nothing.tensors["task.1.losses"] - nothing.tensors["task.1.losses"].min() < 1e-3).sum() > 3
    assert abs(math.log(nothing.temperature / UNCALIBRATED)) < 0.25


def test_a_channel_that_was_dead_when_the_space_was_made_outweighs_nothing():
    tasks, test = stream()
    wider = [(labels, [np.concatenate([raw, np.zeros((len(raw), 1))], 1) for raw in raws]) for labels, raws in tasks]
    x = [torch.tensor(np.concatenate([x, np.ones((len(x), 1))], 1)).float() for x in test]
    dead, without = (
        taught(Statistics(spaces=2, projection=None), wider),
        taught(Statistics(spaces=2, projection=None), tasks),
    )
    assert all(space.std[-1] == torch.inf for space in dead.spaces())
    torch.testing.assert_close(
        dead.head()(x).argmax(1), without.head()([torch.tensor(x).float() for x in test]).argmax(1)
    )


def test_images_that_are_all_the_same():
    """No class can be told from another, so that all are as likely; and nothing is divided by zero."""
    tasks, test = stream()
    tasks = [(labels, [np.ones_like(raw) for raw in raws]) for labels, raws in tasks]
    class_statistics = taught(Statistics(spaces=2, projection=16), tasks)
    logp, in_distribution_scores = class_statistics.logits_and_scores([torch.tensor(x).float() for x in test])
    assert in_distribution_scores.isfinite().all()
    torch.testing.assert_close(logp.exp().sum(1), torch.ones(len(logp)))


@pytest.mark.parametrize(
    "name",
    ["space/0/created_at", "space/1/std", "space/1/scatter", "task/1/counts", "task/2/means/1", "task/0/classes"],
)
def test_statistics_that_do_not_fit_each_other(name):
    tasks, _ = stream()
    state = dict(taught(Statistics(spaces=2, projection=16), tasks).tensors.named_buffers())
    assert misfit(state) is None
    lacking = {key: value for key, value in state.items() if key != name}
    assert misfit(lacking).rpartition("/")[0] in name
    assert misfit({**state, name: torch.zeros(7, 3)}).rpartition("/")[0] in name
    fresh = ClassStatistics(Statistics(spaces=2, projection=16))
    with pytest.raises(ValueError, match="is missing, or does not fit the others"):
        fresh.load_state_dict({f"tensors.{key}": value for key, value in lacking.items()})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1.0),
        ("task/1/scores", torch.nan),
        ("space/1/scatter", torch.nan),
        ("space/0/freedom", -3),
        ("task/0/classes", -1),
        ("space/1/created_at", -1),
    ],
)
def test_statistics_of_no_possible_value(name, value):
    tasks, _ = stream()
    state = dict(taught(Statistics(spaces=2, projection=16), tasks).tensors.named_buffers())
    assert misfit({**state, name: torch.full_like(state[name], value)}) == name


def test_features_that_do_not_fit_their_statistics():
    method = Pearl(small_resnet(), classifier=Statistics())
    learn(method, range(1))
    task, taken = make_task(1), copy.deepcopy(method)
    for part in ("mean", "std"):
        taken.class_statistics.tensors.add(f"space.0.{part}", taken.class_statistics.tensors[f"space.0.{part}"][:-1])
    with pytest.raises(RunError, match=r"class statistics: for 87 features, but the sub-network has 88; restore"):
        next(taken.learn(task))  # before anything is trained
    taken = copy.deepcopy(method)
    taken.class_statistics.tensors.add("space.0.scatter", -taken.class_statistics.tensors["space.0.scatter"])
    with pytest.raises(RunError, match="a covariance matrix is not positive definite"):
        next(taken.learn(task))
    method.backbone.conv1.weight.data[0, 0, 0, 0] = torch.nan
    with pytest.raises(TrainingError, match=r"task 2 \(.*\): a sub-network's features of its images are not finite"):
        method.classifier.fit(task)
    assert len(method.class_statistics) == 1


def test_before_a_second_task_there_is_no_measure_of_the_temperature():
    tasks, _ = stream()
    class_statistics = taught(Statistics(), tasks[:1])
    assert not class_statistics.calibrated
    assert class_statistics.temperature == UNCALIBRATED


# ------------------------------------------------------------------------------------------------------- in the methods


@pytest.mark.parametrize(
    ("network", "names"),
    [
        (lambda: small_resnet(), ("layer1", "layer2", "layer3")),
        (lambda: separable(), ("layer1", "layer2")),
        (lambda: small_vit(), ("blocks.1", "blocks.2")),  # of 3: half and three quarters are the same one
        (lambda: timm_backbone("vit_tiny_patch16_224", 32), ("blocks.5", "blocks.8", "blocks.11")),
        (lambda: timm_backbone("resnet18", 32), ("layer1", "layer2", "layer3")),
        (lambda: timm_backbone("convnext_atto", 32), ("stages.0", "stages.1", "stages.2")),
        (lambda: timm_backbone("swin_tiny_patch4_window7_224", 224), ("layers.0", "layers.1", "layers.2")),
        (lambda: timm_backbone("mixer_s32_224", 224), ("blocks.3", "blocks.5", "blocks.7")),
    ],
)
def test_where_a_network_is_looked_into(network, names):
    net = network()
    assert inner_layers(net) == names
    assert inner_layers(net, "final") == ()


def test_what_is_seen_of_a_vit():
    net = small_vit().eval()
    x = torch.randn(2, 3, SIZE, SIZE)
    hooked = WithInner(with_weights(net, {}), ("blocks.2",))
    raw = hooked(x)
    seen = []
    net.blocks[2].register_forward_hook(lambda *call: seen.append(call[-1]))
    features = net(x)
    torch.testing.assert_close(raw, torch.cat([seen[0][:, 0], seen[0][:, 1:].mean(1), features], 1))


def test_what_is_seen_of_a_resnet():
    net = small_resnet().eval()
    x = torch.randn(2, 3, SIZE, SIZE)
    raw = WithInner(with_weights(net, {}), ("layer2",))(x)
    seen = []
    net.layer2.register_forward_hook(lambda *call: seen.append(call[-1]))
    features = net(x)
    expected = torch.cat([seen[0].mean((2, 3)), seen[0].flatten(2).std(2, correction=0), features], 1)
    torch.testing.assert_close(raw, expected)


def raw_of(method, t, task):
    return WithInner(method.merged(t), method.layers)(task.view.test(task.images))


@pytest.mark.parametrize("train", ["spaces", "all"])
def test_a_method_observes_what_it_has_learnt(train):
    """The statistics are those of the task's images, without further views, in the first two sub-networks."""
    method = Pearl(small_resnet(), classifier=Statistics(spaces=2, views=0, train=train))
    learn(method, range(3))
    class_statistics, tasks = method.class_statistics, [make_task(t) for t in range(3)]
    assert class_statistics.created_at == [0, 1]
    with torch.no_grad():
        for v in range(2):
            for t in range(v, 3):
                features = class_statistics.spaces()[v](raw_of(method, v, tasks[t]))
                for row, c in enumerate(class_statistics.tensors[f"task.{t}.classes"]):
                    mean = features[tasks[t].labels == c].double().mean(0).float()
                    torch.testing.assert_close(
                        class_statistics.tensors[f"task.{t}.means.{v}"][row], mean, rtol=1e-4, atol=1e-4
                    )


def test_means_are_of_augmented_views_too():
    """Statistics use the test view and two augmented epochs; every image keeps its label, and no policy is applied."""
    view = View(config().images, channels_last=False).with_changes({"policy": "trivialaugment", "brightness": 0.9})
    method = Pearl(small_resnet(), classifier=Statistics(spaces=1, views=2))
    learn(method, range(1), view=view)
    class_statistics, task = method.class_statistics, make_task(0)
    network, shape = WithInner(method.merged(0), method.layers), tuple(task.images.shape[1:3])
    epochs = [task.view.test(task.images)]
    for k in range(2):
        generator = torch.Generator().manual_seed(derive_seed("statistics", 0, k))
        torch.randperm(len(task), generator=generator)  # the order of the epoch
        epochs.append(task.view.train(task.images, task.view.draw(len(task), shape, generator)))
    with torch.no_grad():
        features = torch.stack([class_statistics.spaces()[0](network(x)).double() for x in epochs]).mean(0)
    expected = torch.stack([features[task.labels == c].mean(0) for c in task.labels.unique()])
    torch.testing.assert_close(class_statistics.tensors["task.0.means.0"].double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("augment", ["crop", "none"])
@pytest.mark.parametrize("views", [0, 3])
def test_an_image_passes_once_a_view_through_each_sub_network(monkeypatch, views, augment):
    """Through a new one as well, which gives the space and what the images are in it; one image is a check before."""
    seen, method = [], Pearl(small_resnet(), classifier=Statistics(views=views))
    view = View(config().images, channels_last=False).with_changes({"augment": augment})
    forward = WithInner.forward
    monkeypatch.setattr(WithInner, "forward", lambda self, x: (seen.append(len(x)), forward(self, x))[1])
    learn(method, range(2), view=view)
    passes = 1 + views if augment == "crop" else 1
    assert sum(seen) == passes * (len(make_task(0)) + 2 * len(make_task(1))) + 1


@pytest.mark.parametrize(("train", "trained"), [("spaces", [1]), ("all", [1, 2])])
def test_only_sub_networks_that_are_asked_are_trained(train, trained):
    method = Pearl(small_resnet(), classifier=Statistics(spaces=2, train=train))
    learn(method, range(3))
    assert [t for t in range(3) if method.is_adapted(t)] == trained


def test_sub_networks_may_be_trained_on_cosines():
    """The loss of a phase is cross-entropy of 4 times the cosines; nothing else of the network is another."""
    method = Pearl(small_vit(), classifier=Statistics(head="cosine"))
    task = make_task(0)
    x, labels = task.view.test(task.images), task.labels
    adapt = next(phase for phase in method.learn(task) if phase.name == "adapt")
    features = method.task_features(x, 0)
    cosines = torch.stack([F.cosine_similarity(features, row[None]) for row in method.heads[0].weight], 1)
    torch.testing.assert_close(adapt.loss(Batch(x, labels, torch.arange(len(x)))), F.cross_entropy(4 * cosines, labels))
    linear = Pearl(small_vit(), classifier=Statistics())
    learn(linear, range(1))
    assert {name for name, _ in linear.named_parameters()} - {name for name, _ in method.named_parameters()} == {
        "heads.blocks.0.bias"
    }


def test_a_first_task_of_one_class_is_told_that_it_teaches_nothing():
    one, two = make_task(0, classes=1), make_task(0)
    method = Pearl(small_resnet(), classifier=Statistics())
    assert any("a single class cannot train a network" in note for note in method.notes(one))
    assert len(method.notes(two)) == len(method.notes(one)) - 1
    method.backbone.pretrained = True
    assert method.notes(one) == method.notes(two)


def test_a_later_task_of_one_class_is_learnt_by_its_statistics_alone():
    method = Isolation(small_resnet(), classifier=Statistics())
    learn(method, range(1))
    learn(method, range(1, 2), classes=1)
    assert [*method.networks] == ["0"]
    assert method.class_statistics.created_at == [0]
    assert len(method.class_statistics.class_of) == len(make_task(0).classes) + 1


def test_all_spaces_of_a_vit_at_once():
    method = Pearl(small_vit(), classifier=Statistics(spaces=3))
    learn(method, range(3))
    network, _ = method.eval().at_once()
    x = torch.randn(4, 3, SIZE, SIZE)
    with torch.no_grad():
        torch.testing.assert_close(network(x), method(x), rtol=1e-3, atol=1e-3)


def fits_written_out(tasks, test, spaces, skip=None):
    """How well images fit prototypes (images, prototypes): relative Mahalanobis distances, with SciPy's.

    `skip`: a task and an image of it that is left out of all statistics.
    """
    from scipy.spatial.distance import cdist

    ratio = []
    for v, space in enumerate(spaces):
        known = [(labels, in_space(space, raws[v]).numpy().astype(float)) for labels, raws in tasks[v:]]
        known = [(labels, of_class.reshape(len(labels), -1, of_class.shape[-1])) for labels, of_class in known]
        if skip:
            t, i = skip
            known[t - v] = tuple(np.delete(part, i, axis=0) for part in known[t - v])
        x = in_space(space, first_view(test[v])).numpy().astype(float)
        rows = [of_class[labels == c] for labels, of_class in known for c in np.unique(labels)]
        images, (views, p) = sum(map(len, rows)), rows[0].shape[1:]
        rows = [of_class.reshape(-1, p) for of_class in rows]
        # every view is a sample, but the views of an image count as one
        within = sum(np.cov(of_class.T, bias=True) * len(of_class) / views for of_class in rows)
        every = np.concatenate(rows)
        freedom = images - len(rows)
        a = (p / (freedom * views**0.5 + p)) ** 3
        pooled = within / freedom, np.cov(every.T, bias=True) * images / (images - 1)
        inside, whole = (np.linalg.inv((1 - a) * s + a * np.trace(s) / p * np.eye(p)) for s in pooled)
        away = [
            cdist(x, [mean], "mahalanobis", VI=vi) ** 2
            for mean, vi in [*((of_class.mean(0), inside) for of_class in rows), (every.mean(0), whole)]
        ]
        actual = np.full((len(x), sum(len(set(labels)) for labels, _ in tasks)), np.nan)
        actual[:, actual.shape[1] - len(rows) :] = 0.5 * (away[-1] - np.concatenate(away[:-1], 1))
        ratio.append(actual)
    return np.nanmean(ratio, axis=0)


@pytest.mark.parametrize("views", [None, 1, 3])
def test_fits_are_relative_mahalanobis_distances(views):
    tasks, test = stream(views=views)
    class_statistics = taught(Statistics(spaces=2, projection=16), tasks)
    actual = class_statistics.fits([torch.tensor(x).float() for x in test])
    np.testing.assert_allclose(actual, fits_written_out(tasks, test, class_statistics.spaces()), rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize(("per_class", "views"), [(4, None), (12, None), (12, 3)])
def test_images_are_left_out_in_closed_form(per_class, views, monkeypatch):
    """As by statistics that are made anew without each image; but for the trace that their shrinkage takes."""
    monkeypatch.setattr(calibration, "ROWS", 7)  # images that are computed at once
    tasks, _ = stream(per_class=per_class, views=views)
    class_statistics = taught(Statistics(spaces=2, projection=16), tasks)
    labels, raws = tasks[2]
    expected = np.concatenate(
        [
            fits_written_out(tasks, [raw[i : i + 1] for raw in raws], class_statistics.spaces(), skip=(2, i))
            for i in range(len(labels))
        ]
    )
    own, scores, common = torch.tensor(labels), [], []
    for v, space in enumerate(class_statistics.spaces()):
        means = torch.cat([class_statistics.tensors[f"task.{t}.means.{v}"] for t in range(v, 3)])
        rows, metric, positions = (
            in_space(space, raws[v]).reshape(len(labels), views or 1, -1),
            LeftOut(class_statistics.known(v)),
            own - 9 + len(means),
        )
        counts = torch.full((len(means),), per_class)
        inside, away = metric.distances(rows, positions, means, counts, counted=True)
        scores.append(-0.5 * inside)
        common.append(0.5 * away)
        mine = metric.own_fits(rows, means[positions], counts[positions].double(), counted=True)
        nearer = 1 - 1 / per_class**2  # means of all images, not of all but one
        own_inside = nearer * inside.gather(1, positions[:, None])[:, 0]
        torch.testing.assert_close(mine, 0.5 * (away - own_inside), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(fits(scores, common), expected, rtol=0.03, atol=0.1)


def test_fits_of_images_left_out_are_on_average_those_of_other_images():
    """A class has three images: means of two lie farther away than means of three."""
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(200, 20))
    labels, fresh = np.arange(200).repeat(3), np.arange(200).repeat(20)
    raw = [torch.tensor(centres[y] + rng.normal(size=(len(y), 20))).float() for y in (labels, fresh)]
    class_statistics = taught(Statistics(spaces=1, projection=None), [(labels, [raw[0].numpy()])])
    actual = class_statistics.fits([raw[1]])[torch.arange(len(fresh)), torch.tensor(fresh)].double()
    location, spread = class_statistics.usual()
    assert abs(float(actual.mean() - location[0])) < 0.06 * float(spread[0])
    assert float(actual.std()) == pytest.approx(float(spread[0]), rel=0.1)


@pytest.mark.parametrize("views", [1, 4])
def test_scores_of_older_images_follow_when_classes_arrive(views):
    """Of twelve tasks of three classes, like each other, the first ones' images meet twelve times the classes later."""
    rng = np.random.default_rng(0)
    centres = 0.8 * rng.normal(size=(36, 20))

    def draw(classes, count):
        labels = np.repeat(classes, count)
        rows = centres[labels] + (0.8 if views > 1 else 1.0) * rng.normal(size=(len(labels), 20))
        return labels, [rows[:, None] + (0.6 if views > 1 else 0.0) * rng.normal(size=(len(labels), views, 20))]

    groups = np.arange(36).reshape(12, 3)
    class_statistics = taught(Statistics(spaces=1, projection=None), [draw(group, 12) for group in groups])
    scores = class_statistics.logits_and_scores([torch.tensor(draw(np.arange(36), 100)[1][0][:, 0]).float()])[1]
    assert class_statistics.scores().images == 432  # of all tasks
    refused = [float((scores < class_statistics.scores().threshold(rate)).double().mean()) for rate in (0.05, 0.5)]
    assert 0.03 < refused[0] < 0.08 and 0.42 < refused[1] < (0.58 if views == 1 else 0.65), refused
    shifts = [float(class_statistics.tensors[f"task.{t}.score_shift"]) for t in range(12)]
    assert sum(shifts) < -0.3 and shifts[0] == 0


def test_fits_of_older_images_follow_with_several_views_in_many_dimensions():
    """With fewer images than dimensions an image is most of what the covariance shows of its direction."""
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(30, 200))

    def draw(classes, count):
        labels = np.repeat(classes, count)
        rows = centres[labels] + 0.8 * rng.normal(size=(len(labels), 200))
        return labels, [rows[:, None] + 0.6 * rng.normal(size=(len(labels), 4, 200))]

    class_statistics = taught(Statistics(spaces=1, projection=None), [draw(c, 6) for c in np.arange(30).reshape(5, 6)])
    labels, (fresh,) = draw(np.arange(30), 20)
    actual = class_statistics.fits([torch.tensor(fresh[:, 0]).float()])[torch.arange(len(labels)), torch.tensor(labels)]
    location, spread = class_statistics.usual()
    for c in (0, 6, 12, 18, 24):  # the first class of each task
        own = actual[torch.tensor(labels // 6 == c // 6)].double()
        assert abs(float(own.mean() - location[c])) < 2 * float(own.std())
        assert 0.5 < float(spread[c] / own.std()) < 2


def styles(seed=0, per_class=30, fresh=200):
    """Eight classes in three styles, each farther from its class means and with images farther apart; as tasks."""
    rng = np.random.default_rng(seed)
    centres = 2 * rng.normal(size=(8, 30))
    tasks, tests = [], []
    for style, spread in enumerate((1.0, 1.7, 3.0)):
        look = 2 * rng.normal(size=30)
        axes = np.linalg.qr(rng.normal(size=(30, 30)))[0] * np.linspace(0.3, 1.5, 30)

        def draw(count, look=look, spread=spread, axes=axes, style=style):
            labels = np.repeat(np.arange(8), count)
            away = spread * rng.normal(size=(len(labels), 30)) @ axes * rng.gamma(8, 1 / 8, size=(len(labels), 1))
            return labels, [centres[labels] / (1 + style) + look + away]

        tasks.append(draw(per_class))
        tests.append(draw(fresh)[1])
    return tasks, tests


def test_each_style_is_refused_at_the_rate():
    """In every style, in the last task and in those before, whose fits have moved since; by one threshold 0 to 70 %."""
    tasks, tests = styles()
    class_statistics = taught(Statistics(spaces=1, projection=None), tasks)
    assert (
        class_statistics.temperature and class_statistics.scores().images == 480
    )  # of the two newest tasks, which are enough
    least = class_statistics.scores().threshold(0.1)
    judged = [class_statistics.logits_and_scores([torch.tensor(raw).float() for raw in raws])[1] for raws in tests]
    refused = [float((scores < least).double().mean()) for scores in judged]
    assert all(0.05 < share < 0.16 for share in refused), refused
    levels = [class_statistics.tensors[f"task.{t}.levels"] for t in range(3)]
    shift, wider = (float(part[0]) for part in moved(levels, class_statistics.created_at))
    before = taught(Statistics(spaces=1, projection=None), tasks[:1])
    then, now = (
        each.fits([torch.tensor(raw).float() for raw in tests[0]])[
            torch.arange(1600), torch.arange(8).repeat_interleave(200)
        ]
        for each in (before, class_statistics)
    )
    assert shift == pytest.approx(float((now - then).mean()), rel=0.35) and abs(shift) > 2
    assert wider == pytest.approx(float(now.std() / then.std()), rel=0.35)


def test_scores_come_from_the_newest_tasks_until_they_are_enough():
    values = torch.linspace(0, 1, 101, dtype=torch.float64)
    scores = Scores([(values, 300), (values + 10, 100)])
    assert scores.images == ENOUGH
    assert scores.threshold(0.375) == pytest.approx(0.5, abs=0.01)
    assert scores.threshold(0.99) == pytest.approx(10.96, abs=0.01)
    shares = scores.shares(torch.tensor([-1.0, 0.5, 5.0, 11.1]))
    torch.testing.assert_close(shares, torch.tensor([0.0, 0.375, 0.75, 1.0]), atol=0.01, rtol=0)
    for rate in (0.01, 0.05, 0.6):
        near = scores.threshold(rate) + torch.tensor([-1e-9, 0, 1e-9], dtype=torch.float64)
        assert (scores.shares(near) >= rate).tolist() == [False, True, True]
    low, high = scores.expected(0.05)
    drawn = np.sort(np.random.default_rng(0).random((4000, 400)), axis=1)[:, 19]
    np.testing.assert_allclose((low, high), np.quantile(drawn, [0.05, 0.95]), atol=0.003)


def test_doubt_between_classes_counts_and_between_styles_does_not():
    tasks, _ = stream()
    class_statistics = taught(Statistics(spaces=2, projection=16), tasks)
    x = [torch.tensor(tasks[2][1][v]).float() for v in range(2)]
    away = (class_statistics.fits(x) - class_statistics.usual()[0]) / class_statistics.usual()[1]
    share = away.softmax(1)
    expected = away.max(1).values - DOUBT * torch.special.entr(share).sum(1)
    torch.testing.assert_close(class_statistics.logits_and_scores(x)[1].double(), expected, rtol=1e-3, atol=1e-3)
    merged = torch.stack([share[:, :3].sum(1), *share[:, 3:].T])  # three prototypes of one class
    one = ByClass(torch.tensor([0, 0, 0, 1, 2, 3, 4, 5, 6]))
    actual = score(class_statistics.fits(x), *class_statistics.usual(), one)
    torch.testing.assert_close(actual, away.max(1).values - DOUBT * torch.special.entr(merged).sum(0))


# --------------------------------------------------------------------------------------- what it knows of itself


def test_left_out_answers_are_those_of_statistics_without_them():
    """Cross-validated predictions equal those of class statistics that have seen the other images only."""
    tasks, _ = stream(per_class=13)
    class_statistics = taught(Statistics(spaces=2), tasks)
    labels, raws = tasks[-1]
    expected = []
    for i in range(0, len(labels), 3):
        part = taught(
            Statistics(spaces=2), [*tasks[:-1], (np.delete(labels, i), [np.delete(raw, i, axis=0) for raw in raws])]
        )
        part.tensors["temperature"].fill_(class_statistics.temperature)
        part._forget()
        logp = part.head()([torch.tensor(raw[i : i + 1]).float() for raw in raws]).double()
        own = logp[:, 5:].argmax(1) + 5  # classes of the last task
        expected.append((labels[i : i + 1], logp.argmax(1), own, logp.exp().max(1).values))
    for name, parts in zip(("true", "best", "best_own", "sure"), zip(*expected, strict=True), strict=True):
        np.testing.assert_allclose(
            getattr(class_statistics.cross_validated, name)[::3], np.concatenate(parts), atol=2e-3
        )


def test_one_image_a_class_leaves_nothing_to_say():
    class_statistics = ClassStatistics(Statistics())
    raw = torch.randn(3, 8)
    class_statistics.add_space(0, raw)
    class_statistics.observe([space(raw) for space in class_statistics.spaces()], torch.arange(3))
    assert class_statistics.cross_validated is None


def gaussian(centres, count, rng, spread=1.0):
    """Raw features in one sub-network around class centres, and labels."""
    labels = np.repeat(np.arange(len(centres)), count)
    return labels, centres[labels] + spread * rng.normal(size=(len(labels), centres.shape[1]))


@pytest.mark.parametrize(("distance", "lowest"), [(8.0, 0.9), (2.0, 0.0)])
def test_what_remains_of_old_classes_is_near_what_fresh_images_show(distance, lowest):
    """Classes that come near old ones take images from them; those that stay away take none."""
    rng = np.random.default_rng(0)
    old = 2.5 * rng.normal(size=(4, 10))
    away = rng.normal(size=(4, 10))
    centres = np.concatenate([old, old + distance * away / np.linalg.norm(away, axis=1, keepdims=True)])
    labels, raw = gaussian(centres, 40, rng)
    tasks = [(labels[labels // 4 == t], [raw[labels // 4 == t]]) for t in range(2)]
    class_statistics = ClassStatistics(Statistics(spaces=1, projection=None))
    then = None
    truth, fresh = gaussian(old, 500, rng)
    for t, (own, (rows,)) in enumerate(tasks):
        if t == 0:
            class_statistics.add_space(0, torch.tensor(rows).float())
        (space,) = class_statistics.spaces()
        class_statistics.observe([space(torch.tensor(rows).float())], torch.tensor(own))
        right = (class_statistics.head()([torch.tensor(fresh).float()]).argmax(1).numpy() == truth).mean()
        then = right if then is None else then
    assert then * retained(class_statistics, 0, round(160 * then), 160) == pytest.approx(right, abs=0.08)
    assert lowest <= right < 0.995
    assert distance > 5 or right < then - 0.1


def test_classes_that_were_hard_already_lose_nothing_to_far_ones():
    """Two of three images of the first task were right; all classes of the second are elsewhere."""
    rng = np.random.default_rng(0)
    old = 0.6 * rng.normal(size=(4, 10))
    labels, raw = gaussian(np.concatenate([old, old + 20.0]), 40, rng)
    class_statistics = ClassStatistics(Statistics(spaces=1, projection=None))
    for t in range(2):
        rows = torch.tensor(raw[labels // 4 == t]).float()
        if t == 0:
            class_statistics.add_space(0, rows)
        class_statistics.observe([class_statistics.spaces()[0](rows)], torch.tensor(labels[labels // 4 == t]))
    assert retained(class_statistics, 0, 107, 160) == pytest.approx(1.0, abs=0.05)


def test_learnt_images_are_recognised_without_another_pass() -> None:
    method = Pearl(small_vit(), classifier=Statistics())
    assert method.classifier.fitted() is None
    task = make_task(0)
    images, labels, view = task.images.clone(), task.labels.clone(), task.view
    Engine(config(), device="cpu").learn(method, task)
    fitted = method.classifier.fitted()
    with torch.no_grad():
        expected = method(view.test(images))
    assert fitted is not None and (fitted.true == labels.numpy()).all()
    assert (fitted.best == expected.argmax(1).numpy()).all() and (fitted.best_own == fitted.best).all()
    with mock.patch.object(method, "spaces", side_effect=AssertionError("another pass")):
        assert not [*unlearnt(method, view, images, labels, np.arange(2), 0)]
        statistics = method.class_statistics
        statistics.observed = statistics.observed[0], 1 - labels  # as after a training that failed
        assert [*unlearnt(method, view, images, labels, np.arange(2), 0)]
    Engine(config(), device="cpu").learn(method, make_task(1, per_class=70))
    fitted = method.classifier.fitted()
    assert len(fitted.true) == 64 and {*fitted.true} == {2, 3} == {*fitted.best_own}


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_statistics_and_predictions_are_of_features_in_one_precision(precision: str) -> None:
    method = Pearl(small_vit(), classifier=Statistics(precision=precision, views=0))
    engine = Engine(config(engine={"precision": "bf16"}), device="cpu")
    task = make_task(0)
    x, labels = task.view.test(task.images), task.labels
    engine.learn(method, task)
    network = WithInner(method.merged(0), method.layers)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"):
        raw = network(x)
    space = method.class_statistics.spaces()[0]
    means = torch.stack([space(raw)[labels == label].mean(0) for label in (0, 1)])
    torch.testing.assert_close(method.class_statistics.tensors["task.0.means.0"], means, rtol=0, atol=1e-5)
    with torch.no_grad():
        expected = method.class_statistics.head()([raw])
        for context in (False, True):  # evaluation of a run in float32 and bfloat16
            with torch.autocast("cpu", torch.bfloat16, enabled=context):
                (expert,) = method.experts()
                ways = [method(x), expert.forward(x), method.classifier.ood_scorer()(x)[0]]
                ways += [at_once[0](x)] if (at_once := method.at_once()) else []
            for actual in ways:
                torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4)
    assert (at_once is None) == (precision == "bfloat16")
