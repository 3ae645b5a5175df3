"""Grids, and many runs at once. Where only the scheduling is tested, a script of no torch stands for `pearl run`."""

import csv
import io
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from fake_runs import Fake, states
from pearl.errors import ConfigError, Interrupted
from pearl.lifecycle.runs import execute
from pearl.reports.records import read
from pearl.settings.config import load_config
from pearl.storage.locks import Lock, locked
from pearl.storage.run_directory import RunDirectory
from pearl.sweeps import jobs, local, slurm
from pearl.sweeps.jobs import Job, run_jobs
from pearl.sweeps.live_status import LineBoard, LiveBoard, LiveStatus, Position, Status
from pearl.sweeps.local import Local
from pearl.sweeps.sweep import parse, plan
from pearl.training import launch
from pearl.training.stop import Stop

pytestmark = pytest.mark.slow

TINY = ("backbone.width=4", "train.epochs=1", "engine.max_steps=1", "stream.per_class=4", "stream.test_per_class=2")


# The grid


def test_the_grid_is_the_product_times_the_seeds():
    sweep = parse("digits", ["train.epochs=5", "method=[er, lwf]", "train.lr=[0.1,0.01,0.001]"], "0,7")
    assert len(sweep.points) == 6
    assert [job.overrides for job in sweep.jobs[:3]] == [
        ("train.epochs=5", "method=er", "train.lr=0.1", "seed=0"),
        ("train.epochs=5", "method=er", "train.lr=0.1", "seed=7"),
        ("train.epochs=5", "method=er", "train.lr=0.01", "seed=0"),
    ]
    assert len({job.run for job in sweep.jobs}) == len(sweep.jobs) == 12
    assert sweep.jobs[0].title == "method=er train.lr=0.1 seed=0"


def test_a_sweep_has_one_directory_however_it_is_written():
    one = parse("digits", ["method=[er,lwf]", "train.lr=[0.1]"], "2")
    other = parse("digits", ["train.lr=0.1", "method=[lwf,er,er]"], "1,0")
    assert one.path == other.path != parse("digits", ["method=[er,lwf]", "train.lr=0.1"], "3").path


@pytest.mark.parametrize(
    ("item", "values"),
    [
        ("stream.tasks=[[2,8],5]", [[2, 8], 5]),  # a value that is a list itself
        ("method=[{name: er, buffer_size: 50}, lwf]", [{"name": "er", "buffer_size": 50}, "lwf"]),
        ("train.lr=[1e-3,0.00001]", ["1e-3", 0.00001]),  # YAML's own reading, as without brackets
        ("engine.precision=['fp32']", ["fp32"]),
    ],
)
def test_values_keep_their_meaning(item, values):
    key, _, _ = item.partition("=")
    actual = [job.config for job in parse("digits", [item]).jobs]
    for config, value in zip(actual, values, strict=True):
        assert config == load_config("digits", [f"{key}={json.dumps(value)}"])


@pytest.mark.parametrize(("text", "seeds"), [("3", (0, 1, 2)), ("0,1,5", (0, 1, 5)), ("5,", (5,)), ("4,4", (4,))])
def test_seeds(text, seeds):
    sweep = parse("digits", [], text)
    assert sweep.seeds == seeds
    assert [job.config.seed for job in sweep.jobs] == [*seeds]


