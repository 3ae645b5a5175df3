"""Rank rules, against float64 singular values and formulas worked out in numpy."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from sklearn.datasets import load_digits
from torch import Tensor, nn

from pearl.errors import ConfigError, TrainingError
from pearl.nn.lowrank import Fold, to_matrix
from pearl.nn.rank_rules import (
    Choice,
    EnergyRule,
    EvenRule,
    FixedRule,
    PaperRule,
    RandomRule,
    RankRule,
    energies,
    share_out,
)
from pearl.nn.resnet import resnet18
from pearl.settings.parts import RANK_RULES

TIE = 1e-9  # shares nearer to each other than this may be told apart either way

# -------------------------------------------------------------------------------------------------- the oracle


def share_of(reference: np.ndarray, tuned: np.ndarray) -> float:
    """The paper's T (equation 3), clipped."""
    moved, total = np.sum((tuned - reference) ** 2), np.sum(tuned**2) + np.sum(reference**2)
    return float(min(1.0, moved / total)) if total else 0.0


def explained(moved: np.ndarray) -> np.ndarray:
    """Share of the squared singular values that the first 1, 2, ... n make up."""
    energy = np.linalg.svd(moved, compute_uv=False) ** 2
    return np.cumsum(energy) / energy.sum() if energy.sum() else np.ones(len(energy))


def smallest_rank(shares: np.ndarray, share: float) -> int:
    """Equation 4: the 0-based position of the first true, plus 1."""
    return int(np.argmax(shares >= share)) + 1


def near_tie(shares: np.ndarray, share: float, tolerance: float = TIE) -> bool:
    return bool((abs(shares - share) < tolerance).any())


def check(choice: Choice, reference: np.ndarray, tuned: np.ndarray, share: float | None = None) -> None:
    """The choice is the one of equation 4, up to near ties; `share` is T unless given."""
    reference, tuned = reference.astype(np.float64), tuned.astype(np.float64)
    share = share_of(reference, tuned) if share is None else share
    shares = explained(tuned - reference)
    assert choice.full == min(reference.shape)
    assert 1 <= choice.rank <= choice.full
    assert choice.threshold == pytest.approx(share, rel=1e-12)
    assert shares[choice.rank - 1] >= share - TIE
    assert choice.rank == 1 or shares[choice.rank - 2] < share + TIE
    if not near_tie(shares, share):
        assert choice.rank == smallest_rank(shares, share)


# ------------------------------------------------------------------------------------------------ weight pairs

Pair = tuple[np.ndarray, np.ndarray]
seeds = st.integers(0, 2**32 - 1)
sides = st.integers(1, 12)


def pair(seed: int, m: int, n: int, *, rank: int = 99, step: float = 0.5, falling: float = 0.0) -> Pair:
    """Reference and tuned weights, whose difference has at most that rank and singular values that fall."""
    rng = np.random.default_rng(seed)
    inner = min(rank, m, n)
    moved = (rng.normal(size=(m, inner)) * np.exp(-falling * np.arange(inner))) @ rng.normal(size=(inner, n))
    reference = rng.normal(size=(m, n))
    return reference, reference + step * moved / math.sqrt(inner)


@st.composite
def pairs(draw: st.DrawFn) -> Pair:
    rank, step, falling = draw(sides), draw(st.sampled_from([0.01, 0.3, 1.0, 10.0])), draw(st.floats(0, 2))
    return pair(draw(seeds), draw(sides), draw(sides), rank=rank, step=step, falling=falling)


def matrices(elements: st.SearchStrategy[Any], count: int) -> st.SearchStrategy[tuple[np.ndarray, ...]]:
    """Matrices of one shape."""
    shapes = st.tuples(st.integers(1, 5), st.integers(1, 5))
    return shapes.flatmap(lambda shape: st.tuples(*[hnp.arrays(np.float64, shape, elements=elements)] * count))


def choose(rule: RankRule, reference: np.ndarray, tuned: np.ndarray) -> Choice:
    return rule.choose(torch.from_numpy(reference), torch.from_numpy(tuned))


# ------------------------------------------------------------------------------------------------ the paper's rule


