"""The table of online learners: metrics of streams and of joint training from stored runs."""

import statistics

import pytest

from pearl.lifecycle.runs import execute
from pearl.storage.durations import total_seconds
from pearl.storage.run_directory import RunDirectory
from pearl.tables.model_values import CPU_CORE, seconds
from pearl.tables.show import page
from pearl.tables.spec import OF_STREAMS, read
from pearl.tables.values import Missing, fill

SLDA, PEARL, JOINT = (
    "Digits, Si-Blurry: streaming LDA",
    "Digits, Si-Blurry: PEARL, 2 sub-networks",
    "Digits: joint training",
)
TINY = ("backbone.width=4", "train.epochs=1", "stream.per_class=8", "images.size=8")


def store(missing: Missing, right: int, **facts: object) -> None:
    """Write what a run stores at its end: 1 and 4 images seen, `right` of 10 test images correct at the end."""
    first = {"seen": 1, "regular": False, "total": [5], "right": [5]}
    points = [{"seen": 2, "regular": True, "total": [5], "right": [5]}]
    points.append({"seen": 4, "regular": True, "total": [5, 5], "right": [right - 2, 2]})
    own = {"passes": 1, "images_bytes": 2_000_000, "statistics_bytes": 3_500_000, "seconds_per_image": 0.004}
    own |= {"longest_pause_seconds": 2.5, "evaluation_seconds": 1.0, "classes": 2}
    online = {"curve": [first, *points], "facts": {**own, **facts}, "names": ["a", "b"]}
    directory = RunDirectory(missing.path)
    directory.write(directory.results_file, {"tasks": [], "stages": [], "complete": True, "online": online})


def test_learners_lie_side_by_side() -> None:
    waiting = {
        (row, one.seed): one
        for (row, id), cell in fill(read("online"), "cpu", 2).cells.items()
        for one in cell.missing
        if id == "auc"
    }
    store(waiting[SLDA, 0], 7)
    store(waiting[SLDA, 1], 5)
    store(waiting[PEARL, 0], 6, grown_at=[400, 800], passes=3, sub_networks=[{}, {}])
    filled = fill(read("online"), "cpu", 2)
    auc = filled.cells[SLDA, "auc"]
    assert auc.mean == pytest.approx(statistics.mean([85, 75])) and auc.n == 2  # of the regular evaluations
    assert auc.std == pytest.approx(statistics.stdev([85, 75]))
    expected = {"last": 60, "forgetting": 20, "ms": 4, "pause": 2.5, "passes": 1, "images": 2, "statistics": 3.5}
    assert {id: filled.cells[SLDA, id].mean for id in expected} == pytest.approx(expected)
    assert filled.cells[SLDA, "grown"].values == () and filled.cells[PEARL, "grown"].mean == 2
    assert not filled.cells[SLDA, "last"].missing and len(filled.cells[PEARL, "last"].missing) == 1
    assert "80.00 ± 7.07 (n=2)" in page(filled)
    assert total_seconds(RunDirectory(waiting[SLDA, 0].path)) == pytest.approx(4 * 0.004 + 1)


def test_joint_training_is_a_bound_for_the_end() -> None:
    (missing,) = fill(read("online"), "cpu", 1, TINY).cells[JOINT, "last"].missing
    run = execute(missing.request.config)
    cells = fill(read("online"), "cpu", 1, TINY).cells
    assert cells[JOINT, "last"].mean == pytest.approx(run.summary["class_il.final"])
    assert all(not cells[JOINT, id].values for id in ("auc", "ms", "grown"))


def test_every_metric_of_a_stream_has_a_column() -> None:
    assert {column.metric for column in read("online").columns} == {*OF_STREAMS}


def test_growth_and_training_on_each_batch_take_their_time() -> None:
    rows = {row.name.removeprefix("Digits, Si-Blurry: "): row for row in fill(read("online"), "cpu", 1).rows}
    requests = {name: read("online").request(row, read("online").columns[0], "cpu") for name, row in rows.items()}
    took = {name: seconds(request.config, CPU_CORE) for name, request in requests.items() if request}
    assert took["streaming LDA"] < took["ER, 500 images"]
    assert took["PEARL without growth"] < took["PEARL, 2 sub-networks"]