@pytest.mark.parametrize(
    ("items", "seeds", "lines"),
    [
        (["train.lr=[]"], None, ["train.lr: has no value; write train.lr=[A,B]"]),
        (["train.lr=[1,"], None, ["train.lr: the value '[1,' is not valid YAML (did not find expected node"]),
        (["b]"], None, ["'b]' is not of the form key=value, such as train.lr=0.001"]),
        (["method=[er]", "method=lwf"], None, ["method: given twice; write all its values as method=[A,B]"]),
        (["seed=[0,1]"], None, ["seed=['0', '1']: means are over seeds; give them as --seeds 0,1,5"]),
        (["seed=1"], "2", ["seed: given twice; remove it, or --seeds"]),
        ([], "0", ["--seeds 0: give 1 to 10,000, or a list, such as 0,"]),
        ([], "999999999", ["--seeds 999999999: give 1 to 10,000, or a list, such as 0,"]),
        ([], f"1,{'9' * 5000}", ["--seeds 1,99999"]),
        (["train.lr=[1,2]", "train.epochs=[1,2,3]"], "5000", ["a grid of 30,000 jobs; give fewer values or seeds"]),
        ([], "a,1", ["--seeds a,1: give a number, such as 3, or a list, such as 0,1,5"]),
        (["method=[er,ewd]", "train.lr=[1,2]"], None, ["(in method=ewd train.lr=1 and 1 more)"]),
        (["method=[er,l2p]"], None, ["method l2p on resnet18: this method needs a plain ViT"]),
        (["train.epoch=[1,2]", "trian.lr=1"], "2", ["train.epoch: unknown key", "trian: unknown key"]),
    ],
)
def test_bad_axes_are_one_line_each(cli, items, seeds, lines):
    _, err = cli("sweep", "digits", *items, *(["--seeds", seeds] if seeds else []), code=2)
    actual = err.splitlines()
    assert len(actual) == len(lines)
    for line, words in zip(actual, lines, strict=True):
        assert line.startswith("pearl: ")
        assert words in line
    assert not Path(os.environ["PEARL_RUNS"]).exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["-o", "table.pdf"], "give the table a name that ends in .csv, .md, .json"),
        (["--workers", "0"], "--workers 0: give 1 or more"),
        (["--device", "tpu"], "--device tpu: cannot be used here; use auto, cpu or cuda"),
        (["--slurm", "partition"], "--slurm partition: write it as key=value, such as partition=gpu"),
    ],
)
def test_bad_options_are_one_line(cli, options, words):
    _, err = cli("sweep", "digits", *options, code=2)
    assert len(err.splitlines()) == 1
    assert words in err
    assert not Path(os.environ["PEARL_RUNS"]).exists()


# Scheduling


@pytest.fixture
def fake(tmp_path, monkeypatch):
    return Fake(tmp_path, monkeypatch)


def test_all_run_once_and_no_more_at_once_than_workers(fake):
    made = fake.jobs("well", "well", "well", "well")
    twice = [*made, Job("digits", ("train.lr=0.003", "seed=1"))]  # the recipe's own rate: the same configuration
    outcomes = run_jobs(twice, workers=2)
    assert states(outcomes) == ["done"] * 5
    assert [outcome.job for outcome in outcomes] == twice
    assert sorted(fake.lines("start")) == sorted(job.run.name for job in made)
    assert fake.most_at_once() == 2


def test_what_is_done_is_skipped(fake):
    made = fake.jobs("well", "well", "well")
    run_jobs(made[:2], workers=2)
    assert states(run_jobs(made, workers=2)) == ["skipped", "skipped", "done"]
    assert len(fake.lines("start")) == 3


def test_failures_are_isolated_say_why_and_are_tried_again(fake):
    made = fake.jobs("fail once", "refuse", "die", "well")
    outcomes = run_jobs(made, workers=3)
    assert states(outcomes) == ["failed", "failed", "failed", "done"]
    assert outcomes[0].error == "ValueError: no such luck"
    assert outcomes[1].error == "images are missing (and 1 more line)"
    assert outcomes[2].error.startswith("ended by signal 9 (Killed)")
    assert "Traceback ..." in outcomes[0].log.read_text()
    fake.jobs("well", "die", "refuse", "well")
    outcomes = run_jobs(made, workers=3)
    assert states(outcomes) == ["done", "failed", "failed", "skipped"]
    assert outcomes[1].error.startswith("ended by signal 9"), "of this time, though the log has all"
    assert "so are labels" in outcomes[1].log.read_text()
    fake.jobs("well", "refuse", "fail once", "well")
    assert run_jobs(made)[2].error == "ValueError: no such luck"