@settings(deadline=None)
@given(pairs())
def test_the_paper_s_rule_is_equations_3_and_4(weights: Pair) -> None:
    check(choose(PaperRule(), *weights), *weights)


@settings(deadline=None)
@given(matrices(st.integers(-2, 2), 2))
def test_it_is_on_matrices_full_of_ties(weights: Pair) -> None:
    check(choose(PaperRule(), *weights), *weights)


@settings(deadline=None)
@given(matrices(st.floats(-1e6, 1e6, allow_subnormal=False).filter(lambda x: x == 0 or abs(x) > 1e-6), 2))
def test_it_is_on_adversarial_matrices(weights: Pair) -> None:
    check(choose(PaperRule(), *weights), *weights)


@pytest.mark.parametrize(
    ("dtype", "scale"),
    [
        *[(np.float32, scale) for scale in (1e30, 1e-30)],
        *[(np.float64, scale) for scale in (1e150, 1e-150, 1e300, 1e-300)],  # squares of the last are inf and 0
    ],
)
@settings(deadline=None)
@given(weights=pairs())
def test_huge_and_tiny_weights_do_not_leave_its_range(dtype: type, scale: float, weights: Pair) -> None:
    reference, tuned = ((scale * weight).astype(dtype) for weight in weights)
    choice = choose(PaperRule(), reference, tuned)
    with np.errstate(under="ignore"):
        check(choice, reference.astype(np.float64) / scale, tuned.astype(np.float64) / scale)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_finite_weights_with_an_infinite_difference_have_a_rank(dtype: torch.dtype) -> None:
    reference = torch.eye(4, dtype=dtype) * torch.finfo(dtype).max
    assert PaperRule().choose(reference, -reference) == Choice(rank=4, full=4, threshold=1.0)


@pytest.mark.parametrize(
    ("dtype", "digits", "keep"),
    [(torch.bfloat16, 8, 0.501), (torch.float16, 11, 0.5001), (torch.float32, 24, 0.5 + 1e-8)],
)
def test_the_difference_is_not_rounded_to_the_dtype(dtype: torch.dtype, digits: int, keep: float) -> None:
    reference = torch.tensor([[-1, 0], [0, 0]], dtype=dtype)
    tuned = torch.eye(2, dtype=dtype) * 2**digits  # 1 more is the first integer that the dtype does not have
    assert EnergyRule(keep=keep).choose(reference, tuned).rank == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@settings(deadline=None)
@given(weights=matrices(st.integers(-64, 64), 2))
def test_short_weights_get_the_rank_of_their_values(dtype: torch.dtype, weights: Pair) -> None:
    reference, tuned = (torch.from_numpy(weight).to(dtype) for weight in weights)
    check(PaperRule().choose(reference, tuned), *weights)


@settings(deadline=None)
@given(matrices(st.floats(-3, 3), 1), st.sampled_from([-1.0, -0.5, 0.0]))
def test_t_is_clipped_to_1(weights: tuple[np.ndarray], factor: float) -> None:
    (tuned,) = weights
    assume(np.abs(tuned).max() > 1e-100)
    assert choose(PaperRule(), factor * tuned, tuned).threshold == 1.0


@pytest.mark.parametrize("factor", [-1.0, -0.25, 0.0])
@pytest.mark.parametrize("rank", [1, 2, 5, 8])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_t_of_1_keeps_the_whole_rank_and_no_rounding(dtype: type, rank: int, factor: float) -> None:
    rng = np.random.default_rng(rank)
    tuned = (rng.normal(size=(10, rank)) @ rng.normal(size=(rank, 8))).astype(dtype)
    assert choose(PaperRule(), dtype(factor) * tuned, tuned) == Choice(rank=rank, full=8, threshold=1.0)


