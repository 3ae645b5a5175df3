"""Every learner on one interface; the frozen ones against NumPy."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pearl.data.batches import derive_seed
from pearl.errors import ConfigError
from pearl.online.frozen import OnlineNearestMean, OnlineRanPac, Slda
from pearl.online.learner import Learner, Setup
from pearl.online.online_pearl import OnlinePearl
from pearl.online.spaces import BARE
from pearl.settings.config import check_config
from pearl.settings.parts import LEARNERS
from pearl.testing.tiny import config, small_resnet, small_vit
from pearl.training.engine import Engine

SIZE = 8
Batches = list[tuple[Tensor, Tensor]]
OPTIONS: dict[str, dict[str, Any]] = {
    "pearl": {"window": 40, "confused": 0.0, "projection": 16},
    "ranpac": {"M": 30, "ridge": 1.0},
    "er": {"buffer_size": 20, "minibatch_size": 8, "iterations": 2},
    "derpp": {"buffer_size": 20, "minibatch_size": 8, "iterations": 1},
    "flyprompt": {"M": 30, "ridge": 1.0, "length": 2, "blocks": (0, 1), "iterations": 1, "images_per_expert": 50},
}


def setup(network: Any = small_vit, **changes: Any) -> Setup:
    made = config(**{"method": "pearl", "train": {"epochs": 1, "batch_size": 8}, **changes})
    return Setup(made, network(), Engine(made, device="cpu"))


def learner(name: str, network: Any = small_vit, **options: Any) -> Learner:
    torch.manual_seed(0)
    return LEARNERS.build({"name": name, **OPTIONS.get(name, {}), **options}, setup(network))  # type: ignore[no-any-return]


def stream(count: int = 96, batch: int = 12, seed: int = 0) -> Batches:
    """Classes of random patterns with noise; a third class appears in the second half."""
    rng = np.random.default_rng(seed)
    patterns = rng.integers(0, 256, (3, SIZE, SIZE, 3))
    labels = np.where(np.arange(count) < count // 2, np.arange(count) % 2, rng.integers(3, size=count))
    images = np.clip(patterns[labels] + rng.normal(0, 60, (count, SIZE, SIZE, 3)), 0, 255).astype(np.uint8)
    pixels, own = torch.from_numpy(images), torch.from_numpy(labels)
    return [*zip(pixels.split(batch), own.split(batch), strict=True)]


def feed(made: Learner, batches: Batches, start: int = 0) -> None:
    for number, (images, labels) in enumerate(batches[start:], start):
        torch.manual_seed(derive_seed(0, "observe", number))
        made.observe(images, labels)


def joined(batches: Batches) -> tuple[Tensor, Tensor]:
    return torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])


# One interface


@pytest.mark.parametrize("name", LEARNERS.names())
def test_a_class_can_be_predicted_after_its_first_image(name: str) -> None:
    made, (images, _) = learner(name), joined(stream())
    made.observe(images[:1], torch.tensor([0]))
    assert made.predict(images[:5]).shape == (5, 1)
    made.observe(images[1:2], torch.tensor([1]))
    assert made.predict(images[:5]).shape == (5, 2)
    assert made.predict(images[:5]).isfinite().all()
    if name not in ("er", "derpp", "ranpac", "flyprompt"):
        assert made.predict(images[:2]).argmax(1).tolist() == [0, 1]


@pytest.mark.parametrize("name", [name for name in LEARNERS.names() if name != "flyprompt"])  # needs a trained ViT
def test_it_learns_the_stream(name: str) -> None:
    trained = name in ("er", "derpp")
    batches = stream(count=240 if trained else 96)
    made = learner(name, *[small_resnet] * trained, **({"lr": 0.003, "iterations": 3} if trained else {}))
    feed(made, batches)
    images, labels = joined(batches)
    assert (made.predict(images).argmax(1) == labels).float().mean() > 0.55  # a third by chance
    assert made.classes == 3


@pytest.mark.parametrize("network", [small_vit, small_resnet])
@pytest.mark.parametrize("name", LEARNERS.names())
@pytest.mark.parametrize("cut", [3, 5])
def test_a_loaded_learner_continues_with_the_same_bits(name: str, network: Any, cut: int) -> None:
    """Sub-networks are trained at the fourth and seventh batch."""
    if name == "flyprompt" and network is small_resnet:
        pytest.skip("needs a ViT")
    batches = stream(count=108)
    whole, other = learner(name, network), learner(name, network)
    feed(whole, batches[:cut])
    state = {key: value.clone() for key, value in whole.state_dict().items()}
    feed(whole, batches, cut)
    other.load_state_dict(state, strict=True)
    feed(other, batches, cut)
    for (key, value), (same, again) in zip(whole.state_dict().items(), other.state_dict().items(), strict=True):
        assert key == same and torch.equal(value, again), key
    images, _ = joined(batches)
    assert torch.equal(whole.predict(images), other.predict(images))


@pytest.mark.parametrize("name", LEARNERS.names())
def test_predicting_changes_nothing(name: str) -> None:
    batches = stream()
    quiet, asked = learner(name), learner(name)
    feed(quiet, batches)
    for number, (images, labels) in enumerate(batches):
        if number:
            asked.predict(images)
        torch.manual_seed(derive_seed(0, "observe", number))
        asked.observe(images, labels)
    assert all(torch.equal(value, asked.state_dict()[key]) for key, value in quiet.state_dict().items())
    images, _ = joined(batches)
    assert torch.equal(quiet.predict(images), asked.predict(images))


@pytest.mark.parametrize("name", LEARNERS.names())
def test_what_is_stored_of_images_is_counted(name: str) -> None:
    made, pixels = learner(name), SIZE * SIZE * 3
    feed(made, stream())
    if name in ("ncm", "slda", "ranpac", "flyprompt"):
        assert made.images_bytes() == 0
    else:
        stored = {"pearl": 40, "er": 20, "derpp": 20}[name]
        assert stored * pixels < made.images_bytes() < stored * (pixels + 500)


# Frozen learners against NumPy


def features(made: Any, batches: Batches) -> tuple[np.ndarray, np.ndarray]:
    images, labels = joined(batches)
    return made.network(images).detach().double().numpy(), labels.numpy()


@pytest.mark.parametrize("layers", ["final", "auto"])
def test_streaming_lda_is_lda(layers: str) -> None:
    batches = stream()
    made = learner("slda", layers=layers)
    assert isinstance(made, Slda)
    feed(made, batches)
    x, y = features(made, batches)
    assert x.shape[1] == (16 if layers == "final" else 16 * 5)  # two blocks before the last
    means = np.stack([x[y == c].mean(0) for c in range(3)])
    covariance = (1 - 1e-4) * (x - means[y]).T @ (x - means[y]) / len(x) + 1e-4 * np.eye(x.shape[1])
    weights = np.linalg.solve(covariance, means.T)
    expected = x @ weights - 0.5 * (means * weights.T).sum(1)
    np.testing.assert_allclose(made.predict(joined(batches)[0]), expected, rtol=1e-6, atol=1e-6)


def test_nearest_mean_is_the_nearest_mean() -> None:
    batches = stream()
    made = learner("ncm")
    assert isinstance(made, OnlineNearestMean)
    feed(made, batches)
    x, y = features(made, batches)
    means = np.stack([x[y == c].mean(0) for c in range(3)])
    expected = -((x[:, None] - means) ** 2).sum(2)
    np.testing.assert_allclose(made.predict(joined(batches)[0]), expected, rtol=1e-6, atol=1e-6)


def test_ranpac_is_ridge_regression() -> None:
    batches = stream()
    made = learner("ranpac")
    assert isinstance(made, OnlineRanPac)
    feed(made, batches)
    x, y = features(made, batches)
    z = np.maximum(x @ made.features.matrix.double().numpy(), 0)
    weights = np.linalg.solve(z.T @ z + np.eye(30), z.T @ np.eye(3)[y])
    np.testing.assert_allclose(made.predict(joined(batches)[0]), z @ weights, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["ncm", "slda", "ranpac"])
def test_frozen_learners_do_not_depend_on_the_order(name: str) -> None:
    batches = stream()
    images, labels = joined(batches)
    first, second = learner(name), learner(name)
    feed(first, batches)
    at_random = torch.cat([torch.tensor([0, 1]), 2 + torch.randperm(94, generator=torch.Generator().manual_seed(0))])
    feed(second, [*zip(images[at_random].split(7), labels[at_random].split(7), strict=True)])
    torch.testing.assert_close(first.predict(images), second.predict(images), rtol=1e-3, atol=1e-3)


# PEARL


def pearl(network: Any = small_vit, **options: Any) -> OnlinePearl:
    made = learner("pearl", network, **options)
    assert isinstance(made, OnlinePearl)
    return made


def test_it_grows_when_the_window_is_renewed_and_within_its_budget() -> None:
    made = pearl(confused=0.0)
    made.not_separated = lambda: made.window.labels.unique()  # type: ignore[method-assign]
    feed(made, stream(count=180))
    assert made.grown_at.tolist() == [36, 72]  # of batches of 12 another would push images out of a window of 40
    assert made.passes() == 3
    assert [int(space.task) for space in made.spaces] == [-1, 0, 1]
    assert len(made.facts()["sub_networks"]) == 2


def test_it_does_not_grow_for_classes_that_the_spaces_separate() -> None:
    far = torch.zeros(96, SIZE, SIZE, 3, dtype=torch.uint8)
    far[::2, :4] = 255
    far += torch.randint(0, 2, far.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    made = pearl(confused=0.05)
    feed(made, [*zip(far.split(12), (torch.arange(96) % 2).split(12), strict=True)])
    assert made.grown_at.tolist() == []
    assert made.checked_at == 72


def test_it_does_not_grow_for_a_single_class() -> None:
    """As in a stream in the order of the classes."""
    made = pearl(confused=0.0, window=12)
    feed(made, [(x, torch.full_like(y, i // 3)) for i, (x, y) in enumerate(stream(count=108))])
    assert made.grown_at.tolist() == []
    assert made.predict(stream()[0][0]).shape == (12, 3)


def test_without_pretraining_the_first_sub_network_replaces_random_features() -> None:
    made = pearl(small_resnet, confused=0.0)
    made.not_separated = lambda: made.window.labels.unique()[:1]  # type: ignore[method-assign]
    feed(made, stream(count=48))
    assert made.grown_at.tolist() == [36]
    assert [int(space.task) for space in made.spaces] == [0]
    assert made.method.heads.sizes() == [3]  # trained on all classes of the window, not the confused one alone
    assert made.spaces[0].statistics.counts.sum() == 48  # also of the images before it
    assert made.window.features.shape == (40, len(made.spaces[0].statistics.scatter))


def test_a_class_is_compared_in_a_later_space_when_it_has_enough_images_there() -> None:
    made = pearl(confused=0.0, enough=6, sub_networks=1)
    made.not_separated = lambda: made.window.labels.unique()  # type: ignore[method-assign]
    feed(made, stream(count=48))
    counts = [space.statistics.counts.tolist() for space in made.spaces]
    made.spaces[1].statistics.counts.copy_(torch.tensor([6, 5, 20]))
    made.spaces[0].statistics.counts.copy_(torch.tensor([40, 40, 20]))
    assert [known.tolist() for known in made._known()] == [[True] * 3, [True, False, True]]
    made.spaces[0].statistics.counts.copy_(torch.tensor([40, 5, 20]))  # all images of class 1 are there
    assert [known.tolist() for known in made._known()] == [[True] * 3, [True] * 3]
    assert counts[0] >= counts[1]


def test_a_frozen_space_never_changes_and_counts_every_later_image() -> None:
    made = pearl(confused=0.0)
    made.not_separated = lambda: made.window.labels.unique()  # type: ignore[method-assign]
    batches = stream(count=120)
    feed(made, batches[:4])
    images, labels = joined(batches)
    before = [network(images) for network in made.networks().values()]
    feed(made, batches, 4)
    after = [network(images) for network in made.networks().values()]
    assert len(before) == 2 and len(after) == 3
    assert all(torch.equal(old, new) for old, new in zip(before, after[:2], strict=True))
    assert made.spaces[1].statistics.counts.sum() == 120
    assert made.spaces[2].statistics.counts.sum() == 120 - 36 + 4
    # statistics are those of the features, whenever an image came
    x = made.spaces[1](after[1]).double()
    torch.testing.assert_close(made.spaces[1].statistics.means, torch.stack([x[labels == c].mean(0) for c in range(3)]))


def test_unpretrained_and_pretrained_networks_are_both_trained_by_the_methods_phases(monkeypatch: Any) -> None:
    trained = []
    for network in (small_vit, small_resnet):
        made = pearl(network, confused=0.0)
        made.not_separated = lambda made=made: made.window.labels.unique()  # type: ignore[misc]
        monkeypatch.setattr(Engine, "train", watched(trained, Engine.train))
        feed(made, stream(count=48))
        monkeypatch.undo()
    assert trained == ["probe", "adapt", "reference"]


def watched(names: list[str], train: Any) -> Any:
    def also(self: Engine, method: Any, task: Any, phase: Any, *args: Any) -> None:
        names.append(phase.name)
        train(self, method, task, phase, *args)

    return also


def test_a_method_without_separate_sub_networks_is_refused() -> None:
    with pytest.raises(ConfigError, match="method=er: the online learner pearl needs"):
        LEARNERS.build({"name": "pearl"}, setup(method="er"))
    with pytest.raises(ConfigError, match="classifier=heads"):
        LEARNERS.build({"name": "pearl"}, setup(method={"name": "pearl", "classifier": "statistics"}))


# Rehearsal


def test_a_head_grows_with_new_classes_and_is_trained() -> None:
    made: Any = learner("er")
    batches = stream()
    feed(made, batches)
    assert made.method.heads.sizes() == [2, 1]
    assert made.steps == 2 * len(batches)
    assert all(len(made.optimizer.state[p]) == 3 for p in made.method.parameters())


def test_a_unknown_learner_is_named() -> None:
    raw = config().model_dump(mode="json") | {"online": {"learner": "sldaa"}}
    with pytest.raises(ConfigError, match=r"online.learner.name: unknown online learner 'sldaa'; did you mean 'slda'"):
        check_config(raw)


# Given boundaries, and shared blocks


def test_with_given_boundaries_it_grows_there_and_only_there() -> None:
    """On the classes of the stage, though the window holds earlier images, and though it was renewed in between."""
    made = learner("pearl", window=40)
    assert isinstance(made, OnlinePearl)
    made.setup.boundaries = True
    made.not_separated = lambda: pytest.fail("decided itself")  # type: ignore[method-assign]
    batches = stream()
    feed(made, batches[:4])  # classes 0 and 1
    assert len(made.grown_at) == 0
    made.boundary()
    assert made.grown_at.tolist() == [48] and made.grown_for.tolist() == [2]
    images, labels = joined(batches[4:])
    own = labels != 0
    for part in images[own].split(12):
        made.observe(part, labels[own][: len(part)].clamp(1, 2))
    made.boundary()
    assert made.grown_for.tolist() == [2, 2]  # without class 0, which the window still holds
    assert 0 in made.window.labels
    assert made.facts()["reasons"] == ["since a stage with 2 classes had ended"] * 2
    made.boundary()
    assert len(made.grown_at) == 2  # the budget


def test_a_stage_with_one_class_does_not_grow() -> None:
    made = learner("pearl")
    assert isinstance(made, OnlinePearl)
    made.setup.boundaries = True
    images, _ = joined(stream())
    made.observe(images[:12], torch.zeros(12, dtype=torch.int64))
    made.boundary()
    assert len(made.grown_at) == 0


def test_blocks_that_no_sub_network_adapts_run_once() -> None:
    torch.manual_seed(0)
    method = {"name": "pearl", "targets": r"blocks\.2\.attn\.qkv"}
    made = LEARNERS.build({"name": "pearl", **OPTIONS["pearl"]}, setup(method=method))
    made.setup.boundaries = True
    batches = stream()
    for number in range(8):
        made.observe(*batches[number])
        if number in (3, 7):
            made.boundary()
    images, _ = joined(batches)
    modules = [network.module.network for network in made.networks().values()]
    assert len(modules) == 3
    runs: list[int] = []
    for module in modules:
        for number in (1, 2):
            module.blocks[number].register_forward_hook(lambda *call, number=number: runs.append(number))
    expected = made.scores([network(images) for network in made.networks().values()])
    assert sorted(runs) == [1] * 3 + [2] * 3
    runs.clear()
    assert torch.equal(made.predict(images), expected)
    assert sorted(runs) == [1] + [2] * 3


def test_random_features_stay_if_some_classes_have_no_others() -> None:
    """The first growth comes when the images of class 0 have left the window: the class can still be predicted."""
    made = learner("pearl", small_resnet, window=24)
    assert isinstance(made, OnlinePearl)
    made.setup.boundaries = True  # no growth before
    images, labels = joined(stream())
    for c, count in ((0, 24), (1, 12), (2, 12)):
        own = images[labels == c][:count]
        made.observe(own, torch.full((len(own),), c))
    made.boundary()
    assert len(made.grown_at) == 1 and [int(space.task) for space in made.spaces] == [BARE, 0]
    assert made.predict(images).isfinite().all()
    assert (made.predict(images[labels == 0]).argmax(1) == 0).float().mean() > 0.5