def test_one_that_cannot_be_started_is_isolated(fake, monkeypatch):
    made = fake.jobs("well")
    monkeypatch.setattr(launch, "COMMAND", ("/nowhere/python",))
    (outcome,) = run_jobs(made)
    assert (outcome.state, outcome.log) == ("failed", None)
    assert "No such file" in outcome.error


def test_a_damaged_run_fails_and_is_let_be(fake):
    made = fake.jobs("well", "well")
    made[0].run.mkdir(parents=True)
    (made[0].run / "results.json").write_text("{")
    outcomes = run_jobs(made)
    assert states(outcomes) == ["failed", "done"]
    assert "results.json: damaged" in outcomes[0].error
    assert (made[0].run / "results.json").read_text() == "{"


def test_a_locked_run_is_waited_for_while_others_run(fake):
    made = fake.jobs("well", "well")
    made[0].run.mkdir(parents=True)
    lock = Lock(made[0].run / ".lock", made[0].run / ".holder.json")
    lock.acquire()
    threading.Timer(1.0, lock.release).start()
    assert states(run_jobs(made, workers=1)) == ["done", "done"]
    assert fake.lines("start") == [made[1].run.name, made[0].run.name]


def test_a_lock_that_cannot_be_opened_is_not_waited_for(fake, monkeypatch):
    (made,) = fake.jobs("well")
    made.run.mkdir(parents=True)
    (made.run / ".lock").touch()
    monkeypatch.setattr(Lock, "held", lambda *_: (_ for _ in ()).throw(PermissionError(13, "denied")))
    assert not jobs.locked(made.run)
    assert states(run_jobs([made])) == ["done"], "whoever starts is told by the run itself"


def test_a_run_that_turns_out_to_be_busy_is_not_failed(fake):
    made = fake.jobs("busy once", "well")
    assert states(run_jobs(made, workers=2)) == ["done", "done"]


def test_where_jobs_are_stopped_from_outside_those_that_got_on_go_on(fake, monkeypatch):
    """As when their time on a cluster is up; one that gets nowhere would do so for ever."""
    made = fake.jobs("stop once", "stop")
    monkeypatch.setattr(Local, "again", True)
    assert states(run_jobs(made, workers=2)) == ["done", "failed"]
    made[0].run.rename(made[0].run.with_name("elsewhere"))
    monkeypatch.setattr(Local, "again", False)
    assert states(run_jobs(made, workers=2)) == ["failed", "failed"]


def test_two_sweeps_at_once_meet_well(fake):
    made = fake.jobs(*["well"] * 4)
    actual = {}
    other = threading.Thread(target=lambda: actual.update(other=run_jobs(made[::-1] + made[:1], workers=2)))
    other.start()
    actual["one"] = run_jobs(made, workers=2)
    other.join()
    assert set(states(actual["one"]) + states(actual["other"])) <= {"done", "skipped"}
    assert sorted(fake.lines("end")) == sorted(job.run.name for job in made)


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM])
def test_stopped_by_a_signal_the_same_call_goes_on(fake, kind):
    made = fake.jobs("well", "wait", "wait", "well")

    def stop():
        while len(fake.lines("start")) < 3:
            time.sleep(0.01)
        os.kill(os.getpid(), kind)

    threading.Thread(target=stop).start()
    with pytest.raises(Interrupted, match="not done: 3 of 4 runs"):
        run_jobs(made, workers=2)
    assert signal.getsignal(kind) in (signal.default_int_handler, signal.SIG_DFL, signal.SIG_IGN)
    assert made[3].run.name not in fake.lines("start")
    fake.jobs(*["well"] * 4)
    assert states(run_jobs(made, workers=2)) == ["skipped", "done", "done", "done"]


def test_bad_jobs_start_nothing(fake):
    made = fake.jobs("well")
    with pytest.raises(ConfigError) as error:
        run_jobs([*made, Job("digits", ("train.lr=-1",)), Job("digits", ("train.lr=-1", "seed=2"), name="second")])
    assert error.value.problems == (
        "train.lr: input should be greater than 0 (given: -1) (in digits train.lr=-1 and 1 more)",
    )
    assert fake.lines("start") == []