@pytest.mark.parametrize(
    ("reference", "tuned", "share", "rank"),
    [
        ([[0, 0], [0, 0]], [[0, 0], [0, 0]], 0, 1),  # nothing there
        ([[1, 2], [3, 4]], [[1, 2], [3, 4]], 0, 1),  # nothing moved
        ([[0, 0], [0, 0]], [[1, 0], [0, 1]], 1, 2),
        ([[1, 0], [0, 1]], [[0, 0], [0, 0]], 1, 2),
        ([[1, 0], [0, 1]], [[2, 0], [0, 2]], 2 / 10, 1),  # the first of two equal ones is half
        ([[1, 0], [0, 1]], [[8, 0], [0, 8]], 98 / 130, 2),
        ([[2, 1, 0]], [[4, 1, 0]], 4 / 22, 1),
        ([[-3]], [[4]], 1, 1),  # 49 / 25, clipped
    ],
)
def test_worked_by_hand(reference: list, tuned: list, share: float, rank: int) -> None:
    choice = PaperRule().choose(torch.tensor(reference).double(), torch.tensor(tuned).double())
    assert (choice.rank, choice.threshold) == (rank, pytest.approx(share, rel=1e-15))


# ------------------------------------------------------------------------------------------------- invariances


def turn(seed: int, size: int) -> np.ndarray:
    """A random orthogonal matrix."""
    return np.linalg.qr(np.random.default_rng(seed).normal(size=(size, size)))[0]


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda w: w.T.copy(), id="transposed"),
        pytest.param(lambda w: turn(1, w.shape[0]) @ w @ turn(2, w.shape[1]), id="rotated"),
        pytest.param(lambda w: 1e20 * w, id="scaled up"),
        pytest.param(lambda w: -1e-20 * w, id="scaled down and mirrored"),
        pytest.param(lambda w: np.pad(w, ((0, 3), (2, 0))), id="padded with zeros"),
    ],
)
@settings(deadline=None)
@given(weights=pairs())
def test_the_rank_does_not_change_when_both_weights_are(change: Any, weights: Pair) -> None:
    reference, tuned = weights
    assume(not near_tie(explained(tuned - reference), share_of(reference, tuned)))
    before, after = choose(PaperRule(), reference, tuned), choose(PaperRule(), change(reference), change(tuned))
    assert (after.rank, after.threshold) == (before.rank, pytest.approx(before.threshold, rel=1e-9))


@settings(deadline=None)
@given(pairs())
def test_reference_and_tuned_may_change_places(weights: Pair) -> None:
    assert choose(PaperRule(), *weights) == choose(PaperRule(), *reversed(weights))


# ------------------------------------------------------------------------------------------------- convolutions


def folded(weight: np.ndarray, fold: Fold) -> np.ndarray:
    """The 2-D view, element by element."""
    out, into, kh, kw = weight.shape
    matrix = np.full((out, into * kh * kw) if fold == "unfold" else (out * kh, into * kw), np.nan)
    for (o, i, y, x), value in np.ndenumerate(weight):
        memory = ((o * into + i) * kh + y) * kw + x
        row, column = {
            "spatial": (o * kh + y, i * kw + x),
            "view": divmod(memory, into * kw),
            "unfold": (o, (i * kh + y) * kw + x),
        }[fold]
        matrix[row, column] = value
    return matrix


