"""Runs with hidden boundaries: order, curve, and the same bits after a kill at any image."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pearl
from pearl.data.protocols import arrival_order
from pearl.errors import ConfigError, RunError
from pearl.evaluation.online_metrics import a_auc
from pearl.lifecycle.runs import execute as execute_tasks
from pearl.lifecycle.runs import prepare
from pearl.online.stream_run import Arrivals, OnlineRun, execute
from pearl.settings.config import OnlineRunConfig, check_config, load_config
from pearl.storage.checkpoint import read_part
from pearl.storage.run_directory import RunDirectory
from pearl.training.engine import Observer

SMALL = [
    "stream.per_class=16",
    "stream.test_per_class=4",
    "backbone.width=4",
    "train.epochs=1",
    "engine.precision=fp32",
]
SMALL += ["train.phases.probe.epochs=1", "online.batch_size=16", "online.evaluate_every=40"]
PEARL = ["online.learner.window=48", "online.learner.confused=0.0", "online.learner.projection=32"]


def small(*changes: str, learner: str = "pearl") -> OnlineRunConfig:
    own = PEARL if learner == "pearl" else []
    made = load_config("online-digits", [*SMALL, f"online.learner={learner}", *own, *changes])
    assert isinstance(made, OnlineRunConfig)
    return made


def bits(run: OnlineRun) -> tuple[list[Any], dict[str, bytes]]:
    tensors, _ = read_part(RunDirectory(run.path).online_states[-1])
    return run.results["curve"], {name: value.numpy().tobytes() for name, value in tensors.items()}


class Killed(Exception):
    """As a SIGKILL, but in this process."""


class KillAt(Observer):
    """Kills after some steps, of training or of the stream."""

    def __init__(self, steps: int) -> None:
        self.left = steps

    def step(self, done: int, total: int) -> None:
        self.left -= 1
        if not self.left:
            raise Killed


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> OnlineRun:
    return execute(small(), path=tmp_path_factory.mktemp("runs") / "whole", device="cpu")


def test_the_curve_has_powers_of_two_and_the_interval(whole: OnlineRun) -> None:
    seen = [(point.seen, point.regular) for point in whole.curve]
    assert seen == [(16, False), (32, False), (48, True), (64, False), (80, True), (128, True), (160, True)]
    assert whole.done
    assert whole.summary["a_auc"] == a_auc(whole.curve)
    assert [len(point.total) for point in whole.curve][-1] == 10
    assert (whole.curve[-1].total == 4).all()


def test_inspect_shows_when_and_why_it_grew(cli: Any, whole: OnlineRun) -> None:
    out, _ = cli("inspect", whole.path)
    assert "sub-network 1 was trained after 48 images, since " in out and "classes were confused" in out


def test_the_facts_of_a_run(whole: OnlineRun) -> None:
    facts = whole.results["facts"]
    assert facts["passes"] == 1 + len(facts["grown_at"][1:])  # the first sub-network replaced random features
    assert facts["grown_at"][0] == 48
    assert len(facts["reasons"]) == len(facts["grown_at"]) == 2
    assert facts["longest_pause_seconds"] > facts["seconds_per_image"] > 0
    assert whole.results["names"] != sorted(whole.results["names"])  # in order of appearance


@pytest.mark.parametrize("steps", [1, 3, 4, 6, 9, 12, 15])
def test_a_run_that_was_killed_gives_the_same_bits(whole: OnlineRun, tmp_path: Path, steps: int) -> None:
    """In the stream, and while a sub-network is trained."""
    with pytest.raises(Killed):
        execute(small(), path=tmp_path / "run", device="cpu", show=KillAt(steps))
    again = execute(small(), path=tmp_path / "run", device="cpu")
    assert bits(again) == bits(whole)


@pytest.mark.parametrize("learner", ["slda", "er", "derpp", "ncm"])
def test_every_learner_resumes(tmp_path: Path, learner: str) -> None:
    config = small(learner=learner)
    first = execute(config, path=tmp_path / "whole", device="cpu")
    with pytest.raises(Killed):
        execute(config, path=tmp_path / "cut", device="cpu", show=KillAt(6))
    assert bits(execute(config, path=tmp_path / "cut", device="cpu")) == bits(first)


def test_a_damaged_state_is_skipped(whole: OnlineRun, tmp_path: Path) -> None:
    execute(small(), path=tmp_path / "run", device="cpu", stop_at=96)
    (folder,) = RunDirectory(tmp_path / "run").online_states
    (folder / "weights.safetensors").write_bytes(b"damaged")
    assert bits(execute(small(), path=tmp_path / "run", device="cpu")) == bits(whole)


def test_a_finished_run_is_not_run_again(whole: OnlineRun) -> None:
    class Never(Observer):
        def step(self, done: int, total: int) -> None:
            raise Killed

    assert execute(small(), path=whole.path, show=Never()).done


def test_another_configuration_is_refused(whole: OnlineRun, tmp_path: Path) -> None:
    execute(small(), path=tmp_path / "run", device="cpu", stop_at=16)
    with pytest.raises(RunError, match="holds another configuration"):
        execute(small("seed=1"), path=tmp_path / "run", device="cpu")


# The stream


def test_classes_are_numbered_in_order_of_appearance() -> None:
    arrivals, facts = Arrivals.of(small("online.protocol=gaussian"), Observer())
    _, first = np.unique(arrivals.labels, return_index=True)
    assert first.tolist() == sorted(first)
    assert arrivals.test_labels.tolist() == np.repeat(np.arange(10), 4).tolist()
    assert facts["train_images"] == len(arrivals.images) == 160


def test_a_class_that_never_arrives_is_not_evaluated() -> None:
    """With 10 classes and 3 stages, 3 classes are disjoint and 6 are blurry."""
    arrivals, _ = Arrivals.of(small("online.stages=3"), Observer())
    assert len(arrivals.names) == 9
    assert arrivals.test_labels.tolist() == np.repeat(np.arange(9), 4).tolist()


def test_the_protocol_gets_the_images_in_the_order_of_the_data_set() -> None:
    """Not class by class: Si-Blurry redistributes the first of each stage."""
    config, made = small(), prepare(load_config("digits", ["stream.tasks=1", *SMALL[:2]]))
    rows = np.sort(made.stream.tasks[0].train)
    order = arrival_order(made.source.train.labels[rows], 10, config.online, config.seed)
    assert np.array_equal(Arrivals.of(config, Observer())[0].images, made.train[rows[order]])


def test_test_images_are_those_of_their_class() -> None:
    made = prepare(load_config("digits", ["stream.tasks=1", *SMALL[:2]]))
    task = made.stream.tasks[0]
    arrivals, _ = Arrivals.of(small(), Observer())
    for c, name in enumerate(arrivals.names):
        source = task.classes.index(name)
        expected = task.test_images(made.test)[task.test_labels == source]
        assert np.array_equal(arrivals.test_images[arrivals.test_labels == c], expected)
        train = task.train_images(made.train)[task.train_labels == source]
        of_class = arrivals.images[arrivals.labels == c]
        assert sorted(x.tobytes() for x in of_class) == sorted(x.tobytes() for x in train)


# Given boundaries

GIVEN = ["online.protocol=tasks", "online.boundaries=given", "online.learner.sub_networks=3"]


def test_given_boundaries_cut_batches_and_the_learner_grows_there(tmp_path: Path) -> None:
    """Five tasks of 32 images in batches of 12; the window holds more than a task."""
    run = execute(small(*GIVEN, "online.batch_size=12"), path=tmp_path / "run", device="cpu")
    facts = run.results["facts"]
    assert facts["grown_at"] == [32, 64, 96]  # the budget
    assert facts["reasons"] == ["since a stage with 2 classes had ended"] * 3
    assert 128 in [point.seen for point in run.curve]
    hidden = Arrivals.of(small("online.protocol=tasks"), Observer())[0]
    assert not hidden.ends and Arrivals.of(small(*GIVEN), Observer())[0].ends == (32, 64, 96, 128, 160)


def test_a_run_with_given_boundaries_resumes_with_the_same_bits(tmp_path: Path) -> None:
    """Killed while the second sub-network is trained."""
    first = execute(small(*GIVEN), path=tmp_path / "whole", device="cpu")
    with pytest.raises(Killed):
        execute(small(*GIVEN), path=tmp_path / "cut", device="cpu", show=KillAt(9))
    assert bits(execute(small(*GIVEN), path=tmp_path / "cut", device="cpu")) == bits(first)


@pytest.mark.slow
def test_with_given_boundaries_it_is_close_to_the_task_based_method(tmp_path: Path) -> None:
    """On all digits: at most 2 points below class statistics with as many sub-networks."""
    online = load_config("online-digits", GIVEN)
    assert isinstance(online, OnlineRunConfig)
    run = execute(online, path=tmp_path / "stream", device="cpu")
    tasks = load_config("digits", ["method.classifier=statistics"])
    done = execute_tasks(tasks, path=tmp_path / "tasks", device="cpu")
    assert run.summary["a_last"] > done.summary["class_il.final_pooled"] - 2
    assert run.summary["passes"] == 3


def test_tasks_are_those_of_the_task_based_run() -> None:
    config = small(*GIVEN)
    arrivals, _ = Arrivals.of(config, Observer())
    made = prepare(load_config("digits", SMALL[:2]))
    begin = 0
    for end, task in zip(arrivals.ends, made.stream.tasks, strict=True):
        assert {arrivals.names[c] for c in arrivals.labels[begin:end]} == {*task.classes}
        own = task.train_images(made.train)
        assert sorted(x.tobytes() for x in arrivals.images[begin:end]) == sorted(x.tobytes() for x in own)
        begin = end


# Settings


def test_a_learner_is_part_of_the_name_and_others_runs_keep_theirs() -> None:
    assert small().id.startswith("online-digits-pearl-seed0-")
    assert small(learner="slda").id != small(learner="ncm").id
    assert "online" not in load_config("digits").decides


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"learner": "slda", "protocoll": "x"}, "online.protocoll: unknown key; did you mean 'protocol'"),
        ({"learner": {"name": "slda", "M": 3}}, "online.learner.M: unknown"),
        ({}, "online.learner: missing"),
        ({"learner": "slda", "disjoint": 120}, "online.disjoint: "),
        ({"learner": "slda", "protocol": "random", "boundaries": "given"}, "protocol=random has no stages"),
    ],
)
def test_wrong_settings_are_named(change: dict[str, Any], complaint: str) -> None:
    raw = {**load_config("digits").model_dump(mode="json"), "online": change}
    with pytest.raises(ConfigError, match=complaint):
        check_config(raw)


def test_a_stream_of_several_tasks_has_known_boundaries() -> None:
    with pytest.raises(ConfigError, match=r"online hides the boundaries: set stream\.tasks=1"):
        small("stream.tasks=5")


# For users


def test_in_python_and_on_the_command_line(cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEARL_RUNS", str(tmp_path))
    changes = [*SMALL, "online.learner=slda"]
    out, _ = cli("run", "online-digits", *changes)
    assert "A_auc" in out and "1 pass per image" in out
    run = pearl.run("online-digits", quiet=True, **_nested(changes))
    assert isinstance(run, OnlineRun) and run.done
    listed, _ = cli("list", "runs")
    last = run.curve[-1].accuracy
    assert f"done, 160 images, A_auc {run.summary['a_auc']:.2f} %, A_last {last:.2f} %" in listed
    shown, _ = cli("show", run.path.name)
    assert shown.splitlines()[1:] == out.splitlines()[1:]
    resumed, _ = cli("resume", str(run.path))
    assert resumed == out


def _nested(changes: list[str]) -> dict[str, Any]:
    from pearl.settings.config import parse_overrides

    return json.loads(json.dumps(parse_overrides(changes)))  # type: ignore[no-any-return]


def test_a_sweep_compares_learners(cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEARL_RUNS", str(tmp_path / "runs"))
    made = [OnlineRun(tmp_path / "runs" / small(learner=name).id, small(learner=name)) for name in ("slda", "ncm")]
    runs = [execute(run.config, path=run.path, device="cpu") for run in made]
    output = tmp_path / "table.csv"
    cli("sweep", "online-digits", *SMALL, "online.learner=[slda,ncm]", "--seeds", 1, "-q", "-o", output)
    lines = [*csv.DictReader(output.read_text().splitlines())]
    for line, run in zip(lines, runs, strict=True):
        assert float(line["a_auc mean"]) == pytest.approx(run.summary["a_auc"])
        assert float(line["passes mean"]) == 1


@pytest.mark.parametrize("option", [["--dry-run"], ["--devices", "2"]])
def test_what_is_only_for_tasks_is_refused(cli: Any, option: list[str]) -> None:
    _, err = cli("run", "online-digits", *option, code=2)
    assert err.startswith(f"pearl: {option[0]}") and err.count("\n") == 1