def test_a_machine_is_shared(monkeypatch):
    def of(cores, gpus=(), threads="", **options):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
        monkeypatch.setattr(local, "visible_gpus", lambda: [*gpus])
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
        made = Local(options.pop("workers", None), **options)
        assert len(made.environments) == made.workers
        return made.workers, [tuple(each.values()) for each in made.environments][:3]

    assert of(16) == (4, [("4",)] * 3)
    assert of(2) == (1, [("2",)])
    assert of(8, workers=3) == (3, [("2",)] * 3)
    assert of(2, workers=5) == (5, [("1",)] * 3)
    assert of(8, threads="1") == (8, [("1",)] * 3)
    assert of(16, gpus="03") == (2, [("8", "0"), ("8", "3")])
    assert of(16, gpus="03", per_gpu=2) == (4, [("4", "0"), ("4", "3"), ("4", "0")])
    assert of(16, gpus="03", device="cpu") == (4, [("4",)] * 3)


# What is shown


def events(*given):
    return "".join(json.dumps(event) + "\n" for event in given)


def test_where_a_run_is_comes_from_its_new_events(tmp_path):
    file = tmp_path / "events.jsonl"
    file.write_text(events({"event": "run", "tasks": 9, "done": 8}))
    position = Position(file)
    position.read()
    assert str(position) == "starting"
    with file.open("a") as more:
        more.write(
            events({"event": "run", "tasks": 5, "done": 1}, {"event": "phase", "task": 1, "phase": "probe", "steps": 7})
        )
        more.write('{"event": "epo')
    position.read()
    assert str(position) == "1/5 tasks learnt; probe, 7 steps"
    with file.open("a") as more:
        more.write(
            'ch", "task": 1, "phase": "probe", "epoch": 3, "loss": 0.5, "lr": 0.1, "seconds": 1.0, "time": ""}\n'
        )
    position.read()
    assert str(position) == "1/5 tasks learnt; probe, epoch 3 done, loss 0.500"
    with file.open("a") as more:
        more.write(events({"event": "learnt", "task": 1, "parameters": 9}))
    position.read()
    assert (str(position), position.learnt) == ("2/5 tasks learnt; evaluating", 2)