@pytest.mark.parametrize("fold", ["spatial", "view", "unfold"])
@pytest.mark.parametrize("shape", [(8, 6, 3, 3), (4, 3, 7, 7), (6, 9, 1, 1), (5, 4, 1, 3), (3, 7, 5, 2), (12, 1, 3, 3)])
def test_convolutions_get_the_rank_of_their_2d_view(fold: Fold, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(sum(shape))
    reference = rng.normal(size=shape)
    for step in (0.1, 0.5, 0.9, 1.5, 4):
        tuned = reference + step * rng.normal(size=shape)
        views = (to_matrix(torch.from_numpy(weight), fold) for weight in (reference, tuned))
        check(PaperRule().choose(*views), folded(reference, fold), folded(tuned, fold))


def test_the_folds_are_told_apart() -> None:
    rng = np.random.default_rng(0)
    out, into, kernel = 8, 6, 3
    separable = np.einsum("oy,ix->oiyx", rng.normal(size=(out, kernel)), rng.normal(size=(into, kernel)))
    one_filter = np.einsum("o,iyx->oiyx", rng.normal(size=out), rng.normal(size=(into, kernel, kernel)))
    ranks = {
        fold: [
            EnergyRule(keep=1).choose(torch.zeros_like(matrix), matrix).rank
            for matrix in (to_matrix(torch.from_numpy(weight), fold) for weight in (separable, one_filter))
        ]
        for fold in ("spatial", "view", "unfold")
    }
    assert ranks["spatial"] == [1, 3]
    assert ranks["unfold"] == [3, 1]
    assert ranks["view"] == [np.linalg.matrix_rank(folded(w, "view")) for w in (separable, one_filter)]


# ---------------------------------------------------------------------------------------------- the other rules


@settings(deadline=None)
@given(pairs(), st.floats(0, 1))
def test_the_energy_rule_keeps_the_given_share(weights: Pair, keep: float) -> None:
    check(choose(EnergyRule(keep=keep), *weights), *weights, share=keep)


@pytest.mark.parametrize("rank", [1, 3, 7])
def test_the_energy_rule_at_its_ends(rank: int) -> None:
    weights = pair(rank, 9, 7, rank=rank)
    assert choose(EnergyRule(keep=0), *weights).rank == 1
    assert choose(EnergyRule(keep=1), *weights).rank == rank


@pytest.mark.parametrize(
    ("r", "shape", "rank"), [(1, (5, 7), 1), (4, (5, 7), 4), (5, (5, 7), 5), (6, (5, 7), 5), (999, (7, 5), 5)]
)
def test_the_fixed_rule_stops_at_full_rank(r: int, shape: tuple[int, int], rank: int) -> None:
    unseen = torch.empty(shape, device="meta")  # there are no values that it could look at
    choice = FixedRule(r=r).choose(unseen, unseen)
    assert (choice.rank, choice.full) == (rank, 5)


def test_only_the_fixed_rule_needs_no_probe() -> None:
    assert [rule.needs_probe for rule in (PaperRule(), EnergyRule(), FixedRule())] == [True, True, False]


@pytest.mark.parametrize("rule", [PaperRule(), EnergyRule()])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("which", [0, 1])
def test_weights_that_are_not_finite_are_an_error(rule: RankRule, value: float, dtype: torch.dtype, which: int) -> None:
    weights = [torch.ones(3, 4, dtype=dtype), torch.ones(3, 4, dtype=dtype)]
    weights[which][1, 2] = value
    with pytest.raises(TrainingError, match="no longer finite"):
        rule.choose(*weights)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("fixed", {"r": 0}),
        ("fixed", {"r": -3}),
        ("energy", {"keep": 2}),
        ("energy", {"keep": -0.1}),
        ("energy", {"keep": math.nan}),
    ],
)
def test_options_without_meaning_are_refused(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"rank\.{next(iter(options))}"):
        RANK_RULES.resolve({"name": name, **options}, "rank")


def test_choosing_leaves_the_weights_alone() -> None:
    weights: list[Tensor] = [torch.from_numpy(weight) for weight in pair(0, 5, 4)]
    before = [weight.clone() for weight in weights]
    PaperRule().choose(*weights)
    assert all(torch.equal(*both) for both in zip(weights, before, strict=True))


# ------------------------------------------------------------------------------------------- the same budget


