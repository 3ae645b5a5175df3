import numpy as np
import pytest
import torch
import torch.nn.functional as F

from pearl.data import stream
from pearl.data.cache import Images
from pearl.data.domains import NOISE, seen_as
from pearl.data.sources import Source, Split
from pearl.data.stream import make_stream
from pearl.errors import DataError
from pearl.settings.sections import StreamConfig

IMAGES = np.random.default_rng(0).integers(0, 256, (6, 9, 7, 3), dtype=np.uint8)
ROWS = np.arange(10, 16)


def digits(count: int = 8) -> Source:
    labels = np.repeat(np.arange(4), count)
    images = np.zeros((len(labels), 1, 1, 3), np.uint8)
    return Source("toy", ("a", "b", "c", "d"), Split(images, labels), Split(images, labels))


def test_edges_are_the_size_of_sobels_gradient() -> None:
    kernel = torch.tensor([[-1.0, 0, 1], [-2, 0, 2], [-1, 0, 1]])
    planes = F.pad(
        torch.from_numpy(IMAGES).float().permute(0, 3, 1, 2).reshape(-1, 1, 9, 7), (1,) * 4, mode="replicate"
    )
    across, down = (F.conv2d(planes, way[None, None]) for way in (kernel, kernel.T))
    expected = (torch.hypot(across, down) / 4).round().clamp(0, 255).reshape(6, 3, 9, 7).permute(0, 2, 3, 1)
    assert np.array_equal(seen_as("edges", IMAGES, ROWS), expected.numpy().astype(np.uint8))


def test_negatives_and_the_plain_look() -> None:
    assert np.array_equal(seen_as("inverted", IMAGES, ROWS).astype(int), 255 - IMAGES.astype(int))
    assert np.array_equal(seen_as("plain", IMAGES, ROWS), IMAGES)


def test_noise_is_an_images_own_and_always_the_same() -> None:
    grey = np.full((200, 8, 8, 3), 128, np.uint8)
    noisy = seen_as("noisy", grey, np.arange(200)).astype(float)
    assert abs((noisy - 128).std() - NOISE) < 1
    assert np.array_equal(seen_as("noisy", grey[:3], np.array([7, 0, 7]))[0], noisy[7])


def test_each_domain_learns_all_classes_from_images_of_its_own() -> None:
    made = make_stream(digits(), StreamConfig(tasks=2, domains=["plain", "noisy"], test_per_class=3), 0)
    assert [task.name for task in made.tasks] == ["plain1", "plain2", "noisy1", "noisy2"]
    assert [task.classes for task in made.tasks] == [("a", "b"), ("c", "d"), (), ()]
    assert made.shown(2) == ["a", "b"]
    assert [task.first_class for task in made.tasks] == [0, 2, 4, 4]
    assert [task.shown.tolist() for task in made.tasks] == [[0, 1], [2, 3]] * 2
    rows = np.concatenate([task.train for task in made.tasks])
    assert sorted(rows) == [*range(32)]  # each image in one domain
    assert all(np.array_equal(a.test, b.test) for a, b in zip(made.tasks[:2], made.tasks[2:], strict=True))


def test_test_images_are_made_once_while_they_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_stream(digits(), StreamConfig(tasks=1, domains=["plain", "edges", "inverted"]), 0)
    images = Images(np.arange(32), np.random.default_rng(0).integers(0, 256, (32, 5, 5, 3), dtype=np.uint8))
    monkeypatch.setattr(stream, "KEPT", 32 * 5 * 5 * 3)
    asked: list[str] = []
    monkeypatch.setattr(stream, "seen_as", lambda domain, *given: asked.append(domain) or seen_as(domain, *given))
    for _ in range(2):
        for t, task in enumerate(made.tasks):
            assert np.array_equal(made.test_images(t, images), seen_as(task.domain, images[task.test], task.test))
    assert asked == ["plain", "edges", "inverted", "plain", "inverted"]  # the last no longer fits


def test_the_digest_sees_the_domain() -> None:
    made = [make_stream(digits(), StreamConfig(tasks=1, domains=[look]), 0) for look in ("plain", "edges", "noisy")]
    assert len({one.digest for one in made}) == 3


def test_too_few_images_for_so_many_domains() -> None:
    with pytest.raises(DataError, match=r"stream.domains: 3 domains, but fewer training images of a, b, c, d; "):
        make_stream(digits(2), StreamConfig(tasks=1, domains=["plain", "edges", "noisy"]), 0)
