"""The queue of runs for a GPU, tried on digits and a CPU: what it writes, and that the time limit loses nothing."""

import json
import sys

import pytest
import run_queue

pytestmark = pytest.mark.slow

TINY = ["backbone.width=4", "train.epochs=2", "stream.tasks=2", "stream.per_class=8", "stream.test_per_class=2"]


@pytest.fixture
def queue(tmp_path, monkeypatch):
    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["run_queue.py", "--out", str(tmp_path / "out"), *arguments])
        run_queue.main()
        return json.loads((tmp_path / "out" / "gpu.json").read_text())

    return call


def test_what_the_limit_cuts_off_goes_on_and_statistics_train_nothing(queue):
    heads, class_statistics = (
        " ".join(TINY),
        " ".join([*TINY, "method.classifier.name=statistics", "method.classifier.train=all"]),
    )
    asked = ["--recipes", "digits", "--seeds", "0", "--variants", heads, class_statistics]
    (cut,) = queue(*asked, "--minutes", "0")
    assert cut["unfinished"] == "out of time"
    first, second = queue(*asked)
    assert first["seconds_per_phase"] == second["seconds_per_phase"]  # taken, so no two times
    assert first["figures"].keys() == second["figures"].keys() == {*run_queue.FIGURES}
    assert first["mean_rank"] == second["mean_rank"] > 0


def test_one_that_fails_does_not_keep_others_from_it(queue):
    wrong, right = queue("--recipes", "digits", "--seeds", "0", "--variants", "train.lr=none", " ".join(TINY))
    assert "train.lr" in wrong["error"] and "figures" in right


def test_graphs_are_held_against_eager_steps(queue, monkeypatch):
    """On a CPU nothing is recorded, so that both learn the same; a backbone that cannot be had is told."""
    monkeypatch.setattr(run_queue, "BACKBONES", [" ".join(["digits", *TINY]), "nowhere"])
    same, lost = queue("--check")
    assert "nowhere" in lost["error"]
    assert same["furthest apart"] == 0 and len(same["eager"]) == 2 + 8 + 2