def layers(seed: int, count: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Layers of several shapes whose weights have moved by different distances."""
    rng = np.random.default_rng(seed)
    actual = {}
    for index in range(count):
        rows, columns = (int(size) for size in rng.integers(2, 40, size=2))
        reference = rng.normal(size=(rows, columns))
        tuned = reference + rng.uniform(0.1, 3) * rng.normal(size=(rows, columns))
        actual[f"layer{index}"] = (torch.from_numpy(reference), torch.from_numpy(tuned))
    return actual


def parameters(choices: dict[str, Choice], of: dict[str, tuple[Tensor, Tensor]]) -> int:
    return sum(choice.rank * sum(of[name][0].shape) for name, choice in choices.items())


SAME_BUDGET = [RandomRule(), EvenRule(), EvenRule(of="parameters")]


@pytest.mark.parametrize("rule", SAME_BUDGET, ids=["random", "ranks", "parameters"])
@given(seed=st.integers(0, 500), count=st.integers(1, 8))
@settings(deadline=None, max_examples=40)
def test_the_papers_budget_is_spent_but_for_less_than_a_rank(rule: RankRule, seed: int, count: int) -> None:
    weights = layers(seed, count)
    paper, ours = PaperRule().choose_all(weights), rule.choose_all(weights)
    left = parameters(paper, weights) - parameters(ours, weights)
    assert ours.keys() == paper.keys()
    assert all(1 <= choice.rank <= choice.full for choice in ours.values())
    room = [sum(weights[name][0].shape) for name, choice in ours.items() if choice.rank < choice.full]
    assert 0 <= left < min(room, default=1)  # with all layers full, the paper's were too
    assert [choice.threshold for choice in ours.values()] == [choice.threshold for choice in paper.values()]


def test_random_ranks_are_the_seeds() -> None:
    weights = layers(3, 8)
    draws = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        draws.append([choice.rank for choice in RandomRule().choose_all(weights).values()])
    assert draws[0] == draws[1] != draws[2]


def test_even_ranks_and_even_parameters() -> None:
    costs, full = [10, 20, 40], [100, 100, 100]
    assert share_out(700, costs, full, [1, 1, 1]) == [10, 10, 10]
    assert share_out(1200, costs, full, [1 / 10, 1 / 20, 1 / 40]) == [40, 20, 10]  # 400 parameters each


def test_what_a_full_layer_leaves_goes_to_others() -> None:
    assert share_out(100, [10, 10], [2, 50], [1, 1]) == [2, 8]


def test_a_layer_keeps_a_rank_whatever_its_weight() -> None:
    assert share_out(100, [10, 10], [50, 50], [1e-12, 1]) == [1, 9]


def test_a_rule_for_each_layer_by_itself_chooses_so() -> None:
    weights = layers(0, 4)
    assert PaperRule().choose_all(weights) == {name: PaperRule().choose(*pair) for name, pair in weights.items()}


def test_trained_task_vectors_get_the_rank_of_an_svd() -> None:
    """On real images: a network trained on digits 0 to 4, fine-tuned on 5 to 9."""
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8).expand(-1, 3, 8, 8) / 16
    y, later = torch.tensor(labels), torch.tensor(labels >= 5)
    torch.manual_seed(0)
    net = nn.Sequential(resnet18(8, width=8), nn.Linear(64, 10))

    def train(rows: torch.Tensor) -> dict[str, torch.Tensor]:
        optimizer = torch.optim.Adam(net.parameters(), 0.01)
        for start in range(0, 512, 32):
            batch = rows.nonzero().flatten()[start : start + 32]
            loss = nn.functional.cross_entropy(net(x[batch]), y[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return {name: p.detach().clone() for name, p in net.named_parameters() if p.ndim == 4}

    before, after = train(~later), train(later)
    ranks = []
    for fold in ("spatial", "view", "unfold"):
        for name, weight in before.items():
            reference, tuned = (to_matrix(w, fold).double().numpy() for w in (weight, after[name]))
            choice = PaperRule().choose(to_matrix(weight, fold), to_matrix(after[name], fold))
            check(choice, reference, tuned)
            assert choice.rank == smallest_rank(explained(tuned - reference), share_of(reference, tuned)), (fold, name)
            ranks.append(choice.rank)
    assert len(set(ranks)) > 1


def test_small_singular_values_are_as_exact_as_a_sum_can_see() -> None:
    """Squares from 1 down to 1e-24: each is right to 1e-14 of their sum."""
    rng = np.random.default_rng(0)
    left, _ = np.linalg.qr(rng.normal(size=(40, 40)))
    right, _ = np.linalg.qr(rng.normal(size=(60, 40)))
    squares = 10.0 ** -np.linspace(0, 24, 40)
    actual = energies(torch.tensor(left * np.sqrt(squares) @ right.T)).numpy()
    actual = actual / actual.sum() * squares.sum()
    assert np.abs(actual - squares).max() < 1e-14
    assert np.abs(actual.cumsum() - squares.cumsum()).max() < 1e-14