def test_how_much_is_left(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    ended, begun, waits, running = (tmp_path / name for name in ("ended", "begun", "waits", "running"))
    status = Status({ended: 4, begun: 4, waits: 4, running: 4})
    status.ended(ended, "skipped")
    status.begin({begun: 2, waits: 0, running: 0})
    assert status.left is None
    now[0] += 60
    position = Position(running / "events.jsonl")
    position.learnt = 3
    status.running = [("it", position, 60.0)]
    status.ended(begun, "done")
    assert status.share == pytest.approx((2 + 3) / 10)
    assert str(status) == "2 of 4 runs done, 1 running, 1 waiting, about 60 s left"


@pytest.mark.parametrize("kind", [LineBoard, LiveBoard])
def test_boards_show_where_all_are(kind, tmp_path, capsys):
    board, status = kind(), Status({tmp_path: 5})
    status.begin({tmp_path: 0})
    status.running = [("method=er seed=1", Position(tmp_path / "events.jsonl"), 61.0)]
    board.update(status)
    board.say("done: it")
    board.close()
    shown = capsys.readouterr().err
    assert "done: it" in shown
    if kind is LineBoard:
        waits = LineBoard()
        waits.update(Status({tmp_path: 5}))
        assert "0 of 1 runs done, 1 waiting" in capsys.readouterr().err
        assert "0 of 1 runs done, 1 running\n  method=er seed=1: starting; 61 s\n" in shown


# The real thing


@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    """Two methods with three seeds each, all done."""
    root = tmp_path_factory.mktemp("grid")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PEARL_RUNS", str(root))
        sweep = parse("digits", [*TINY, "method=[finetune,ncm]"], "3")
        for job in sweep.jobs:
            execute(job.config)
        assert sweep.path.parents[1] == root  # from now on, wherever the tests set PEARL_RUNS to
    return sweep


@pytest.fixture
def grid_here(grid, monkeypatch):
    monkeypatch.setenv("PEARL_RUNS", str(grid.path.parents[1]))
    return ["sweep", "digits", *TINY, "method=[finetune,ncm]", "--seeds", "3"]


def test_the_table_is_an_independent_calculation(grid, grid_here, cli, tmp_path):
    out, _ = cli(*grid_here, "-o", tmp_path / "table.csv", "-q")
    rows = list(csv.DictReader(io.StringIO((tmp_path / "table.csv").read_text())))
    assert [row["method"] for row in rows] == ["finetune", "ncm"]
    for row, point in zip(rows, grid.points, strict=True):
        results = [json.loads((job.run / "results.json").read_text())["stages"] for job in grid.jobs_of(point)]
        # equal tasks and test images: A_T is the share of right answers after the last one
        final = [100 * sum(stages[-1]["class_il"]) / sum(stages[-1]["total"]) for stages in results]
        average = [statistics.mean(100 * sum(s["class_il"]) / sum(s["total"]) for s in stages) for stages in results]
        for key, values in {"class_il.final": final, "class_il.average": average}.items():
            assert float(row[f"{key} mean"]) == pytest.approx(statistics.mean(values))
            assert float(row[f"{key} std"]) == pytest.approx(statistics.stdev(values))
        assert f"{statistics.mean(final):.2f} ± {statistics.stdev(final):.2f}" in out
        assert row["n"] == "3"
    assert any(float(row["task_il.final std"]) for row in rows), "seeds that give the same prove nothing"


def test_tables_for_people_and_for_programs(grid, grid_here, cli, tmp_path):
    cli(*grid_here, "-o", tmp_path / "table.md", "-q")
    cli(*grid_here, "-o", tmp_path / "table.json", "-q")
    head, rule, *lines = (tmp_path / "table.md").read_text().splitlines()
    assert head.startswith("| method | n | class-IL A_T |")
    assert rule.count("---") == head.count("|") - 1
    assert [line.split(" | ")[:2] for line in lines] == [["| finetune", "3"], ["| ncm", "3"]]
    rows = json.loads((tmp_path / "table.json").read_text())["rows"]
    assert rows[1]["settings"] == {"method": "ncm"}
    assert rows[1]["runs"] == [job.run.name for job in grid.jobs_of(grid.points[1])]
    manifest = json.loads((grid.path / "sweep.json").read_text())
    assert [job["run"] for job in manifest["jobs"]] == [job.run.name for job in grid.jobs]
    assert manifest["command"].startswith("pearl sweep digits backbone.width=4")


def test_a_dry_run_tells_what_is_done_and_how_long_the_rest_takes(grid, grid_here, monkeypatch):
    monkeypatch.setattr("pearl.sweeps.sweep.total_seconds", lambda run: 30.0 if "ncm" in run.path.name else 60.0)
    text = plan(parse("digits", [*TINY, "method=[finetune,ncm,lwf]"], "4"), workers=2)
    lines = text.splitlines()
    assert [line.split()[2] for line in lines[:12]] == [*["done"] * 3, "missing"] * 2 + ["missing"] * 4
    # one of finetune at 60 s, one of ncm at 30 s, four of lwf at the mean of 45 s, two at once
    assert "3 x 4 = 12 jobs, 12 runs: 6 done, 6 missing; about 2 min with 2 in parallel" in text  # 135 s
    assert not any("lwf" in path.name for path in grid.path.parents[1].iterdir())


def test_a_dry_run_counts_no_training_for_what_another_run_trains(grid, grid_here, monkeypatch):
    monkeypatch.setattr("pearl.sweeps.sweep.total_seconds", lambda run: 60.0)
    pearl = "{name: pearl, classifier: heads}, {name: pearl, classifier: {name: statistics, train: all}}"
    methods = f"method=[finetune, {pearl}]"
    text = plan(parse("digits", [*TINY, methods], "1"), workers=1)
    assert "3 runs: 1 done, 2 missing, of which 1 only fit" in text and "; about 60 s with 1 in parallel" in text


def test_a_run_that_fails_is_named_and_the_others_are_done(cli, forks, tmp_path):
    """BatchNorm cannot train on one image: known only once it trains."""
    items = [*TINY, "method=finetune", "train.batch_size=[1,8]"]
    _, err = cli("sweep", "digits", *items, "--workers", "2", "-o", tmp_path / "table.csv", code=1)
    bad, good = parse("digits", items).jobs
    *_, why, count = err.splitlines()
    assert why.startswith("pearl: train.batch_size=1: BatchNorm cannot train on a single image in phase finetune")
    log = Path(why.rpartition("; see ")[2])
    assert log.name == f"{bad.run.name}.log"
    assert "task 1/5" in log.read_text()
    assert count == "pearl: 1 run failed; fix the errors and run the same command again"
    assert f"done: {good.title}" in err
    rows = list(csv.DictReader(io.StringIO((tmp_path / "table.csv").read_text())))
    assert [(row["train.batch_size"], row["n"]) for row in rows] == [("1", "0"), ("8", "1")]
    assert float(rows[1]["class_il.final mean"]) == read(good.run).summary["class_il.final"]


@pytest.mark.usefixtures("forks")
def test_what_another_run_trains_is_waited_for_and_taken():
    heads, statistics = Job("digits", TINY), Job("digits", (*TINY, "method.classifier={name: statistics, train: all}"))
    assert statistics.source == heads.run and heads.source is None
    assert [outcome.state for outcome in run_jobs([statistics, heads], workers=2)] == ["done", "done"]
    for job, takes in ((heads, False), (statistics, True)):
        assert all(set(task.reused) == set(task.seconds) if takes else not task.reused for task in read(job.run).learnt)
    assert statistics.arguments[0] == "refit"
    next(heads.run.glob("tasks/*/weights.safetensors")).unlink()  # what it said alone is left
    assert statistics.arguments[0] == "run"
    assert Job("digits", (*statistics.overrides, "engine.reuse=false")).source is None
    assert Job("digits", (*TINY, "method.classifier={name: statistics, spaces: 2, train: spaces}")).source is None
    assert Job("digits", (*TINY, "method=finetune")).source is None


def test_a_killed_run_is_reported_and_finished_by_the_next_call(forks):
    settings = ("backbone.width=4", "stream.classes=4", "stream.tasks=2", "stream.per_class=16", "train.epochs=40")
    job = Job("digits", (*settings, "method=finetune"))

    class Killer(LiveStatus):
        def update(self, status):
            for _, position, _ in status.running:
                if "epoch" in str(position):
                    os.kill(json.loads((job.run / ".holder.json").read_text())["pid"], signal.SIGKILL)

    (outcome,) = run_jobs([job], show=Killer())
    assert outcome.state == "failed"
    assert outcome.error.startswith("ended by signal 9")
    assert not RunDirectory(job.run).is_done
    (outcome,) = run_jobs([job])
    assert outcome.state == "done"
    assert RunDirectory(job.run).is_done


@pytest.fixture
def foreign_folder(tmp_path, monkeypatch):
    """A current folder with Python files named as what is imported, each of which raises."""
    folder = tmp_path / "foreign"
    folder.mkdir()
    for name in ("json", "pearl", "typer", "torch", "numpy", "submitit"):
        (folder / f"{name}.py").write_text("raise RuntimeError('code of the current folder was run')")
    monkeypatch.chdir(folder)
    return folder


def test_what_is_started_runs_no_file_of_the_current_folder(foreign_folder):
    with (foreign_folder / "said").open("w+b") as said:
        process = launch.child(["--help"], {}, said)
        assert process.wait() == 0, (foreign_folder / "said").read_text()
        process.stdin.close()


def test_a_busy_run_has_its_own_exit_code(cli):
    run = load_config("digits", TINY).id
    location = Path(os.environ["PEARL_RUNS"]) / run
    location.mkdir(parents=True)
    with locked(location):
        _, err = cli("run", "digits", *TINY, "-q", code=launch.BUSY)
    assert "is working on it" in err


# SLURM


def test_through_submitit_without_slurm(foreign_folder, monkeypatch):
    """Where Python files lie that nobody asked for; none of the three processes that are started imports them."""
    pytest.importorskip("submitit")
    monkeypatch.setenv("PYTHONSAFEPATH", "")
    job = Job("digits", (*TINY, "method=ncm"))
    (outcome,) = run_jobs([job], executor="submitit-local")
    assert (outcome.state, outcome.error) == ("done", "")
    assert "class-IL after the last task" in outcome.log.read_text()


def test_options_of_sbatch_keep_their_meaning():
    given = ["time=10:00:00", "cpus-per-task=8", "exclusive=true", "mem=32GB"]
    actual = slurm.parse_options(given)
    assert actual == {"time": "10:00:00", "cpus_per_task": 8, "exclusive": True, "mem": "32GB"}


def test_without_slurm_there_is_one_line(cli, monkeypatch):
    pytest.importorskip("submitit")
    monkeypatch.setenv("PATH", "/nowhere")
    _, err = cli("sweep", "digits", "--executor", "slurm", "-q", code=2)
    assert err == "pearl: --executor slurm: srun not found; run this on a machine with SLURM's commands\n"


@pytest.mark.parametrize("workers", [0, -1])
def test_slurm_has_at_least_one_worker(fake, workers):
    pytest.importorskip("submitit")
    with pytest.raises(ConfigError, match=f"--workers {workers}: give 1 or more"):
        run_jobs(fake.jobs("well"), executor="submitit-local", workers=workers)


def test_one_that_cannot_be_cancelled_does_not_keep_the_others_from_it():
    cancelled = []

    def cancel(check=True):
        cancelled.append(check)
        if check:
            raise subprocess.CalledProcessError(1, "scancel")
        raise FileNotFoundError("scancel")

    slurm._Submitted(SimpleNamespace(cancel=cancel), real=True).stop()
    assert cancelled == [False]


@pytest.mark.parametrize(
    ("says", "ends"),
    [
        ("echo RUNNING", None),
        ("echo TIMEOUT", "ended as TIMEOUT; see job.err"),
        ("echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1", "ended as FORGOTTEN; see job.err"),
        ("echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1", None),
    ],
)
def test_slurm_is_asked_about_a_job_that_says_nothing(tmp_path, monkeypatch, says, ends):
    (tmp_path / "squeue").write_text(f"#!/bin/sh\n{says}\n")
    (tmp_path / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(slurm, "ASK", 0.0)
    paths = SimpleNamespace(result_pickle=tmp_path / "result", stderr="job.err")
    job = slurm._Submitted(SimpleNamespace(paths=paths, job_id="7"), real=True)
    assert job.poll() is None, "its exit code may be on its way"
    assert job.poll() == ends


def test_on_a_node_the_run_is_told_once_whoever_hears_the_signal(fake):
    (job,) = fake.jobs("wait")
    code = "import os, sys; from pearl.sweeps import slurm; from pearl.training import launch; "
    code += f"launch.COMMAND = {launch.COMMAND!r}; "
    code += "os._exit(slurm.on_node(sys.argv[2:], sys.argv[1]))"  # a Python that winds up is deaf to no signal
    node = subprocess.Popen([sys.executable, "-c", code, os.devnull, *job.arguments])
    while not fake.lines("start"):
        time.sleep(0.01)
    run = int(fake.ledger.read_text().split()[2])
    for kind in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        os.kill(run, kind)
    with pytest.raises(subprocess.TimeoutExpired):
        node.wait(timeout=0.3)
    node.send_signal(signal.SIGUSR2)
    node.send_signal(signal.SIGTERM)
    assert node.wait(timeout=30) == 130


def test_a_run_that_was_started_deaf_to_sigterm_stays_so():
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with Stop().caught():
            assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
            assert signal.getsignal(signal.SIGINT) not in (signal.SIG_IGN, signal.default_int_handler)
    finally:
        signal.signal(signal.SIGTERM, before)
