"""RanPAC, LoRanPAC and the decomposition that is kept up to date, against calculations of their own."""

import pytest
import torch
import torch.nn.functional as F

from pearl.errors import RunError
from pearl.methods.common.random_features import RandomFeatures, TruncatedSvd
from pearl.methods.prototypes.loranpac import LoRanPac
from pearl.methods.prototypes.ranpac import RIDGES, RanPac, errors
from pearl.settings.config import load_config
from pearl.settings.declared import declared
from pearl.storage.checkpoint import RUNNING, WEIGHTS
from pearl.testing.tiny import images, logits, make_task, small_resnet
from vits import close, drawn, run, small

# ------------------------------------------------------------------------------------------------- the decomposition


def updated(rows, sizes, rank):
    svd = TruncatedSvd(rows.shape[1])
    for part in rows.split(sizes):
        svd.update(part, rank)
    return svd


@pytest.mark.parametrize("sizes", [[90], [40, 50], [1] * 20 + [70], [10, 75, 5]])
@pytest.mark.parametrize("dim", [130, 60])  # more features than rows, and fewer
def test_without_truncation_it_is_the_pseudo_inverse_whatever_the_batches(sizes, dim):
    z, y = drawn(90, dim).double(), drawn(90, 7, seed=1).double()
    svd = updated(z, sizes, 1000)
    close(svd.least_squares(z.T @ y), torch.linalg.pinv(z) @ y, atol=1e-11, rtol=1e-9)
    close(svd.values, torch.linalg.svdvals(z), atol=1e-11, rtol=1e-11)
    ridge = torch.linalg.solve(z.T @ z + 0.3 * torch.eye(dim).double(), z.T @ y)
    close(svd.least_squares(z.T @ y, 0.3), ridge, atol=1e-11, rtol=1e-9)


def test_one_batch_truncated_is_the_truncated_decomposition():
    z, y = drawn(50, 80).double(), drawn(50, 3, seed=1).double()
    svd = updated(z, [50], 20)
    u, s, v = torch.linalg.svd(z, full_matrices=False)
    close(svd.least_squares(z.T @ y), v[:20].T @ (u[:, :20].T @ y / s[:20, None]), atol=1e-11, rtol=1e-9)


def test_directions_stay_orthonormal_after_many_updates():
    svd = TruncatedSvd(300)
    for seed in range(60):
        svd.update(drawn(5, 300, seed=seed), 100)
        assert svd.values.shape == (min(100, 5 * (seed + 1)),)
    close(svd.vectors.T @ svd.vectors, torch.eye(100), atol=2e-6)


def test_what_is_there_twice_is_not_inverted():
    z, y = drawn(6, 40), drawn(6, 2, seed=1)
    svd = updated(torch.cat([z, z, z[:3], torch.zeros(2, 40)]), [6, 6, 3, 2], 1000)
    assert len(svd.values) == 6
    twice = torch.cat([z, z, z[:3]]).double()
    expected = torch.linalg.pinv(twice) @ torch.cat([y, y, y[:3]]).double()
    close(svd.least_squares(twice.T @ torch.cat([y, y, y[:3]]).double()).double(), expected, atol=1e-5)
    nothing = updated(torch.zeros(3, 40), [3], 5)
    assert not nothing.least_squares(torch.zeros(40, 2)).any()


def test_a_hundred_thousand_features_cost_what_is_kept():
    svd = TruncatedSvd(100_000)
    lift = RandomFeatures(24, 100_000)
    torch.manual_seed(0)
    lift.draw()
    rows, y = drawn(45, 24), F.one_hot(torch.arange(45) % 3).float()
    cross = torch.zeros(100_000, 3)
    for part in range(3):
        z = lift(rows[part * 15 : part * 15 + 15])
        svd.update(z, 20)
        cross += z.T @ y[part * 15 : part * 15 + 15]
    assert svd.vectors.shape == (100_000, 20)
    head = svd.least_squares(cross)
    assert ((lift(rows) @ head).argmax(1) == y.argmax(1)).float().mean() > 0.6  # of noise that it has seen


# --------------------------------------------------------------------------------------------------- random features


def test_the_matrix_is_made_again_from_its_seed():
    torch.manual_seed(3)
    lift, fresh = RandomFeatures(5, 4000), RandomFeatures(5, 4000)
    lift.draw()
    assert {*lift.state_dict()} == {"seed", "checksum"}
    assert abs(float(lift.matrix.mean())) < 0.03 and abs(float(lift.matrix.std()) - 1) < 0.03
    fresh.load_state_dict(lift.state_dict())
    x = drawn(4, 5)
    assert torch.equal(fresh(x), F.relu(x @ lift.matrix))
    other = lift.state_dict() | {"checksum": torch.zeros(32, dtype=torch.uint8)}
    with pytest.raises(RunError, match=r"^torch [^\n]* cannot reproduce the random features: [^\n]*$"):
        fresh.load_state_dict(other)


# -------------------------------------------------------------------------------------------------------- the methods


