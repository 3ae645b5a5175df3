"""The accuracy that is expected on unseen images, from cross-validated predictions and some of spared images."""

import numpy as np
import pytest
import torch
from scipy.stats import binom, gamma

from pearl.data.batches import FEWEST, SPARED, spared_rows
from pearl.methods.common.optimism import MEAN, SHAPE, TrainedOn


def case(trained, right, spared=0, right_spared=0, spaces=1):
    rows = np.arange(trained + spared) < trained
    correct = np.concatenate([np.arange(trained) < right, np.arange(spared) < right_spared])
    return TrainedOn(rows, spaces).expected(correct)


@pytest.mark.parametrize(
    ("spared", "right_spared", "spaces"), [(0, 0, 1), (15, 11, 1), (15, 15, 2), (60, 40, 1), (1, 0, 3)]
)
def test_it_is_the_mean_of_the_posterior(spared, right_spared, spaces):
    """An independent calculation, on another grid."""
    shift = np.linspace(1e-4, 6, 20_000)
    wrong = 20.5 / 151
    odds = wrong / (1 - wrong) * np.exp(shift)
    weights = gamma.pdf(shift, SHAPE, scale=MEAN / spaces / SHAPE)
    weights *= binom.pmf(right_spared, spared, 1 / (1 + odds))
    expected = (weights / (1 + odds)).sum() / weights.sum()
    assert case(150, 130, spared, right_spared, spaces) == pytest.approx(expected, abs=2e-3)


def test_many_spared_images_decide():
    assert case(9000, 8910, 1000, 700) == pytest.approx(0.70, abs=0.02)
    assert case(9000, 8100, 1000, 900) == pytest.approx(0.90, abs=0.02)
    assert case(150, 130) < 130 / 150, "without any it is lower by experience"
    assert case(150, 130, spaces=3) > case(150, 130), "two of three spaces were trained on other images"
    assert case(0, 0, 20, 15) == 0.75


def test_spared_rows_are_a_tenth_of_every_class_in_any_order():
    labels = torch.arange(10).repeat_interleave(15)
    rows = spared_rows(labels)
    assert rows.sum() == 15 and set(labels[rows].bincount().tolist()) == {1, 2}
    order = torch.randperm(150, generator=torch.Generator().manual_seed(0))
    assert labels[order][spared_rows(labels[order])].bincount().tolist() == labels[rows].bincount().tolist()
    assert torch.equal(spared_rows(labels + 7), rows), "new numbers of the same classes change nothing"


def test_few_images_are_all_trained_on_and_of_many_some_are_spared():
    assert not spared_rows(torch.arange(99).repeat_interleave(FEWEST - 1)).any()
    mixed = torch.cat([torch.zeros(FEWEST - 1), torch.ones(40)]).long()
    assert spared_rows(mixed).nonzero()[:, 0].tolist() == [8, 18, 28, 38]
    assert (~spared_rows(torch.arange(30).repeat_interleave(FEWEST))).long().sum() == 108
    assert 0.9 * SPARED < int(spared_rows(torch.arange(10).repeat_interleave(1000)).sum()) <= SPARED
