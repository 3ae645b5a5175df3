"""Whitened features: directions in which images of one class differ count little, in unknown classes too."""

import numpy as np
import torch
import torch.nn.functional as F

from pearl.evaluation.grouping import group
from pearl.methods.common.by_statistics import Statistics
from pearl.methods.common.class_statistics import ClassStatistics
from pearl.methods.common.whitening import Whitening
from photos import digit

LOUD = torch.randn(12, generator=torch.Generator().manual_seed(5)) * 10  # the direction in which a class differs most


def images(centres: torch.Tensor, each: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    rows = centres.repeat_interleave(each, 0)
    along = torch.randn(len(rows), 1, generator=generator) * LOUD
    return rows + torch.randn(rows.shape, generator=generator) + along


def contrast(rows: torch.Tensor) -> float:
    """The mean cosine within two classes of 40 images, less that between them."""
    cosines = F.normalize(rows) @ F.normalize(rows).T
    own = (torch.arange(80) < 40).double()
    same = own[:, None] == own
    return float(cosines[same].mean() - cosines[~same].mean())


def test_quiet_directions_tell_unseen_classes_apart() -> None:
    centres = torch.randn(14, 12, generator=torch.Generator().manual_seed(0)) * 2
    class_statistics = ClassStatistics(Statistics(spaces=2, projection=None))
    for t in range(2):
        raw = images(centres[6 * t : 6 * t + 6], 30, seed=t)
        class_statistics.add_space(t, raw)
        rows = [space(raw) for space in class_statistics.spaces()]
        class_statistics.observe(rows, torch.arange(6 * t, 6 * t + 6).repeat_interleave(30))
    unseen = images(centres[12:], 40, seed=9)
    white = Whitening(class_statistics)([unseen, unseen])
    assert white.shape == (80, 24) and white.dtype == unseen.dtype
    assert torch.allclose(white.norm(dim=1), torch.ones(80), atol=1e-5)
    halves = white.split(12, dim=1)
    assert all(torch.allclose(half.square().sum(1), torch.full((80,), 0.5), atol=1e-5) for half in halves)
    raw = [
        (space(unseen).double() - class_statistics.known(v).centre).float()
        for v, space in enumerate(class_statistics.spaces())
    ]
    assert contrast(white) > 2 * max(contrast(rows) for rows in raw)


def test_features_are_centred_on_all_images_and_divided_by_the_root_within_classes() -> None:
    """In NumPy; images of the second task lie elsewhere, so that the mean of all is not that of the first."""
    centres = torch.randn(8, 12, generator=torch.Generator().manual_seed(1)) * 2
    centres[4:] += 6
    class_statistics, raw = ClassStatistics(Statistics(spaces=1, projection=None)), []
    for t in range(2):
        raw.append(images(centres[4 * t : 4 * t + 4], 20, seed=t))
        if not t:
            class_statistics.add_space(t, raw[t])
        class_statistics.observe(
            [class_statistics.spaces()[0](raw[t])], torch.arange(4 * t, 4 * t + 4).repeat_interleave(20)
        )
    (space,) = class_statistics.spaces()
    rows = space(torch.cat(raw)).double().numpy().reshape(8, 20, 12)
    within = (rows - rows.mean(1, keepdims=True)).reshape(160, 12)
    covariance, share = within.T @ within / (160 - 8), (12 / (152 + 12)) ** 3
    covariance = (1 - share) * covariance + share * np.trace(covariance) / 12 * np.eye(12)
    unseen = images(centres[:3], 5, seed=9)
    away = space(unseen).double().numpy() - rows.mean((0, 1))
    expected = np.linalg.solve(np.linalg.cholesky(covariance), away.T).T
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(Whitening(class_statistics)([unseen]).numpy(), expected, atol=1e-4)
    assert np.linalg.norm(rows.mean((0, 1))) > 0.5


def test_groups_of_two_unseen_digits_are_not_mixed() -> None:
    """Statistics of the pixels of eight digits; fours and sixes are unknown."""
    rows = {label: torch.from_numpy(digit(label)[:40]).flatten(1) / 255 for label in range(10)}
    known = [label for label in rows if label not in (4, 6)]
    class_statistics = ClassStatistics(Statistics(spaces=1))
    raw = torch.cat([rows[label] for label in known])
    class_statistics.add_space(0, raw)
    class_statistics.observe([class_statistics.spaces()[0](raw)], torch.arange(8).repeat_interleave(40))
    labels = group(Whitening(class_statistics)([torch.cat([rows[4], rows[6]])]).numpy()).reshape(2, 40)
    fours, sixes = ({*own} - {-1} for own in labels)
    assert fours and sixes and not fours & sixes
    assert (labels >= 0).mean() > 0.9