def seen(method, tasks):
    """Random features and one-hot labels of all images of tasks, float64."""
    method.eval()
    taken = [make_task(t) for t in tasks]
    with torch.no_grad():
        z = torch.cat([method.lifted(task.view.test(task.images)) for task in taken]).double()
    return z, F.one_hot(torch.cat([task.labels for task in taken])).double()


def test_loranpac_without_truncation_is_ranpac():
    z, y = seen(one := run(LoRanPac(small_resnet(), E=40, truncate_percent=0, ridge=2.0), range(2)), range(2))
    other = run(RanPac(small_resnet(), M=40, ridge=2.0), range(2))
    expected = torch.linalg.solve(z.T @ z + 2 * torch.eye(40), z.T @ y)
    close(one.kept["head"].double(), expected, atol=1e-4, rtol=1e-3)
    close(other.kept["head"].double(), expected, atol=1e-4, rtol=1e-3)
    with torch.no_grad():
        close(logits(one), (one.lift(one.adapted(images())).double() @ expected).float(), atol=1e-4)


def test_loranpac_keeps_a_share_of_as_many_as_there_are_images():
    method = LoRanPac(small(), E=500, truncate_percent=50, rank=30, rows=20)
    ranks = []
    for t in range(3):
        run(method, [t])
        ranks.append(len(method.svd.values))
    assert ranks == [12, 24, 30]  # 24 images a task
    assert LoRanPac(small(), E=20, truncate_percent=25).most == 15


def test_the_ridge_is_that_of_the_least_error_on_what_was_left_out():
    for n, features in ((30, 12), (10, 40)):
        z, y, held, expected = (drawn(*shape, seed=i).double() for i, shape in enumerate([(n, features), (n, 3), (8, features), (8, 3)]))  # fmt: skip  # noqa: E501
        actual = errors(z, y, held, expected)
        for ridge, error in list(zip(RIDGES, actual, strict=True))[4:]:
            head = torch.linalg.solve(z.T @ z + ridge * torch.eye(features), z.T @ y)
            close(torch.tensor(error), (held @ head - expected).square().mean().float(), atol=1e-6)


def test_ranpac_chooses_a_ridge_with_every_task():
    method, called = RanPac(small(), M=60, tuning="none"), []
    chosen = method.chosen
    method.chosen = lambda task, features: called.append(chosen(task, features)) or called[-1]
    run(method, range(2))
    assert len(called) == 2 and {*called} <= {*RIDGES}
    z, y = seen(method, range(2))
    strength = max(called[-1], torch.finfo(torch.float32).eps * float((z.T @ z).trace()))
    expected = torch.linalg.solve(z.T @ z + strength * torch.eye(60), z.T @ y)
    close((z @ method.kept["head"].double()), z @ expected, atol=1e-3)


@pytest.mark.parametrize(
    ("recipe", "tuning"),
    [
        ("imagenet_r-10t-vit", "loranpac_adapter"),  # the authors' configuration for increments of 20
        ("imagenet_r-20t-vit", "loranpac_ssf"),
        ("cpu-cifar100-deit_tiny", "loranpac_ssf"),
    ],
)
def test_loranpac_is_tuned_as_ranpac_or_as_its_authors_have_it(recipe, tuning):
    options = {key: value for key, value in load_config(recipe, ["method=loranpac"]).method.items() if key != "name"}
    method = LoRanPac(small(), **options | {"E": 30})
    assert [phase.name for phase in method.learn(make_task(0))] == [tuning]
    assert [phase.name for phase in RanPac(small(), M=30).learn(make_task(0))] == ["ranpac_ssf"]
    assert [phase.name for phase in LoRanPac(small_resnet(), E=30).learn(make_task(0))] == ["extractor"]


@pytest.mark.parametrize("make", [lambda: RanPac(small(), M=30), lambda: LoRanPac(small(), E=30, tuning="ssf")])
def test_the_first_task_adapts_and_all_else_is_in_closed_form(make):
    method = make()
    before = method.tuned.state_dict()
    before = {name: value.clone() for name, value in before.items()}
    names = [[phase.name for phase in method.learn(make_task(t))] for t in range(2)]
    assert names == [[method.phase], []] and [*declared(method)] == ["extractor", method.phase]
    trained = run(make(), range(1)).tuned.state_dict()
    assert any(not torch.equal(trained[name], value) for name, value in before.items())


def test_what_is_replaced_with_each_task_has_a_file_of_its_own():
    method = run(LoRanPac(small(), E=30), range(1))
    files = {name: method.file_of(name) for name in method.state_dict()}
    assert {name for name, file in files.items() if file == RUNNING} == {
        "kept.head", "svd.tensors.vectors", "svd.tensors.values",
    }  # fmt: skip
    assert files["statistics.tensors.0/mean"] == WEIGHTS and "lift.matrix" not in files
    assert method.facts(0)["statistics"] < 30 * 30 + 4 * 30 * 2 + 200
